"""Costs: the number of operations of Qwen2.5-VL's tower, with windowed and with full attention."""

import itertools
from collections.abc import Sequence
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from PIL import ImageOps

from refvl.encoders import Qwen2_5_VisionConfig
from refvl.pixels.media import load_image
from refvl.positions import get_window_index
from refvl.viz.explorers.base import Control, Explorer, module, photo
from refvl.viz.style import TOKEN_COLORS

SIDES = (672, 896, 1344, 1792, 2240, 2688, 3584)  # px of a square image
WINDOWS = (112, 224, 448)  # px
START = (1344, 112)


class CostsExplorer(Explorer):
    """The explorer of costs.

    Operations are multiplications plus additions; items are windows, in reading order.
    """

    _esm = module("costs")

    def __init__(self, image, config: Qwen2_5_VisionConfig):
        self.config, self.image = config, ImageOps.fit(load_image(image).convert("RGB"), (400, 400))
        counts = sorted({2**i for i in range(config.depth.bit_length()) if 2**i < config.depth} | {0, config.depth})
        released = min(counts, key=lambda count: abs(count - len(config.fullatt_block_indexes)))
        rows = {
            (side, full, window): self._row(side, full, window)
            for side, full, window in itertools.product(SIDES, counts, WINDOWS)
            if full < config.depth or window == WINDOWS[0]  # the window size has no effect if no block uses windows
        }
        controls = [
            Control("side", "image, px", SIDES),
            Control("full", "blocks with full attention", counts),
            Control("window", "window, px", WINDOWS, kind="menu"),
        ]
        shared = {"photo": photo(self.image), "depth": config.depth, "patch": config.patch_size}
        super().__init__(controls, rows, shared=shared, start=(START[0], released, START[1]))
        across = START[0] // START[1]
        self.selected = (across // 3) * across + across // 2

    def _row(self, side: int, full: int, window: int) -> dict:
        """Return a state's data. curves (3, sides): operations with full attention in none, `full`,
        and all blocks.
        """
        counted = {s: count_operations(self.config, s, window) for s in SIDES}
        rest, linear, windowed, whole = counted[side]
        return {
            "patches": (side // self.config.patch_size) ** 2, "rest": rest, "linear": linear,
            "windowed": windowed, "whole": whole, "total": total(counted[side], full, self.config.depth),
            "curves": np.array([
                [total(counted[s], number, self.config.depth) for s in SIDES] for number in (0, full, self.config.depth)
            ], dtype=float),
        }  # fmt: skip

    def figure(self) -> Figure:
        row, options = self.row(self.index), self.options
        figure, ax = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
        some = f"full attention in {options['full']} of {self.config.depth}"
        names = ("windows in every block", some, "full attention in every block")
        colors = (TOKEN_COLORS["image"], "black", TOKEN_COLORS["video"])
        for name, curve, color in zip(names, row["curves"], colors, strict=True):
            ax.plot(SIDES, curve / 1e12, "o-", color=color, label=name)
        ax.axvline(options["side"], color="0.5", ls="--", lw=1)
        ax.set(xscale="log", yscale="log", xlabel="side of the image (px)", ylabel="10¹² operations")
        ax.legend(fontsize=8)
        return figure

    def describe(self) -> str:
        row, options = self.row(self.index), self.options
        return (
            f"A tower with full attention in {options['full']} of {self.config.depth} blocks and windows of "
            f"{options['window']} px in the others needs {row['total'] / 1e12:.1f} trillion operations for a square "
            f"image of {options['side']} px. With full attention in every block, it needs "
            f"{row['curves'][2][SIDES.index(options['side'])] / 1e12:.1f} trillion."
        )


@cache  # states share sizes and windows
def count_operations(config: Qwen2_5_VisionConfig, side: int, window: int) -> tuple[int, int, int, int]:
    """Return four counts of operations: outside the blocks, and a block's matrices,
    windowed and full attention.
    """
    grid = (1, side // config.patch_size, side // config.patch_size)
    count, width = grid[1] * grid[2], config.hidden_size
    _, borders = get_window_index([grid], window_size=window, patch_size=config.patch_size)
    merged = config.spatial_merge_size**2 * width
    rest = 2 * count * config.patch_values * width + 2 * (count * width // merged) * merged * (
        merged + config.out_hidden_size
    )
    linear = 2 * count * width * (4 * width + 3 * config.intermediate_size)
    return rest, linear, pairs(borders.diff().tolist()) * 4 * width, pairs([count]) * 4 * width


def pairs(lengths: Sequence[int]) -> int:
    """Return the number of pairs of patches that attend to each other."""
    return sum(length**2 for length in lengths)


def total(counted: tuple[int, int, int, int], full: int, depth: int) -> int:
    """Return the operations of a tower with full attention in `full` blocks and windows in the
    others.
    """
    rest, linear, windowed, whole = counted
    return rest + depth * linear + (depth - full) * windowed + full * whole
