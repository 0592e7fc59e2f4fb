"""The overview figure: one photo and one video on their way to the language model."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from refvl.pixels.patches import PatchConfig
from refvl.viz.evs import plot_keep_mask
from refvl.viz.patches import plot_patches, with_token_budget
from refvl.viz.positions import plot_positions
from refvl.viz.windows import plot_windows

if TYPE_CHECKING:
    from refvl.study.report import Trace

FRAMES_SHOWN = 4


def plot_overview(photo, config: PatchConfig, clip: "Trace", *, tokens: int = 110) -> Figure:
    """Draw patches and windows of `photo`, resized to about `tokens` tokens,
    and the kept tokens and positions of a pruned video.

    clip: the trace of a run on one video with `pruning_rate` set. Raises ValueError if nothing was
    pruned.
    """
    figure = plt.figure(figsize=(13, 6), layout="constrained")
    pictures, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.6, 1)).flat
    left, right = pictures.subplots(1, 2)
    budget = with_token_budget(config, tokens)
    plot_patches(photo, budget, numbers=False, ax=left)
    left.set_title("1. patchify: patches, grouped into blocks of 2 x 2")
    plot_windows(photo, budget, ax=right)
    right.set_title("2. encode: attention inside windows, in this order")
    frames, lines = below.subfigures(1, 2, squeeze=False, width_ratios=(2, 1)).flat
    (patches,), (mask,), (video,) = clip.patches, clip.keep_masks, clip.media
    if mask is None or clip.positions is None:
        raise ValueError("clip: expected the trace of one pruned video, got one without pruning")
    t, h, w = patches.media_tokens.thw
    shown = min(FRAMES_SHOWN, t)
    mask = mask.reshape(t, h * w)[:shown].flatten()
    panels = frames.subplots(1, shown)
    plot_keep_mask(video.frames[: shown * len(video.frames) // t], mask, (shown, h, w), ax=panels)
    frames.suptitle("3. prune: keep what changed since the previous frame", fontsize=12)
    plot_positions(clip.positions, title="4. positions: three for every kept token", ax=lines.subplots())
    return figure
