"""GLM: a position table sampled at any size, and videos that become images,
each followed by its timestamp.

plot_position_table  where the patches of images sample the table, and one sampled channel
plot_patch_values    a number per patch, laid over the image
plot_timelines       the frames of a video that each variant samples, and the timestamp of each pair
plot_clip_tokens     prompt tokens of a video against its duration
plot_clip_prompt     a video's part of the prompt, one frame per row, with pruned tokens faded
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from refvl.checks import check_shape
from refvl.positions import interpolate_position_table, merge_block_coordinates
from refvl.positions.timestamps import VARIANTS, FrameSample, sample_video_frames
from refvl.viz.positions import grid_of_axes
from refvl.viz.style import HIGHLIGHT, PRUNED, SEQUENCE_CMAP, TOKEN_COLORS, axes_or_new, centered, headed, image_axes

if TYPE_CHECKING:
    from refvl.study.report import Trace

VARIANT_COLORS = {"glm4v": "#3d5a80", "glm46v": "#8d5a97", "glmga": "#2a9d8f"}
RELEASES = {"glm4v": "GLM-4.1V, 4.5V", "glm46v": "GLM-4.6V", "glmga": "GLM-GA"}
_SECOND = {"facecolor": HIGHLIGHT, "alpha": 0.4, "edgecolor": "none", "pad": 1.2}
_LABELS = 16  # the largest number of timestamps on a timeline


def plot_position_table(
    table_PE: Tensor, pictures: Sequence[tuple[Image.Image, tuple[int, int]]], *, channel: int = 0, ax=None
) -> np.ndarray:
    """Draw the cells of the table with the patches' centres over each image,
    and one channel sampled with the modes bicubic and nearest.

    table_PE: (S * S, E). pictures: images with their (h, w) in patches. ax: an array of images x 3
    Axes, or None. Returns that array. Raises ValueError for a table that is not a matrix.
    """
    values_P1 = check_shape(table_PE, ("positions", "E"), "table_PE").detach().float()[:, [channel]]
    limits = (float(values_P1.min()), float(values_P1.max()))
    axes = grid_of_axes(ax, len(pictures), 3, figsize=(10.2, 2.7 * len(pictures)))
    for row, (image, (h, w)) in zip(axes, pictures, strict=True):
        _show_cells(row[0], image, (h, w), round(len(table_PE) ** 0.5))
        for panel, mode in zip(row[1:], ("bicubic", "nearest"), strict=True):
            read_N = interpolate_position_table(values_P1, [(1, h, w)], mode=mode)[:, 0]
            plot_patch_values(read_N, (h, w), size=image.size, limits=limits, title=f"{mode} sampling", ax=panel)
    axes[0, 0].figure.colorbar(axes[0, 1].images[0], ax=axes[:, 1:], label=f"channel {channel}", shrink=0.7)
    return axes


def _show_cells(ax: Axes, image: Image.Image, grid_hw: tuple[int, int], side: int) -> None:
    """Draw the image, the lines between the table's cells,
    and a dot at the centre of each patch.
    """
    (h, w), (width, height) = grid_hw, image.size
    image_axes(ax, f"{h} x {w} patches, {side} x {side} cells")
    ax.imshow(image, alpha=0.55)
    for i in range(side + 1):
        ax.plot([i * width / side] * 2, [0, height], [0, width], [i * height / side] * 2, color="white", lw=1.2)
    rows, columns = np.mgrid[:h, :w]
    ax.scatter((columns + 0.5) * width / w, (rows + 0.5) * height / h, s=5, color=HIGHLIGHT)
    ax.set(xlim=(0, width), ylim=(height, 0))


def plot_patch_values(
    values_N: Tensor,
    grid_hw: tuple[int, int],
    *,
    size: tuple[int, int] | None = None,
    limits: tuple[float, float] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw a value per patch as a colour in its place. values_N: (h*w,) in merge-block
    order, like all patch rows.

    size: (width, height) of the image, whose ratio is kept; None for square patches. limits: the
    values at the ends of the colour map. Raises ValueError for any other shape.
    """
    h, w = grid_hw
    check_shape(values_N, (h * w,), "values_N")
    rows, columns = merge_block_coordinates([(1, h, w)]).T.numpy()
    values_HW = np.empty((h, w))
    values_HW[rows, columns] = values_N.detach().float().cpu().numpy()
    width, height = size or (w, h)
    ax = image_axes(ax, title)
    low, high = limits or (None, None)
    ax.imshow(values_HW, cmap=SEQUENCE_CMAP, vmin=low, vmax=high, extent=(0, width, height, 0))
    return ax


def plot_timelines(duration: float, fps: float, variants: Sequence[str] = VARIANTS, *, ax: Axes | None = None) -> Axes:
    """Draw the frames of a video that each variant samples, two per grid step,
    with the timestamp of each step.

    duration: seconds. fps: the frame rate of the video. Steps alternate in shade, to show the pairs
    of frames.
    """
    total = max(1, round(duration * fps))
    ax = axes_or_new(ax, figsize=(10.5, 0.5 + 1.05 * len(variants)))
    for row, variant in enumerate(variants):
        sample = sample_video_frames(variant, fps=fps, total_num_frames=total, duration=duration)
        _draw_timeline(ax, -row, sample, fps, VARIANT_COLORS[variant])
    ticks = np.linspace(0, (total - 1) / fps, min(total, 3000))
    ax.eventplot([ticks], lineoffsets=[-len(variants) + 0.35], linelengths=0.18, colors="0.65", linewidths=0.5)
    names = [f"{variant}\n{RELEASES[variant]}" for variant in variants]
    ax.set_yticks([*(-row for row in range(len(variants))), -len(variants) + 0.35], [*names, f"{total:,} frames"])
    ax.tick_params(axis="y", length=0, labelsize=8)
    ax.set(xlabel="time in the video (s)", ylim=(-len(variants) + 0.1, 0.8))
    ax.set_title(f"a video of {duration:g} s at {fps:g} frames per second: sampled frames and written timestamps")
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def _draw_timeline(ax: Axes, y: float, sample: FrameSample, fps: float, color: str) -> None:
    """Draw the sampled frames as lines, and the timestamps above them (thinned if there are
    many).
    """
    times, steps = np.array(sample.indices) / fps, len(sample.timestamps)
    for step, alpha in ((0, 1.0), (1, 0.45)):
        pairs = np.concatenate([times[2 * step :: 4], times[2 * step + 1 :: 4]])
        ax.eventplot([pairs], lineoffsets=[y], linelengths=0.5, colors=color, linewidths=1.6, alpha=alpha)
    for i in range(0, steps, -(-steps // _LABELS)):
        ax.text(times[2 * i], y + 0.33, str(sample.timestamps[i]), ha="center", va="bottom", fontsize=8, bbox=_SECOND)
    looked = len(dict.fromkeys(sample.indices))
    said = f"{looked} frames,\n{steps} steps"
    ax.annotate(said, (1.005, y), xycoords=("axes fraction", "data"), fontsize=8, va="center")


def plot_clip_tokens(
    seconds: Sequence[float], tokens: dict[str, Sequence[int]], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Plot the prompt tokens of a video against its duration, one line per variant,
    on log-log axes.
    """
    ax = axes_or_new(ax, figsize=(7, 3.6))
    for i, (variant, counts) in enumerate(tokens.items()):
        width = 6 - 2 * i  # if two agree, the thinner line is on top
        label = f"{variant} ({RELEASES[variant]})"
        ax.plot(seconds, counts, "o-", ms=width + 2, lw=width, color=VARIANT_COLORS[variant], label=label)
    ax.set(xscale="log", yscale="log", xlabel="duration (s)", ylabel="tokens", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,g}")
    ax.grid(alpha=0.25, which="both")
    ax.legend(fontsize=9)
    return ax


def plot_clip_prompt(trace: "Trace", processor, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw one video's part of the prompt, one row per grid step: begin token, video tokens,
    end token and timestamp.

    trace: the trace of a GLM model; pruned tokens are faded. processor: the model's processor,
    which decodes token ids. Raises ValueError for a trace without a prompt.
    """
    if trace.full_ids is None or trace.keep is None:
        raise ValueError("trace: expected the trace of a finished run, got one without a prompt")
    ids, keep, config = trace.full_ids.tolist(), trace.keep.tolist(), processor.config
    starts = [span.offset - 1 for span in trace.spans]
    stops = [*starts[1:], ids.index(config.video_end_token_id)]
    width = max(stop - start for start, stop in zip(starts, stops, strict=True))
    ax = axes_or_new(ax, figsize=(min(11, 0.42 * width + 1.6), 0.36 * len(starts) + 0.9))
    for row, (start, stop, span) in enumerate(zip(starts, stops, trace.spans, strict=True)):
        end = span.offset + span.num_tokens  # the index of the end-of-image token
        for place in range(start, stop):
            x = place - start
            if span.offset <= place < end:
                _box(ax, x, row, TOKEN_COLORS["video"] if keep[place] else PRUNED)
            elif place in (start, end):
                _box(ax, x, row, TOKEN_COLORS["text"], "[" if place == start else "]")
            else:
                _box(ax, x, row, HIGHLIGHT, processor.tokenizer.decode([ids[place]]).strip())
    kept = sum(sum(keep[span.offset : span.offset + span.num_tokens]) for span in trace.spans)
    total = sum(span.num_tokens for span in trace.spans)
    ax.set(xlim=(-0.1, width), ylim=(len(starts) - 0.05, -0.1), xticks=[])
    ax.set_xlabel("tokens of the prompt, left to right\n[ and ]: beginning and end of an image; orange: timestamp")
    ax.set_yticks([row + 0.45 for row in range(len(starts))], [f"step {row}" for row in range(len(starts))])
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(headed(title, f"{kept} of {total} video tokens kept"), fontsize=11)
    return ax


def _box(ax: Axes, x: float, y: float, color: str, text: str = "") -> None:
    ax.add_patch(Rectangle((x, y), 0.9, 0.9, facecolor=color, edgecolor="none"))
    centered(ax, x + 0.45, y + 0.47, text, fontsize=8)
