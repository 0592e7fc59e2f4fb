"""Step3's text model. Oracles: formulas written out token by token here, and transformers' Llama, which a Step3 of
dense layers is once its query projection is replaced by the low-rank one."""

import math

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_agree
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaModel

from refvl.language.step3_config import Step3TextConfig, Step3VisionEncoderConfig, Step3VLConfig
from refvl.language.step3_vl import Step3TextModel, text_rotary

SIZES = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "head_dim": 16, "share_q_dim": 24, "moe_num_experts": 6, "moe_top_k": 3, "moe_intermediate_size": 32,
    "share_expert_dim": 40, "moe_layers_enum": "1,2", "rope_theta": 100.0,
}  # fmt: skip


def make_model(seed: int = 0, **changes) -> Step3TextModel:
    """Random weights of size 1 over the square root of the inputs, so that every part of the sum counts."""
    model = Step3TextModel(Step3TextConfig(**SIZES | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def embeddings(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


def rms_norm(x, weight, eps=1e-5):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def swiglu(x, gate, up, down):
    return down @ (F.silu(gate @ x) * (up @ x))


def rotated(x, position, theta):
    """Plane i of K/2 turns dimensions i and i + K/2 by position / theta^(2 i / K)."""
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        c, s = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i] * s + x[i + half] * c
    return out


def slow_moe(moe, x, config):
    """One token: the best experts of the softmax, each weighted by its share."""
    shares = (moe.gate.weight @ x).softmax(0)
    best = sorted(range(config.moe_num_experts), key=lambda e: -float(shares[e]))[: config.moe_top_k]
    total = sum(shares[e] for e in best) if config.norm_expert_weight else 1.0
    experts = (moe.gate_proj.weight, moe.up_proj.weight, moe.down_proj.weight)
    return sum(shares[e] / total * swiglu(x, *(w[e] for w in experts)) for e in best)


def slow_layer(layer, x_LD, config):
    """One prompt, token by token and head by head."""
    theta, heads = config.rope_parameters["rope_theta"], config.num_attention_heads
    attention = layer.self_attn
    normed = [rms_norm(x, layer.input_layernorm.weight) for x in x_LD]
    keys = [rotated(attention.k_proj.weight @ y, i, theta) for i, y in enumerate(normed)]
    values = [attention.v_proj.weight @ y for y in normed]
    rows = []
    for i, (x, y) in enumerate(zip(x_LD, normed, strict=True)):
        queries = attention.wq.weight @ rms_norm(attention.q_proj.weight @ y, attention.inter_norm.weight)
        seen = []
        for query in queries.chunk(heads):
            query = rotated(query, i, theta)
            scores = torch.stack([query @ key / math.sqrt(config.head_dim) for key in keys[: i + 1]]).softmax(0)
            seen.append(sum(score * value for score, value in zip(scores, values, strict=False)))
        x = x + attention.o_proj.weight @ torch.cat(seen)
        z = rms_norm(x, layer.post_attention_layernorm.weight)
        if layer.use_moe:
            shared = (getattr(layer.share_expert, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
            x = x + swiglu(z, *shared) + slow_moe(layer.moe, z, config)
        else:
            x = x + swiglu(z, *(getattr(layer.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj")))
        rows.append(x)
    return torch.stack(rows)


@pytest.mark.parametrize("norm_expert_weight", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_model_equals_the_formula_written_out(norm_expert_weight, implementation):
    """Oracle: `slow_layer`; layer 0 is dense, 1 and 2 hold experts."""
    model = make_model(norm_expert_weight=norm_expert_weight)
    model.set_attn_implementation(implementation)
    assert [layer.use_moe for layer in model.layers] == [False, True, True]
    x_BLD = embeddings(2, 7)
    expected = x_BLD
    for layer in model.layers:
        expected = torch.stack([slow_layer(layer, x_LD, model.config) for x_LD in expected])
    expected = torch.stack([torch.stack([rms_norm(x, model.norm.weight) for x in x_LD]) for x_LD in expected])
    assert_agree(model(inputs_embeds=x_BLD).last_hidden_state, expected, model)


@torch.no_grad()
def test_all_dense_model_is_llama_with_a_low_rank_query():
    """Oracle: transformers' LlamaModel with one key-value head, `q_proj` replaced by project, normalise, expand."""
    model = make_model(moe_layers_enum="")
    c = model.config
    rope = {"rope_type": "default", "rope_theta": 100.0}
    shared = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "head_dim", "rms_norm_eps",
    )  # fmt: skip
    sizes = {name: getattr(c, name) for name in shared}
    config = LlamaConfig(**sizes, num_key_value_heads=1, pad_token_id=None, rope_parameters=rope)
    llama = LlamaModel(config).eval()
    for layer in llama.layers:
        layer.self_attn.q_proj = nn.Sequential(
            nn.Linear(c.hidden_size, c.share_q_dim, bias=False),
            nn.RMSNorm(c.share_q_dim, eps=c.rms_norm_eps),
            nn.Linear(c.share_q_dim, c.num_attention_heads * c.head_dim, bias=False),
        )
    names = {"self_attn.q_proj.": "self_attn.q_proj.0.", "inter_norm.": "q_proj.1.", "wq.": "q_proj.2."}
    weights = {}
    for name, tensor in model.state_dict().items():
        found = next((part for part in names if part in name), None)
        weights[name.replace(found, names[found]) if found else name] = tensor
    llama.load_state_dict(weights)
    ids = torch.arange(20).view(2, 10)
    for m in (llama, model):
        m.set_attn_implementation("eager")
    expected, found = (m(input_ids=ids, output_hidden_states=True, output_attentions=True) for m in (llama, model))
    assert len(found.hidden_states) == len(expected.hidden_states) == 4 and len(found.attentions) == 3
    assert model(input_ids=ids).hidden_states is None and model(input_ids=ids).attentions is None
    for name in ("hidden_states", "attentions"):
        assert_agree(found[name], expected[name], model)
    assert_agree(model(input_ids=ids).last_hidden_state, expected.hidden_states[-1], model)


@pytest.mark.parametrize("pieces", [(9,), (8, 1), (3, 4, 2), (1,) * 9])
@torch.no_grad()
def test_cache_changes_nothing(pieces):
    """Oracle: the same prompt in one forward without a cache."""
    model, x_BLD = make_model(), embeddings(2, 9)
    expected, cache, found = model(inputs_embeds=x_BLD).last_hidden_state, None, []
    for piece in x_BLD.split(pieces, dim=1):
        out = model(inputs_embeds=piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.last_hidden_state)
    assert_agree(torch.cat(found, dim=1), expected, model)


@torch.no_grad()
def test_cache_holds_two_vectors_of_one_head_per_token_and_layer():
    model = make_model()
    cache = model(inputs_embeds=embeddings(2, 9), use_cache=True).past_key_values
    shapes = {tuple(x.shape) for layer in cache.layers for x in (layer.keys, layer.values)}
    assert len(cache.layers) == 3 and shapes == {(2, 1, 9, 16)}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_left_padded_prompts_are_read_as_alone(implementation):
    """Oracle: each prompt by itself; what stands in the padding must not matter, however large."""
    model = make_model()
    model.set_attn_implementation(implementation)
    prompts = [embeddings(1, length, seed=length) for length in (9, 4, 6)]
    batch, mask = torch.full((3, 9, SIZES["hidden_size"]), 50.0), torch.zeros(3, 9, dtype=torch.int64)
    positions = torch.zeros(3, 9, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        length = prompt.shape[1]
        batch[i, -length:], mask[i, -length:] = prompt[0], 1
        positions[i, -length:] = torch.arange(length)
    found = model(inputs_embeds=batch, attention_mask=mask, position_ids=positions).last_hidden_state
    for row, prompt in zip(found, prompts, strict=True):
        alone = model(inputs_embeds=prompt).last_hidden_state[0]
        assert_agree(row[-len(alone) :], alone, model)


@pytest.mark.parametrize("norm_expert_weight", [False, True])
@torch.no_grad()
def test_moe_equals_a_loop_over_tokens(norm_expert_weight):
    """Oracle: `slow_moe`. One expert is made unpopular, so that some are chosen by nobody."""
    model = make_model(norm_expert_weight=norm_expert_weight, moe_num_experts=8)
    moe, x_BLD = model.layers[1].moe, embeddings(3, 5)
    x_BLD[..., 0] = 4.0
    moe.gate.weight[5, 0] = -20.0
    weights, chosen = moe.route(x_BLD.flatten(0, 1))
    assert 5 not in chosen and len(set(chosen.flatten().tolist())) > 3
    assert bool((weights.sum(-1) < 0.99).all()) is not norm_expert_weight
    expected = torch.stack([slow_moe(moe, x, model.config) for x in x_BLD.flatten(0, 1)]).view_as(x_BLD)
    assert_agree(moe(x_BLD), expected, moe)


def test_every_chosen_expert_learns():
    """Gradients reach the experts that were chosen, and no other."""
    model = make_model()
    moe = model.layers[1].moe
    x_TD = embeddings(1, 2)[0]
    moe(x_TD[None]).square().sum().backward()
    chosen = set(moe.route(x_TD)[1].flatten().tolist())
    learned = {e for e in range(6) if moe.down_proj.weight.grad[e].abs().sum() > 0}
    assert learned == chosen and len(chosen) < 6
    assert moe.gate.weight.grad.abs().sum() > 0


def test_router_and_angles_do_not_round_in_half_precision():
    """Positions above 256 are no bfloat16 numbers: angles are computed before they are rounded."""
    config = Step3TextConfig(**SIZES)
    positions = torch.tensor([[257, 65535]])
    exact, _ = text_rotary(positions, config, torch.float64)
    rounded, _ = text_rotary(positions, config, torch.bfloat16)
    assert_agree(rounded, exact, 1)
    moe = make_model().layers[1].moe.bfloat16()
    x_TD = embeddings(1, 4)[0].bfloat16()
    weights, _ = moe.route(x_TD)
    logits = moe.gate(x_TD)
    expected = logits.double().softmax(-1).topk(3).values
    assert_agree(weights, expected, 1)


def test_config_reads_the_keys_of_the_released_file():
    config = AutoConfig.for_model("step3_vl", text_config=dict(SIZES, model_type="step3_text"), vision_config={})
    assert isinstance(config, Step3VLConfig) and isinstance(config.vision_config, Step3VisionEncoderConfig)
    assert config.get_text_config().moe_layers == {1, 2} and config.hidden_size == 48
    assert Step3TextConfig(**SIZES | {"moe_layers_enum": [0, 2]}).moe_layers == {0, 2}
    assert Step3TextConfig(**SIZES | {"moe_layers_enum": None}).moe_layers == {1, 2}
    text = config.text_config
    assert (text.max_position_embeddings, text.num_key_value_heads) == (65536, 1)
    assert text.rope_parameters == {"rope_type": "default", "rope_theta": 100.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_groups": 2}, "num_attention_groups: expected 1, as in MFA, got 2"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters: expected rope_type 'default',"),
        ({"moe_router_activation": "sigmoid"}, "moe_router_activation: expected 'softmax', got 'sigmoid'"),
        ({"moe_layers_enum": "1,3"}, r"moe_layers_enum: expected indices from 0 to 2, got \[3\]"),
    ],
)
def test_what_is_not_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Step3TextModel(Step3TextConfig(**SIZES | changes))


@pytest.mark.parametrize("given", [{}, {"input_ids": torch.zeros(1, 1).long(), "inputs_embeds": embeddings(1, 1)}])
def test_ids_or_embeddings_but_not_both(given):
    with pytest.raises(ValueError, match="forward: pass exactly one of input_ids and inputs_embeds"):
        make_model()(**given)
