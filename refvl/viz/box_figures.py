"""Figures of the boxes in an answer, and of their shift if the numbers are read in a different
convention.

plot_boxes          boxes and points on an image
plot_box_readings   one answer, read by every convention
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from refvl.study.boxes import from_picture, rescale
from refvl.viz.style import HIGHLIGHT, PRUNED, STAGE_COLORS, image_axes


def plot_boxes(
    image, boxes=(), labels: Sequence[str] = (), *, points=(), color=HIGHLIGHT, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw boxes (n, 4) with labels, and points (m, 2), on an image; coordinates are its pixels,
    and corners may be in any order.

    image: a PIL image or an array (H, W, 3).
    """
    ax = image_axes(ax, title)
    ax.imshow(image)
    for i, (x1, y1, x2, y2) in enumerate(np.asarray(boxes, dtype=float).reshape(-1, 4)):
        ax.add_patch(_rectangle((x1, y1, x2, y2), fill=False, edgecolor=color, lw=2))
        if i < len(labels):
            look: dict[str, Any] = {"va": "top", "fontsize": 9, "backgroundcolor": "white"}
            corner, shift = (min(x1, x2), min(y1, y2)), (3, -3)
            ax.annotate(labels[i], corner, xytext=shift, textcoords="offset points", **look)
    for x, y in np.asarray(points, dtype=float).reshape(-1, 2):
        ax.plot(x, y, "o", color=color, ms=7, markeredgecolor="white")
    return ax


def plot_box_readings(
    box: Sequence[float], *, picture: Sequence[int], resized: Sequence[int], family: str, ax: Axes | None = None
) -> Axes:
    """Draw a box on an empty image, and where each convention places the box if `family` writes it
    in whole numbers.

    box: x1, y1, x2, y2 in pixels of the image. picture, resized: (width, height). The legend lists
    the distance of each box's centre from the true centre, in pixels of the image.
    """
    answer = from_picture([box], picture=picture, resized=resized, family=family).round()
    ax = image_axes(ax, f"{family} writes {answer[0].int().tolist()}", figsize=(4.4, 5.4))
    size = f"image, {picture[0]} x {picture[1]}"
    ax.add_patch(_rectangle((0, 0, *picture), facecolor=PRUNED, edgecolor="0.4", label=size))
    ax.add_patch(_rectangle(box, facecolor=HIGHLIGHT, alpha=0.5, label="the object"))
    spaces = {"0 to 1000": (1000, 1000), "pixels of the image": picture, "pixels of the resized image": resized}
    for i, (name, space) in enumerate(spaces.items()):
        x1, y1, x2, y2 = rescale(answer, space, picture)[0].tolist()
        off = np.hypot(x1 + x2 - box[0] - box[2], y1 + y2 - box[1] - box[3]) / 2
        look = {"edgecolor": STAGE_COLORS[(0, 3, 2)[i]], "ls": ("-", "--", ":")[i]}
        label = f"read as {name}: {off:.0f} px off"
        ax.add_patch(_rectangle((x1, y1, x2, y2), fill=False, lw=2, label=label, **look))
    ax.autoscale_view()
    ax.invert_yaxis()
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=9)
    return ax


def _rectangle(box: Sequence[float], **style) -> Rectangle:
    x1, y1, x2, y2 = box
    return Rectangle((x1, y1), x2 - x1, y2 - y1, **style)
