"""One figure language: the same thing has the same colour in every notebook."""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

AXIS_COLORS = {"t": "#d1495b", "h": "#00798c", "w": "#edae49"}  # time, height, width
TOKEN_COLORS = {"text": "#c9ced6", "image": "#3d5a80", "video": "#8d5a97"}
KEPT, PRUNED = "#2a9d8f", "#e9e9e9"
STAGE_COLORS = plt.get_cmap("tab10").colors
SEQUENCE_CMAP = "viridis"  # order along a sequence, first to last
HIGHLIGHT = "#ff7f0e"  # what a figure points at


def notebook_figures(quality: int = 85) -> None:
    """Inline figures of a notebook as JPEG: a page full of photographs stays light."""
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    set_matplotlib_formats("jpeg", pil_kwargs={"quality": quality})
    plt.rcParams["figure.dpi"] = 90


def axes_or_new(ax: Axes | None, *, figsize: tuple[float, float] = (6, 4)) -> Axes:
    """`ax` itself, or the axes of a new figure with constrained layout."""
    return plt.subplots(figsize=figsize, layout="constrained")[1] if ax is None else ax


def image_axes(ax: Axes | None, title: str, *, figsize: tuple[float, float] = (5, 5)) -> Axes:
    """Axes for a picture in pixels: equal scale, no frame of ticks, a title."""
    ax = axes_or_new(ax, figsize=figsize)
    ax.set(title=title, xticks=[], yticks=[], aspect="equal")
    return ax


def interactive(draw: Callable, **widgets):
    """Sliders that redraw `draw(**values)` into one picture; `draw` returns Axes. Needs ipywidgets.

    The figure is rendered to PNG and closed, which is quicker than a live canvas and leaves no widget output behind.
    Returns the ipywidgets container, with the controls in order.
    """
    import io

    import ipywidgets

    picture = ipywidgets.Image(format="png")

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
