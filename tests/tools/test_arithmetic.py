"""Arithmetic counted without computing.

Oracle: torch's own counter over the run itself, and sums over the weights.
"""

import json

import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import refvl
from benchmarks.report import count_operations
from refvl.paths import DATA
from refvl.serving.linear import OneDnnLinear, times_as_fast
from refvl.study.costs import encoder_operations, plan_media, prefill_operations

TINY = ("tiny-qwen2_5_vl", "tiny-qwen3_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3")


def in_products():
    """Attention as products of matrices: torch does not count the fused kernel of a CPU."""
    return sdpa_kernel(SDPBackend.MATH)


@pytest.fixture(scope="module", params=TINY)
def model(request):
    """With torch's linear kernel, because torch's own counter misses oneDNN's."""
    return refvl.load(DATA / "checkpoints" / request.param, device="cpu", linear="torch", progress=False)


@torch.no_grad()
def test_a_tower_takes_what_torch_counts_while_it_runs(model):
    plan = plan_media(model, Image.new("RGB", (100, 70)))
    rows = torch.zeros(plan.patches, model.encoder.config.patch_values)
    metadata = model.encoder.plan([plan.layout])
    with in_products(), FlopCounterMode(display=False) as counter:
        model.encoder(rows, metadata=metadata, attention="sdpa")
    assert encoder_operations(model.encoder, [plan.layout]) == counter.get_total_flops()


@torch.no_grad()
def test_a_prefill_takes_what_torch_counts_while_it_runs(model):
    tokens = 24
    embeds = torch.randn(1, tokens, model.language_model.config.hidden_size)
    with in_products(), FlopCounterMode(display=False) as counter:
        model.language_model.model(inputs_embeds=embeds)
    modules = counter.get_flop_counts()  # some releases of transformers multiply matrices for the angles, too
    layers = [sum(modules[name].values()) for name in modules if name.rpartition(".")[0].endswith(".layers")]
    assert prefill_operations(model.language_model, tokens) == sum(layers)


@pytest.mark.skipif(not times_as_fast(), reason="this torch has no such kernel")
@torch.no_grad()
def test_onednn_s_linear_layers_are_counted():
    """Oracle: the formula 2 * rows * inputs * outputs; torch's counter alone finds nothing."""
    layer, x = OneDnnLinear(512, 96), torch.zeros(2, 128, 512)
    assert count_operations(lambda: layer(x)) == 2 * 2 * 128 * 512 * 96


@pytest.mark.thorough
def test_the_kept_counts_are_those_of_the_models():
    """One row of every family again."""
    from benchmarks.families import CLIP_SIZE, CONFIGS, count, load_released

    counted = json.loads((DATA / "measurements/families.json").read_text())
    assert counted["configs"] == CONFIGS and tuple(counted["clip_size"]) == CLIP_SIZE
    for family in CONFIGS:
        row = next(row for row in counted["rows"] if row["family"] == family)
        again = count(load_released(family), Image.new("RGB", (row["size"], row["size"])))
        assert row == {"family": family, "kind": "image", "size": row["size"]} | again
