"""Tiny towers with random weights, and transformers' towers with the same weights: for tests."""

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from refvl.encoders import (
    Glm4vVisionTransformer,
    GlmOcrVisionTransformer,
    Qwen2_5_VisionTransformer,
    Qwen3_5VisionTransformer,
    Qwen3VLVisionTransformer,
)
from refvl.encoders.grid import GridEncoder

CLASSES: dict[str, type[GridEncoder]] = {
    "qwen2_5_vl": Qwen2_5_VisionTransformer,
    "glm4v": Glm4vVisionTransformer,
    "glm4v_moe": Glm4vVisionTransformer,
    "glm_ocr": GlmOcrVisionTransformer,
    "qwen3_vl": Qwen3VLVisionTransformer,
    "qwen3_5": Qwen3_5VisionTransformer,
}


# of the classes of transformers, "VisionConfig" and "VisionModel" aside
NAMES = {"glm4v": "Glm4v", "glm4v_moe": "Glm4vMoe", "glm_ocr": "GlmOcr", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}


def golden(name: str) -> tuple[dict, dict[str, Tensor]]:
    """(values, arrays) of the files `name` in tests/golden: arrays stored as float16 are exact, and float32 here."""
    path = Path(__file__).parent / "golden" / name
    arrays = {key: torch.from_numpy(array) for key, array in np.load(path.with_suffix(".npz")).items()}
    arrays = {key: x.float() if x.is_floating_point() else x for key, x in arrays.items()}
    return json.loads(path.with_suffix(".json").read_text()), arrays


def randomize(module: nn.Module, std: float, seed: int = 0) -> nn.Module:
    """Normal weights, biases and norms too, so that each of them counts; scales of norms lie around
    one."""
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        is_scale = name.endswith("weight") and ("norm" in name or "ln_" in name)
        nn.init.normal_(parameter, mean=float(is_scale), std=std)
    return module.eval()


def transformers_tower(family: str, config, *, std: float, **kwargs) -> nn.Module:
    """transformers' tower of a refvl vision config."""
    theirs = import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "qwen2_5_vl":
        Config, Tower = theirs.Qwen2_5_VLVisionConfig, theirs.Qwen2_5_VisionTransformerPretrainedModel
    else:
        Config, Tower = (getattr(theirs, NAMES[family] + kind) for kind in ("VisionConfig", "VisionModel"))
    values = {name: value for name, value in asdict(config).items() if name != "norm_eps"}
    with torch.device("meta"):
        tower = Tower(Config(**values, **kwargs))
    tower.to_empty(device="cpu")
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config)  # its frequencies are a buffer, not a weight
    return randomize(tower, std)


def same_weights(family: str, tower: nn.Module, config, **kwargs) -> GridEncoder:
    """refvl's tower with the weights of transformers'."""
    with torch.device("meta"):
        encoder = CLASSES[family].from_config(config, **kwargs)
    encoder.to_empty(device="cpu").load_weights(tower.state_dict().items())
    return encoder.eval()


def frames_of(grids) -> list[tuple[int, int, int]]:
    """Every frame as an item of its own."""
    return [(1, h, w) for t, h, w in grids for _ in range(t)]


@torch.no_grad()
def run_theirs(tower: nn.Module, patches: Tensor, grids) -> Tensor:
    """As frames: no tower of transformers' looks across them, and GLM-4.1V's model splits videos
    before its tower."""
    output = tower(patches, torch.tensor(frames_of(grids)))
    return torch.cat([output.pooler_output, *(output.get("deepstack_features") or [])], dim=1)


def random_rows(count: int, values: int, seed: int = 1) -> Tensor:
    return torch.randn(count, values, generator=torch.Generator().manual_seed(seed))


def random_patches(grids, config, seed: int = 1) -> Tensor:
    return random_rows(sum(t * h * w for t, h, w in grids), config.patch_values, seed)
