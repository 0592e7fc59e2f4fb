"""M-RoPE: against vLLM's golden data, a loop over tokens, and transformers where the rules agree."""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refvl.positions import MediaSpan, get_mrope_input_positions
from refvl.study.releases import larger_side_positions, second_per_grid_truncated

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mrope.json").read_text())["cases"]
VISION_START, VISION_END, IMAGE, VIDEO = 151652, 151653, 151655, 151656


def slow_positions(prompt):
    """One loop over a prompt of ("text", n) and ("image" | "video", t, h, w, t_factor) items.

    Text advances all axes together; a medium adds its grid to where text stopped, time scaled, then
    truncated; text continues behind the largest position of the medium.
    """
    positions, here = [], 0
    for kind, *sizes in prompt:
        if kind == "text":
            positions += [(here + i,) * 3 for i in range(sizes[0])]
            here += sizes[0]
        else:
            t, h, w, t_factor = sizes
            media = [(int(frame * t_factor), r, c) for frame in range(t) for r in range(h) for c in range(w)]
            positions += [tuple(here + x for x in p) for p in media]
            here += max(map(max, media)) + 1
    return torch.tensor(positions, dtype=torch.int64).T


def spans_of(prompt):
    spans, index = [], 0
    for kind, *sizes in prompt:
        if kind != "text":
            spans.append(MediaSpan(index, *sizes))
        index += sizes[0] if kind == "text" else spans[-1].num_tokens
    return index, spans


extents = st.integers(1, 5)
texts = st.tuples(st.just("text"), st.integers(1, 6))
images = st.tuples(st.just("image"), st.just(1), extents, extents, st.just(1.0))


def videos(t_factors):
    return st.tuples(st.just("video"), st.integers(1, 12), extents, extents, t_factors)


prompts = st.lists(st.one_of(texts, images, videos(st.floats(0, 5))), min_size=1, max_size=8)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['model']}-{c['name']}")
def test_golden(case):
    """Oracle: vLLM 0.33.0 for Qwen2.5-VL and GLM, the media given in reverse order."""
    spans = [MediaSpan(*item) for item in case["iter_mm_grid_thw"]]
    positions, delta = get_mrope_input_positions(len(case["input_tokens"]), spans[::-1])
    assert positions.tolist() == case["positions"]
    assert delta == case["delta"]
    assert positions.dtype == torch.int64


@settings(max_examples=150, deadline=None)
@given(prompts, st.randoms(use_true_random=False))
def test_equals_the_loop_over_tokens(prompt, random):
    """Oracle: `slow_positions`; the order in which the media are given does not matter."""
    num_tokens, spans = spans_of(prompt)
    random.shuffle(spans)
    positions, delta = get_mrope_input_positions(num_tokens, spans)
    want = slow_positions(prompt)
    assert torch.equal(positions, want)
    assert delta == want.max() + 1 - num_tokens


# --- transformers -----------------------------------------------------------------------------------------------------


def transformers_positions(prompt):
    """`Qwen2_5_VLModel.get_rope_index` on the same prompt; the factor of a video is given as seconds per grid * 2."""
    from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLModel

    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 8, "num_hidden_layers": 0, "num_attention_heads": 2, "num_key_value_heads": 1},
        vision_config={"depth": 0, "hidden_size": 8, "num_heads": 2, "tokens_per_second": 2},
    )
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    types = [{"text": 0, "image": 1, "video": 2}[k] for k, *s in prompt for _ in range(spans_of([(k, *s)])[0])]
    grids = {kind: [[t, 2 * h, 2 * w] for k, t, h, w, _ in media(prompt) if k == kind] for kind in ("image", "video")}
    seconds = [t_factor / 2 for kind, *_, t_factor in media(prompt) if kind == "video"]
    positions, delta = model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        torch.tensor([types]),
        image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
        second_per_grid_ts=seconds or None,
    )
    return positions[:, 0], int(delta)


def media(prompt):
    return [item for item in prompt if item[0] != "text"]


def between_texts(items):
    """Every medium between texts, as vision start and vision end stand in a real prompt."""
    return st.lists(items, min_size=1, max_size=4).map(
        lambda found: [("text", 3), *(part for item in found for part in (item, ("text", 2)))]
    )


def ends_behind_time(item):
    """Whether time, not height or width, is the longest axis of this medium."""
    _, t, h, w, t_factor = item
    return int((t - 1) * t_factor) + 1 > max(h, w)


@settings(max_examples=40, deadline=None)
@given(between_texts(st.one_of(images, videos(st.integers(0, 12).map(lambda n: n / 4)))))
def test_videos_differ_from_transformers_exactly_where_time_is_the_longest_axis(prompt):
    """Oracle: `get_rope_index` of transformers 5.17 to 5.23, whose rule is not ours.

    They continue text max(h, w) behind the start of a video, whatever its time positions; ours (and
    that of 5.2 and of vLLM) continues behind the largest position on any axis. 5.17 also truncates
    the seconds per grid to an integer. Seconds are eighths here, so that no rounding of their
    float32 product enters.
    """
    theirs, delta = transformers_positions(prompt)
    num_tokens, spans = spans_of(prompt)
    if version("transformers").startswith("5.17."):
        spans = [second_per_grid_truncated(span) for span in spans]
    rule, rule_delta = larger_side_positions(num_tokens, spans)
    assert torch.equal(theirs, rule) and delta == rule_delta

    ours, _ = get_mrope_input_positions(num_tokens, spans)
    long_clips = [span for span, item in zip(spans, media(prompt), strict=True) if ends_behind_time(item)]
    end = long_clips[0].offset + long_clips[0].num_tokens if long_clips else num_tokens
    assert torch.equal(ours[:, :end], theirs[:, :end])
    assert (ours[:, end:] > theirs[:, end:]).all()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_integers_of_any_kind_make_integer_positions():
    """Oracle: the same span from Python's integers; the largest factor that fits is no overflow."""
    span = MediaSpan(torch.tensor(1), torch.tensor(2), np.int64(2), 2, np.float32(2.0**29))
    assert span == MediaSpan(1, 2, 2, 2, 2.0**29) and type(span.offset) is int
    positions, _ = get_mrope_input_positions(9, [span])
    assert positions.dtype == torch.int64 and int(positions.max()) == 2**29 + 1


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([MediaSpan(0, 1, 2, 2), MediaSpan(3, 1, 2, 2)], "tokens 3 to 6; expected tokens from 4 on and below 9"),
        ([MediaSpan(6, 1, 2, 2)], "covers prompt tokens 6 to 9; expected tokens from 0 on and below 9"),
    ],
    ids=["overlap", "outside"],
)
def test_spans_that_do_not_fit_are_named(spans, message):
    with pytest.raises(ValueError, match=message):
        get_mrope_input_positions(9, spans)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"offset": -1}, ValueError, "MediaSpan.offset: must be at least 0, got -1"),
        ({"offset": 0.5}, TypeError, "MediaSpan.offset: expected an integer, got float 0.5"),
        ({"t": 0}, ValueError, "MediaSpan.t: must be at least 1, got 0"),
        ({"t": 2, "t_factor": 2.0**30}, ValueError, "MediaSpan.t_factor: .* keep 2 steps below position 2147483648"),
        ({"t_factor": float("nan")}, ValueError, "MediaSpan.t_factor: .* got nan"),
        ({"t_factor": -0.5}, ValueError, "MediaSpan.t_factor: .* got -0.5"),
    ],
)
def test_a_bad_span_is_named(fields, error, message):
    with pytest.raises(error, match=message):
        MediaSpan(**({"offset": 0, "t": 1, "h": 2, "w": 2} | fields))
