"""The contract of figures: drawn onto the axes given or onto their own, and clear about what they need.

What they show is tested in the files beside; here nothing is looked at but the axes.
"""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image

from refvl import viz
from refvl.graphs import Batch, TraceGraph
from refvl.pixels.by_hand import patchify_image
from refvl.pixels.crops import CropConfig, CropLayout
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import SliceConfig
from refvl.positions import (
    MediaSpan,
    compute_dissimilarity,
    compute_retention_mask,
    get_mrope_input_positions,
    get_window_index,
    mrope_axis_of_pairs,
)
from refvl.study.report import Trace

CONFIG, PICTURE = PatchConfig(), Image.new("RGB", (140, 84), "teal")
TINY = CropConfig(image_size=84, crop_size=56, max_side=336)
WINDOWS = get_window_index([(1, 14, 20)])
THW, CLIP = (3, 2, 4), MediaSpan(10, 3, 2, 4, t_factor=2.0)
POSITIONS, _ = get_mrope_input_positions(40, [CLIP])
FRAMES = np.random.default_rng(0).integers(0, 255, (6, 56, 112, 3), dtype=np.uint8)
EMBEDS = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
MASK = compute_retention_mask(EMBEDS, THW, 1, 0.5)
KEEP = torch.cat([torch.ones(10), MASK, torch.ones(6)]).bool()
BATCHES, TOKENS = [Batch((0, 2), 64), Batch((1,), None)], [30, 200, 30]
PATHS = [{"local": 30, "global": 20}, {"local": 0, "global": 20}]
ON_PATHS = [Batch((0,), 40, "local", 30), Batch((0, 1), 80, "global", 40)]
WEIGHTS, TABLE = torch.rand(2, 6), torch.randn(36, 5)
DISSIMILARITY = compute_dissimilarity(EMBEDS, 3)


def recording(ax):
    a, graph = torch.ones(2), TraceGraph()
    graph.capture(lambda: a * 2)
    return viz.plot_recording(graph, {"a": a}, ax=ax)


SINGLE = {
    "patches": lambda ax: viz.plot_patches(PICTURE, CONFIG, ax=ax),
    "patch rows": lambda ax: viz.plot_patch_rows(*patchify_image(PICTURE, CONFIG), CONFIG, ax=ax),
    "windows": lambda ax: viz.plot_windows(PICTURE, CONFIG, ax=ax),
    "permutation": lambda ax: viz.plot_window_permutation(*WINDOWS, ax=ax),
    "segments": lambda ax: viz.plot_attention_segments(WINDOWS[1], ax=ax),
    "timings": lambda ax: viz.plot_stage_timings(Trace(seconds={"plan": 0.5}, token_ids=[1]), ax=ax),
    "recording": recording,
    "packing": lambda ax: viz.plot_packing(TOKENS, BATCHES, ax=ax),
    "launches": lambda ax: viz.plot_launches([3.0, 3.0], 1.0, ax=ax),
    "waste": lambda ax: viz.plot_waste({"greedy": {1: 0.5}}, ax=ax),
    "positions": lambda ax: viz.plot_positions(POSITIONS, [CLIP], ax=ax),
    "axes": lambda ax: viz.plot_mrope_axes({"Qwen3-VL": mrope_axis_of_pairs((4, 2, 2), interleaved=True)}, ax=ax),
    "places": lambda ax: viz.plot_place_answers(["left"], ["right"], ["left", "right"], ax=ax),
    "accuracy": lambda ax: viz.plot_accuracy_curve({"motion": {0.0: 1.0}}, {"ttft": {0.0: 2.0}}, ax=ax),
    "crop prompt": lambda ax: viz.plot_crop_prompt(CropLayout(2, 3), ax=ax),
    "crop tokens": lambda ax: viz.plot_crop_tokens(ax=ax),
    "paths": lambda ax: viz.plot_path_timeline(PATHS, ON_PATHS, ax=ax),
    "frame tokens": lambda ax: viz.plot_frame_tokens([1, 10], {"one": [3, 4]}, ax=ax),
    "patch values": lambda ax: viz.plot_patch_values(torch.arange(8), (2, 4), ax=ax),
}
STRIPS = {  # rows and columns of axes
    "rotary": ((2, 3), lambda ax: viz.plot_rotary((4, 6), head_dim=12, ax=ax)),
    "position grid": ((3, 3), lambda ax: viz.plot_position_grid(POSITIONS, CLIP, ax=ax)),
    "keep mask": ((1, 3), lambda ax: viz.plot_keep_mask(FRAMES, MASK, THW, ax=ax)),
    "dissimilarity": ((1, 3), lambda ax: viz.plot_dissimilarity(DISSIMILARITY, THW, ax=ax)),
    "pruned positions": ((1, 2), lambda ax: viz.plot_pruned_positions(POSITIONS, KEEP, [CLIP], ax=ax)),
    "position table": ((1, 3), lambda ax: viz.plot_position_table(TABLE, [(PICTURE, (4, 6))], ax=ax)),
    "crops": (
        (1, 2),
        lambda ax: viz.plot_crops(PICTURE, TINY, crop_tokens=1, image_tokens=4, ax=ax),
    ),
    "slices": ((1, 2), lambda ax: viz.plot_slices(PICTURE, SliceConfig(), query_num=9, ax=ax)),
    "queries": ((1, 2), lambda ax: viz.plot_query_attention(PICTURE, WEIGHTS, (2, 3), ax=ax)),
}


@pytest.mark.parametrize("draw", SINGLE.values(), ids=SINGLE)
def test_draws_onto_the_axes_given_and_makes_its_own_otherwise(draw, ax):
    assert draw(ax) is ax and ax.has_data()
    figures = plt.get_fignums()
    own = draw(None)
    assert own is not ax and own.figure.number not in figures and own.get_title() == ax.get_title()


@pytest.mark.parametrize(("size", "draw"), STRIPS.values(), ids=STRIPS)
def test_strips_draw_onto_the_axes_given_or_their_own(size, draw):
    given = plt.subplots(*size, squeeze=False)[1]
    drawn = np.array(draw(given))
    assert list(drawn.flat) == list(given.flat) and all(ax.has_data() for ax in given.flat)
    assert np.array(draw(None)).shape == drawn.shape
    count = size[0] * size[1]
    with pytest.raises(ValueError, match=rf"ax: expected .* axes, got {count + 1}"):
        draw(plt.subplots(1, count + 1, squeeze=False)[1])


REFUSED = {
    r"highlight.*0 to 14, got 15": lambda: viz.plot_patches(PICTURE, CONFIG, highlight=(15,)),
    r"numbers.*'places'": lambda: viz.plot_windows(PICTURE, CONFIG, numbers="places"),
    "weights_QL: dimension 1 must be 8, got 6": lambda: viz.plot_query_attention(PICTURE, WEIGHTS, (2, 4)),
    "values_N: dimension 0 must be 8, got 7": lambda: viz.plot_patch_values(torch.arange(7), (2, 4)),
    "variant: .* 'glm5'": lambda: viz.explore_timeline(variant="glm5"),
    "sizes: expected at least one, got none": lambda: viz.explore_assignment([]),
    r"ranks: expected 1 to 8 \(max_ranks\), got 9": lambda: viz.explore_assignment([3, 4], ranks=9),
}


@pytest.mark.parametrize(("message", "draw"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(message, draw):
    with pytest.raises(ValueError, match=message):
        draw()
