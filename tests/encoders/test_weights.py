"""Strict loading: every naming fills every parameter, and nothing that does not fit is accepted silently."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.encoders.weights import load_strict

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "weight_mapping.json").read_text())
CONFIG = replace(
    Qwen2_5_VisionConfig.tiny(), depth=2, hidden_size=16, intermediate_size=24, out_hidden_size=12, patch_size=4
)
KERNEL = (16, 3, 2, 4, 4)
QKV = re.compile(r"\.qkv\.")


def new_encoder(config=CONFIG):
    """A tower whose parameters are all NaN: a parameter that loading forgets stays NaN."""
    encoder = Qwen2_5_VisionTransformer.from_config(config)
    for parameter in encoder.parameters():
        nn.init.constant_(parameter, float("nan"))
    return encoder


def released(config=CONFIG):
    """Module name -> random tensor, with the patch kernel as a convolution: as in released checkpoints."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in new_encoder(config).named_parameters()}
    shapes["patch_embed.proj.weight"] = KERNEL
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def separate_qkv(state):
    parts = {}
    for name, tensor in state.items():
        if QKV.search(name):
            parts |= {QKV.sub(f".{p}.", name): x for p, x in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            parts[name] = tensor
    return parts


def prefixed(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


NAMINGS = {
    "original": lambda state: prefixed("visual.", state),
    "after 4.52": lambda state: prefixed("model.visual.", state),
    "separate q, k, v": lambda state: prefixed("visual.", separate_qkv(state)),
    "separate, after 4.52": lambda state: prefixed("model.visual.", separate_qkv(state)),
    "the tower alone": lambda state: state,
    "reversed order": lambda state: dict(reversed(prefixed("visual.", separate_qkv(state)).items())),
}


def load_error(encoder, weights):
    """The lines of the one error: kind of complaint -> its text."""
    with pytest.raises(ValueError, match="the weights do not match the model") as caught:
        encoder.load_weights(weights.items() if isinstance(weights, dict) else weights)
    title, *lines = str(caught.value).splitlines()
    assert title.startswith("Qwen2_5_VisionTransformer: ")
    return dict(re.match(r"  (\w+) \(\d+\): (.*)", line).groups() for line in lines)


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_fills_every_parameter(naming):
    """Oracle: the tensors themselves; q, k, v are the rows of qkv in this order, the kernel is flattened row by row."""
    encoder, state = new_encoder(), released()
    filled = encoder.load_weights(NAMINGS[naming](state).items())
    assert filled == set(state) == set(dict(encoder.named_parameters()))
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter, state[name].reshape(parameter.shape)), name


def test_a_tower_loads_its_own_state_dict():
    """There the patch kernel is a matrix already."""
    first, second = new_encoder(), new_encoder()
    first.load_weights(released().items())
    assert second.load_weights(first.state_dict().items()) == set(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_weights_are_cast_to_the_tower_s_dtype():
    encoder, state = new_encoder().to(torch.bfloat16), released()
    encoder.load_weights((name, tensor.double()) for name, tensor in state.items())
    assert torch.equal(encoder.merger.ln_q.weight, state["merger.ln_q.weight"].bfloat16())


def test_loading_copies():
    """The checkpoint's memory is not kept: writing to it later changes nothing."""
    encoder, state = new_encoder(), released()
    encoder.load_weights(state.items())
    before = encoder.merger.ln_q.weight.clone()
    state["merger.ln_q.weight"].zero_()
    assert torch.equal(encoder.merger.ln_q.weight, before)


@pytest.mark.parametrize("row", GOLDEN["qwen2_5_vl"], ids=lambda row: f"{row[0]}-{row[1]}")
def test_golden_names(row):
    """Oracle: vLLM 0.33.0's name maps, where gate and up are one matrix. The language model's names are refused."""
    _, name, _, target, shard = row
    deep = replace(CONFIG, depth=12)  # the golden names reach block 11
    complaints = load_error(new_encoder(deep), {name: torch.empty(0)})
    if not target.startswith("visual."):
        assert complaints["unexpected"] == name
        return
    parts = ("gate_proj", "up_proj") if "gate_up_proj" in target else ()
    ours = target.removeprefix("visual.").replace("gate_up_proj", parts[shard] if parts else "")
    assert set(complaints) == {"misshapen", "missing"}
    assert complaints["misshapen"].startswith(f"{name} is (0,), expected ")
    missing = complaints["missing"].split(", ")
    assert ours not in missing
    assert [m for m in missing if m.startswith(f"{ours} ")] == (
        [f"{ours} ({part})" for part in "qkv" if part != shard] if "qkv" in ours and shard else []
    )


# --- what does not ----------------------------------------------------------------------------------------------------


def test_all_complaints_come_in_one_error_and_nothing_is_copied():
    encoder, state = new_encoder(), prefixed("visual.", separate_qkv(released()))
    del state["visual.merger.ln_q.weight"], state["visual.blocks.1.attn.k.bias"]
    state["visual.blocks.0.norm1.weight"] = torch.ones(17)
    state["lm_head.weight"] = torch.ones(3, 3)
    repeated = ("model.visual.blocks.0.norm2.weight", torch.ones(16))
    complaints = load_error(encoder, [*state.items(), repeated])
    assert complaints == {
        "missing": "merger.ln_q.weight, blocks.1.attn.qkv.bias (k)",
        "misshapen": "visual.blocks.0.norm1.weight is (17,), expected (16,)",
        "unexpected": "lm_head.weight",
        "repeated": "model.visual.blocks.0.norm2.weight",
    }
    assert all(parameter.isnan().all() for parameter in encoder.parameters())


def test_an_empty_checkpoint_misses_everything():
    encoder = new_encoder()
    assert load_error(encoder, {}) == {"missing": ", ".join(dict(encoder.named_parameters()))}


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("blocks.0.mlp.up_proj.weight", torch.ones(24, 4, 4), r"is \(24, 4, 4\), expected \(24, 16\)"),
        ("blocks.0.mlp.up_proj.weight", torch.ones(16, 24), r"is \(16, 24\), expected \(24, 16\)"),
        ("merger.ln_q.weight", torch.ones(16, 1), r"is \(16, 1\), expected \(16,\)"),
        ("merger.ln_q.weight", torch.ones(()), r"is \(\), expected \(16,\)"),
        ("patch_embed.proj.weight", torch.ones(16, 2, 3, 4, 4), r"is \(16, 2, 3, 4, 4\), expected \(16, 3, 2, 4, 4\)"),
        ("patch_embed.proj.weight", torch.ones(16, 6, 4, 4), r"is \(16, 6, 4, 4\), expected \(16, 3, 2, 4, 4\)"),
        ("blocks.0.attn.qkv.weight", torch.ones(3, 16, 16), r"is \(3, 16, 16\), expected \(48, 16\)"),
        ("merger.ln_q.weight", torch.ones(16, dtype=torch.int8), "holds torch.int8, expected torch.float32"),
        ("merger.ln_q.weight", np.ones(16), "is a ndarray, expected a torch.Tensor"),
    ],
    ids=[
        "folded matrix",
        "transposed",
        "extra axis",
        "scalar",
        "time first",
        "image kernel",
        "stacked",
        "int8",
        "array",
    ],
)
def test_a_tensor_of_another_shape_or_kind_is_refused(name, tensor, expected):
    """As many values are not enough: only the patch kernel may be flattened, and only from its true shape."""
    complaints = load_error(new_encoder(), released() | {name: tensor})
    assert list(complaints) == ["misshapen"]
    assert re.fullmatch(f"{re.escape(name)} {expected}", complaints["misshapen"])


def test_each_of_q_k_v_has_its_own_rows():
    state = separate_qkv(released())
    state["blocks.0.attn.q.weight"] = torch.ones(48, 16)
    assert load_error(new_encoder(), state) == {"misshapen": "blocks.0.attn.q.weight is (48, 16), expected (16, 16)"}


@pytest.mark.parametrize("kept", ["q", "k", "v", "qv"])
def test_a_part_of_qkv_is_not_enough(kept):
    state = separate_qkv(released())
    for part in set("qkv") - set(kept):
        del state[f"blocks.0.attn.{part}.weight"]
    missing = ", ".join(f"blocks.0.attn.qkv.weight ({part})" for part in "qkv" if part not in kept)
    assert load_error(new_encoder(), state) == {"missing": missing}


@pytest.mark.parametrize("fused_first", [True, False])
def test_fused_and_separate_at_once_are_repeated(fused_first):
    """Whichever comes first counts; the other is named."""
    state, q = released(), ("blocks.0.attn.q.weight", torch.ones(16, 16))
    fused = ("blocks.0.attn.qkv.weight", state.pop("blocks.0.attn.qkv.weight"))
    complaints = load_error(new_encoder(), [*state.items(), *((fused, q) if fused_first else (q, fused))])
    assert complaints == {"repeated": (q if fused_first else fused)[0]}


@pytest.mark.parametrize(
    "name",
    [
        "blocks.2.norm1.weight",  # one block too many
        "model.model.visual.merger.ln_q.weight",
        "visual.visual.merger.ln_q.weight",
        "visualmerger.ln_q.weight",
        "blocks.0.attn.o.weight",
        "blocks.0.attn.qk.weight",
        "blocks.0.mlp.q.weight",
        "merger.ln_q.weight_scale",
        "q",
        "",
    ],
)
def test_a_name_that_is_nearly_right_is_refused(name):
    assert load_error(new_encoder(), released() | {name: torch.ones(16)}) == {"unexpected": name}


def test_a_tower_without_memory_is_refused():
    """On the meta device a copy would do nothing, silently."""
    with torch.device("meta"):
        encoder = Qwen2_5_VisionTransformer.from_config(CONFIG)
    with pytest.raises(ValueError, match=r"is on the meta device; give it memory first \(`to_empty`\)"):
        encoder.load_weights(released().items())
    encoder.to_empty(device="cpu").load_weights(released().items())
    assert torch.equal(encoder.merger.ln_q.weight, released()["merger.ln_q.weight"])


def test_persistent_buffers_are_weights_and_others_are_not():
    """A buffer that belongs to the state dict has to come with the checkpoint; one that is computed may not."""
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.zeros(3))
    module.register_buffer("computed", torch.zeros(3), persistent=False)
    weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "table": torch.ones(3)}
    assert load_strict(module, weights.items()) == {"weight", "bias", "table"}
    assert torch.equal(module.table, torch.ones(3))
    with pytest.raises(ValueError, match=r"missing \(1\): table"):
        load_strict(module, [(k, v) for k, v in weights.items() if k != "table"])
    with pytest.raises(ValueError, match=r"unexpected \(1\): computed"):
        load_strict(module, [*weights.items(), ("computed", torch.ones(3))])
