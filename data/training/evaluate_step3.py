"""What crops are worth to the tiny Step3, through the public path: `python -m data.training.evaluate_step3`.

Pages of the held-out split "test" go through `refvl.load(folder).chat_batch(...)`, first with crops, then the same
pages and questions with the overview alone. An answer counts when the text is the expected one, letter by letter.
`--write` keeps the shares as JSON.
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
from data.training import pages
from data.training.evaluate_tiny import checksum, interval, versions
from data.training.tiny_step3 import FAMILY

CHANCE = {"letter": 1 / len(pages.LETTERS), "place": 1 / len(pages.PLACES), "color": 1 / len(pages.COLORS)}


def requests_for(kind: str, count: int, split: str = "test") -> list[tuple[pages.Question, dict]]:
    """(question, arguments of `chat`) for the first `count` pages of a split."""
    requests = []
    for index in range(count):
        page = pages.draw_page(split, index)
        [question] = pages.draw_questions(page, [kind], np.random.default_rng([pages.SPLITS[split], index]))
        requests.append((question, {"prompt": question.text, "images": [pages.render(page)]}))
    return requests


def evaluate(model: refvl.VLM, kind: str, count: int, *, split: str = "test", batch: int = 50) -> list[bool]:
    """Whether each of `count` questions of one kind is answered right."""
    todo, right = requests_for(kind, count, split), []
    for start in tqdm(range(0, count, batch), desc=kind, leave=False):
        part = todo[start : start + batch]
        answers = model.chat_batch([request for _, request in part], max_new_tokens=6)
        right += [said == question.answer for (question, _), said in zip(part, answers, strict=True)]
    return right


def set_crops(model: refvl.VLM, enabled: bool) -> None:
    """With crops, or overviews only: nothing else of the model or the prompt changes."""
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
    console.print(table)
    if args.write:
        record = {"what": "share of held-out questions answered exactly, greedy decoding", "split": args.split}
        record |= {"seed": pages.SEED, "n": args.n, "date": datetime.date.today().isoformat()}
        record |= {"dtype": str(model.encoder.dtype), "weights_sha256": checksum(args.checkpoint)}
        record |= {"versions": versions(), "accuracy": accuracy}
        FAMILY.measurements.write_text(json.dumps(record, indent=2) + "\n")
        console.print(f"written: {FAMILY.measurements}")


if __name__ == "__main__":
    main()
