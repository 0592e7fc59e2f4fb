"""Measure what crops contribute to the tiny Step3, through the public path: `python -m data.training.evaluate_step3`.

Pages of the held-out split "test" go through `refvl.load(folder).chat_batch(...)`: first with crops, then the same
pages and questions with the overview alone. Then come questions in other spellings, about boxes that do not exist, and
off-topic questions. An answer counts as correct only if its text is exactly the expected one. The command exits with an
error if a goal is missed. `--write` saves the shares of correct answers as JSON.
"""

import argparse
from dataclasses import replace

import numpy as np
from tqdm import tqdm

import refvl
from data.training import everyday, pages
from data.training.evaluate_tiny import Asked, write_record
from data.training.tiny_family import STEP3

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
    """Return the kinds that miss their goal.

    With crops, the goal is 99 %. Without crops, it is chance for letters, and 95 % for all other
    kinds.
    """
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
    parser.add_argument("-n", type=int, default=1000, help="pages")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {STEP3.measurements.name}")
    args = parser.parse_args()
    model, accuracy = refvl.load(STEP3.folder), dict[str, dict[str, float]]()
    for kind in (*CHANCE, *OTHERS):
        accuracy[kind] = {"chance": CHANCE[kind]} if kind in CHANCE else {}
        for enabled, name in ((True, "crops"), (False, "overview_only"))[: 1 + (kind in CHANCE)]:
            set_crops(model, enabled)
            right = evaluate(model, kind, args.n)
            accuracy[kind][name] = sum(right) / len(right)
        print(kind, accuracy[kind], flush=True)
    if args.write:
        write_record(STEP3, "test", args.n, accuracy)
    if missed(accuracy):
        raise SystemExit(f"goals missed: {', '.join(missed(accuracy))}")


if __name__ == "__main__":
    main()
