"""refvl's generated ids beside transformers', on one checkpoint: `python -m benchmarks.generated_ids`.

Both load the same folder in float32 and decode greedily. The clip is short enough that all releases of transformers
place the text behind it as refvl does. Results go to data/measurements/generated_ids.json.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2_5_VLForConditionalGeneration

import refvl
from benchmarks.report import environment, write_measurement
from refvl.paths import DATA

SCENE, PHOTOS = DATA / "pictures" / "scene.png", [DATA / "pictures" / f"{n}.jpg" for n in ("coffee", "chelsea")]
CLIP = DATA / "clips" / "scene.mp4"


def image(path: Path) -> dict:
    return {"type": "image", "image": str(path)}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


CASES = {
    "text": [text("What color is the circle?")],
    "one picture": [image(SCENE), text("What color is the circle?")],
    "a photo": [image(PHOTOS[0]), text("What is in the picture?")],
    "several pictures": [image(SCENE), *map(image, PHOTOS), text("Where is the circle?")],
    "pictures between text": [
        text("Here:"), image(PHOTOS[1]), text("and here:"), image(SCENE), text("What shape is in the middle?"),
    ],
    "a clip": [{"type": "video", "video": str(CLIP)}, text("Which way does the circle move?")],
    "a clip and a picture": [
        {"type": "video", "video": str(CLIP)}, image(SCENE), text("What color is the circle in the picture?"),
    ],
}  # fmt: skip


def transformers_inputs(vlm: refvl.VLM, trace: refvl.Trace) -> dict:
    """What transformers' `generate` takes, from the stages of a trace: ids, patch rows, grids."""
    ids = trace.full_ids[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["mm_token_type_ids"] = (ids == vlm.token_ids["image"]).int() + 2 * (ids == vlm.token_ids["video"]).int()
    for kind, rows, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        found = [p for p in trace.patches if p.merged.kind == kind]
        if found:
            inputs[rows] = torch.cat([p.pixel_values for p in found])
            inputs[grid] = torch.tensor([p.grid_thw for p in found])
    videos = [p for p in trace.patches if p.merged.kind == "video"]
    if videos:
        per_second = vlm.config.vision_config.tokens_per_second
        inputs["second_per_grid_ts"] = torch.tensor([p.merged.t_factor / per_second for p in videos])
    return inputs


def compare(vlm: refvl.VLM, oracle, content: list[dict], new_tokens: int) -> dict:
    """Generate with both; eos is switched off so that every case compares `new_tokens` ids."""
    trace = vlm.trace([{"role": "user", "content": content}], max_new_tokens=new_tokens, eos_token_id=None)
    inputs = transformers_inputs(vlm, trace)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    theirs = oracle.generate(**inputs, **options)[0, len(trace.full_ids) :].tolist()
    return {"prompt_tokens": len(trace.full_ids), "refvl": trace.token_ids, "transformers": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default=DATA / "checkpoints" / "tiny-qwen2_5_vl", type=Path)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    vlm = refvl.load(arguments.checkpoint, device="cpu", dtype="float32", progress=False)
    oracle = Qwen2_5_VLForConditionalGeneration.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    table = Table("prompt", "prompt tokens", "refvl's first ids", "transformers' first ids", "equal")
    rows = []
    for name, content in CASES.items():
        row = compare(vlm, oracle, content, arguments.new_tokens)
        equal = row["refvl"] == row["transformers"]
        rows.append({"prompt": name, "equal": equal} | row)
        first = [" ".join(map(str, row[side][:6])) for side in ("refvl", "transformers")]
        table.add_row(name, str(row["prompt_tokens"]), *first, f"all {arguments.new_tokens}" if equal else "NO")
    Console().print(table)
    if not arguments.no_write:
        print(f"written to {write_measurement('generated_ids', environment('cpu') | {'rows': rows})}")


if __name__ == "__main__":
    main()
