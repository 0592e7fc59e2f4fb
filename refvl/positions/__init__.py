"""Positions of tokens in the prompt, and the selection of tokens to keep; this code does not depend on any model."""

import torch

from refvl.positions.canvas import CanvasMarks, canvas_positions
from refvl.positions.evs import (
    compute_dissimilarity,
    compute_mrope_for_media,
    compute_retained_tokens_count,
    compute_retention_mask,
    recompute_mrope_positions,
)
from refvl.positions.mrope import (
    MediaSpan,
    get_mrope_input_positions,
    mrope_axis_of_pairs,
    mrope_delta,
    restrict_positions,
)
from refvl.positions.packed import PackingCollator, pack, truncate
from refvl.positions.pruners import PRUNERS, find_pruner
from refvl.positions.rotary import apply_rotary, merge_block_coordinates, vision_rotary_cos_sin
from refvl.positions.tables import interpolate_position_table, sincos_1d, sincos_2d
from refvl.positions.timestamps import FrameSample, sample_video_frames
from refvl.positions.vidcom2 import (
    vidcom2_frame_budgets,
    vidcom2_retained_tokens_count,
    vidcom2_retention_mask,
    vidcom2_similarities,
)
from refvl.positions.windows import get_window_index, invert_permutation

# MKL chooses the kernel for a function when that function is first called. If two threads make this first call at the
# same time, one may get a kernel with errors of 1e-4 (pytorch/pytorch#188792). So a single thread makes the first calls
# here.
for function in (torch.cos, torch.sin):
    function(torch.zeros(1, device="cpu"))
del function

__all__ = [
    "PRUNERS", "CanvasMarks", "FrameSample", "MediaSpan", "PackingCollator", "apply_rotary", "canvas_positions",
    "compute_dissimilarity", "compute_mrope_for_media", "compute_retained_tokens_count", "compute_retention_mask",
    "find_pruner", "get_mrope_input_positions", "get_window_index", "interpolate_position_table", "invert_permutation",
    "merge_block_coordinates", "mrope_axis_of_pairs", "mrope_delta", "pack", "recompute_mrope_positions",
    "restrict_positions", "sample_video_frames", "sincos_1d", "sincos_2d", "truncate", "vidcom2_frame_budgets",
    "vidcom2_retained_tokens_count", "vidcom2_retention_mask", "vidcom2_similarities", "vision_rotary_cos_sin",
]  # fmt: skip
