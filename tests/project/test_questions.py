"""docs/questions.md: what it points to is there, and what it says is so. Oracles: files, notebooks, tests, sums."""

import ast
import json
import math
import re
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import refvl
from refvl.pixels.crops import count_prompt_tokens, cut_crops, plan_crops
from refvl.pixels.images import load_image, resize
from refvl.pixels.patch_configs import Qwen3VLPatchConfig
from refvl.pixels.patches import PatchConfig, resize_frames
from refvl.positions.mrope import grid_positions

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "questions.md").read_text()


def headings(notebook: Path) -> set[str]:
    cells = json.loads(notebook.read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).splitlines()]
    return {line.lstrip("#").strip() for line in lines if line.startswith("#")}


def test_links_lead_to_files_and_their_sections():
    links = re.findall(r'\]\((\.\./[^)]+)\)(?:, "([^"]+)")?', TEXT)
    assert len(links) > 15  # to files, says test_readme.py
    for target, section in links:
        assert not section or section in headings(ROOT / "docs" / target), (target, section)


def test_tests_that_are_named_exist():
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT + (ROOT / "docs" / "differences.md").read_text()))
    assert len(named) > 10
    for file, name in named:
        functions = {f.name for f in ast.parse((ROOT / file).read_text()).body if isinstance(f, ast.FunctionDef)}
        assert not name or name in functions, (file, name)


def test_a_thin_strip_keeps_one_token_of_width():
    """By hand, in a budget of 20 tokens: sides shrink by 1.124, 639 px to 20 tokens of 28 px, 31 px to less than one.

    And 332 x 27 px round to 12 tokens and to 1.
    """
    config = PatchConfig(max_pixels=20 * 28 * 28)
    assert config.target_size(639, 31) == (560, 28) and int(31 / (31 * 639 / config.max_pixels) ** 0.5 / 28) == 0
    assert PatchConfig().target_size(27, 332) == (28, 336)


def test_what_groups_fit_the_tower_of_qwen2_5_vl():
    """Oracle: every linear layer of blocks and merger, on the device meta."""
    model = refvl.load(ROOT / "data/configs/Qwen2.5-VL-7B-Instruct.json", weights="random", device="meta", text=False)
    layers = {n: x.in_features for n, x in model.encoder.named_modules() if isinstance(x, torch.nn.Linear)}
    layers = {name: width for name, width in layers.items() if not name.startswith("patch_embed")}
    assert [width % 60 == 0 for name, width in layers.items() if "down_proj" in name] == [True] * 32
    assert sum(width % 60 != 0 for width in layers.values()) == 130 == len(layers) - 32
    assert math.gcd(*layers.values()) == 20
    assert 4304 % 128 and 10944 % 128


def test_a_swapped_size_has_as_many_tokens_at_other_positions():
    """By hand, 640 x 427 px: 23 x 15 tokens; swapped, 15 x 23, so the second row starts elsewhere."""
    h, w = (side // 28 for side in PatchConfig().target_size(427, 640))
    swapped = tuple(side // 28 for side in PatchConfig().target_size(640, 427))
    assert (h, w) == (15, 23) and swapped == (23, 15)
    here, there = grid_positions(1, h, w), grid_positions(1, *swapped)
    assert here.shape == there.shape and not here.equal(there)


def test_numbers_of_the_differences():
    """Oracles: one pass after the other in Pillow, torch's resize, black pixels counted, the sizes of a plan."""
    photo, config = load_image(ROOT / "data/pictures/coffee.jpg"), Qwen3VLPatchConfig()
    height, width = config.target_size(photo.height, photo.width)
    ours = np.asarray(resize(photo, height, width)).astype(int)
    height_first = photo.resize((photo.width, height), Image.Resampling.BICUBIC).resize((width, height), Image.BICUBIC)
    torchvision = resize_frames(np.array(photo)[None], (height, width))[0].permute(1, 2, 0).numpy()
    levels = [np.abs(ours - other).max() for other in (height_first, torchvision)]
    uncut, cut = (count_prompt_tokens(plan_crops(side, side).layout) for side in (728, 729))
    crops = cut_crops(Image.new("RGB", (800, 400), "white"))[1]
    [black] = {int((np.asarray(crop) == 0).all((1, 2)).sum()) for crop in crops}
    page = " ".join((ROOT / "docs" / "differences.md").read_text().split())
    for words in (
        f"coffee.jpg to {width} x {height}",
        f"Pillow 13.0: height first, up to {levels[0]} levels apart",
        f"torchvision: width first, up to {levels[1]} levels apart",
        f"| {uncut} tokens, no crops, like transformers",
        f"such as 0.33: {cut} tokens, {len(plan_crops(729, 729).boxes)} crops",
        f"the lower {black} rows of each crop are black",
        f"the {504 - black} rows are stretched",
    ):
        assert words in page
