"""Print the size and response time of every explorer as Markdown tables: `python -m benchmarks.explorers`.

Nothing is measured here. `RECORD=1 make test-browser` measures in Chromium, on a quiet machine, and saves
data/measurements/explorers_browser.json; with ALL=1 it also runs all notebooks. `make site` writes the pages whose
sizes are printed. A step lasts from an input to the second frame painted after it; the table has the median of twenty.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from refvl.paths import DATA

RECORD, SITE = DATA / "measurements" / "explorers_browser.json", DATA.parent / "site"
MADE_BY_AND_BEFORE = {
    "windows": ("`explore_windows`, `explore_resize`", "two views with sliders"),
    "positions": ("`explore_positions`", "a view with sliders"),
    "rules": ("`explore_position_rules`", "-"),
    "mrope": ("`explore_mrope`", "-"),
    "evs": ("`explore_evs`, `explore_keep_mask`", "a view of masks"),
    "attention": ("`explore_attention`", "-"),
    "tower": ("`explore_tower`", "-"),
    "graph": ("`explore_graph`", "-"),
    "launches": ("`explore_launches`", "-"),
    "packing": ("`explore_packing`", "a view with sliders"),
    "slices": ("`explore_slices`, `explore_crops`", "two views with sliders"),
    "families": ("`explore_families`", "-"),
    "costs": ("`explore_costs`", "-"),
    "deepstack": ("`explore_deepstack`", "-"),
    "timeline": ("`explore_timeline`", "a view with sliders"),
    "assignment": ("`explore_assignment`", "a view with sliders"),
}


def explorer_rows(record: dict) -> Iterator[str]:
    """Format a heading, and one line per explorer in a record of tests/browser."""
    yield "| explorer | made by | states | page, kB | a step on the page, ms | in JupyterLab, ms | before |"
    yield "|---|---|--:|--:|--:|--:|---|"
    for name, (made_by, before) in MADE_BY_AND_BEFORE.items():
        row = record["explorers"][name]
        page_ms, lab_ms = (f"{row[place]:.0f}" if place in row else "-" for place in ("page_ms", "lab_ms"))
        numbers = f"{row['states']} | {row['bytes'] / 1000:.0f} | {page_ms} | {lab_ms}"
        yield f"| {row['title']} | {made_by} | {numbers} | {before} |"


def run_all_line(notebooks: dict) -> str:
    """Format the results of Run All; a notebook is in the record only if no cell failed and none wrote to stderr."""
    ran = notebooks["ran"].values()
    cells, explorers = (sum(row[part] for row in ran) for part in ("cells", "explorers"))
    where = f"Chromium {notebooks['browser']}, {notebooks['date']}"
    return f"Run All: {len(ran)} notebooks, {cells} cells, {explorers} explorers, nothing on stderr ({where})"


def page_rows(site: Path) -> Iterator[str]:
    """Format a heading, and one line per notebook page in the folder of `make site`."""
    yield "| page | kB |"
    yield "|---|--:|"
    yield from (f"| {page.stem} | {page.stat().st_size / 1000:.0f} |" for page in sorted(site.glob("notebooks/*.html")))


def run() -> None:
    """Print the tables whose data exist, and the commands that make the missing data."""
    if RECORD.is_file():
        record = json.loads(RECORD.read_text())
        goals = "goals {page} and {lab} ms".format_map(record["goals_ms"])
        print(*explorer_rows(record), sep="\n")
        print(f"\nChromium {record['browser']}, {record['cores']} cores, load {record['load'][0]}, {goals}\n")
        missing = "Not all notebooks have run yet; run make test-browser with ALL=1"
        print(run_all_line(record["notebooks"]) if "notebooks" in record else missing, "\n")
    else:
        print(f"There is no {RECORD.name}; create it with RECORD=1 make test-browser\n")
    print(*(page_rows(SITE) if SITE.is_dir() else ["There is no site/; create it with make site"]), sep="\n")


if __name__ == "__main__":
    run()
