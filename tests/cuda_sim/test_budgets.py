"""What encoding asks of the host and of the device, counted: these numbers may fall, not rise.

Tiny towers with random weights; the numbers do not depend on their widths. A copy is one transfer to the device, a wait
is the host waiting for it, a kernel is an ATen call on the device that is no view.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from graph_families import build, make_case, manager_of
from towers import randomize

from refvl.encoders import Step3VisionConfig, Step3VisionEncoder
from refvl.encoders.tower import Tower, send_rows
from refvl.graphs.buffers import metadata_tensors

LAYOUTS = {"Step3-VL": (1, 2)} | dict.fromkeys(("Qwen2.5-VL", "GLM-4.1V", "GLM-OCR"), (1, 8, 8))
BLOCKS = ("VisionBlock", "EncoderLayer", "VisionLayer")
KERNELS_PER_BLOCK = {
    "Qwen2.5-VL": 36, "GLM-4.1V": 36, "GLM-OCR": 61, "MiniCPM-V 2.6": 13, "MiniCPM-V 4.5": 13, "Step3-VL": 16,
}  # fmt: skip
COPIES_OF_A_PLAN = {
    "Qwen2.5-VL": 6, "GLM-4.1V": 4, "GLM-OCR": 3, "MiniCPM-V 2.6": 6, "MiniCPM-V 4.5": 8, "Step3-VL": 3,
}  # fmt: skip


def start(family):
    """An encoder on the device, and a picture's rows and layout on the host, in float32 as processors make them."""
    encoder = build(family)
    if family == "Step3-VL":  # the kernels do not take heads of 12
        encoder = randomize(Step3VisionEncoder(replace(Step3VisionConfig.tiny(), hidden_size=64)), 0.1)
    case = make_case(encoder, [LAYOUTS.get(family, ((4, 5), (3, 3)))])
    return encoder.to("cuda", torch.bfloat16), case.rows.float(), case.layouts


def count(machine, function) -> Counter:
    machine.counts.clear()
    function()
    return Counter(machine.counts)


@pytest.mark.parametrize("family", KERNELS_PER_BLOCK)
def test_kernels_per_block(machine, family):
    encoder, rows, layouts = start(family)
    seen = []
    for module in encoder.modules():
        if type(module).__name__ in BLOCKS:
            module.register_forward_pre_hook(lambda *_: seen.append(machine.counts["kernels"]))
            module.register_forward_hook(lambda *_: seen.append(machine.counts["kernels"]))
    with torch.inference_mode():
        encoder(send_rows([rows], encoder), layouts)
    assert max(b - a for a, b in zip(seen[::2], seen[1::2], strict=True)) <= KERNELS_PER_BLOCK[family]


@pytest.mark.parametrize("family", COPIES_OF_A_PLAN)
def test_a_first_picture_copies_its_rows_and_its_plan_and_waits_for_nothing(machine, family):
    encoder, rows, layouts = start(family)
    with torch.inference_mode():
        sent = count(machine, lambda: send_rows([rows], encoder))
        assert (sent["copies"], sent["bytes"], sent["waits"]) == (1, rows.numel() * 2, 0)
        planned = count(machine, lambda: encoder.plan(layouts))
        assert (planned["copies"], planned["waits"]) == (COPIES_OF_A_PLAN[family], 0)
        patches = encoder.item_size(encoder.check_layouts(layouts)[0])[0]
        assert planned["bytes"] <= 12 * patches + 512 or family == "Step3-VL"  # integers; Step3's places are int64


def test_of_a_still_picture_one_frame_travels(machine):
    """Half of the rows of Qwen and GLM repeat the other half."""
    encoder, rows, _ = start("Qwen2.5-VL")
    frames = rows.unflatten(1, encoder.config.patch_shape)
    frames[:, :, 1] = frames[:, :, 0]
    sent = count(machine, lambda: send_rows([rows], encoder))
    assert (sent["copies"], sent["bytes"], sent["waits"]) == (1, rows.numel(), 0)
    assert torch.equal(send_rows([rows], encoder).cpu(), rows.bfloat16())


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "GLM-OCR", "MiniCPM-V 2.6", "MiniCPM-V 4.5"])
def test_a_replay_of_a_size_seen_before_copies_rows_alone(machine, family):
    """One launch; the plan is on the device already."""
    encoder, rows, layouts = start(family)
    manager = manager_of(encoder, budgets=[16, 64])
    manager.execute(send_rows([rows], encoder), layouts)
    again = count(machine, lambda: manager.execute(send_rows([rows], encoder), layouts))
    assert (again["copies"], again["waits"], again["graph launches"]) == (1, 0, 1)


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "GLM-OCR"])
def test_a_million_patches_cost_twelve_bytes_each(monkeypatch, family):
    """Row and column, and for Qwen two indices per merged token; the segments are few."""
    monkeypatch.setattr(Tower, "reads_groups", False)
    plan = build(family).plan([(1, 1000, 1000)])
    assert sum(tensor.nbytes for tensor in metadata_tensors(plan).values()) < 12.3 * 10**6
