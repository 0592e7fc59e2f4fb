"""Measure a tiny model's accuracy through the public path: `python -m data.training.evaluate_tiny --model qwen2_5_vl`.

Scenes of the held-out split "test" go through `refvl.load(folder)`: preprocessing, tower, pruning, prompt,
greedy decoding, text. An answer counts as correct only if its text is exactly the expected one. Some kinds of
questions are asked again after a change of the input (positions, timestamps, temporal ids, or the order of
slices), and the answer has to follow the change. Some questions are spelt differently, are about things that do
not exist, or are off topic.

Every kind has a goal (`KINDS`); the command exits with an error if one is missed. `--write` saves the shares as JSON.
"""

import argparse
import datetime
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import refvl
from data.training import everyday, relations, scenes
from data.training.run import digest
from data.training.tiny_family import DEFAULT, FAMILIES, TinyFamily, TinyMiniCPMV, find_family
from data.training.train_tiny import WHOLE, draw_times
from refvl.pixels.media import Video
from refvl.positions import mrope_delta
from refvl.study.report import Trace

PACKING = TinyMiniCPMV.packing
SHUFFLED = "change, seconds shuffled"
SWAPPED, MIRRORED = "place, h and w swapped", "place, table transposed"
NEIGHBOURS_EXCHANGED = "neighbour, rows and columns exchanged in the tower"
OTHER_WINDOWS = "window, windows of other tokens"
SIZES = ((56, 56), (112, 112), (168, 168), (56, 112), (112, 56), (84, 168), (168, 84), (70, 100), (140, 120))  # px
# asked about images and videos in turn
ABOUT_BOTH = ("other spellings", "what is there", "not there", "everyday", "everyday, no image")
EXCHANGES = {  # kind of question -> frames of the video, and the way in which their times are exchanged (`draw_times`)
    "motion, times exchanged in a pack": ((0, 3, 5), "all"),
    "motion, times exchanged between packs": (WHOLE, "all"),
    "motion, packs exchanged as they are": (WHOLE, "packs"),
}


@dataclass(frozen=True)
class Request:
    """A question to the model. index: the scene's number in its split. arguments: those of `VLM.chat`.

    change: a function that changes the finished prompt. replace: the argument of `VLM.trace`.
    """

    index: int
    question: scenes.Question
    arguments: dict
    change: Callable[[refvl.VLM, Trace], Trace] | None = None
    replace: dict[str, Callable] | None = None


@dataclass(frozen=True)
class Asked:
    """One question, the model's answer, and the scene's number in its split."""

    index: int
    question: scenes.Question
    said: str

    @property
    def is_right(self) -> bool:
        """Whether the answer is correct: to an off-topic input, one that ends with the help text or denies an
        object.
        """
        if self.question.kind == "everyday":
            return self.said.endswith(self.question.answer) or self.said.startswith("There is no ")
        return self.said == self.question.answer


def kinds_of(family: TinyFamily) -> list[str]:
    """Return the kinds of questions that are measured for a family."""
    return [name for name, kind in KINDS.items() if kind.of(family)]


# ------------------------------------------------------------------------------------------ what is asked


def requests_for(
    kind: str, count: int, split: str = "test", first: int = 0, *, clips: bool = True
) -> list[Request]:  # fmt: skip
    """Draw `count` questions of one kind about scenes of a split, from number `first` on.

    kind: one of `KINDS`, or "color, 168 px" for a kind of `KINDS` with a change of `UNTRAINED`.
    clips: whether half of the questions that fit both images and videos are about videos.
    """
    base, _, change = kind.partition(", ")
    if change in UNTRAINED:
        trained = requests_for(base, count, split, first, clips=clips)
        return [replace(request, arguments=UNTRAINED[change](request.arguments)) for request in trained]
    make = KINDS[kind].make
    options = {"clips": clips} if kind in ABOUT_BOTH else {}
    found, index = list[Request](), first
    while len(found) < count:
        request = make(kind, split, index, **options)
        found += [request] if request else []
        index += 1
    return found


def media_of(scene: scenes.Scene) -> dict[str, list]:
    """Return the argument of `chat` that shows a scene."""
    if scene.sort == "picture":
        return {"images": [scenes.render(scene)]}
    return {"videos": [scenes.render(scene) if scene.sort == "motion" else sampled_clip(scene)]}


def sampled_clip(scene: scenes.Scene, source_fps: int = 24) -> Video:
    """Return a scene as a video that was sampled from a longer one: two frames, half a second apart, per timestamp."""
    indices = tuple(second * source_fps + half * source_fps // 2 for second in scene.seconds for half in (0, 1))
    total = (max(scene.seconds) + 1) * source_fps
    return Video(scenes.render(scene), scenes.FPS, float(source_fps), indices, total, total / source_fps)


def _rng(split: str, index: int) -> np.random.Generator:
    return np.random.default_rng([scenes.SPLITS[split], index])


def _pick(scene: scenes.Scene, kind: str, split: str, index: int) -> scenes.Question | None:
    pool = scenes.all_questions(scene).get(kind)
    return pool[int(_rng(split, index).integers(len(pool)))] if pool else None


def _request(index: int, question: scenes.Question | None, media: dict, change=None) -> Request | None:
    return question and Request(index, question, {"prompt": question.text, **media}, change)


def _plain(kind: str, split: str, index: int) -> Request | None:
    kind = kind.split(",")[0]
    scene = scenes.draw_sort(scenes.MEASURED[kind], split, index)
    return _request(index, _pick(scene, kind, split, index), media_of(scene))


def _respelled(kind: str, split: str, index: int, *, clips: bool) -> Request | None:
    """Draw a question that all families know, and spell it differently; see `everyday.respell`."""
    known = ("color", "shape", "place", "motion")[: 3 + clips]
    request = _plain(known[index % len(known)], split, index)
    if request is None:
        return None
    text = everyday.respell(request.question.text, _rng(split, index))
    return replace(request, arguments=request.arguments | {"prompt": text})


def _summed_up(kind: str, split: str, index: int, *, clips: bool) -> Request | None:
    clip = clips and bool(index % 2)
    scene = scenes.draw_scene(split, index, clip=clip)
    return _request(index, _pick(scene, "what_clip" if clip else "what", split, index), media_of(scene))


def _missing(kind: str, split: str, index: int, *, clips: bool) -> Request:
    scene = scenes.draw_scene(split, index, clip=clips and bool(index % 2))
    question = scenes.missing_question(scene, _rng(split, index))
    return Request(index, question, {"prompt": question.text, **media_of(scene)})


def _beside_the_point(kind: str, split: str, index: int, *, clips: bool) -> Request | None:
    """Ask one of the held-out sentences about an image, a video, or nothing; after the last one, the list
    starts again.
    """
    text = everyday.held_out()[index % len(everyday.held_out())]
    scene = scenes.draw_scene(split, index, clip=clips and bool(index % 2))
    media = {} if kind.endswith("no image") else media_of(scene)
    return _request(index, scenes.Question("everyday", text, scenes.HELP), media)


def _seconds_shuffled(kind: str, split: str, index: int) -> Request | None:
    """Draw a video and give each step the timestamp of a different step; frames and timestamps are the same."""
    scene = scenes.draw_change(split, index)
    turned = np.roll(scene.seconds, int(_rng(split, index).integers(1, scenes.STEPS)))  # no step has its own timestamp
    scene = replace(scene, seconds=tuple(turned.tolist()))
    return _request(index, _pick(scene, "change", split, index), media_of(scene))


def _mirrored(scene: scenes.Scene, split: str, index: int) -> scenes.Question | None:
    """Draw a question about an object off the diagonal, whose expected answer is the mirrored place."""
    question = _pick(scene, "place", split, index)
    place = scenes.PLACES.index(question.answer)
    if scenes.TRANSPOSED[place] == place:
        return None
    return replace(question, answer=scenes.PLACES[scenes.TRANSPOSED[place]])


def _swapped(kind: str, split: str, index: int) -> Request | None:
    scene = scenes.draw_scene(split, index)
    question = _mirrored(scene, split, index)
    return _request(
        index, question, media_of(scene), lambda _, trace: _replace_media(trace, lambda thw: thw[[0, 2, 1]])
    )


def transposed_table(table: Tensor) -> Tensor:
    """Exchange the rows and columns of a square position table.

    table: (S * S, D), (1 + S * S, D) with a class token first, or (1, S * S, D).
    """
    flat = table.flatten(0, -2)
    side = math.isqrt(len(flat))
    first, cells = flat.split([len(flat) - side * side, side * side])
    return torch.cat([first, cells.unflatten(0, (side, side)).transpose(0, 1).flatten(0, 1)]).view_as(table)


def _table_transposed(kind: str, split: str, index: int) -> Request | None:
    scene = scenes.draw_scene(split, index)
    question = _mirrored(scene, split, index)
    request = _request(index, question, media_of(scene))
    return request and replace(request, replace={"position_table": transposed_table})


def _table_zeroed(kind: str, split: str, index: int) -> Request | None:
    request = _plain("place", split, index)
    return request and replace(request, replace={"position_table": torch.zeros_like})


def _relation(kind: str, split: str, index: int) -> Request | None:
    """Draw a question about a scene in which some object has a neighbour, or shares a window."""
    scene = scenes.draw_scene(split, index)
    answers = {q.answer for q in relations.questions(scene, relations.AS_IT_IS) if q.kind == kind}
    if not answers - {relations.NOTHING}:
        return None
    question = relations.draw_question(scene, relations.AS_IT_IS, kind, _rng(split, index))
    return _request(index, question, media_of(scene))


def _relation_changed(kind: str, split: str, index: int) -> Request | None:
    """Draw a question that has a different answer if the tower is given different coordinates or windows."""
    request, scene = _relation(kind.split(",")[0], split, index), scenes.draw_scene(split, index)
    seen = relations.TRANSPOSED if kind == NEIGHBOURS_EXCHANGED else relations.OTHER_WINDOWS
    answer = request and relations.answer_to(request.question.text, scene, seen)
    if answer is None or answer == request.question.answer:
        return None
    return replace(
        request,
        question=replace(request.question, answer=answer),
        replace={"plan": lambda plans: [seen(plan) for plan in plans]},
    )


def _resized(kind: str, split: str, index: int) -> Request | None:
    """Draw a scene, resized to each of `SIZES` in turn."""
    scene = scenes.draw_scene(split, index)
    image = Image.fromarray(scenes.render(scene)).resize(SIZES[index % len(SIZES)], Image.Resampling.BICUBIC)
    return _request(index, _pick(scene, "color", split, index), {"images": [image]})


def _one_position(kind: str, split: str, index: int) -> Request | None:
    scene = scenes.draw_scene(split, index)
    change = lambda _, trace: _replace_media(trace, lambda thw: thw[:, :1].expand_as(thw))  # noqa: E731
    return _request(index, _pick(scene, "place", split, index), media_of(scene), change)


def _reversed(kind: str, split: str, index: int) -> Request | None:
    scene = scenes.draw_scene(split, index, clip=True)
    told = replace(scene, direction=scenes.OPPOSITE[scene.direction])
    turn = lambda thw: torch.stack([thw[0].unflatten(0, (scenes.FRAMES // 2, -1)).flip(0).flatten(), *thw[1:]])  # noqa: E731
    change = lambda _, trace: _replace_media(trace, turn)  # noqa: E731
    return _request(index, _pick(told, "motion", split, index), media_of(scene), change)


def _replace_media(trace: Trace, change: Callable) -> Trace:
    """Change the positions (3, n) of the only media item, including all separators if it is sliced."""
    first, last, positions = trace.spans[0], trace.spans[-1], trace.positions.clone()
    marks = int(first is not last)
    part = slice(first.offset - marks, last.offset + last.num_tokens + marks)
    positions[:, part] = change(positions[:, part])
    return replace(trace, positions=positions, delta=mrope_delta(positions))


def _exchanged_on_canvas(kind: str, split: str, index: int) -> Request | None:
    """Exchange the positions of slices and their separators on the canvas; tokens and their order do not change."""
    scene, order = scenes.draw_scene(split, index), _rng(split, index).permutation(len(scenes.PLACES))
    question = _pick(scene, "place", split, index)
    place = scenes.PLACES.index(question.answer)
    if order[place] == place:
        return None
    question = replace(question, answer=scenes.PLACES[order[place]])
    return _request(index, question, media_of(scene), lambda _, trace: exchange_places(trace, order))


def exchange_places(trace: Trace, order: Sequence[int]) -> Trace:
    """Give slice i of an image the positions of slice order[i]; all slices have the same size."""
    positions, slices = trace.positions.clone(), trace.spans[1:]
    columns = torch.stack([span.offset - 1 + torch.arange(span.num_tokens + 2) for span in slices])
    positions[:, columns.flatten()] = trace.positions[:, columns[torch.as_tensor(order)].flatten()]
    return replace(trace, positions=positions)


def _times_exchanged(kind: str, split: str, index: int) -> Request | None:
    """Draw a video whose held-out times do not follow the order of its frames; see `EXCHANGES`."""
    frames, how = EXCHANGES[kind]
    times = draw_times(len(frames), PACKING, _rng(split, index), how=how, held_out=True)
    scene = scenes.draw_scene(split, index, clip=True)
    told = scenes.retell(scene, scenes.packs_of(frames, times, PACKING))
    total = max(times) + 10
    video = Video(scenes.render(scene)[list(frames)], scenes.FPS, 10.0, times, total, total / 10)
    return _request(index, _pick(told, "motion", split, index), {"videos": [video]})


def _slices_exchanged(kind: str, split: str, index: int) -> Request | None:
    """Draw a question about an image whose slices, with their sizes and separators, are in a different order."""
    scene, order = scenes.draw_scene(split, index), _rng(split, index).permutation(4)
    places = scenes.places_of_slices(order)
    question = _pick(scene, "place", split, index)
    place = scenes.PLACES.index(question.answer)
    if places[place] == place:
        return None
    question = replace(question, answer=scenes.PLACES[places[place]])
    return _request(index, question, media_of(scene), lambda model, trace: reorder_slices(model, trace, order))


def reorder_slices(model: refvl.VLM, trace: Trace, order) -> Trace:
    """Build the prompt of one sliced image with its slices in the given order."""
    [patches] = trace.patches
    rows = list(patches.pixel_values.split([h * w for group in patches.layout for h, w in group.slices]))
    places = [0, *(1 + int(i) for i in order)]
    layout = tuple(patches.layout[i] for i in places)
    with torch.inference_mode():
        tokens = model.encoder(torch.cat([rows[i] for i in places]), [layout])
    embeds, begin = trace.inputs_embeds.clone(), 0
    for span in trace.spans:
        embeds[..., span.offset : span.offset + span.num_tokens, :] = tokens[begin : begin + span.num_tokens]
        begin += span.num_tokens
    return replace(trace, inputs_embeds=embeds)


def _video(change: Callable[[np.ndarray], np.ndarray], fps: float = scenes.FPS) -> Callable[[dict], dict]:
    """Return a function that changes the frames of a question's video, or the rate at which they are played."""

    def changed(asked: dict) -> dict:
        frames = change(np.asarray(asked["videos"][0]))
        n = len(frames)
        return asked | {"videos": [Video(frames, fps, fps, tuple(range(n)), n, n / fps)]}

    return changed


def _large(asked: dict) -> dict:
    return asked | {"images": [Image.fromarray(asked["images"][0]).resize((168, 168), Image.Resampling.BICUBIC)]}


def _after_another(asked: dict) -> dict:
    return asked | {"images": [scenes.render(scenes.draw_scene("test", 5000)), *asked["images"]]}


UNTRAINED = {  # changes of a question's media that no training showed; these kinds have no goal
    "five frames": _video(lambda frames: frames[:5]),
    "nothing moves": _video(lambda frames: frames[:1].repeat(6, axis=0)),
    "4.2 frames a second": _video(lambda frames: frames, 4.2),
    "168 px": _large,
    "after another image": _after_another,
}


class Kind(NamedTuple):
    """A kind of question: a function that draws one, the goal, and the families that are asked.

    least, most: the bounds of the share of correct answers.
    """

    make: Callable[..., Request | None]
    least: float
    most: float = 1.0
    of: Callable[[TinyFamily], bool] = lambda family: True


KINDS = {
    "color": Kind(_plain, 0.99),
    "shape": Kind(_plain, 0.99),
    "place": Kind(_plain, 0.99),
    "motion": Kind(_plain, 0.99, of=lambda family: "motion" in family.clips),
    "change": Kind(_plain, 0.99, of=lambda family: "change" in family.clips),
    SHUFFLED: Kind(_seconds_shuffled, 0.99, of=lambda family: "change" in family.clips),
    SWAPPED: Kind(_swapped, 0.95, of=lambda family: family.reads_places),
    "place, one position": Kind(_one_position, 0.0, 0.2, lambda family: family.reads_places),  # chance is 1 in 9
    "place, slices exchanged on the canvas": Kind(_exchanged_on_canvas, 0.95, of=lambda family: family.reads_canvas),
    MIRRORED: Kind(_table_transposed, 0.95, of=lambda family: family.reads_table),
    "place, table of zeros": Kind(_table_zeroed, 0.0, 0.2, lambda family: family.reads_table),
    "neighbour": Kind(_relation, 0.9, of=lambda family: family.reads_neighbours),
    NEIGHBOURS_EXCHANGED: Kind(_relation_changed, 0.9, of=lambda family: family.reads_neighbours),
    "window": Kind(_relation, 0.9, of=lambda family: family.reads_windows),
    OTHER_WINDOWS: Kind(_relation_changed, 0.9, of=lambda family: family.reads_windows),
    "color, other sizes": Kind(_resized, 0.95),
    "motion, t reversed": Kind(_reversed, 0.95, of=lambda family: family.reads_steps),
    "motion, EVS at 0.5": Kind(_plain, 0.98, of=lambda family: family.prunable),
    **{name: Kind(_times_exchanged, 0.9, of=lambda family: family.packing > 0) for name in EXCHANGES},
    "place, slices exchanged": Kind(_slices_exchanged, 0.95, of=lambda family: family.sliced),
    "other spellings": Kind(_respelled, 0.95),
    "what is there": Kind(_summed_up, 0.80),  # answers name one or two objects, or state a higher number
    "not there": Kind(_missing, 0.95),
    "everyday": Kind(_beside_the_point, 0.95),
    "everyday, no image": Kind(_beside_the_point, 0.95),
}
OTHER_GOALS = {
    ("minicpmv", "motion"): (0.95, 1.0),  # here, only the order within packs shows the motion
    ("qwen3_vl", "neighbour"): (0.8, 1.0),  # read from the position table
    ("qwen3_vl", NEIGHBOURS_EXCHANGED): (0.75, 1.0),
}


# ------------------------------------------------------------------------------------------- how it is asked


def evaluate(
    model: refvl.VLM, kind: str, count: int, *, q: float = 0.0, pruning: str = "evs", split: str = "test",
    batch: int = 50, first: int = 0, clips: bool = True,
) -> list[Asked]:  # fmt: skip
    """Ask `count` questions of one kind, `batch` at a time, at pruning rate q by the rule `pruning`."""
    asked, todo = [], requests_for(kind, count, split, first, clips=clips)
    options = {"max_new_tokens": 32}
    q = 0.5 if kind.endswith("EVS at 0.5") else q
    for start in tqdm(range(0, len(todo), batch), desc=f"{kind} q={q:g}", leave=False, disable=None):
        part = todo[start : start + batch]
        if part[0].change is None and part[0].replace is None:
            shown = [request.arguments for request in part]
            answers = model.chat_batch(shown, pruning_rate=q, pruning=pruning, progress=False, **options)
        else:
            traces = [model.trace(**request.arguments, max_new_tokens=1, replace=request.replace) for request in part]
            pairs = zip(part, traces, strict=True)
            changed = [request.change(model, trace) if request.change else trace for request, trace in pairs]
            answers = model.answers(changed, **options)
        asked += [Asked(r.index, r.question, said) for r, said in zip(part, answers, strict=True)]
    return asked


def share(asked: list[Asked]) -> float:
    return sum(a.is_right for a in asked) / len(asked)


def goal_of(family: TinyFamily, kind: str) -> tuple[float, float]:
    """Return the minimum and maximum share of correct answers for a kind of question."""
    return OTHER_GOALS.get((family.name, kind), (KINDS[kind].least, KINDS[kind].most))


def missed(family: TinyFamily, shares: dict[str, float]) -> list[str]:
    """Return the kinds whose share misses their goal."""
    goals = {kind: goal_of(family, kind) for kind in shares}
    return [kind for kind, (least, most) in goals.items() if not least <= shares[kind] <= most]


def interval(p: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % Wilson interval for a share p of n answers."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def versions() -> dict[str, str]:
    return {
        "refvl": refvl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def write_record(family: TinyFamily, split: str, n: int, accuracy: dict) -> None:
    """Write the shares of correct answers of the shipped checkpoint into data/measurements."""
    record = {"what": "share of held-out questions answered exactly, greedy decoding", "split": split}
    record |= {"seed": scenes.SEED, "n": n, "date": datetime.date.today().isoformat()}
    record |= {"weights_sha256": digest(family.folder), "versions": versions(), "accuracy": accuracy}
    family.measurements.write_text(json.dumps(record, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, default=DEFAULT)
    parser.add_argument("--checkpoint", type=Path, help="a folder other than the shipped one")
    parser.add_argument("-n", type=int, default=1000, help="questions of each kind")
    parser.add_argument("--kinds", nargs="*", metavar="KIND", help="only these kinds of questions")
    parser.add_argument("--split", default="test", choices=[s for s in scenes.SPLITS if s != "train"])
    parser.add_argument("--write", action="store_true", help="keep the result in data/measurements")
    args = parser.parse_args()
    family, accuracy = find_family(args.model), dict[str, float]()
    model = refvl.load(args.checkpoint or family.folder)
    for kind in args.kinds or kinds_of(family):
        asked = evaluate(model, kind, args.n, split=args.split, clips=bool(family.clips))
        accuracy[kind] = p = share(asked)
        (low, high), (least, most) = interval(p, len(asked)), goal_of(family, kind)
        goal = f"at least {least:.0%}" if least else f"at most {most:.0%}"
        print(f"{kind}: {p:.1%} of {len(asked)} ({low:.1%} - {high:.1%}), goal {goal}", flush=True)
    if args.write:
        write_record(family, args.split, args.n, accuracy)
    if kinds := missed(family, accuracy):
        raise SystemExit(f"goals missed: {', '.join(kinds)}")


if __name__ == "__main__":
    main()
