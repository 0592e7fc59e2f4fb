"""EVS: what survives, where it stands, and that no way of cutting the prompt changes either.

The definition: the pruned layout is the full layout restricted to what is kept. Golden data from
vLLM 0.33.0 is matched where upstream agrees with that; `test_upstream.py` shows where it does not.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_agree
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refvl.positions import (
    MediaSpan,
    compute_dissimilarity,
    compute_mrope_for_media,
    compute_retained_tokens_count,
    compute_retention_mask,
    get_mrope_input_positions,
    recompute_mrope_positions,
    restrict_positions,
)

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "evs.json").read_text())
ARRAYS = np.load(FOLDER / "evs_masks.npz")
IDS = GOLDEN["token_ids"]
VISION_START, VISION_END, IMAGE, VIDEO = (IDS[k] for k in ("vision_start", "vision_end", "image", "video"))

rates = st.floats(0, 1, exclude_max=True)
clips = st.tuples(st.integers(1, 10), st.integers(1, 4), st.integers(1, 4))  # merged t, h, w


def random_embeds(thw, seed, hidden=3):
    """Embeddings of few distinct values, so that ties, static tokens and zero vectors all occur."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (thw[0] * thw[1] * thw[2], hidden), generator=generator).float()


def in_patches(thw, merge):
    return thw[0], thw[1] * merge, thw[2] * merge


# --- how many, and which ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["mask_cases"], ids=lambda c: f"{c['name']}-{c['q']}")
def test_golden_masks(case):
    """Oracle: vLLM 0.33.0: random, static, drifting, flipping and zero embeddings; exact ties among them."""
    embeds = torch.from_numpy(ARRAYS[case["embeds"]].astype(np.float32))
    mask = compute_retention_mask(embeds, case["thw"], case["spatial_merge_size"], case["q"])
    assert mask.dtype == torch.bool
    assert mask.tolist() == ARRAYS[case["mask"]].tolist()
    assert mask.sum() == case["retained"]


@settings(max_examples=50, deadline=None)
@given(clips, st.integers(0, 999))
def test_dissimilarity_equals_the_slow_formula(thw, seed):
    """Oracle: 1 - <a, b> / (|a| |b|) with the same place one frame earlier in float64, 1 when either is zero."""
    t, per_frame = thw[0], thw[1] * thw[2]
    frames = random_embeds(thw, seed).double().view(t, per_frame, -1)
    lengths = frames.norm(dim=-1)
    want = torch.full((t, per_frame), 255.0)
    for frame in range(1, t):
        for place in range(per_frame):
            scale = lengths[frame, place] * lengths[frame - 1, place]
            cosine = (frames[frame, place] @ frames[frame - 1, place]) / scale if scale else 0
            want[frame, place] = 1 - cosine
    got = compute_dissimilarity(frames.flatten(0, 1), t)
    assert got.dtype == torch.float32
    assert_agree(got, want.float(), frames.shape[-1], scale=2.0)  # 1 - cosine


@settings(max_examples=100, deadline=None)
@given(clips, st.integers(1, 3), rates, st.integers(0, 999), st.sampled_from([1, 3, 96]))
@example((6, 2, 2), 2, 0.5, 0, 1)
def test_mask_equals_the_slow_ranking(thw, merge, q, seed, width):
    """Oracle: tokens sorted by largest dissimilarity, then by place, in Python; the first n are kept.

    Rows may have any width: some encoders give several features per token, side by side.
    """
    embeds, per_frame = random_embeds(thw, seed, width), thw[1] * thw[2]
    change = compute_dissimilarity(embeds, thw[0]).flatten().tolist()
    ranking = sorted(range(len(embeds)), key=lambda i: (-change[i], i))
    keep = max(per_frame, int(len(embeds) * (1 - q)))
    mask = compute_retention_mask(embeds, in_patches(thw, merge), merge, q)
    assert mask.nonzero().flatten().tolist() == sorted(ranking[:keep])
    assert keep == compute_retained_tokens_count(per_frame, thw[0], q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_embeddings_rank_in_float32(dtype):
    """Oracle: the same values in float32."""
    embeds = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for q in (0.0, 0.3, 0.7):
        got, want = (compute_retention_mask(x, (10, 4, 4), 2, q) for x in (embeds, embeds.float()))
        assert torch.equal(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("q", [0.5, 0.75])
def test_the_first_frame_survives_embeddings_that_are_not_finite(value, q):
    """One row, a frame, or all of them, anywhere: as many tokens stay as ever, the first frame among them."""
    for rows in ([0], [3], [9], range(4), range(4, 8), range(16)):
        embeds = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        embeds[list(rows)] = value
        mask = compute_retention_mask(embeds, (4, 4, 4), 2, q)
        assert mask[:4].all() and mask.sum() == compute_retained_tokens_count(4, 4, q)
        assert compute_dissimilarity(embeds, 4).isfinite().all()


# --- where the survivors stand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", GOLDEN["mrope_for_media"], ids=lambda c: "-".join(str(v) for v in list(c.values())[:4])
)
def test_golden_media_positions(case):
    """Oracle: vLLM 0.33.0 for t, h, w; upstream's fourth column is the width, ours 1 + the largest position."""
    sizes = (case["spatial_merge_size"], case["tokens_per_second"], case["video_second_per_grid"])
    positions = compute_mrope_for_media(case["size"], *sizes)
    golden = torch.tensor(case["positions"])
    assert positions.dtype == torch.int64
    assert torch.equal(positions[:, :3], golden[:, :3])
    assert set(positions[:, 3].tolist()) == {int(golden[:, :3].max()) + 1}
    assert set(golden[:, 3].tolist()) == {case["size"][2] // case["spatial_merge_size"]}


@settings(max_examples=50, deadline=None)
@given(clips, st.floats(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 999))
@example((2, 4, 1), 1.0, 3, 3, 0)  # portrait: upstream's width is not the extent
@example((10, 1, 1), 2.0, 3, 3, 0)  # a long clip: time is the longest axis
def test_nothing_changes_at_rate_zero(thw, t_factor, before, after, seed):
    """EVS at q = 0 == no EVS: all tokens stay, and so do their positions and those of the text."""
    mask = compute_retention_mask(random_embeds(thw, seed), in_patches(thw, 2), 2, 0)
    assert mask.all()
    full, delta = get_mrope_input_positions(before + len(mask) + after, [MediaSpan(before, *thw, t_factor)])
    keep = torch.cat([torch.ones(before), mask, torch.ones(after)]).bool()
    restricted, restricted_delta = restrict_positions(full, keep)
    assert torch.equal(restricted, full)
    assert restricted_delta == delta


# --- chunked prefill --------------------------------------------------------------------------------------------------


class Pruned:
    """A pruned prompt: its ids, the pieces of its media, and what the definition says about its positions.

    parts: text lengths and media ("image" | "video", thw merged, t_factor, keep mask), each medium
    set between vision start and vision end.
    """

    def __init__(self, parts):
        self.ids, self.media, spans, keep = [], [], [], []
        for part in parts:
            if isinstance(part, int):
                self.ids += range(part)
                keep += [True] * part
                continue
            kind, thw, t_factor, mask = part
            spans.append(MediaSpan(len(keep) + 1, *thw, t_factor))
            positions = compute_mrope_for_media(in_patches(thw, 2), 2, t_factor)[mask].T
            self.media.append((len(self.ids) + 1, positions))
            self.ids += [VISION_START, *[IMAGE if kind == "image" else VIDEO] * int(mask.sum()), VISION_END]
            keep += [True, *mask.tolist(), True]
        self.full, _ = get_mrope_input_positions(len(keep), spans)
        self.want, self.want_delta = restrict_positions(self.full, torch.tensor(keep))

    def pieces(self, start, stop):
        """The media positions whose tokens lie in [start, stop): what arrives with that chunk."""
        cut = [p[:, max(start - offset, 0) : max(stop - offset, 0)] for offset, p in self.media]
        return [piece for piece in cut if piece.shape[1]]

    def text_behind(self, stop):
        """[start, stop) of the text behind the last medium that has begun to arrive; its extent is known already."""
        ends = [offset + p.shape[1] for offset, p in self.media if offset < stop]
        return ends[-1] if ends else 0, [*(offset for offset, _ in self.media), len(self.ids)][len(ends)]

    def step(self, pieces, positions, start):
        return recompute_mrope_positions(self.ids, pieces, positions, start, VISION_START, IMAGE, VIDEO)


@st.composite
def pruned_prompts(draw):
    parts = [draw(st.integers(0, 4))]
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            thw = (1, draw(st.integers(1, 4)), draw(st.integers(1, 4)))
            parts.append(("image", thw, 1.0, torch.ones(thw[1] * thw[2], dtype=torch.bool)))
        else:
            thw = draw(clips)
            embeds = random_embeds(thw, draw(st.integers(0, 99)))
            mask = compute_retention_mask(embeds, in_patches(thw, 2), 2, draw(rates))
            parts.append(("video", thw, draw(st.floats(0, 4)), mask))
        parts.append(draw(st.integers(0, 4)))
    return Pruned(parts if parts != [0] else [1])


@settings(max_examples=200, deadline=None)
@given(pruned_prompts(), st.booleans(), st.data())
def test_any_chunking_gives_the_definition(prompt, from_full_layout, data):
    """Oracle: the full layout restricted to what is kept, after every chunk, from either initial layout.

    Cuts fall anywhere - inside media, at vision start, in text - and a chunk's share of a medium
    may itself come in two pieces or with empty ones between.
    """
    length = len(prompt.ids)
    cuts = data.draw(st.lists(st.integers(0, length), max_size=6).map(sorted), label="cuts")
    positions = prompt.full if from_full_layout else torch.arange(length).expand(3, -1)
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        middle = data.draw(st.integers(start, stop), label="split")
        pieces = [*prompt.pieces(start, middle), torch.empty(4, 0), *prompt.pieces(middle, stop)]
        before = positions.clone()
        positions, delta = prompt.step(pieces, positions, start)
        assert torch.equal(positions[:, :stop], prompt.want[:, :stop])
        assert torch.equal(positions[:, :start], before[:, :start])
        behind, until = prompt.text_behind(stop)
        assert torch.equal(positions[:, behind:until], prompt.want[:, behind:until])
    assert torch.equal(positions, prompt.want)
    assert delta == prompt.want_delta


@pytest.mark.parametrize("case", GOLDEN["recompute"], ids=lambda c: c["name"])
def test_with_upstream_s_media_positions_the_result_is_upstream_s(case):
    """Oracle: the sequential layout of vLLM 0.33.0. The media's own positions are thus all that sets ours apart."""
    length = len(case["input_ids"])
    init = torch.tensor(case["init_positions"])
    pieces = [torch.tensor(medium["mm_positions"]).T for medium in case["media"]]
    marks = (VISION_START, IMAGE, VIDEO)
    positions, delta = recompute_mrope_positions(case["input_ids"], pieces, init, 0, *marks)
    assert positions.tolist() == [row[:length] for row in case["sequential_positions"]]
    assert delta == case["sequential_delta"]


# --- errors -----------------------------------------------------------------------------------------------------------


NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute_retained_tokens_count(0, 2, 0.5), "tokens_per_frame: must be at least 1"),
        (lambda: compute_retained_tokens_count(4, 2, 1.0), r"q: expected .* in \[0, 1\), got 1"),
        (lambda: compute_retention_mask(torch.ones(8, 2), (2, 4, 5), 2, 0.5), r"thw\[0\]: h and w must be multiples"),
        (lambda: compute_dissimilarity(torch.ones(8, 2), 3), "num_frames: expected a divisor of 8 .* got 3"),
        (lambda: compute_mrope_for_media((2, 4, 4), 2, 2, NAN), "video_second_per_grid: .* got nan"),
        (lambda: restrict_positions(torch.zeros(3, 5), torch.ones(4).bool()), "keep_L: expected a bool mask"),
    ],
)
def test_wrong_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("pieces", "done", "message"),
    [
        ([torch.zeros(3, 2)], 0, r"multimodal_positions\[0\]: dimension 0 must be 4, got 3"),
        ([torch.zeros(4, 4)], 0, r"\[0\]: expected at most 3 positions, the tokens left in its media item, got 4"),
        ([torch.zeros(4, 3), torch.zeros(4, 1)], 0, r"\[1\]: .* for 1 positions, got none from prompt token 5 on"),
        ([], 8, r"num_computed_tokens: must be in \[0, 7\], got 8"),
        ([], -1, "num_computed_tokens: must be at least 0, got -1"),
    ],
)
def test_pieces_that_do_not_fit_are_named(pieces, done, message):
    prompt = [7, VISION_START, VIDEO, VIDEO, VIDEO, VISION_END, 8]
    marks, initial = (VISION_START, IMAGE, VIDEO), torch.arange(7).expand(3, -1)
    with pytest.raises(ValueError, match=message):
        recompute_mrope_positions(prompt, pieces, initial, done, *marks)
    with pytest.raises(ValueError, match="mrope_positions: expected 7 positions or more, got 6"):
        recompute_mrope_positions(prompt, [], initial[:, 1:], 0, *marks)
    prompt[1] = 7
    with pytest.raises(ValueError, match="vision_start_token_id=.* before media token 2, got 7"):
        recompute_mrope_positions(prompt, [torch.zeros(4, 3)], initial, 0, *marks)
