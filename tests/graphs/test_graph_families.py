"""The random towers of `tests/graph_families.py` see what graphs may get wrong."""

import pytest
import torch
from graph_families import FAMILIES, build, distance, make_case, position_fields, without

from refvl.pixels.slices import SliceGroup

LAYOUTS = {"MiniCPM-V 4.5": (SliceGroup(((3, 4), (5, 2)), (5, 90)),), "MiniCPM-V 4.6": ((8, 12),)}
LAYOUTS |= dict.fromkeys(["Step3-VL", "Step3-VL-10B"], (1, 2)) | dict.fromkeys(FAMILIES[:4], (1, 4, 6))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_counts(family):
    """With zeros in place of any of the positions the output moves by a tenth, more than any tolerance allows."""
    encoder = build(family)
    case = make_case(encoder, [LAYOUTS.get(family, ((3, 4), (5, 2)))])
    plan = encoder.plan(case.layouts)
    assert position_fields(plan)
    with torch.no_grad():
        moved = {
            field: distance([encoder(case.rows, metadata=without(plan, field))], case.wanted)
            for field in position_fields(plan)
        }
    assert min(moved.values()) > 0.1, moved
