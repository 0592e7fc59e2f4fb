"""How often a tiny model is right, through the public path: `python -m data.training.evaluate_tiny --model qwen2_5_vl`.

Scenes of the held-out split "test" go through `refvl.load(folder).chat_batch(...)`: preprocessing, tower, pruning,
prompt, greedy decoding, text. An answer counts when the text is the expected one, letter by letter.
Where a model is told the time ("change"), videos are sampled at seconds that no rule predicts, and are asked about
again with the same seconds shuffled among the same frames: the answers have to follow.
`--curve` repeats the motion questions at several EVS pruning rates, with the time to the first token of one video;
`--write FILE` keeps all of it as JSON.
"""

import argparse
import datetime
import hashlib
import json
import math
import platform
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import refvl
from data.training import scenes
from data.training.tiny_family import DEFAULT, TinyFamily, family_names, find_family
from refvl.pixels.media import Video

RATES = (0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9)
SHUFFLED = "change, seconds shuffled"


@dataclass(frozen=True)
class Asked:
    """One question, what the model said, and the scene's number in its split."""

    index: int
    question: scenes.Question
    said: str

    @property
    def is_right(self) -> bool:
        return self.said == self.question.answer


def requests_for(kind: str, count: int, split: str = "test", first: int = 0) -> list[tuple[int, scenes.Question, dict]]:
    """`count` scenes that have a question of this kind: (scene number, question, arguments of `chat`)."""
    sort, found, index = scenes.MEASURED[kind], [], first
    while len(found) < count:
        scene = scenes.draw_sort(sort, split, index)
        pool = scenes.all_questions(scene).get(kind)
        if pool:
            rng = np.random.default_rng([scenes.SPLITS[split], index])
            question = pool[int(rng.integers(len(pool)))]
            found.append((index, question, {"prompt": question.text, **media_of(scene)}))
        index += 1
    return found


def media_of(scene: scenes.Scene) -> dict[str, list]:
    """The argument of `chat` that shows a scene."""
    if scene.sort == "picture":
        return {"images": [scenes.render(scene)]}
    return {"videos": [scenes.render(scene) if scene.sort == "motion" else sampled_clip(scene)]}


def sampled_clip(scene: scenes.Scene, source_fps: int = 24) -> Video:
    """The frames of a scene as if a longer video had been sampled for half a second at each of its seconds."""
    indices = tuple(second * source_fps + half * source_fps // 2 for second in scene.seconds for half in (0, 1))
    total = (max(scene.seconds) + 1) * source_fps
    return Video(scenes.render(scene), scenes.FPS, float(source_fps), indices, total, total / source_fps)


def shuffled_requests(count: int, split: str = "test", first: int = 0) -> list[tuple[int, scenes.Question, dict]]:
    """The "change" scenes of `requests_for`, the same frames at the same seconds, but each step at another's second."""
    found = []
    for index in range(first, first + count):
        scene = scenes.draw_change(split, index)
        rng = np.random.default_rng([scenes.SPLITS[split], index])
        turned = np.roll(scene.seconds, int(rng.integers(1, scenes.STEPS)))  # no step keeps its own
        scene = replace(scene, seconds=tuple(turned.tolist()))
        pool = scenes.all_questions(scene)["change"]
        question = pool[int(rng.integers(len(pool)))]
        found.append((index, question, {"prompt": question.text, **media_of(scene)}))
    return found


def evaluate(
    model: refvl.VLM, kind: str, count: int, *, q: float = 0.0, split: str = "test", batch: int = 50, first: int = 0
) -> list[Asked]:
    """Ask `count` questions of one kind (or SHUFFLED), `batch` at a time, at pruning rate q."""
    asked, todo = (
        [],
        shuffled_requests(count, split, first) if kind == SHUFFLED else requests_for(kind, count, split, first),
    )
    for start in tqdm(range(0, count, batch), desc=f"{kind} q={q:g}", leave=False):
        part = todo[start : start + batch]
        answers = model.chat_batch([request for _, _, request in part], max_new_tokens=8, pruning_rate=q)
        asked += [Asked(i, question, said) for (i, question, _), said in zip(part, answers, strict=True)]
    return asked


def kinds_of(family: TinyFamily) -> list[str]:
    """What is measured of a family."""
    return [*family.kinds, *([SHUFFLED] if "change" in family.clips else [])]


def share(asked: list[Asked]) -> float:
    return sum(a.is_right for a in asked) / len(asked)


def interval(p: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p of n."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def seconds_to_first_token(model: refvl.VLM, rates: tuple[float, ...], repeats: int = 15) -> dict[float, float]:
    """Median over alternating repeats, one video; the first round warms up and is not counted."""
    (_, _, request), *_ = requests_for("motion", 1)
    times: dict[float, list[float]] = {q: [] for q in rates}
    for _ in range(repeats + 1):
        for q in rates:
            times[q].append(model.trace(**request, pruning_rate=q, max_new_tokens=1).ttft)
    return {q: statistics.median(t[1:]) for q, t in times.items()}


def pruning_curve(model: refvl.VLM, count: int) -> list[dict]:
    """Motion accuracy, prompt length and relative time to the first token at each rate."""
    seconds = seconds_to_first_token(model, RATES)
    (_, _, request), *_ = requests_for("motion", 1)
    rows = []
    for q in RATES:
        run = model.trace(**request, pruning_rate=q, max_new_tokens=1)
        p = share(evaluate(model, "motion", count, q=q))
        rows.append(
            {
                "q": q,
                "motion": p,
                "video_tokens": int(sum(mask.sum() for mask in run.keep_masks if mask is not None))
                or sum(span.num_tokens for span in run.spans),
                "ttft_relative": seconds[q] / seconds[0.0],
            }
        )
    return rows


def checksum(folder: Path) -> str:
    """Of the weights that were measured."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    return {
        "refvl": refvl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=family_names(), default=DEFAULT)
    parser.add_argument("--checkpoint", type=Path, help="another folder than the one that ships")
    parser.add_argument("-n", type=int, default=1000, help="questions of each kind")
    parser.add_argument("-q", type=float, default=0.0, help="EVS pruning rate of clips")
    parser.add_argument("--split", default="test", choices=[s for s in scenes.SPLITS if s != "train"])
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--dtype", default="auto", help="of the computation; the weights are stored in bfloat16")
    parser.add_argument("--curve", action="store_true", help="also motion against the pruning rate")
    parser.add_argument("--write", type=Path, nargs="?", const=Path(), help="JSON file (default in data/measurements)")
    parser.add_argument("--mistakes", action="store_true", help="print every wrong answer")
    args = parser.parse_args()

    family = find_family(args.model)
    folder = args.checkpoint or family.folder
    model, console = refvl.load(folder, dtype=args.dtype), Console()
    table, accuracy = Table("kind", "right", "of", "accuracy", "95 % interval"), {}
    for kind in kinds_of(family):
        asked = evaluate(model, kind, args.n, q=args.q, split=args.split, batch=args.batch)
        accuracy[kind] = p = share(asked)
        low, high = interval(p, args.n)
        table.add_row(kind, str(sum(a.is_right for a in asked)), str(args.n), f"{p:.1%}", f"{low:.1%} - {high:.1%}")
        for a in (a for a in asked if args.mistakes and not a.is_right):
            console.print(f"{kind} {a.index}: {a.question.text} expected {a.question.answer!r}, said {a.said!r}")
    console.print(table)

    curve = pruning_curve(model, args.n) if args.curve else []
    if curve:
        table = Table("q", "motion", "video tokens", "time to first token, q=0 is 1")
        for row in curve:
            table.add_row(
                f"{row['q']:g}", f"{row['motion']:.1%}", str(row["video_tokens"]), f"{row['ttft_relative']:.2f}"
            )
        console.print(table)
    if args.write is not None:
        args.write = family.measurements if args.write == Path() else args.write
        args.write.parent.mkdir(parents=True, exist_ok=True)
        record = {"what": "share of held-out questions answered exactly, greedy decoding", "split": args.split}
        record |= {"seed": scenes.SEED, "n": args.n, "q": args.q, "date": datetime.date.today().isoformat()}
        record |= {"dtype": str(model.encoder.dtype), "weights_sha256": checksum(folder)}
        record |= {"versions": versions(), "accuracy": accuracy, "evs_curve": curve}
        args.write.write_text(json.dumps(record, indent=2) + "\n")
        console.print(f"written: {args.write}")


if __name__ == "__main__":
    main()
