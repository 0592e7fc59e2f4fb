"""Compute the costs of one image and of one video in each family at full size: `python -m benchmarks.families`.

Results are counted, not timed: tokens, positions, memory, and the multiplications and additions
of tower and prefill. The media are images of increasing side, and videos of increasing length,
which each family samples by its own rule. Only the media item is counted, not the words around
it. With --write, the result is written to data/measurements/families.json. The operations
divided by a device's operations per second are a lower bound for the time of any run.
"""

import itertools

import numpy as np
import typer
from PIL import Image

from benchmarks.graphs import PEAK
from benchmarks.report import PrintedTable, Write, write_measurement
from refvl.loading import load
from refvl.model import VLM
from refvl.paths import DATA
from refvl.pixels.media import Video
from refvl.pixels.patches import PatchConfig
from refvl.positions import MediaSpan
from refvl.study.costs import (
    encoder_activation_bytes,
    encoder_operations,
    kv_cache_bytes_per_token,
    plan_media,
    prefill_operations,
)

CONFIGS = {
    "Qwen2.5-VL": "Qwen2.5-VL-7B-Instruct", "Qwen3-VL": "Qwen3-VL-8B-Instruct", "GLM-4.1V": "GLM-4.1V-9B-Thinking",
    "MiniCPM-V 4.5": "MiniCPM-V-4_5", "Step3-VL": "Step3",
}  # fmt: skip
SIDES = (112, 224, 448, 672, 896, 1344, 1792, 2240, 2688, 3584)  # px
SECONDS = (2, 5, 10, 20, 40, 80, 160)
CLIP_SIZE = (640, 360)  # px


def load_released(family: str) -> VLM:
    """Build the model at full size, on the meta device."""
    return load(DATA / f"configs/{CONFIGS[family]}.json", weights="random", device="meta", progress=False)


def count(model: VLM, medium) -> dict:
    """Return a media item's costs; `bytes`: key-value cache plus tower activations; `tower`, `prefill`: operations."""
    plan = plan_media(model, medium)
    cache = plan.tokens * kv_cache_bytes_per_token(model.language_model.config, model.encoder.dtype)
    return {
        "patches": plan.patches,
        "tokens": plan.tokens,
        "positions": count_positions(model, medium),
        "cache": cache,
        "bytes": cache + encoder_activation_bytes(model.encoder, plan.patches),
        "tower": encoder_operations(model.encoder, [plan.layout]),
        "prefill": prefill_operations(model.language_model, plan.tokens),
    }


def blank_clip(vlm: VLM, seconds: float, width: int, height: int, source_fps: float = 25.0) -> Video:
    """Return the video that a file of this length and size yields, with black frames that use no memory.

    Raises ValueError if the family accepts no video.
    """
    total = max(1, round(seconds * source_fps))
    indices = vlm.processor.frame_indices(total, source_fps)
    frames = np.broadcast_to(np.zeros(3, np.uint8), (len(indices), height, width, 3))
    return Video(frames, len(indices) / total * source_fps, source_fps, tuple(indices), total, total / source_fps)


def count_positions(vlm: VLM, medium) -> int:
    """Return the number of positions that a decoded item uses, without any text inside the item."""
    config, kind = vlm.processor.video_config, "video" if isinstance(medium, Video) else "image"
    is_scaled = kind == "video" and isinstance(config, PatchConfig)
    second_per_grid = config.temporal_patch_size / medium.fps if is_scaled else 1.0
    merged = vlm.processor.media_tokens(kind, vlm.processor.layout_of(medium), second_per_grid)
    starts = itertools.accumulate((t * h * w for t, h, w in merged.runs), initial=0)
    spans = [MediaSpan(start, *run, merged.t_factor) for start, run in zip(starts, merged.runs, strict=False)]
    return int(vlm.language_model.positions(range(merged.num_tokens), spans).max()) + 1


def run(write: Write = False) -> None:
    """Print costs per family, by size of an image and length of a video."""
    columns = {"family": "<14", "medium": "<20", "tokens": ">7", "tower": ">9", "prefill": ">9"}
    rows, table = [], PrintedTable("10^12 operations", columns)
    for family in CONFIGS:
        model = load_released(family)
        media = {("image", side): Image.new("RGB", (side, side)) for side in SIDES}
        if model.processor.video_config is not None:
            media |= {("video", seconds): blank_clip(model, seconds, *CLIP_SIZE) for seconds in SECONDS}
        for (kind, size), medium in media.items():
            costs = count(model, medium)
            rows.append({"family": family, "kind": kind, "size": size} | costs)
            what = f"{kind} of {size} {'px' if kind == 'image' else 's'}"
            work = (f"{costs[part] / 1e12:.2f}" for part in ("tower", "prefill"))
            table.add(family, what, costs["tokens"], *work)
    if write:
        write_measurement("families", {"configs": CONFIGS, "clip_size": CLIP_SIZE, "peak": PEAK, "rows": rows})


if __name__ == "__main__":
    typer.run(run)
