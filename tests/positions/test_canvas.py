"""Canvas M-RoPE (MiniCPM-V 4.7). Oracles: the table of the docstring, and transformers' rule on random prompts."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import NEEDS_5_23
from transformers import CONFIG_MAPPING, AutoModel

from refvl.positions import CanvasMarks, MediaSpan, canvas_positions, mrope_delta

MARKS = CanvasMarks(image_start=1, image_end=2, slice_start=3, slice_end=4, newline=5)
FILL, TEXT = 6, 7


def prompt_of(frames) -> tuple[torch.Tensor, list[MediaSpan]]:
    """frames: (tokens before, (h, w) of the overview, (rows, columns, h, w) of its slices) each, then text."""
    ids, spans = [], []

    def write(start: int, end: int, h: int, w: int) -> None:
        spans.append(MediaSpan(len(ids) + 1, 1, h, w))
        ids.extend([start, *[FILL] * (h * w), end])

    for before, overview, (rows, columns, h, w) in frames:
        ids += before
        write(MARKS.image_start, MARKS.image_end, *overview)
        for row in range(rows):
            ids += [MARKS.newline] if row else []
            for _ in range(columns):
                write(MARKS.slice_start, MARKS.slice_end, h, w)
    return torch.tensor([*ids, TEXT, TEXT]), spans


def test_the_table_in_the_docstring():
    """From the canvas' origin, 3 here: behind three tokens of text."""
    ids, spans = prompt_of([([TEXT] * 3, (1, 2), (1, 2, 1, 2))])
    t, h, w = canvas_positions(ids, spans, MARKS).tolist()
    assert t == [0, 1, 2, *[3] * 12, 8, 9]
    assert h == [0, 1, 2, 2, 3, 3, 4, 3, 3, 3, 3, 3, 3, 3, 3, 8, 9]
    assert w == [0, 1, 2, 2, 3, 6, 7, 3, 3, 4, 4, 5, 5, 6, 6, 8, 9]


def test_text_alone_is_counted():
    assert torch.equal(canvas_positions(torch.tensor([7, 5, 7, 1]), [], MARKS), torch.arange(4).expand(3, -1))


SIDE = st.integers(1, 5)
BETWEEN = st.lists(st.sampled_from([TEXT, MARKS.newline, MARKS.image_end, MARKS.slice_end]), max_size=3)
SLICES = st.one_of(st.just((0, 0, 1, 1)), st.tuples(st.integers(1, 3), st.integers(1, 3), SIDE, SIDE))
FRAMES = st.lists(st.tuples(BETWEEN, st.tuples(SIDE, SIDE), SLICES), min_size=1, max_size=4)


@cache
def theirs():
    marks = {f"{name}_id": value for name, value in MARKS._asdict().items()}
    config = CONFIG_MAPPING["minicpmv4_7"](**marks, image_token_id=FILL)
    config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = 1
    config.text_config.layer_types, config.insert_layer_id = ["full_attention"], 0
    with torch.device("meta"):
        return AutoModel.from_config(config)


@NEEDS_5_23
@pytest.mark.parametrize("mode", ["16x", "4x"])
@settings(max_examples=60, deadline=None)
@given(frames=FRAMES)
def test_positions_are_those_of_transformers(mode, frames):
    ids, spans = prompt_of(frames)
    patches = torch.tensor([(span.h, span.w) for span in spans]) * (4 if mode == "16x" else 2)
    types = (ids == FILL).int()[None]
    arguments = {"mm_token_type_ids": types, "target_sizes": patches, "downsample_mode": mode}
    wanted, delta = theirs().get_rope_index(ids[None], **arguments)
    positions_3L = canvas_positions(ids, spans, MARKS)
    assert torch.equal(positions_3L, wanted[:, 0]) and mrope_delta(positions_3L) == int(delta)
