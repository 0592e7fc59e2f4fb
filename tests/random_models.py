"""One random checkpoint of each family in its genuine layout, made and loaded once in a process.

A test that changes a model or its folder makes one of its own (`make`).
"""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from checkpoint_factory import make_checkpoint, make_glm_checkpoint, make_qwen3_checkpoint, make_step3_checkpoint
from checkpoint_factory_minicpmv import VERSIONS, make_minicpmv_checkpoint

import refvl

MAKERS: dict[str, Callable[..., Path]] = {
    "Qwen2.5-VL": make_checkpoint,
    **{name: partial(make_qwen3_checkpoint, model_type=name) for name in ("qwen3_vl", "qwen3_5")},
    "GLM-4.1V": partial(make_glm_checkpoint, model_type="glm4v", processor_class="Glm4vProcessor"),
    "GLM-4.6V": partial(make_glm_checkpoint, model_type="glm4v_moe", processor_class="Glm46VProcessor"),
    "GLM-OCR": partial(make_glm_checkpoint, model_type="glm_ocr", processor_class="Glm46VProcessor"),
    **{f"MiniCPM-V {version}": partial(make_minicpmv_checkpoint, version=version) for version in VERSIONS},
    "Step3-VL": make_step3_checkpoint,
}
WITHOUT_VIDEOS = ("MiniCPM-V 2.0", "MiniCPM-V 2.5", "Step3-VL")


def make(name: str, folder: Path) -> Path:
    """Write a checkpoint of this family to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return MAKERS[name](folder)


@cache
def _place() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="refvl-random-")  # removed when the process ends


@cache
def random_folder(name: str) -> Path:
    return make(name, Path(_place().name) / name)


@cache
def random_model(name: str) -> refvl.VLM:
    return refvl.load(random_folder(name), device="cpu", progress=False)
