"""Data-parallel encoding. Oracle: the same call without a process group, and vLLM's golden
assignments.

Every world size is one set of real processes, joined by gloo, that runs all cases; each rank leaves
its results in a file.
"""

import json
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from closeness import assert_agree
from forked import exit_codes
from graph_families import build
from hypothesis import given
from hypothesis import strategies as st

from refvl.graphs import EncoderGraphManager
from refvl.pixels.slices import SliceGroup
from refvl.serving.parallel import (
    get_count_assignment,
    get_load_balance_assignment,
    get_speed_up,
    run_dp_sharded_mrope_vision_model,
    run_dp_sharded_vision_model,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vision_utils.json").read_text())["load_balance"]
GRIDS = {
    "more items than ranks": [(1, 4, 6), (1, 14, 16), (2, 4, 4), (1, 2, 2), (1, 8, 8), (3, 4, 6), (1, 4, 6)],
    "fewer items than ranks": [(1, 4, 6), (2, 8, 6)],
    "one item": [(1, 6, 4)],
    "no item": [],
}
PACK = SliceGroup(((4, 3), (4, 3)), (2, 6))  # two frames that share a set of tokens
LAYOUTS = {  # of encoders whose media are no grids
    "MiniCPM-V 4.5": [((2, 3),), ((4, 4), (3, 5), (3, 5)), (PACK, PACK), ((5, 2),)],
    "MiniCPM-V 4.6": [((4, 8),), ((4, 4), (8, 4), (8, 4)), ((12, 4),)],
    "Step3-VL": [(0, 0), (2, 2), (1, 3), (0, 0)],
    "Step3-VL-10B": [(0, 0), (2, 2), (1, 3), (0, 0)],
}
BATCHES = {"seven pictures": 7, "one picture": 1}


class Pooling(torch.nn.Module):
    """A tower of one picture size: (b, 3, 4, 4) -> (b, 2, 6)."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(24, 6)

    def forward(self, pictures):
        return self.proj(pictures.view(len(pictures), 2, 24)).tanh()


@cache
def tower(name):
    torch.manual_seed(7)
    encoder = build(name)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return encoder


def items(kind, case):
    """(layouts, how many rows each has, the rows)."""
    layouts = LAYOUTS.get(kind) or GRIDS[case]
    encoder = tower("Qwen2.5-VL" if kind == "graphs" else kind)
    values = 588 if kind in LAYOUTS else encoder.config.patch_values  # a patch of one picture, or of two frames
    counts = [encoder.item_size(layout)[0] for layout in encoder.check_layouts(layouts)]
    torch.manual_seed(len(layouts))
    return layouts, counts, torch.randn(sum(counts), values)


def graph_manager():
    return EncoderGraphManager(tower("Qwen2.5-VL"), budgets=[8, 32], max_items=4, max_frames=8, progress=False)


def run_case(name):
    """One case, through the process group if there is one."""
    kind, case = name
    if kind == "pictures":
        torch.manual_seed(3)
        model = Pooling()
        return [run_dp_sharded_vision_model(torch.randn(BATCHES[case], 3, 4, 4), model)]
    model = graph_manager() if kind == "graphs" else tower(kind)
    layouts, _, rows = items(kind, case)
    return list(run_dp_sharded_mrope_vision_model(model, rows, layouts))


MODELS = {"pictures": Pooling, "graphs": lambda: tower("Qwen2.5-VL")}  # else a tower
CASES = [(kind, case) for kind in ("Qwen2.5-VL", "Qwen3-VL", "GLM-4.1V") for case in GRIDS]
CASES += [(kind, "slices and crops") for kind in LAYOUTS]
CASES += [("graphs", case) for case in ("more items than ranks", "one item")]
CASES += [("pictures", case) for case in BATCHES]


def wrong_grids():
    """The error of a call whose rows and grids do not match; a collective behind it would wait for
    ever."""
    with pytest.raises(ValueError, match="pixel_values: dimension 0 must be 16, got 15 patches of grid") as error:
        run_dp_sharded_mrope_vision_model(tower("GLM-4.1V"), torch.zeros(15, 1176), [(1, 4, 4)])
    return str(error.value)


def work(rank, world_size, folder):
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    results = {name: run_case(name) for name in CASES} | {"wrong grids": wrong_grids()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone():
    """The oracle: every case in this process, without a group."""
    return {name: run_case(name) for name in CASES}


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.slow), 4], ids=lambda n: f"{n} ranks")
def ranks(request, tmp_path_factory):
    """The results of every rank."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = [(rank, request.param, str(folder)) for rank in range(request.param)]
    assert exit_codes(work, arguments) == [0] * request.param
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES, ids=str)
def test_sharded_equals_unsharded(name, ranks, alone):
    """On every rank: all items, in the caller's order."""
    model = MODELS.get(name[0], lambda: tower(name[0]))()
    for results in ranks:
        assert [tuple(x.shape) for x in results[name]] == [tuple(x.shape) for x in alone[name]]
        for ours, want in zip(results[name], alone[name], strict=True):
            assert_agree(ours, want, model)
            assert want.std() > 0.05


@pytest.mark.thorough
def test_a_mistake_is_raised_on_every_rank(ranks):
    assert len({results["wrong grids"] for results in ranks}) == 1


@pytest.mark.parametrize("name", [name for name in CASES if name[0] != "pictures"], ids=str)
@torch.no_grad()
def test_unsharded_equals_each_item_alone(name, alone):
    """Oracle: the encoder itself, one call per item."""
    kind, case = name
    encoder, (layouts, counts, rows) = tower("Qwen2.5-VL" if kind == "graphs" else kind), items(kind, case)
    for ours, row, layout in zip(alone[name], rows.split(counts), layouts, strict=True):
        assert_agree(ours, encoder(row, [layout]), encoder)


# --- who encodes what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{len(c['sizes'])} on {c['num_gpus']}")
def test_assignment_equals_golden_data(case):
    """Oracle: vLLM 0.33.0, ties included."""
    got = get_load_balance_assignment(case["sizes"], case["num_gpus"])
    assert got == (case["shuffle_indices"], case["gpu_sample_counts"], case["grouped_sizes"])


@pytest.mark.parametrize("assign", [get_load_balance_assignment, get_count_assignment])
@given(sizes=st.lists(st.integers(0, 10**6), max_size=30), num_gpus=st.integers(1, 9))
def test_assignments_are_partitions(assign, sizes, num_gpus):
    """Oracle: every item once, and the loads summed again."""
    order, counts, loads = assign(sizes, num_gpus)
    assert sorted(order) == list(range(len(sizes)))
    assert len(counts) == len(loads) == num_gpus
    ends = list(accumulate(counts))
    assert loads == [sum(sizes[i] for i in order[end - n : end]) for n, end in zip(counts, ends, strict=True)]


def test_speed_up_counts_the_slowest_rank():
    assert get_speed_up([1000, 350]) == 1.35
    assert get_speed_up([4, 4, 4]) == 3
    assert get_speed_up([]) == get_speed_up([0, 0]) == 1


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="num_gpus: must be at least 1, got 0"):
        get_load_balance_assignment([1, 2], 0)
    with pytest.raises(ValueError, match=r"sizes\[1\]: expected a non-negative number, got -2"):
        get_load_balance_assignment([1, -2], 2)


def test_wrong_grids_are_named():
    rows = torch.zeros(6, 1176)
    with pytest.raises(ValueError, match="grid_thw_list"):
        run_dp_sharded_mrope_vision_model(tower("GLM-4.1V"), rows, [(1, 3, 2)])
    with pytest.raises(ValueError, match="rope_type: expected 'rope_3d'"):
        run_dp_sharded_mrope_vision_model(tower("GLM-4.1V"), rows, [(1, 4, 4)], rope_type="rope_2d")
