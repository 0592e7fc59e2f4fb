"""The text model over several devices, placed by transformers.

Oracle: the ids of the model on one device.
"""

import os

import pytest
import torch
from forked import CONTEXT, exit_codes, torchrun_variables
from transformers.distributed import DistributedConfig

import refvl
from refvl.paths import DATA

PROMPT, PICTURE = "What color is the circle?", DATA / "pictures" / "coffee.jpg"
PLACES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb",
          "lm_head")  # fmt: skip


@pytest.fixture
def on_one_device(vlm):
    ids = vlm.trace(PROMPT, images=[PICTURE], max_new_tokens=8).token_ids
    assert len(set(ids)) > 4
    return ids


def test_a_device_map_changes_no_id(checkpoint, on_one_device, tmp_path):
    """Some layers in memory, the others on disk, as a map over two devices would split them."""
    pytest.importorskip("accelerate")
    on_disk = ["model.layers.0", "model.layers.2", "lm_head"]
    device_map = {place: "disk" if place in on_disk else "cpu" for place in PLACES}
    placed = {"device_map": device_map, "offload_folder": tmp_path}
    vlm = refvl.load(checkpoint, device="cpu", progress=False, **placed)
    offloaded = [name for name, weight in vlm.language_model.named_parameters() if weight.is_meta]
    assert offloaded
    assert all(name.startswith(tuple(f"{place}." for place in on_disk)) for name in offloaded)
    assert vlm.trace(PROMPT, images=[PICTURE], max_new_tokens=8).token_ids == on_one_device


def work(rank, environment, folder, results):
    """One process of two, as torchrun starts them."""
    os.environ |= environment
    torch.set_num_threads(1)
    vlm = refvl.load(folder, device="cpu", progress=False, distributed_config=DistributedConfig(tp_plan="auto"))
    weight = vlm.language_model.model.layers[0].mlp.up_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    ids = vlm.trace(PROMPT, images=[PICTURE], max_new_tokens=8).token_ids
    results.put((rank, tuple(local.shape), ids))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_tensor_parallel_processes_give_the_same_ids(checkpoint, on_one_device):
    """Two processes hold half of each layer's columns and generate the same."""
    pytest.importorskip("accelerate")
    results = CONTEXT.Queue()
    arguments = [(rank, environment, checkpoint, results) for rank, environment in enumerate(torchrun_variables(2))]
    assert exit_codes(work, arguments) == [0, 0]
    found = sorted(results.get(timeout=10) for _ in arguments)
    text = refvl.load(checkpoint, weights="random", device="meta").config.get_text_config()
    half = (text.intermediate_size // 2, text.hidden_size)
    assert found == [(0, half, on_one_device), (1, half, on_one_device)]
