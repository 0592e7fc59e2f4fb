"""Figures: `plot_*(..., ax=None) -> Axes` are static; `explore_*(...)` and `live()` are interactive.

viz computes nothing itself.
"""

from refvl.lazy import lazy_names
from refvl.viz.live import live as live  # imported now, because the folder has the same name

FILES = {
    "attention": "plot_attention plot_states",
    "box_figures": "plot_box_readings plot_boxes",
    "evs": "plot_accuracy_curve plot_dissimilarity plot_keep_mask plot_keep_masks plot_pruned_positions",
    "explore": "explore_assignment explore_attention explore_crops explore_deepstack explore_evs explore_families "
               "explore_graph explore_keep_mask explore_launches explore_mrope explore_packing explore_positions "
               "explore_resize explore_slices explore_timeline explore_windows",
    "families": "plot_ablations plot_family_costs plot_family_curves plot_family_race plot_family_stages",
    "live": "live",
    "glm4v": "plot_clip_prompt plot_clip_tokens plot_patch_values plot_position_table plot_timelines",
    "graphs": "plot_buffers plot_launches plot_packing plot_recording plot_stale_errors",
    "minicpmv": "plot_canvas plot_frame_tokens plot_query_attention plot_slices",
    "parallel": "plot_assignment plot_gather plot_speed_up",
    "patches": "plot_patch_rows plot_patches",
    "positions": "plot_mrope_axes plot_place_answers plot_position_grid plot_positions plot_rotary",
    "step3_vl": "plot_crop_prompt plot_crop_tokens plot_crops plot_path_timeline",
    "style": "",
    "timings": "plot_cost_curves plot_gpu_estimates plot_roofline plot_stage_shares plot_stage_timings",
    "windows": "plot_attention_segments plot_window_permutation plot_windows",
}  # fmt: skip
__getattr__, __dir__, __all__ = lazy_names(__name__, FILES)
