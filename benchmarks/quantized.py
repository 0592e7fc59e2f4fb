"""What rounding leaves of a tiny model's answers: `python -m benchmarks.quantized` (needs the extra `quantized`).

The text model's matrices are held in integers of 8 to 2 bits, a scale for every 32 values (torchao through
transformers' quantisation config); the tower keeps its floats. On a CPU torchao keeps a byte for each, however few of
its bits are used: what is measured below 8 bits is accuracy, not memory. Colour, place and motion of held-out scenes.
With --write the results go to data/measurements/quantized.json.

Groups of 32, not of the usual 128: the shipped models' rows are 128 and 320 values long. So it is with real ones: a row
of `down_proj` in Qwen2.5-VL's tower has 3,420 values (4 * 9 * 5 * 19), which no group of 8, 32 or 128 divides, and
quantisers that do not spare the tower stop there.
"""

from typing import Annotated

import torch
import typer

import refvl
from benchmarks.report import PrintedTable, Write, environment, resolve_device, write_measurement
from data.training.evaluate_tiny import evaluate, interval, share
from data.training.tiny_family import find_family
from refvl.tools.costs import costs

BITS = (None, 8, 6, 5, 4, 3, 2)  # None: float32
GROUP = 32
KINDS = ("color", "place", "motion")
COLUMNS = {
    "bits": ">5",
    "text model": ">10",
    "tower": ">9",
    **dict.fromkeys(KINDS, ">6"),
    "all": ">6",
    "interval": ">16",
}


def load(model: str, bits: int | None) -> refvl.VLM:
    """The shipped model of a family, its text model in integers of `bits`."""
    options = {"device": "cpu", "progress": False}
    if bits is None:
        return refvl.load(find_family(model).folder, **options)
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    layout = TorchAoConfig(quant_type=IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(GROUP)))
    return refvl.load(find_family(model).folder, quantization_config=layout, **options)


def run(
    count: Annotated[int, typer.Option(help="scenes of each kind")] = 200,
    model: Annotated[str, typer.Option(help="a family of data/training")] = "qwen2_5_vl",
    write: Write = False,
) -> None:
    """Accuracy on held-out scenes against the bits of the text model's matrices."""
    device, rows = resolve_device("cpu"), []
    table = PrintedTable(f"{count} scenes of each kind, held out; {GROUP} values share a scale", COLUMNS)
    for bits in BITS:
        vlm = load(model, bits)
        right = {kind: share(evaluate(vlm, kind, count)) for kind in KINDS}
        size, both = costs(vlm)["weights_bytes_of"], sum(right.values()) / len(right)
        rows.append({"bits": bits or 32, "text_bytes": size["language_model"], **right, "all": both})
        low, high = interval(both, count * len(KINDS))
        sizes = f"{size['language_model'] / 1e3:.0f} kB", f"{size['encoder'] / 1e3:.0f} kB"
        table.add(bits or 32, *sizes, *(f"{p:.1%}" for p in (*right.values(), both)), f"{low:.1%} - {high:.1%}")
    if write:
        import torchao

        found = environment(device) | {"torchao": torchao.__version__, "model": find_family(model).folder.name}
        write_measurement("quantized", found | {"n": count, "split": "test", "group": GROUP, "rows": rows})


if __name__ == "__main__":
    typer.run(run)
