"""Figures of families side by side. Oracle: the numbers that go in, read back from the drawn bars and lines."""

import pytest

from refvl import viz
from refvl.study.costs import MediaPlan
from refvl.study.report import Trace

NAMES = ("Qwen2.5-VL", "Qwen3-VL", "GLM-4.1V", "MiniCPM-V 4.5", "Step3-VL")


def plan(patches, tokens):
    return MediaPlan("image", "", "", (), patches, tokens, tokens)


def test_costs_sum_the_media_of_a_family():
    plans = {name: [plan(100 * i, 10), plan(60 * i, 10)] for i, name in enumerate(NAMES, start=1)}
    ax = viz.plot_family_costs(plans, title="a title")
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == [160, 320, 480, 640, 800, 20, 20, 20, 20, 20]
    assert [label.get_text().split("\n")[1] for label in ax.get_xticklabels()] == [
        f"{n} patches per token" for n in (8, 16, 24, 32, 40)
    ]
    assert ax.get_title() == "a title" and ax.get_yscale() == "log"


def test_curves_have_a_line_a_colour_and_a_mark_per_family():
    sides, tokens = [112, 224, 448], {name: [i, 4 * i, 16 * i] for i, name in enumerate(NAMES, start=1)}
    ax = viz.plot_family_curves(sides, tokens)
    assert [list(line.get_ydata()) for line in ax.lines] == list(tokens.values())
    assert len({line.get_color() for line in ax.lines}) == len({line.get_marker() for line in ax.lines}) == len(NAMES)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["112", "224", "448"]


def test_stages_stand_end_to_end():
    traces = {name: Trace(seconds={"plan": 0.001 * i, "encode": 0.002}) for i, name in enumerate(NAMES, start=1)}
    ax = viz.plot_family_stages(traces)
    ends = [bar.get_x() + bar.get_width() for bar in ax.patches]
    assert ends[:5] == pytest.approx([1, 2, 3, 4, 5])
    assert ends[5:] == pytest.approx([sum(trace.seconds.values()) * 1e3 for trace in traces.values()])


def test_a_race_has_a_panel_per_measure_and_a_line_per_family():
    def costs(n):
        return {"tokens": n, "positions": n / 2, "bytes": 1e6 * n, "seconds": n / 1e3}

    rows = [
        {"size": 112, "families": {"GLM-4.1V": costs(16), "Step3-VL": costs(169)}},
        {"size": 224, "families": {"GLM-4.1V": costs(64)}},
    ]
    axes = viz.plot_family_race(rows, "image", at=224)
    assert axes[0].get_title() == "tokens" and len(axes) == 4
    glm, step3, mark = axes[3].lines
    assert list(glm.get_ydata()) == [0.016, 0.064] and list(step3.get_xdata()) == [112]
    assert set(mark.get_xdata()) == {224}


def test_ablations_frame_what_is_needed():
    """One cell per row with its percentage, a frame where answers were lost, and the model as it is first."""
    fixed = {"model": "tiny-x", "n": 100, "chance": 0.25}
    rows = [
        fixed | {"question": "place", "without": "", "right": 99, "needed": False},
        fixed | {"question": "place", "without": "table of zeros", "right": 12, "needed": True},
        fixed | {"question": "color", "without": "", "right": 100, "needed": False},
    ]
    ax = viz.plot_ablations(rows)
    assert [text.get_text() for text in ax.texts] == ["99%", "12%", "100%"]
    assert [patch.get_linewidth() > 0 for patch in ax.patches] == [False, True, False]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["unchanged", "table of zeros"]
    assert ax.get_title() == "tiny-x, correct answers" and ax.get_xticklabels()[0].get_text() == "place\n(chance 25%)"
