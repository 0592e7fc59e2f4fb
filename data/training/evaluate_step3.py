"""Measure what crops contribute to the tiny Step3, through the public path: `python -m data.training.evaluate_step3`.

Pages of the held-out split "test" go through `refvl.load(folder).chat_batch(...)`: first with crops, then the same
pages and questions with the overview alone. Then come questions in other spellings, about boxes that do not exist, and
off-topic questions. An answer counts as correct only if its text is exactly the expected one. The command exits with an
error if a goal is missed. `--write` saves the shares of correct answers as JSON.
"""

import argparse
import datetime
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import refvl
from data.training import everyday, pages
from data.training.evaluate_tiny import Asked, interval, versions
from data.training.run import digest
from data.training.tiny_step3 import FAMILY

CHANCE = {"letter": 1 / len(pages.LETTERS), "place": 1 / len(pages.PLACES), "color": 1 / len(pages.COLORS)}


OTHERS = ("other spellings", "not there", "everyday", "everyday, no image")


def requests_for(kind: str, count: int, split: str = "test") -> list[tuple[pages.Question, dict]]:
    """Return (question, arguments of `chat`) for the first `count` pages of a split."""
    requests = []
    for index in range(min(count, len(everyday.held_out())) if kind.startswith("everyday") else count):
        page, rng = pages.draw_page(split, index), np.random.default_rng([pages.SPLITS[split], index])
        media = {"images": [pages.render(page)]}
        if kind.startswith("everyday"):
            question = pages.Question("everyday", everyday.held_out()[index], pages.HELP)
            media = {} if kind.endswith("no image") else media
        else:
            of = {"other spellings": list(pages.PHRASES)[index % len(pages.PHRASES)], "not there": "missing"}
            [question] = pages.draw_questions(page, [of.get(kind, kind)], rng)
        text = everyday.respell(question.text, rng) if kind == "other spellings" else question.text
        requests.append((question, {"prompt": text, **media}))
    return requests


def evaluate(model: refvl.VLM, kind: str, count: int, *, split: str = "test", batch: int = 50) -> list[bool]:
    """Return whether each of `count` questions of one kind is answered correctly."""
    todo, right = requests_for(kind, count, split), []
    for start in tqdm(range(0, len(todo), batch), desc=kind, leave=False):
        part = todo[start : start + batch]
        answers = model.chat_batch([request for _, request in part], max_new_tokens=24)
        right += [Asked(0, question, said).is_right for (question, _), said in zip(part, answers, strict=True)]
    return right


def missed(accuracy: dict[str, dict[str, float]]) -> list[str]:
    """Return the kinds that miss their goal: 99 % with crops; without, chance for letters and 95 % for the rest."""
    kinds = []
    for kind, row in accuracy.items():
        least = 0.95 if kind in OTHERS else 0.99
        blind = kind == "letter" and row["overview_only"] > 1.3 * row["chance"]
        if row["crops"] < least or blind or (kind != "letter" and row.get("overview_only", 1) < 0.95):
            kinds.append(kind)
    return kinds


def set_crops(model: refvl.VLM, enabled: bool) -> None:
    """Switch crops on or off; nothing else in the model or the prompt changes."""
    model.processor.image_config = replace(model.processor.image_config, enable_crops=enabled)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=FAMILY.folder)
    parser.add_argument("-n", type=int, default=1000, help="pages")
    parser.add_argument("--split", default="test", choices=[s for s in pages.SPLITS if s != "train"])
    parser.add_argument("--write", action="store_true", help=f"keep the result in {FAMILY.measurements.name}")
    args = parser.parse_args()

    model, console, accuracy = refvl.load(args.checkpoint), Console(), {}
    table = Table("question", "with crops", "overview only", "chance")
    for kind in pages.PHRASES:
        cells, accuracy[kind] = [], {"chance": CHANCE[kind]}
        for enabled, name in ((True, "crops"), (False, "overview_only")):
            set_crops(model, enabled)
            right = evaluate(model, kind, args.n, split=args.split)
            accuracy[kind][name] = share = sum(right) / len(right)
            low, high = interval(share, len(right))
            cells.append(f"{share:.1%} ({low:.1%} - {high:.1%})")
        table.add_row(kind, *cells, f"{CHANCE[kind]:.1%}")
    set_crops(model, True)
    for kind in OTHERS:
        right = evaluate(model, kind, args.n, split=args.split)
        accuracy[kind] = {"crops": sum(right) / len(right)}
        low, high = interval(accuracy[kind]["crops"], len(right))
        table.add_row(kind, f"{accuracy[kind]['crops']:.1%} ({low:.1%} - {high:.1%})", "", "")
    console.print(table)
    if args.write:
        record = {"what": "share of held-out questions answered exactly, greedy decoding", "split": args.split}
        record |= {"seed": pages.SEED, "n": args.n, "date": datetime.date.today().isoformat()}
        record |= {"dtype": str(model.encoder.dtype), "weights_sha256": digest(args.checkpoint)}
        record |= {"versions": versions(), "accuracy": accuracy}
        FAMILY.measurements.write_text(json.dumps(record, indent=2) + "\n")
        console.print(f"written: {FAMILY.measurements}")
    if missed(accuracy):
        raise SystemExit(f"goals missed: {', '.join(missed(accuracy))}")


if __name__ == "__main__":
    main()
