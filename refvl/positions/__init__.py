"""Positions of tokens in the prompt, and the selection of tokens to keep; this code does not depend on any model."""

import torch

from refvl.lazy import lazy_names

FILES = {
    "canvas": "CanvasMarks canvas_positions",
    "evs": "compute_dissimilarity compute_mrope_for_media compute_retained_tokens_count compute_retention_mask "
           "recompute_mrope_positions",
    "mrope": "MediaSpan get_mrope_input_positions mrope_axis_of_pairs mrope_delta restrict_positions",
    "packed": "PackingCollator pack truncate",
    "rotary": "apply_rotary merge_block_coordinates vision_rotary_cos_sin",
    "tables": "interpolate_position_table sincos_1d sincos_2d",
    "timestamps": "FrameSample sample_video_frames",
    "vidcom2": "PRUNERS find_pruner vidcom2_frame_budgets vidcom2_retained_tokens_count vidcom2_retention_mask "
               "vidcom2_similarities",
    "windows": "get_window_index invert_permutation",
}  # fmt: skip
__getattr__, __dir__, __all__ = lazy_names(__name__, FILES)


# MKL chooses the kernel for a function when that function is first called. If two threads make this first call at the
# same time, one may get a kernel with errors of 1e-4 (pytorch/pytorch#188792). The first calls are therefore made here,
# by a single thread.
for function in (torch.cos, torch.sin):
    function(torch.zeros(1, device="cpu"))
del function
