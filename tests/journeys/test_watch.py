"""What `trace(..., attentions=True, hidden_states=True)` keeps.

Oracles: of the language model transformers' text model with eager attention, given the whole
conversation at once (Step3's is refvl's own, which tests/language compares with Llama); of the
towers of Qwen and GLM transformers' towers, their eager attention overheard; of the others the
softmax written out.
"""

import functools
from copy import deepcopy

import numpy as np
import pytest
import torch
from checkpoint_factory import make_checkpoint
from closeness import assert_agree, roundings
from random_models import WITHOUT_VIDEOS, random_model
from shipped import shipped
from torch import Tensor
from towers import CLASSES, frames_of, random_patches, random_rows, randomize, same_weights, transformers_tower
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_vl.modeling_qwen2_vl import eager_attention_forward

import refvl
from refvl.serving.features import share_weights
from refvl.study.report import Trace
from refvl.study.watch import TowerWatch

RANDOM = np.random.default_rng(0)
WIDE = RANDOM.integers(0, 256, (84, 196, 3), dtype=np.uint8)
TALL = RANDOM.integers(0, 256, (112, 60, 3), dtype=np.uint8)
MOVING = RANDOM.integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
BOTH = {"attentions": True, "hidden_states": True}
SHIPPED = ["tiny-qwen2_5_vl", "tiny-qwen3_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3"]
FAMILIES = ["Qwen2.5-VL", "GLM-4.1V", "GLM-4.6V", "GLM-OCR", "Step3-VL"]
FAMILIES += [f"MiniCPM-V {version}" for version in ("2.0", "4.0", "4.5")]


@functools.cache
def watched(name: str) -> Trace:
    """Two pictures of different shapes and, where there are clips, one that is pruned where it can
    be."""
    clip = {} if name in WITHOUT_VIDEOS else {"videos": [MOVING]}
    model, options = random_model(name), BOTH | {"max_new_tokens": 6, "min_new_tokens": 4}
    rate = {"pruning_rate": 0.5} if model.family.can["pruning"] else {}
    return model.trace("Which?", images=[WIDE, TALL], **clip, **rate, **options)


def assert_weights_agree(actual: Tensor, expected: Tensor, steps: int) -> None:
    """A weight is off by at most as much as its score is, and the smallest weight tells how large
    scores are."""
    assert_agree(actual, expected, steps, scale=-float(expected[expected > 0].log().min()))


# ---------------------------------------------------------------------------------------------- language model


@torch.no_grad()
def their_pass(model, trace: Trace):
    """transformers' text model with eager attention over prompt and answer at once."""
    text = model.language_model
    oracle = AutoModel.from_config(deepcopy(text.config), attn_implementation="eager").eval()
    oracle.load_state_dict(text.model.state_dict())
    answer = torch.tensor(trace.token_ids[:-1])
    embeds = torch.cat([trace.inputs_embeds, text.get_input_embeddings()(answer)])  # scaled in MiniCPM-V 2.0
    steps = trace.positions[:, -1:] + 1 + torch.arange(len(answer))
    positions = torch.cat([trace.positions, steps], dim=1)[:, None]
    if not model.family.name.startswith(("Qwen", "GLM")):
        positions = positions[0]
    options = {"use_cache": False, "output_attentions": True, "output_hidden_states": True}
    return oracle, oracle(inputs_embeds=embeds[None], position_ids=positions, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_language_model_equals_transformers(name):
    """One forward of transformers' text model over prompt and answer, against prefill and steps
    with a cache."""
    model = random_model(name)
    trace, text = watched(name), model.language_model
    oracle, want = their_pass(model, trace)
    queries = len(trace.input_ids) + len(trace.token_ids) - 1
    assert {tuple(a.shape) for a in trace.attentions} == {(text.config.num_attention_heads, queries, queries)}
    assert len(trace.attentions) + 1 == len(trace.hidden_states) == text.config.num_hidden_layers + 1
    if trace.keep_masks[-1] is not None:
        assert len(trace.input_ids) < len(trace.full_ids)
    for ours, theirs in zip(trace.attentions, want.attentions, strict=True):
        assert_weights_agree(ours, theirs[0], roundings(oracle))
        assert not ours.triu(1).any()
    for ours, theirs in zip(trace.hidden_states, want.hidden_states, strict=True):
        assert_agree(ours, theirs[0], roundings(oracle))


@pytest.mark.parametrize(
    ("text_config", "options"),
    [({}, {"cache_implementation": "static"}), ({"use_sliding_window": True, "sliding_window": 9}, {})],
    ids=["static cache", "sliding window"],
)
def test_keys_stand_at_their_tokens_whatever_the_cache(tmp_path, text_config, options):
    """A static cache is longer than its keys, a window drops the first ones."""
    more = {"max_window_layers": 0, "layer_types": ["sliding_attention"] * 3} if text_config else {}
    model = refvl.load(make_checkpoint(tmp_path, text_config=text_config | more), device="cpu", progress=False)
    trace = model.trace("Which?", images=[TALL], max_new_tokens=6, min_new_tokens=4, attentions=True, **options)
    oracle, want = their_pass(model, trace)
    for ours, theirs in zip(trace.attentions, want.attentions, strict=True):
        assert_weights_agree(ours, theirs[0], roundings(oracle))
    assert (trace.attentions[0][:, -1] == 0).any() == bool(text_config)


# ------------------------------------------------------------------------------------------------------- towers

GRIDS = [(1, 8, 12), (3, 6, 10), (1, 2, 2)]


def eager_attention(kept: list[Tensor]):
    """An attention for transformers' towers: their eager one, its weights kept."""

    def attend(module, query, key, value, attention_mask, scaling, **kwargs):
        out, weights = eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs)
        kept.append(weights[0])
        return out, weights

    return attend


@pytest.mark.parametrize("family", sorted(CLASSES))
@torch.no_grad()
def test_tower_equals_transformers(family, monkeypatch):
    """Segment by segment and block by block; their rows are told apart by what the patch embedding
    makes of them."""
    config, kept = CLASSES[family].config_class.tiny(), list[Tensor]()
    theirs = transformers_tower(family, config, std=0.08)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "overheard", eager_attention(kept))
    theirs.config._attn_implementation = "overheard"
    watch = TowerWatch(same_weights(family, theirs, config), **BOTH)
    patches = random_patches(GRIDS, config)
    trace = Trace(metadata=[watch.encoder.plan(GRIDS)])
    want = theirs(patches, torch.tensor(frames_of(GRIDS)), output_hidden_states=True)
    watch.encoder(patches, metadata=trace.metadata[0])
    watch.fill(trace)
    steps, kept_ = roundings(theirs), iter(kept)
    order = torch.cdist(trace.tower_hidden_states[0], want.hidden_states[0]).argmin(1)  # where their rows are
    assert sorted(order.tolist()) == list(range(len(patches)))
    assert torch.equal(order, torch.arange(len(patches))) == (family != "qwen2_5_vl")
    for block in trace.tower_attentions:
        assert torch.equal(order[torch.cat([rows for rows, _ in block])], torch.arange(len(patches)))
        for _, weights in block:
            assert_weights_agree(weights, next(kept_), steps)
    assert next(kept_, None) is None
    for ours, state in zip(trace.tower_hidden_states[:-1], want.hidden_states, strict=False):
        assert_agree(ours, state[order], steps)


@pytest.mark.parametrize("name", ["Step3-VL", "MiniCPM-V 2.0", "MiniCPM-V 4.5"])
@torch.no_grad()
def test_towers_without_rotary_equal_the_formula(name):
    """Oracle: softmax(q k / sqrt(K)) in float64 over the rows of a segment, head by head, from the
    kept states."""
    encoder = randomize(deepcopy(random_model(name).encoder), 0.08)
    layouts = {"Step3-VL": [(1, 2), (0, 0)]}.get(name, [((2, 3), (3, 3)), ((4, 2), (1, 3))])
    plans = [encoder.plan([layout]) for layout in layouts]
    watch, trace = TowerWatch(encoder, **BOTH), Trace(metadata=plans)
    for layout, metadata in zip(layouts, plans, strict=True):  # as a long encode, in two forwards
        [layout] = encoder.check_layouts([layout])
        rows = random_rows(encoder.item_size(layout)[0], encoder.config.patch_values)
        watch.encoder(rows, metadata=metadata)
    watch.fill(trace)
    steps, states = roundings(encoder), trace.tower_hidden_states[:-1]
    for block, segments, state in zip(encoder.blocks, trace.tower_attentions, states, strict=True):
        for rows, weights in segments:
            is_patch = rows >= 0  # class tokens are no patches: without them the ratios of the weights are known
            weights = weights[:, is_patch][:, :, is_patch]
            expected = slow_weights(block, state[rows[is_patch]])
            assert_weights_agree(weights / weights.sum(-1, keepdim=True), expected, steps)


def slow_weights(block, x_SE: Tensor) -> Tensor:
    """(H, S, S) float64 of a SigLIP or Step3 block; Step3 norms what attention gives, not what it
    is given."""
    attention = block.self_attn
    if hasattr(attention, "qkv_proj"):
        qkv = attention.qkv_proj(x_SE)
    else:
        qkv = attention.qkv(block.layer_norm1(x_SE))
    q, k, _ = (x.double().unflatten(-1, (attention.num_heads, -1)) for x in qkv.chunk(3, -1))
    scores = torch.einsum("shk,thk->hst", q, k)
    return (scores / q.shape[-1] ** 0.5).softmax(-1)


# --------------------------------------------------------------------------------------------------- the border


def test_a_run_that_is_watched_is_the_same_run():
    """Oracle: the run without, and the model afterwards: no hook, no other attention, no tensor of
    its own."""
    model = random_model("Qwen2.5-VL")
    options = {"images": [TALL], "videos": [MOVING], "pruning_rate": 0.5, "max_new_tokens": 6}
    before = model.trace("Which?", **options)
    assert not (before.attentions or before.hidden_states)
    assert not (before.tower_attentions or before.tower_hidden_states)
    for kept, other in (("attentions", "hidden_states"), ("hidden_states", "attentions")):
        trace = model.trace("Which?", **options, **{kept: True})
        assert trace.token_ids == before.token_ids
        assert all(map(torch.equal, trace.embeds, before.embeds))
        assert getattr(trace, kept) and getattr(trace, f"tower_{kept}")
        assert not getattr(trace, other) and not getattr(trace, f"tower_{other}")
    modules = [*model.encoder.modules(), *model.language_model.modules()]
    assert not any(module._forward_pre_hooks for module in modules)
    assert not any(module._forward_hooks for module in model.encoder.modules())  # transformers' stay, and sleep
    assert model.language_model.config._attn_implementation == "sdpa"
    copy = share_weights(model.language_model)
    pairs = zip(copy.parameters(), model.language_model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert not set(modules) & set(copy.modules())


def test_what_cannot_be_watched_is_refused():
    model = random_model("Qwen2.5-VL")
    with pytest.raises(ValueError, match="num_beams: must be 1 with attentions or hidden_states, got 2"):
        model.trace("Which?", attentions=True, num_beams=2)
    with pytest.raises(ValueError, match="attentions"):
        model.chat("Which?", attentions=True)


# ------------------------------------------------------------------------------------------- what lies behind an answer


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 7}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", SHIPPED)
def test_a_trace_keeps_what_lies_behind_its_answer(name, options):
    """Oracle: hidden states and logits of every token, as `hidden_states=True` and the output head
    give them."""
    model = shipped(name)
    asked = {"prompt": "What is there?", "images": [WIDE], "max_new_tokens": 6}
    full, trace = model.trace(**asked, hidden_states=True), model.trace(**asked, **options)
    last, text = len(full.input_ids) - 1, model.language_model
    states = torch.stack([states[last] for states in full.hidden_states])
    with torch.inference_mode():
        logits = text.lm_head(full.hidden_states[-1][last:])
    assert trace.last_states.shape == states.shape
    assert trace.first_logits.shape == (text.config.vocab_size,)
    assert_agree(trace.last_states[:-1], states[:-1], text)  # theirs is normed at the end
    assert_agree(trace.first_logits, logits[0], text)
    if "num_beams" in options:
        assert trace.margins is None
    else:
        best = logits.topk(2).values
        assert trace.token_ids == full.token_ids
        assert len(trace.margins) == len(trace.token_ids)
        assert_agree(trace.margins, best[:, 0] - best[:, 1], text, scale=float(logits.abs().max()))
