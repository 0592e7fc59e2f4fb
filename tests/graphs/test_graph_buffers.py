"""Static buffers: every padding rule written out, nothing stale, nothing beyond capacity."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs.buffers import PAD_RULES, fill_metadata, fill_padded, metadata_tensors


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    values: torch.Tensor = field(metadata={"pad": "zero"})
    lengths: torch.Tensor = field(metadata={"pad": "repeat_last"})
    groups: tuple = field(metadata={"pad": "empty"})
    longest: int = 0


def metadata(values=(1.0, 2.0), lengths=(0, 1, 2), groups=(), longest=1, kind=Metadata):
    return kind(torch.tensor(values), torch.tensor(lengths, dtype=torch.int32), groups, longest)


def capacity():
    return metadata(values=(7.0,) * 4, lengths=(9,) * 5, longest=3)


# --- one buffer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ("zero", [5, 6, 0, 0, 0]),
        ("repeat_last", [5, 6, 6, 6, 6]),
        ("identity", [5, 6, 2, 3, 4]),
        ("zero", [[1, 2], [0, 0], [0, 0]]),
        ("repeat_last", [[1, 2], [1, 2], [1, 2]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_each_rule_fills_whole_rows_in_place(rule, want, dtype):
    want = torch.tensor(want, dtype=dtype)
    buffer = torch.full_like(want, float("nan") if dtype.is_floating_point else 99)
    address = buffer.data_ptr()
    fill_padded(buffer, want[: 2 if want.ndim == 1 else 1], rule, "x")
    assert torch.equal(buffer, want) and buffer.data_ptr() == address


@given(st.sampled_from(sorted(PAD_RULES)), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_nothing_of_the_batch_before_survives(rule, counts):
    """Filling after any fillings equals filling a fresh buffer, whatever it held."""
    used = torch.full((6,), -1)
    for count in counts:
        fresh, values = torch.full((6,), 77), torch.arange(count) + 10
        for buffer in (used, fresh):
            fill_padded(buffer, values, rule, "x")
        assert torch.equal(used, fresh)
        assert torch.equal(used[:count], values)


# --- a metadata dataclass ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    first: Metadata
    second: Metadata


@pytest.mark.parametrize("parts", [1, 2])
def test_metadata_is_filled_field_by_field(parts):
    """Tensors padded by the rule on their field, integers kept as captured, tuples left out; nested parts in turn."""
    buffers, plan = capacity(), metadata(groups=(torch.zeros(1),), longest=3)
    if parts == 2:
        buffers, plan = Nested(capacity(), buffers), Nested(metadata(values=(5.0,), lengths=(0, 1)), plan)
    before = metadata_tensors(buffers)
    fill_metadata(buffers, plan)
    filled = metadata_tensors(buffers)
    assert all(filled[name] is before[name] for name in before)
    values = [tensor.tolist() for tensor in filled.values()]
    assert values == [[5, 0, 0, 0], [0, 1, 1, 1, 1], [1, 2, 0, 0], [0, 1, 2, 2, 2]][-2 * parts :]
    last = buffers.second if parts == 2 else buffers
    assert (last.groups, last.longest) == ((), 3)


@dataclass(frozen=True, slots=True, eq=False)
class NoRule:
    x: object


X = torch.zeros(5, 2)
FITS = r"expected a shape that fits the captured"


@pytest.mark.parametrize(
    ("fill", "arguments", "error", "message"),
    [
        (fill_padded, (X, torch.zeros(6, 2), "zero", "x"), ValueError, rf"x: {FITS} \(5, 2\), got \(6, 2\)"),
        (fill_padded, (X, torch.zeros(3, 3), "zero", "x"), ValueError, rf"x: {FITS} \(5, 2\), got \(3, 3\)"),
        (fill_padded, (X, torch.zeros(3, 2), "mirror", "x"), TypeError, r"x: .* rule from \('zero', .*, got 'mirror'"),
        (fill_metadata, (capacity(), metadata(longest=4)), ValueError, "longest: 4 exceeds the captured capacity of 3"),
        (fill_metadata, (capacity(), metadata(lengths=(0,) * 6)), ValueError, rf"lengths: {FITS} \(5,\), got \(6,\)"),
        (fill_metadata, (capacity(), NoRule(X)), TypeError, "metadata: expected Metadata, got NoRule"),
        (fill_metadata, (NoRule(X), NoRule(X)), TypeError, "x: expected a padding rule from .*, got 'none'"),
        (fill_metadata, (NoRule("a"), NoRule("a")), TypeError, "x: a str cannot be part of a graph"),
    ],
)
def test_what_does_not_fit_is_named(fill, arguments, error, message):
    """A field without a rule, too, tensor or not: nothing enters a graph by default."""
    with pytest.raises(error, match=message):
        fill(*arguments)


# --- the metadata of the Qwen2.5-VL tower -----------------------------------------------------------------------------

ENCODER = Qwen2_5_VisionTransformer(Qwen2_5_VisionConfig.tiny())
MAX_TOKENS, MAX_FRAMES = 24, 4


@st.composite
def batches(draw):
    """Grids within 24 merged tokens and 4 frames, any shapes."""
    grids, tokens, frames = [], MAX_TOKENS, MAX_FRAMES
    while tokens and frames and (not grids or draw(st.booleans())):
        t = draw(st.integers(1, min(frames, tokens)))
        h = draw(st.integers(1, tokens // t))
        w = draw(st.integers(1, tokens // t // h))
        grids.append((t, 2 * h, 2 * w))
        tokens, frames = tokens - t * h * w, frames - t
    return grids


@given(batches())
def test_every_batch_within_the_limits_fits_and_pads_to_empty_segments(grids):
    """Cumulative lengths stop rising at the last patch, permutations stay permutations, places behind it are zero."""
    buffers, plan = ENCODER.plan_capacity(MAX_TOKENS, MAX_FRAMES), ENCODER.plan(grids)
    fill_metadata(buffers, plan)
    patches, tokens = len(plan.positions), len(plan.window_index)
    for name in ("cu_seqlens", "cu_window_seqlens"):
        padded, planned = getattr(buffers, name), getattr(plan, name)
        assert torch.equal(padded[: len(planned)], planned)
        assert (padded[len(planned) :] == patches).all()
    for name in ("window_index", "reverse_index"):
        padded = getattr(buffers, name)
        assert torch.equal(padded[:tokens], getattr(plan, name))
        assert torch.equal(padded[tokens:], torch.arange(tokens, MAX_TOKENS))
    assert not buffers.positions[patches:].any()
    assert torch.equal(buffers.frequencies, plan.frequencies)
