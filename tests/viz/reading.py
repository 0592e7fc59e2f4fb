"""What a figure shows, read back from its axes as plain numbers and words."""

import numpy as np


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def ticks(ax) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def legend(ax) -> list[str]:
    return [name.get_text() for name in ax.get_legend().get_texts()]


def lines(ax) -> list[list]:
    """[[x, y], ...] of every line."""
    return [line.get_xydata().round(6).tolist() for line in ax.lines]


def corners(patch) -> list[float]:
    return [*patch.get_xy(), patch.get_x() + patch.get_width(), patch.get_y() + patch.get_height()]


def _spans(bars) -> list[tuple]:
    found = ((bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in bars)
    return [tuple(round(float(number), 6) for number in bar) for bar in found]


def bars(ax) -> list[tuple]:
    """(left, width, row) of the bars that are neither padding nor an outline."""
    return _spans(bar for bar in ax.patches if bar.get_facecolor()[3] and not bar.get_hatch())


def padding(ax) -> list[tuple]:
    """(left, width, row) of the hatched bars."""
    return _spans(bar for bar in ax.patches if bar.get_hatch())


def outlines(ax) -> list[tuple]:
    return _spans(bar for bar in ax.patches if not bar.get_facecolor()[3])


def image(ax, index: int = 0) -> np.ndarray:
    return np.asarray(ax.images[index].get_array())
