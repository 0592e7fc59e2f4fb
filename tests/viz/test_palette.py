"""Colours that can be seen and told apart. Oracles: the contrast of WCAG 2, and distances in the OKLab space of what
readers with each colour blindness see, by the matrices of Machado, Oliveira and Fernandes (2009) at full severity."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex

from refvl.viz.style import STAGE_COLORS, THEMES, ink_on
from refvl.viz.windows import sequence_colors

SEEN_BY = {
    "everyone": np.eye(3),
    "protanopes": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopes": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopes": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
LMS = [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
OKLAB = [[0.21045426, 0.7936178, -0.00407205], [1.9779985, -2.4285922, 0.4505937], [0.02590404, 0.7827718, -0.80867577]]
APART = 0.08  # in OKLab, where black and white are 1 apart and 0.02 is just seen
GROUPS = [("t", "h", "w"), ("text", "image", "video"), ("kept", "highlight")]

each_theme = pytest.mark.parametrize("theme", THEMES)


def linear(color: str) -> np.ndarray:
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (light + 0.05) / (dark + 0.05)


def seen(color: str, matrix) -> np.ndarray:
    return np.array(OKLAB) @ np.cbrt(np.array(LMS) @ np.clip(np.array(matrix) @ linear(color), 0, 1))


@each_theme
def test_text_and_marks_stand_out(theme):
    colors = THEMES[theme]
    ratios = {name: contrast(color, colors["surface"]) for name, color in colors.items()}
    text = {name for name in ratios if name in ("ink", "muted") or name.endswith("_text")}
    assert [name for name in text if ratios[name] < 4.5] == []
    assert {name for name, ratio in ratios.items() if ratio < 3} == {"surface", "empty"}


def test_numbers_on_items_can_be_read():
    """Black or white has a contrast of 4.5 on any colour."""
    inks = {"black": "#000000", "white": "#ffffff"}
    assert {ink_on(color) for color in sequence_colors(64)} == set(inks)
    assert min(contrast(inks[ink_on(color)], to_hex(color)) for color in sequence_colors(64)) > 4.5


@each_theme
@pytest.mark.parametrize("readers", SEEN_BY)
def test_groups_can_be_told_apart(theme, readers):
    for group in GROUPS:
        for one, other in itertools.combinations(group, 2):
            apart = seen(THEMES[theme][one], SEEN_BY[readers]) - seen(THEMES[theme][other], SEEN_BY[readers])
            assert np.linalg.norm(apart) >= APART, (one, other)


@pytest.mark.parametrize("readers", SEEN_BY)
def test_bars_and_lines_can_be_told_apart(readers):
    """Twice as far where bars touch; 1.5 times among the six that a figure takes first."""
    points = [seen(color, SEEN_BY[readers]) for color in STAGE_COLORS]
    for i, j in itertools.combinations(range(len(points)), 2):
        least = 2 if j == i + 1 else 1.5 if j < 6 else 1
        assert np.linalg.norm(points[i] - points[j]) >= least * APART, (i, j)
