"""The contract of figures: drawn onto the axes given or onto their own, clear about what they need, and showing the
numbers that go in. Oracle: these numbers, counted by hand; what figures of images and prompts show is tested beside."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image
from reading import bars, image, legend, lines, outlines, padding, texts, ticks

from refvl import viz
from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionConfig, Qwen2_5_VisionTransformer
from refvl.graphs import Batch, TraceGraph
from refvl.graphs.buffers import fill_metadata
from refvl.paths import DATA
from refvl.pixels.crops import CropLayout
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import SliceConfig
from refvl.positions import MediaSpan, get_mrope_input_positions, mrope_axis_of_pairs
from refvl.serving.parallel import get_load_balance_assignment
from refvl.study.costs import MediaPlan
from refvl.study.report import Trace
from refvl.viz.style import HIGHLIGHT

CONFIG, PICTURE = PatchConfig(), Image.new("RGB", (140, 84), "teal")
THW, CLIP = (3, 2, 4), MediaSpan(10, 3, 2, 4, t_factor=2.0)
POSITIONS, _ = get_mrope_input_positions(40, [CLIP])
FRAMES = np.random.default_rng(0).integers(0, 255, (6, 56, 112, 3), dtype=np.uint8)
MASK = torch.arange(24) % 3 > 0
TOKENS = [30, 200, 30, 600]
BATCHES = [Batch((0, 2), 64), Batch((1,), 256), Batch((3,), None)]
PATHS = [{"local": 30, "global": 20}, {"local": 0, "global": 20}, {"local": 90, "global": 20}]
ON_PATHS = [Batch((0,), 40, "local", 30), Batch((2,), None, "local", 90), Batch((0, 1, 2), 80, "global", 60)]
SIZES = [40, 10, 25, 30, 5, 12]
ASSIGNED = get_load_balance_assignment(SIZES, 3)
TRUE, SAID = ["left", "left", "right", "left"], ["left", "right", "red", "left"]
ACCURACY = {"motion": {0.0: 1.0, 0.5: 0.75}, "color": {0.0: 0.5, 0.5: 0.25}}
SHARES = [{"what": "a", "seconds": {"plan": 1, "encode": 2}}, {"what": "b", "seconds": {"plan": 3}}]
ESTIMATES = [{"px": 112, "products": 1.0, "traffic": 2.0, "launches": 5.0}]
AXES = mrope_axis_of_pairs((4, 2, 2), interleaved=True)
NAMES = ("Qwen2.5-VL", "Qwen3-VL")
MEDIA = {NAMES[0]: [MediaPlan("image", "", "", (), n, 10, 10) for n in (100, 60)]}
TIMED = Trace(seconds={"decode media": 0.002, "encode": 0.5, "decode tokens": 0.25}, token_ids=[1, 2, 3])
TIMED.embeds = [torch.zeros(9, 128)]
STAGES = {name: Trace(seconds={"plan": 0.001 * i, "encode": 0.002}) for i, name in enumerate(NAMES, 1)}
MEASURED = json.loads((DATA / "measurements" / "cost_curves_cpu.json").read_text())
CURVES = [row for row in MEASURED["rows"] if row["x"] == "patches"]
ABLATED = [
    {"model": "tiny-x", "n": 100, "chance": 0.25, "question": "place"} | result
    for result in ({"without": "", "right": 99, "needed": False}, {"without": "zeros", "right": 12, "needed": True})
]


def recording(ax):
    """A tower of one block with attention in frames: each box is a part, and attention is one of them."""
    tower = Qwen2_5_VisionTransformer(replace(Qwen2_5_VisionConfig.tiny(), depth=1, fullatt_block_indexes=(0,)))
    pixels, buffers, graph = tower.pixel_buffer(16), tower.plan_capacity(16, 4), TraceGraph()
    graph.capture(lambda: tower(pixels, metadata=buffers, attention="masked"))
    return viz.plot_recording(graph, {"pixels": pixels, "cu_seqlens": buffers.cu_seqlens}, tower, ax=ax)


SINGLE = {  # how it is drawn, and what is shown
    "timings": (lambda ax: viz.plot_stage_timings(TIMED, ax=ax), {
        bars: [(0, 2, 0), (0, 500, 1), (0, 250, 2)],
        ticks: ["decode media", "encode", "decode tokens"],
        texts: [f"{ms} ms   {made}" for ms, (_, made, _) in zip(("2.0", "500.0", "250.0"), TIMED.rows(), strict=True)],
        "title": "752 ms in all, 502 ms to the first token",
    }),
    "recording": (recording, {
        bars: [(x - 0.45, 0.9, row) for x, row in enumerate([0, 1, 2, 3, 4, 3, 5, 6, 7, 8, 1])],
        lines: [[[0, 9]], [[4, 10]]],  # the first box reads the pixels, attention reads the lengths
        texts: ["1", "7", "6", "4", "41", "1", "1", "6", "6", "9", "1"],
        "title": "83 recorded operations",
    }),
    "packing": (lambda ax: viz.plot_packing(TOKENS, BATCHES, ax=ax), {
        bars: [(0, 30, 0), (30, 30, 0), (0, 200, 1), (0, 600, 2)],
        padding: [(60, 4, 0), (200, 56, 1)],
        outlines: [(0, 64, 0), (0, 256, 1)],
        ticks: ["graph of 64", "graph of 256", "eager"],
        "title": "2 replays, budgets sum to 320, 19% padding",  # 1 - 260 / 320
    }),
    "axes": (lambda ax: viz.plot_mrope_axes({"interleaved": AXES, "all t": AXES * 0}, ax=ax), {
        bars: [(i, 1, row) for row in (0, 1) for i in range(8)], ticks: ["interleaved", "all t"],
    }),
    "places": (lambda ax: viz.plot_place_answers(TRUE, SAID, ["left", "right"], title="x", ax=ax), {
        texts: ["2", "1", "1"], "where": [(0, 0), (1, 0), (2, 1)], "title": "x: 2 of 4 correct",
    }),
    "accuracy": (lambda ax: viz.plot_accuracy_curve(ACCURACY, ax=ax), {
        lines: [[[0, 100], [0.5, 75]], [[0, 50], [0.5, 25]]], legend: ["motion", "color"],
    }),
    "crop prompt": (lambda ax: viz.plot_crop_prompt(CropLayout(2, 2), crop_tokens=9, image_tokens=25, ax=ax), {
        # crops with two separators each, a newline between two rows, the overview
        bars: [(0, 11, 0), (11, 11, 0), (23, 11, 0), (34, 11, 0), (45, 27, 0)],
        lines: [[[22.5, -0.55], [22.5, 0.55]]],
        texts: ["0", "1", "2", "3", "overview"],
        "title": "2 x 2 crops: 4 x (9 + 2) + 1 newline + (25 + 2) = 72 tokens in the prompt",
    }),
    "paths": (lambda ax: viz.plot_path_timeline(PATHS, ON_PATHS, title="three images", ax=ax), {
        # 40 computed for 30, 90 eagerly, then 80 for 60
        bars: [(0, 30, 0), (40, 90, 0), (130, 20, 1), (150, 20, 1), (170, 20, 1)],
        padding: [(30, 10, 0), (190, 20, 1)],
        outlines: [(0, 40, 0), (40, 90, 0), (130, 80, 1)],
        texts: ["0", "2", "0", "1", "2"],
        "title": "three images: 2 replays with 120 tokens, 25% padding, 1 eager",
    }),
    "frame tokens": (lambda ax: viz.plot_frame_tokens([1, 10], {"one": [3, 4], "two": [6, 7]}, title="x", ax=ax), {
        lines: [[[1, 3], [10, 4]], [[1, 6], [10, 7]]], legend: ["one", "two"], "title": "x",
    }),
    "patch values": (lambda ax: viz.plot_patch_values(torch.arange(8), (2, 4), ax=ax), {
        image: [[0, 1, 4, 5], [2, 3, 6, 7]],  # two merge blocks side by side, each read row by row
    }),
    "assignment": (lambda ax: viz.plot_assignment(SIZES, ASSIGNED, title="by size", ax=ax), {
        bars: [(0, 40, 0), (0, 30, 1), (30, 10, 1), (0, 25, 2), (25, 12, 2), (37, 5, 2)],
        padding: [(40, 2, 0), (40, 2, 1), (42, 0, 2)],
        ticks: ["rank 0", "rank 1", "rank 2"],
        "title": "by size: 2.9 times as fast on 3 ranks",
    }),
    "gather": (lambda ax: viz.plot_gather(SIZES[:3], get_load_balance_assignment(SIZES[:3], 2), ax=ax), {
        bars: [(0, 40, 0), (40, 25, 0), (65, 10, 0), (0, 40, 1.1), (40, 10, 1.1), (50, 25, 1.1)],
        padding: [(40, 0, 0), (75, 5, 0)],
        "title": "80 rows sent for 75 tokens, 6% padding",
    }),
    "speed-up": (lambda ax: viz.plot_speed_up({"by size": {1: 1.0, 2: 1.9}, "by count": {1: 1.0, 2: 1.5}}, ax=ax), {
        lines: [[[1, 1], [2, 2]], [[1, 1], [2, 1.9]], [[1, 1], [2, 1.5]]], legend: ["ideal", "by size", "by count"],
    }),
    "costs": (lambda ax: viz.plot_family_costs(MEDIA, title="x", ax=ax), {"heights": [160, 20], "title": "x"}),
    "curves": (lambda ax: viz.plot_family_curves([112, 224], {NAMES[0]: [1, 4], NAMES[1]: [2, 8]}, ax=ax), {
        lines: [[[112, 1], [224, 4]], [[112, 2], [224, 8]]], legend: list(NAMES),
    }),
    "stages": (lambda ax: viz.plot_family_stages(STAGES, ax=ax), {
        bars: [(0, 1, 0), (0, 2, 1), (1, 2, 0), (2, 2, 1)],
        legend: ["plan", "encode"],
    }),
    "shares": (lambda ax: viz.plot_stage_shares(SHARES, ax=ax), {
        bars: [(0, 1000, 0), (0, 3000, 1), (1000, 2000, 0), (3000, 0, 1)], legend: ["plan", "encode"],
    }),
    "ablations": (lambda ax: viz.plot_ablations(ABLATED, ax=ax), {
        texts: ["99%", "12%"],
        ticks: ["unchanged", "zeros"],
        "framed": [False, True],
    }),
    "cost curves": (lambda ax: viz.plot_cost_curves(CURVES, ax=ax), {
        lines: [[[point["x"], round(point["ms"], 6)] for point in row["points"]] for row in CURVES],
        legend: [f"{row['curve']}: {row['time_exponent']:.2f}" for row in CURVES],
    }),
    "estimates": (lambda ax: viz.plot_gpu_estimates(ESTIMATES, ax=ax), {"heights": [1, 2, 5]}),
}  # fmt: skip
READ = {
    "title": lambda ax: ax.get_title(),
    "where": lambda ax: [text.get_position() for text in ax.texts],
    "framed": lambda ax: [patch.get_linewidth() > 0 for patch in ax.patches],
    "heights": lambda ax: [bar.get_height() for bar in ax.patches],
}
STRIPS = {  # rows and columns of axes
    "position grid": ((3, 3), lambda ax: viz.plot_position_grid(POSITIONS, CLIP, ax=ax)),
    "keep mask": ((1, 3), lambda ax: viz.plot_keep_mask(FRAMES, MASK, THW, ax=ax)),
    "dissimilarity": ((1, 3), lambda ax: viz.plot_dissimilarity(torch.rand(3, 8), THW, ax=ax)),
    "slices": ((1, 2), lambda ax: viz.plot_slices(PICTURE, SliceConfig(), query_num=9, ax=ax)),
}
REFUSED = {
    r"highlight.*0 to 14, got 15": lambda: viz.plot_patches(PICTURE, CONFIG, highlight=(15,)),
    r"numbers.*'places'": lambda: viz.plot_windows(PICTURE, CONFIG, numbers="places"),
    "weights_QL: dimension 1 must be 8, got 6": lambda: viz.plot_query_attention(PICTURE, torch.rand(2, 6), (2, 4)),
    "variant: .* 'glm5'": lambda: viz.explore_timeline(variant="glm5"),
    r"ranks: expected 1 to 8 \(max_ranks\), got 9": lambda: viz.explore_assignment([3, 4], ranks=9),
}


@pytest.mark.parametrize(("draw", "shown"), SINGLE.values(), ids=SINGLE)
def test_draws_its_numbers_onto_the_axes_given_and_makes_its_own_otherwise(draw, shown, ax):
    assert draw(ax) is ax and ax.has_data()
    figures = plt.get_fignums()
    own = draw(None)
    assert own is not ax and own.figure.number not in figures and own.get_title() == ax.get_title()
    for read, want in shown.items():
        found = READ.get(read, read)(ax)
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == want


@pytest.mark.parametrize(("size", "draw"), STRIPS.values(), ids=STRIPS)
def test_strips_draw_onto_the_axes_given_or_their_own(size, draw):
    given = plt.subplots(*size, squeeze=False)[1]
    drawn = np.array(draw(given))
    assert list(drawn.flat) == list(given.flat) and all(ax.has_data() for ax in given.flat)
    assert np.array(draw(None)).shape == drawn.shape
    count = size[0] * size[1]
    with pytest.raises(ValueError, match=rf"ax: expected .* axes, got {count + 1}"):
        draw(plt.subplots(1, count + 1, squeeze=False)[1])


@pytest.mark.parametrize(("message", "draw"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(message, draw):
    with pytest.raises(ValueError, match=message):
        draw()


def test_a_race_has_a_panel_per_measure_and_a_line_per_family():
    measures = ("tokens", "positions", "bytes", "seconds")
    rows = [
        {"size": 112, "families": {"GLM-4.1V": dict.fromkeys(measures, 16)}},
        {"size": 224, "families": {"GLM-4.1V": dict.fromkeys(measures, 64)}},
    ]
    axes = viz.plot_family_race(rows, "image", at=224)
    assert axes[0].get_title() == "tokens" and len(axes) == 4
    assert lines(axes[3]) == [[[112, 16], [224, 64]], [[224, 0], [224, 1]]]


def test_lanes_show_launches_an_eager_run_and_a_replay():
    """Two operations of 3 us: at 5 us per launch they start at 5 and 10, and a replay starts them at 5 and 8."""
    ax = viz.plot_launches([3.0, 3.0], 5.0)
    boxes = [[path.get_extents() for path in lane.get_paths()] for lane in ax.collections]
    starts = [[(box.x0, box.width) for box in lane] for lane in boxes]
    assert starts == [[(0, 5), (5, 5)], [(5, 3), (10, 3)], [(5, 3), (8, 3)]]
    assert ax.get_title("left") == "5 µs per launch: eager 13 µs (device idle 54%), replay 11 µs"


def test_buffers_show_their_contents_and_shade_the_padding():
    """The tower's static buffers at 16 tokens and 4 frames, filled for one item of 15 tokens."""
    tower = Qwen2_5_VisionTransformer(Qwen2_5_VisionConfig.tiny())
    buffers, planned = tower.plan_capacity(16, 4), tower.plan([(1, 6, 10)])
    fill_metadata(buffers, planned)
    index, positions = viz.plot_buffers(buffers, planned, ["window_index", "positions"])
    assert index.get_title() == "window_index: 15 of 16 filled, padding: identity"
    np.testing.assert_array_equal(index.lines[0].get_ydata(), buffers.window_index)
    np.testing.assert_array_equal(image(positions), buffers.positions.T)
    for panel, first, count in ((index, 14.5, 1), (positions, 59.5, 4)):
        [shade] = [box for box in panel.patches if to_rgb(box.get_facecolor()) == to_rgb(HIGHLIGHT)]
        assert (shade.get_x(), shade.get_width()) == (first, count)


def test_a_figure_is_described_by_its_titles_axes_and_legends():
    """Each is said once, in order; a label says it better; the text is short."""
    figure, (left, right) = plt.subplots(1, 2)
    figure.suptitle("two\nfamilies")
    left.plot([1, 2], label="GLM")
    left.legend()
    left.set(title="an image", xlabel="side, px", ylabel="tokens")
    figure.colorbar(right.imshow([[0, 1]]), label="error")
    right.set_title("where", loc="left")
    said = "two families; an image: tokens over side, px (GLM); where; colours: error"
    assert viz.style.describe_figure(figure) == said
    left.set_title("long " * 100)
    assert len(viz.style.describe_figure(figure)) <= 320
    figure.set_label("GLM makes fewer tokens.")
    assert viz.style.describe_figure(figure) == "GLM makes fewer tokens."
