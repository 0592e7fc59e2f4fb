"""Figures of measurements. Oracle: the committed files whose numbers they show."""

import json

import pytest

from refvl import viz
from refvl.paths import DATA

MEASURED = json.loads((DATA / "measurements" / "performance_cpu.json").read_text())
CURVES = json.loads((DATA / "measurements" / "cost_curves_cpu.json").read_text())["rows"]


def test_stage_shares_lie_end_to_end():
    ax = viz.plot_stage_shares(MEASURED["stages"])
    ends = [max(bar.get_x() + bar.get_width() for bar in ax.patches if bar.get_y() == y) for y in
            sorted({bar.get_y() for bar in ax.patches})]  # fmt: skip
    assert ends == pytest.approx([sum(row["seconds"].values()) * 1e3 for row in MEASURED["stages"]])


def test_cost_curves_hold_every_point_and_name_the_exponent():
    rows = [row for row in CURVES if row["x"] == "patches"]
    ax = viz.plot_cost_curves(rows)
    for row, line in zip(rows, ax.lines, strict=True):
        assert line.get_xydata().tolist() == [[point["x"], point["ms"]] for point in row["points"]]
        assert line.get_label() == f"{row['curve']}: {row['time_exponent']:.2f}"


def test_roofline_holds_a_point_per_tower_and_dtype():
    ax = viz.plot_roofline(MEASURED)
    points = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert len(points) == 2 * len(MEASURED["towers"])
    for row, point in zip(MEASURED["towers"], points, strict=False):  # in float32 by the faster kernel
        milliseconds = min(row[kernel]["ms"] for kernel in ("float32", "onednn"))
        assert point.get_ydata()[0] == pytest.approx(row["operations"] / (milliseconds * 1e-3) / 1e9)
    assert max(ax.lines[0].get_ydata()) == pytest.approx(MEASURED["peaks"]["float32"] / 1e9)


def test_estimates_stack_what_follows_each_other():
    rows = [{"px": 112, "products": 1.0, "traffic": 2.0, "launches": 5.0}]
    ax = viz.plot_gpu_estimates(rows)
    assert [(bar.get_y(), bar.get_height()) for bar in ax.patches] == [(0, 1), (1, 2), (0, 5)]
    assert "not measured" in ax.get_title()
