"""One figure language: the same thing has the same colour in every notebook."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import color_sequences
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

AXIS_COLORS = {"t": "#d1495b", "h": "#00798c", "w": "#edae49"}  # time, height, width
TOKEN_COLORS = {"text": "#c9ced6", "image": "#3d5a80", "video": "#8d5a97"}
KEPT, PRUNED = "#2a9d8f", "#e9e9e9"
UNUSED: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.6", "hatch": "////", "linewidth": 0}  # padding, waiting
STAGE_COLORS = color_sequences["tab10"]
SEQUENCE_CMAP = "viridis"  # order along a sequence, first to last
HIGHLIGHT = "#ff7f0e"  # what a figure points at


def notebook_figures(dpi: int = 80) -> None:
    """Make a notebook's inline figures light: photographs become JPEG, drawings PNG of few colours."""
    from IPython import get_ipython
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    plt.rcParams["figure.dpi"] = dpi
    if (shell := get_ipython()) is not None:
        set_matplotlib_formats("png")  # settles the backend, which would otherwise replace the formatters below
        for kind in ("png", "jpeg"):
            formatter = shell.display_formatter.formatters[f"image/{kind}"]
            formatter.for_type(Figure, partial(encode_if_lighter, kind))


def encode_if_lighter(kind: str, figure: Figure) -> bytes | None:
    """The figure as "png" or "jpeg", or None when the other one is smaller."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    picture = Image.open(buffer).convert("RGB")
    encoded = {"png": io.BytesIO(), "jpeg": io.BytesIO()}
    picture.quantize(128, dither=Image.Dither.NONE).save(encoded["png"], "png", optimize=True)
    picture.save(encoded["jpeg"], "jpeg", quality=72, optimize=True)
    sizes = {name: len(data.getvalue()) for name, data in encoded.items()}
    return encoded[kind].getvalue() if kind == min(sizes, key=sizes.__getitem__) else None


def axes_or_new(ax: Axes | None, *, figsize: tuple[float, float] = (6, 4)) -> Axes:
    """`ax` itself, or the axes of a new figure with constrained layout."""
    return plt.subplots(figsize=figsize, layout="constrained")[1] if ax is None else ax


def image_axes(ax: Axes | None, title: str, *, figsize: tuple[float, float] = (5, 5)) -> Axes:
    """Axes for an image in pixels: equal scale, no frame of ticks, a title."""
    ax = axes_or_new(ax, figsize=figsize)
    ax.set(title=title, xticks=[], yticks=[], aspect="equal")
    return ax


def interactive(draw: Callable, **widgets):
    """Sliders that redraw `draw(**values)` into one image; `draw` returns Axes. Needs ipywidgets.

    The figure is rendered to PNG and closed, which is quicker than a live canvas and leaves no widget output behind.
    Returns the ipywidgets container, with the controls in order.
    """
    import ipywidgets

    picture = ipywidgets.Image(format="png", layout={"align_self": "flex-start", "max_width": "100%"})  # not stretched

    def redraw(*_):
        figure = draw(**{name: widget.value for name, widget in widgets.items()}).figure
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=90)
        plt.close(figure)
        picture.value = buffer.getvalue()

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([*widgets.values(), picture])
