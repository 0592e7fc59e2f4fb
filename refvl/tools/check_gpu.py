"""`python -m refvl check-gpu`: what this GPU runs, whether it runs it right, and how far from the floor. A minute.

    device      capability, memory, versions, the attention that will be taken
    attention   every backend against float64 on odd segments: empty ones, strided values, all head dimensions in use
    graphs      capture, replay A, B, A, against the eager tower; memory given back
    compile     encode, compile something, encode: the same bits
    times       tower eager and by graph beside the time of its matrix products alone

Every check is a row of (what, measured, allowed); the verdict is one line, and all of it one JSON.

Shape suffixes: N rows, H heads, K head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.benchmark import Timer

from refvl.attention import HALF, available_backends, cumulative_lengths, describe_backend, varlen_attention
from refvl.encoders import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import EncoderGraphManager
from refvl.graphs.cuda import pool_bytes
from refvl.study.arithmetic import encoder_operations

HEAD_DIMS = (64, 72, 80, 112, 128)  # GLM-OCR, SigLIP, Qwen2.5-VL, Step3-VL, GLM-4.1V and the resamplers
LENGTHS = (64, 0, 33, 1, 0, 257, 64, 0)  # segments; empty ones first, last and between do not occur by chance
TWO_BLOCKS = replace(Qwen2_5_VisionConfig(), depth=2, fullatt_block_indexes=(1,))  # the widths of the 7B tower
SIDES = (16, 36, 74)  # patches: pictures of 224, 504 and 1036 px


def row(check: str, measured: float, allowed: float | None, unit: str = "") -> dict:
    """One check. measured must be at most allowed; where that is None nothing is demanded."""
    passed = allowed is None or measured <= allowed  # nan fails
    return {"check": check, "measured": measured, "allowed": allowed, "unit": unit, "passed": passed}


def check_gpu(
    device: str | torch.device = "cuda",
    *,
    config: Qwen2_5_VisionConfig = TWO_BLOCKS,
    sides: Sequence[int] = SIDES,
    compiles: bool = True,
) -> dict:
    """All checks on a CUDA device, as a dict that JSON can hold; "passed" says whether all of them did.

    config, sides: of the tower that graphs and times are checked on. compiles: whether torch.compile is tried. Raises
    ValueError where there is no such device.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"device: check-gpu needs a CUDA device, got {str(device)!r}")
    dtype = torch.bfloat16 if "varlen" in available_backends(device, torch.bfloat16) else torch.float16
    encoder = _random_tower(config, device, dtype)
    rows = [*check_attention(device), *check_graphs(encoder, sides, compiles=compiles), *measure_times(encoder, sides)]
    return {"device": describe_device(device), "rows": rows, "passed": all(row["passed"] for row in rows)}


def describe_device(device: torch.device) -> dict:
    """Name, capability, memory, versions, and the attention that a half-precision tower takes."""
    properties = torch.cuda.get_device_properties(device)
    kernels = {f"heads of {K}": describe_backend(available_backends(device, torch.float16, K)[0]) for K in HEAD_DIMS}
    return {
        "name": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "transformers": transformers.__version__,
        "attention": kernels,
    }


@torch.inference_mode()
def check_attention(device: torch.device) -> Iterator[dict]:
    """Each backend, dtype and head dimension against float64, as a share of the largest value.

    The result is a mean of values, weighted: a kernel rounds the weights, the sum and the result, each by eps / 2 at
    most; float32 sums of 257 terms add nothing that half precision shows.
    """
    for dtype in (*HALF, torch.float32):
        for head_dim in HEAD_DIMS:
            generator = torch.Generator().manual_seed(head_dim)
            qkv = torch.randn(sum(LENGTHS), 3, 2, head_dim, generator=generator).to(device, dtype)
            q, k, v = qkv.unbind(1)  # strided, as a fused projection leaves them
            exact = _exact_attention(q, k, v)
            for backend in available_backends(device, dtype, head_dim):
                cu_seqlens = cumulative_lengths(LENGTHS).to(device)
                out = varlen_attention(q, k, v, cu_seqlens, max(LENGTHS), backend=backend)
                error = float((out.double() - exact).abs().max() / v.double().abs().max())
                steps = 2 if dtype in HALF else max(LENGTHS) ** 0.5  # of float32, tf32 aside
                name = f"{backend}, {str(dtype).removeprefix('torch.')}, heads of {head_dim}"
                yield row(name, error, steps * torch.finfo(dtype).eps)


def _exact_attention(*qkv_NHK: Tensor) -> Tensor:
    """Segment by segment in float64."""
    segments = zip(*(x.double().transpose(0, 1).split(LENGTHS, dim=1) for x in qkv_NHK), strict=True)
    outs_HNK = [F.scaled_dot_product_attention(*segment) for segment in segments]
    return torch.cat(outs_HNK, dim=1).transpose(0, 1)


@torch.inference_mode()
def check_graphs(encoder: Qwen2_5_VisionTransformer, sides, *, compiles: bool) -> Iterator[dict]:
    """Replays of A, B and A against the eager tower; a replay after something was compiled; memory after `clear`."""
    budget = max(side**2 for side in sides[:2]) // encoder.config.block_size
    manager = EncoderGraphManager(encoder, budgets=[budget], max_items=4, max_frames=4, progress=False)
    pictures = {name: (_pixels(encoder, side), [(1, side, side)]) for name, side in zip("AB", sides, strict=False)}
    first: dict[str, Tensor] = {}
    for name in "ABA":
        pixels, grids = pictures[name]
        [out] = manager.execute(pixels, grids)
        want = encoder(pixels, grids)
        error = float((out.double() - want.double()).abs().max() / want.double().abs().max())
        roundings = 12 * (encoder.config.depth + 2)  # a dozen in a block
        allowed = 2 * roundings**0.5 * torch.finfo(out.dtype).eps
        yield row(f"graph of picture {name} against eager", error, allowed)
        yield row(f"picture {name} again, other bits", float(not torch.equal(first.setdefault(name, out), out)), 0)
    if compiles:
        torch.compile(lambda x: (x @ x).relu(), mode="reduce-overhead")(torch.ones(64, 64, device=encoder.device))
        [out] = manager.execute(*pictures["A"])
        yield row("a graph after torch.compile, other bits", float(not torch.equal(first["A"], out)), 0)
    pool = manager._pool
    manager.clear()
    yield row("left in the pool after clear()", pool_bytes(pool) / 2**20, 0, "MiB")


@torch.inference_mode()
def measure_times(encoder: Qwen2_5_VisionTransformer, sides) -> Iterator[dict]:
    """Milliseconds per picture, eager and by graph, and the floor: its products at the rate of a large one here."""
    rate = _matmul_rate(encoder)
    for side in sides:
        pixels, grids, tokens = _pixels(encoder, side), [(1, side, side)], side**2 // encoder.config.block_size
        manager = EncoderGraphManager(encoder, budgets=[tokens], max_items=1, max_frames=1, progress=False)
        metadata = encoder.plan(grids)
        px = f"{side * encoder.config.patch_size} px"
        yield row(f"{px}: floor", encoder_operations(encoder, grids) / rate * 1e3, None, "ms")
        yield row(f"{px}: eager", _milliseconds(partial(encoder, pixels, metadata=metadata)), None, "ms")
        yield row(f"{px}: graph", _milliseconds(partial(manager.execute, pixels, grids)), None, "ms")
        manager.clear()


def verdict(result: dict) -> str:
    """One line."""
    device, rows = result["device"], result["rows"]
    where = f"{device['name']} ({device['capability']}), torch {device['torch']}"
    failed = [row["check"] for row in rows if not row["passed"]]
    if failed:
        return f"check-gpu: {len(failed)} of {len(rows)} checks failed on {where}: {'; '.join(failed)}"
    return f"check-gpu: {where} passes all {sum(row['allowed'] is not None for row in rows)} checks"


def _random_tower(config: Qwen2_5_VisionConfig, device: torch.device, dtype: torch.dtype) -> Qwen2_5_VisionTransformer:
    encoder, generator = Qwen2_5_VisionTransformer(config).eval(), torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return encoder.to(device, dtype).requires_grad_(False)


def _pixels(encoder: Qwen2_5_VisionTransformer, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randn(side**2, encoder.config.patch_values, generator=generator).to(encoder.device, encoder.dtype)


def _matmul_rate(encoder: Qwen2_5_VisionTransformer, size: int = 4096) -> float:
    """Operations per second of a large matrix product in the tower's dtype."""
    size = min(size, 4 * encoder.config.hidden_size)
    x = torch.ones(size, size, dtype=encoder.dtype, device=encoder.device)
    return 2 * size**3 / _milliseconds(lambda: x @ x) * 1e3


def _milliseconds(function: Callable[[], object]) -> float:
    """The median of many calls."""
    return Timer("run()", globals={"run": function}).blocked_autorange(min_run_time=0.05).median * 1e3
