"""Measure where the time goes on a CPU, and count the same work for a GPU: `python -m benchmarks.performance`.

Everything is measured in CPU time on one thread, with interleaved calls:

- this machine's peak rates: its fastest matmul and copy
- linear layers by kernel, and the speed-up of a prefill
- the tower, with its counted operations and bytes, to compare with the peak rates
- pixels to patch rows, next to transformers' Pillow processor
- decoding with a cache of fixed size
- the stages of whole answers
- a fresh process up to its first answer, and the part of that time for importing torch and transformers' text model

The 7B tower in bfloat16 is never run. Its kernels, operations and bytes are counted, with one
kernel each for RMSNorm and attention, as on CUDA. Notebook 11 derives estimates from these
counts. With --write, the results are written to data/measurements/performance_cpu.json.
"""

import math
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import refvl
from benchmarks.report import (
    PrintedTable,
    Repeats,
    Write,
    announce,
    check_operations,
    environment,
    processor_seconds,
    resolve_device,
    side_by_side,
    write_measurement,
)
from refvl.attention import Segments
from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer, qwen2_5_vl
from refvl.families import read_config
from refvl.language.loading import random_language_model
from refvl.paths import DATA
from refvl.pixels.patches import PatchConfig, levels_of_image
from refvl.positions import compute_retention_mask
from refvl.positions.rotary import rotate_by_offsets
from refvl.serving.linear import KERNELS, OneDnnLinear, choose_linear, fuse_layers, use_onednn
from refvl.study.costs import encoder_operations, prefill_operations

NAME = "performance_cpu"
CHECKPOINT = DATA / "checkpoints" / "tiny-qwen2_5_vl"
NO_KERNELS = {"aten::empty", "aten::empty_like", "aten::new_empty"}
MATRIX = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}
TOWERS = {
    "tiny": Qwen2_5_VisionConfig.tiny(),
    "full width, two blocks": replace(Qwen2_5_VisionConfig(), depth=2, fullatt_block_indexes=(1,)),
}
SIDES = (84, 224, 504)  # px
GPU_SIDES = (112, 224, 336, 504, 672, 1036)
ROWS = (1, 8, 64, 256)
PROMPTS = (64, 512, 2048)  # tokens
PICTURES = ((224, 224), (448, 448), (1024, 1024), (2048, 1536), (4000, 3000))  # width x height
SCENE = DATA / "pictures" / "scene.png"
QUESTIONS: dict[str, dict[str, Any]] = {
    "a drawn scene": {"prompt": "What color is the circle?", "images": [SCENE]},
    "a photograph": {"prompt": "What is in the picture?", "images": [DATA / "pictures" / "coffee.jpg"]},
    "a video": {"prompt": "Which way does the circle move?", "videos": [DATA / "clips" / "scene.mp4"]},
}
STARTS = {  # each one includes the work of the previous one
    "import torch": "import torch",
    "the text model's class": "from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl",
    "an answer": f"import refvl\nrefvl.load({str(CHECKPOINT)!r}).chat('What color?', images=[{str(SCENE)!r}])",
}
PHOTO, QUESTION = DATA / "pictures" / "coffee.jpg", "What is in the picture?"


class Traffic(TorchDispatchMode):
    """A mode that counts kernels, and the bytes that they read and write, for matmuls,
    attention and all other kernels.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        read, written = _tensors((args, {**(kwargs or {}), "out": None})), _tensors(result)
        memory = {tensor.untyped_storage()._cdata for tensor in read}
        if function._schema.name in NO_KERNELS:
            return result
        if function._schema.is_mutable or any(tensor.untyped_storage()._cdata not in memory for tensor in written):
            self.add("matrix" if function._schema.name in MATRIX else "other", [*read, *written])
        return result

    def add(self, kind: str, tensors: list[Tensor]) -> None:
        self.kernels[kind] += 1
        self.bytes[kind] += sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _tensors(values) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def traffic(config: Qwen2_5_VisionConfig, side: int, dtype: torch.dtype, *, on_gpu: bool) -> dict:
    """Count operations, and kernels and bytes by kind, of one forward on a square image; nothing is computed.

    on_gpu: whether to count the tower that `refvl.load` builds on a GPU, where RMSNorm is one
        kernel, and the rotation is two kernels. Otherwise RMSNorm counts as several operations,
        as on a CPU. `tests/cuda_sim` compares the number.
    """
    grid = [(1, side // config.patch_size, side // config.patch_size)]
    with torch.device("meta"), torch.inference_mode(False):
        tower = Qwen2_5_VisionTransformer(config, attention="sdpa").to(dtype)
        x = torch.empty(grid[0][1] * grid[0][2], config.patch_values, dtype=dtype)
    if on_gpu:
        fuse_layers(tower)
    plan = tower.plan(grid)
    counter = Traffic()

    def attend(segments, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device="meta")
        counter.add("attention", [q, k, v, out])
        return out.flatten(1)

    def fused(x: Tensor, shape, weight: Tensor, eps: float | None) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device="meta")
        counter.add("other", [x, weight, out])
        return out

    with ExitStack() as replaced:
        replaced.enter_context(patch.object(Segments, "attend", attend))
        if on_gpu:
            replaced.enter_context(patch.object(F, "rms_norm", fused))
            replaced.enter_context(patch.object(qwen2_5_vl, "rotate", rotate_by_offsets))
        replaced.enter_context(torch.inference_mode(False))  # counts a linear layer or a norm as one operation
        replaced.enter_context(torch.no_grad())
        replaced.enter_context(counter)
        tower(x, metadata=plan)
    counted = {"kernels": dict(counter.kernels), "bytes": dict(counter.bytes)}
    return {"patches": len(x), "operations": encoder_operations(tower, grid)} | counted


@torch.inference_mode()
def measure_peaks(repeats: int) -> dict[str, float]:
    """Measure peak rates: matmul operations/s per dtype with the fastest kernel, and the bytes/s of a copy."""
    source, target = torch.ones(2**26), torch.empty(2**26)
    peaks = {"bytes_per_s": 2 * source.nbytes / min(processor_seconds(lambda: target.copy_(source)) for _ in range(5))}
    for dtype in (torch.float32, torch.bfloat16):
        x, layer = torch.randn(512, 1280).to(dtype), torch.nn.Linear(1280, 1280, bias=False).to(dtype)
        layers = [layer, deepcopy(layer)]
        use_onednn(layers[1])
        seconds = min(processor_seconds(partial(way, x)) for way in layers for _ in range(20 * repeats))
        peaks[str(dtype).removeprefix("torch.")] = 2 * x.numel() * layer.out_features / seconds
    return peaks


@torch.inference_mode()
def measure_linear(repeats: int) -> list[dict]:
    """Time one layer of full width for several numbers of rows: torch's kernel, oneDNN's, and bfloat16."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(1280, 1280)
    other, half = OneDnnLinear(1280, 1280), torch.nn.Linear(1280, 1280).bfloat16()
    other.load_state_dict(layer.state_dict())
    rows: list[dict] = []
    for count in ROWS:
        x = torch.randn(count, 1280)
        ways = {"torch": partial(layer, x), "onednn": partial(other, x), "bfloat16": partial(half, x.bfloat16())}
        for way, call in ways.items():
            check_operations(f"linear, {way}", call, 2 * count * layer.weight.numel())
        rows.append({"rows": count} | side_by_side(ways, 4 * repeats))
    return rows


@torch.inference_mode()
def measure_towers(repeats: int) -> list[dict]:
    """Time forwards whose plan is cached, and count their operations and bytes."""
    rows = []
    for name, config in TOWERS.items():
        torch.manual_seed(0)
        tower = Qwen2_5_VisionTransformer(config).eval()
        half, onednn = Qwen2_5_VisionTransformer(config).bfloat16().eval(), Qwen2_5_VisionTransformer(config).eval()
        use_onednn(onednn)
        for side in SIDES:
            grid = [(1, side // config.patch_size, side // config.patch_size)]
            x = torch.randn(grid[0][1] * grid[0][2], config.patch_values)
            ways: dict[str, Callable] = {"float32": partial(tower, x, grid), "onednn": partial(onednn, x, grid)}
            ways["bfloat16"] = partial(half, x.bfloat16(), grid)
            counted = traffic(config, side, torch.float32, on_gpu=False)
            for way, call in ways.items():
                check_operations(f"tower, {name}, {side} px, {way}", call, counted["operations"])
            rows.append({"tower": name, "px": side} | counted | side_by_side(ways, repeats))
    return rows


def rows_of_image(image: Image.Image, config: PatchConfig) -> torch.Tensor:
    """Run `patchify_image` without `load_image`, because transformers' processor does not load images either."""
    return levels_of_image(image, config)[0].normalize()


def measure_pixels(repeats: int) -> list[dict]:
    """Time transformers and refvl from an image in memory to patch rows, after a check that the rows are
    bit-identical.
    """
    config = PatchConfig(max_pixels=2**24)
    theirs = Qwen2VLImageProcessorPil(size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels})
    rows = []
    for width, height in PICTURES:
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        ours = partial(rows_of_image, image, config)
        equal = torch.equal(theirs(image, return_tensors="pt")["pixel_values"], ours())
        ways = {"transformers": lambda image=image: theirs(image, return_tensors="pt"), "refvl": ours}
        rows.append({"width": width, "height": height, "equal": equal} | side_by_side(ways, repeats))
    return rows


def measure_decode(repeats: int) -> dict:
    """Time an answer of 32 tokens, with a growing cache and with a cache of fixed size."""
    models = {kind: refvl.load(CHECKPOINT, compile=kind == "static", progress=False) for kind in ("dynamic", "static")}
    options: dict[str, Any] = {"images": [PHOTO], "max_new_tokens": 32, "eos_token_id": None}
    return side_by_side({kind: partial(model.chat, QUESTION, **options) for kind, model in models.items()}, repeats)


def prefill(language_model, embeds: Tensor) -> None:
    """Run the forward of a prompt (1, L, D), with positions as for text."""
    positions = torch.arange(embeds.shape[1]).expand(3, 1, -1)
    language_model(inputs_embeds=embeds, position_ids=positions, logits_to_keep=1)


def operations_of_prefill(language_model, tokens: int) -> int:
    """Return the number of operations: the layers on all tokens, and the head on the last one."""
    return prefill_operations(language_model, tokens) + 2 * language_model.lm_head.weight.numel()


def measure_gains(repeats: int) -> list[dict]:
    """Time the prefill of the tiny model, whose speed also depends on the kernel of linear layers."""
    models = {kernel: refvl.load(CHECKPOINT, linear=kernel, progress=False).language_model for kernel in KERNELS[1:]}
    rows: list[dict] = []
    for tokens in PROMPTS:
        embeds = torch.randn(1, tokens, models["torch"].config.hidden_size)
        with torch.inference_mode():
            ways = {kernel: partial(prefill, model, embeds) for kernel, model in models.items()}
            for kernel, model in models.items():
                check_operations(f"prefill, {kernel}", ways[kernel], operations_of_prefill(model, tokens))
            rows.append({"what": f"prefill of {tokens} tokens"} | side_by_side(ways, 4 * repeats))
    return rows


def measure_evs(repeats: int) -> dict:
    """Time one layer of Qwen2.5-VL-3B's width on a prompt of 90 % video tokens, with all and with a quarter of them."""
    text_config = read_config(DATA / "configs" / "Qwen2.5-VL-3B-Instruct.json").get_text_config()
    text_config.num_hidden_layers, text_config.vocab_size = 1, 256
    layer = random_language_model(text_config, dtype=torch.float32, device="cpu")
    if choose_linear("auto", layer.device, layer.dtype) == "onednn":  # as `refvl.load` does
        use_onednn(layer)
    thw, words, q = (10, 9, 8), 80, 0.75
    video = torch.randn(math.prod(thw), text_config.hidden_size)

    kept = words + int(compute_retention_mask(video, thw, 1, q).sum())
    prompt = torch.randn(1, words + len(video), text_config.hidden_size)
    ways = {"whole": partial(prefill, layer, prompt), f"q = {q}": partial(prefill, layer, prompt[:, :kept])}
    for (way, call), tokens in zip(ways.items(), (prompt.shape[1], kept), strict=True):
        check_operations(f"prefill, {way}", call, operations_of_prefill(layer, tokens))
    ways["mask"] = partial(compute_retention_mask, video, thw, 1, q)
    with torch.inference_mode():
        return {"prompt_tokens": prompt.shape[1], "kept_tokens": kept} | side_by_side(ways, repeats)


def measure_stages(repeats: int) -> list[dict]:
    """Return the median CPU time of every stage of a tiny model; a trace's own times include waiting."""
    model, rows = refvl.load(CHECKPOINT, device="cpu", progress=False), []
    for name, question in QUESTIONS.items():
        with patch("refvl.trace.synchronized_time", lambda device: time.process_time()):
            traces = [model.trace(**question) for _ in range(repeats + 1)][1:]
        seconds = {stage: statistics.median(t.seconds[stage] for t in traces) for stage in traces[0].seconds}
        rows.append({"what": name, "prompt_tokens": len(traces[0].full_ids), "seconds": seconds})
    return rows


def measure_start(repeats: int) -> dict[str, float]:
    """Return the median CPU time of fresh processes, including imports."""

    def seconds(code: str) -> float:
        code += "\nimport time\nprint(time.process_time())"
        return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    return {name: statistics.median(seconds(code) for _ in range(repeats)) for name, code in STARTS.items()}


def run(repeats: Repeats = 3, write: Write = False) -> None:
    """Measure this machine's peak rates and the tower, and count the work for a GPU."""
    device = resolve_device("cpu")
    announce(NAME, f"peaks, linear layers, towers, pixels, decoding, stages; timed calls of each: {repeats}", 1)
    result: dict[str, Any] = environment(device) | {"repeats": repeats, "peaks": measure_peaks(repeats)}
    print({name: f"{value / 1e9:.0f} G/s" for name, value in result["peaks"].items()}, flush=True)
    table = PrintedTable("speed-up over the first", {"what": "<32", "first": "<22", "others": "<40"})
    measured = {
        "linear": measure_linear, "towers": measure_towers, "gains": measure_gains, "pixels": measure_pixels,
        "decode": lambda repeats: [measure_decode(repeats)], "evs": lambda repeats: [measure_evs(repeats)],
    }  # fmt: skip
    for what, measure in measured.items():
        result[what] = measure(repeats)
        for row in result[what]:
            of = [str(value) for value in row.values() if isinstance(value, (int, str))][:2]
            first, *others = [(name, way) for name, way in row.items() if isinstance(way, dict) and "ratio" in way]
            ratios = ", ".join(f"{name} {way['ratio']:.2f}" for name, way in others)
            table.add(f"{what}: {' '.join(of)}", f"{first[0]} {first[1]['ms']:.2f} ms", ratios)
    result["start"] = measure_start(repeats)
    print({name: f"{seconds:.1f} s" for name, seconds in result["start"].items()}, flush=True)
    result["stages"] = measure_stages(repeats)
    released = partial(traffic, Qwen2_5_VisionConfig(), dtype=torch.bfloat16, on_gpu=True)
    result["gpu"] = [{"px": side} | released(side=side) for side in GPU_SIDES]
    if write:
        write_measurement(NAME, result | {"seconds": time.process_time()})


if __name__ == "__main__":
    typer.run(run)
