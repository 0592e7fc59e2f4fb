"""What running it every day adds to the journey in `refvl.pipeline`, which is read without it.

model.py         the `VLM` that `refvl.load` gives: options checked first, then streams, traces, chunks and drafts
options.py       what `generate` is asked for, refused before anything is encoded
batches.py       chat_batch: many requests, decoded together; requests.py reads them from a file
tensors.py       generate: transformers' call, on tensors
long_prompts.py  prefill_chunk: a prompt N tokens at a time; drafts.py: tokens guessed ahead
tower.py         the tower alone, and images as grids of features; media_cache.py encodes nothing twice
adapters.py      LoRA on text model, connector and tower
parallel.py      one encoder on many devices
export.py        a folder of media to embeddings on disk; handover.py gives them to an engine
linear.py        a faster kernel of linear layers in float32 on a CPU
"""
