"""Tensors as HTML figures: a name, a shape, some numbers, and the drawing that fits the contents.

tensor_figure   cumulative lengths as segments, a permutation as an order, anything else as a heat map
heat            a 2-D tensor as coloured cells
as_tiles        patch rows as small images; `mosaic` arranges them
picture         an array as an <img>; `figure` gives it a caption
"""

import base64
import html
import io
import re
from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import to_hex
from PIL import Image
from torch import Tensor

from refvl.positions import invert_permutation
from refvl.viz.style import SEQUENCE_CMAP, SEQUENCE_RANGES, ink_on
from refvl.viz.windows import sequence_colors

WIDE, NARROW = 360, 170  # the largest width of a drawing in page pixels, alone and next to another one
NUMBERED = 64  # the most cells into which numbers are written
SHOWN_FRAMES = 6
HEAT_ROWS, HEAT_COLUMNS = 48, 120


def tensor_figure(name: str, x: Tensor, merged: Sequence[tuple[int, int, int]] = ()) -> str:
    """Return a tensor's name, shape, type and numbers, with a drawing.

    Cumulative lengths are drawn as segments, and a permutation by the order that it produces (on the grid of `merged`
    (t, h, w) tokens, if the sizes match). Any other tensor is drawn as a heat map.
    """
    x = x.detach().cpu()
    caption = facts(name, x)
    if x.numel() == 0:
        return figure("", caption)
    if is_permutation(x):
        drawn = _order(x, name, merged)
        return figure(drawn, caption + "; each cell shows its token's index in this order" * drawn.startswith("<svg"))
    if _is_whole(x) and x[0] == 0 and bool((x.diff() > 0).all()):
        return figure(_segments(x, name), caption)
    flat = x[None] if x.ndim == 1 else x.flatten(1)
    flat = flat.T if flat.shape[1] <= 3 < flat.shape[0] else flat
    low, high = (f"{float(v):.3g}" for v in (flat.min(), flat.max()))
    return figure(heat(flat, f"Heat map of {name}, from {low} (dark) to {high} (bright)"), caption)


def facts(name: str, x: Tensor) -> str:
    """Describe a tensor in one line: name, shape, type, numbers."""
    kind = str(x.dtype).removeprefix("torch.")
    return f"<b>{html.escape(name)}</b> {tuple(x.shape)} {kind}; {in_numbers(x)}"


def in_numbers(x: Tensor) -> str:
    """Return the first integers, the range of floats, or the count of true flags."""
    if x.numel() == 0:
        return "empty"
    if x.dtype == torch.bool:
        return f"{int(x.sum())} of {x.numel()} are true"
    if not x.is_floating_point():
        first = x.flatten()[:10].tolist()
        return ", ".join(map(str, first)) + ", ..." * (x.numel() > 10)
    return f"{float(x.min()):.3g} to {float(x.max()):.3g}, mean {float(x.float().mean()):.3g}"


def _is_whole(x: Tensor) -> bool:
    """Return whether a tensor is a list of at least two integers."""
    return x.ndim == 1 and len(x) > 1 and not x.is_floating_point() and x.dtype != torch.bool


def is_permutation(x: Tensor) -> bool:
    """Return whether a tensor contains each of 0 ... n - 1 exactly once."""
    return _is_whole(x) and torch.equal(x.cpu().sort().values.long(), torch.arange(len(x)))


def are_inverse(one: Tensor, other: Tensor) -> bool:
    """Return whether `other` is the permutation that undoes `one`."""
    return is_permutation(other) and one.shape == other.shape and torch.equal(invert_permutation(one), other.long())


def _segments(lengths: Tensor, name: str) -> str:
    """Draw (segments + 1,) cumulative lengths as boxes."""
    edges = lengths.tolist()
    if len(edges) > 200:
        return heat(lengths[None].float(), f"{name}: cumulative lengths of {len(edges) - 1} segments")
    scale, height = WIDE / edges[-1], 22
    boxes = []
    for start, stop in pairwise(edges):
        width = (stop - start) * scale
        boxes.append(f'<rect x="{start * scale:.1f}" y="1" width="{max(width - 1, 0.5):.1f}" height="{height - 2}"/>')
        if width > 16:
            boxes.append(f'<text x="{start * scale + width / 2:.1f}" y="{height / 2}">{stop - start}</text>')
    sizes = ", ".join(str(stop - start) for start, stop in pairwise(edges[:13]))
    label = f"{name}: {len(edges) - 1} segments of {sizes}" + " ..." * (len(edges) > 13)
    return svg("segments", label, WIDE, height, "".join(boxes))


def _order(order: Tensor, name: str, merged: Sequence[tuple[int, int, int]]) -> str:
    """Draw a permutation: each cell of the grid shows its token's index in the order."""
    places = invert_permutation(order.long())
    fits = [thw for thw in merged if thw[0] * thw[1] * thw[2] == len(order)]
    if not fits or len(order) > 4 * NUMBERED:
        return heat(places[None].float(), f"{name}: the index of each of {len(order)} rows in this order")
    t, h, w = fits[0]
    frames, side = min(t, SHOWN_FRAMES), 26
    grid = places.view(t, h, w)[:frames]
    colors = [to_hex(color) for color in sequence_colors(len(order))]
    cells = []
    for f, y, x in np.ndindex(frames, h, w):
        left, top, place = (f * (w + 0.5) + x) * side, y * side, int(grid[f, y, x])
        cells.append(f'<rect x="{left}" y="{top}" width="{side - 1}" height="{side - 1}" fill="{colors[place]}"/>')
        ink = ink_on(colors[place])
        cells.append(f'<text x="{left + side / 2}" y="{top + side / 2}" fill="{ink}">{place}</text>')
    label = f"{name}: the index of each token of a {t} x {h} x {w} grid in this order; {in_words(grid[0])}"
    return svg("order", label, int((frames * (w + 0.5) - 0.5) * side), h * side, "".join(cells))


def in_words(numbers_HW: Tensor) -> str:
    """Describe a table of numbers in a sentence, with only its first lines if it is long."""
    lines = [", ".join(map(str, line)) for line in numbers_HW[:6, :12].tolist()]
    return "rows " + "; ".join(lines) + (" ..." if numbers_HW.numel() > 72 else "")


def heat(x: Tensor, alt: str) -> str:
    """Draw a 2-D tensor as coloured cells; a large tensor is reduced to evenly spaced rows and
    columns.
    """
    x = x.float()[spread(x.shape[0], HEAT_ROWS)][:, spread(x.shape[1], HEAT_COLUMNS)].nan_to_num()
    low, high = x.min(), x.max()
    start, stop = SEQUENCE_RANGES["light"]
    scaled = start + (stop - start) * (x - low) / (high - low).clamp(min=1e-9)
    colors = (255 * plt.get_cmap(SEQUENCE_CMAP)(scaled.numpy())[..., :3]).astype(np.uint8)
    rows, columns = x.shape
    width = min(WIDE, 14 * columns)
    height = max(min(rows * max(width // columns, 3), 170), 14)
    return picture(colors, alt, width=width, height=height)


def figure(drawn: str, caption: str) -> str:
    """Return a drawing with its caption; two narrow drawings may be side by side."""
    width = re.match(r'<[^>]* width="(\d+)"', drawn)
    narrow = ' class="narrow"' if width and int(width[1]) <= NARROW else ""
    return f"<figure{narrow}>{drawn}<figcaption>{caption}</figcaption></figure>"


def picture(pixels: np.ndarray, alt: str, *, width: int | None = None, height: int | None = None) -> str:
    """Return an HTML image of a uint8 array, (height, width, 3 or 4).

    width, height: the size on the page in CSS pixels; by default, the array's, but at most WIDE.
    """
    width = width or min(WIDE, pixels.shape[1])
    height = height or max(round(width * pixels.shape[0] / pixels.shape[1]), 1)
    size = f'width="{width}" height="{height}" style="aspect-ratio:{width}/{height}"'  # not the pixels' ratio
    return f'<img alt="{html.escape(alt)}" {size} src="{address(pixels)}">'


def as_tiles(rows_NK: Tensor) -> np.ndarray | None:
    """Return the first frame of patch rows (N, 3 * frames * P * P) as (N, P, P, 3) uint8,
    stretched to 0 ... 255; None for rows of a different size.
    """
    for frames in (1, 2):
        side = isqrt(rows_NK.shape[1] // (3 * frames))
        if len(rows_NK) and rows_NK.shape[1] == 3 * frames * side**2:
            first = rows_NK.view(-1, 3, frames, side, side)[:, :, 0].permute(0, 2, 3, 1).numpy()
            low, high = first.min((0, 1, 2)), first.max((0, 1, 2))
            return (255 * (first - low) / np.maximum(high - low, 1e-9)).astype(np.uint8)
    return None


def mosaic(tiles: np.ndarray, across: int, *, gap: int = 2) -> np.ndarray:
    """Arrange (N, height, width, 3) as one image with an alpha channel: transparent gaps,
    `across` tiles per line.
    """
    count, h, w, _ = tiles.shape
    down = -(-count // across)
    sheet = np.zeros((down * (h + gap) - gap, min(across, count) * (w + gap) - gap, 4), np.uint8)
    for i, tile in enumerate(tiles):
        top, left = i // across * (h + gap), i % across * (w + gap)
        sheet[top : top + h, left : left + w, :3] = tile
        sheet[top : top + h, left : left + w, 3] = 255
    return sheet


def address(pixels: np.ndarray) -> str:
    """Return an image as the `data:` URL of a WebP,
    which is lossy if the image is large and has many colours.
    """
    colors = np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)
    is_photo = pixels.shape[0] * pixels.shape[1] > 20_000 and len(colors) > 256
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "webp", lossless=not is_photo, quality=85, method=6)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def svg(kind: str, label: str, width: int, height: int, inside: str) -> str:
    """Return an SVG with a label for readers who cannot see it.

    kind: the class in the style sheet.
    """
    size = f'viewBox="0 0 {width} {height}" width="{min(width, WIDE)}"'
    return f'<svg class="{kind}" role="img" aria-label="{html.escape(label)}" {size}>{inside}</svg>'


def small(image: Image.Image, side: int) -> np.ndarray:
    """Shrink an image to (height, width, 3) uint8 of at most `side` pixels along the longer
    side.
    """
    copy = image.convert("RGB")
    copy.thumbnail((side, side))
    return np.asarray(copy)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced integers from 0 to count - 1."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
