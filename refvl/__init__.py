"""refvl: readable, runnable vision encoders of modern vision-language models, and the machinery around them.

    import refvl
    model = refvl.load("tiny-qwen2_5_vl")
    print(model.chat("What color is the circle?", images=["scene.png"]))

"scene.png" is the name of a shipped image; any path works. `load` returns a `VLM`, whose `trace`
method returns a `Trace`. Start reading at `refvl/pipeline.py`. The stages from image to text are
folders that are imported on first use: `refvl.positions`, `refvl.graphs`, ...
"""

import importlib

__version__ = "0.1.0"
__all__ = ["VLM", "Trace", "compare", "data", "load"]
# __init__.pyi declares the names for type checkers and editors
_HOME = {
    "data": "refvl.paths", "load": "refvl.loading", "VLM": "refvl.model",
    "Trace": "refvl.study.report", "compare": "refvl.study.comparison",
}  # fmt: skip
_ROOMS = {
    **{name: f"refvl.{name}" for name in (
        "attention", "checkpoints", "encoders", "families", "graphs", "language", "merge",
        "pipeline", "pixels", "positions", "processors", "serving", "study", "tools", "viz",
    )},
    **{name: f"refvl.serving.{name}" for name in ("adapters", "export", "parallel")},
    **{name: f"refvl.study.{name}" for name in ("boxes", "comparison", "watch")},
}  # fmt: skip


def __getattr__(name: str):  # lazy, because transformers is slow to import and `refvl.positions` does not need it
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name not in _ROOMS:
        raise AttributeError(f"module 'refvl' has no attribute {name!r}")
    try:
        return importlib.import_module(_ROOMS[name])
    except ImportError as error:  # tools that inspect a module, such as `help`, expect this type of error
        raise AttributeError(f"refvl.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return [*_HOME, *_ROOMS, *(name for name in globals() if name.startswith("__"))]
