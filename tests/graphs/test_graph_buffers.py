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
    ("rule", "want"), [("zero", [5, 6, 0, 0, 0]), ("repeat_last", [5, 6, 6, 6, 6]), ("identity", [5, 6, 2, 3, 4])]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_each_rule_fills_in_place(rule, want, dtype):
    buffer = torch.full((5,), 99, dtype=dtype)
    address = buffer.data_ptr()
    fill_padded(buffer, torch.tensor([5, 6], dtype=dtype), rule, "x")
    assert (buffer.tolist(), buffer.data_ptr()) == (want, address)


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


def test_rows_are_padded_whole_and_nan_does_not_survive():
    buffer = torch.full((3, 2), float("nan"))
    fill_padded(buffer, torch.ones(1, 2), "zero", "x")
    assert buffer.tolist() == [[1, 1], [0, 0], [0, 0]]
    fill_padded(buffer, torch.tensor([[1.0, 2.0]]), "repeat_last", "x")
    assert buffer.tolist() == [[1, 2]] * 3


@pytest.mark.parametrize(
    ("values", "rule", "error", "message"),
    [
        (torch.zeros(6, 2), "zero", ValueError, r"x: expected a shape that fits the captured \(5, 2\), got \(6, 2\)"),
        (torch.zeros(3, 3), "zero", ValueError, r"x: expected a shape that fits the captured \(5, 2\), got \(3, 3\)"),
        (torch.zeros(3, 2), "mirror", TypeError, r"x: expected a padding rule from \('zero', 'rep.*, got 'mirror'"),
    ],
)
def test_what_does_not_fit_is_named(values, rule, error, message):
    with pytest.raises(error, match=message):
        fill_padded(torch.zeros(5, 2), values, rule, "x")


# --- a metadata dataclass ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    first: Metadata
    second: Metadata


def test_nested_metadata_is_filled_in_turn():
    """Each part by its own rules; a part of another class, or beyond its capacity, is refused."""
    buffers = Nested(capacity(), capacity())
    fill_metadata(buffers, Nested(metadata(), metadata(values=(5.0,), lengths=(0, 1), longest=2)))
    assert (buffers.first.values.tolist(), buffers.second.values.tolist()) == ([1, 2, 0, 0], [5, 0, 0, 0])
    assert buffers.second.lengths.tolist() == [0, 1, 1, 1, 1]
    assert [t.tolist() for t in metadata_tensors(buffers).values()][2] == [5, 0, 0, 0]
    assert len(metadata_tensors(buffers)) == 4
    with pytest.raises(TypeError, match="metadata: expected Metadata, got Nested"):
        fill_metadata(buffers, Nested(metadata(), buffers))


def test_metadata_is_filled_field_by_field():
    """Tensors padded by the rule on their field, integers kept as captured, tuples left out."""
    buffers = capacity()
    addresses = (buffers.values.data_ptr(), buffers.lengths.data_ptr())
    fill_metadata(buffers, metadata(groups=(torch.zeros(1),), longest=3))
    assert buffers.values.tolist() == [1, 2, 0, 0]
    assert buffers.lengths.tolist() == [0, 1, 2, 2, 2]
    assert (buffers.groups, buffers.longest) == ((), 3)
    assert addresses == (buffers.values.data_ptr(), buffers.lengths.data_ptr())


def test_capacity_exceeded_is_a_value_error():
    with pytest.raises(ValueError, match="longest: 4 exceeds the captured capacity of 3"):
        fill_metadata(capacity(), metadata(longest=4))
    with pytest.raises(ValueError, match=r"lengths: expected a shape that fits the captured \(5,\), got \(6,\)"):
        fill_metadata(capacity(), metadata(lengths=(0,) * 6))


def test_a_field_without_a_rule_is_a_type_error():
    """Tensor or not: nothing enters a graph by default."""

    @dataclass(frozen=True, slots=True, eq=False)
    class NoRule:
        x: torch.Tensor

    @dataclass(frozen=True, slots=True, eq=False)
    class Text:
        x: str

    with pytest.raises(TypeError, match="x: expected a padding rule from .*, got 'none'"):
        fill_metadata(NoRule(torch.zeros(2)), NoRule(torch.zeros(1)))
    with pytest.raises(TypeError, match="x: a str cannot be part of a graph"):
        fill_metadata(Text("a"), Text("a"))


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


def test_a_capacity_is_itself_a_legal_plan():
    """A warm-up runs on it: lengths rise to the number of patches, no segment is longer than the baked maximum."""
    buffers = ENCODER.plan_capacity(MAX_TOKENS, MAX_FRAMES)
    for lengths, longest in (
        (buffers.cu_seqlens, buffers.max_seqlen),
        (buffers.cu_window_seqlens, buffers.max_window_seqlen),
    ):
        assert (lengths[0], lengths[-1]) == (0, 4 * MAX_TOKENS)
        assert (lengths.diff() >= 0).all()
        assert lengths.diff().max() <= longest
