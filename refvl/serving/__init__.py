"""Features for daily use. `refvl.model` imports these features when its methods are called; the
stages do not depend on them.

options.py       the options of `generate`; unsupported ones raise errors before anything is encoded
streaming.py     text as it is generated
batches.py       chat_batch: many requests, decoded together; requests.py reads them from a file
tensors.py       `generate`, called on tensors as in transformers
long_prompts.py  prefill_chunk: prefill a prompt N tokens at a time
features.py      the tower alone, and images as grids of features; media_cache.py avoids encoding an item twice
adapters.py      LoRA on text model, connector and tower
parallel.py      one encoder on many devices
export.py        media to embeddings on disk, and from there to vLLM
linear.py        a faster kernel for linear layers in float32 on a CPU
"""
