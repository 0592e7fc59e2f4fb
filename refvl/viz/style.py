"""One figure style: the same thing has the same colour in every notebook."""

import io
import re
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

# One palette for figures and explorers. Against the surface, text (ink, muted, and *_text) has a contrast of at
# least 4.5, and marks have a contrast of at least 3. The colours t, h and w stand only for time, height and width,
# and no other colour looks like them. Colour-blind readers can distinguish the axes, and also the kinds of token.
# `empty` is the colour of absent things, such as pruned tokens.
THEMES = {
    "light": {
        "surface": "#ffffff", "ink": "#1c1c1c", "muted": "#5a6069", "line": "#8a8f98", "empty": "#e9e9e9",
        "t": "#b3264a", "h": "#0072a8", "w": "#c08400",
        "text": "#868e99", "image": "#2f7ed8", "video": "#8a1f6b", "kept": "#1b7f74", "highlight": "#d95f02",
        "w_text": "#855c00", "highlight_text": "#b04a00",
    },
    "dark": {
        "surface": "#111111", "ink": "#e8e8e8", "muted": "#a9b1bc", "line": "#747c88", "empty": "#30343a",
        "t": "#f2728f", "h": "#4fb3e8", "w": "#f0c05a",
        "text": "#79828f", "image": "#9ac4fe", "video": "#c45fd6", "kept": "#3dbfae", "highlight": "#ff9a3d",
        "w_text": "#f0c05a", "highlight_text": "#ff9a3d",
    },
}  # fmt: skip
_LIGHT = THEMES["light"]
AXIS_COLORS = {axis: _LIGHT[axis] for axis in "thw"}  # time, height, width
TOKEN_COLORS = {kind: _LIGHT[kind] for kind in ("text", "image", "video")}
KEPT, PRUNED = _LIGHT["kept"], _LIGHT["empty"]
UNUSED: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.6", "hatch": "////", "linewidth": 0}  # padding, waiting
# for adjacent bars and lines: consecutive colours, and the first six, differ most for all readers
STAGE_COLORS = (
    "#4068d0", "#e69f00", "#994f00", "#0f2080", "#7fc8a9", "#663333", "#009e73", "#5d3a9b", "#909010", "#1c1c1c",
)  # fmt: skip
SEQUENCE_CMAP = "viridis"  # order along a sequence, first to last
SEQUENCE_RANGES = {"light": (0.0, 0.85), "dark": (0.25, 1.0)}  # the part of the map that contrasts with the surface
HIGHLIGHT = _LIGHT["highlight"]  # the colour of things that a figure emphasises
HEAVY = 26_000  # bytes; larger notebook figures get half the resolution


def notebook_figures(dpi: int = 80, heavy: int = HEAVY) -> None:
    """Make a notebook's inline figures light and sharp, in `STAGE_COLORS`, and give them alt text:
    `as_output`.

    dpi: page pixels per inch of the figure. heavy: as in `as_output`.
    """
    from IPython import get_ipython
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    plt.rcParams["figure.dpi"] = dpi
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=STAGE_COLORS)
    if (shell := get_ipython()) is not None:
        set_matplotlib_formats()  # set the backend first, because it would otherwise add its own formatters
        shell.display_formatter.mimebundle_formatter.for_type(Figure, partial(as_output, heavy=heavy))


def as_output(figure: Figure, heavy: int = HEAVY, **_: Any) -> tuple[dict[str, bytes], dict[str, dict[str, Any]]]:
    """Return a figure as data and metadata of a notebook's output; the metadata is the alt text
    and the width on the page.

    The data is a JPEG or a PNG with a small palette, whichever is smaller.
    Its resolution is twice that of the page, or the page's if it would otherwise exceed
    `heavy` bytes.
    """
    sharp = _rendered(figure, 2 * figure.dpi)
    for times, quality in ((2, 55), (1, 72)):
        picture, buffer = sharp if times == 2 else sharp.reduce(2), io.BytesIO()
        picture.save(buffer, "jpeg", quality=quality, optimize=True, progressive=True)
        encoded = {"image/png": _png(picture), "image/jpeg": buffer.getvalue()}
        kind = min(encoded, key=lambda kind: len(encoded[kind]))
        if len(encoded[kind]) <= heavy:
            break
    return {kind: encoded[kind]}, {kind: {"alt": describe_figure(figure), "width": picture.width // times}}


def describe_figure(figure: Figure) -> str:
    """Describe a figure in words, for readers who cannot see it: its label, or titles,
    axes and legends by panel.

    Call `figure.set_label` to set a better sentence.
    """
    if label := str(figure.get_label()):
        return label
    panels = dict.fromkeys([figure.get_suptitle(), *map(_describe_panel, figure.axes)])
    return shorten("; ".join(filter(None, panels)), 320, placeholder=" ...")


def _describe_panel(ax: Axes) -> str:
    """Return "title: y over x (names of the legend)", without the parts that a panel lacks."""
    title = ", ".join(filter(None, (ax.get_title("left"), ax.get_title(), ax.get_title("right"))))
    axes = " over ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
    said = ": ".join(filter(None, ("colours" if ax.get_label() == "<colorbar>" else title, axes)))
    legend = ax.get_legend()
    return f"{said} ({', '.join(name.get_text() for name in legend.get_texts())})" if legend else said


def png_of(figure: Figure) -> bytes:
    """Return the figure as a PNG with a small palette, even if a JPEG would be smaller."""
    return _png(_rendered(figure, figure.dpi))


def _rendered(figure: Figure, dpi: float) -> Image.Image:
    buffer = io.BytesIO()
    as_is = {"compress_level": 0}  # the PNG is decoded at once, so speed matters
    figure.savefig(buffer, format="png", bbox_inches="tight", dpi=dpi, pil_kwargs=as_is)
    return Image.open(buffer).convert("RGB")


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.quantize(128, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def axes_or_new(ax: Axes | None, *, figsize: tuple[float, float] = (6, 4)) -> Axes:
    """Return `ax` itself, or the axes of a new figure with constrained layout."""
    return plt.subplots(figsize=figsize, layout="constrained")[1] if ax is None else ax


def headed(title: str, report: str) -> str:
    """Return a title followed by a report, or the report alone if there is no title."""
    return f"{title}: {report}" if title else report


def centered(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a text centred at (x, y)."""
    ax.text(x, y, text, ha="center", va="center", **style)


def image_axes(ax: Axes | None, title: str, *, figsize: tuple[float, float] = (5, 5)) -> Axes:
    """Return axes for an image in pixels: equal scale, no ticks, a title."""
    ax = axes_or_new(ax, figsize=figsize)
    ax.set(title=title, xticks=[], yticks=[], aspect="equal")
    return ax


def variables(*names: str) -> str:
    """Return colours of both themes as CSS variables; by default, all colours."""
    light, dark = (";".join(f"--{n}:{colors[n]}" for n in names or colors) for colors in THEMES.values())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def filled(template: Path, **parts: str) -> str:
    """Return an HTML template with each `{{name}}` replaced by its part."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template.read_text(encoding="utf-8"))


def ink_on(color) -> str:
    """Return black or white, whichever has more contrast on `color` (relative luminance as in WCAG
    2).
    """
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return "black" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else "white"
