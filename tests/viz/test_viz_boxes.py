"""Figures of boxes. Oracle: the maps of `refvl.study.boxes`."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from refvl import viz
from refvl.study.boxes import from_picture, to_picture

PICTURE, RESIZED, BOX = (1080, 1920), (728, 1316), (700, 1300, 950, 1700)


def corners(patch):
    return [*patch.get_xy(), patch.get_x() + patch.get_width(), patch.get_y() + patch.get_height()]


def test_boxes_and_points_lie_where_they_are():
    ax = plt.subplots()[1]
    given = [[10, 20, 30, 60], [50, 40, 20, 10]]
    drawn = viz.plot_boxes(Image.new("RGB", (80, 70)), given, ["a", "b"], points=[[5, 6]], title="two", ax=ax)
    assert drawn is ax and [corners(patch) for patch in ax.patches] == given
    assert [text.get_text() for text in ax.texts] == ["a", "b"] and ax.texts[1].xy == (20, 10)
    assert ax.lines[0].get_xydata().tolist() == [[5, 6]] and ax.get_title() == "two"
    assert ax.images[0].get_array().shape == (70, 80, 3)
    assert not viz.plot_boxes(np.zeros((4, 4, 3))).patches


@pytest.mark.parametrize(("family", "right"), [("Qwen2.5-VL", 2), ("Qwen3-VL", 0)])
def test_readings_show_how_far_a_wrong_convention_is_off(family, right):
    """Oracle: `to_picture` for the right one; for the others its own sum."""
    ax = viz.plot_box_readings(BOX, picture=PICTURE, resized=RESIZED, family=family)
    said = from_picture([BOX], picture=PICTURE, resized=RESIZED, family=family).round()
    assert ax.get_title() == f"{family} writes {said[0].int().tolist()}"
    picture, thing, *readings = ax.patches
    assert corners(picture) == [0, 0, *PICTURE] and corners(thing) == [*BOX]
    [want] = to_picture(said, picture=PICTURE, resized=RESIZED, family=family).tolist()
    assert corners(readings[right]) == pytest.approx(want)
    for space, patch in zip(((1000, 1000), PICTURE, RESIZED), readings, strict=True):
        want = [x * p / s for x, p, s in zip(said[0].tolist(), PICTURE * 2, space * 2, strict=True)]
        assert corners(patch) == pytest.approx(want, rel=1e-6)  # float32
        off = np.hypot(*((np.array(want) - BOX).reshape(2, 2).mean(0)))
        assert patch.get_label().endswith(f": {off:.0f} px off")
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "y grows downwards"
