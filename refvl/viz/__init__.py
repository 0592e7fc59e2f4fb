"""Figures: static `plot_*(..., ax=None) -> Axes` and interactive `explore_*(...)`. viz computes nothing itself."""

from refvl.viz.evs import (
    explore_keep_mask,
    plot_accuracy_curve,
    plot_dissimilarity,
    plot_keep_mask,
    plot_pruned_positions,
)
from refvl.viz.families import plot_family_costs, plot_family_curves, plot_family_stages
from refvl.viz.glm4v import (
    explore_timeline,
    plot_clip_prompt,
    plot_clip_tokens,
    plot_patch_values,
    plot_position_table,
    plot_timelines,
)
from refvl.viz.graphs import (
    explore_packing,
    plot_buffers,
    plot_packing,
    plot_recording,
    plot_replay_timings,
    plot_waste,
)
from refvl.viz.minicpmv import (
    explore_slices,
    plot_frame_tokens,
    plot_query_attention,
    plot_slices,
    plot_time_shift,
)
from refvl.viz.parallel import explore_assignment, plot_assignment, plot_gather, plot_speed_up
from refvl.viz.patches import explore_resize, plot_patch_rows, plot_patches
from refvl.viz.positions import (
    explore_positions,
    plot_clip_positions,
    plot_mrope_axes,
    plot_place_answers,
    plot_position_grid,
    plot_positions,
    plot_rotary,
)
from refvl.viz.step3_vl import explore_crops, plot_crop_prompt, plot_crop_tokens, plot_crops, plot_path_timeline
from refvl.viz.timings import plot_stage_timings
from refvl.viz.windows import explore_windows, plot_attention_segments, plot_window_permutation, plot_windows

__all__ = [
    "explore_assignment",
    "explore_crops",
    "explore_keep_mask",
    "explore_packing",
    "explore_positions",
    "explore_resize",
    "explore_slices",
    "explore_timeline",
    "explore_windows",
    "plot_accuracy_curve",
    "plot_assignment",
    "plot_attention_segments",
    "plot_buffers",
    "plot_clip_positions",
    "plot_clip_prompt",
    "plot_clip_tokens",
    "plot_crop_prompt",
    "plot_crop_tokens",
    "plot_crops",
    "plot_dissimilarity",
    "plot_family_costs",
    "plot_family_curves",
    "plot_family_stages",
    "plot_frame_tokens",
    "plot_gather",
    "plot_keep_mask",
    "plot_mrope_axes",
    "plot_packing",
    "plot_patch_rows",
    "plot_patch_values",
    "plot_patches",
    "plot_path_timeline",
    "plot_place_answers",
    "plot_position_grid",
    "plot_position_table",
    "plot_positions",
    "plot_pruned_positions",
    "plot_query_attention",
    "plot_recording",
    "plot_replay_timings",
    "plot_rotary",
    "plot_slices",
    "plot_speed_up",
    "plot_stage_timings",
    "plot_time_shift",
    "plot_timelines",
    "plot_waste",
    "plot_window_permutation",
    "plot_windows",
]
