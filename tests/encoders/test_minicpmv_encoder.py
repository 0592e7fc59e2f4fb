"""MiniCPM-V's encoders: tower and resampler joined, versions told apart, layouts checked, names of checkpoints.

What every encoder keeps is in `contracts/test_encoders.py`.
"""

import json
from pathlib import Path

import pytest
import torch
from closeness import assert_differ
from graph_families import ENCODERS, VIDEO, minicpmv

from refvl.encoders import SiglipViT
from refvl.encoders.minicpmv import MiniCPMVEncoderConfig
from refvl.families import find_family
from refvl.pixels.slices import SliceGroup

FOLDER = Path(__file__).parents[1] / "golden"
VERSIONS = json.loads((FOLDER / "minicpmv_slicing.json").read_text())

PICTURE = ((4, 5), (7, 6), (2, 3))


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request):
    return minicpmv(request.param)


def random_rows(encoder, layouts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = sum(encoder.item_size(layout)[0] for layout in encoder.check_layouts(layouts))
    return torch.randn(count, 588, generator=generator)


# --- tower and resampler ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_only_2_5_does_not_see_the_shape():
    """Same weights, same rows: 4 x 6 and 6 x 4 look alike to 2.5's tower; 2.6 and 4.0 are one encoder."""
    weights = minicpmv("2.6").state_dict()
    towers = {}
    for version in ("2.5", "2.6", "4.0"):
        encoder = minicpmv(version)
        encoder.load_state_dict(weights)
        rows = random_rows(encoder, [[(4, 6)]])
        towers[version] = [encoder.vpm.encode(rows, encoder.plan([[size]]).vision) for size in [(4, 6), (6, 4)]]
    assert torch.equal(*towers["2.5"])
    assert_differ(*towers["2.6"], encoder)
    assert all(torch.equal(a, b) for a, b in zip(towers["2.6"], towers["4.0"], strict=True))


def test_frames_of_a_group_share_queries_in_4_5():
    """3 frames, 1 frame, 2 images: 1 + 1 + 2 sets of 4 tokens."""
    encoder = minicpmv("4.5")
    assert encoder.item_size(VIDEO) == (61, 16, 2)
    assert encoder.plan([VIDEO]).summary == "6 slices in 4 groups"


# --- versions and configs ---------------------------------------------------------------------------------------------


def family_of(values: dict):
    return find_family({"model_type": "minicpmv"} | values)


@pytest.mark.parametrize("case", VERSIONS["dispatch"] + VERSIONS["versions"], ids=lambda c: str(c["config"]))
def test_versions_golden(case):
    """Oracle: vLLM 0.33.0's `MiniCPMV.__new__` and `get_version_by_config`, which reads more versions than it has."""
    version = ".".join(map(str, case.get("out", ())))
    if "cls" in case:
        assert family_of(case["config"]).encoder.__name__ == case["cls"] + "Encoder"
    elif version in ENCODERS:
        assert family_of(case["config"]).version == version
    else:
        with pytest.raises(ValueError, match=r"version: .* supported"):
            family_of(case["config"])


def test_bad_configs_are_named():
    with pytest.raises(ValueError, match="vision_config: expected the sizes of the tower, got none"):
        MiniCPMVEncoderConfig.from_hf({"hidden_size": 64, "query_num": 4})
    with pytest.raises(ValueError, match="query_num: expected a square number for version 2.0, got 6"):
        minicpmv("2.0", query_num=6)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_layouts_are_normalised_and_hashable(encoder):
    """A bare (h, w) is a slice by itself; ids of -1 are no times."""
    want = (SliceGroup(((4, 5),)), SliceGroup(((7, 6),)))
    got = encoder.check_layouts([[(4, 5), torch.tensor([7, 6])], (SliceGroup([[4, 5]], (-1,)), SliceGroup(((7, 6),)))])
    assert got == [want, want]
    assert hash(got[0]) == hash(want)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((), "expected at least one slice, got none"),
        (((4, 5), (0, 3)), r"\[1\]: every extent must be at least 1, got \(0, 3\)"),
        ((4, 5), r"\[0\]: expected \(h, w\), got 4"),
        ((SliceGroup(()),), r"\[0\]: expected at least one slice, got none"),
        ((SliceGroup(((4, 5),) * 2, (1,)),), r"\[0\]: temporal_ids: expected one id for each"),
        ((SliceGroup(((4, 5),), (-3,)),), r"\[0\]: temporal_ids: expected .* of at least -1"),
    ],
)
def test_bad_layouts_are_named(layout, message):
    with pytest.raises(ValueError, match=rf"layouts\[0\].*{message}"):
        minicpmv("4.5").plan([layout])


@pytest.mark.parametrize("version", ["2.0", "2.5", "2.6", "4.0"])
def test_times_are_for_4_5(version):
    with pytest.raises(ValueError, match=r"layouts\[0\]\[0\]: expected no temporal ids, which only MiniCPM-V 4.5"):
        minicpmv(version).check_layouts([VIDEO])


# --- weights ----------------------------------------------------------------------------------------------------------


TIMM_NAMES = {
    "embeddings.patch_embedding": "patch_embed.proj", "embeddings.position_embedding.weight": "pos_embed",
    "post_layernorm": "norm", "encoder.layers": "blocks", "layer_norm": "norm",
    "self_attn.qkv": "attn.qkv", "self_attn.out_proj": "attn.proj",
}  # fmt: skip


def checkpoint(encoder):
    """The encoder's weights under the names and shapes of a checkpoint: q, k, v apart but for timm's names (2.0),
    kernels as convolutions.
    """
    is_timm = isinstance(encoder.vpm, SiglipViT)
    kernels = {f"vpm.{name}": shape for name, shape in encoder.vpm.kernels.items()}
    weights = {}
    for name, tensor in encoder.state_dict().items():
        if ".self_attn.qkv." in name and not is_timm:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                weights[name.replace(".qkv.", f".{part}_proj.")] = piece
        else:
            tensor = tensor.reshape(kernels.get(name, tensor.shape))
            for ours, theirs in TIMM_NAMES.items() if is_timm else ():
                name = name.replace(ours, theirs)
            weights[name] = tensor
    return weights


def test_a_checkpoint_loads_bit_by_bit(encoder):
    fresh = type(encoder).from_config(encoder.config)
    assert fresh.load_weights(checkpoint(encoder).items()) == set(encoder.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), encoder.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("version", ENCODERS)
@torch.no_grad()
def test_what_has_no_place_is_left_out_by_name(version):
    """A dropped last layer, pooling heads and 2.0's positions; the rest is strict."""
    whole = minicpmv(version)
    dropped = minicpmv(version, drop_vision_last_layer=True)
    pool = {
        "2.0": {"vpm.attn_pool.latent": torch.zeros(1), "resampler.pos_embed": torch.zeros(4, 64)},
    }.get(version, {"vpm.head.probe": torch.zeros(1)})  # fmt: skip
    weights = checkpoint(whole) | pool
    dropped.load_weights(weights.items())
    assert len(dropped.state_dict()) < len(whole.state_dict())
    rows = random_rows(whole, [PICTURE])
    assert_differ(dropped(rows, [PICTURE]), whole(rows, [PICTURE]), whole)
    del weights["resampler.query"]
    with pytest.raises(ValueError, match=r"(?s)unexpected \(1\): llm.norm.weight.*missing \(1\): resampler.query"):
        whole.load_weights((weights | {"llm.norm.weight": torch.zeros(1)}).items())
