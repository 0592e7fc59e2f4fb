"""What encoding asks of the host and of the device, counted: these numbers may fall, not rise.

Tiny towers with random weights; the numbers do not depend on their widths. A copy is one transfer
to the device, a wait is the host waiting for it, a kernel is an ATen call on the device that is no
view. Where a kernel first copies what it cannot read as it lies, as that of RMSNorm does with the
queries and keys of GLM-OCR, that is not counted.
"""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from closeness import assert_agree
from graph_families import FOLDED, GRIDS, SQUARES, build, make_case, manager_of
from PIL import Image
from towers import randomize

import refvl
from benchmarks.performance import traffic
from refvl.encoders.tower import send_rows
from refvl.graphs.buffers import metadata_tensors
from refvl.pixels.patches import PatchConfig, levels_of_frames, levels_of_image
from refvl.positions import rotary
from refvl.serving.linear import fuse_layers
from refvl.serving.media_cache import state_of
from refvl.trace import check_finite

LAYOUTS = {"Step3-VL": (1, 2), "Step3-VL-10B": (1, 2), "MiniCPM-V 4.6": ((4, 8), (8, 4))} | dict.fromkeys(
    ("Qwen2.5-VL", "Qwen3-VL", "GLM-4.1V", "GLM-OCR"), (1, 8, 8)
)
KERNELS_PER_BLOCK = {
    "Qwen2.5-VL": 12, "Qwen3-VL": 12, "GLM-4.1V": 14, "GLM-OCR": 17, "MiniCPM-V 2.6": 10, "MiniCPM-V 4.5": 10,
    "MiniCPM-V 4.6": 10, "Step3-VL": 12, "Step3-VL-10B": 18,
}  # fmt: skip
COPIES_OF_A_PLAN = {
    "Qwen2.5-VL": 1, "Qwen3-VL": 2, "GLM-4.1V": 2, "GLM-OCR": 1, "MiniCPM-V 2.6": 2, "MiniCPM-V 4.5": 2,
    "MiniCPM-V 4.6": 1, "Step3-VL": 1, "Step3-VL-10B": 1,
}  # fmt: skip
KERNELS_AROUND_A_REPLAY = {  # all buffers filled and padded, outputs cloned; where the plan reads weights, the plan
    "Qwen2.5-VL": 7, "Qwen3-VL": 8, "GLM-4.1V": 8, "GLM-OCR": 4, "MiniCPM-V 2.6": 6, "MiniCPM-V 4.5": 6,
    "MiniCPM-V 4.6": 5, "Step3-VL": 11, "Step3-VL-10B": 9,
}  # fmt: skip


def start(family):
    """An encoder on the device, as `load` builds it, and a picture's rows and
    layout on the host, in float32 as processors make them.
    """
    encoder = build(family)
    if family in SQUARES | FOLDED:  # the kernels do not take heads of 12
        tower = (SQUARES | FOLDED)[family]
        encoder = randomize(tower(replace(tower.config_class.tiny(), hidden_size=64)), 0.1)
    case = make_case(encoder, [LAYOUTS.get(family, ((3, 3), (4, 5)))])
    fuse_layers(encoder.to("cuda", torch.bfloat16))
    return encoder, case.rows.float(), case.layouts


@pytest.mark.parametrize("family", KERNELS_PER_BLOCK)
def test_kernels_per_block(machine, family):
    encoder, rows, layouts = start(family)
    machine.dtypes.clear()
    found, before = list[int](), list[int]()
    for module in encoder.blocks:
        module.register_forward_pre_hook(lambda *_: before.append(machine.counts["kernels"]))
        module.register_forward_hook(lambda *_: found.append(machine.counts["kernels"] - before.pop()))
    with torch.inference_mode():
        encoder(send_rows([rows], encoder), layouts)
    assert max(found) <= KERNELS_PER_BLOCK[family]
    assert torch.float64 not in machine.dtypes and not machine.finished


def test_the_benchmark_counts_the_kernels_that_run(machine):
    """Notebook 11 estimates launches from a count on the meta device. Oracle: the
    simulated device."""
    encoder, rows, layouts = start("Qwen2.5-VL")
    with torch.inference_mode():
        pixel_values, metadata = send_rows([rows], encoder), encoder.plan(layouts)
        ran = machine.counted(lambda: encoder(pixel_values, metadata=metadata))[1]
    side = layouts[0][1] * encoder.config.patch_size
    counted = traffic(encoder.config, side, torch.bfloat16, on_gpu=True)["kernels"]
    assert ran["kernels"] == sum(counted.values())


@pytest.mark.parametrize("family", COPIES_OF_A_PLAN)
def test_a_first_picture_copies_its_rows_and_its_plan_and_waits_for_nothing(machine, family):
    encoder, rows, layouts = start(family)
    with torch.inference_mode():
        sent = machine.counted(lambda: send_rows([rows], encoder))[1]
        assert (sent["copies"], sent["bytes"], sent["staged"], sent["waits"]) == (1, rows.numel() * 2, 0, 0)
        planned = machine.counted(lambda: encoder.plan(layouts))[1]
        assert (planned["copies"], planned["staged"], planned["waits"]) == (COPIES_OF_A_PLAN[family], 0, 0)
        patches = encoder.item_size(encoder.check_layouts(layouts)[0])[0]
        assert planned["bytes"] <= 12 * patches + 512 or family in SQUARES  # integers; Step3's places are int64
        pixel_values, metadata = send_rows([rows], encoder), encoder.plan(layouts)
        ran = machine.counted(lambda: encoder(pixel_values, metadata=metadata))[1]
        assert (ran["copies"], ran["waits"]) == (0, 0)
    dtypes = {x.dtype for name, x in metadata_tensors(metadata).items() if "frequencies" in name}
    assert dtypes <= {torch.float32}  # angles of late times would be off by radians


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_of_a_picture_a_byte_a_value_travels_and_of_a_still_one_frame(machine, dtype):
    """An eighth of the still picture's rows in float32. Oracle: they are
    normalised on the CPU, to the bit."""
    encoder = build("Qwen2.5-VL").to("cuda", dtype)
    image, clip = np.random.default_rng(0).integers(0, 256, (2, 4, 56, 84, 3), dtype=np.uint8)
    config = PatchConfig(min_pixels=784)
    for levels, _ in (levels_of_image(Image.fromarray(image[0]), config), levels_of_frames(clip, config)):
        sent = machine.counted(lambda levels=levels: send_rows([levels], encoder))[1]
        assert (sent["copies"], sent["kernels"], sent["staged"], sent["waits"]) == (1, 3, 0, 0)  # indices, one gather
        assert sent["bytes"] == levels.values.numel() + 3 * 256 * dtype.itemsize
        assert torch.equal(send_rows([levels], encoder).cpu(), levels.normalize().to(dtype))
    assert sent["bytes"] - 3 * 256 * dtype.itemsize == 4 * 56 * 84 * 3  # of the clip, all frames
    assert torch.int64 not in machine.dtypes  # indices of four bytes


@pytest.mark.parametrize("family", GRIDS)
def test_rotary_factors_and_samples_of_tables_are_float32_s(machine, monkeypatch, family):
    """In bfloat16, the angles of a wide picture would be off by most of a radian.
    Oracle: float64, and float32."""
    used, rotate = [], rotary.rotate_by_offsets
    monkeypatch.setattr(rotary, "rotate_by_offsets", lambda x, *factors: used.append(factors) or rotate(x, *factors))
    encoder, layouts = build(family).to("cuda", torch.bfloat16), [(1, 2, 400)]
    metadata = encoder.plan(layouts)
    with torch.inference_mode():
        encoder(torch.zeros(800, encoder.patch_values).cuda(), metadata=metadata)
    pairs = encoder.head_dim // 2
    frequencies = 10000.0 ** -(torch.arange(0, pairs, 2).double() / pairs)
    angles = (metadata.positions.cpu()[..., None] * frequencies).flatten(1)
    exact = rotary.rotary_factors(angles.cos(), angles.sin())
    error = max((x.cpu() - y).abs().max() for x, y in zip(used[0], exact, strict=True))
    assert {x.dtype for x in used[0]} == {torch.float32} and error < 400 * 4 * torch.finfo(torch.float32).eps
    if hasattr(metadata, "position_embeds"):
        exact = encoder.cpu().float().plan(layouts).position_embeds
        assert_agree(metadata.position_embeds.cpu(), exact.bfloat16(), 1)


def test_the_rows_of_the_mlp_begin_at_multiples_of_16_bytes(machine):
    """As `load` builds it, in memory that holds NaN. Oracle: the same weights on
    the CPU."""
    config = replace(GRIDS["Qwen2.5-VL"].config_class.tiny(), intermediate_size=98)
    whole = {"model_type": "qwen2_5_vl", "vision_config": asdict(config)}
    options = {"weights": "random", "text": False, "dtype": "bfloat16", "progress": False}
    encoder, rows = refvl.load(whole, device="cuda", **options).encoder, torch.randn(16, config.patch_values).bfloat16()
    with torch.inference_mode():
        ours, ran = machine.counted(lambda: encoder(rows.cuda(), [(1, 4, 4)]).cpu())
        assert ran["unaligned products"] == 0
        assert_agree(ours, encoder.cpu()(rows, [(1, 4, 4)]), 12 * (config.depth + 2))


def test_the_host_waits_once_however_many_items_and_weights_there_are(machine):
    encoder, items = build("Qwen2.5-VL").to("cuda"), [torch.ones(2, 2, device="cuda")] * 3
    assert machine.counted(lambda: check_finite(items, "item"))[1]["waits"] == 1
    assert machine.counted(lambda: state_of(encoder))[1]["waits"] == 1  # by which a media cache knows the tower


@pytest.mark.parametrize("family", KERNELS_AROUND_A_REPLAY)
def test_a_replay_copies_rows_and_plan_and_waits_for_nothing(machine, family):
    """Rows are copied once, the plan as often as an eager forward's. No buffer is
    full. Step3 has two graphs."""
    encoder, rows, layouts = start(family)
    budgets = {"local": [3], "global": [4]} if family in SQUARES else [24, 80]
    manager = manager_of(encoder, budgets=budgets)
    manager.execute(send_rows([rows], encoder), layouts)
    machine.finished.clear()
    again = machine.counted(lambda: manager.execute(send_rows([rows], encoder), layouts))[1]
    planned = 0 if family in SQUARES else COPIES_OF_A_PLAN[family]
    assert (again["copies"], again["waits"], machine.finished) == (1 + planned, 0, [])
    assert again["graph launches"] == (2 if family in SQUARES else 1)
    assert again["kernels"] - again["copies"] <= KERNELS_AROUND_A_REPLAY[family]
