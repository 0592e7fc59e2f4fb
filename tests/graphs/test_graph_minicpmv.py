"""MiniCPM-V by graph: what a token pays for, and which buffers a graph reads. Replays: `contracts/test_encoders.py`."""

import pytest
from closeness import assert_agree
from graph_families import ENCODERS, build, make_case, manager_of, poison

from refvl.graphs import EncoderGraphManager
from refvl.pixels.slices import SliceGroup

MAX_FRAMES = 4
SLICES = [  # 4 x 4 patches per slice and 8 spare: budget 8 holds two sets of queries and 48 rows
    (((4, 6), (6, 4)), 8),
    (((4, 6), (5, 5)), 16),
    (((1, 193),), None),
    (((1, 1),) * 8, 32),
    (((1, 1),) * 9, None),
]
# four tokens for up to 1 + MAX_FRAMES frames: as many as the smallest budget's buffers hold, and no more
GROUPS = [((SliceGroup(((1, 2),) * count, tuple(range(count))),), budget) for count, budget in [(5, 8), (6, None)]]


@pytest.mark.parametrize("version", ["2.5", "2.6", "4.0", "4.5"])
def test_a_token_pays_for_its_rows_and_frames(version):
    """Oracle: the limits by hand, and the eager encoder, item by item, whatever the buffers held."""
    encoder = build(f"MiniCPM-V {version}")
    manager = manager_of(encoder, budgets=[8, 16, 32], max_frames=MAX_FRAMES)
    manager.capture()
    for layout, budget in [*SLICES, *(GROUPS if version == "4.5" else ())]:
        before = manager.stats()
        poison(manager)
        case = make_case(encoder, [layout])
        [output] = manager.execute(case.rows, case.layouts)
        assert_agree(output, case.wanted[0], encoder)
        assert [batch.budget for batch in manager.last_batches] == [budget], layout
        after = manager.stats()
        assert (after.hits - before.hits, after.misses - before.misses) == ((1, 0) if budget else (0, 1))


def test_2_0_has_no_graph_path():
    encoder = ENCODERS["2.0"].from_config({"hidden_size": 48, "query_num": 4, "vision_config": {"depth": 1}})
    with pytest.raises(ValueError, match="graphs: not supported by MiniCPM-V 2.0, whose encoder runs eagerly"):
        EncoderGraphManager(encoder)
