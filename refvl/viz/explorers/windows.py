"""Patches and windows: the patches of an image, their windows, the permutation,
and the rotary angles of the patches.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from refvl.checks import Grid
from refvl.pixels.media import load_image
from refvl.pixels.patches import PatchConfig, plan_grid
from refvl.positions import get_window_index, merge_block_coordinates, vision_rotary_cos_sin
from refvl.viz.explorers.base import Control, Explorer, module, photo, words
from refvl.viz.patches import plot_patches, with_token_budget
from refvl.viz.windows import plot_attention_segments, plot_windows

WHOLE = 2**20  # px; large enough to hold any image in one window
HEAD_DIM = 80  # as in the released tower: rows rotate 20 pairs, and columns rotate 20 pairs


class WindowsExplorer(Explorer):
    """Patches, merge blocks and windows of images, at every grid of a budget up to `max_tokens`.

    Items are patches, numbered like the rows of the tower's input. Each budget is the smallest that
    gives its grid.
    """

    _esm = module("windows")

    def __init__(
        self, images: Mapping[str, object], config: PatchConfig, *, max_tokens: int, window_sizes: Sequence[int]
    ):
        self.images = {name: load_image(image) for name, image in images.items()}
        self.config, self.windowed = config, bool(window_sizes)
        if not self.windowed:
            self.__dict__.update(words("resize"))
        found = {
            (name, budget, size): row | {"photo": number}
            for number, (name, image) in enumerate(self.images.items())
            for budget, grid in distinct_grids(image, config, max_tokens).items()
            for size, row in distinct_windows(grid, config, window_sizes or (WHOLE,)).items()
        }
        budgets, sizes = (sorted({state[i] for state in found}) for i in (1, 2))
        controls = [
            Control("photo", "image", list(images), kind="menu"),
            Control("budget", "max tokens", budgets),
            Control("window", "window, px", sizes),
        ][: 2 + self.windowed]
        longest = max(max(row["grid"]) for row in found.values())
        cos, sin = vision_rotary_cos_sin([(1, longest, 1)], head_dim=HEAD_DIM, spatial_merge_size=1)  # one column
        shared = {
            "windowed": self.windowed, "photos": [photo(image) for image in self.images.values()],
            "merge": config.merge_size, "cos": cos[:, : HEAD_DIM // 4], "sin": sin[:, : HEAD_DIM // 4],
        }  # fmt: skip
        rows = {state[: len(controls)]: row for state, row in found.items()}
        start = _middle(rows)
        super().__init__(controls, rows, shared=shared, start=start, selected=_inside(rows[start], 0.6))

    def figure(self) -> Figure:
        options, row = self.options, self.row(self.index)
        image, config = self.images[options["photo"]], with_token_budget(self.config, options["budget"])
        if not self.windowed:
            figure, ax = plt.subplots(layout="constrained")
            plot_patches(image, config, numbers=False, ax=ax)
            return figure
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained", width_ratios=(1.2, 1))
        plot_windows(image, config, window_size=options["window"], ax=left)
        plot_attention_segments(row["cu_window_seqlens"] // config.merge_size**2, ax=right)
        return figure

    def describe(self) -> str:
        options, row = self.options, self.row(self.index)
        (h, w), windows = row["grid"], len(row["cu_window_seqlens"]) - 1
        cut = f"The image becomes {h} x {w} patches and {len(row['window_index'])} merged tokens"
        if not self.windowed:
            return f"{cut}, within a budget of {options['budget']} tokens."
        return f"{cut}; attention runs in {windows} window{'s' * (windows > 1)} of at most {options['window']} px."


def distinct_grids(image, config: PatchConfig, max_tokens: int) -> dict[int, Grid]:
    """Return the image's distinct grids (1, h, w), keyed by the smallest budget (merged tokens)
    that produces each.
    """
    budgets: dict[Grid, int] = {}
    for budget in range(4, max_tokens + 1):
        budgets.setdefault(plan_grid(image.height, image.width, with_token_budget(config, budget)), budget)
    return {budget: grid for grid, budget in budgets.items()}


def distinct_windows(grid: Grid, config: PatchConfig, sizes: Sequence[int]) -> dict[int, dict]:
    """Return the data to draw for each window size;
    if several sizes give the same windows, keep only the smallest.
    """
    rows: dict[tuple, tuple[int, dict]] = {}
    patches = merge_block_coordinates([grid], spatial_merge_size=config.merge_size)
    for size in sorted(sizes):
        index, lengths = get_window_index(
            [grid], window_size=size, patch_size=config.patch_size, spatial_merge_size=config.merge_size
        )
        row = {"grid": grid[1:], "patches": patches, "window_index": index, "cu_window_seqlens": lengths}
        rows.setdefault((*index.tolist(), *lengths.tolist()), (size, row))
    return dict(rows.values())


def _inside(row: dict, share: float) -> int:
    """Return the index of the patch at the fraction `share` of both the width and the height."""
    rows, columns = row["grid"]
    distances = (row["patches"] - row["patches"].new_tensor([int(share * rows), int(share * columns)])).abs().sum(1)
    return int(distances.argmin())


def _middle(states) -> tuple:
    """Return the initial state: the first image, a quarter of the largest budget,
    and the released window size.
    """
    first, largest = next(iter(states))[0], max(budget for _, budget, *_ in states)

    def distance(state: tuple) -> list[int]:
        return [abs(value - goal) for value, goal in zip(state[1:], (largest // 4, 112), strict=False)]

    return min((state for state in states if state[0] == first), key=distance)
