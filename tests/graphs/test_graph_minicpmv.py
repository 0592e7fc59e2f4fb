"""MiniCPM-V by graph: what a token pays for, and which buffers a graph reads. Replays: `contracts/test_encoders.py`."""

from dataclasses import fields, is_dataclass

import pytest
from closeness import assert_agree
from graph_families import build, make_case, manager_of, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refvl.families import FAMILIES
from refvl.graphs import Batch, EncoderGraphManager
from refvl.pixels.slices import SliceGroup

LATER = ["2.5", "2.6", "4.0", "4.5"]
MAX_FRAMES = 4
ENCODERS = {family.version: family.encoder for family in FAMILIES if family.version}


@pytest.fixture(scope="module", params=LATER)
def manager(request):
    """4 x 4 patches per slice and 8 spare: 24 patch rows for every 4 tokens.

    One manager for all tests: what a test before left in its memory must not matter.
    """
    manager = manager_of(build(f"MiniCPM-V {request.param}"), budgets=[8, 16, 32], max_frames=MAX_FRAMES)
    manager.capture()
    return manager


@pytest.fixture(scope="module")
def manager_4_5():
    manager = manager_of(build("MiniCPM-V 4.5"), budgets=[8, 16, 32], max_frames=MAX_FRAMES)
    manager.capture()
    return manager


def check(manager, layouts):
    """Replay equals eager, item by item, whatever the buffers held; returns the outputs."""
    poison(manager)
    case = make_case(manager.encoder, layouts)
    outputs = manager.execute(case.rows, layouts)
    for output, want in zip(outputs, case.wanted, strict=True):
        assert_agree(output, want, manager.encoder)
    return outputs


slices = st.tuples(st.integers(1, 8), st.integers(1, 8))
pictures = st.lists(slices, min_size=1, max_size=5).map(tuple)


@st.composite
def frame_groups(draw):
    frames = draw(st.lists(slices, min_size=1, max_size=4))
    ids = draw(st.lists(st.integers(-1, 400), min_size=len(frames), max_size=len(frames)))
    return SliceGroup(tuple(frames), tuple(ids))


clips = st.lists(st.one_of(frame_groups(), slices), min_size=1, max_size=4).map(tuple)


def test_a_token_pays_for_its_rows(manager):
    """Budget 8 holds two sets of queries and 48 rows: 2 slices of 24 fit, one row more takes the next budget."""
    for layouts, budget in [
        ([((4, 6), (6, 4))], 8),
        ([((4, 6), (5, 5))], 16),
        ([((1, 193),)], None),
        ([((1, 1),) * 8], 32),
        ([((1, 1),) * 9], None),
    ]:
        before = manager.stats()
        check(manager, layouts)
        assert [batch.budget for batch in manager.last_batches] == [budget], layouts
        after = manager.stats()
        assert (after.hits - before.hits, after.misses - before.misses) == ((1, 0) if budget else (0, 1))


def test_frames_that_share_queries_are_limited(manager_4_5):
    """Four tokens for up to 1 + MAX_FRAMES frames: as many as the smallest budget's buffers hold, and no more."""
    for count, budget in [(5, 8), (6, None)]:
        layouts = [(SliceGroup(((1, 2),) * count, tuple(range(count))),)]
        check(manager_4_5, layouts)
        assert manager_4_5.last_batches == [Batch((0,), budget)]
        assert manager_4_5.encoder.item_size(manager_4_5.encoder.check_layouts(layouts)[0]) == (2 * count, 4, count - 1)


@settings(max_examples=60)
@given(layouts=st.lists(st.one_of(pictures, clips), min_size=1, max_size=3), budget=st.integers(1, 40))
def test_what_fits_the_limits_fits_the_buffers(manager_4_5, layouts, budget):
    """Whenever tokens, rows and frames are within their limits, so is every tensor and integer of the plan."""
    encoder = manager_4_5.encoder
    sizes = [encoder.item_size(layout) for layout in encoder.check_layouts(layouts)]
    rows, tokens, frames = (sum(column) for column in zip(*sizes, strict=True))
    pixel_rows = len(encoder.pixel_buffer(budget))
    if tokens <= budget and rows <= pixel_rows and frames <= MAX_FRAMES:
        assert_within(encoder.plan(layouts), encoder.plan_capacity(budget, MAX_FRAMES))
    if tokens > budget // 4 * 4:
        assert tokens > budget  # tokens come in sets, so a rounded-down number of sets loses nothing


def assert_within(plan, capacity):
    for f in fields(plan):
        value, limit = getattr(plan, f.name), getattr(capacity, f.name)
        if is_dataclass(value):
            assert_within(value, limit)
        elif isinstance(value, Tensor):
            assert len(value) <= len(limit)
        elif isinstance(value, int):
            assert value <= limit


def test_2_0_has_no_graph_path():
    encoder = ENCODERS["2.0"].from_config({"hidden_size": 48, "query_num": 4, "vision_config": {"depth": 1}})
    with pytest.raises(ValueError, match="graphs: not supported by MiniCPM-V 2.0, whose encoder runs eagerly"):
        EncoderGraphManager(encoder)
