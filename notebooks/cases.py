"""Test cases for the nine functions: named and random arguments, and the expected results.

`rotate`, `attend`, `fold` and `replay` are compared with slow formulas, which share no code
with the library. The other five are compared with the library, which is tested against
transformers. Random cases are the same every time.
"""

import functools
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from checking import Case, Close
from torch import Tensor
from torch.nn.functional import linear

from refvl.graphs import TraceGraph
from refvl.pixels.patches import PatchConfig, cut_rows
from refvl.positions import MediaSpan, compute_retention_mask, get_mrope_input_positions, restrict_positions
from refvl.positions.windows import window_order
from refvl.study.stages import Stages

PARTS = {  # the names of the parts, for results that are tuples
    "target_size": ("height", "width"), "window_index": ("index", "inverse", "lengths"),
    "mrope": ("positions", "delta"), "evs": ("keep", "positions", "delta"), "replay": ("results", "the buffers"),
}  # fmt: skip
RULES = {"x": "zero", "index": "identity", "inverse": "identity", "ends": "repeat_last"}  # for the recording below
FLOATS = torch.float32, torch.uint8, torch.float64


def patch_rows(pixels: Tensor, patch: int, merge: int, steps: int) -> Tensor:
    """Return the library's patch rows, not normalised."""
    config = PatchConfig(patch_size=patch, merge_size=merge, temporal_patch_size=steps)
    return cut_rows(pixels, config, steps)[0].flatten(1)


def window_index(grids: list, side: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the library's order of tokens, its inverse, and the lengths of windows."""
    index, ends = window_order(grids, 1, side)
    return index, index.argsort(), ends.diff().tolist()


def mrope(length: int, spans: list) -> tuple[Tensor, int]:
    """Return the library's positions and delta."""
    return get_mrope_input_positions(length, [MediaSpan(*span) for span in spans])


def evs(embeds: Tensor, steps: int, rate: float, positions: Tensor, offset: int) -> tuple[Tensor, Tensor, int]:
    """Return the library's mask, positions and delta."""
    keep = torch.ones(positions.shape[1], dtype=torch.bool)
    keep[offset : offset + len(embeds)] = compute_retention_mask(embeds, (steps, 1, len(embeds) // steps), 1, rate)
    return keep, *restrict_positions(positions, keep)


def filled(buffer: Tensor, values: Tensor, rule: str) -> Tensor:
    """Return the contents that a buffer must have, filled by `rule` after `values`."""
    rest = {"zero": 0 * buffer, "identity": torch.arange(len(buffer)), "repeat_last": values[-1].expand_as(buffer)}
    return torch.cat([values, rest[rule][len(values) :]])


LIBRARY = vars(Stages()) | {"patch_rows": patch_rows, "window_index": window_index, "mrope": mrope, "evs": evs}


def cases(name: str, count: int = 200) -> Iterator[Case]:
    """Yield the named cases of a function and `count` random ones."""
    rng, noise = random.Random(name), torch.Generator().manual_seed(0)
    for label, arguments in globals()[f"_{name}"](rng, noise, count):
        yield label or f"{name}{arguments}", arguments, EXPECTED.get(name, LIBRARY[name])(*arguments)


def _target_size(rng, noise, count):
    sizes = ((100, 60), (100, 500), (70, 300), (70, 98), (42, 42), (56, 56), (1000, 1500), (1, 150), (3000, 16))
    yield from (("", (h, w, 28, 56 * 56, 28 * 28 * 64)) for h, w in sizes)
    for _ in range(count):
        height = int(2 ** rng.uniform(2, 13))
        width = min(max(-(-height // 200), int(height * 2 ** rng.uniform(-7, 7))), 200 * height)
        factor = rng.choice((28, 28, 32, 16))
        least = rng.choice((4, 16, 64)) * factor**2
        yield "", (height, width, factor, least, rng.choice((4, 16, 77, 1280)) * least)


def _patch_rows(rng, noise, count):
    sizes = [(1, 1, 2, 2, 1, 2, 1), (1, 1, 1, 2, 2, 1, 1), (2, 3, 1, 1, 1, 2, 2), (3, 1, 1, 1, 1, 1, 2)]
    for _ in range(count):
        sizes.append((rng.randint(1, 5), rng.choice((1, 3)), *(rng.randint(1, 3) for _ in range(5))))
    for T, C, h, w, patch, merge, steps in sizes:
        shape = T, C, h * merge * patch, w * merge * patch
        pixels = (torch.arange(prod(shape)) % 251).view(shape).to(rng.choice(FLOATS))
        yield f"pixels {shape}, patch={patch}, merge={merge}, steps={steps}", (pixels, patch, merge, steps)


def _window_index(rng, noise, count):
    named = [([(1, 2, 3)], 2), ([(1, 4, 4)], 2), ([(1, 5, 4)], 4), ([(2, 2, 3)], 2), ([(1, 3, 3), (1, 2, 5)], 2)]
    for _ in range(count):
        grids = [(rng.choice((1, 1, 3)), rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(1, 3))]
        named.append((grids, rng.randint(1, 5)))
    yield from ((f"{grids}, side={side}", (grids, side)) for grids, side in named)


def _rotate(rng, noise, count):
    quarter = torch.tensor([[[1.0, 2, 3, 4]]]), torch.zeros(1), torch.full((1,), torch.pi / 2), 10000.0
    yield "a quarter turn of columns", quarter
    for i in range(count):
        N, H, K, theta = rng.randint(1, 9), rng.randint(1, 4), 4 * rng.randint(1, 10), rng.choice((1e4, 1e4, 100.0))
        x = torch.randn(N, H, K, generator=noise).to(torch.bfloat16 if i % 3 == 1 else torch.float32)
        row, column = torch.randint(0, 40, (2, N), generator=noise)
        yield f"x ({N}, {H}, {K}) {str(x.dtype)[6:]}, theta={theta:g}", (x, row, column, theta)


def _rotated(x: Tensor, row: Tensor, column: Tensor, theta: float) -> Close:
    """Rotate by multiplying complex numbers in double precision."""
    quarter = x.shape[-1] // 4
    one, other = x.double().chunk(2, -1)
    speed = theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angle = torch.cat([torch.outer(row.double(), speed), torch.outer(column.double(), speed)], 1)
    turned = torch.complex(one, other) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return _close(torch.cat([turned.real, turned.imag], -1), x.dtype)


def _close(want: Tensor, dtype: torch.dtype) -> Close:
    """Return `want` with allowed errors: one rounding to bfloat16, or float32's of sums and angles up to 40."""
    unit = 2.0 ** (want.abs().clamp(min=1e-30).log2().floor() - 7)  # the last bit of a bfloat16
    return Close(want, dtype, 0.51 * unit + 1e-5 if dtype == torch.bfloat16 else 2e-5 + 2e-5 * want.abs())


def _attend(rng, noise, count):
    named = [([1], 1, 2, 1.0), ([2, 1], 1, 2, 1.0), ([3, 3], 2, 4, 1.0), ([2, 4], 2, 16, 3.0)]
    for _ in range(count):
        lengths = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        named.append((lengths, rng.randint(1, 3), rng.choice((2, 3, 4, 8, 24)), rng.choice((1.0, 2.0))))
    for lengths, H, K, size in named:
        q, k, v = size * torch.randn(3, sum(lengths), H, K, generator=noise)
        yield f"lengths={lengths}, {H} heads of {K}", (q, k, v, lengths)


def _attended(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Close:
    """Compute attention for one query and head after the other, in double precision."""
    dtype, (q, k, v), out = q.dtype, (x.double() for x in (q, k, v)), torch.empty_like(q, dtype=torch.float64)
    for n, end in zip(lengths, accumulate(lengths), strict=True):
        for i in range(end - n, end):
            for head in range(q.shape[1]):
                weight = (k[end - n : end, head] @ q[i, head] / q.shape[2] ** 0.5).exp()
                out[i, head] = (weight / weight.sum()) @ v[end - n : end, head]
    return _close(out, dtype)


def _fold(rng, noise, count):
    same = torch.nn.Identity()
    yield "project returns its input", (torch.arange(1.0, 9).view(8, 1), 2, same, torch.arange(2))
    yield "three tokens in another order", (torch.arange(12.0).view(12, 1), 2, same, torch.tensor([2, 0, 1]))
    for _ in range(count):
        M, merge, E, D = rng.randint(1, 9), rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 5)
        weight = torch.randint(-2, 3, (D, merge * merge * E), generator=noise).float()
        x = torch.arange(M * merge * merge * E).view(-1, E).float() % 97
        inverse = torch.randperm(M, generator=noise)
        yield f"{M} tokens of {merge} x {merge} patches of {E}", (x, merge, partial(linear, weight=weight), inverse)


def _folded(x: Tensor, merge: int, project: Callable, inverse: Tensor) -> Tensor:
    """Concatenate a token's patches one by one."""
    rows = [torch.cat([x[token * merge**2 + i] for i in range(merge**2)]) for token in range(len(inverse))]
    return project(torch.stack(rows))[inverse]


def _mrope(rng, noise, count):
    image, video = (2, 1, 2, 4, 1.0), (1, 6, 2, 2, 2.0)
    named = {"text alone": (5, []), "a wide image": (12, [image]), "a tall image": (12, [(2, 1, 4, 2, 1.0)])}
    named |= {"an image at the start": (6, [(0, 1, 2, 2, 1.0)]), "an image at the end": (10, [image])}
    named |= {"two images that touch": (14, [(2, 1, 2, 2, 1.0), (6, 1, 1, 3, 1.0)])}
    named |= {"a long video": (26, [video]), "a slow video": (26, [(1, 6, 2, 2, 0.4)])}
    named |= {
        "30 steps, factor 1.16": (35, [(2, 30, 1, 1, 1.16)])
    }  # 25 * 1.16 is 29 in float32, a little less in float64
    yield from named.items()
    for _ in range(count):
        spans, end = [], 0
        for _ in range(rng.randint(0, 3)):
            t, h, w = rng.choice((1, 1, rng.randint(2, 40))), rng.randint(1, 5), rng.randint(1, 5)
            offset = end + rng.choice((0, 1, rng.randint(2, 6)))
            factor = rng.choice((1.0, 2.0, 1.16, 2.32, rng.randint(1, 300) / 100)) if t > 1 else 1.0
            spans.append((offset, t, h, w, factor))
            end = offset + t * h * w
        length = end + rng.randint(0 if spans else 1, 4)
        yield f"{length} tokens, spans {spans}", (length, spans)


def _evs(rng, noise, count):
    still = torch.tensor([[1.0, 0], [0, 1], [-1, 0]]).repeat(3, 1)  # unit vectors, for which every formula is exact
    zeros = still * torch.tensor([1, 1, 0, 1, 0, 1, -1, 1, 1])[:, None]
    two = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 1]])
    yield "two steps of two tokens", _prompt(rng, two, 2, 0.25, 1, 2)
    yield "a video without motion", _prompt(rng, still, 3, 0.4, 2, 2)
    yield "two vectors of zeros", _prompt(rng, zeros, 3, 0.45, 2, 2)
    yield "a rate that leaves one step", _prompt(rng, still, 3, 0.9, 2, 2)
    yield "a prompt that ends in the video", _prompt(rng, _exact(noise, 4, 6), 4, 0.5, 1, 0)
    for i in range(count):
        t, n, rate = rng.randint(1, 6), rng.randint(1, 9), rng.choice((0.0, 0.25, 0.5, 0.63, 0.75, rng.random() * 0.95))
        embeds = (_smooth if i % 4 == 0 and t > 1 else _exact)(noise, t, n)
        case = f"{t} steps of {n} tokens, rate {rate:.2f}, {str(embeds.dtype)[6:]}"
        yield case, _prompt(rng, embeds, t, rate, rng.randint(0, 4), rng.randint(0, 4))


def _prompt(rng: random.Random, embeds: Tensor, t: int, rate: float, before: int, after: int) -> tuple:
    n = len(embeds) // t
    h = next(h for h in (3, 2, 1) if n % h == 0)
    span = before, t, h, n // h, rng.choice((1.0, 2.0, 0.5))
    return embeds, t, rate, mrope(before + len(embeds) + after, [span])[0], before


def _exact(noise: torch.Generator, t: int, n: int) -> Tensor:
    """Draw vectors with four entries of 1 or -1, so cosines are multiples of a quarter, and many scores are equal."""
    places = torch.rand(t * n, 8, generator=noise).argsort(1)[:, :4]
    signs = torch.randint(0, 2, (t * n, 4), generator=noise) * 2.0 - 1
    embeds = torch.zeros(t * n, 8).scatter(1, places, signs)
    stays = torch.rand(t * n - n, 1, generator=noise) < 0.3
    embeds[n:] = torch.where(stays, embeds[:-n], embeds[n:])
    return embeds


def _smooth(noise: torch.Generator, t: int, n: int) -> Tensor:
    """Draw bfloat16 embeddings whose scores differ by too little for bfloat16."""
    while True:
        drift = 0.04 * torch.arange(t).view(t, 1, 1) * torch.randn(t, n, 16, generator=noise)
        frames = (torch.randn(n, 16, generator=noise) + drift).bfloat16()
        scores = torch.cosine_similarity(frames[1:].double(), frames[:-1].double(), dim=-1).flatten().sort().values
        if (scores.diff() > 1e-5).all():  # enough for float32, whose rounding is near 1e-7
            return frames.flatten(0, 1)


class Fixed:
    """The base of objects that are not copied, because a recording would not read a copy of its
    buffers.
    """

    def __deepcopy__(self, memo: dict) -> "Fixed":
        return self


class Graph(Fixed, TraceGraph):
    """A recording that is not copied."""


class Buffers(Fixed, dict):
    """The buffers of the recording, by name."""


def _recorded(x: Tensor, index: Tensor, inverse: Tensor, ends: Tensor) -> Tensor:
    """Use every padding rule: reorder rows, add sums over segments and over all rows, and restore the order."""
    y = x[index]
    segment = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    same = (segment[:, None] == segment).float()
    return torch.cat([y, same @ y, x.sum(0).expand_as(y)], 1)[inverse]


def _replay(rng, noise, count):
    for number in range(count):
        if number % 5 == 0:  # five cases share a recording; each finds its buffers as the previous case left them
            capacity, segments = rng.randint(3, 9), rng.randint(2, 4)
            order = {name: torch.zeros(capacity, dtype=torch.int64) for name in ("index", "inverse")}
            ends = torch.zeros(segments + 1, dtype=torch.int64)
            graph, buffers = Graph(), Buffers(x=torch.full((capacity, 2), 7.0), **order, ends=ends)
            graph.capture(partial(_recorded, **buffers))
        batches = []
        for _ in range(rng.randint(2, 3)):
            tokens = rng.randint(1, capacity)
            cuts = sorted(rng.randint(0, tokens) for _ in range(rng.randint(0, segments - 1)))
            index = torch.randperm(tokens, generator=noise)
            x = torch.randint(-9, 10, (tokens, 2), generator=noise).float()
            ends = torch.tensor([0, *cuts, tokens])
            batches.append(({"x": x, "index": index, "inverse": index.argsort(), "ends": ends}, tokens))
        yield f"capacity {capacity}, batches of {[n for _, n in batches]}", (graph, buffers, RULES, batches)


def _replayed(graph: Graph, buffers: Buffers, rules: dict, batches: list) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run the operations on the contents alone, without a recording; the buffers then hold the last batch."""
    results = [_recorded(**contents)[:tokens] for contents, tokens in batches]
    return results, {name: filled(buffer, batches[-1][0][name], rules[name]) for name, buffer in buffers.items()}


def with_buffers(function: Callable) -> Callable:
    """Wrap `replay` so that it also returns the recording's buffers, even if it changes the
    dict that it receives.
    """

    @functools.wraps(function)
    def run(graph: Graph, buffers: Buffers, rules: dict, batches: list) -> tuple[Any, dict]:
        return function(graph, dict(buffers), rules, batches), dict(buffers)

    return run


EXPECTED = {"rotate": _rotated, "attend": _attended, "fold": _folded, "replay": _replayed}
