"""How often the tiny model is right, through the public path: `python -m data.evaluate_tiny`.

Scenes of the held-out split "test" go through `refvl.load(folder).chat_batch(...)`: preprocessing, tower, pruning,
prompt, greedy decoding, text. An answer counts when the text is the expected one, letter by letter.
`--curve` repeats the motion questions at several EVS pruning rates, with the time to the first token of one clip;
`--write FILE` keeps all of it as JSON.
"""

import argparse
import datetime
import hashlib
import json
import math
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import refvl
from data import scenes, tiny_checkpoint
from refvl.paths import DATA

KINDS = {"color": False, "shape": False, "place": False, "motion": True}  # kind -> is it asked about a clip
RATES = (0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9)
MEASUREMENTS = DATA / "measurements" / "tiny-qwen2_5_vl.json"


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
    clip, found, index = KINDS[kind], [], first
    while len(found) < count:
        scene = scenes.draw_scene(split, index, clip=clip)
        pool = scenes.all_questions(scene).get(kind)
        if pool:
            rng = np.random.default_rng([scenes.SPLITS[split], index])
            question = pool[int(rng.integers(len(pool)))]
            found.append(
                (index, question, {"prompt": question.text, "videos" if clip else "images": [scenes.render(scene)]})
            )
        index += 1
    return found


def evaluate(
    model: refvl.VLM, kind: str, count: int, *, q: float = 0.0, split: str = "test", batch: int = 50, first: int = 0
) -> list[Asked]:
    """Ask `count` questions of one kind, `batch` at a time, at pruning rate q."""
    asked, todo = [], requests_for(kind, count, split, first)
    for start in tqdm(range(0, count, batch), desc=f"{kind} q={q:g}", leave=False):
        part = todo[start : start + batch]
        answers = model.chat_batch([request for _, _, request in part], max_new_tokens=8, pruning_rate=q)
        asked += [Asked(i, question, said) for (i, question, _), said in zip(part, answers, strict=True)]
    return asked


def share(asked: list[Asked]) -> float:
    return sum(a.is_right for a in asked) / len(asked)


def interval(p: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p of n."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def seconds_to_first_token(model: refvl.VLM, rates: tuple[float, ...], repeats: int = 15) -> dict[float, float]:
    """Median over alternating repeats, one clip; the first round warms up and is not counted."""
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
                or run.spans[0].num_tokens,
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
    parser.add_argument("--checkpoint", type=Path, default=tiny_checkpoint.FOLDER)
    parser.add_argument("-n", type=int, default=1000, help="questions of each kind")
    parser.add_argument("-q", type=float, default=0.0, help="EVS pruning rate of clips")
    parser.add_argument("--split", default="test", choices=[s for s in scenes.SPLITS if s != "train"])
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--dtype", default="auto", help="of the computation; the weights are stored in bfloat16")
    parser.add_argument("--curve", action="store_true", help="also motion against the pruning rate")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=MEASUREMENTS, help=f"JSON file (default {MEASUREMENTS.name})"
    )
    parser.add_argument("--mistakes", action="store_true", help="print every wrong answer")
    args = parser.parse_args()

    model, console = refvl.load(args.checkpoint, dtype=args.dtype), Console()
    table, accuracy = Table("kind", "right", "of", "accuracy", "95 % interval"), {}
    for kind in KINDS:
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
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        record = {"what": "share of held-out questions answered exactly, greedy decoding", "split": args.split}
        record |= {"seed": scenes.SEED, "n": args.n, "q": args.q, "date": datetime.date.today().isoformat()}
        record |= {"dtype": str(model.encoder.dtype), "weights_sha256": checksum(args.checkpoint)}
        record |= {"versions": versions(), "accuracy": accuracy, "evs_curve": curve}
        args.write.write_text(json.dumps(record, indent=2) + "\n")
        console.print(f"written: {args.write}")


if __name__ == "__main__":
    main()
