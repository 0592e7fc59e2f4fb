"""Measure what each tiny model loses without each of its mechanisms: `python -m refvl bench ablations`.

Questions about held-out scenes are asked unchanged, and again with one mechanism removed by `model.trace(replace=...)`:
a table of zeros, no rotation, full attention instead of windows, no DeepStack. In some ablations, two inputs are
exchanged instead, such as height and width. Then the new answer is known, and the share of answers that follow the
exchange is also measured. Pixels and weights never change; the prompt changes in a few ablations only.

A mechanism counts as needed if the share of correct answers is clearly lower without it: the 95 % interval lies below
that of the plain run. With --write the result is written to data/measurements/ablations.json, and its figure to
data/figures/ablations.png.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor

import refvl
from benchmarks.report import PrintedTable, Write, environment, resolve_device, write_measurement
from data.training import evaluate_step3, evaluate_tiny, relations, scenes
from data.training.evaluate_tiny import exchange_places, interval, transposed_table
from data.training.run import digest
from data.training.tiny_family import find_family
from refvl.paths import DATA
from refvl.study.report import Trace
from refvl.viz import plot_ablations
from refvl.viz.style import png_of

MODELS = ("qwen2_5_vl", "qwen3_vl", "glm4v", "glm4v_table", "minicpmv", "minicpmv4_7", "step3")
CHANCE = {
    "color": 1 / len(scenes.COLORS), "shape": 1 / len(scenes.SHAPES), "place": 1 / len(scenes.PLACES),
    "motion": 1 / len(scenes.DIRECTIONS), "change": 1 / scenes.STEPS,
    **dict.fromkeys(relations.KINDS, 0.25),  # about a quarter of the answers are "no object"
}  # fmt: skip
COLUMNS = {"model": "19", "without": "30", "question": "8", "right": ">5", "follows": ">7", "of": ">4", "95 %": ">16"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: the arguments of `chat`, the answer, and the plain run if it is done."""

    arguments: dict
    answer: str
    scene: Any = None
    trace: Any = None


@dataclass(frozen=True, slots=True)
class Ablation:
    """A mechanism and the way it is removed.

    changes: a function from the plain run to the `replace` of `trace`. arguments: a function from a question to other
        arguments of `chat`.
    told: a function from a question to the answer that follows from the changed input, or None.
    kinds: the kinds of questions to which the ablation applies; all kinds if empty.
    """

    name: str
    mechanism: str
    changes: Callable[[Trace], dict[str, Callable]] = lambda trace: {}
    arguments: Callable[[Asked], dict] | None = None
    told: Callable[[Asked], str] | None = None
    kinds: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------- in the tower


def zeros_of(name: str) -> Callable[[Trace], dict[str, Callable]]:
    return lambda trace: {name: torch.zeros_like}


def full_attention(plan: Any) -> Any:
    """Enlarge every window to its whole frame."""
    return replace(
        plan, cu_window_seqlens=plan.cu_seqlens, window_groups=plan.groups, max_window_seqlen=plan.max_seqlen
    )


def shuffled_windows(plan: Any) -> Any:
    """Use windows of the same sizes that gather random tokens of a frame; every patch keeps its rotary angles."""
    m = len(plan.positions) // len(plan.window_index)  # the number of patches per token
    ends = (plan.cu_seqlens // m).tolist()
    rng = np.random.default_rng(0)
    own = np.concatenate([first + rng.permutation(last - first) for first, last in pairwise(ends)])
    order = torch.from_numpy(own).to(plan.window_index.device)
    positions = plan.positions.unflatten(0, (-1, m))[order].flatten(0, 1)
    window_index = plan.window_index[order]
    return replace(plan, positions=positions, window_index=window_index, reverse_index=window_index.argsort())


def whole_plans(function: Callable[[Any], Any]) -> Callable[[Trace], dict[str, Callable]]:
    return lambda trace: {"plan": lambda plans: [function(plan) for plan in plans]}


def without_deepstack(trace: Trace) -> dict[str, Callable]:
    """Replace the DeepStack features by zeros."""
    width = trace.inputs_embeds.shape[-1]
    cut = lambda rows: torch.cat([rows[:, :width], torch.zeros_like(rows[:, width:])], dim=1)  # noqa: E731
    return {"encode": lambda embeds: [cut(rows) for rows in embeds]}


def of_resampler(**fields: Callable[[Any], Any]) -> Callable[[Trace], dict[str, Callable]]:
    """Replace fields of the resampler's part of each plan by the results of these functions."""
    change = lambda part: replace(part, **{name: function(part) for name, function in fields.items()})  # noqa: E731
    return whole_plans(lambda plan: replace(plan, resampler=change(plan.resampler)))


def times_exchanged(part: Any) -> Tensor:
    """Reverse the times of all frames; each frame stays at its position in its pack."""
    times = part.times
    [present] = torch.where(times >= 0)
    ids, numbers = times[present].unique(return_inverse=True)
    return times.index_put((present,), ids.flip(0)[numbers])


# ------------------------------------------------------------------------------------------------ in the prompt


def in_spans(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[Trace], dict[str, Callable]]:
    """Change the positions (3, n) of all spans of the media at once."""

    def of(trace: Trace) -> dict[str, Callable]:
        parts = [slice(span.offset, span.offset + span.num_tokens) for span in trace.spans]

        def positions(positions_3L: Tensor) -> Tensor:
            changed = positions_3L.clone()
            for part, values in zip(parts, change([positions_3L[:, part] for part in parts]), strict=True):
                changed[:, part] = values
            return changed

        return {"positions": positions}

    return of


def exchanged(spans: list[Tensor]) -> list[Tensor]:
    return [thw[[0, 2, 1]] for thw in spans]


def at_one(spans: list[Tensor]) -> list[Tensor]:
    return [thw[:, :1].expand_as(thw) for thw in spans]


def reversed_times(spans: list[Tensor]) -> list[Tensor]:
    """Reverse the t positions of a video's steps, whether the steps share a span or have one each."""
    if len(spans) > 1:
        return [torch.cat([other[:1], own[1:]]) for own, other in zip(spans, reversed(spans), strict=True)]
    [thw] = spans
    steps = thw[0].unique()
    return [torch.stack([steps.flip(0)[torch.searchsorted(steps, thw[0].contiguous())], *thw[1:]])]


def token_blocks(order: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[Trace], dict[str, Callable]]:
    """Exchange or blank the tokens of an image's overview and slices, given as one tensor each."""

    def of(trace: Trace) -> dict[str, Callable]:
        sizes = [span.num_tokens for span in trace.spans]
        return {"encode": lambda embeds: [torch.cat(order(list(rows.split(sizes)))) for rows in embeds]}

    return of


def on_canvas(order: tuple[int, ...]) -> Callable[[Trace], dict[str, Callable]]:
    """Exchange the positions of slices on the canvas, together with their separators."""
    return lambda trace: {"positions": lambda now: exchange_places(replace(trace, positions=now), order).positions}


def one_place(trace: Trace) -> dict[str, Callable]:
    """Give an overview, its slices and all of their separators the same position."""
    first, last = trace.spans[0].offset - 1, trace.spans[-1].offset + trace.spans[-1].num_tokens

    def positions(positions_3L: Tensor) -> Tensor:
        changed = positions_3L.clone()
        changed[:, first : last + 1] = positions_3L[:, first : first + 1]
        return changed

    return {"positions": positions}


SLICES = [1, 0, 3, 2]  # the order of the slices if they are exchanged
CANVAS = (8, 7, 6, 5, 4, 3, 2, 1, 0)  # for each slice, the slice whose place it takes


def mirrored(asked: Asked) -> str:
    """Return the place to expect if height and width are exchanged."""
    return scenes.PLACES[scenes.TRANSPOSED[scenes.PLACES.index(asked.answer)]]


def by_relation(seen: relations.Arrangement) -> Callable[[Asked], str]:
    """Return a function from a question about neighbours or windows to its answer if the tower is told of `seen`.

    Questions without an answer there, about several objects in one window, keep theirs.
    """
    return lambda asked: relations.answer_to(asked.arguments["prompt"], asked.scene, seen) or asked.answer


def opposite(asked: Asked) -> str:
    """Return the direction to expect if time is reversed; answers that are no direction are unchanged."""
    return scenes.OPPOSITE.get(asked.answer, asked.answer)


def moved_corners(asked: Asked) -> str:
    """Return the place that exchanged slices indicate; objects outside the corners keep their place."""
    return scenes.PLACES[scenes.places_of_slices(SLICES)[scenes.PLACES.index(asked.answer)]]


def moved_on_canvas(asked: Asked) -> str:
    """Return the place that exchanged slices indicate on the canvas; the center does not change."""
    return scenes.PLACES[CANVAS[scenes.PLACES.index(asked.answer)]]


def resized(width: int, height: int) -> Callable[[Asked], dict]:
    """Return a function from a question about an image to arguments that show the image at this size in px."""

    def arguments(asked: Asked) -> dict:
        [image] = asked.arguments["images"]
        shown = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
        return asked.arguments | {"images": [shown]}

    return arguments


def rolled_seconds(asked: Asked) -> dict:
    """Return arguments with the same frames, in which each step has the timestamp of the next."""
    scene = replace(asked.scene, seconds=(*asked.scene.seconds[1:], asked.scene.seconds[0]))
    return asked.arguments | evaluate_tiny.media_of(scene)


def rolled_answer(asked: Asked) -> str:
    seconds = asked.scene.seconds
    return str((*seconds[1:], seconds[0])[asked.scene.step])


# ------------------------------------------------------------------------------------------------- which


M_ROPE = (
    Ablation("height and width exchanged", "M-RoPE", in_spans(exchanged), told=mirrored, kinds=("place",)),
    Ablation("one position for all", "M-RoPE", in_spans(at_one)),
    Ablation(
        "time positions reversed", "M-RoPE", in_spans(reversed_times), kinds=("motion", "change"),
        told=opposite,
    ),
)  # fmt: skip
ROTARY = (Ablation("no rotation", "rotary", zeros_of("frequencies")),)
NEIGHBOURS = Ablation(
    "tokens transposed in the tower", "rotary", whole_plans(relations.TRANSPOSED), kinds=("neighbour",),
    told=by_relation(relations.TRANSPOSED),
)  # fmt: skip
TABLE = (
    Ablation("table of zeros", "table", zeros_of("position_table")),
    Ablation(
        "table transposed", "table", lambda trace: {"position_table": transposed_table}, told=mirrored, kinds=("place",)
    ),
)
IMAGES = ("color", "shape", "place")  # questions about them
SECONDS = (
    Ablation(
        "timestamps of the next step", "seconds", arguments=rolled_seconds, told=rolled_answer, kinds=("change",)
    ),
)  # fmt: skip
SIZES = tuple(
    Ablation(f"own size ({width} x {height} px)", "size", arguments=resized(width, height), kinds=IMAGES)
    for width, height in ((56, 56), (112, 112), (168, 168), (84, 168), (168, 84))
)  # fmt: skip
WINDOWS = (
    Ablation("full attention for windows", "windows", whole_plans(full_attention)),
    Ablation("windows shuffled", "windows", whole_plans(shuffled_windows)),
    Ablation(
        "windows of other tokens",
        "windows",
        whole_plans(relations.OTHER_WINDOWS),
        kinds=("window",),
        told=by_relation(relations.OTHER_WINDOWS),
    ),
)
ABLATIONS: dict[str, tuple[Ablation, ...]] = {
    "qwen2_5_vl": (*ROTARY, NEIGHBOURS, *WINDOWS, *M_ROPE),
    "qwen3_vl": (
        *ROTARY, *TABLE, replace(NEIGHBOURS, mechanism="table"),
        Ablation("no DeepStack", "deepstack", without_deepstack), *M_ROPE, *SECONDS,
    ),
    "glm4v": (*ROTARY, *TABLE, *M_ROPE, *SECONDS),
    "glm4v_table": (*ROTARY, *TABLE, *M_ROPE, *SECONDS),
    "minicpmv": (
        *TABLE,
        Ablation("keys without places", "resampler", of_resampler(positions=lambda p: torch.zeros_like(p.positions))),
        Ablation(
            "timestamps reversed", "temporal ids", of_resampler(times=times_exchanged), told=opposite, kinds=("motion",)
        ),
        Ablation(
            "slices exchanged", "slices", token_blocks(lambda b: [b[0], *(b[1 + i] for i in SLICES)]),
            told=moved_corners, kinds=("place",),
        ),
        Ablation("no slices", "slices", token_blocks(lambda b: [b[0], *map(torch.zeros_like, b[1:])]), kinds=IMAGES),
        Ablation("no overview", "slices", token_blocks(lambda b: [torch.zeros_like(b[0]), *b[1:]]), kinds=IMAGES),
    ),
    "minicpmv4_7": (
        TABLE[0],
        Ablation(
            "slices exchanged on the canvas", "canvas", on_canvas(CANVAS), told=moved_on_canvas, kinds=("place",)
        ),
        Ablation("one position for all", "canvas", one_place),
        Ablation("no slices", "slices", token_blocks(lambda b: [b[0], *map(torch.zeros_like, b[1:])])),
        Ablation("no overview", "slices", token_blocks(lambda b: [torch.zeros_like(b[0]), *b[1:]])),
    ),
    "step3": (
        *TABLE,
        Ablation("no crops", "crops", token_blocks(lambda b: [*map(torch.zeros_like, b[:-1]), b[-1]])),
        Ablation("no overview", "crops", token_blocks(lambda b: [*b[:-1], torch.zeros_like(b[-1])])),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------- measuring


def questions_of(name: str, count: int) -> dict[str, list[Asked]]:
    """Return kind -> held-out questions of the family `name` whose answers are known."""
    if name == "step3":
        kinds = evaluate_step3.CHANCE
        found = {kind: evaluate_step3.requests_for(kind, count) for kind in kinds}
        return {kind: [Asked(arguments, q.answer) for q, arguments in asked] for kind, asked in found.items()}
    questions, family = {}, find_family(name)
    for kind, sort in (family.kinds | dict.fromkeys(relations.kinds_of(family), "picture")).items():
        requests = evaluate_tiny.requests_for(kind, count)
        questions[kind] = [
            Asked(r.arguments, r.question.answer, scenes.draw_sort(sort, "test", r.index)) for r in requests
        ]
    return questions


def said(model: refvl.VLM, traces: list[Trace], batch: int = 50) -> list[str]:
    parts = [traces[first : first + batch] for first in range(0, len(traces), batch)]
    return [answer for part in parts for answer in model.answers(part, max_new_tokens=8)]


def ask(model: refvl.VLM, asked: list[Asked], ablation: Ablation) -> list[str]:
    """Return the model's answers with the mechanism removed."""
    traces = []
    for question in asked:
        arguments = ablation.arguments(question) if ablation.arguments else question.arguments
        traces.append(model.trace(**arguments, max_new_tokens=1, replace=ablation.changes(question.trace)))
    return said(model, traces)


def rows_of(name: str, count: int) -> Iterator[dict]:
    """Yield the results of each kind of question: the plain run, then each ablation that applies to the kind."""
    folder = find_family(name).folder if name != "step3" else evaluate_step3.FAMILY.folder
    model = refvl.load(folder, device="cpu", progress=False)
    chance = evaluate_step3.CHANCE if name == "step3" else CHANCE
    for kind, asked in questions_of(name, count).items():
        asked = [replace(q, trace=model.trace(**q.arguments, max_new_tokens=1)) for q in asked]
        fixed = {"model": folder.name, "question": kind, "chance": round(chance[kind], 4)}
        plain = said(model, [q.trace for q in asked])
        yield fixed | row_of("", "", asked, plain)
        for ablation in (*ABLATIONS[name], *SIZES):
            if not ablation.kinds or kind in ablation.kinds:
                answers = ask(model, asked, ablation)
                yield fixed | row_of(ablation.name, ablation.mechanism, asked, answers, ablation.told)


def row_of(without: str, mechanism: str, asked: list[Asked], answers: list[str], told=None) -> dict:
    """Count the correct answers, and those that follow the changed input among questions for which the two differ."""
    pairs = list(zip(asked, answers, strict=True))
    row = {"mechanism": mechanism, "without": without, "n": len(pairs)}
    row["right"] = sum(answer == q.answer for q, answer in pairs)
    if told is not None and (differ := [(told(q), answer) for q, answer in pairs if told(q) != q.answer]):
        row |= {"follow": sum(other == answer for other, answer in differ), "follow_of": len(differ)}
    return row


def is_needed(row: dict, plain: dict) -> bool:
    """Return whether the 95 % interval of a result lies below that of the plain run."""
    (_, high), (low, _) = (interval(r["right"] / r["n"], r["n"]) for r in (row, plain))
    return high < low


def measure(names: list[str], count: int) -> dict:
    table, rows = PrintedTable(f"{count} questions of each kind, held out", COLUMNS), []
    for name in names:
        for row in rows_of(name, count):
            rows.append(row)
            between = "{:.0%} - {:.0%}".format(*interval(row["right"] / row["n"], row["n"]))
            follows = f"{row['follow']}/{row['follow_of']}" if "follow" in row else ""
            which = (row["model"], row["without"], row["question"])
            table.add(*which, row["right"], follows, row["n"], between)
    weights = {model: digest(DATA / "checkpoints" / model) for model in {row["model"] for row in rows}}
    return {"weights_sha256": weights, "rows": rows}


def draw(rows: list[dict]) -> None:
    """Draw data/figures/ablations.png, with one panel per model."""
    models = {model: [row for row in rows if row["model"] == model] for model in {row["model"]: 0 for row in rows}}
    heights = [len({row["without"] for row in of_model}) + 2 for of_model in models.values()]
    figure = plt.figure(figsize=(8, 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(models), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, of_model in zip(panels, models.values(), strict=True):
        plot_ablations(of_model, ax=ax)
    file = DATA / "figures" / "ablations.png"
    file.write_bytes(png_of(figure))
    print(f"drawn in {file.relative_to(DATA.parent)}")


def run(
    count: Annotated[int, typer.Option(help="questions of each kind")] = 100,
    model: Annotated[str, typer.Option(help="only the family of this name")] = "",
    write: Write = False,
) -> None:
    """Measure what each tiny model loses without each of its mechanisms."""
    device, names = resolve_device("cpu"), [name for name in MODELS if model in ("", name)]
    measured = measure(names, count)
    if write:
        file = DATA / "measurements" / "ablations.json"
        kept = json.loads(file.read_text()) if file.is_file() and model else {"rows": [], "weights_sha256": {}}
        asked = {row["model"] for row in measured["rows"]}
        rows = [row for row in kept["rows"] if row["model"] not in asked] + measured["rows"]
        rows.sort(key=lambda row: row["model"])  # stable
        plain = {(row["model"], row["question"]): row for row in rows if not row["without"]}
        rows = [row | {"needed": is_needed(row, plain[row["model"], row["question"]])} for row in rows]
        weights = dict(sorted((kept["weights_sha256"] | measured["weights_sha256"]).items()))
        result = {"split": "test", "weights_sha256": weights, "rows": rows}
        write_measurement("ablations", environment(device) | result)
        draw(rows)


if __name__ == "__main__":
    typer.run(run)
