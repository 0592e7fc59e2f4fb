"""Features for daily use. `refvl.pipeline` can be read without them.

model.py         the `VLM` that `refvl.load` returns: options checked first, then streams, traces, chunks and drafts
options.py       the options of `generate`; unsupported ones raise errors before anything is encoded
batches.py       chat_batch: many requests, decoded together; requests.py reads them from a file
tensors.py       `generate`, called on tensors as in transformers
long_prompts.py  prefill_chunk: prefill a prompt N tokens at a time; drafts.py: drafted tokens
tower.py         the tower alone, and images as grids of features; media_cache.py avoids encoding an item twice
adapters.py      LoRA on text model, connector and tower
parallel.py      one encoder on many devices
export.py        a folder of media to embeddings on disk; handover.py passes them to an engine
linear.py        a faster kernel for linear layers in float32 on a CPU
"""
