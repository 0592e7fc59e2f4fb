"""Pixels that no version of Pillow changes: the width is resized before the height.

Oracles: digests under Pillow 12.3, whose single call does so; transformers' torchvision processor.
"""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import refvl
from refvl.paths import DATA
from refvl.pixels.crops import cut_crops
from refvl.pixels.images import load_image
from refvl.pixels.patch_configs import Glm4vPatchConfig, Qwen3VLPatchConfig
from refvl.pixels.patches import PatchConfig, levels_of_frames, levels_of_image
from refvl.pixels.slices import SliceConfig, slice_image

GOLDEN = Path(__file__).parents[1] / "golden" / "pillow_12.json"
RULES = {  # the images that the family's tower sees, before normalisation
    "Qwen2.5-VL": lambda image: [levels_of_image(image, PatchConfig())[0].values],
    "Qwen3-VL": lambda image: [levels_of_image(image, Qwen3VLPatchConfig())[0].values],
    "GLM": lambda image: [levels_of_image(image, Glm4vPatchConfig())[0].values],
    "MiniCPM-V": lambda image: slice_image(image, SliceConfig()),
    "Step3": lambda image: [cut_crops(image)[0], *cut_crops(image)[1]],
}
# Pillow 13.0 resizes the height of some of these first, under every rule
SIZES = [(283, 293), (600, 400), (447, 449), (320, 1000), (1000, 1100), (3100, 900)]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def digests(rule: str) -> dict[str, str]:
    """What golden/pillow_12.json holds, written with Pillow 12.3 and one call of it as `resize`."""
    parts = {f"{w} x {h}": RULES[rule](noise(w, h)) for w, h in SIZES}
    return {size: sha256(b"".join(np.asarray(x).tobytes() for x in made)).hexdigest() for size, made in parts.items()}


@pytest.mark.parametrize("rule", RULES)
def test_pixels_are_those_of_pillow_12(rule):
    assert digests(rule) == json.loads(GOLDEN.read_text())[rule]


def test_torchvision_on_request_and_the_trace_says_so():
    """Oracle: transformers' torchvision processor where there is one; else the frames' own resize, held in
    test_patches.py."""
    model = refvl.load("tiny-qwen2_5_vl", device="cpu", progress=False)
    assert model.trace("Hi", max_new_tokens=1).resizer.startswith("Pillow 1")
    model.processor.image_config = config = replace(model.processor.image_config, resize="torchvision")
    trace = model.trace("Hi", images=[DATA / "pictures" / "coffee.jpg"], max_new_tokens=1)
    assert trace.resizer == f"torch {torch.__version__}"
    [rows] = [patches.pixel_values for patches in trace.patches]
    assert torch.equal(rows, levels_of_frames(np.array(trace.media[0])[None], config)[0].normalize())
    with pytest.raises(ValueError, match="lanczos: resize accepts no such argument; allowed: pillow, torchvision"):
        replace(config, resize="lanczos")
    pytest.importorskip("torchvision")
    from transformers import Qwen2VLImageProcessor

    size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    theirs = Qwen2VLImageProcessor(size=size)(load_image(DATA / "pictures" / "coffee.jpg"), return_tensors="pt")
    assert torch.equal(rows, theirs["pixel_values"])
