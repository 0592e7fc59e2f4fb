"""What may change an answer, and by how much.

Oracle: float64, one image at a time.
"""

import pytest
import torch
from torch import nn

import refvl
from refvl.paths import DATA

CHECKPOINTS = ("tiny-qwen2_5_vl", "tiny-glm4v", "tiny-minicpmv-4_5", "tiny-step3")
PICTURES = [DATA / "pictures" / name for name in ("scene.png", "coffee.jpg", "rocket.jpg")]
STEPS_PER_BLOCK = 16  # on the longest path through a block: 3 per norm, 5 in attention, 3 in the MLP, 2 in sums
STEPS_AROUND = 16  # patch embedding, positions, and the connector from the tower to the language model


def load(checkpoint, dtype=torch.float32):
    return refvl.load(DATA / "checkpoints" / checkpoint, device="cpu", dtype=dtype, progress=False)


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
def test_every_dtype_stays_within_rounding(checkpoint):
    """Coarser dtypes do differ by more, so they were used. Backends and graphs: `contracts/test_encoders.py`;
    threads: `portable.py`."""
    exact = load(checkpoint)
    exact.encoder.double()
    reference = [exact.encode([picture])[0] for picture in PICTURES]
    differences = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        vlm = load(checkpoint, dtype)
        pairs = zip(vlm.encode(PICTURES), reference, strict=True)
        shares = [float((ours.double() - want).norm() / want.norm()) for ours, want in pairs]
        differences.append(max(shares))
        assert 0 < differences[-1] <= bound(vlm.encoder, dtype), dtype
    assert differences == sorted(differences)
