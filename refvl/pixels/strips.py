"""Thin strips, which Step3-VL pads to a square and resizes; this file computes the same pixels without that square.

Padded to a square, a strip of 1 x 60,000 pixels would become 10 GB of black. Pillow resizes rows first, rounds, and
then resizes columns. This file does the same, but computes no sums over black pixels. Upstream:
`ImagePatcher.square_pad` and Pillow's `resize`.
"""

import math

import numpy as np
from PIL import Image


def resize_as_square(image: Image.Image, size: int) -> Image.Image:
    """Pad an RGB strip to a square, black to the right or below, and resize the square to `size` pixels per side."""
    side = max(image.size)
    if image.width > image.height:
        rows = image.resize((size, image.height), Image.Resampling.BILINEAR)
        strip = Image.fromarray(_shrink_rows(np.asarray(rows), side, size))
    else:
        columns = np.asarray(image).swapaxes(0, 1)
        strip = Image.fromarray(_shrink_rows(columns, side, size).swapaxes(0, 1))
        strip = strip.resize((strip.width, size), Image.Resampling.BILINEAR)
    square = Image.new("RGB", (size, size))
    square.paste(strip, (0, 0))
    return square


def _shrink_rows(rows: np.ndarray, side: int, size: int) -> np.ndarray:
    """Shrink (n, W, 3) uint8, followed by side - n black rows, to `size` rows, and return the rows that are not black.

    This is Pillow's bilinear resize in one direction: a triangle filter around the centre of each new row, with weights
    as 22-bit integers.
    """
    scale = side / size
    shrunk = []
    for i in range(min(size, math.ceil(len(rows) / scale + 0.5))):
        centre = (i + 0.5) * scale
        first, end = max(0, int(centre - scale + 0.5)), min(side, int(centre + scale + 0.5))
        weights = np.clip(1 - np.abs((np.arange(first, end) - centre + 0.5) / scale), 0, None)
        weights /= weights.cumsum()[-1]  # the weights are summed in Pillow's order
        total = np.full(rows.shape[1:], 1 << 21, np.int32)
        for row, weight in zip(rows[first:], weights, strict=False):
            total += row * np.int32(0.5 + weight * (1 << 22))
        shrunk.append((total >> 22).astype(np.uint8))
    return np.stack(shrunk)
