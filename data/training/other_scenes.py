"""Ask tiny models "what is there" about scenes of several seeds: `python -m data.training.other_scenes --write`.

This kind of question has the fewest correct answers, so its accuracy varies most between draws of scenes. Each seed
draws 1,000 new scenes, none of which was used for training or for choosing the recipe.
"""

import argparse
import json

import refvl
from data.training import scenes
from data.training.evaluate_tiny import Asked, evaluate
from data.training.run import digest
from data.training.tiny_family import family_names, find_family
from refvl.paths import DATA

KIND, SEEDS, COUNT = "what is there", (1, 2, 3, 4, 5), 1000
FILE = DATA / "measurements" / "other_scenes.json"


def ask(model: refvl.VLM, seed: int, clips: bool, count: int = COUNT) -> list[Asked]:
    """Ask `count` questions about the test scenes that this seed draws."""
    before, scenes.SEED = scenes.SEED, seed
    try:
        return evaluate(model, KIND, count, clips=clips)
    finally:
        scenes.SEED = before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=family_names(), default=family_names())
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true", help=f"write these draws to {FILE.name}")
    args = parser.parse_args()
    for family in map(find_family, args.models):
        model, name = refvl.load(family.folder, progress=False), family.folder.name
        for seed in args.seeds:
            right = sum(a.is_right for a in ask(model, seed, bool(family.clips)))
            print(name, seed, right, flush=True)
            if args.write:
                write(name, digest(family.folder), seed, right)


def write(name: str, weights: str, seed: int, right: int) -> None:
    """Add one draw of one model to the file; drop draws made with different weights."""
    record = json.loads(FILE.read_text()) if FILE.is_file() else {"kind": KIND, "n": COUNT, "models": {}}
    known = record["models"].get(name, {"weights_sha256": weights, "right": {}})
    draws = known["right"] if known["weights_sha256"] == weights else {}
    row = {"weights_sha256": weights, "right": dict(sorted((draws | {str(seed): right}).items()))}
    record["models"] = dict(sorted((record["models"] | {name: row}).items()))
    FILE.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
