"""How far apart two computations of one value may lie: a bound that follows from the arithmetic, on every CPU.

The order in which a sum is rounded depends on the CPU, on the number of threads and on the shapes
of a batch, and no order is the right one. Neither side is then wrong; what they may differ by
follows from how much was rounded.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def roundings(steps: int | nn.Module) -> int:
    """How many values are rounded, one after the other, on the way to one output: a count, or that of a module.

    A module's layers follow each other, and each sums over a row of its weights: (out, in), or
    (out, in, *kernel).
    """
    if isinstance(steps, int):
        return steps
    experts = [weight.shape[-1] for weight in steps.parameters() if weight.ndim == 3]  # (E, out, in)
    return sum(experts) + sum(weight[0].numel() for weight in steps.parameters() if weight.ndim in (2, 4, 5))


def tolerance(actual: Tensor, expected: Tensor, steps: int | nn.Module, scale: float | None = None) -> float:
    """2 * sqrt(steps) * eps * scale: eps of what `actual` is computed in, scale the largest of `expected`.

    One step rounds by at most eps / 2, up as often as down: n steps make an error of sqrt(n / 3) *
    eps / 2, one standard deviation. Two such errors differ by sqrt(2) times as much, and the
    largest of 10^5 of them is 4.4 standard deviations out: 1.8 * sqrt(n) * eps. What is rounded is
    on the whole as large as what comes out; where it is larger (an angle before its cosine),
    `scale` says how large.
    """
    size = float(expected.detach().abs().max()) if scale is None and expected.numel() else scale or 0.0
    return 2 * roundings(steps) ** 0.5 * torch.finfo(actual.dtype).eps * size


@torch.no_grad()
def gain(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """How much larger a small relative change of `x` comes out of `function`; at least 1.

    What is rounded early in a deep model grows like it on the way: random weights with sharp
    attention do that. Where both sides lead through such a model, `scale` is this times the largest
    of what comes out.
    """
    small, noise = 1e-4, torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    before, after = function(x), function(x * (1 + small * noise))
    return max(1.0, float((after - before).pow(2).mean().sqrt() / (small * before.abs().max())))


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest |a - b|, in float64; NaN where either has one."""
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)}, {tuple(expected.shape)}"
    assert expected.dtype in (actual.dtype, torch.float64), f"dtypes differ: {actual.dtype}, {expected.dtype}"
    return float((actual.double() - expected.double()).detach().abs().max()) if actual.numel() else 0.0


def assert_agree(actual, expected, steps: int | nn.Module, *, scale: float | None = None) -> None:
    """Rounding explains the difference of two tensors, or of the pairs of two
    sequences. `expected` has the dtype of `actual`, or is a float64 oracle.
    """
    if not isinstance(actual, Tensor):
        for pair in zip(actual, expected, strict=True):
            assert_agree(*pair, steps, scale=scale)
        return
    difference, allowed = largest_difference(actual, expected), tolerance(actual, expected, steps, scale)
    assert difference <= allowed, f"differ by {difference:.3g}, where rounding explains {allowed:.3g}"


def logits_gain(vlm, trace) -> float:
    """`gain` of the language model of `vlm`, from the embeddings of the prompt of
    `trace` to the logits behind it."""

    def logits(embeds: Tensor) -> Tensor:
        deeper = {"deepstack_embeds": trace.deepstack[None]} if trace.deepstack.numel() else {}
        given = {"inputs_embeds": embeds[None], "position_ids": trace.positions[:, None], "logits_to_keep": 1}
        return vlm.language_model(**given, **deeper).logits[0, -1]

    with torch.inference_mode():
        return gain(logits, trace.inputs_embeds)


def assert_logits_agree(vlm, trace, actual: Tensor, expected: Tensor, gain: float | None = None) -> None:
    """Rounding in encoder and language model explains how far two logits (V,)
    behind the prompt of `trace` differ."""
    scale = (gain or logits_gain(vlm, trace)) * float(expected.abs().max())
    assert_agree(actual, expected, roundings(vlm.encoder) + roundings(vlm.language_model), scale=scale)


def assert_differ(actual: Tensor, expected: Tensor, steps: int | nn.Module, what: str = "") -> None:
    """Rounding does not explain the difference, nor would ten times as much of it;
    `what` is named if it does."""
    difference, rounding = largest_difference(actual, expected), tolerance(actual, expected, steps)
    assert difference > 10 * rounding, f"{what} differ by {difference:.3g}, where rounding explains {rounding:.3g}"
