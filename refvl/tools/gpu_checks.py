"""The checks of `python -m refvl check-gpu`: each one is a function that accepts a device and yields rows.

    towers      all towers, eager and with graphs, against the same towers on this machine's CPU
    answers     answers of the shipped models, against the answers that they were trained to give
    times       a tower as wide as the 7B's: eager, planned, graph alone, compiled
    compiled    all towers, compiled
    suite       `pytest -m gpu`

A row contains (what, measured, allowed); if allowed is None, there is no limit. An error in one
tower, model or size becomes a row that fails, and the run continues with the next one.

Shape suffixes: M output tokens, D hidden.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import CONFIG_MAPPING

from refvl.attention import HALF, available_backends, is_ampere
from refvl.checks import read_json
from refvl.encoders import Qwen2_5_VisionConfig
from refvl.families import FAMILIES
from refvl.graphs import EncoderGraphManager
from refvl.loading import load
from refvl.paths import CLONE, DATA
from refvl.serving.linear import fuse_layers
from refvl.study.costs import encoder_operations

SCENE, PAGE = DATA / "pictures" / "scene.png", DATA / "pictures" / "page.png"
CLIP = np.asarray(Image.open(DATA / "clips" / "scene.png")).reshape(-1, 84, 84, 3)  # a PNG, because PyAV may be missing
GRAPH_TOKENS = 64  # the largest budget of the checks; all their items fit
SIDES = (16, 36, 74)  # sides of the images in `times`, in patches: 224, 504, 1036 px
TWO_BLOCKS = replace(Qwen2_5_VisionConfig(), depth=2, fullatt_block_indexes=(1,))
# one question per shipped model; each answer token leads by 3 logits, so rounding changes no answer
QUESTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-qwen2_5_vl": ("What color is the circle?", "red", {"images": [SCENE]}),
    "tiny-qwen3_vl": ("Which way does the circle move?", "up", {"videos": [CLIP]}),
    "tiny-glm4v": ("Which way does the circle move?", "up", {"videos": [CLIP], "pruning_rate": 0.5}),
    "tiny-minicpmv-4_5": ("What color is the circle?", "red", {"images": [SCENE]}),
    "tiny-minicpmv-4_7": ("Where is the circle?", "top center", {"images": [SCENE]}),
    "tiny-step3": ("Which letter is in the red box?", "L", {"images": [PAGE]}),
}
if "minicpmv4_7" not in CONFIG_MAPPING:  # transformers before 5.23
    del QUESTIONS["tiny-minicpmv-4_7"]


SUITE = tuple(  # the files with tests that need a GPU: others may need packages that are missing
    f"tests/{name}.py"
    for name in (
        "encoders/test_attention",
        "graphs/test_graph_cuda",
        "graphs/test_graph_pipeline",
        "journeys/test_parallel",
    )
)


class Skipped(Exception):
    """Raised by a check that cannot run on this machine; the message is the reason."""


def half_of(device: torch.device) -> torch.dtype:
    """Return the half-precision dtype that is fast on a device."""
    return torch.bfloat16 if is_ampere(device) else torch.float16


def row(check: str, measured: float, allowed: float | None, unit: str = "") -> dict:
    """Return one row of a check. It passes if `measured` is at most `allowed`, or if `allowed` is None."""
    measured = float(measured)
    passed = allowed is None or measured <= allowed  # nan fails
    kept = measured if isfinite(measured) else str(measured)  # JSON cannot represent nan
    return {"check": check, "measured": kept, "allowed": allowed, "unit": unit, "passed": passed}


def each(names: Iterable[str], check: Callable[[str], Iterator[dict]]) -> Iterator[dict]:
    """Yield the rows of `check(name)` for each name; an error ends the rows of that name and
    adds a row that fails.
    """
    for name in names:
        try:
            yield from check(name)
        except Exception as error:  # on an unknown machine, any error may occur
            yield row(f"{name}: {type(error).__name__}: {error}", 1, 0, "error")


# --- results ----------------------------------------------------------------------------------------------------------


@cache
def towers() -> dict[str, Any]:
    """Return a mapping from families to encoders that contains each encoder once."""
    classes = {family.encoder: family.name.partition(",")[0] for family in reversed(FAMILIES)}
    return {name: encoder for encoder, name in reversed(classes.items())}


def build_tower(name: str) -> tuple[Any, Tensor, list]:
    """Build a small float32 tower on the CPU, with patch rows and the layouts of two items.

    Weights and rows are exact in float16, so any difference comes from rounding during the
    computation.
    """
    encoder_class = towers()[name]
    if hasattr(encoder_class, "config_class") and hasattr(encoder_class.config_class, "tiny"):
        config = encoder_class.config_class.tiny()
        narrow = getattr(config, "hidden_size", 64) % 64  # kernels accept heads of 8, 16, ... values
        encoder = encoder_class(replace(config, hidden_size=64) if narrow else config)
    else:
        encoder = encoder_class.from_config(read_json(DATA / "checkpoints" / "tiny-minicpmv-4_5" / "config.json"))
    layouts: list = [(1, 8, 8), (2, 4, 6)]
    if "MiniCPM" in name:
        layouts = [((4, 8),), ((8, 4), (4, 4))] if name.endswith(("4.6", "4.7")) else [((4, 5), (3, 3)), ((6, 2),)]
    elif "Step" in name:
        layouts = [(1, 2), (0, 0)]
    generator = _draw_weights(encoder)
    count = sum(encoder.item_size(layout)[0] for layout in encoder.check_layouts(layouts))
    values = getattr(encoder.config, "vision", encoder.config).patch_values
    return encoder.eval(), torch.randn(count, values, generator=generator).half().float(), layouts


@torch.inference_mode()
def check_towers(device: torch.device, *, compiled: bool = False) -> Iterator[dict]:
    """Compare each tower in float32 and float16 with float32 on a CPU.

    Towers run eagerly and as graphs that replay two items in the order A, B, A. With `compiled`,
    only the compiled towers run.
    """
    if compiled and available_backends(device, torch.float16)[0] != "varlen":
        raise Skipped("blocks are compiled only with varlen attention, which needs compute capability 8.0 or higher")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # by default, float32 convolutions round to TF32
        yield from each(towers(), partial(_check_tower, device=device, compiled=compiled))


def _check_tower(name: str, device: torch.device, compiled: bool) -> Iterator[dict]:
    encoder, rows, layouts = build_tower(name)
    wanted = encoder(rows, layouts)
    growth = _growth(encoder, rows, layouts, wanted)
    has_graphs = next(family for family in FAMILIES if family.encoder is type(encoder)).can["graphs"]
    for dtype in (torch.float32, torch.float16):
        fuse_layers(encoder.to(device, dtype))  # as `refvl.load` does
        values = rows.to(device, dtype)
        allowed, way = _allowed(encoder, dtype) * growth, "eager"
        if compiled:
            if encoder.backend() != "varlen":  # blocks are compiled only for this backend
                continue
            encoder.compile_blocks()
            way = "compiled"
        yield row(f"{name}, {dtype}, {way}", _error(encoder(values, layouts), wanted), allowed)
        if has_graphs and not compiled:
            error, others = _replay(encoder, values, layouts, wanted)
            yield row(f"{name}, {dtype}, graphs", error, allowed)
            yield row(f"{name}, {dtype}, graphs again, values that differ", others, 0)


def _replay(encoder: Any, rows: Tensor, layouts: list, wanted: Tensor) -> tuple[float, float]:
    """Replay two items in the order A, B, A.

    Returns the largest error, and the number of values that differ between the two replays of A.
    """
    manager = EncoderGraphManager(encoder, max_budget=GRAPH_TOKENS, progress=False)
    counts, tokens, _ = zip(*map(encoder.item_size, encoder.check_layouts(layouts)), strict=True)
    parts, errors, outs = rows.split(counts), [], []
    for i in (0, 1, 0):
        [out] = manager.execute(parts[i], [layouts[i]])
        outs.append(out)
        errors.append(_error(out, wanted.split(tokens)[i]))
    if manager.stats().misses:
        raise RuntimeError(f"graphs: {manager.stats().misses} items ran eagerly; expected all of them to replay")
    manager.clear()
    return max(errors), float((outs[0] != outs[2]).sum())


@torch.inference_mode()
def check_answers(device: torch.device) -> Iterator[dict]:
    """Check the answers of every shipped model in float32, in half precision and with graphs."""
    yield from each(QUESTIONS, partial(_check_answer, device=device))


def _check_answer(name: str, device: torch.device) -> Iterator[dict]:
    question, answer, media = QUESTIONS[name]
    for dtype in (torch.float32, half_of(device)):
        model = load(name, device=device, dtype=dtype, progress=False)
        yield row(f"{name}, {dtype}, wrong answers", model.chat(question, **media) != answer, 0)
    model.graphs = EncoderGraphManager(model.encoder, max_budget=GRAPH_TOKENS, progress=False)
    yield row(f"{name}, graphs, wrong answers", model.chat(question, **media) != answer, 0)
    yield row(f"{name}, graphs, items that ran eagerly", model.graphs.stats().misses, 0)


def run_suite(device: torch.device, arguments: Sequence[str] = ("-m", "gpu", *SUITE)) -> Iterator[dict]:
    """Run those of the repository's tests that need a GPU, in a process that sees only this device."""
    if not (CLONE / "tests").is_dir() or importlib.util.find_spec("pytest") is None:
        raise Skipped("needs a clone of the repository, and pip install -e '.[test]'")
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible[index] if visible[0] else str(index)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=CLONE, env=environment, capture_output=True, text=True, timeout=240)
    yield row("tests that passed", sum(map(int, re.findall(r"(\d+) passed", done.stdout))), None)
    yield row("exit status of pytest", done.returncode, 0)
    for name in re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M):
        yield row(name, 1, 0)


# --- times ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_times(device: torch.device, tower: Qwen2_5_VisionConfig = TWO_BLOCKS) -> Iterator[dict]:
    """Measure the median times of a tower in milliseconds, with torch's benchmark timer.

    The floor is the time that the tower's matmuls take at the rate of a large matmul.
    """
    like: Any = {"device": device, "dtype": half_of(device)}
    config = {"model_type": "qwen2_5_vl", "vision_config": asdict(tower)}
    encoder: Any = load(config, weights="random", text=False, progress=False, **like).encoder
    size = min(4096, 4 * tower.hidden_size)
    x = torch.randn(size, size, **like)
    rate = 2 * size**3 / _milliseconds(lambda: x @ x) * 1e3  # operations per second
    yield row("a large matmul", rate / 1e12, None, "TFLOP/s")
    for compiled in ("", ", compiled")[: 1 + (encoder.backend() == "varlen")]:
        if compiled:
            encoder.compile_blocks()
        for side in SIDES:
            name, grid = f"{side * tower.patch_size} px", [(1, side, side)]
            pixels, metadata = torch.randn(side**2, tower.patch_values, **like), encoder.plan(grid)
            manager = EncoderGraphManager(encoder, budgets=[side**2 // 4], max_items=1, max_frames=1, progress=False)
            ways: dict[str, Callable] = {
                f"{name}: eager{compiled}": partial(encoder, pixels, grid),
                f"{name}: planned{compiled}": partial(encoder, pixels, metadata=metadata),
                f"{name}: graph{compiled}": partial(manager.execute, pixels, grid),
            }
            if not compiled:
                yield row(f"{name}: floor", encoder_operations(encoder, grid) / rate * 1e3, None, "ms")
            yield from each(ways, partial(_time, ways))


def _time(ways: dict[str, Callable], name: str) -> Iterator[dict]:
    yield row(name, _milliseconds(ways[name]), None, "ms")


def _milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call, measured for a fifth of a second."""
    return Timer("call()", globals={"call": call}).blocked_autorange().median * 1e3


# --- what they share --------------------------------------------------------------------------------------------------


def _draw_weights(encoder: Any) -> torch.Generator:
    """Draw large weights, so attention is sharp, and wrong positions change the output by a tenth or more.

    At every width, a layer's outputs have a standard deviation 1.6 times that of its
    inputs. Returns the generator, for drawing the inputs.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in encoder.named_parameters():
            mean = float(parameter.ndim == 1 and key.endswith("weight"))  # norms scale around 1
            std = 0.2 if parameter.ndim == 1 else 1.6 / parameter[0].numel() ** 0.5
            if "position" in key or "pos_embed" in key:
                std = 1.0
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn.mul_(std).add_(mean).half())
    return generator


def _growth(encoder: Any, rows: Tensor, layouts: list, before: Tensor) -> float:
    """Return the factor by which a small relative change of the rows grows, at least 1.

    Rounding errors grow at the same rate. before: the output without the change.
    """
    noise = 1e-4 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    after = encoder(rows * (1 + noise), layouts)
    return max(1.0, float((after - before).pow(2).mean().sqrt() / (1e-4 * before.abs().max())))


def _allowed(encoder: Any, dtype: torch.dtype) -> float:
    """Return the allowed error as a share of the largest value: a dozen roundings for each block, and for two more.

    n roundings of at most eps / 2 each, as often up as down, add up to less than 2 * sqrt(n) * eps.
    In float32, the sums inside a matmul, with several hundred terms, also count.
    """
    roundings = 12 * (len(list(encoder.blocks)) + 2) * (1 if dtype in HALF else 256)
    return 2 * roundings**0.5 * torch.finfo(dtype).eps


def _error(out_MD: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((out_MD.cpu().double() - wanted).abs().max() / wanted.abs().max())


QUICK = {"towers": check_towers, "answers": check_answers, "times": measure_times}
ALL = QUICK | {
    "times": partial(measure_times, tower=Qwen2_5_VisionConfig()),
    "suite": run_suite,
    "compiled": partial(check_towers, compiled=True),
}
