"""What may change an answer, and by how much.

Oracle: float64, one image at a time, on one thread.
"""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import refvl
from refvl.graphs import EncoderGraphManager
from refvl.paths import DATA

CHECKPOINTS = ("tiny-qwen2_5_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3")
SCENE, QUESTION = DATA / "pictures" / "scene.png", "What color is the circle?"
PICTURES = [DATA / "pictures" / name for name in ("scene.png", "coffee.jpg", "rocket.jpg")]
STEPS_PER_BLOCK = 16  # on the longest path through a block: 3 per norm, 5 in attention, 3 in the MLP, 2 in sums
STEPS_AROUND = 16  # patch embedding, positions, and the connector from the tower to the language model
WAYS = {
    "float32": {},
    "masked attention": {"attention": "masked"},
    "one batch": {"batched": True},
    "two threads": {"count": 2},
    "graph replay": {"graph": True},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
}


def load(checkpoint, dtype=torch.float32):
    return refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", dtype=dtype, progress=False)


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@torch.inference_mode()
def embeddings(vlm, attention="sdpa", batched=False, graph=False, count=1, dtype=torch.float32):
    patches = vlm.processor.patchify(vlm.processor.decode(vlm.processor.messages("", PICTURES)))
    encoder = vlm.encoder
    layouts, rows = [p.layout for p in patches], [p.pixel_values.to(dtype) for p in patches]
    with threads(count):
        if graph:
            manager = EncoderGraphManager(encoder, min_budget=vlm.processor.tokens_at_once, progress=False)
            return [x.double() for x in manager.execute(torch.cat(rows), layouts)]
        if batched:
            rows, layouts = [torch.cat(rows)], [layouts]
        else:
            layouts = [[layout] for layout in layouts]
        pairs = zip(rows, layouts, strict=True)
        found = torch.cat([encoder(x, metadata=encoder.plan(of), attention=attention).double() for x, of in pairs])
    return found.split([encoder.item_size(layout)[1] for of in layouts for layout in of])


def bound(encoder, dtype):
    """The difference that consecutive roundings explain.

    Results are rounded to `dtype`: these errors are independent, and grow with the square root of
    the steps. Sums are in float32 or better: their errors share a sign if the terms do, and grow
    with the steps.
    """
    blocks = max(len(modules) for modules in encoder.modules() if isinstance(modules, nn.ModuleList))
    steps = STEPS_PER_BLOCK * blocks + STEPS_AROUND
    return torch.finfo(dtype).eps / 2 * steps**0.5 + torch.finfo(torch.float32).eps / 2 * steps


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_way_of_computing_stays_within_rounding(checkpoint):
    """Backends, batch sizes, threads, graphs and dtypes; and coarser dtypes do differ by more, so
    they were used."""
    exact = load(checkpoint)
    exact.encoder.double()
    reference, differences = embeddings(exact, dtype=torch.float64), {}
    for name, way in WAYS.items():
        vlm = load(checkpoint, way.get("dtype", torch.float32))
        pairs = zip(embeddings(vlm, **way), reference, strict=True)
        differences[name] = max(float((ours - want).norm() / want.norm()) for ours, want in pairs)
        assert 0 < differences[name] <= bound(vlm.encoder, vlm.encoder.dtype), name
    assert differences["float32"] < differences["float16"] < differences["bfloat16"]
