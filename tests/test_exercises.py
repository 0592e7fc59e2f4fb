"""The checks of notebooks 00 and 01. Oracle: they pass refvl's own functions and the printed solutions, and say where a
wrong one differs first."""

import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch

from refvl import exercises
from refvl.merge import merge_embeddings
from refvl.patches import PatchConfig, count_tokens, patch_rows
from refvl.positions import get_window_index

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def window_index(h, w, side):
    return get_window_index([(1, h, w)], window_size=side, patch_size=1, spatial_merge_size=1)[0]


def merge_in_place(text, spans, media):
    for span, embeds in zip(spans, media, strict=True):
        text[span.offset : span.offset + span.num_tokens] = embeds
    return text


def line_by_line(pixels, config):
    return patch_rows(pixels, replace(config, merge_size=1))[0]


def reading_order(h, w, side):
    return torch.arange(h * w)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (exercises.check_count_tokens, lambda height, width: count_tokens(height, width, PatchConfig())),
        (exercises.check_merge_embeddings, merge_embeddings),
        (exercises.check_patch_rows, lambda pixels, config: patch_rows(pixels, config)[0]),
        (exercises.check_window_index, window_index),
    ],
)
def test_the_library_passes(check, function):
    assert re.fullmatch(r"right in \d+ cases", check(function))


@pytest.mark.parametrize(
    ("check", "function", "message"),
    [
        (exercises.check_count_tokens, lambda h, w: (h // 28) * (w // 28), "427 x 640 .*should be 345 tokens, got 330"),
        (exercises.check_merge_embeddings, merge_in_place, "one picture: the text embeddings were changed in place"),
        (exercises.check_merge_embeddings, lambda t, s, m: t.clone(), r"element \[2, 0\] should be -1.0, got 4.0"),
        (exercises.check_patch_rows, line_by_line, r"one row of blocks: element \[2, 0\] should be 1176.0, got 28.0"),
        (exercises.check_window_index, reading_order, r"h=2, w=4, side=2: element \[2\] should be 4, got 2"),
        (exercises.check_window_index, lambda h, w, side: torch.arange(5), r"expected shape \(8,\), got \(5,\)"),
        (exercises.check_window_index, lambda h, w, side: [0], "expected a tensor, got list"),
    ],
)
def test_the_first_difference_is_named(check, function, message):
    with pytest.raises(AssertionError, match=message):
        check(function)


def solutions() -> list[str]:
    """The code of every collapsed solution."""
    paths = [path for name in ("00", "01") for path in sorted(NOTEBOOKS.glob(f"{name}_*.ipynb"))]
    cells = [cell.source for path in paths for cell in nbformat.read(path, as_version=4).cells]
    blocks = [re.findall(r"<details>.*?```python\n(.*?)```.*?</details>", source, re.S) for source in cells]
    return [code for found in blocks for code in found]


def test_solutions_are_found():
    assert len(solutions()) == 4


@pytest.mark.parametrize("code", solutions())
def test_printed_solutions_pass_their_check(code):
    """They stand alone: each imports what it uses, defines its function and calls its check."""
    assert "check_" in code
    exec(code, {})
