"""Numbers that are not finite stop an answer, wherever they come from; the error names the stage and the item."""

import json
import re

import pytest
import torch
from checkpoint_factory import change_json
from random_models import RANDOM, load, make, random_folder

import refvl
from refvl.paths import DATA
from refvl.serving.export import encode_folder

PHOTOS = [DATA / "pictures" / name for name in ("coffee.jpg", "rocket.jpg")]
NO_NUMBERS = (0, -1, float("nan"), float("inf"), "x", True)
NUMBER = re.compile(r"(^|_)(eps|theta)$")


def numbers_of(values: dict, before: tuple[str, ...] = ()):
    """The places of all numbers in a config that must be above 0."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from numbers_of(value, (*before, key))
        elif NUMBER.search(key) and value is not None:
            yield *before, key


def changed(values: dict, place: tuple[str, ...], value) -> dict:
    key, *inner = place
    return values | {key: changed(values[key], inner, value) if inner else value}


@pytest.mark.parametrize("name", RANDOM)
def test_numbers_of_a_config_are_refused_at_load(name):
    """Every epsilon and every theta, each with six values."""
    config = json.loads((random_folder(name) / "config.json").read_text())
    places = list(numbers_of(config))
    assert places
    for place in places:
        for value in NO_NUMBERS:
            with pytest.raises((ValueError, TypeError), match=f"{place[-1]}: (must be a finite|expected a number)"):
                refvl.load(changed(config, place, value), weights="random", device="meta")


@pytest.mark.parametrize("name", RANDOM)
def test_pixels_and_weights_that_overflow_stop_at_their_stage(name):
    """Of two photographs, the second one's pixels; then a weight of the text model."""
    vlm = load(random_folder(name))
    vlm.language_model.model.norm.weight.data.mul_(float("inf"))
    with pytest.raises(ValueError, match="^prefill: the first logits of prompt 0 are not finite; check the dtype"):
        vlm.chat("What?", images=PHOTOS, max_new_tokens=2)
    patchify = vlm.processor.patchify

    def spoiled(media):
        first, second = patchify(media)
        second.rows.table.fill_(float("nan")) if hasattr(second.rows, "table") else second.rows.fill_(float("nan"))
        return [first, second]

    vlm.processor.patchify = spoiled
    for call in (vlm.encode, lambda images: vlm.chat("What?", images=images)):
        with pytest.raises(ValueError, match="^encode: the embeddings of item 1 are not finite; check the dtype"):
            call(PHOTOS)


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "MiniCPM-V 2.6"])
def test_settings_of_pixels_are_refused_at_load(name, tmp_path):
    folder = make(name, tmp_path)
    for values in ([0, 0, 0], [float("nan")] * 3, [1, 1], ["x"] * 3):
        other = {"image_std": values, "norm_std": values}
        change_json(folder / "preprocessor_config.json", lambda settings, other=other: settings | other)
        with pytest.raises((ValueError, TypeError), match=r"image_std: "):
            load(folder)


def test_nothing_that_is_not_finite_is_written(vlm, tmp_path, monkeypatch):
    """An overflow in float16 is listed like a file that cannot be read."""
    weight = vlm.encoder.merger.ln_q.weight
    monkeypatch.setattr(weight, "data", weight.data * torch.inf)
    result = encode_folder(vlm, PHOTOS, tmp_path / "out", progress=False)
    assert [*result["failed"]] == [photo.name for photo in PHOTOS] and not list((tmp_path / "out").rglob("*.safe*"))
    assert all("embeddings of item 0 are not finite" in reason for reason in result["failed"].values())
