"""Every family that graphs capture, with small random weights: encoder, manager, and layouts of
mixed batches."""

import random
from dataclasses import dataclass

import torch
from towers import CLASSES, randomize

from refvl.encoders import MiniCPMV4_6Encoder, Step3VisionEncoder, StepVLEncoder
from refvl.families import FAMILIES as ROWS
from refvl.graphs import EncoderGraphManager
from refvl.pixels.slices import SliceGroup

ENCODERS = {family.version: family.encoder for family in ROWS if family.version}  # of MiniCPM-V
NAVIT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 98}
TIMM = {"img_size": 56, "patch_size": 14, "embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}
VIDEO = (SliceGroup(((3, 4), (3, 4), (2, 5)), (2, 6, 49)), SliceGroup(((3, 3),), (60,)), SliceGroup(((4, 4), (1, 2))))
NAMES = {"Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl", "GLM-4.1V": "glm4v", "GLM-OCR": "glm_ocr"}
GRIDS = {family: CLASSES[name] for family, name in NAMES.items()}
SQUARES = {"Step3-VL": Step3VisionEncoder, "Step3-VL-10B": StepVLEncoder}
FOLDED = {"MiniCPM-V 4.6": MiniCPMV4_6Encoder}
MINICPMV = {
    "hidden_size": 48, "query_num": 4, "scale_resolution": 56,
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 98, "patch_size": 14,
    },
}  # fmt: skip
FAMILIES = [*GRIDS, "MiniCPM-V 2.5", "MiniCPM-V 2.6", "MiniCPM-V 4.0", "MiniCPM-V 4.5", *FOLDED, *SQUARES]


def minicpmv(version: str, **changes) -> torch.nn.Module:
    """MiniCPM-V's encoder with random weights."""
    config = {"version": version, "hidden_size": 64, "query_num": 4, "scale_resolution": 56}
    config["vision_config"] = TIMM if version == "2.0" else NAVIT
    return randomize(ENCODERS[version].from_config(config | changes), 0.15)


def build(family: str, seed: int = 0):
    """The encoder with wide random weights, so that a wrong row or a stale one is far off.

    Attention is sharp, and positions weigh as much as pixels: with zeros in their place outputs
    move by a tenth.
    """
    if tower := (GRIDS | SQUARES | FOLDED).get(family):
        encoder = tower(tower.config_class.tiny())
    else:
        encoder = ENCODERS[family.split()[-1]].from_config(MINICPMV)
    encoder = randomize(encoder, 0.2, seed)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "patch_embed" in name:
                parameter /= 0.2 * parameter[0].numel() ** 0.5
            elif "pos_embed" in name or "position_embedding" in name:
                parameter *= 10
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter *= 1.5
            elif name.endswith("attn.in_proj_weight"):  # of a resampler
                parameter *= 2
            elif name.endswith("ln_kv.weight"):  # its positions are added behind it
                parameter *= 0.3
    return encoder


def manager_of(encoder, **options):
    """Small budgets, so that batches of the layouts below replay, are split and run eagerly."""
    if isinstance(encoder, Step3VisionEncoder):
        limits = {"budgets": {"local": [3, 6], "global": [4, 8]}, "max_items": 3}
    else:
        limits = {"budgets": [8, 16], "max_items": 3, "max_frames": 4}
    return EncoderGraphManager(encoder, **limits | options, progress=False)


def draw_layouts(family: str, draw: random.Random) -> list:
    """One to four items: pictures, clips, and now and then one too large for every graph."""
    return [_draw_layout(family, draw) for _ in range(draw.randint(1, 4))]


def _draw_layout(family: str, draw: random.Random):
    if family in GRIDS:
        return draw.choice([1, 1, 2]), 2 * draw.randint(1, 4), 2 * draw.randint(1, 5)
    if family in SQUARES:
        return draw.choice([(0, 0), (1, 1), (1, 2), (2, 2), (2, 4)])
    if family in FOLDED:
        return tuple((4 * draw.randint(1, 3), 4 * draw.randint(1, 3)) for _ in range(draw.choice([1, 2, 3])))
    slices = tuple((draw.randint(1, 5), draw.randint(1, 5)) for _ in range(draw.choice([1, 2, 3, 5])))
    if family == "MiniCPM-V 4.5" and draw.random() < 0.5:
        return (SliceGroup(slices, tuple(draw.randint(0, 300) for _ in slices)),)
    return slices


@dataclass(frozen=True)
class Case:
    """A batch and what the eager encoder makes of each of its items alone."""

    rows: torch.Tensor
    layouts: list
    wanted: list[torch.Tensor]


@torch.no_grad()
def make_case(encoder, layouts: list, seed: int = 0) -> Case:
    checked = encoder.check_layouts(layouts)
    counts = [encoder.item_size(layout)[0] for layout in checked]
    values = getattr(encoder.config, "vision", encoder.config).patch_values
    rows = torch.randn(sum(counts), values, generator=torch.Generator().manual_seed(seed)).to(encoder.dtype)
    return Case(rows, layouts, [encoder(part, [x]) for part, x in zip(rows.split(counts), layouts, strict=True)])


def distance(outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest relative difference of an item, as a share of its norm."""
    pairs = [(out.double(), want.double()) for out, want in zip(outputs, wanted, strict=True)]
    assert all(out.shape == want.shape for out, want in pairs)
    return max(((out - want).norm() / want.norm()).item() for out, want in pairs)


@torch.inference_mode()
def poison(manager) -> None:
    """NaN in every pixel buffer and in everything that the graphs compute; integers and masks get a
    wrong value."""
    for captured in manager.captured.values():
        captured.pixel_values.fill_(float("nan"))
        for out in (out for operation in captured.graph.operations for out in operation.outputs):
            out.fill_(float("nan") if out.is_floating_point() else 1)
