"""Step3-VL: how an image is cut, what that costs in tokens, and when the two encoder paths run.

plot_crops          the windows on the canvas, with the overview next to them
plot_crop_prompt    the prompt of one image: crops, newline tokens, overview
plot_crop_tokens    tokens against image size, one line per aspect ratio
plot_path_timeline  replays of both paths in the order in which they ran
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from refvl.graphs import Batch, padding_waste
from refvl.pixels.crops import RELEASED, CropConfig, CropLayout, count_prompt_tokens, cut_crops, plan_crops
from refvl.pixels.media import load_image
from refvl.viz.bars import item_bars, outline_bar
from refvl.viz.minicpmv import number_piece, preview
from refvl.viz.positions import grid_of_axes
from refvl.viz.style import HIGHLIGHT, STAGE_COLORS, TOKEN_COLORS, axes_or_new, centered, headed, image_axes, ink_on
from refvl.viz.windows import sequence_colors

RATIOS = ((1, 1), (4, 3), (16, 9), (5, 1))  # width : height


def plot_crops(
    image, config: CropConfig = RELEASED, *, crop_tokens: int = 81, image_tokens: int = 169, ax=None
) -> np.ndarray:
    """Draw the canvas with its numbered windows (left),
    and the overview as the encoder sees it (right).

    image: anything `load_image` accepts. crop_tokens, image_tokens: the output tokens of a crop
    and of the overview. ax: two Axes, or None. Returns both Axes.
    """
    picture = load_image(image)
    overview, _, plan = cut_crops(picture, config)
    left, right = grid_of_axes(ax, 1, 2, (9.6, 4.3))[0]
    _draw_canvas(left, overview, plan, picture.size)
    size = config.image_size
    image_axes(right, f"overview: {size} x {size} px, whatever the shape\n{image_tokens} tokens")
    seen = overview.resize((size, size), Image.Resampling.BILINEAR)  # at the resolution of the encoder's input
    right.imshow(seen, extent=(0, size, size, 0), interpolation="nearest")
    right.set_xlabel(_token_sum(plan.layout, crop_tokens, image_tokens))
    return np.array([left, right])


def _draw_canvas(ax: Axes, overview: Image.Image, plan, size: tuple[int, int]) -> None:
    (width, height), layout = plan.canvas, plan.layout
    title = f"{size[0]} x {size[1]} px, canvas {width} x {height} px\n"
    cut = f"{layout.rows} x {layout.columns} windows of {plan.window} px" if plan.boxes else "no crops"
    image_axes(ax, title + cut)
    ax.imshow(preview(overview, plan.canvas), extent=(0, width, height, 0))
    bottom = max([height, *(box[3] for box in plan.boxes)])
    for i, ((x, y, _, _), ends_row) in enumerate(zip(plan.boxes, layout.newline_mask, strict=True)):
        ax.add_patch(Rectangle((x, y), plan.window, plan.window, fill=False, edgecolor="white", linewidth=1.6))
        number_piece(ax, x + plan.window / 2, y + plan.window / 2, i)
        if ends_row:
            ax.plot([width], [y + plan.window / 2], "<", color=HIGHLIGHT, ms=10, clip_on=False, zorder=3)
    ax.set(xlim=(0, width), ylim=(bottom, 0), facecolor="black")  # the colour below the canvas
    ax.set_xlabel("orange: a newline token follows" if layout.newlines else "")


def _token_sum(layout: CropLayout, crop_tokens: int, image_tokens: int) -> str:
    total = count_prompt_tokens(layout, crop_tokens=crop_tokens, image_tokens=image_tokens)
    terms = [f"{layout.crops} x ({crop_tokens} + 2)"] * bool(layout.crops)
    terms += [f"{layout.newlines} newline{'s' * (layout.newlines > 1)}"] * bool(layout.newlines)
    return " + ".join([*terms, f"({image_tokens} + 2)"]) + f" = {total} tokens in the prompt"


def plot_crop_prompt(
    layout: CropLayout, *, crop_tokens: int = 81, image_tokens: int = 169, ax: Axes | None = None
) -> Axes:
    """Draw the prompt of one image, left to right: numbered crops, newline tokens, the overview.

    The length of a crop or overview includes the special tokens around it.
    """
    ax, colors, left = axes_or_new(ax, figsize=(10, 1.5)), sequence_colors(max(1, layout.crops)), 0
    total = count_prompt_tokens(layout, crop_tokens=crop_tokens, image_tokens=image_tokens)
    for i, ends_row in enumerate(layout.newline_mask):
        ax.barh(0, crop_tokens + 2, left=left, color=colors[i], edgecolor="white")
        centered(ax, left + crop_tokens / 2 + 1, 0, str(i), color=ink_on(colors[i]), size=8)
        left += crop_tokens + 2
        if ends_row:
            ax.plot([left + 0.5] * 2, [-0.55, 0.55], color=HIGHLIGHT, lw=2.5)
            left += 1
    ax.barh(0, image_tokens + 2, left=left, color=TOKEN_COLORS["image"], edgecolor="white")
    centered(ax, left + image_tokens / 2 + 1, 0, "overview", color="white", size=9)
    title = f"{layout.rows} x {layout.columns} crops: {_token_sum(layout, crop_tokens, image_tokens)}"
    ax.set(xlim=(0, total), yticks=[], xlabel="position in the prompt (orange: newline token)")
    ax.set_title(title, size=10)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def plot_crop_tokens(config: CropConfig = RELEASED, *, ax: Axes | None = None) -> Axes:
    """Plot the prompt tokens of an image against its long side,
    one line per aspect ratio of `RATIOS`.
    """
    ax = axes_or_new(ax, figsize=(8, 4))
    sides = np.arange(10, 4001, 10)
    cost = {"crop_tokens": config.crop_tokens, "image_tokens": config.image_tokens}
    for (width, height), color in zip(RATIOS, STAGE_COLORS, strict=False):
        plans = [plan_crops(int(side), max(1, int(side) * height // width), config) for side in sides]
        counts = [count_prompt_tokens(plan.layout, **cost) for plan in plans]
        ax.step(sides, counts, where="mid", color=color, lw=1.8, label=f"{width} : {height}")
    ax.axvline(config.image_size, color="0.6", ls=":", lw=1, label=f"{config.image_size} px: the overview's side")
    ax.axvline(config.max_side, color="0.3", ls="--", lw=1, label=f"{config.max_side} px: scaled down from here")
    ax.set(xlabel="long side of the image (px)", ylabel="tokens in the prompt", title="what an image costs")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, title="width : height", title_fontsize=8)
    return ax


def plot_path_timeline(
    path_tokens: Sequence[Mapping[str, int]], batches: Sequence[Batch], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw one lane per path, with its replays in order, each as long as its number of tokens.

    path_tokens: the output tokens of each image on each path. batches:
    `EncoderGraphManager.last_batches`. Images are numbered and have one colour on both lanes.
    Padding is hatched; eager forwards, which no graph could hold, are dashed.
    """
    paths = list(dict.fromkeys(path for tokens in path_tokens for path in tokens))
    ax, colors = axes_or_new(ax, figsize=(10, 0.7 * len(paths) + 1.2)), sequence_colors(len(path_tokens))
    whole = max(1, sum(batch.budget or batch.tokens for batch in batches))
    start = 0
    for batch in batches:
        lane, length = paths.index(batch.path), batch.budget or batch.tokens
        tokens = {i: path_tokens[i][batch.path] for i in batch.indices}
        end = start + length if batch.budget else None
        item_bars(ax, lane, tokens, tokens, colors, widest=whole, left=start, end=end)
        outline_bar(ax, lane, start, length, linewidth=1.2, linestyle="-" if batch.budget else "--")
        start += length
    ax.set_yticks(range(len(paths)), paths)
    ax.set(xlim=(0, 1.005 * whole), ylim=(max(1, len(paths)) - 0.5, -0.5))
    ax.set_xlabel("output tokens computed so far (hatched: padding)")
    ax.set_title(headed(title, _timeline_report(batches)), size=10)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _timeline_report(batches: Sequence[Batch]) -> str:
    replays = [batch for batch in batches if batch.budget is not None]
    computed, eager = sum(batch.budget or 0 for batch in replays), len(batches) - len(replays)
    report = f"{len(replays)} replay{'s' * (len(replays) != 1)} with {computed} tokens"
    return f"{report}, {padding_waste(batches):.0%} padding" + f", {eager} eager" * bool(eager)
