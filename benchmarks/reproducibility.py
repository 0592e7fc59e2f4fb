"""How far embeddings move when only the way of computing them changes: `python -m benchmarks.reproducibility --write`.

Each shipped checkpoint encodes the same images. The reference is its tower in float64, one image at a time, on one
thread. Each way of computing is compared with it by the largest relative norm of the difference over the images, and
beside it stands what rounding explains (`bound`). Results go to data/measurements/reproducibility_cpu.json.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import refvl
from benchmarks.report import environment, write_measurement
from refvl.paths import DATA

CHECKPOINTS = ("tiny-qwen2_5_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3")
PICTURES = [DATA / "pictures" / name for name in ("scene.png", "coffee.jpg", "chelsea.jpg", "rocket.jpg")]
STEPS_PER_BLOCK = 16  # roundings on the longest path through a block: 2 norms of 3, attention of 5, an MLP of 3, 2 sums
STEPS_AROUND = 16  # patch embedding, positions, and what joins the tower to the language model
WAYS = {  # dtype, attention backend, all images in one forward, threads, by graph
    "float32": (torch.float32, "sdpa", False, 1, False),
    "masked attention": (torch.float32, "masked", False, 1, False),
    "one batch": (torch.float32, "sdpa", True, 1, False),
    "two threads": (torch.float32, "sdpa", False, 2, False),
    "graph replay": (torch.float32, "sdpa", True, 1, True),
    "bfloat16": (torch.bfloat16, "sdpa", False, 1, False),
    "float16": (torch.float16, "sdpa", False, 1, False),
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` threads, and put back what was set."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bound(vlm: refvl.VLM, dtype: torch.dtype) -> float:
    """What rounding explains, from the number of roundings that follow each other on the way through the tower.

    Results are rounded to `dtype`: these errors are independent, and grow with the square root of the steps. Sums are
    in float32 or better: their errors share a sign where the terms do, and grow with the steps.
    """
    blocks = max(len(modules) for modules in vlm.encoder.modules() if isinstance(modules, nn.ModuleList))
    steps = STEPS_PER_BLOCK * blocks + STEPS_AROUND
    return torch.finfo(dtype).eps / 2 * steps**0.5 + torch.finfo(torch.float32).eps / 2 * steps


@torch.inference_mode()
def embeddings(
    vlm: refvl.VLM, dtype, attention: str, batched: bool, num_threads: int, graph: bool
) -> list[torch.Tensor]:
    """(M, D) of each picture in float64, computed in one of the ways."""
    media = vlm.processor.decode(vlm.processor.messages("", PICTURES))
    patches, encoder = vlm.processor.patchify(media), vlm.encoder.to(dtype)
    layouts, rows = [p.layout for p in patches], [p.pixel_values.to(dtype) for p in patches]
    with threads(num_threads):
        if graph:
            manager = vlm.family.graphs(encoder, min_budget=vlm.processor.tokens_at_once, progress=False)
            return [x.double() for x in manager.execute(torch.cat(rows), layouts)]
        if batched:
            tokens = [encoder.item_size(layout)[1] for layout in layouts]
            whole = encoder(torch.cat(rows), metadata=encoder.plan(layouts), attention=attention)
            return [x.double() for x in whole.split(tokens)]
        pairs = zip(rows, layouts, strict=True)
        return [encoder(x, metadata=encoder.plan([layout]), attention=attention).double() for x, layout in pairs]


def measure(checkpoint: str) -> dict[str, dict[str, float]]:
    """{way: {"difference": ..., "bound": ...}} of one checkpoint, relative to float64."""
    vlm = refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", progress=False)
    reference = embeddings(vlm, torch.float64, "sdpa", False, 1, False)
    matrix = {}
    for way, (dtype, *how) in WAYS.items():
        vlm = refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", dtype=dtype, progress=False)
        ours = embeddings(vlm, dtype, *how)
        worst = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, reference, strict=True))
        matrix[way] = {"difference": worst, "bound": bound(vlm, dtype)}
    return matrix


def run(write: bool = False) -> None:
    """Print the matrix; with --write keep it under data/measurements."""
    result = environment("cpu") | {"checkpoints": {name: measure(name) for name in CHECKPOINTS}}
    table = Table("way of computing", *CHECKPOINTS, title="relative difference to float64 (what rounding explains)")
    for way in WAYS:
        cells = (result["checkpoints"][name][way] for name in CHECKPOINTS)
        table.add_row(way, *(f"{cell['difference']:.1e} ({cell['bound']:.1e})" for cell in cells))
    Console().print(table)
    if write:
        write_measurement("reproducibility_cpu", result)


if __name__ == "__main__":
    typer.run(run)
