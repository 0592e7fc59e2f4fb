"""One random checkpoint of each family in its genuine layout, made and loaded once in a process.

A test that changes a model or its folder makes one of its own (`make`).
"""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from checkpoint_factory import (
    make_checkpoint,
    make_folded_checkpoint,
    make_glm_checkpoint,
    make_qwen3_checkpoint,
    make_step3_checkpoint,
    make_step_vl_checkpoint,
)
from checkpoint_factory_minicpmv import VERSIONS, make_minicpmv_checkpoint
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import refvl
from refvl.families import FAMILIES, Family

MAKERS: dict[str, Callable[..., Path]] = {
    "Qwen2.5-VL": make_checkpoint,
    **{name: partial(make_qwen3_checkpoint, model_type=name) for name in ("qwen3_vl", "qwen3_5")},
    "GLM-4.1V": partial(make_glm_checkpoint, model_type="glm4v", processor_class="Glm4vProcessor"),
    "GLM-4.6V": partial(make_glm_checkpoint, model_type="glm4v_moe", processor_class="Glm46VProcessor"),
    "GLM-OCR": partial(make_glm_checkpoint, model_type="glm_ocr", processor_class="Glm46VProcessor"),
    **{f"MiniCPM-V {version}": partial(make_minicpmv_checkpoint, version=version) for version in VERSIONS},
    "Step3-VL": make_step3_checkpoint,
}
MORE: dict[str, Callable[..., Path]] = {  # families that differ from those above in their processor alone
    name: partial(make_glm_checkpoint, model_type=name, processor_class="Glm46VProcessor")
    for name in ("glm46v", "glmga")
}
OTHERS: dict[str, Callable[..., Path]] = {  # further pairs of a text model and a processor
    **{name: partial(make_qwen3_checkpoint, model_type=name) for name in ("qwen3_vl_moe", "qwen3_5_moe")},
    "GLM-4.6V-Flash": partial(make_glm_checkpoint, model_type="glm4v", processor_class="Glm46VProcessor"),
    "GLM-4.5V": partial(make_glm_checkpoint, model_type="glm4v_moe", processor_class="Glm4vProcessor"),
}
# whether this transformers has the oracles of the families that came with 5.23
HAS_5_23 = all(name in CONFIG_MAPPING for name in ("step3p7", "minicpmv4_7"))
NEEDS_5_23 = pytest.mark.skipif(not HAS_5_23, reason="transformers before 5.23 lacks the oracle")
NEWER: dict[str, Callable[..., Path]] = {
    "Step3-VL-10B": partial(make_step_vl_checkpoint, model_type="step_robotics"),
    "Step-3.7": partial(make_step_vl_checkpoint, model_type="step3p7"),
    "MiniCPM-V 4.6": partial(make_folded_checkpoint, model_type="minicpmv4_6"),
    "MiniCPM-V 4.7": partial(make_folded_checkpoint, model_type="minicpmv4_7"),
}
if HAS_5_23:
    MAKERS |= NEWER | {"MiniCPM-V 4.6, 4x": partial(make_folded_checkpoint, model_type="minicpmv4_6", mode="4x")}
# one for each row of `refvl.families.FAMILIES`, in their order
RANDOM = ["Qwen2.5-VL", "qwen3_vl", "qwen3_5", "GLM-4.1V", "GLM-4.6V", *MORE, "GLM-OCR", "Step3-VL"]
RANDOM += ["Step3-VL-10B", "Step-3.7", *(f"MiniCPM-V {version}" for version in (*VERSIONS, "4.6", "4.7"))]
RANDOM = [name for name in RANDOM if HAS_5_23 or name not in NEWER]
WITH_PATHS = ("Step3-VL", "Step3-VL-10B", "Step-3.7")  # graphs of crops and overviews
WITHOUT_VIDEOS = ("MiniCPM-V 2.0", "MiniCPM-V 2.5", *WITH_PATHS)


def rows() -> dict[str, Family]:
    """The row of each name in `RANDOM`."""
    return dict(zip(RANDOM, [f for f in FAMILIES if HAS_5_23 or f.name not in NEWER], strict=True))


def load(folder: Path, **options) -> refvl.VLM:
    return refvl.load(folder, device="cpu", progress=False, **options)


def integers(bits: int, group: int):
    """For `quantization_config`: integers of `bits`, groups of values sharing a scale."""
    pytest.importorskip("torchao", reason="needs pip install -e '.[quantized]'")
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    return TorchAoConfig(quant_type=IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(group)))


def make(name: str, folder: Path) -> Path:
    """Write a checkpoint of this family to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return (MAKERS | MORE | OTHERS)[name](folder)


@cache
def _place() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="refvl-random-")  # removed when the process ends


@cache
def random_folder(name: str) -> Path:
    return make(name, Path(_place().name) / name)


@cache
def random_model(name: str) -> refvl.VLM:
    return load(random_folder(name))


@cache
def their_model(name: str):
    """transformers' whole model of the same folder, in float32."""
    return AutoModelForImageTextToText.from_pretrained(random_folder(name), dtype=torch.float32).eval()
