"""The notebooks' exercises: each check runs a reader's function on a few cases and says in one line how it went.

    not yet   the function is still the stub: its body is `...`
    wrong     the first case that differs: where, what came and what was expected
    right     in how many cases

No check raises, so that a notebook runs through whatever is still to do. What was right is remembered in a folder
beside the notebooks (`progress`), and forgotten when it is tried again and is wrong.
"""

import contextlib
import dis
import functools
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from refvl.adapters import GRIDS
from refvl.attention import group_segment_pairs, varlen_cross_attention
from refvl.graphs import TraceGraph, generate_budgets, plan_batches, plan_paired_batches
from refvl.graphs.buffers import fill_padded
from refvl.merge import merge_embeddings
from refvl.parallel import get_load_balance_assignment, restore_order
from refvl.pixels.crops import plan_crops
from refvl.pixels.patches import Glm4vPatchConfig, PatchConfig, count_tokens, patch_rows
from refvl.pixels.slices import SliceConfig, slice_grid
from refvl.positions import (
    MediaSpan,
    compute_retention_mask,
    get_mrope_input_positions,
    get_window_index,
    interpolate_position_table,
    mrope_axis_of_pairs,
    restrict_positions,
)
from refvl.positions.mrope import grid_positions
from refvl.positions.timestamps import sample_video_frames
from refvl.processors.qwen3_vl import seconds_of_steps
from refvl.tools.costs import frames_that_fit, kv_cache_bytes_per_token

PICTURE, PACKING = "{} x {} px (width x height)", "output_tokens={}, budgets={}, max_items={}"  # names of cases
POSITIONS = ("positions", "delta")
NOTEBOOKS = Path(__file__).resolve().parent
DONE = NOTEBOOKS / ".progress"  # an empty file for every exercise that is done
MARKS = {"not yet": "\N{WHITE CIRCLE}", "wrong": "\N{BALLOT X}", "right": "\N{CHECK MARK}"}
EMPTY = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}  # instructions of a body that is only `...`


class Wrong(Exception):
    """What differs first."""


@dataclass(frozen=True)
class Verdict:
    """How an exercise went, shown as one line."""

    status: str  # one of MARKS
    line: str

    def __repr__(self) -> str:
        return f"{MARKS[self.status]} {self.status}: {self.line}"

    def _repr_html_(self) -> str:
        return f"<b>{MARKS[self.status]} {self.status}</b>: <code>{html.escape(self.line)}</code>"


def exercise(check: Callable[[Callable], str]) -> Callable[[Callable], Verdict]:
    """A check as the notebooks call it; the plain one returns a line of praise, or raises `Wrong`."""

    @functools.wraps(check)
    def judged(function: Callable) -> Verdict:
        verdict = _judge(check, function)
        with contextlib.suppress(OSError):  # a folder that cannot be written remembers nothing
            if verdict.status == "right":
                DONE.mkdir(exist_ok=True)
                (DONE / check.__name__).touch()
            else:
                (DONE / check.__name__).unlink(missing_ok=True)
        return verdict

    return judged


def _judge(check: Callable, function: Callable) -> Verdict:
    if hasattr(function, "__code__") and {step.opname for step in dis.get_instructions(function)} <= EMPTY:
        return Verdict("not yet", f"{function.__name__} is to be written")
    try:
        return Verdict("right", check(function))
    except Wrong as error:
        return Verdict("wrong", str(error))
    except Exception as error:  # the reader's, whatever it is: a line says enough
        return Verdict("wrong", f"{function.__name__} raised {type(error).__name__}: {error}".splitlines()[0])


@dataclass(frozen=True)
class Progress:
    """Exercises of every notebook, and which of them are done; shown as a table."""

    rows: list[tuple[str, str, bool]]  # notebook, exercise, done

    def __repr__(self) -> str:
        return "\n".join(f"{MARKS['right' if done else 'not yet']} {book}: {name}" for book, name, done in self.rows)

    def _repr_html_(self) -> str:
        cells = [
            f"<tr><td><a href='{book}.ipynb'>{book}</a></td><td>{name}</td>"
            f"<td>{MARKS['right']} done</td></tr>" if done else
            f"<tr><td><a href='{book}.ipynb'>{book}</a></td><td>{name}</td><td>{MARKS['not yet']} to do</td></tr>"
            for book, name, done in self.rows
        ]  # fmt: skip
        return f"<table><tr><th>notebook</th><th>exercise</th><th></th></tr>{''.join(cells)}</table>"


def progress() -> Progress:
    """The exercises that the notebooks hold, in their order."""
    rows = []
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        code = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        checks = dict.fromkeys(name for source in code for name in re.findall(r"exercises\.(check_\w+)\(", source))
        rows += [(path.stem, name.removeprefix("check_").replace("_", " "), (DONE / name).exists()) for name in checks]
    return Progress(rows)


def _run(function: Callable, ours: Callable, cases: Mapping[str, Sequence], results: Sequence[str] = ()) -> str:
    """Both functions on the arguments of each case, the reader's on a copy; results: what the parts of a tuple are."""
    for case, arguments in cases.items():
        _check(case, function(*deepcopy(arguments)), ours(*arguments), results)
    return f"in {len(cases)} cases"


def _named(label: str, cases: Iterable[Sequence]) -> dict[str, Sequence]:
    """Cases that are named by their arguments."""
    return {label.format(*arguments): arguments for arguments in cases}


def _check(case: str, got, want, results: Sequence[str] = ()) -> None:
    """Raise Wrong where `got` differs first from `want`; results: what the parts of a tuple are."""
    if isinstance(want, Tensor):
        if difference := _first_difference(got, want):
            raise Wrong(f"{case}: {difference}")
    elif results:
        if not isinstance(got, tuple) or len(got) != len(results):
            raise Wrong(f"{case}: expected ({', '.join(results)}), got {type(got).__name__}")
        for name, theirs, part in zip(results, got, want, strict=True):
            _check(f"{case}: {name}", theirs, part)
    elif isinstance(want, list):
        if not isinstance(got, Iterable):
            raise Wrong(f"{case}: expected a list, got {type(got).__name__}")
        for i, (theirs, element) in enumerate(zip(got := list(got), want, strict=False)):
            _check(f"{case}: element [{i}]", theirs, element)
        _check(f"{case}: number of elements", len(got), len(want))
    elif got != want:
        raise Wrong(f"{case}: should be {want}, got {got}")


def _first_difference(got, want: Tensor) -> str | None:
    """Where `got` differs first from `want`, in words; None when they are equal."""
    if not isinstance(got, Tensor):
        return f"expected a tensor, got {type(got).__name__}"
    if got.shape != want.shape:
        return f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    equal = torch.isclose(got.double(), want.double(), rtol=1e-5, atol=1e-6)
    if equal.all():
        return None
    place = tuple((~equal).nonzero()[0].tolist())
    return f"element {list(place)} should be {want[place].item()}, got {got[place].item()}"


@exercise
def check_grid_positions(function: Callable) -> str:
    """`function(t, h, w, t_factor) -> (3, t*h*w)`: time (scaled, truncated), row and column of every merged token."""
    cases = [(1, 2, 3, 1.0), (1, 3, 2, 1.0), (3, 2, 2, 2.0), (4, 1, 2, 1.4), (5, 2, 1, 0.5)]
    return _run(function, grid_positions, _named("t={}, h={}, w={}, t_factor={}", cases))


@exercise
def check_mrope_positions(function: Callable) -> str:
    """`function(num_tokens, spans) -> (positions (3, L), delta)`; the spans come in the order of the prompt."""
    cases = {
        "text alone": (5, []),
        "a wide image": (12, [MediaSpan(2, 1, 2, 4)]),
        "a tall image": (12, [MediaSpan(2, 1, 4, 2)]),
        "a long video": (26, [MediaSpan(1, 6, 2, 2, 2.0)]),
        "an image and a video": (40, [MediaSpan(3, 1, 3, 2), MediaSpan(12, 5, 2, 2, 1.4)]),
        "a medium at the end": (8, [MediaSpan(2, 1, 2, 3)]),
    }
    return _run(function, get_mrope_input_positions, cases, POSITIONS)


@exercise
def check_mrope_axes(function: Callable) -> str:
    """`function(section) -> (pairs,)`: 0, 1 or 2 for each rotary pair, interleaved."""
    cases = _named("section={}", [([24, 20, 20],), ([11, 11, 10],), ([6, 5, 5],), ([4, 1, 2],), ([3, 0, 1],)])
    return _run(function, partial(mrope_axis_of_pairs, interleaved=True), cases)


@exercise
def check_step_seconds(function: Callable) -> str:
    """`function(timestamps) -> list` of seconds, one for each two frames."""
    cases = _named(
        "timestamps={}", [([0.0, 0.5, 1.0, 1.5],), ([0.0, 0.5, 1.0],), ([2.0],), ([8.0, 8.5, 3.0, 3.5, 29.0],)]
    )
    return _run(function, seconds_of_steps, cases)


@exercise
def check_retention_mask(function: Callable) -> str:
    """`function(video_embeds (M, D), merged_thw, q) -> (M,) bool`: what EVS keeps of a video."""
    moving = torch.randn(4 * 6, 8, generator=torch.Generator().manual_seed(0))
    still = torch.eye(6).repeat(4, 1)  # unit vectors: their cosine is exactly 1, however it is computed
    cases = {
        "everything changes": (moving, (4, 2, 3), 0.5),
        "q = 0 keeps all": (moving, (4, 2, 3), 0.0),
        "the first frame always stays": (moving, (4, 2, 3), 0.95),
        "nothing changes: ties go to the earlier token": (still, (4, 2, 3), 0.6),
        "one frame": (moving[:6], (1, 2, 3), 0.5),
    }
    return _run(function, lambda embeds, thw, q: compute_retention_mask(embeds, thw, 1, q), cases)


@exercise
def check_restrict_positions(function: Callable) -> str:
    """`function(positions (3, L), keep (L,)) -> (positions (3, K), delta)`: the layout of a pruned prompt."""
    positions, _ = get_mrope_input_positions(30, [MediaSpan(3, 5, 2, 2, 2.0)])
    pruned = {
        "nothing pruned": [],
        "some tokens pruned": [8, 9, 13, 20],
        "only the first frame stays": range(7, 23),
        "the prompt is cut inside the video": range(20, 30),
    }
    cases = {case: (positions, torch.tensor([i not in gone for i in range(30)])) for case, gone in pruned.items()}
    return _run(function, restrict_positions, cases, POSITIONS)


@exercise
def check_count_tokens(function: Callable) -> str:
    """`function(height, width) -> int`: merged tokens of an image with the limits of `PatchConfig()`."""
    sizes = [(56, 56), (427, 640), (300, 451), (41, 43), (10, 1000), (2000, 3000), (14, 14)]
    cases = _named("tokens of {} x {} pixels (height x width)", sizes)
    return _run(function, partial(count_tokens, config=PatchConfig()), cases)


@exercise
def check_merge_embeddings(function: Callable) -> str:
    """`function(text_embeds (L, D), spans, media_embeds) -> (L, D)`; the text embeddings given stay as they are."""
    text = torch.arange(20.0).view(10, 2)
    cases = {
        "text alone": [],
        "one image": [MediaSpan(2, 1, 2, 2)],
        "two images": [MediaSpan(1, 1, 1, 2), MediaSpan(5, 1, 2, 2)],
        "the second medium stands first": [MediaSpan(6, 1, 1, 3), MediaSpan(0, 2, 1, 1)],
    }
    for case, spans in cases.items():
        media = [-torch.arange(1.0, 2 * span.num_tokens + 1).view(-1, 2) - 100 * i for i, span in enumerate(spans)]
        given = text.clone()
        _check(case, function(given, spans, media), merge_embeddings(text, spans, media))
        _check(f"{case}: the text embeddings were changed in place", given, text)
    return f"in {len(cases)} cases"


@exercise
def check_patch_rows(function: Callable) -> str:
    """`function(pixels (T, C, H, W), config) -> (N, C*Tp*P*P)` in merge-block order; T is a multiple of Tp."""
    cases = {
        "one block": ((2, 3, 28, 28), PatchConfig()),
        "one row of blocks": ((2, 3, 28, 84), PatchConfig()),
        "two rows of blocks": ((2, 3, 56, 84), PatchConfig()),
        "a video": ((4, 3, 56, 28), PatchConfig()),
        "small patches": ((6, 3, 24, 12), PatchConfig(patch_size=2, merge_size=3, temporal_patch_size=3)),
    }
    counted = {case: (torch.arange(float(prod(shape))).view(shape), config) for case, (shape, config) in cases.items()}
    return _run(function, lambda pixels, config: patch_rows(pixels, config)[0], counted)


@exercise
def check_window_index(function: Callable) -> str:
    """`function(h, w, side) -> (h*w,)`: merged tokens of one frame in window order; sizes count merged tokens."""

    def ours(h: int, w: int, side: int) -> Tensor:
        return get_window_index([(1, h, w)], window_size=side, patch_size=1, spatial_merge_size=1)[0]

    cases = [(2, 4, 2), (4, 4, 2), (2, 6, 4), (5, 7, 4), (8, 8, 4), (3, 3, 8)]
    return _run(function, ours, _named("h={}, w={}, side={}", cases))


@exercise
def check_read_table(function: Callable) -> str:
    """`function(table (S*S, D), h, w) -> (h*w, D)`: each patch's nearest place, in merge-block order (2 x 2)."""

    def ours(table: Tensor, h: int, w: int) -> Tensor:
        return interpolate_position_table(table, [(1, h, w)], mode="nearest")

    generator = torch.Generator().manual_seed(0)
    sizes = {"a table's own size": (6, 6, 6), "wide": (6, 4, 10), "tall": (6, 12, 2), "a small table": (3, 8, 4)}
    cases = {
        f"{case}: table {side} x {side}, h={h}, w={w}": (torch.randn(side * side, 3, generator=generator), h, w)
        for case, (side, h, w) in sizes.items()
    }
    return _run(function, ours, cases)


@exercise
def check_frame_sample(function: Callable) -> str:
    """`function(fps, total, duration) -> (indices, timestamps)`, lists, as GLM-4.1V samples up to 300 s at 2 fps."""

    def ours(fps: float, total: int, duration: float) -> tuple[list, list]:
        sample = sample_video_frames("glm4v", fps=fps, total_num_frames=total, duration=duration)
        return sample.indices, sample.timestamps

    clips = {
        "an even number of frames": (30, 120, 4.0),
        "an odd number": (30, 75, 2.5),
        "a rate that does not divide": (23.976, 240, 10.01),
        "fewer frames than asked for": (1.5, 8, 5.33),
        "under half a second": (30, 3, 0.1),
        "a late last frame": (10, 31, 4.0),
    }
    cases = {f"{case} (fps={c[0]}, total={c[1]}, duration={c[2]})": c for case, c in clips.items()}
    return _run(function, ours, cases, ("indices", "timestamps"))


@exercise
def check_fill_buffer(function: Callable) -> str:
    """`function(buffer (capacity, ...), values (n, ...), rule)`: fills `buffer` in place, padding by `rule`."""
    rows = torch.arange(1.0, 7.0).view(3, 2)
    cumulative, permutation = torch.tensor([0, 4, 12, 16], dtype=torch.int32), torch.tensor([2, 0, 1])
    cases = {
        "rows, padded by zero": ((5, 2), rows, "zero"),
        "cumulative lengths, padded by repeat_last": ((7,), cumulative, "repeat_last"),
        "a permutation, padded by identity": ((6,), permutation, "identity"),
        "a full buffer": ((4,), cumulative, "repeat_last"),
    }
    for case, (shape, values, rule) in cases.items():
        buffer, want = torch.full(shape, 99, dtype=values.dtype), torch.empty(shape, dtype=values.dtype)
        fill_padded(want, values, rule, "values")
        function(buffer, values, rule)
        _check(case, buffer, want)
    return f"in {len(cases)} cases"


@exercise
def check_replay(function: Callable) -> str:
    """`function(operations)`: runs recorded operations again, so that their outputs hold the new results."""
    cases = {
        "two operations": lambda x: x * 2 + 1,
        "an operation with two results": lambda x: torch.add(*x.sort()),
        "an operation that works in place": lambda x: (x * 3).add_(x) * 2,
    }
    for case, forward in cases.items():
        box, graph = torch.tensor([3.0, 1.0, 2.0]), TraceGraph()
        graph.capture(partial(forward, box))
        for values in ([5.0, 4.0, 6.0], [0.0, 9.0, 8.0]):
            box.copy_(torch.tensor(values))
            function(graph.operations)
            _check(f"{case}, replayed on {values}", graph.output, forward(torch.tensor(values)))
    return f"in {len(cases)} cases"


@exercise
def check_greedy_batches(function: Callable) -> str:
    """`function(output_tokens, budgets, max_items) -> list of Batch`, packed as policy "greedy" does."""
    cases = [
        ([30, 30, 200], [64, 128, 256], 8),
        ([200, 30, 100, 30], [64, 128, 256], 8),
        ([5, 5, 5, 5, 5], [16, 64], 2),
        ([64, 300, 10], [64, 128], 4),
        ([], [64], 4),
    ]
    return _run(function, partial(plan_batches, policy="greedy"), _named(PACKING, cases))


@exercise
def check_smallest_budget_sum(function: Callable) -> str:
    """`function(output_tokens, budgets, max_items) -> int`: the smallest sum of budgets over all ways to share; every
    item fits the largest budget."""
    cases = [
        ([60], [64, 128], 8),
        ([60, 60, 60], [64, 128, 256], 8),
        ([200, 10, 50, 60, 120], [64, 128, 256], 8),
        ([40, 40, 40, 40, 40], [64, 256], 2),
        ([33, 90, 7, 7, 120, 61, 250, 14, 80, 64], [64, 128, 256], 4),
    ]

    def ours(*arguments) -> int:
        return sum(batch.budget or 0 for batch in plan_batches(*arguments, policy="optimal"))

    return _run(function, ours, _named(PACKING, cases))


@exercise
def check_crop_layout(function: Callable) -> str:
    """`function(width, height) -> (rows, columns)`: the crops of a Step3-VL image, (0, 0) without any."""
    sizes = [
        (100, 100), (727, 727), (728, 728), (500, 300), (300, 450), (1024, 768), (1108, 504), (1109, 504),
        (1920, 1080), (4000, 3000), (800, 400), (300, 2000), (31, 124), (31, 200),
    ]  # fmt: skip
    return _run(function, lambda width, height: plan_crops(width, height).layout, _named(PICTURE, sizes))


@exercise
def check_paired_batches(function: Callable) -> str:
    """`function(path_tokens, budgets, max_items) -> list of PairedBatch`, packed as `plan_paired_batches` does."""
    budgets = {"local": generate_budgets(81, 1296), "global": generate_budgets(169, 676)}
    images = {
        "one image": ([4], 8),
        "no crops at all": ([0, 0, 0], 8),
        "smallest first": ([9, 0, 4, 1], 8),
        "the local path is full": ([8, 8, 8], 8),
        "the global path is full": ([0] * 6, 8),
        "two to a batch": ([1, 0, 1, 0, 1], 2),
        "more crops than any budget": ([20, 1], 8),
        "nothing arrived": ([], 8),
    }
    cases = {
        f"{case}, crops={crops}, max_items={most}": ([{"local": 81 * n, "global": 169} for n in crops], budgets, most)
        for case, (crops, most) in images.items()
    }
    return _run(function, plan_paired_batches, cases)


@exercise
def check_load_balance(function: Callable) -> str:
    """`function(sizes, num_gpus) -> (order, counts, loads)`: largest first, onto the least loaded rank."""
    cases = [
        ([1000, 100, 200, 50], 2),
        ([3, 3, 3, 3, 3], 3),
        ([7, 1, 6, 2, 5, 3, 4], 3),
        ([5], 4),
        ([], 2),
        ([1, 1, 1, 1, 1, 100], 2),
    ]
    named = _named("sizes={}, num_gpus={}", cases)
    return _run(function, get_load_balance_assignment, named, ("order", "counts", "loads"))


@exercise
def check_restore_order(function: Callable) -> str:
    """`function(gathered (ranks * longest, D), tokens, order, counts)`: a list of (tokens, D), in the first order."""
    cases = [([2, 5, 1, 3], 2), ([5, 4, 2], 2), ([4, 4, 4], 3), ([6, 1], 4), ([3], 1)]
    named: dict[str, Sequence] = {}
    for tokens, num_gpus in cases:
        order, counts, loads = get_load_balance_assignment(tokens, num_gpus)
        ends, gathered = torch.tensor(counts).cumsum(0).tolist(), torch.full((num_gpus * max(loads), 1), torch.nan)
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True)):  # row k of item i holds i + k / 10
            rows = [i + k / 10 for i in order[end - count : end] for k in range(tokens[i])]
            gathered[rank * max(loads) : rank * max(loads) + len(rows), 0] = torch.tensor(rows)
        named[f"tokens={tokens} on {num_gpus} ranks"] = gathered, tokens, order, counts
    return _run(function, restore_order, named)


@exercise
def check_cache_bytes(function: Callable) -> str:
    """`function(config, dtype) -> bytes`: keys and values of all layers for one token; head_dim may be None."""
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim", "hidden_size", "num_attention_heads")
    values = [(28, 4, None, 3584, 28), (40, 2, 128, 4096, 32), (61, 1, 256, 7168, 64), (1, 1, None, 64, 4)]
    configs = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in values]
    cases = [(config, dtype) for config in configs for dtype in (torch.bfloat16, torch.float32)]
    return _run(function, kv_cache_bytes_per_token, _named("{}, {}", cases))


@exercise
def check_frames_that_fit(function: Callable) -> str:
    """`function(max_tokens, (height, width), config) -> frames`, 600 at most."""
    configs = {"Qwen2.5-VL": PatchConfig.for_video(), "GLM-4.1V": Glm4vPatchConfig.for_video()}
    limits = [(4096, (336, 336)), (100, (336, 336)), (143, (336, 336)), (144, (336, 336)), (10_000, (28, 56))]
    cases = {
        f"{name}, max_tokens={max_tokens}, size={size}": (max_tokens, size, config)
        for name, config in configs.items()
        for max_tokens, size in limits
    }
    return _run(function, frames_that_fit, cases)


@exercise
def check_slice_grid(function: Callable) -> str:
    """`function(width, height) -> (columns, rows)`, or None without slices: MiniCPM-V, 448 px, at most 9."""
    sizes = [
        (448, 448), (300, 600), (449, 448), (640, 480), (480, 640), (800, 300), (1280, 720), (1920, 1080), (1080, 1920),
        (4000, 3000), (4000, 400), (200, 3000), (1000, 1000),
    ]  # fmt: skip
    return _run(function, partial(slice_grid, config=SliceConfig()), _named(PICTURE, sizes))


@exercise
def check_read_sets(function: Callable) -> str:
    """`function(q (Q, H, K), k (N, H, K), v (N, H, K), patches_per_set) -> (sets * Q, H, K)`: the same queries read
    the patches of each set, which lie end to end."""

    def ours(q: Tensor, k: Tensor, v: Tensor, patches: list[int]) -> Tensor:
        cu_k = torch.tensor([0, *patches]).cumsum(0)
        cu_q = 5 * torch.arange(len(patches) + 1)
        return varlen_cross_attention(
            q.repeat(len(patches), 1, 1), k, v, cu_q, cu_k, 5, max(patches), backend="sdpa",
            groups=group_segment_pairs(cu_q, cu_k),
        )  # fmt: skip

    generator = torch.Generator().manual_seed(0)
    sets = {"one slice": [6], "two slices": [4, 6], "a packed set and a short one": [12, 4], "sets alike": [3, 3, 3]}
    cases: dict[str, Any] = {
        f"{case}, patches_per_set={patches}": (
            *(torch.randn(n, 2, 8, generator=generator) for n in (5, sum(patches), sum(patches))), patches
        )
        for case, patches in sets.items()
    }  # fmt: skip
    return _run(function, ours, cases)


@exercise
def check_merged_weight(function: Callable) -> str:
    """`function(weight (m, n), a (r, n), b (m, r), lora_alpha, rank) -> (m, n)`: what PEFT's merging makes of it."""
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, Any] = {}
    for m, n, rank, lora_alpha in [(3, 3, 1, 1), (4, 6, 2, 8), (6, 4, 4, 2)]:
        shapes = ((m, n), (rank, n), (m, rank))
        weight, a, b = (torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes)
        cases[f"{m} x {n}, lora_alpha={lora_alpha}, rank={rank}"] = weight, a, b, lora_alpha, rank
    return _run(function, lambda weight, a, b, lora_alpha, rank: weight + (b @ a) * (lora_alpha / rank), cases)


@exercise
def check_adapter_name(function: Callable) -> str:
    """`function(old) -> new`: a layer of a Qwen or GLM model as transformers calls it since 4.52."""
    layers = ("layers.0.self_attn.q_proj", "blocks.3.attn.qkv", "merger.mlp.0")
    text, tower, connector = (
        [f"model.{layers[0]}", f"model.language_model.{layers[0]}"],
        [f"visual.{layers[1]}", f"model.visual.{layers[1]}"],
        [f"visual.{layers[2]}", f"model.visual.{layers[2]}"],
    )
    return _run(function, GRIDS.rename, _named("{!r}", [(name,) for name in (*text, *tower, *connector, "lm_head")]))
