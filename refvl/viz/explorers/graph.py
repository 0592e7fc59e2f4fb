"""CUDA graphs: the recorded operations of a tower, the buffers they read,
and the effect of a stale buffer.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from refvl.graphs import EncoderGraphManager, TraceGraph
from refvl.graphs.manager import CapturedBudget
from refvl.graphs.recorder import Operation
from refvl.model import VLM
from refvl.study.report import Trace
from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.explorers.stale import StaleReplay, replay_stale
from refvl.viz.graphs import kind_of_operation, plot_stale_errors

NONE = "none"
START = "window_index"  # the initial stale buffer: if it is stale, tokens are in the wrong order
LEAST, MOST = 1e-3, 10.0  # the relative errors of the lowest and the highest bar


class GraphExplorer(Explorer):
    """The explorer of a Qwen2.5-VL graph that is replayed for one image and then for another.

    Items are the recorded operations, in order. The embeddings of every stale replay are passed to
    the language model, which answers the question about `image`.
    """

    _esm = module("graph")

    def __init__(self, model: VLM, before, image, question: str):
        self.model, self.first = model, model.trace(question, images=[before], max_new_tokens=1)
        self.run = model.trace(question, images=[image])
        largest = max(len(embeds) for embeds in (*self.first.embeds, *self.run.embeds))
        budget = 2 ** (largest - 1).bit_length()
        encoder: Any = model.encoder
        manager = EncoderGraphManager(encoder, budgets=[budget], max_frames=1, backend="trace", progress=False)
        manager.capture()
        self.captured = manager.captured["", budget]
        replays = replay_stale(self.captured, _batch(self.first), _batch(self.run))
        differing = [name for name, replay in replays.items() if name and any(replay.errors)]
        rows = [self._row(replays[name]) for name in ("", *differing)]
        photos = {
            "before": photo(self.first.media[0], side=160),
            "image": photo(self.run.media[0], side=160),
        }
        said = {"question": question, "right": rows[0]["answer"], "sure": rows[0]["probability"]}
        constant = [name for name in self.captured.buffers if name not in differing]  # the same for every image
        shared = said | {"photos": photos} | describe_recording(self.captured, encoder, [*differing, *constant])
        controls = [Control("stale", "buffer not refilled", [NONE, *differing])]
        stale = START if START in differing else (*differing, NONE)[0]
        super().__init__(controls, rows, shared=shared, start=(stale,))
        if stale != NONE:
            self.selected = int(np.argmax(shared["reads"][:, differing.index(stale)]))

    def _row(self, replay: StaleReplay) -> dict:
        """Return the error level of each operation, the (h, w) relative errors of the tokens,
        and the answer.
        """
        [right], (_, h, w) = self.run.embeds, self.run.patches[0].media_tokens.thw
        embeds = replay.outputs[: h * w]
        answer, probability = _answer(self.model, self.run, embeds)
        return {
            "operations": _levels(replay.errors),
            "tokens": ((embeds - right).norm(dim=1) / right.norm(dim=1)).view(h, w),
            "answer": answer,
            "probability": round(probability, 3),
        }

    def figure(self) -> Figure:
        figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", width_ratios=(3, 1))
        plot_stale_errors(self.row(self.index), self.shared["groups"], title=self.describe(), ax=axes)
        return figure

    def describe(self) -> str:
        stale, row, right = self.options["stale"], self.row(self.index), self.row(0)
        what = "With every buffer refilled" if stale == NONE else f"If {stale} is not refilled"
        asked = f"{what}, the model answers {row['answer']!r} to {self.shared['question']!r}"
        return f"{asked} (correct: {right['answer']!r})." if row["answer"] != right["answer"] else f"{asked}."


def describe_recording(captured: CapturedBudget, encoder: torch.nn.Module, names: Sequence[str]) -> dict:
    """Return the named buffers and, for every operation, its kind,
    its result's shape and the buffers that it reads.
    """
    assert isinstance(captured.graph, TraceGraph)
    operations, buffers = (
        captured.graph.operations,
        {name: captured.buffers[name] for name in names},
    )
    block = encoder.get_submodule("blocks.0")
    parts = {*map(id, block.modules())}
    inside = [operation for operation in operations if id(operation.module) in parts]
    return {
        "buffers": [{"name": name, "shape": list(buffer.shape)} for name, buffer in buffers.items()],
        "groups": group_operations(operations, encoder),
        "parts": group_operations(inside, block),
        "kinds": [kind_of_operation(operation) for operation in operations],
        "shapes": [" x ".join(map(str, operation.outputs[0].shape)) or "1" for operation in operations],
        "reads": np.array([[operation.reads(buffer) for buffer in buffers.values()] for operation in operations]),
    }


def group_operations(operations: Sequence[Operation], encoder: torch.nn.Module) -> list[dict]:
    """Return groups of consecutive operations in one part of a tower or a block: its name and the
    number of operations; `""` is the tower or the block itself.
    """
    names = {id(part): name for name, part in encoder.named_modules()}
    parts = [names[id(operation.module)].split(".") for operation in operations]
    blocks = [".".join(part[: 1 + (part[0] == "blocks")]) for part in parts]
    return [{"name": name, "count": len(list(group))} for name, group in itertools.groupby(blocks)]


def _batch(run: Trace) -> tuple[Tensor, object]:
    """Return (patch rows, plan) of a run on one image."""
    return run.patches[0].pixel_values, run.metadata[0]


def _levels(errors: Sequence[float]) -> np.ndarray:
    """Return errors as logarithmic levels: 0 for no error, 1 up to LEAST, 255 from MOST on."""
    values = np.nan_to_num(np.array(errors), nan=MOST, posinf=MOST)
    steps = 1 + 254 * np.log(values.clip(LEAST, MOST) / LEAST) / np.log(MOST / LEAST)
    return np.where(values > 0, steps, 0).astype(np.uint8)


def _answer(model: VLM, run: Trace, embeds: Tensor) -> tuple[str, float]:
    """Return the model's answer with these embeddings of the image,
    and the probability of its first token.
    """
    ids = run.full_ids[None]
    output: Any = model.generate(
        ids, image_embeds=[embeds], image_grid_thw=run.layouts, max_new_tokens=16,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    answer = model.processor.text(output.sequences[0, ids.shape[1] :].tolist())
    return answer, float(output.logits[0][0].softmax(-1).max())
