"""Measure the accuracy of quantised tiny models: `python -m benchmarks.quantized` (needs the extra `quantized`).

The text model's matrices are stored as integers of 8 to 2 bits, with a scale for every 32 values (torchao, through
transformers' quantisation config); the tower is not quantised. On a CPU, torchao stores each integer in a whole byte,
so below 8 bits this measures accuracy and not memory. Every shipped model answers questions about held-out scenes or
pages, whichever it was trained on; every bit width gets the same questions. In Step3's text model, the experts are not
linear layers and are not quantised. With --write the results are written to data/measurements/quantized.json.

Groups contain 32 values and not the usual 128, because the rows of the shipped models have 128 and 320 values. Real
models have the same
problem: a row of `down_proj` in Qwen2.5-VL's tower has 3,420 values (4 * 9 * 5 * 19), which no group of 8, 32 or 128
divides, and quantisers that do not skip the tower fail there.
"""

from typing import Annotated

import torch
import typer
from tqdm import tqdm

import refvl
from benchmarks.report import PrintedTable, Write, environment, resolve_device, write_measurement
from data.training import evaluate_step3, pages
from data.training.evaluate_tiny import interval, requests_for
from data.training.tiny_family import TinyFamily, family_names, find_family
from data.training.tiny_step3 import FAMILY as STEP3
from refvl.study.costs import costs

BITS = (None, 8, 6, 5, 4, 3, 2)  # None: float32
GROUP, BATCH = 32, 50
OPTIONS = {"device": "cpu", "dtype": "float32", "progress": False}


def load(family: TinyFamily, bits: int | None) -> refvl.VLM:
    """Load the shipped model of a family, with the text model's matrices as integers of `bits` bits."""
    if bits is None:
        return refvl.load(family.folder, **OPTIONS)
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    layout = TorchAoConfig(quant_type=IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(GROUP)))
    return refvl.load(family.folder, quantization_config=layout, **OPTIONS)


def questions(family: TinyFamily, count: int) -> list[tuple[str, str, dict]]:
    """Return (kind, answer, arguments of `chat`) of held-out questions, `count` of each kind for this family."""
    if family is STEP3:
        found = [(kind, asked) for kind in pages.PHRASES for asked in evaluate_step3.requests_for(kind, count)]
        return [(kind, question.answer, arguments) for kind, (question, arguments) in found]
    found = [(kind, asked) for kind in family.kinds for asked in requests_for(kind, count)]
    return [(kind, asked.question.answer, asked.arguments) for kind, asked in found]


def measure(family: TinyFamily, count: int) -> list[dict]:
    """Return a row for each of `BITS`. All get the same prompts; tower and embeddings stay in floating point."""
    models, asked = {bits: load(family, bits) for bits in BITS}, questions(family, count)
    right: dict[int | None, dict[str, list[bool]]] = {bits: {kind: [] for kind, _, _ in asked} for bits in BITS}
    for start in tqdm(range(0, len(asked), BATCH), desc=family.folder.name, leave=False):
        part = asked[start : start + BATCH]
        ready = [models[None].trace(**arguments, max_new_tokens=1) for _, _, arguments in part]
        for bits, model in models.items():
            answers = model.answers(ready, max_new_tokens=32)
            for (kind, answer, _), said in zip(part, answers, strict=True):
                right[bits][kind].append(said == answer)
    rows = []
    for bits, model in models.items():
        shares = {kind: sum(found) / count for kind, found in right[bits].items()}
        size, both = costs(model)["weights_bytes_of"], sum(shares.values()) / len(shares)
        row = {"bits": bits or 32, "text_bytes": size["language_model"], "tower_bytes": size["encoder"]}
        rows.append(row | {"right": shares, "all": both, "interval": interval(both, len(asked))})
    return rows


def run(
    count: Annotated[int, typer.Option(help="questions of each kind")] = 150,
    write: Write = False,
) -> None:
    """Measure accuracy on held-out questions at each bit width of the text model's matrices."""
    try:
        import torchao
    except ImportError as error:
        raise ImportError("quantized: torchao is missing; install it with pip install -e '.[quantized]'") from error
    device, models = resolve_device("cpu"), {}
    for family in [*map(find_family, family_names()), STEP3]:
        rows = models[family.folder.name] = measure(family, count)
        kinds = dict.fromkeys(rows[0]["right"], ">7")
        columns = {"bits": ">4", "text model": ">10", "tower": ">8"} | kinds | {"all": ">7", "95 % interval": ">15"}
        table = PrintedTable(f"{family.folder.name}, {count} questions of each kind", columns)
        for row in rows:
            sizes = (f"{row[part] / 1e3:.0f} kB" for part in ("text_bytes", "tower_bytes"))
            shares = (f"{share:.1%}" for share in (*row["right"].values(), row["all"]))
            table.add(row["bits"], *sizes, *shares, "{:.1%} - {:.1%}".format(*row["interval"]))
    if write:
        found = environment(device) | {"torchao": torchao.__version__, "n": count, "split": "test", "group": GROUP}
        write_measurement("quantized", found | {"models": models})


if __name__ == "__main__":
    typer.run(run)
