"""Convert pixels that do not have 8 bits per value to uint8: arrays, tensors, and files with 16-bit grey or floats."""

import numpy as np
import torch
from PIL import Image

from refvl.checks import check_values


def channels_last(source) -> np.ndarray:
    """Return a tensor or array as (H, W) or (H, W, 3 | 4); a tensor's channels may come first, as in torch."""
    array = source
    if isinstance(source, torch.Tensor):
        source = check_values(source, "image").detach().cpu()
        array = (source.float() if source.is_floating_point() else source).numpy()
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        allowed = "(H, W) or (H, W, 1 | 3 | 4)" + (", or (1 | 3 | 4, H, W)" if array is not source else "")
        raise ValueError(f"image: expected an array of shape {allowed}, got {tuple(source.shape)}")
    return array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def grey_levels(image: Image.Image, name: str) -> np.ndarray:
    """Return an image in mode "I" as 8-bit or 16-bit values (see `load_image`); other wide modes keep their dtype.

    The grey level that a PNG file marks as transparent becomes white.
    """
    levels = np.asarray(image)
    if (transparent := image.info.get("transparency")) is not None:
        levels = np.where(levels == transparent, 65535, levels).astype(levels.dtype)
    if image.mode != "I":
        return levels
    low, high = int(levels.min()), int(levels.max())
    if low < 0 or high > 65535:
        raise ValueError(
            f"image: {name} contains integers from {low} to {high}; expected grey levels in [0, 255] or [0, 65535]: "
            "scale them, and pass the array as uint8 or uint16"
        )
    return levels.astype(np.uint16 if high > 255 or image.format in ("PNG", "PPM") else np.uint8)


def as_uint8(array: np.ndarray, what: str) -> np.ndarray:
    """Return uint8 unchanged, uint16 scaled by 1/257, and floats in [0, 1] scaled by 255; scaled values are rounded."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if array.dtype.kind != "f":
        raise ValueError(f"{what}: expected dtype uint8, uint16 or float, got {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() <= 1):  # in this form, the check also fails for NaN
        raise ValueError(
            f"{what}: expected floats in [0, 1], got values from {array.min()} to {array.max()}; scale them first, "
            "for example by 1 / 255, and pass the scaled array"
        )
    return (array.astype(np.float64) * 255).round().astype(np.uint8)
