"""Strict loading: every naming fills every parameter, and nothing that does not fit is accepted silently."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from towers import CLASSES

from refvl.encoders.weights import load_strict

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "weight_mapping.json").read_text())


@pytest.fixture(autouse=True)
def all_are_listed(monkeypatch):
    monkeypatch.setattr("refvl.checkpoints.LISTED", 1000)


SMALL = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 12, "patch_size": 4}
KERNELS = {"patch_embed.proj.weight": (16, 3, 2, 4, 4), "downsample.weight": (12, 16, 2, 2)}


def new_encoder(family="qwen2_5_vl", **changes):
    """A tower whose parameters are all NaN: a parameter that loading forgets stays NaN."""
    encoder = CLASSES[family].from_config(replace(CLASSES[family].config_class.tiny(), **SMALL | changes))
    for parameter in encoder.parameters():
        nn.init.constant_(parameter, float("nan"))
    return encoder


def released(encoder=None):
    """Module name -> random tensor, convolution kernels in their own shape: as in released checkpoints."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in (encoder or new_encoder()).named_parameters()}
    shapes |= {name: shape for name, shape in KERNELS.items() if name in shapes}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def separate_qkv(state):
    parts = {}
    for name, tensor in state.items():
        pieces = tensor.chunk(3) if ".qkv." in name else [tensor]
        parts |= {name.replace(".qkv.", f".{p}."): x for p, x in zip("qkv", pieces, strict=False)}
    return parts


def fused_gate_up(state):
    fused = {}
    for name, tensor in state.items():
        if ".gate_proj." in name:
            name, tensor = name.replace("gate", "gate_up"), torch.cat([tensor, state[name.replace("gate", "up")]])
        if ".up_proj." not in name:
            fused[name] = tensor
    return fused


def prefixed(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


NAMINGS = {
    "original": lambda state: prefixed("visual.", state),
    "after 4.52": lambda state: prefixed("model.visual.", state),
    "the tower alone": lambda state: state,
    "separate q, k, v": lambda state: prefixed("visual.", separate_qkv(state)),
    "separate, reversed": lambda state: dict(reversed(prefixed("model.visual.", separate_qkv(state)).items())),
    "fused gate and up": lambda state: prefixed("visual.", fused_gate_up(state)),
    "both": lambda state: dict(reversed(fused_gate_up(separate_qkv(state)).items())),
}
FAMILIES = [("qwen2_5_vl", {})]
FAMILIES += [(family, {"attention_bias": bias}) for family in ("glm4v", "glm_ocr") for bias in (False, True)]


def load_error(encoder, weights):
    """The lines of the one error: kind of complaint -> its text."""
    with pytest.raises(ValueError, match="the weights do not match the model") as caught:
        encoder.load_weights(weights.items() if isinstance(weights, dict) else weights)
    title, *lines = str(caught.value).splitlines()
    assert title.startswith(f"{type(encoder).__name__}: ")
    return dict(re.match(r"  (\w+) \(\d+\): (.*)", line).groups() for line in lines)


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_fills_every_parameter(naming, family, changes):
    """Oracle: the tensors themselves; q, k, v are the rows of qkv, gate and up those of gate_up, in this order."""
    encoder = new_encoder(family, **changes)
    state = released(encoder)
    assert encoder.load_weights(NAMINGS[naming](state).items()) == set(state) == set(dict(encoder.named_parameters()))
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter, state[name].reshape(parameter.shape)), name


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


GOLDEN_NAMES = [(family, row) for family in ("qwen2_5_vl", "glm4v") for row in GOLDEN[family]]


@pytest.mark.parametrize(("family", "row"), GOLDEN_NAMES, ids=lambda x: x if isinstance(x, str) else f"{x[0]}-{x[1]}")
def test_golden_names(family, row):
    """Oracle: vLLM 0.33.0's name maps, where gate and up are one matrix. The language model's names are refused."""
    _, name, _, target, shard = row
    complaints = load_error(new_encoder(family, depth=12), {name: torch.empty(0)})  # they reach block 11
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


def test_fused_rows_and_kernels_that_do_not_fit_are_named_by_their_parts():
    encoder = new_encoder("glm4v", depth=1)
    weights = prefixed("visual.", fused_gate_up(released(encoder))) | {
        "visual.blocks.0.mlp.gate_up_proj.weight": torch.zeros(22, 16),
        "visual.downsample.weight": torch.zeros(12, 16, 3, 3),
    }
    parts = [f"visual.blocks.0.mlp.{part}_proj.weight is (11, 16), expected (12, 16)" for part in ("gate", "up")]
    kernel = "visual.downsample.weight is (12, 16, 3, 3), expected (12, 16, 2, 2)"
    assert load_error(encoder, weights) == {"misshapen": ", ".join([*parts, kernel])}


def test_gate_and_up_given_twice_are_refused():
    encoder = new_encoder("glm4v", depth=1)
    state = released(encoder)
    complaints = load_error(encoder, state | fused_gate_up(state))
    assert set(complaints) == {"repeated"} and len(complaints["repeated"].split(", ")) == 4


def test_the_weights_of_another_tower_are_refused():
    """GLM-4.1V's have a position table and a norm that GLM-OCR's lacks, and lack its norms of q and k."""
    complaints = load_error(new_encoder("glm_ocr"), released(new_encoder("glm4v")))
    assert "embeddings.position_embedding.weight" in complaints["unexpected"]
    assert "blocks.0.attn.q_norm.weight" in complaints["missing"]


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


def test_of_many_complaints_the_first_are_named(monkeypatch):
    """A checkpoint of another model misses hundreds: the error stays one that can be read."""
    monkeypatch.setattr("refvl.checkpoints.LISTED", 2)
    first, second, *others = dict(new_encoder().named_parameters())
    assert load_error(new_encoder(), {}) == {"missing": f"{first}, {second} and {len(others)} more"}


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
        ("merger.ln_q.weight", torch.ones(16, dtype=torch.int8), "has dtype torch.int8, expected torch.float32"),
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
        encoder = new_encoder()
    with pytest.raises(ValueError, match="expected a real device, got the meta device; call `to_empty` first"):
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
