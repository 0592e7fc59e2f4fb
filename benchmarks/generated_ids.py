"""Compare the ids that refvl and transformers generate from one checkpoint: `python -m benchmarks.generated_ids`.

Both load the same folder in float32 and decode greedily. If a video's time axis extends beyond its height and width,
transformers 5.17 to 5.23 place the following text at a different position from vLLM, earlier releases and refvl. Such a
video is compared twice: unchanged, and with refvl's positions passed to transformers. With --write the results are
written to data/measurements/generated_ids.json.
"""

from pathlib import Path

import torch
import typer
from transformers import Qwen2_5_VLForConditionalGeneration

import refvl
from benchmarks.report import PrintedTable, Write, environment, write_measurement
from refvl.paths import DATA
from refvl.study.recording import transformers_inputs

CHECKPOINT = DATA / "checkpoints" / "tiny-qwen2_5_vl"
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
    "a clip of two frames": [{"type": "video", "video": str(CLIP), "num_frames": 2}, text("What color is the circle?")],
    "a clip": [{"type": "video", "video": str(CLIP)}, text("Which way does the circle move?")],
    "a clip and a picture": [
        {"type": "video", "video": str(CLIP)}, image(SCENE), text("What color is the circle in the picture?"),
    ],
}  # fmt: skip


def compare(vlm: refvl.VLM, oracle, content: list[dict], new_tokens: int) -> list[dict]:
    """Generate with both; eos is switched off, so every case compares `new_tokens` ids.

    Return one row with transformers' own positions, and a second one with refvl's if the two differ.
    """
    trace = vlm.trace([{"role": "user", "content": content}], max_new_tokens=new_tokens, eos_token_id=None)
    inputs = transformers_inputs(vlm, trace)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    own = transformers_positions(oracle, inputs)
    given: dict[str, dict] = {"their own": {}}
    if not torch.equal(own, trace.full_positions):
        given["refvl's"] = {"position_ids": trace.full_positions[:, None]}
    rows = []
    for whose, positions in given.items():
        theirs = oracle.generate(**inputs, **positions, **options)[0, len(trace.full_ids) :].tolist()
        row = {"positions": whose, "prompt_tokens": len(trace.full_ids), "equal": theirs == trace.token_ids}
        rows.append(row | {"refvl": trace.token_ids, "transformers": theirs})
    return rows


def transformers_positions(oracle, inputs: dict) -> torch.Tensor:
    """Return (3, L), the positions that the installed release computes for one prompt."""
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    return oracle.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})[0][:, 0]


def run(checkpoint: Path = CHECKPOINT, new_tokens: int = 24, write: Write = False) -> None:
    """Compare generated ids of refvl and transformers from one checkpoint, in float32 on the CPU."""
    vlm = refvl.load(checkpoint, device="cpu", dtype="float32", progress=False)
    oracle = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    print(f"{len(CASES)} prompts, each answered with {new_tokens} tokens by both: under a minute", flush=True)
    columns = {"prompt": "<22", "transformers' positions": "<23", "prompt tokens": ">13"}
    table = PrintedTable(str(checkpoint), columns | {"first ids": "<16", "theirs": "<16", "equal": "<6"})
    rows = []
    for name, content in CASES.items():
        for row in compare(vlm, oracle, content, new_tokens):
            rows.append({"prompt": name} | row)
            first = [" ".join(map(str, row[side][:4])) for side in ("refvl", "transformers")]
            equal = f"all {new_tokens}" if row["equal"] else "no"
            table.add(name, row["positions"], row["prompt_tokens"], *first, equal)
    if write:
        write_measurement("generated_ids", environment("cpu") | {"rows": rows})


if __name__ == "__main__":
    typer.run(run)
