"""VidCom2: which tokens are unlike the rest. Oracles: vLLM 0.33.0, and the formula in plain Python, token by token."""

import json
import math
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refvl.positions import (
    PRUNERS,
    find_pruner,
    vidcom2_frame_budgets,
    vidcom2_retained_tokens_count,
    vidcom2_retention_mask,
    vidcom2_similarities,
)

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "vidcom2.json").read_text())
ARRAYS = np.load(FOLDER / "vidcom2.npz")

rates = st.floats(0, 1, exclude_max=True)
clips = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))  # merged t, h, w
each_pruner = pytest.mark.parametrize("name", PRUNERS)


def random_embeds(thw, seed, width=5, *, ties=False):
    """Embeddings (M, width); with ties their values are few, so that tokens repeat, and some are zero."""
    generator = torch.Generator().manual_seed(seed)
    shape = (math.prod(thw), width)
    return torch.randint(-1, 2, shape, generator=generator).float() if ties else torch.randn(shape, generator=generator)


# --- the formula in plain Python --------------------------------------------------------------------------------------


def mean(rows):
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def normalized(row):
    length = math.sqrt(math.fsum(x * x for x in row))
    return [x / length for x in row] if length else row


def alike(row, centre):
    squared = math.fsum((a - b) ** 2 for a, b in zip(row, centre, strict=True))
    return math.fsum(math.exp(-squared / 2 / a) for a in (1 / 8, 1 / 4, 1 / 2, 1, 2))


def slow_mask(embeds, thw, q):
    """The mask as a list, and how many tokens each frame might keep before the count was met."""
    rows, t = embeds.double().tolist(), thw[0]
    n, columns = len(rows) // t, list(zip(*rows, strict=True))
    spread = [np.float32(math.fsum((x - math.fsum(c) / len(c)) ** 2 for x in c) / len(c)) for c in columns]
    kept = sorted(range(len(columns)), key=lambda i: spread[i])[: max(1, len(columns) // 2)]
    rows = [normalized([row[i] for i in kept]) for row in rows]
    frames = [rows[i * n : (i + 1) * n] for i in range(t)]
    centre, centres = mean(rows), [mean(frame) for frame in frames]
    to_video = [[alike(row, centre) for row in frame] for frame in frames]
    score = [[np.float32(a + alike(row, own)) for a, row in zip(video, frame, strict=True)]
             for video, frame, own in zip(to_video, frames, centres, strict=True)]  # fmt: skip
    levels = [math.exp(-math.fsum(values) / n / 0.01 + 500) for values in to_video]  # at most exp(500)
    shares = [level / math.fsum(levels) for level in levels]
    budgets = [max(1, round(float(np.float32(min(1.0, (1 - q) * (1 + p - 1 / t)) * n)))) for p in shares]
    flat = list(chain(*score))
    chosen = {i * n + j for i, k in enumerate(budgets) for j in sorted(range(n), key=lambda j: score[i][j])[:k]}
    count = max(t, min(int(t * n * (1 - q)), t * n))
    least_similar_first = sorted(range(t * n), key=lambda i: flat[i])
    while len(chosen) > count:
        chosen.remove(next(i for i in reversed(least_similar_first) if i in chosen))
    while len(chosen) < count:
        chosen.add(next(i for i in least_similar_first if i not in chosen))
    return [i in chosen for i in range(t * n)], budgets


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['kind']}-{c['thw']}-{c['q']}")
def test_golden_masks(case):
    """Oracle: vLLM 0.33.0 in float32: random, nearly static, and with one change."""
    embeds = torch.from_numpy(ARRAYS[f"x{case['id']}"])
    mask = vidcom2_retention_mask(embeds, case["thw"], case["spatial_merge_size"], case["q"])
    assert mask.dtype == torch.bool and mask.tolist() == ARRAYS[f"m{case['id']}"].tolist()
    t, h, w = case["thw"]
    assert vidcom2_retained_tokens_count(h * w // case["spatial_merge_size"] ** 2, t, case["q"]) == case["count"]


@settings(max_examples=80, deadline=None)
@given(clips, rates, st.integers(1, 9), st.integers(0, 999), st.booleans())
@example((1, 4, 4), 0.5, 4, 0, False)  # one frame: its centre is the video's
@example((5, 1, 1), 0.9, 4, 0, False)  # one token per frame
@example((4, 3, 3), 0.5, 1, 0, True)  # one channel: tokens are -1, 0 or 1
@example((3, 1, 4), 0.0, 6, 234, True)  # two channels vary alike
def test_mask_equals_the_slow_formula(thw, q, width, seed, ties):
    """Oracle: `slow_mask`. Both compare float32 of sums in float64, so that ties are ties in both."""
    embeds = random_embeds(thw, seed, width, ties=ties)
    want, budgets = slow_mask(embeds, thw, q)
    assert vidcom2_frame_budgets(vidcom2_similarities(embeds, thw[0])[0], q).tolist() == budgets
    assert vidcom2_retention_mask(embeds, thw, 1, q).tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_embeddings_of_any_dtype_count_in_float64(dtype):
    """Oracle: the same values in float32."""
    embeds = random_embeds((10, 2, 2), 0, 16).to(dtype).float()
    for q in (0.0, 0.3, 0.7):
        got, want = (vidcom2_retention_mask(x, (10, 4, 4), 2, q) for x in (embeds.to(dtype), embeds))
        assert torch.equal(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_go_first(value):
    """As many stay as ever, and a row without numbers only where the others are not enough; one value is enough."""
    for rows in ([0], [3, 9], range(4), range(16)):
        embeds = random_embeds((4, 2, 2), 0, 8)
        embeds[list(rows), 5] = value
        for q in (0.0, 0.5, 0.75):
            mask, finite = vidcom2_retention_mask(embeds, (4, 4, 4), 2, q), 16 - len(rows)
            assert mask.sum() == vidcom2_retained_tokens_count(4, 4, q)
            if q == 0.5 and len(rows) < 4:
                assert not mask[list(rows)].any() and mask.sum() <= finite


# --- what all pruners share -------------------------------------------------------------------------------------------


@each_pruner
@settings(max_examples=50, deadline=None)
@given(thw=clips, merge=st.integers(1, 3), q=rates, seed=st.integers(0, 999), ties=st.booleans())
def test_the_mask_holds_as_many_as_the_count_says(name, thw, merge, q, seed, ties):
    (t, h, w), pruner = thw, PRUNERS[name]
    mask = pruner.mask(random_embeds(thw, seed, ties=ties), (t, h * merge, w * merge), merge, q)
    assert mask.sum() == pruner.count(h * w, t, q)
    assert pruner.count(h * w, t, 0) == len(mask), "at rate 0 all stay"


@each_pruner
def test_bad_input_is_named(name):
    mask, embeds = PRUNERS[name].mask, torch.zeros(16, 8)
    with pytest.raises(ValueError, match="video_embeds: dimension 0 must be 16, got 15"):
        mask(embeds[1:], (4, 2, 2), 1, 0.5)
    with pytest.raises(TypeError, match="video_embeds: expected floating-point numbers"):
        mask(embeds.long(), (4, 2, 2), 1, 0.5)
    with pytest.raises(ValueError, match=r"q: expected a pruning rate in \[0, 1\), got 1"):
        mask(embeds, (4, 2, 2), 1, 1)


@pytest.mark.parametrize("name", ["EVS", None])
def test_pruners_are_found_by_name(name):
    with pytest.raises(ValueError, match="pruning: expected 'evs' or 'vidcom2', got "):
        find_pruner(name)
