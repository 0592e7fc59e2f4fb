"""Strict loading: every naming fills every parameter, and nothing that does not fit is accepted silently.

That an encoder loads its own weights, and names everything that does not fit, is in
`contracts/test_encoders.py`.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from towers import CLASSES

from refvl.encoders.weights import load_strict

SMALL = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 12, "patch_size": 4}
KERNELS = {"patch_embed.proj.weight": (16, 3, 2, 4, 4), "downsample.weight": (12, 16, 2, 2)}


@pytest.fixture(autouse=True)
def all_are_listed(monkeypatch):
    monkeypatch.setattr("refvl.checkpoints.LISTED", 1000)


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
    "after 4.52": lambda state: prefixed("model.visual.", fused_gate_up(state)),
    "separate, reversed": lambda state: dict(reversed(separate_qkv(state).items())),
}
FAMILIES = [("qwen2_5_vl", {}), ("glm4v", {"attention_bias": True}), ("glm_ocr", {"attention_bias": False})]


def load_error(encoder, weights):
    """The lines of the one error: kind of complaint -> its text."""
    with pytest.raises(ValueError, match="the weights do not match the model") as caught:
        encoder.load_weights(weights)
    title, *lines = str(caught.value).splitlines()
    assert title.startswith(f"{type(encoder).__name__}: ")
    return dict(re.match(r"  (\w+) \(\d+\): (.*)", line).groups() for line in lines)


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_fills_every_parameter(naming, family, changes):
    """Oracle: the tensors themselves; q, k, v are the rows of qkv, gate and up those of gate_up, in this order."""
    encoder = new_encoder(family, **changes)
    state = released(encoder)
    assert encoder.load_weights(NAMINGS[naming](state)) == set(state) == set(dict(encoder.named_parameters()))
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter, state[name].reshape(parameter.shape)), name


def test_weights_are_copied_and_cast():
    encoder, state = new_encoder().to(torch.bfloat16), released()
    encoder.load_weights((name, tensor.double()) for name, tensor in state.items())
    before = state["merger.ln_q.weight"].bfloat16()
    state["merger.ln_q.weight"].zero_()
    assert torch.equal(encoder.merger.ln_q.weight, before)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("blocks.0.mlp.up_proj.weight", torch.ones(16, 24), r"is \(16, 24\), expected \(24, 16\)"),
        ("patch_embed.proj.weight", torch.ones(16, 2, 3, 4, 4), r"is \(16, 2, 3, 4, 4\), expected \(16, 3, 2, 4, 4\)"),
        ("blocks.0.attn.qkv.weight", torch.ones(3, 16, 16), r"is \(3, 16, 16\), expected \(48, 16\)"),
    ],
    ids=["transposed", "time first", "stacked"],
)
def test_a_tensor_of_another_shape_is_refused(name, tensor, expected):
    """As many values are not enough: only the patch kernel may be flattened, and only from its true shape."""
    complaints = load_error(new_encoder(), released() | {name: tensor})
    assert list(complaints) == ["misshapen"]
    assert re.fullmatch(f"{re.escape(name)} {expected}", complaints["misshapen"])


@pytest.mark.parametrize("fused_first", [True, False])
def test_fused_and_separate_at_once_are_repeated(fused_first):
    """Whichever comes first counts; the other is named."""
    state, q = released(), ("blocks.0.attn.q.weight", torch.ones(16, 16))
    fused = ("blocks.0.attn.qkv.weight", state.pop("blocks.0.attn.qkv.weight"))
    complaints = load_error(new_encoder(), [*state.items(), *((fused, q) if fused_first else (q, fused))])
    assert complaints["repeated"] == (q if fused_first else fused)[0]


@pytest.mark.parametrize("name", ["blocks.2.norm1.weight", "visual.visual.merger.ln_q.weight", "blocks.0.mlp.q.weight"])
def test_a_name_that_is_nearly_right_is_refused(name):
    assert load_error(new_encoder(), released() | {name: torch.ones(16)}) == {"unexpected": name}


def test_a_tower_without_memory_is_refused():
    """On the meta device a copy would do nothing, silently."""
    encoder = new_encoder().to("meta")
    with pytest.raises(ValueError, match="expected a real device, got the meta device; call `to_empty` first"):
        encoder.load_weights(released())


def test_persistent_buffers_are_weights_and_others_are_not():
    """A buffer that belongs to the state dict has to come with the checkpoint; one that is computed may not."""
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.zeros(3))
    module.register_buffer("computed", torch.zeros(3), persistent=False)
    weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "table": torch.ones(3)}
    assert load_strict(module, weights.items()) == weights.keys()
    assert torch.equal(module.table, torch.ones(3))
    with pytest.raises(ValueError, match=r"(?s)unexpected \(1\): computed.*missing \(1\): table"):
        load_strict(module, [*list(weights.items())[:2], ("computed", torch.ones(3))])
