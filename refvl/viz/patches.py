"""An image as the encoder sees it: patches, merge blocks, rows of numbers."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import Rectangle
from torch import Tensor

from refvl.checks import Grid, as_grids, check_shape
from refvl.pixels.by_hand import unpatchify
from refvl.pixels.images import load_image, resize
from refvl.pixels.patches import PatchConfig, plan_grid
from refvl.positions import merge_block_coordinates
from refvl.viz.style import HIGHLIGHT, axes_or_new, centered, image_axes

MIN_FONT_SIZE, MAX_FONT_SIZE = 4.5, 11  # font sizes in points; smaller numbers are left out


def plot_patches(
    image, config: PatchConfig, *, numbers: bool = True, highlight: Sequence[int] = (0,), ax: Axes | None = None
) -> Axes:
    """Draw the resized image with its patches (thin lines) and merge blocks (thick lines).

    image: anything `load_image` accepts. numbers: whether to write the index of the patch row into
    each patch, if it is large enough. highlight: merge blocks to frame, counted in reading order.
    Raises ValueError for a merge block that does not exist.
    """
    ax, grid = show_resized(image, config, ax)
    _, h, w = grid
    draw_grid(ax, (h, w), config.patch_size, color="white", linewidth=0.4, alpha=0.7)
    draw_grid(ax, (h // config.merge_size, w // config.merge_size), config.factor, color="white", linewidth=1.2)
    _frame_blocks(ax, highlight, grid, config)
    if numbers:
        places = merge_block_coordinates([grid], spatial_merge_size=config.merge_size).tolist()
        write_numbers(ax, dict(enumerate(places)), config.patch_size)
    lines = f"thin lines: patches of {config.patch_size} px; thick: merge blocks of {config.factor} px"
    framed = f"\norange: merge block{'s' * (len(highlight) > 1)} {', '.join(map(str, highlight))}"
    ax.set_xlabel(lines + framed * bool(highlight))
    return ax


def show_resized(image, config: PatchConfig, ax: Axes | None) -> tuple[Axes, Grid]:
    """Draw the resized image in its own pixels, with all sizes in the title;
    return the axes and the grid (1, h, w).
    """
    picture = load_image(image)
    resized = resize(picture, *config.target_size(picture.height, picture.width))
    t, h, w = grid = plan_grid(picture.height, picture.width, config)
    title = (
        f"{picture.width} x {picture.height} px, resized to {resized.width} x {resized.height} px\n"
        f"grid {grid}: {t * h * w} patches, {t * h * w // config.merge_size**2} merged tokens"
    )
    ax = image_axes(ax, title, figsize=(5.4, 5.4 * resized.height / resized.width + 0.7))
    ax.imshow(resized, extent=(0, resized.width, resized.height, 0))
    return ax, grid


def draw_grid(ax: Axes, shape: tuple[int, int], step: int, **style) -> None:
    """Draw the inner lines of (rows, columns) cells with sides of `step` pixels."""
    rows, columns = shape
    lines = [[(x * step, 0), (x * step, rows * step)] for x in range(1, columns)]
    lines += [[(0, y * step), (columns * step, y * step)] for y in range(1, rows)]
    ax.add_collection(LineCollection(lines, **style), autolim=False)


def write_numbers(ax: Axes, places: dict[int, Sequence[int]], step: int) -> None:
    """Write each number into its (row, column) cell of `step` pixels,
    unless numbers would be too small to read.
    """
    columns = max(column for _, column in places.values()) + 1
    points_per_cell = 72 * ax.bbox.width / ax.figure.dpi / columns
    size = min(MAX_FONT_SIZE, 0.42 * points_per_cell)
    if size < MIN_FONT_SIZE:
        return
    outline = [patheffects.withStroke(linewidth=1.5, foreground="black")]
    for number, (row, column) in places.items():
        x, y = (column + 0.5) * step, (row + 0.5) * step
        centered(ax, x, y, str(number), size=size, color="white", path_effects=outline)


def _frame_blocks(ax: Axes, blocks: Sequence[int], grid: Grid, config: PatchConfig) -> None:
    _, h, w = grid
    count = h * w // config.merge_size**2
    for block in blocks:
        if not 0 <= block < count:
            raise ValueError(f"highlight: expected merge blocks of the grid {grid}, 0 to {count - 1}, got {block}")
        row, column = divmod(block, w // config.merge_size)
        side, corner = config.factor, (column * config.factor, row * config.factor)
        frame = Rectangle(corner, side, side, fill=False, edgecolor=HIGHLIGHT, linewidth=2.5, zorder=3)
        ax.add_patch(frame)


def plot_patch_rows(
    patches: Tensor, grid: Sequence[int], config: PatchConfig, *, count: int = 8, ax: Axes | None = None
) -> Axes:
    """Draw the first `count` patch rows: each as a patch on the left,
    and as C * Tp * P * P values in order on the right.

    patches: (N, C*Tp*P*P), normalised, of one item with this grid (t, h, w).
    Raises ValueError for any other shape.
    """
    [(t, h, w)] = as_grids([grid], spatial_merge_size=config.merge_size, name="grid")
    check_shape(patches, (t * h * w, config.patch_values), "patches")
    places = merge_block_coordinates([(t, h, w)], spatial_merge_size=config.merge_size)[:count].tolist()
    ax = axes_or_new(ax, figsize=(9, 0.42 * len(places) + 1))
    values = ax.imshow(patches[: len(places)].float(), aspect="auto", cmap="gray", interpolation="nearest")
    ax.figure.colorbar(values, ax=ax, label="normalised value", pad=0.01)
    ax.set_yticks(range(len(places)), [f"row {i}: patch ({r}, {c})" for i, (r, c) in enumerate(places)])
    ax.tick_params(axis="y", pad=34, length=0)
    for i in range(len(places)):
        [picture, *_] = unpatchify(patches[i : i + 1], (1, 1, 1), replace(config, merge_size=1))
        thumbnail = OffsetImage(picture, zoom=1.5, interpolation="nearest")
        ax.add_artist(AnnotationBbox(thumbnail, (-0.5, i), xybox=(-18, 0), boxcoords="offset points", frameon=False))
    _mark_channels(ax, config)
    side = config.patch_size
    factors = f"3 channels x {config.temporal_patch_size} frames x {side} x {side} px"
    ax.set_title(f"patch rows: {factors} = {config.patch_values} values")
    return ax


def _mark_channels(ax: Axes, config: PatchConfig) -> None:
    """Label the sections of a patch row: by channel, then by frame."""
    names = [f"{color}\nframe {i}" for color in ("red", "green", "blue") for i in range(config.temporal_patch_size)]
    length = config.patch_size**2
    ax.set_xticks([(i + 0.5) * length - 0.5 for i in range(len(names))], names)
    for i in range(1, len(names)):
        new_channel = i % config.temporal_patch_size == 0
        ax.axvline(i * length - 0.5, color=HIGHLIGHT, linewidth=2 if new_channel else 0.8)
    ax.tick_params(axis="x", length=0)


def with_token_budget(config: PatchConfig, tokens: int) -> PatchConfig:
    """Return a copy of `config` that allows at most `tokens` merged tokens per image."""
    max_pixels = tokens * config.factor**2
    return replace(config, max_pixels=max_pixels, min_pixels=min(config.min_pixels, max_pixels))
