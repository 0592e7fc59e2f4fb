"""The resamplers: equal to vLLM's, and to one slow formula that pads, masks and loops."""

import pytest
import torch
from closeness import assert_agree
from towers import golden, randomize

from refvl.encoders import Resampler2, Resampler2_5, Resampler4_5
from refvl.encoders.resampler import attention_weights
from refvl.positions import sincos_1d, sincos_2d

GOLDEN, ARRAYS = golden("minicpmv_modules")


def golden_resampler(cls, key):
    upstream_only = ("adaptive", "do_post_projection")  # False and True, the only values that a release has
    resampler = cls.from_config({k: v for k, v in GOLDEN[key]["kwargs"].items() if k not in upstream_only}).eval()
    prefix = f"{key}/sd/"
    resampler.load_weights((n.removeprefix(prefix), x) for n, x in ARRAYS.items() if n.startswith(prefix))
    return resampler


def slow(resampler, x, sizes, groups):
    """Each set of queries for itself, in float64: positions from a table, softmax over the keys of the group.

    groups: (slices, their ids) per set of queries.
    """
    r = resampler.double()
    tokens, start = [], 0
    for count, ids in groups:
        keys, values = [], []
        for b, time in zip(range(start, start + count), ids, strict=True):
            h, w = sizes[b]
            value = r.ln_kv(r.kv_proj(x[b, : h * w].double()))
            position = sincos_2d(r.embed_dim, (h, w)).flatten(0, 1).double()
            if time >= 0:
                position = position + sincos_1d(r.embed_dim, time + 1)[time].double()
            keys.append(value + position)
            values.append(value)
        w_q, w_k, w_v = r.attn.in_proj_weight.chunk(3)
        b_q, b_k, b_v = r.attn.in_proj_bias.chunk(3)
        q, k, v = r.ln_q(r.query) @ w_q.T + b_q, torch.cat(keys) @ w_k.T + b_k, torch.cat(values) @ w_v.T + b_v
        heads = [t.unflatten(-1, (r.attn.num_heads, -1)).transpose(0, 1) for t in (q, k, v)]
        scores = heads[0] @ heads[1].mT / r.attn.head_dim**0.5
        out = r.attn.out_proj((scores.softmax(-1) @ heads[2]).transpose(0, 1).flatten(1))
        tokens.append(r.ln_post(out) @ r.proj)
        start += count
    resampler.float()
    return torch.stack(tokens)


# --- 2.0 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["r2"]["cases"], ids=lambda case: case["name"])
@torch.no_grad()
def test_resampler_2_golden(case):
    """Oracle: vLLM 0.33.0 `Resampler2`."""
    resampler = golden_resampler(Resampler2, "r2")
    want = ARRAYS[f"r2/{case['name']}/y"]
    assert_agree(resampler(ARRAYS[f"r2/{case['name']}/x"], case["tgt_size"]), want, resampler)


def test_the_positions_in_checkpoints_are_the_formula():
    """Oracle: vLLM's `pos_embed`; so loading leaves the name out, and any other unknown name is an error."""
    resampler = golden_resampler(Resampler2, "r2")
    assert_agree(resampler.plan([(4, 4)]).query_positions, ARRAYS["r2/pos_embed"], 4)
    weights = {f"resampler.{name}": x for name, x in resampler.state_dict().items()}
    assert "query" in resampler.load_weights([*weights.items(), ("resampler.pos_embed", ARRAYS["r2/pos_embed"])])
    with pytest.raises(ValueError, match="unexpected.*resampler.position"):
        resampler.load_weights([*weights.items(), ("resampler.position", ARRAYS["r2/pos_embed"])])


# --- 2.5, 2.6, 4.0 ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_resampler_2_5_golden():
    """Oracle: vLLM 0.33.0 `Resampler2_5`, its cases in order on one module, whose table grows between them."""
    resampler = golden_resampler(Resampler2_5, "r25")
    for case in GOLDEN["r25"]["cases"]:
        got = resampler(ARRAYS[f"r25/{case['name']}/x"], torch.tensor(case["tgt_sizes"]))
        assert_agree(got, ARRAYS[f"r25/{case['name']}/y"], resampler)
        resampler(torch.zeros(1, 110, 48), [(10, 11)])


@pytest.mark.parametrize("sizes", [[(4, 227), (227, 4)], [(1, 1)], [(70, 3), (71, 2), (9, 9)]], ids=str)
@torch.no_grad()
def test_any_grid_equals_the_slow_formula(sizes):
    """Oracle: `slow`, in float64; grids beyond upstream's first table of 70 x 70."""
    resampler = randomize(Resampler2_5(6, 64, 4, 48), 0.2)
    x = torch.randn(len(sizes), max(h * w for h, w in sizes), 48)
    want = slow(resampler, x, sizes, [(1, [-1])] * len(sizes))
    assert_agree(resampler(x, sizes), want, resampler)
    assert want.std() > 0.1


# --- 4.5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["r45"]["cases"], ids=lambda c: c["name"])
@torch.no_grad()
def test_resampler_4_5_golden(case):
    """Oracle: `Resampler4_5` of the seed page, which vLLM 0.33.0 equals wherever it runs."""
    ids = torch.tensor(case["temporal_ids"]) if case["temporal_ids_is_tensor"] else case["temporal_ids"]
    resampler = golden_resampler(Resampler4_5, "r45")
    got = resampler(ARRAYS[f"r45/{case['name']}/x"], case["tgt_sizes"], ids)
    assert list(got.shape) == case["out_shape"]
    assert_agree(got, ARRAYS[f"r45/{case['name']}/y"], resampler)


@torch.no_grad()
def test_groups_and_times_equal_the_slow_formula():
    """Oracle: `slow`. A group without times is not merged; others mix grids and pass upstream's table of 50."""
    resampler = randomize(Resampler4_5(6, 64, 4, 48, max_size=(8, 8), max_temporal_size=50), 0.2)
    sizes = [(4, 6), (2, 3), (3, 3), (5, 1), (1, 1), (9, 2)]
    x = torch.randn(len(sizes), 24, 48)
    got = resampler(x, sizes, [[-1, -1], [49, 50], [None], [120]])
    want = slow(resampler, x, sizes, [(1, [-1]), (1, [-1]), (2, [49, 50]), (1, [-1]), (1, [120])])
    assert_agree(got, want, resampler)


# --- all --------------------------------------------------------------------------------------------------------------


def test_the_planned_frequencies_survive_a_cast():
    """`.to(bfloat16)` must not round them: an hour into a clip the angle would be off by many turns."""
    plan = Resampler4_5(6, 64, 4, 48).bfloat16().plan([(2, 2)])
    assert (plan.frequencies.dtype, plan.time_frequencies.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("sizes", "ids", "error", "message"),
    [
        ([(4, 6)], None, ValueError, "x: dimension 0 must be 1, got 2"),
        ([(5, 6), (2, 3)], None, ValueError, r"tgt_sizes: expected at most 24 .* got \[30, 6\]"),
        ([(4, 6), (2, 3)], [[1], [2, 3]], ValueError, "temporal_ids: expected one id for each of 2"),
        ([(4, 6), (2, 3)], [[1, 2], []], ValueError, "temporal_ids: expected groups of integers"),
        ([(4, 6), (2, 3)], [[1, -2]], ValueError, r"temporal_ids: expected .* of at least -1"),
        ([(4, 6), (2, 3)], [1, 2], TypeError, "temporal_ids: expected a sequence, got int"),
        ([(4, 6), (2, 3)], torch.ones(2), TypeError, "temporal_ids: expected integers, got dtype"),
    ],
)
def test_bad_input_is_named(sizes, ids, error, message):
    with pytest.raises(error, match=message):
        Resampler4_5(6, 64, 4, 48)(torch.zeros(2, 24, 48), sizes, ids)


def test_bad_grids_and_widths_are_named():
    with pytest.raises(ValueError, match=r"tgt_size: expected h \* w = 20, the number of patches in x, got \(4, 4\)"):
        Resampler2(3, 64, 4, 48)(torch.zeros(1, 20, 48))
    with pytest.raises(ValueError, match="embed_dim: must be a multiple of num_heads=5, got 64"):
        Resampler2_5(6, 64, 5)


# --- looking ----------------------------------------------------------------------------------------------------------


LOOKS = [  # class, side of queries or their number, ids of groups, patches per set of queries
    (Resampler2, 3, (), [15, 4, 15]),
    (Resampler2_5, 6, (), [15, 4, 15]),
    (Resampler4_5, 6, ([[3, 7], [-1]],), [19, 15]),
]


@pytest.mark.parametrize(("cls", "queries", "groups", "sets"), LOOKS)
@torch.no_grad()
def test_attention_weights_are_those_behind_the_tokens(cls, queries, groups, sets):
    """Oracle: `resample`. Weights, values and both projections give its tokens."""
    resampler = randomize(cls(queries, 64, 4, 48), 0.2)
    metadata = resampler.plan([(3, 5), (2, 2), (3, 5)], *groups)
    rows = torch.randn(34, 48)
    weights = attention_weights(resampler, rows, metadata)
    assert [tuple(w.shape) for w in weights] == [(4, resampler.num_queries, n) for n in sets]
    for w in weights:
        assert_agree(w.sum(-1), torch.ones(w.shape[:2]), max(sets))
    assert max(float(w.amax()) for w in weights) > 0.3  # far from looking at everything alike
    _, _, v_NHK = resampler.attn.project(*resampler.attention_inputs(rows, metadata))
    values = v_NHK.transpose(0, 1).split(sets, dim=1)
    read_HQK = torch.cat([w @ v for w, v in zip(weights, values, strict=True)], dim=1)
    tokens = resampler.attn.out_proj(read_HQK.transpose(0, 1).flatten(1))
    want = resampler.resample(rows, metadata)
    assert_agree(resampler.ln_post(tokens) @ resampler.proj, want, resampler)
