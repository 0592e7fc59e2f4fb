"""Quantised text models. Oracle: the same matrices rounded by hand, and the headers of files."""

import json

import pytest
import torch
from checkpoint_factory import change_weights, make_checkpoint
from random_models import integers, load
from safetensors.torch import load_file

import refvl
from refvl.paths import DATA
from refvl.study.costs import costs, describe, stored_text_bytes

TINY = DATA / "checkpoints" / "tiny-qwen2_5_vl"
QUESTION = {"prompt": "What color is the circle?", "images": [DATA / "pictures" / "scene.png"]}


def rounded(weight: torch.Tensor, bits: int, group: int = 32) -> torch.Tensor:
    """The nearest of 2^bits levels, -2^(bits - 1) of them below zero; the largest of a group has
    the last."""
    groups = weight.unflatten(-1, (-1, group))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True) / ((high - low) / 2)
    return ((groups / scale).round().clamp(low, high) * scale).flatten(-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_only_the_text_models_matrices_are_rounded(bits):
    """Oracle: a plain model whose matrices were rounded here; a level more or less at a tie, so
    half a scale."""
    plain = load(TINY)
    packed = load(TINY, quantization_config=integers(bits, group=32))
    assert packed.encoder.dtype == torch.float32
    for (name, ours), theirs in zip(plain.encoder.named_parameters(), packed.encoder.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    mlp = plain.language_model.model.layers[0].mlp.down_proj.weight.detach()
    got = packed.language_model.model.layers[0].mlp.down_proj.weight.dequantize()
    step = mlp.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    assert ((got - mlp).unflatten(-1, (-1, 32)).abs() <= 0.51 * step).all()
    assert not torch.equal(got, mlp)
    assert (got - rounded(mlp, bits)).abs().median() == 0
    for outer in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(*(getattr(vlm.language_model, outer)().weight for vlm in (packed, plain)))
    assert packed.chat(**QUESTION) == "red"


def test_info_reads_what_a_quantised_checkpoint_takes(tmp_path):
    """Oracle: the bytes of the tensors in the file."""
    folder = make_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights | {name: weights[name].to(torch.float8_e4m3fn)})
    weights = load_file(folder / "model.safetensors")
    text = [tensor for key, tensor in weights.items() if not key.startswith("visual.")]
    found = stored_text_bytes(folder, r"^(model\.)?visual\.")
    assert found == sum(tensor.numel() * tensor.element_size() for tensor in text)
    vlm = refvl.load(folder / "config.json", weights="random", device="meta", dtype="bfloat16")
    assert costs(vlm, text_bytes=found)["weights_bytes_of"]["language_model"] == found
    assert "quantised" in describe(vlm, text_bytes=found)["weights in bfloat16"]
    assert json.loads(json.dumps(costs(vlm)))["weights_bytes_of"]["encoder"] == 2 * sum(
        p.numel() for p in vlm.encoder.parameters()
    )
