"""Compare refvl's Qwen2.5-VL and GLM-4.1V towers with transformers', on the same weights in the same run: `python -m
benchmarks.tower`.

Calls alternate, so a busy machine slows all of them; the ratios are the result. Outputs are compared
before anything is timed. Linear layers on a CPU use the kernel that `refvl.load` chooses there. Every call includes
planning, as in transformers. Planning and attention in refvl are also measured alone. With --write, the results are
written to data/measurements/tower_<cpu|cuda>.json, with device, versions and date.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from unittest.mock import patch

import torch
import typer
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig as HFGlm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import refvl
from benchmarks.report import (
    Device,
    PrintedTable,
    Repeats,
    Write,
    announce,
    check_operations,
    environment,
    resolve_device,
    write_measurement,
)
from refvl.attention import Segments
from refvl.encoders import Glm4vVisionConfig, Glm4vVisionTransformer, Qwen2_5_VisionConfig
from refvl.serving.linear import choose_linear
from refvl.study.costs import encoder_operations

CLASSES: dict[type, tuple] = {  # config -> transformers' config and tower, model_type
    Qwen2_5_VisionConfig: (
        Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel, "qwen2_5_vl",
    ),
    Glm4vVisionConfig: (HFGlm4vVisionConfig, Glm4vVisionModel, "glm4v"),
}  # fmt: skip
TWO_BLOCKS = {
    "Qwen2.5-VL": replace(Qwen2_5_VisionConfig(), depth=2, fullatt_block_indexes=(1,)),
    "GLM-4.1V": replace(Glm4vVisionConfig(), depth=2),
}
TOWERS = {
    "cpu": {
        "Qwen2.5-VL, tiny": Qwen2_5_VisionConfig.tiny(),
        "GLM-4.1V, tiny": Glm4vVisionConfig.tiny(),
        **{f"{name}, full width, two blocks": config for name, config in TWO_BLOCKS.items()},
    },
    "cuda": {"Qwen2.5-VL-7B": Qwen2_5_VisionConfig(), "GLM-4.1V-9B": Glm4vVisionConfig()},
}
INPUTS = {  # grids of 14 px patches: images, a video, a batch
    "cpu": {
        "84 px": [(1, 6, 6)],
        "224 px": [(1, 16, 16)],
        "504 px": [(1, 36, 36)],
        "clip of 8 steps, 168 px": [(8, 12, 12)],
    },
    "cuda": {
        "224 px": [(1, 16, 16)],
        "504 px": [(1, 36, 36)],
        "1036 px": [(1, 74, 74)],
        "8 pictures of 504 px": [(1, 36, 36)] * 8,
        "clip of 16 steps, 252 px": [(16, 18, 18)],
    },
}

WARM_UP = 2  # calls


def build_pair(config, device: str, dtype: torch.dtype):
    """Build the same random tower twice: transformers' (SDPA attention) and refvl's."""
    their_config, their_tower, model_type = CLASSES[type(config)]
    theirs = their_tower._from_config(their_config(**their_values(config)), attn_implementation="sdpa")
    whole = {"model_type": model_type, "vision_config": asdict(config)}
    ours = refvl.load(whole, weights="random", text=False, device=device, dtype=dtype, progress=False).encoder
    ours.load_weights(theirs.state_dict().items())
    return theirs.to(device, dtype).eval(), ours


def their_values(config) -> dict:
    """Return the sizes in the vision config, under the names that config.json uses."""
    return {name: value for name, value in asdict(config).items() if name != "norm_eps"}


def seconds_of(call, device: str) -> float:
    """Return the wall-clock seconds of one call; the device is synchronised before and after it."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def seconds_of_attention(call, device: str) -> float:
    """Return the seconds that a call spends in refvl's attention."""
    attend, seconds = Segments.attend, list[float]()

    def timed(*args):
        out = []
        seconds.append(seconds_of(lambda: out.append(attend(*args)), device))
        return out[0]

    with patch.object(Segments, "attend", timed):
        call()
    return sum(seconds)


@torch.inference_mode()
def measure(theirs, ours, grid: list, repeats: int, device: str, dtype: torch.dtype) -> dict:
    """Return median milliseconds over `repeats` alternating calls with new random pixels, and their ratio."""
    patches = sum(t * h * w for t, h, w in grid)
    frames = [(1, h, w) for t, h, w in grid for _ in range(t)]  # as transformers passes videos to GLM's tower
    is_glm = isinstance(ours, Glm4vVisionTransformer)
    grid_tensor = torch.tensor(frames if is_glm else grid, device=device)

    def pixels():
        return torch.randn(patches, ours.config.patch_values, device=device, dtype=dtype)

    ways: dict[str, Callable] = {
        "transformers": lambda x: theirs(x, grid_tensor).pooler_output, "refvl": lambda x: ours(x, grid),
    }  # fmt: skip
    x, operations = pixels(), encoder_operations(ours, grid)
    for name, way in ways.items():
        check_operations(f"{name} on {grid}", partial(way, x), operations)
    output, want = (ways[name](x).float() for name in ("refvl", "transformers"))
    difference = ((want - output).norm() / want.norm()).item()
    times: dict[str, list[float]] = {name: [] for name in [*ways, "plan", "attention"]}
    for i in range(WARM_UP + repeats):
        x = pixels()
        seconds = {name: seconds_of(lambda x=x, way=way: way(x), device) for name, way in ways.items()}
        seconds["plan"] = seconds_of(lambda: ours.plan(grid), device)
        seconds["attention"] = seconds_of_attention(lambda x=x: ours(x, grid), device)
        for name, value in seconds.items() if i >= WARM_UP else ():
            times[name].append(value)
    medians = {name: statistics.median(samples) * 1e3 for name, samples in times.items()}
    row = {"patches": patches} | {f"{name}_ms": value for name, value in medians.items()}
    return row | {"ratio": medians["transformers"] / medians["refvl"], "relative_difference": difference}


def run(device: Device = "auto", repeats: Repeats = 15, write: Write = False) -> None:
    """Compare refvl's vision tower with transformers', on the same weights in the same run."""
    device = resolve_device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = "; ".join(INPUTS[device])
    announce(
        f"tower_{device}", f"{'; '.join(TOWERS[device])}: each on {inputs}; timed calls: {repeats}", repeats + WARM_UP
    )
    shown = ["transformers_ms", "refvl_ms", "attention_ms", "plan_ms", "ratio"]
    columns = {"tower": "<35", "input": "<25", "patches": ">7"} | {name.replace("_", " "): ">15" for name in shown}
    about = environment(device) | {"linear": choose_linear("auto", torch.device(device), dtype), "repeats": repeats}
    rows, table = [], PrintedTable(f"vision tower on {device}, {str(dtype).removeprefix('torch.')}", columns)
    for tower, config in TOWERS[device].items():
        theirs, ours = build_pair(config, device, dtype)
        for label, grid in INPUTS[device].items():
            row = measure(theirs, ours, grid, repeats, device, dtype)
            rows.append({"tower": tower, "input": label, "grid_thw": grid} | row)
            table.add(tower, label, row["patches"], *(f"{row[name]:.2f}" for name in shown))
    if write:
        write_measurement(f"tower_{device}", about | {"rows": rows})


if __name__ == "__main__":
    typer.run(run)
