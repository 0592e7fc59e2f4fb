"""Whatever the manager packs, replays or leaves to the encoder: the outputs are those of the eager encoder."""

from dataclasses import fields

import pytest
import torch
from closeness import assert_agree, assert_differ
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import Batch, CaptureError, EncoderGraphManager
from refvl.positions import compute_retention_mask

CONFIG = Qwen2_5_VisionConfig.tiny()  # windows of 2 x 2 merged tokens, frames in two of four blocks
BUDGETS, MAX_ITEMS, MAX_FRAMES = [8, 16, 32], 3, 4


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    encoder = Qwen2_5_VisionTransformer(CONFIG).eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return encoder


def new_manager(encoder, **options):
    limits = {"budgets": BUDGETS, "max_items": MAX_ITEMS, "max_frames": MAX_FRAMES}
    return EncoderGraphManager(encoder, **limits | options, progress=False)


@pytest.fixture(scope="module")
def manager(encoder):
    """One manager for all tests: what a test before left in its memory must not matter."""
    manager = new_manager(encoder)
    manager.capture()
    return manager


def patches_of(grids, seed=1):
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, CONFIG.patch_values, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def eager(encoder, patches, grids):
    """One tensor per item, each encoded alone."""
    counts = [t * h * w for t, h, w in grids]
    return [encoder(rows, [grid]) for rows, grid in zip(patches.split(counts), grids, strict=True)]


def assert_equal(encoder, outputs, wanted):
    """Replay sums attention over masked pairs, eager over segments: rounding only."""
    for output, want in zip(outputs, wanted, strict=True):
        assert_agree(output, want, encoder)


@torch.inference_mode()
def poison(manager):
    """NaN in every pixel buffer and in everything that the graphs compute; integers and masks get a wrong value."""
    for captured in manager.captured.values():
        captured.pixel_values.fill_(float("nan"))
        for operation in captured.graph.operations:
            for out in operation.outputs:
                out.fill_(float("nan") if out.is_floating_point() else 1)


merged = st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
batches = st.lists(merged.map(lambda thw: (thw[0], 2 * thw[1], 2 * thw[2])), max_size=7)
same_manager = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


# --- replay equals eager ----------------------------------------------------------------------------------------------


@same_manager
@given(batches, st.integers(0, 1000), st.sampled_from(["greedy", "optimal"]))
def test_any_batch_equals_the_eager_encoder(encoder, manager, grids, seed, policy):
    """Oracle: each item alone through the encoder. Images and videos in any order, some larger than every budget.

    Pixel padding and everything that a graph computes holds NaN before: only what was filled and computed counts.
    """
    manager.policy = policy
    poison(manager)
    patches = patches_of(grids, seed)
    outputs = manager.execute(patches, grids)
    manager.policy = "optimal"
    assert_equal(encoder, outputs, eager(encoder, patches, grids))
    assert sorted(i for batch in manager.last_batches for i in batch.indices) == list(range(len(grids)))


def test_a_b_a(encoder, manager):
    """Two batches through one graph in turn; equal inputs give equal bits, whatever ran between."""
    a, b = [(1, 4, 6)], [(2, 2, 2), (1, 2, 6)]
    patches_a, patches_b = patches_of(a, 1), patches_of(b, 2)
    first = manager.execute(patches_a, a)
    assert_equal(encoder, first, eager(encoder, patches_a, a))
    assert_equal(encoder, manager.execute(patches_b, b), eager(encoder, patches_b, b))
    assert {batch.budget for batch in manager.last_batches} == {8}
    assert torch.equal(manager.execute(patches_a, a)[0], first[0])


def test_poison_changes_no_bit(manager):
    """A small batch in a large graph: the padding rows hold NaN before, and so does all recorded memory."""
    grids = [(1, 6, 6), (2, 4, 2)]
    patches = patches_of(grids)
    clean = manager.execute(patches, grids)
    poison(manager)
    for output, want in zip(manager.execute(patches, grids), clean, strict=True):
        assert torch.equal(output, want)


def test_one_item_does_not_see_another(manager):
    """Three items in one replay: whatever the second holds, the bits of the others are the same."""
    grids = [(1, 4, 4), (2, 2, 4), (1, 6, 4)]
    patches = patches_of(grids)
    before = manager.execute(patches, grids)
    patches[16:32] *= 1000
    after = manager.execute(patches, grids)
    assert manager.last_batches == [Batch((0, 1, 2), 16)]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_stale_metadata_would_show(encoder, manager):
    """Leave one field of the buffers as the batch before had it, and the outputs are wrong: each of them counts."""
    before, grids = [(1, 8, 4)], [(2, 4, 2), (1, 2, 6), (1, 2, 2)]
    patches, captured = patches_of(grids), manager.captured["", 8]
    wanted = torch.cat(eager(encoder, patches, grids))
    for name in (f.name for f in fields(captured.metadata) if f.name not in ("groups", "window_groups", "frequencies")):
        field = getattr(captured.metadata, name)
        if not isinstance(field, torch.Tensor):
            continue
        manager.execute(patches_of(before), before)
        stale = field.clone()
        manager.execute(patches, grids)
        assert [batch.budget for batch in manager.last_batches] == [8]
        field.copy_(stale)
        assert_differ(captured.graph.replay()[: len(wanted)], wanted, encoder, name)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_more_items_than_the_limit(encoder, manager):
    """Seven equal items of 5 tokens, three to a replay."""
    grids = [(1, 2, 10)] * 7
    patches = patches_of(grids)
    assert_equal(encoder, manager.execute(patches, grids), eager(encoder, patches, grids))
    assert sorted(len(batch.indices) for batch in manager.last_batches) == [1, 3, 3]


def test_an_item_larger_than_every_budget_runs_eagerly_and_is_a_miss(encoder):
    """40 tokens against a budget of 32: exactly the eager encoder's bits."""
    manager = new_manager(encoder)
    grids = [(1, 16, 10), (1, 4, 4)]
    patches = patches_of(grids)
    outputs, wanted = manager.execute(patches, grids), eager(encoder, patches, grids)
    assert torch.equal(outputs[0], wanted[0])
    assert_equal(encoder, outputs, wanted)
    assert manager.last_batches == [Batch((1,), 8), Batch((0,), None)]
    assert (manager.stats().hits, manager.stats().misses) == (1, 1)


def test_more_frames_than_the_limit(encoder, manager):
    """Tokens would fit: five frames run eagerly, and two clips of three do not share a replay."""
    grids = [(5, 2, 2), (3, 2, 2), (3, 2, 2)]
    patches = patches_of(grids)
    assert_equal(encoder, manager.execute(patches, grids), eager(encoder, patches, grids))
    assert sorted(manager.last_batches, key=str) == [Batch((0,), None), Batch((1,), 8), Batch((2,), 8)]


def test_nothing_to_encode(manager):
    before = manager.stats()
    assert manager.execute(torch.zeros(0, CONFIG.patch_values), []) == []
    assert manager.last_batches == []
    assert manager.stats() == before


def test_the_largest_batch_of_every_budget(encoder, manager):
    """As many tokens, items, frames and windows as the limits allow: strips one token high have the most windows."""
    for budget in BUDGETS:
        grids = [(1, 2, 2), (2, 2, 2), (1, 2, 2 * (budget - 3))]
        patches = patches_of(grids)
        assert_equal(encoder, manager.execute(patches, grids), eager(encoder, patches, grids))
        assert manager.last_batches == [Batch((0, 1, 2), budget)]


# --- outputs, order, statistics ---------------------------------------------------------------------------------------


def test_outputs_are_clones(manager):
    """A later call through the same graph leaves earlier outputs as they were."""
    grids = [(1, 4, 8), (1, 4, 8)]
    first = manager.execute(patches_of(grids, 1), grids)
    kept = [output.clone() for output in first]
    second = manager.execute(patches_of(grids, 2), grids)
    graph_memory = {c.output.untyped_storage().data_ptr() for c in manager.captured.values()}
    for output, want, other in zip(first, kept, second, strict=True):
        assert torch.equal(output, want)
        assert not torch.equal(output, other)
        assert output.untyped_storage().data_ptr() not in graph_memory


def test_outputs_are_in_the_caller_s_order_with_the_sizes_of_the_items(encoder, manager):
    """Sizes fall while packing sorts them upwards; each output has t * h * w / 4 rows."""
    grids = [(1, 16, 10), (1, 8, 8), (3, 4, 4), (1, 4, 6), (2, 2, 2), (1, 2, 2)]
    patches = patches_of(grids)
    outputs = manager.execute(patches, grids)
    assert [output.shape for output in outputs] == [(t * h * w // 4, CONFIG.out_hidden_size) for t, h, w in grids]
    assert_equal(encoder, outputs, eager(encoder, patches, grids))


def test_grids_may_be_a_tensor_and_pixels_may_have_another_dtype(encoder, manager):
    grids = [(1, 4, 4), (2, 2, 4)]
    patches = patches_of(grids)
    outputs = manager.execute(patches.double(), torch.tensor(grids))
    assert_equal(encoder, outputs, eager(encoder, patches, grids))
    assert outputs[0].dtype == torch.float32


def test_statistics_are_those_counted_by_hand(encoder):
    """Oracle: the comments."""
    manager = new_manager(encoder, policy="greedy")
    empty = manager.stats()
    assert (empty.hits, empty.misses, empty.hit_rate, empty.padding_waste) == (0, 0, 0, 0)
    grids = [(1, 4, 4), (1, 4, 12), (1, 16, 10)]  # 4 + 12 tokens share a graph of 16, 40 run eagerly
    manager.execute(patches_of(grids), grids)
    stats = manager.stats()
    assert (stats.hits, stats.misses, stats.hit_rate, stats.padding_waste) == (2, 1, 2 / 3, 0)
    grids = [(5, 2, 2), (1, 2, 10)]  # five frames run eagerly, 5 tokens in a graph of 8
    manager.execute(patches_of(grids), grids)
    later = manager.stats()
    assert (later.hits, later.misses, later.tokens, later.budget_tokens) == (3, 2, 21, 24)
    assert (later.hit_rate, later.padding_waste) == (3 / 5, 1 - 21 / 24)
    assert (stats.hits, stats.misses) == (2, 1)  # what was asked for before does not change
    assert empty.hits == 0


def test_optimal_wastes_less_than_greedy(encoder):
    """Tokens 7, 8 and 9: greedy puts all of them into a graph of 32, optimal into 15 and 9 without padding."""
    grids = [(1, 2, 14), (1, 4, 8), (1, 6, 6)]
    budgets = {}
    for policy in ("greedy", "optimal"):
        manager = new_manager(encoder, policy=policy, budgets=[8, 9, 15, 32])
        patches = patches_of(grids)
        assert_equal(encoder, manager.execute(patches, grids), eager(encoder, patches, grids))
        budgets[policy] = sorted(batch.budget for batch in manager.last_batches)
    assert budgets == {"greedy": [32], "optimal": [9, 15]}


# --- life of the graphs -----------------------------------------------------------------------------------------------


def test_graphs_are_captured_at_the_first_use_or_before_and_once(encoder):
    """Largest first; a second capture leaves what is there."""
    manager = new_manager(encoder)
    assert manager.captured == {}
    manager.execute(patches_of([(1, 4, 4)]), [(1, 4, 4)])
    assert list(manager.captured) == [("", budget) for budget in BUDGETS[::-1]]
    before = dict(manager.captured)
    manager.capture()
    assert manager.captured == before


def test_clear_gives_everything_back_and_the_next_use_captures_again(encoder):
    manager = new_manager(encoder)
    grids = [(1, 4, 4), (1, 16, 10)]
    patches = patches_of(grids)
    wanted = eager(encoder, patches, grids)
    outputs = manager.execute(patches, grids)
    assert manager.memory_bytes() > 0
    manager.clear()
    assert (manager.captured, manager.memory_bytes(), manager.stats().hits) == ({}, 0, 0)
    assert_equal(encoder, outputs, wanted)  # clones outlive the graphs
    assert_equal(encoder, manager.execute(patches, grids), wanted)
    assert manager.stats().hits == 1


def test_a_plan_belongs_to_its_call(encoder, manager):
    """Planned together, run in the other order: each plan packs and encodes its own items."""
    a, b = [(1, 4, 6), (1, 2, 2)], [(2, 2, 2), (1, 2, 6), (1, 16, 10)]
    plan_a, plan_b = manager.plan(a), manager.plan(b)
    for plan, grids in ((plan_b, b), (plan_a, a)):
        patches = patches_of(grids)
        assert_equal(encoder, manager.run(patches, plan), eager(encoder, patches, grids))
        assert manager.last_batches == plan.batches
        assert sorted(i for batch in plan.batches for i in batch.indices) == list(range(len(grids)))
        assert [batch.tokens for batch in plan.batches] == [
            sum(grids[i][0] * grids[i][1] * grids[i][2] // 4 for i in batch.indices) for batch in plan.batches
        ]


def test_memory_is_at_least_the_buffers(encoder, manager):
    """Pixels alone: 4 patches per token in float32, for every budget; recorded outputs come on top."""
    pixels = sum(4 * budget * CONFIG.patch_values * 4 for budget in BUDGETS)
    recorded = sum(captured.graph.memory_bytes() for captured in manager.captured.values())
    assert manager.memory_bytes() > pixels + recorded > recorded > 0


class ReadsBack(Qwen2_5_VisionTransformer):
    """Chooses by a value of the pixels, as no captured encoder may."""

    def forward(self, pixel_values, grid_thw=None, *, metadata=None, attention=None):
        out = super().forward(pixel_values, grid_thw, metadata=metadata, attention=attention)
        return -out if out.sum() < 0 else out


class ReadsBackIfSmall(ReadsBack):
    def forward(self, pixel_values, grid_thw=None, *, metadata=None, attention=None):
        forward = super().forward if len(pixel_values) < 50 else Qwen2_5_VisionTransformer.forward.__get__(self)
        return forward(pixel_values, grid_thw, metadata=metadata, attention=attention)


@pytest.mark.parametrize("kind", [ReadsBack, ReadsBackIfSmall])
def test_an_encoder_that_reads_a_value_back_is_refused(kind):
    """Runs eagerly, but not as a graph; when the smallest budget fails after the others, none of them is kept."""
    encoder, grids = kind(CONFIG).eval(), [(1, 2, 2)]
    patches = patches_of(grids)
    with torch.no_grad():
        encoder(patches, grids)
    manager = new_manager(encoder)
    for _ in range(2):
        with pytest.raises(CaptureError, match="__bool__ reads a value back"):
            manager.execute(patches, grids)
        assert manager.captured == {}


def test_half_precision_equals_eager(encoder):
    """bfloat16 on a CPU, where no variable-length kernel exists."""
    half = Qwen2_5_VisionTransformer(CONFIG).eval()
    half.load_state_dict(encoder.state_dict())
    manager, grids = new_manager(half.bfloat16()), [(1, 8, 8), (2, 4, 2)]
    patches = patches_of(grids).bfloat16()
    for output, want in zip(manager.execute(patches, grids), eager(half, patches, grids), strict=True):
        assert output.dtype == torch.bfloat16
        assert_agree(output, want, 12 * CONFIG.depth)  # what a block rounds


# --- graphs and pruning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.0, 0.3, 0.75])
def test_pruning_the_replay_equals_pruning_the_eager_output(encoder, manager, q):
    """EVS needs a value back, so it stays outside of the graph; the clone keeps its rows when the next clip replays."""
    clip, other = (4, 4, 4), (4, 4, 4)
    patches, others = patches_of([clip], 3), patches_of([other], 4)
    (output,), (want,) = manager.execute(patches, [clip]), eager(encoder, patches, [clip])
    assert manager.last_batches == [Batch((0,), 16)]
    manager.execute(others, [other])
    mask = compute_retention_mask(output, clip, 2, q)
    assert torch.equal(mask, compute_retention_mask(want, clip, 2, q))
    assert mask.sum() == max(4, int(16 * (1 - q)))
    assert_agree(output[mask], want[mask], encoder)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "graph"}, r"backend: expected one of \('auto', 'cuda', 'trace'\), got 'graph'"),
        ({"backend": "cuda"}, "backend: 'cuda' needs an encoder on CUDA, this one is on cpu"),
        ({"policy": "best"}, r"policy: expected one of \('greedy', 'optimal'\), got 'best'"),
        ({"budgets": [2, 64]}, r"max_items: must not exceed the smallest budget, got 3 for budgets \[2, 64\]"),
        ({"budgets": []}, "budgets: expected at least one, got none"),
        ({"max_frames": 0}, "max_frames: must be at least 1, got 0"),
    ],
)
def test_limits_are_checked_before_anything_is_captured(encoder, options, message):
    with pytest.raises(ValueError, match=message):
        new_manager(encoder, **options)


@pytest.mark.parametrize(
    ("patches", "grids", "error", "message"),
    [
        (torch.zeros(15, 1176), [(1, 4, 4)], ValueError, "pixel_values: dimension 0 must be 16, got 15"),
        (torch.zeros(16, 588), [(1, 4, 4)], ValueError, r"pixel_values: shape \(16, 588\) does not fit the captured"),
        (torch.zeros(16), [(1, 4, 4)], ValueError, r"pixel_values: expected 2 dimensions \(16, values\)"),
        ([[0.0] * 1176] * 16, [(1, 4, 4)], TypeError, "pixel_values: expected a torch.Tensor, got list"),
        (
            torch.zeros(16, 1176, dtype=torch.uint8),
            [(1, 4, 4)],
            TypeError,
            "pixel_values: expected floating-point .*uint8",
        ),
        (torch.zeros(16, 1176).cfloat(), [(1, 4, 4)], TypeError, "pixel_values: expected floating-point .*complex64"),
        (torch.zeros(16, 1176).bool(), [(1, 4, 4)], TypeError, "pixel_values: expected floating-point .*bool"),
        (
            torch.zeros(16, 1176, device="meta"),
            [(1, 4, 4)],
            TypeError,
            "pixel_values: expected values for an encoder on cpu",
        ),
        (torch.zeros(12, 1176), [(1, 3, 4)], ValueError, r"grid_thw\[0\]: h and w must be multiples"),
        (torch.zeros(0, 1176), [(1, 0, 4)], ValueError, r"grid_thw\[0\]: every extent must be at least 1"),
        (torch.zeros(16, 1176), 16, TypeError, "grid_thw: expected a sequence of"),
    ],
)
def test_wrong_inputs_are_named_and_leave_the_manager_usable(encoder, manager, patches, grids, error, message):
    with pytest.raises(error, match=message):
        manager.execute(patches, grids)
    assert_equal(
        encoder,
        manager.execute(patches_of([(1, 4, 4)]), [(1, 4, 4)]),
        eager(encoder, patches_of([(1, 4, 4)]), [(1, 4, 4)]),
    )
