"""Measure how embeddings depend on the way of computing them: `python -m benchmarks.reproducibility --write`.

Each shipped checkpoint encodes the same images. The reference is the checkpoint's tower in float64, one image at a
time, on one thread. Each way of computing is compared with the reference: the largest relative norm of the difference
over the images, next to the difference that rounding explains (`bound`). Results are written to
data/measurements/reproducibility_cpu.json.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import typer
from torch import nn

import refvl
from benchmarks.report import PrintedTable, Write, environment, write_measurement
from refvl.graphs import EncoderGraphManager
from refvl.paths import DATA

CHECKPOINTS = ("tiny-qwen2_5_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3")
PICTURES = [DATA / "pictures" / name for name in ("scene.png", "coffee.jpg", "chelsea.jpg", "rocket.jpg")]
STEPS_PER_BLOCK = 16  # on the longest path through a block: 3 per norm, 5 in attention, 3 in the MLP, 2 in sums
STEPS_AROUND = 16  # patch embedding, positions, and the connector from the tower to the language model


class Way(NamedTuple):
    """A way of computing."""

    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    batched: bool = False  # all images in one forward
    threads: int = 1
    graph: bool = False


WAYS = {
    "float32": Way(),
    "masked attention": Way(attention="masked"),
    "one batch": Way(batched=True),
    "two threads": Way(threads=2),
    "graph replay": Way(graph=True),
    "bfloat16": Way(torch.bfloat16),
    "float16": Way(torch.float16),
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` threads, and restore the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bound(vlm: refvl.VLM, dtype: torch.dtype) -> float:
    """Return the difference that rounding explains, derived from the number of consecutive roundings in the tower.

    Results are rounded to `dtype`: these errors are independent, and grow with the square root of the steps. Sums are
    in float32 or better: their errors share a sign if the terms do, and grow with the steps.
    """
    encoder: Any = vlm.encoder
    blocks = max(len(modules) for modules in encoder.modules() if isinstance(modules, nn.ModuleList))
    steps = STEPS_PER_BLOCK * blocks + STEPS_AROUND
    return torch.finfo(dtype).eps / 2 * steps**0.5 + torch.finfo(torch.float32).eps / 2 * steps


@torch.inference_mode()
def embeddings(vlm: refvl.VLM, way: Way) -> list[torch.Tensor]:
    """Return the embeddings of each image, (M, D) float64, computed in one of the ways."""
    media = vlm.processor.decode(vlm.processor.messages("", PICTURES))
    patches, encoder = vlm.processor.patchify(media), vlm.encoder
    layouts, rows = [p.layout for p in patches], [p.pixel_values.to(way.dtype) for p in patches]
    with threads(way.threads):
        if way.graph:
            manager = EncoderGraphManager(encoder, min_budget=vlm.processor.tokens_at_once, progress=False)
            return [x.double() for x in manager.execute(torch.cat(rows), layouts)]
        if way.batched:
            tokens = [encoder.item_size(layout)[1] for layout in layouts]
            whole = encoder(torch.cat(rows), metadata=encoder.plan(layouts), attention=way.attention)
            return [x.double() for x in whole.split(tokens)]
        pairs = zip(rows, layouts, strict=True)
        return [encoder(x, metadata=encoder.plan([one]), attention=way.attention).double() for x, one in pairs]


def measure(checkpoint: str) -> dict[str, dict[str, float]]:
    """Return {way: {"difference": ..., "bound": ...}} of one checkpoint, relative to float64."""
    vlm = refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", progress=False)
    encoder: Any = vlm.encoder
    encoder.double()
    reference, matrix = embeddings(vlm, Way(torch.float64)), {}
    for name, way in WAYS.items():
        vlm = refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", dtype=way.dtype, progress=False)
        pairs = zip(embeddings(vlm, way), reference, strict=True)
        matrix[name] = {
            "difference": max(float((ours - exact).norm() / exact.norm()) for ours, exact in pairs),
            "bound": bound(vlm, way.dtype),
        }
    return matrix


def run(write: Write = False) -> None:
    """Print the differences of every checkpoint and way; with --write, save them in data/measurements."""
    print(
        f"{len(CHECKPOINTS)} checkpoints, each encoding {len(PICTURES)} images in {len(WAYS)} ways: a minute",
        flush=True,
    )
    columns = {"checkpoint": "<20", "way of computing": "<20", "difference": ">10", "explained by rounding": ">21"}
    table, matrices = PrintedTable("relative difference to float64", columns), {}
    for name in CHECKPOINTS:
        matrices[name] = measure(name)
        for way, cell in matrices[name].items():
            table.add(name, way, f"{cell['difference']:.1e}", f"{cell['bound']:.1e}")
    if write:
        write_measurement("reproducibility_cpu", environment("cpu") | {"checkpoints": matrices})


if __name__ == "__main__":
    typer.run(run)
