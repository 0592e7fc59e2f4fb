"""Slices and crops: how MiniCPM-V and Step3-VL cut one photo of any size, and the queries'
attention to it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from refvl.encoders.resampler import attention_weights
from refvl.model import VLM
from refvl.pixels.crops import CropConfig, count_prompt_tokens, plan_crops
from refvl.pixels.media import load_image
from refvl.pixels.slices import SliceConfig, patchify_slices, plan_slices
from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.minicpmv import plot_slices
from refvl.viz.step3_vl import plot_crops

SHAPES = ((1, 2), (1, 1), (3, 2), (2, 1), (3, 1))  # width : height
STEP, LONGEST = 8, 4096  # px: the step and the end of the sizes that are tried


class SlicesExplorer(Explorer):
    """The explorer of a photo at each size where the way MiniCPM-V or Step3-VL cuts it changes.

    Items are the queries of `model`, a MiniCPM-V whose slices are smaller than those of `slices` by
    a whole factor. Its queries read the photo, scaled down by that factor and cut the same way. To
    answer `question`, the model cuts at most as many slices as its own config allows. The items
    after the queries are MiniCPM-V's overview and slices, and Step3-VL's overview and crops.
    """

    _esm = module("slices")

    def __init__(self, image, slices: SliceConfig, crops: CropConfig, model: VLM | None, question: str):
        self.image, self.slices, self.crops = load_image(image), slices, crops
        self.model, self.question = model, question
        sizes = distinct_sizes(slices, crops)
        rows = {(f"{a} : {b}", max(size)): self.plan(size) for (a, b), found in sizes.items() for size in found}
        if model is not None:
            for row in rows.values():
                row |= self.read(tuple(row["size"]))
        controls = [
            Control("shape", "width : height", [f"{a} : {b}" for a, b in sizes], kind="menu"),
            Control("side", "longer side, px", sorted({side for _, side in rows})),
        ]
        shared = {
            "photo": photo(self.image), "question": question if model else "", "queries": self.queries,
            "overview": crops.image_size, "most": model.processor.image_config.max_slice_nums if model else 0,
        }  # fmt: skip
        start = min(rows, key=lambda s: (s[0] != "3 : 2", abs(s[1] - 2136)))
        super().__init__(controls, rows, shared=shared, start=start)

    @property
    def queries(self) -> int:
        """The number of tokens per slice of `model`; 0 without a model."""
        return self.model.encoder.config.query_num if self.model else 0

    def plan(self, size: tuple[int, int], *, query_num: int = 64) -> dict:
        """Return both families' cuts of a photo of `size` (width, height), and the photo's tokens in both prompts."""
        slices, crops = plan_slices(*size, self.slices), plan_crops(*size, self.crops)
        columns, rows = slices.grid or (0, 0)
        of_crop, of_overview = self.crops.crop_tokens, self.crops.image_tokens
        tokens = crops.layout.crops * of_crop + of_overview
        in_prompt = count_prompt_tokens(crops.layout, crop_tokens=of_crop, image_tokens=of_overview)
        return {
            "size": size,
            "slices": {
                "grid": [columns, rows], "cell": slices.cell or [0, 0], "overview": slices.overview,
                "tokens": (1 + columns * rows) * query_num, "of_slice": query_num,
            },
            "crops": {
                "canvas": crops.canvas, "window": crops.window, "grid": crops.layout, "tokens": tokens,
                "marks": in_prompt - tokens, "of_crop": of_crop, "of_overview": of_overview,
            },
        }  # fmt: skip

    def read(self, size: tuple[int, int]) -> dict:
        """Return each query's attention to every patch of the overview and the slices,
        and the model's answer.

        The heat, (slices, queries, h, w), is the mean over heads in 255 steps of the largest value.
        """
        assert self.model is not None
        config = self.model.processor.image_config
        scale = self.slices.scale_resolution // config.scale_resolution
        small = fit(self.image, size).resize([side // scale for side in size], Image.Resampling.BICUBIC)
        alike = replace(config, max_slice_nums=self.slices.max_slice_nums)
        heat = query_heat(self.model.encoder, *patchify_slices(small, alike))
        return {
            "overview_heat": quantised(heat[:1]),
            "slice_heat": quantised(heat[1:]) if len(heat) > 1 else None,
            "answer": self.model.chat(self.question, images=[small], max_new_tokens=16),
        }

    def figure(self) -> Figure:
        row = self.row(self.index)
        stretched = fit(self.image, tuple(row["size"])).resize(row["size"])
        figure, axes = plt.subplots(2, 2, figsize=(6.4, 4.8), layout="constrained", width_ratios=(2, 1))
        plot_slices(stretched, self.slices, ax=axes[0])
        tokens = {"crop_tokens": self.crops.crop_tokens, "image_tokens": self.crops.image_tokens}
        plot_crops(stretched, self.crops, **tokens, ax=axes[1])
        for ax in axes.flat:
            ax.title.set_size(7)
            ax.xaxis.label.set_size(7)
        return figure

    def describe(self) -> str:
        row = self.row(self.index)
        (columns, rows), crops, (width, height) = row["slices"]["grid"], row["crops"]["grid"], row["size"]
        sliced = f"{columns} x {rows} slices" if columns else "no slices"
        cropped = f"{crops[1]} x {crops[0]} crops" if crops[0] else "no crops"
        said = f"; a small MiniCPM-V answers {row['answer']!r}" if "answer" in row else ""
        return (
            f"From a photo of {width} x {height} px, MiniCPM-V makes {sliced} ({row['slices']['tokens']} tokens), and "
            f"Step3-VL makes {cropped} ({row['crops']['tokens']} tokens){said}."
        )


def distinct_sizes(slices: SliceConfig, crops: CropConfig) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return, for each of `SHAPES`, the sizes (width, height)
    from which at least one family cuts the photo differently.
    """
    sizes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shape in SHAPES:
        cut, unit = None, STEP * max(shape)
        for k in range(max(1, 64 // unit), LONGEST // unit + 1):  # from 64 px
            size = (STEP * shape[0] * k, STEP * shape[1] * k)
            pieces = plan_slices(*size, slices).grid, plan_crops(*size, crops).layout
            if pieces != cut:
                sizes.setdefault(shape, []).append(size)
            cut = pieces
    return sizes


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return the largest centred crop of the image with the aspect ratio of `size`."""
    width, height = size
    scale = min(image.width / width, image.height / height)
    w, h = round(scale * width), round(scale * height)
    left, top = (image.width - w) // 2, (image.height - h) // 2
    return image.crop((left, top, left + w, top + h))


@torch.inference_mode()
def query_heat(encoder: Any, rows: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return the queries' attention per slice, (Q, h, w): the mean over heads,
    which sums to 1 for each query.
    """
    metadata = encoder.plan([sizes])
    weights = attention_weights(encoder.resampler, encoder.vpm.encode(rows, metadata.vision), metadata.resampler)
    return [w.mean(0).view(-1, *size).float().numpy(force=True) for w, size in zip(weights, sizes, strict=True)]


def quantised(heat: Sequence[np.ndarray]) -> np.ndarray:
    """Quantise the shares of one state to 255 steps of the largest share."""
    stacked = np.stack(heat)
    return np.round(255 * stacked / stacked.max()).astype(np.uint8)
