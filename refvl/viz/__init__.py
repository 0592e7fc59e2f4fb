"""Figures: `plot_*(..., ax=None) -> Axes` are static, `explore_*(...)` and `live()` interactive.

viz computes nothing itself.
"""

# ruff: noqa: F401 (all figures and explorers are public: `__all__` finds them by their names)
from refvl.viz.attention import plot_attention, plot_states
from refvl.viz.box_figures import plot_box_readings, plot_boxes
from refvl.viz.evs import (
    plot_accuracy_curve,
    plot_dissimilarity,
    plot_keep_mask,
    plot_keep_masks,
    plot_pruned_positions,
)
from refvl.viz.explore import (
    explore_assignment,
    explore_attention,
    explore_costs,
    explore_crops,
    explore_deepstack,
    explore_evs,
    explore_families,
    explore_graph,
    explore_keep_mask,
    explore_launches,
    explore_mrope,
    explore_packing,
    explore_position_rules,
    explore_positions,
    explore_resize,
    explore_slices,
    explore_timeline,
    explore_tower,
    explore_windows,
)
from refvl.viz.families import (
    plot_ablations,
    plot_family_costs,
    plot_family_curves,
    plot_family_race,
    plot_family_stages,
)
from refvl.viz.glm4v import (
    plot_clip_prompt,
    plot_clip_tokens,
    plot_patch_values,
    plot_position_table,
    plot_timelines,
)
from refvl.viz.graphs import (
    plot_buffers,
    plot_launches,
    plot_packing,
    plot_recording,
    plot_replay_timings,
    plot_stale_errors,
    plot_waste,
)
from refvl.viz.live import live
from refvl.viz.minicpmv import (
    plot_canvas,
    plot_frame_tokens,
    plot_query_attention,
    plot_slices,
    plot_time_shift,
)
from refvl.viz.parallel import plot_assignment, plot_gather, plot_speed_up
from refvl.viz.patches import plot_patch_rows, plot_patches
from refvl.viz.positions import (
    plot_mrope_axes,
    plot_place_answers,
    plot_position_grid,
    plot_positions,
    plot_rotary,
)
from refvl.viz.step3_vl import plot_crop_prompt, plot_crop_tokens, plot_crops, plot_path_timeline
from refvl.viz.timings import (
    plot_cost_curves,
    plot_gpu_estimates,
    plot_roofline,
    plot_stage_shares,
    plot_stage_timings,
)
from refvl.viz.windows import plot_attention_segments, plot_window_permutation, plot_windows

__all__ = [name for name in dir() if name.startswith(("plot_", "explore_")) or name == "live"]
