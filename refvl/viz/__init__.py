"""Figures: static `plot_*(..., ax=None) -> Axes` and interactive `explore_*(...)`. viz computes nothing itself."""

from refvl.viz.patches import explore_resize, plot_patch_rows, plot_patches
from refvl.viz.timings import plot_stage_timings
from refvl.viz.windows import explore_windows, plot_attention_segments, plot_window_permutation, plot_windows

__all__ = [
    "explore_resize",
    "explore_windows",
    "plot_attention_segments",
    "plot_patch_rows",
    "plot_patches",
    "plot_stage_timings",
    "plot_window_permutation",
    "plot_windows",
]
