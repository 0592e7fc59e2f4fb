"""What every encoder keeps, whatever its family. A new one is one more `Case`; what is particular to it stays apart.

An oracle is transformers' tower on the same weights where there is one. MiniCPM-V's are the padded
forms of tower and resampler, and Step3's its squares one by one, which their own files compare with
golden results.
"""

import functools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest
import torch
from closeness import assert_agree
from graph_families import ENCODERS, NAVIT, VIDEO, minicpmv, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import HAS_5_23
from torch import Tensor, nn
from towers import CLASSES, random_rows, randomize, run_theirs, same_weights, transformers_tower
from transformers import CONFIG_MAPPING

from refvl.encoders import (
    MiniCPMV4_6Encoder,
    MiniCPMV4_6VisionConfig,
    Step3VisionConfig,
    Step3VisionEncoder,
    StepVLEncoder,
    StepVLVisionConfig,
)
from refvl.graphs import EncoderGraphManager
from refvl.graphs.buffers import metadata_tensors
from refvl.pixels.slices import SliceGroup
from refvl.study.report import Trace
from refvl.study.watch import TowerWatch

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Case:
    """One encoder. Layouts of `small` fit into one replay, those of `mixed` need
    several, and one is too large."""

    name: str
    build: Callable[[], nn.Module]  # random weights; the same at every call
    values: int  # in a patch row
    small: list  # layouts of two items
    mixed: list
    items: st.SearchStrategy  # one layout
    oracle: Callable[[nn.Module, Tensor, list], Tensor]  # encoder, rows, layouts -> (M, D)
    manager: Callable | None  # encoder -> graphs; None: no graph path
    rounded: int  # values rounded to half precision one after the other, on the way to an output
    folds: bool = False  # rows on the way: then its blocks cannot be watched

    def __str__(self) -> str:
        return self.name


def small_graphs(encoder):
    sizes = {"budgets": [8, 16, 32], "max_items": 3, "max_frames": 8}
    return EncoderGraphManager(encoder, **sizes, progress=False)


def names_of_transformers(encoder) -> dict[str, Tensor]:
    """The encoder's weights with kernels in their own shape, and q, k, v apart."""
    weights = {}
    for name, weight in encoder.state_dict().items():
        if name.endswith("patch_embedding.weight"):
            weight = weight.unflatten(1, encoder.config.patch_shape)
        pieces = weight.chunk(3) if ".qkv." in name else [weight]
        for letter, part in zip("qkv", pieces, strict=False):
            weights[name.replace(".qkv.", f".{letter}_proj.")] = part
    return weights


# --- towers that read grids -------------------------------------------------------------------------------------------

SIDES = st.integers(1, 7).map(lambda n: 2 * n)
GRIDS = [(1, 8, 12), (3, 6, 10), (1, 2, 2), (2, 16, 8), (1, 2, 26)]


def grid_case(family: str, std: float) -> Case:
    config = CLASSES[family].config_class.tiny()
    theirs = functools.cache(lambda: transformers_tower(family, config, std=std))
    return Case(
        name=family,
        build=lambda: same_weights(family, theirs(), config),
        values=config.patch_values,
        small=[(1, 4, 6), (2, 2, 4)],
        mixed=GRIDS,
        items=st.tuples(st.integers(1, 3), SIDES, SIDES),
        oracle=lambda encoder, rows, grids: run_theirs(theirs(), rows, grids),
        manager=small_graphs,
        rounded=12 * config.depth,
    )


# --- MiniCPM-V --------------------------------------------------------------------------------------------------------

SLICES = st.tuples(st.integers(1, 8), st.integers(1, 8))


@st.composite
def frame_groups(draw):
    frames = draw(st.lists(SLICES, min_size=1, max_size=4))
    ids = draw(st.lists(st.integers(-1, 400), min_size=len(frames), max_size=len(frames)))
    return SliceGroup(tuple(frames), tuple(ids))


def padded_modules(encoder, rows: Tensor, layouts) -> Tensor:
    """Tower and resampler in the forms that take padded strips, or, in 2.0, one picture after the other."""
    groups = [group for layout in encoder.check_layouts(layouts) for group in layout]
    sizes = [size for group in groups for size in group.slices]
    parts = rows.split([h * w for h, w in sizes])
    if encoder.vpm.__class__.__name__ == "SiglipViT":
        images = [
            part.view(h, w, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(1, 3, h * 14, w * 14)
            for part, (h, w) in zip(parts, sizes, strict=True)
        ]
        pairs = zip(images, sizes, strict=True)
        return torch.cat([encoder.resampler(encoder.vpm(image), size)[0] for image, size in pairs])
    strips = torch.full((len(sizes), max(map(len, parts)), 3, 14, 14), NAN)
    for strip, part in zip(strips, parts, strict=True):
        strip[: len(part)] = part.view(-1, 3, 14, 14)
    seen = [(1, h * w) for h, w in sizes] if type(encoder).__name__ == "MiniCPMV2_5Encoder" else None
    features = encoder.vpm(strips.permute(0, 2, 3, 1, 4).flatten(3), sizes, seen)
    ids = [list(group.temporal_ids or [-1] * len(group.slices)) for group in groups]
    times = {"temporal_ids": ids} if any(group.temporal_ids for group in groups) else {}
    return encoder.resampler(features, sizes, **times).flatten(0, 1)


def minicpmv_case(version: str) -> Case:
    images = st.lists(SLICES, min_size=1, max_size=5).map(tuple)
    videos = st.lists(st.one_of(frame_groups(), SLICES), min_size=1, max_size=4).map(tuple)
    return Case(
        name=f"minicpmv {version}",
        build=lambda: minicpmv(version),
        values=588,
        small=[((1, 9),), ((6, 4),)],
        mixed=[((4, 5), (7, 6), (2, 3)), VIDEO if version == "4.5" else ((3, 4),), ((1, 9),), ((2, 2),) * 9],
        items=st.one_of(images, videos) if version == "4.5" else images,
        oracle=padded_modules,
        manager=None if version == "2.0" else small_graphs,
        rounded=40,
    )


# --- Step3 ------------------------------------------------------------------------------------------------------------


def squares_one_by_one(encoder, rows: Tensor, layouts, run=None) -> Tensor:
    """Each crop and each overview as a square of pixels, through `run`: (1, 3, S, S) -> (1, M, D)."""
    small, large = encoder.crop_side, encoder.image_side
    sides = [side for layout in encoder.check_layouts(layouts) for side in [small] * layout.crops + [large]]
    pieces = []
    for part, side in zip(rows.split([side**2 for side in sides]), sides, strict=True):
        square = part.view(side, side, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(1, 3, side * 14, side * 14)
        pieces.append((run or encoder)(square)[0])
    return torch.cat(pieces)


def transformers_squares(encoder, rows: Tensor, layouts) -> Tensor:
    """transformers' tower of Step-3.7 with the same weights, one square after the
    other; refvl's without it."""
    if not HAS_5_23:
        return squares_one_by_one(encoder, rows, layouts)
    from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionConfig, Step3p7VisionModel

    c, weights = encoder.config, {}
    for name, weight in names_of_transformers(encoder).items():
        name = name.removeprefix("vision_model.").replace("vit_downsampler.", "vit_downsampler1.")
        weights[name.replace("vit_downsampler", "downsampler")] = weight
    projector = weights.pop("vit_large_projector.weight")
    sizes = {"hidden_size": c.hidden_size, "num_hidden_layers": c.depth, "num_attention_heads": c.num_heads}
    tower = Step3p7VisionModel(Step3p7VisionConfig(**sizes, image_size=c.image_size, mlp_ratio=c.mlp_ratio)).eval()
    tower.load_state_dict(weights)
    return squares_one_by_one(encoder, rows, layouts, lambda square: tower(square).last_hidden_state @ projector.T)


STEP3 = Case(
    name="step3_vl",
    build=lambda: randomize(Step3VisionEncoder(Step3VisionConfig.tiny()), 0.15),
    values=588,
    small=[(1, 2), (0, 0)],
    mixed=[(1, 2), (0, 0), (2, 2), (0, 0), (3, 5)],
    items=st.tuples(st.integers(1, 3), st.integers(1, 3)) | st.just((0, 0)),
    oracle=squares_one_by_one,
    manager=lambda encoder: EncoderGraphManager(
        encoder, budgets={"local": [2, 8], "global": [4, 16]}, max_items=2, progress=False
    ),
    rounded=40,
)


def transformers_slices(encoder, rows: Tensor, layouts) -> Tensor:
    """transformers' tower and merger with the same weights; refvl's slice by slice
    where they are not there."""
    sizes = [size for layout in encoder.check_layouts(layouts) for group in layout for size in group.slices]
    if not HAS_5_23:
        parts = rows.split([h * w for h, w in sizes])
        return torch.cat([encoder(part, [(size,)]) for part, size in zip(parts, sizes, strict=True)])
    from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6Merger, MiniCPMV4_6VisionModel

    c, weights = encoder.config, names_of_transformers(encoder)
    vision = {name: getattr(c, name) for name in NAVIT} | {"patch_size": c.patch_size}
    theirs = CONFIG_MAPPING["minicpmv4_6"](
        vision_config=vision, text_config={"hidden_size": c.out_hidden_size}, insert_layer_id=c.insert_layer_id
    )
    tower = MiniCPMV4_6VisionModel._from_config(theirs.vision_config).eval()
    merger = MiniCPMV4_6Merger(theirs).eval()
    of_merger = {name: w for name, w in weights.items() if name.startswith("merger.")}
    merger.load_state_dict({name.replace("merger.", "mlp.0."): weight for name, weight in of_merger.items()})
    of_tower = {name: w for name, w in weights.items() if name not in of_merger}
    left = tower.load_state_dict(of_tower, strict=False)
    assert not left.unexpected_keys and all(name.startswith("vit_merger.") for name in left.missing_keys)
    strip = rows.view(-1, 3, 14, 14).permute(1, 2, 0, 3).flatten(2)[None]
    grids = torch.tensor(sizes).int()
    states = tower(strip, target_sizes=grids, use_vit_merger=c.folds).last_hidden_state
    return torch.cat(merger(states, grids // 2 if c.folds else grids))


def folded_case(mode: str) -> Case:
    m = 4 if mode == "16x" else 2
    side = st.integers(1, 4).map(lambda n: n * m)
    return Case(
        name=f"minicpmv 4.6 {mode}",
        build=lambda: randomize(MiniCPMV4_6Encoder(MiniCPMV4_6VisionConfig.tiny(downsample_mode=mode)), 0.15),
        values=588,
        small=[((m, 2 * m),), ((3 * m, m),)],
        mixed=[((m, 2 * m), (2 * m, 2 * m), (3 * m, m)), ((m, m),) * 4, ((2 * m, 4 * m),), ((5 * m, 8 * m),)],
        items=st.lists(st.tuples(side, side), min_size=1, max_size=4).map(tuple),
        oracle=transformers_slices,
        manager=small_graphs,
        rounded=60,
        folds=mode == "16x",
    )


STEP_VL = replace(
    STEP3,
    name="step3_vl_10b",
    build=lambda: randomize(StepVLEncoder(StepVLVisionConfig.tiny()), 0.15),
    oracle=transformers_squares,
)

CASES = [
    grid_case("qwen2_5_vl", 0.08),
    grid_case("glm4v", 0.12),
    grid_case("glm_ocr", 0.12),
    grid_case("qwen3_vl", 0.12),
    grid_case("qwen3_5", 0.12),
    *map(minicpmv_case, ENCODERS),
    STEP3,
    STEP_VL,
    *map(folded_case, ("16x", "4x")),
]
WITH_GRAPHS = [case for case in CASES if case.manager]
built = functools.cache(lambda case: case.build())


@functools.cache
def manager_of(case: Case):
    """One manager for all tests: what a test before left in its memory must not matter."""
    manager = case.manager(built(case))
    manager.capture()
    return manager


every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_graph = pytest.mark.parametrize("case", WITH_GRAPHS, ids=str)


def sizes_of(encoder, layouts) -> list[tuple[int, int, int]]:
    return [encoder.item_size(layout) for layout in encoder.check_layouts(layouts)]


def rows_for(case: Case, layouts, seed: int = 1) -> Tensor:
    return random_rows(sum(rows for rows, _, _ in sizes_of(built(case), layouts)), case.values, seed)


@torch.no_grad()
def alone(encoder, rows: Tensor, layouts) -> list[Tensor]:
    """One tensor per item, each encoded by itself."""
    parts = rows.split([count for count, _, _ in sizes_of(encoder, layouts)])
    return [encoder(part, [layout]) for part, layout in zip(parts, layouts, strict=True)]


# --- eager ------------------------------------------------------------------------------------------------------------


@every_case
@torch.no_grad()
def test_equals_its_oracle(case):
    """Oracle: the case's; a batch of images and videos, and each item of it."""
    encoder, rows = built(case), rows_for(case, case.mixed)
    want = case.oracle(encoder, rows, case.mixed)
    assert_agree(encoder(rows, case.mixed), want, encoder)
    assert want.std() > 0.1


@every_case
@torch.no_grad()
def test_items_of_a_batch_do_not_see_each_other(case):
    """encode([a, b, c]) == [encode(a), encode(b), encode(c)], with as many rows
    and tokens as `item_size` says."""
    encoder, rows = built(case), rows_for(case, case.mixed)
    together, pieces = encoder(rows, case.mixed), alone(encoder, rows, case.mixed)
    assert [len(piece) for piece in pieces] == [tokens for _, tokens, _ in sizes_of(encoder, case.mixed)]
    assert_agree(together, torch.cat(pieces), encoder)


@every_case
@torch.no_grad()
def test_planning_ahead_changes_nothing(case):
    """forward(x, metadata=plan(layouts)) == forward(x, layouts), bit for bit, twice from one plan."""
    encoder, rows = built(case), rows_for(case, case.mixed)
    plan, want = encoder.plan(case.mixed), encoder(rows, case.mixed)
    assert torch.equal(encoder(rows, metadata=plan), want)
    assert torch.equal(encoder(rows, metadata=plan), want)
    assert torch.equal(encoder(rows, metadata=encoder.plan(encoder.check_layouts(case.mixed))), want)
    assert isinstance(plan.summary, str)


@every_case
@torch.no_grad()
def test_backends_agree(case):
    """Oracle: sdpa; the mask of the other gives the same."""
    encoder, rows = built(case), rows_for(case, case.mixed)
    want = encoder(rows, case.mixed, attention="sdpa")
    assert_agree(encoder(rows, case.mixed, attention="masked"), want, encoder)


@every_case
@torch.no_grad()
def test_no_items_give_no_embeddings(case):
    encoder = built(case)
    width = encoder(rows_for(case, case.small), case.small).shape[1]
    out = encoder(torch.empty(0, case.values), [])
    assert (out.shape, out.dtype) == ((0, width), encoder.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_case
@torch.no_grad()
def test_half_precision_is_close(case, dtype):
    """Oracle: the float32 encoder; rows may come in float32, embeddings have the encoder's dtype."""
    rows, half = rows_for(case, case.small), deepcopy(built(case)).to(dtype)
    exact, got = built(case)(rows, case.small), half(rows, case.small)
    assert got.dtype == half.dtype == dtype
    assert_agree(got, exact.double(), case.rounded)


@every_case
def test_forward_reads_nothing_back(case):
    """On the meta device no value exists: any item(), tolist(), nonzero or branch on a tensor would raise."""
    encoder, want = deepcopy(built(case)).to("meta"), built(case)(rows_for(case, case.mixed), case.mixed).shape
    for dtype in (torch.float32, torch.float16):
        plan = encoder.to(dtype).plan(case.mixed)
        assert all(tensor.is_meta for tensor in metadata_tensors(plan).values())
        rows = sum(count for count, _, _ in sizes_of(encoder, case.mixed))
        assert encoder(torch.empty(rows, case.values, device="meta"), metadata=plan).shape == want


@every_case
def test_every_weight_is_trained(case):
    """Those that are read in the plan, too."""
    encoder = deepcopy(built(case))
    encoder(rows_for(case, case.small), case.small).square().sum().backward()
    assert [name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.any()] == []


@every_case
@torch.no_grad()
def test_blocks_can_be_watched(case):
    """A watched copy gives the same embeddings; in each block every patch stands in one segment, its weights sum to 1.

    Segments never hold patches of two items. That the weights are right is tested in
    tests/journeys/test_watch.py.
    """
    encoder, rows = built(case), rows_for(case, case.mixed)
    if case.folds:
        pytest.skip("four rows become one on the way: tests/journeys/test_families_generate.py")
    watch, trace = TowerWatch(encoder, attentions=True, hidden_states=True), Trace(metadata=[encoder.plan(case.mixed)])
    assert torch.equal(watch.encoder(rows, metadata=trace.metadata[0]), encoder(rows, case.mixed))
    watch.fill(trace)
    counts = torch.tensor([count for count, _, _ in sizes_of(encoder, case.mixed)])
    item_of = torch.arange(len(counts)).repeat_interleave(counts)
    assert len(trace.tower_attentions) == len(trace.tower_hidden_states) - 1 == encoder.config.depth
    for segments in trace.tower_attentions:
        patches = torch.cat([segment.rows for segment in segments])
        assert sorted(patches[patches >= 0].tolist()) == list(range(len(rows)))
        for places, weights in segments:
            assert len(item_of[places[places >= 0]].unique()) == 1
            assert weights.shape == (encoder.config.num_heads, len(places), len(places))
            assert_agree(weights.sum(-1), torch.ones(weights.shape[:2]), len(places))
    assert {len(state) for state in trace.tower_hidden_states} == {len(rows)}


# --- one item's nan stays its own -------------------------------------------------------------------------------------

POISON = [(torch.float32, NAN), (torch.float16, 6e4)]  # the latter is finite, and overflows inside


def check_isolation(encoder, run, case: Case, value: float) -> None:
    """The second of two items is spoiled; the first is what it is alone, the second not finite."""
    rows = rows_for(case, case.small).to(encoder.dtype)
    count = sizes_of(encoder, case.small)[0][0]
    rows[count + 1] = value
    first, second = run(rows)
    assert_agree(first, encoder(rows[:count], case.small[:1]), encoder)
    assert first.isfinite().all() and not second.isfinite().all()


@pytest.mark.parametrize(("dtype", "value"), POISON, ids=["nan", "float16 overflow"])
@pytest.mark.parametrize("attention", ["sdpa", "masked"])
@every_case
@torch.no_grad()
def test_a_spoiled_item_spoils_itself_alone(case, attention, dtype, value):
    """Oracle: the other item by itself."""
    encoder = deepcopy(built(case)).to(dtype)
    tokens = [tokens for _, tokens, _ in sizes_of(encoder, case.small)]
    check_isolation(encoder, lambda rows: encoder(rows, case.small, attention=attention).split(tokens), case, value)


@pytest.mark.parametrize(("dtype", "value"), POISON, ids=["nan", "float16 overflow"])
@every_graph
@torch.no_grad()
def test_a_spoiled_item_spoils_itself_alone_in_a_replay(case, dtype, value):
    """Oracle: the other item by itself, eagerly; the next replay is clean."""
    encoder = deepcopy(built(case)).to(dtype)
    manager = case.manager(encoder)
    check_isolation(encoder, lambda rows: manager.execute(rows, case.small), case, value)
    assert manager.stats().misses == 0
    clean = rows_for(case, case.small).to(dtype)
    assert_agree(manager.execute(clean, case.small), alone(encoder, clean, case.small), encoder)


# --- graphs -----------------------------------------------------------------------------------------------------------


def check_replay(case: Case, layouts, seed: int = 1) -> list[Tensor]:
    manager, rows = manager_of(case), rows_for(case, layouts, seed)
    poison(manager)
    outputs = manager.execute(rows, layouts)
    assert_agree(outputs, alone(built(case), rows, layouts), built(case))
    return outputs


@every_graph
def test_a_b_a(case):
    """Oracle: each item through the encoder. Equal inputs give equal bits, whatever ran between."""
    first = check_replay(case, case.small, seed=1)
    check_replay(case, case.mixed, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(check_replay(case, case.small, seed=1), first, strict=True))
    assert manager_of(case).stats().hits > 0 < manager_of(case).stats().misses


@every_graph
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_any_batch_equals_the_eager_encoder(case, data, seed):
    """Oracle: as above; padding and everything that a graph computes hold NaN before."""
    check_replay(case, data.draw(st.lists(case.items, max_size=6)), seed)


@every_graph
@settings(max_examples=20)
@given(data=st.data(), spare=st.sampled_from([0, 0, 1, 7]))
def test_a_capacity_holds_what_its_limits_allow(case, data, spare):
    """A plan is within the capacity of its own tokens and frames, and a larger one, whenever its rows are."""
    encoder, layouts = built(case), data.draw(st.lists(case.items, max_size=4))
    for name, path in getattr(encoder, "paths", {"": encoder}).items():
        own = encoder.check_layouts(layouts)
        if name:
            own = [parts[name] for parts in map(encoder.path_layouts, own) if parts[name]]
        sizes = map(path.item_size, own)
        rows, tokens, frames = (sum(column) for column in zip((0, 0, 0), *sizes, strict=True))
        if own and rows <= len(path.pixel_buffer(tokens + spare)):
            check_within(path.plan(own), path.plan_capacity(tokens + spare, max(1, frames)))


def check_within(plan, capacity) -> None:
    assert type(plan) is type(capacity)
    for field in fields(plan):
        value, limit = getattr(plan, field.name), getattr(capacity, field.name)
        if is_dataclass(value):
            check_within(value, limit)
        elif isinstance(value, Tensor):
            assert len(value) <= len(limit) and (value.dtype, value.shape[1:]) == (limit.dtype, limit.shape[1:])
        elif isinstance(value, int):
            assert value <= limit


# --- plans ------------------------------------------------------------------------------------------------------------


@every_case
@torch.no_grad()
def test_new_weights_are_read_whatever_was_planned(case):
    """The same sizes before and after. Oracle: a plan made after."""
    encoder, rows = deepcopy(built(case)), rows_for(case, case.small)
    before = encoder(rows, case.small)
    for parameter in encoder.parameters():
        parameter.mul_(2)
    after = encoder(rows, case.small)
    assert torch.equal(after, encoder(rows, metadata=encoder.plan(case.small))) and not torch.equal(after, before)


# --- bad input --------------------------------------------------------------------------------------------------------


@every_case
def test_rows_must_match_the_layout(case):
    encoder, rows = built(case), rows_for(case, case.small)
    plan, count = encoder.plan(case.small), len(rows)
    with pytest.raises(ValueError, match="exactly one of .* and metadata"):
        encoder(rows)
    with pytest.raises(ValueError, match="exactly one of .* and metadata"):
        encoder(rows, case.small, metadata=plan)
    with pytest.raises(ValueError, match=f"pixel_values: dimension 0 must be {count}, got {count - 1}"):
        encoder(rows[1:], case.small)
    with pytest.raises(ValueError, match=f"pixel_values: dimension 1 must be {case.values}, got {case.values - 1}"):
        encoder(rows[:, 1:], metadata=plan)
    with pytest.raises(ValueError, match="attention: 'varlen' cannot run on cpu with torch.float32"):
        encoder(rows, case.small, attention="varlen")
    with pytest.raises(TypeError, match="expected a sequence"):
        encoder(rows, "ab")
    with pytest.raises(TypeError, match="expected floating-point numbers, got dtype torch.uint8"):
        encoder((255 * rows).to(torch.uint8), case.small)  # not normalised


# --- weights ----------------------------------------------------------------------------------------------------------


@every_case
def test_an_encoder_loads_its_own_weights(case):
    """Bit by bit, into one that was built from the same config, from pairs and from a dict."""
    source = built(case)
    state = source.state_dict()
    for weights in (state.items(), state):
        fresh = type(source).from_config(source.config)
        assert fresh.load_weights(weights) == set(state)
        assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), state.values(), strict=True))


@every_case
def test_loading_is_strict(case):
    """Every complaint in one error, and nothing is copied."""
    encoder = deepcopy(built(case))
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    missing, longer, twice, number, short, small = list(state)[-6:]
    del state[missing]
    state["lm_head.weight"] = torch.zeros(3)
    state[longer] = torch.zeros(*state[longer].shape, 1)
    state[number] = state[number].to(torch.int8)
    state[short] = state[short].to(torch.float8_e4m3fn)
    state[small] = torch.full_like(state[small], NAN)
    with pytest.raises(ValueError, match=f"{type(encoder).__name__}: the weights do not match the model") as caught:
        encoder.load_weights([*state.items(), (twice, state[twice])])
    complaints = dict(line.strip().split(": ", 1) for line in str(caught.value).splitlines()[1:])
    assert complaints["missing (1)"] == missing
    assert complaints["unexpected (1)"] == "lm_head.weight"
    assert complaints["repeated (1)"] == twice
    assert complaints["nonfinite (1)"] == small
    misshapen = complaints["misshapen (3)"]
    for text in (f"{longer} is (", f"{number} has dtype torch.int8", f"{short} has dtype torch.float8_e4m3fn"):
        assert text in misshapen
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
