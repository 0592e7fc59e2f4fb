"""Write the tables of data/README.md from data/measurements: `python -m data.training.measured`."""

import json
import re

from data.training import other_scenes
from data.training.evaluate_tiny import GOALS, goal_of, interval, kinds_of
from data.training.run import digest
from data.training.tiny_family import family_names, find_family
from data.training.tiny_step3 import FAMILY as STEP3
from refvl.paths import DATA

README, BEGIN, END = DATA / "README.md", "<!-- measured: begin -->\n", "<!-- measured: end -->"
OTHER_BEGIN, OTHER_END = "<!-- other scenes: begin -->\n", "<!-- other scenes: end -->"
BOXES_BEGIN, BOXES_END = "<!-- boxes: begin -->\n", "<!-- boxes: end -->"
VLLM_BEGIN, VLLM_END = "<!-- in vllm: begin -->\n", "<!-- in vllm: end -->"
FILES, HANDED = "files, by LLM.chat", "embeddings handed over"  # kinds of requests to vLLM that get a line of their own


def tables() -> str:
    """Return Markdown tables of accuracy in percent: scenes by family, then pages with and without crops."""
    families = [find_family(name) for name in family_names()]
    measured = {family.folder.name: json.loads(family.measurements.read_text()) for family in families}
    rows = [["question", *(f"`{name}`" for name in measured), "goal"], ["---"] * (len(measured) + 2)]
    for kind in (kind for kind in GOALS if any(kind in kinds_of(family) for family in families)):
        shares = [record["accuracy"].get(kind) for record in measured.values()]
        least, most = GOALS[kind]
        goal = f"at least {least:.0%}" if least else f"at most {most:.0%}"
        for family in families:
            if goal_of(family, kind) != GOALS[kind]:
                goal += f" (`{family.folder.name}`: {goal_of(family, kind)[0]:.0%})"
        rows.append([kind, *("-" if share is None else f"{share:.1%}" for share in shares), goal])
    pages = json.loads(STEP3.measurements.read_text())["accuracy"]
    crops = [["`tiny-step3`", "with crops", "overview only", "chance"], ["---"] * 4]
    for kind, row in pages.items():
        cells = (row.get(part) for part in ("crops", "overview_only", "chance"))
        crops.append([kind, *("-" if share is None else f"{share:.1%}" for share in cells)])
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, crops)) + "\n"


def in_vllm() -> str:
    """Return a Markdown table of agreement with a running vLLM, with one line per folder and kind of request."""
    lines = ["| in vLLM | requests | prompts | positions | answers | logits | given the same |", f"|{' --- |' * 7}"]
    for name, record in json.loads((DATA / "measurements" / "vllm.json").read_text())["folders"].items():
        older = " (earlier weights)" * (record["weights_sha256"] != digest(DATA / "checkpoints" / name))
        ways: dict[str, list[dict]] = {}
        for row in record["rows"]:
            way = f", {row['q']:g} of a video pruned" if row["q"] else ""
            ways.setdefault(f", {row['kind']}" if row["kind"] in (FILES, HANDED) else way, []).append(row)
        for way, rows in ways.items():
            counts = ["asked", "same_prompt", "same_positions", "same_answer"]
            sums = [str(sum(row.get(what, 0) for row in rows)) for what in counts]
            if not any("same_positions" in row for row in rows):
                sums[2] = "-"
            apart = f"{max(row['apart'] for row in rows):.0e}"
            given = f"{sum(row['agree'] for row in rows)}, {max(row['apart_given'] for row in rows):.0e}"
            lines.append(f"| `{name}`{way}{older} | {' | '.join(sums)} | {apart} | {given} |")
    return "\n".join(lines) + "\n"


def of_boxes() -> str:
    """Return a Markdown table of the overlap between boxes in answers and painted boxes."""
    record = json.loads((DATA / "measurements" / "boxes.json").read_text())
    columns = {
        "mean IoU": "mean_iou",
        "in the other family's convention": "mean_iou_in_the_other_convention",
        "a box in the middle of its cell": "mean_iou_of_the_cell",
        "of another cell": "mean_iou_of_another_cell",
    }
    lines = [f"| of {record['n']} | IoU of at least 0.5 | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 2)}"]
    for row in record["models"]:
        values = " | ".join(f"{row[key]:.2f}" for key in columns.values())
        lines.append(f"| `boxes-{row['model']}` | {row['at_least_0.5']:.1%} | {values} |")
    return "\n".join(lines) + "\n"


def of_other_scenes() -> str:
    """Return a Markdown table of the share of correct answers to one kind of question, over several draws of scenes."""
    record = json.loads(other_scenes.FILE.read_text())
    seeds, n = len(other_scenes.SEEDS), record["n"]
    header = [f"{record['kind']}, {seeds} draws of {n:,}", "lowest draw", "highest draw", "all", "95 % interval of all"]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for name, model in record["models"].items():
        shares = [right / n for right in model["right"].values()]
        whole = sum(shares) / seeds
        low, high = interval(whole, seeds * n)
        numbers = " | ".join(f"{share:.1%}" for share in (min(shares), max(shares), whole))
        lines.append(f"| `{name}` | {numbers} | {low:.1%} - {high:.1%} |")
    return "\n".join(lines) + "\n"


def main():
    text = README.read_text()
    made = (
        (BEGIN, tables(), END), (OTHER_BEGIN, of_other_scenes(), OTHER_END), (VLLM_BEGIN, in_vllm(), VLLM_END),
        (BOXES_BEGIN, of_boxes(), BOXES_END),
    )  # fmt: skip
    for begin, table, end in made:
        text = re.sub(f"{begin}.*?{end}", lambda _, new=begin + table + end: new, text, flags=re.DOTALL)
    README.write_text(text)


if __name__ == "__main__":
    main()
