"""Sizes that no machine can hold, by hand and in a config.json: one sentence of refvl's, before memory is taken.

Oracle: the kernel's count of the memory that this process held at most, and the traceback.
"""

import copy
import json
import resource

import pytest
import torch
from harness import is_clear
from random_models import RANDOM, random_folder, random_model

import refvl
from refvl.checkpoints import SIZES
from refvl.encoders.resampler2 import Resampler2
from refvl.encoders.siglip_vit import SiglipViT, SiglipViTConfig
from refvl.positions import interpolate_position_table
from refvl.positions.tables import resize_position_table, sincos_1d, sincos_2d

HUGE = {  # layouts by how a family counts: one item, a batch, many frames
    "grids": ([(1, 2048, 2048)], [(1, 1024, 1024)] * 5, [(2**20, 2, 2)]),
    "crops": ([(2048, 2048)], [(1024, 1024)] * 5),
    "slices": ([[(2048, 2048)]], [[(1024, 1024)]] * 5),
}
WIDTHS = [("vision_config", key) for key in ("hidden_size", "width", "embed_dim")]
ODD = (0, -1, 10**30, 0.5, "x", [1], True)


def layouts_of(name: str) -> str:
    return "crops" if name.startswith("Step") else "slices" if name.startswith("MiniCPM") else "grids"


def refused(attempt, taken: int = 2**18) -> str:
    """The sentence of a refusal that took less memory than this, in KiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, TypeError)) as caught:
        attempt()
    assert is_clear(caught.value), caught.value
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < taken
    return str(caught.value)


@pytest.mark.parametrize("name", RANDOM)
def test_plans_beyond_memory_are_refused(name):
    """The batch of 5 * 2**20 patches is too many for each tower; one of 2**22 patches where it is wide enough."""
    encoder = random_model(name).encoder
    one, batch, *frames = HUGE[layouts_of(name)]
    assert "patches in one plan" in refused(lambda: encoder.plan(batch))
    for layouts in (one, *frames):
        if 2**22 * encoder.config.hidden_size * 4 >= 2**30:
            assert "in one plan" in refused(lambda layouts=layouts: encoder.plan(layouts))


SIGLIP = SiglipViTConfig(hidden_size=96, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: interpolate_position_table(torch.zeros(16, 1152), [(1, 2048, 2048)]),
        lambda: resize_position_table(torch.zeros(16, 1152), (2**20, 2**20), antialias=True),
        lambda: sincos_1d(64, 10**12),
        lambda: sincos_2d(64, (10**6, 10**6)),
        lambda: Resampler2(4, 128, 4).plan([(2048, 2048)]),
        lambda: SiglipViT(SIGLIP).plan([(2048, 2048)]),
    ],
    ids=["interpolate", "resize", "sincos_1d", "sincos_2d", "resampler", "siglip"],
)  # fmt: skip
def test_tables_beyond_memory_are_refused(attempt):
    assert "GiB of vectors in one plan" in refused(attempt)


def places(values: dict, above: tuple = ()):
    """Where a config has one of `SIZES`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from places(value, (*above, key))
        elif key in SIZES and value is not None:
            yield (*above, key)


def changed(values: dict, place: tuple, value) -> dict:
    values = copy.deepcopy(values)
    part = values
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return values


@pytest.mark.parametrize("name", RANDOM)
def test_each_size_of_a_config_is_checked(name):
    """A hidden size that heads do not divide as well, where nothing else says how wide a head is."""
    config = json.loads((random_folder(name) / "config.json").read_text())
    found = list(places(config))
    assert len(found) > 5
    for place in found:
        for value in ODD:
            said = refused(lambda: refvl.load(changed(config, place, value), weights="random", device="meta"))  # noqa: B023
            assert f"{place[-1]} must be an integer from 1 to {SIZES[place[-1]]:,}, got " in said
    for place in found:
        if place in WIDTHS:
            said = refused(lambda: refvl.load(changed(config, place, 97), weights="random", device="meta"))  # noqa: B023
            assert f"{place[-1]}: must be" in said


@pytest.mark.parametrize("name", RANDOM)
def test_a_tower_wider_than_its_weights_takes_no_memory(name, tmp_path):
    """8192 heads' worth of width beside weights of a few thousand values: told from the files' headers."""
    for file in random_folder(name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    [place] = [place for place in places(config) if place in WIDTHS]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(changed(config, place, 2**17)))
    said = refused(lambda: refvl.load(tmp_path, progress=False))
    assert "vision_config: its tower would have " in said or "must be" in said


def test_the_largest_sizes_are_built_on_meta():
    """No product of them overflows: the widest tower and text model that a config may ask for have a plan."""
    config = json.loads((random_folder("qwen3_vl") / "config.json").read_text())
    config["vision_config"] |= {"hidden_size": 2**17, "num_heads": 2**10, "intermediate_size": 2**17}
    config["text_config"] |= {"hidden_size": 2**17, "vocab_size": 2**24}
    vlm = refvl.load(config, weights="random", device="meta")
    assert vlm.encoder.plan([(1, 4, 4)]).positions.shape == (16, 2)
