"""refvl: readable, runnable vision encoders of modern vision-language models, and the machinery around them.

    import refvl
    model = refvl.load("data/checkpoints/tiny-qwen2_5_vl")
    print(model.chat("What color is the circle?", images=["data/pictures/scene.png"]))

Start reading at `refvl/pipeline.py`.
"""

import importlib

__version__ = "0.1.0"
__all__ = ["VLM", "Trace", "load"]
_HOME = {"VLM": "refvl.pipeline", "Trace": "refvl.trace", "load": "refvl.loading"}


def __getattr__(name: str):  # transformers is slow to import: `import refvl.positions` should not pay for it
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'refvl' has no attribute {name!r}")
