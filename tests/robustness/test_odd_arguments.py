"""Each argument of the functions of sizes, positions and budgets, odd: a result, or one clear sentence of refvl's.

Oracle: `outcome_of`, which reads the traceback, and limits processor time and memory.
"""

from functools import partial

import numpy as np
import pytest
import torch
from harness import outcome_of
from kinds import ODD

from refvl import positions
from refvl.graphs import generate_budgets, plan_batches
from refvl.pixels.media import sample_frame_indices
from refvl.processors.qwen3_vl import even_indices
from refvl.serving import parallel


def odd_values() -> tuple:
    """New ones for each call, since one that is changed in place would be another value for the next."""
    meta, sparse = torch.zeros(1, 3, dtype=torch.int64, device="meta"), torch.ones(1, 3, dtype=torch.int64).to_sparse()
    return (
        *ODD, 10**400, -(10**400), 1e308, 5e-324, -np.inf, 2**62, np.int64(2**62), np.int64(3), torch.tensor(2),
        torch.tensor(2**62), torch.tensor(3).to_sparse(), meta[0, 0], meta[0], meta, sparse, [meta[0, 0]] * 3,
        [meta[0]], [torch.tensor(4).to_sparse()] * 3, [2**62] * 3, [10**400], range(3),
    )  # fmt: skip


SAMPLED = {"fps": 2.0, "total_num_frames": 30}
SETTINGS = {"target_fps": 2.0, "max_duration": 300.0, "max_frames": 640, "temporal_patch_size": 2}
EMBEDS, GRID = torch.linspace(-1, 1, 48).reshape(8, 6), [(1, 4, 4)]
PRUNED = {"video_embeds": EMBEDS, "video_size_thw": (2, 2, 2), "spatial_merge_size": 1, "q": 0.5}
COUNTED = {"tokens_per_frame": 4, "num_frames": 2, "q": 0.5}
CASES = (
    (positions.sample_video_frames, {"variant": "glm4v", "duration": 9.0} | SAMPLED | SETTINGS),
    (positions.sample_video_frames, {"variant": "glm46v"} | SAMPLED | SETTINGS),
    (positions.sample_video_frames, {"variant": "glmga"} | SAMPLED | SETTINGS),
    (positions.sample_video_frames, {"variant": "glmga", "duration": 9.0} | SAMPLED | SETTINGS),
    (
        positions.sample_video_frames,
        {"variant": "glm4v", "frames_indices": [0, 1], "do_sample_frames": False} | SAMPLED,
    ),
    (sample_frame_indices, {"total_num_frames": 30, "source_fps": 2.0, "fps": 1.0, "min_frames": 4, "max_frames": 700}),
    (sample_frame_indices, {"total_num_frames": 30, "source_fps": 2.0, "num_frames": 4}),
    (partial(even_indices, 30, 2.0), {"fps": 1.0, "min_frames": 4, "max_frames": 700}),
    (partial(even_indices, 30, 2.0), {"num_frames": 4}),
    (plan_batches, {"output_tokens": [3, 4], "budgets": [8, 16], "max_items": 2, "frames": [1, 1], "max_frames": 4}),
    (generate_budgets, {"min_budget": 8, "max_budget": 100}),
    (parallel.get_load_balance_assignment, {"sizes": [3, 4], "num_gpus": 2}),
    (parallel.get_count_assignment, {"sizes": [3, 4], "num_gpus": 2}),
    (positions.compute_retention_mask, PRUNED),
    (positions.vidcom2_retention_mask, PRUNED),
    (positions.compute_retained_tokens_count, COUNTED),
    (positions.vidcom2_retained_tokens_count, COUNTED),
    (positions.vidcom2_frame_budgets, {"similarity_to_video": EMBEDS, "q": 0.5}),
    (positions.compute_dissimilarity, {"video_embeds": EMBEDS, "num_frames": 2}),
    (positions.vidcom2_similarities, {"video_embeds": EMBEDS, "num_frames": 2}),
    (
        positions.compute_mrope_for_media,
        {"video_size_thw": (2, 2, 2), "spatial_merge_size": 1, "tokens_per_second": 1.0, "video_second_per_grid": 1.0},
    ),
    (positions.MediaSpan, {"offset": 1, "t": 1, "h": 2, "w": 2, "t_factor": 1.0}),
    (positions.get_mrope_input_positions, {"num_tokens": 10, "spans": [positions.MediaSpan(1, 1, 2, 2)]}),
    (positions.get_window_index, {"grid_thw": GRID, "spatial_merge_size": 2, "window_size": 56, "patch_size": 7}),
    (positions.merge_block_coordinates, {"grid_thw": GRID, "spatial_merge_size": 2}),
    (positions.vision_rotary_cos_sin, {"grid_thw": GRID, "head_dim": 16, "spatial_merge_size": 2, "theta": 1e4}),
    (
        positions.interpolate_position_table,
        {"table": torch.zeros(16, 8), "grid_thw": GRID, "spatial_merge_size": 2},
    ),
    (positions.sincos_1d, {"embed_dim": 8, "length": 4}),
    (positions.sincos_2d, {"embed_dim": 8, "size": (4, 4)}),
    (positions.mrope_axis_of_pairs, {"section": (4, 2, 2), "interleaved": True}),
    (
        positions.recompute_mrope_positions,
        {
            "input_ids": torch.tensor([1, 9, 9, 9, 9, 2]),
            "multimodal_positions": [torch.zeros(4, 4, dtype=torch.int64)],
            "mrope_positions": torch.arange(6).expand(3, -1), "num_computed_tokens": 0, "vision_start_token_id": 1,
            "image_token_id": 9, "video_token_id": 8,
        },
    ),
    (
        positions.restrict_positions,
        {"positions_3L": torch.arange(6).expand(3, -1), "keep_L": torch.ones(6, dtype=torch.bool)},
    ),
)  # fmt: skip


@pytest.mark.parametrize(("function", "usual"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_an_odd_argument_is_used_or_refused(function, usual):
    assert outcome_of(lambda: function(**usual)) == "right"
    for name in usual:
        for i in range(len(odd_values())):
            value = odd_values()[i]
            outcome = outcome_of(lambda: function(**(usual | {name: value})))  # noqa: B023
            assert outcome in ("right", "clear"), f"{name}: {type(value).__name__}, value {i}: {outcome}"


def test_sizes_in_tensors_are_read_once():
    """A budget that doubles does so on a number of its own, and not in the caller's tensor."""
    least = torch.tensor(8)
    assert generate_budgets(least, 20) == [8, 16, 20]
    assert least == 8
