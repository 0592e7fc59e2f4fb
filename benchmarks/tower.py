"""refvl's Qwen2.5-VL and GLM-4.1V towers against transformers', same weights, same run: `python -m benchmarks.tower`.

Calls alternate between the two, so that a busy machine slows both; what counts is the ratio. Outputs are compared
before anything is timed. With --write the results go to data/measurements/tower_<cpu|cuda>.json, with device, versions
and date.
"""

import statistics
import time
from dataclasses import asdict, replace

import torch
import typer
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig as HFGlm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from benchmarks.report import (
    Device,
    PrintedTable,
    Repeats,
    Write,
    announce,
    environment,
    resolve_device,
    write_measurement,
)
from refvl.encoders import Glm4vVisionConfig, Glm4vVisionTransformer, Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer

CLASSES: dict[type, tuple] = {  # config -> transformers' config and tower, refvl's tower
    Qwen2_5_VisionConfig: (
        Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VisionTransformer,
    ),
    Glm4vVisionConfig: (HFGlm4vVisionConfig, Glm4vVisionModel, Glm4vVisionTransformer),
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
INPUTS = {  # grids of 14 px patches: pictures, a clip, a batch
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
    """The same random tower twice: transformers' (SDPA attention) and refvl's."""
    their_config, their_tower, our_tower = CLASSES[type(config)]
    values = {name: value for name, value in asdict(config).items() if name != "norm_eps"}
    theirs = their_tower._from_config(their_config(**values), attn_implementation="sdpa")
    ours = our_tower(config)
    ours.load_weights(theirs.state_dict().items())
    return theirs.to(device, dtype).eval(), ours.to(device, dtype).eval()


def seconds_of(call, device: str) -> float:
    """Wall seconds of one call, waiting for the device before and after."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(theirs, ours, grid: list, repeats: int, device: str, dtype: torch.dtype) -> dict:
    """Median seconds of both over `repeats` alternating calls with new random pixels, planning included."""
    patches = sum(t * h * w for t, h, w in grid)
    frames = [(1, h, w) for t, h, w in grid for _ in range(t)]  # how transformers' model hands clips to GLM's tower
    is_glm = isinstance(ours, Glm4vVisionTransformer)
    grid_tensor = torch.tensor(frames if is_glm else grid, device=device)

    def pixels():
        return torch.randn(patches, ours.config.patch_values, device=device, dtype=dtype)

    x = pixels()
    reference, output = theirs(x, grid_tensor).pooler_output.float(), ours(x, grid).float()
    difference = ((reference - output).norm() / reference.norm()).item()
    times: dict[str, list[float]] = {"transformers": [], "refvl": []}
    for i in range(WARM_UP + repeats):
        x = pixels()
        pair = (
            seconds_of(lambda x=x: theirs(x, grid_tensor), device),
            seconds_of(lambda x=x: ours(x, grid), device),
        )
        if i >= WARM_UP:
            for samples, value in zip(times.values(), pair, strict=True):
                samples.append(value)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    ratio = medians["transformers"] / medians["refvl"]
    return {"patches": patches, **{f"{k}_ms": v * 1e3 for k, v in medians.items()}, "ratio": ratio} | {
        "relative_difference": difference
    }


def run(device: Device = "auto", repeats: Repeats = 15, write: Write = False) -> None:
    """refvl's vision tower against transformers', same weights, same run."""
    device = resolve_device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = "; ".join(INPUTS[device])
    announce(
        f"tower_{device}", f"{'; '.join(TOWERS[device])}: each on {inputs}; timed calls: {repeats}", repeats + WARM_UP
    )
    rows = []
    columns = {"tower": "<35", "input": "<25", "patches": ">7", "transformers ms": ">15", "refvl ms": ">9"}
    title = f"vision tower on {device}, {str(dtype).removeprefix('torch.')}"
    table = PrintedTable(title, columns | {"ratio": ">6"})
    for tower, config in TOWERS[device].items():
        theirs, ours = build_pair(config, device, dtype)
        for label, grid in INPUTS[device].items():
            row = measure(theirs, ours, grid, repeats, device, dtype)
            rows.append({"tower": tower, "input": label, "grid_thw": grid} | row)
            milliseconds = (f"{row[name]:.2f}" for name in ("transformers_ms", "refvl_ms", "ratio"))
            table.add(tower, label, row["patches"], *milliseconds)
    if write:
        write_measurement(f"tower_{device}", environment(device) | {"repeats": repeats, "rows": rows})


if __name__ == "__main__":
    typer.run(run)
