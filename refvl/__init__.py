"""refvl: readable, runnable vision encoders of modern vision-language models, and the machinery around them.

    import refvl
    model = refvl.load("data/checkpoints/tiny-qwen2_5_vl")
    print(model.chat("What color is the circle?", images=["data/pictures/scene.png"]))

Start reading at `refvl/pipeline.py`.
"""

__version__ = "0.1.0"
__all__ = ["VLM", "Trace", "load"]


def __getattr__(name: str):  # transformers is slow to import: `import refvl.positions` should not pay for it
    if name in __all__:
        from refvl import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'refvl' has no attribute {name!r}")
