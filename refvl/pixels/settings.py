"""Read the preprocessing settings in a checkpoint's files, and raise errors for settings that are not supported."""

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from refvl.checks import blame, check_positive_int, read_json

LARGEST_SETTING = 2**40  # the limit of every integer: a float represents its square exactly, and loops up to it finish
AREAS = (  # products of fields: the area of an image that preprocessing produces from any input
    ("min_pixels",), ("image_size",) * 2, ("crop_size", "crop_size", "max_crops"),
    ("scale_resolution", "scale_resolution", "max_slice_nums"), ("patch_size", "patch_size", "max_slice_nums"),
    ("patch_size", "merge_size", "patch_size", "merge_size", "temporal_patch_size"),
    ("patch_size", "merge_size", "patch_expand_factor") * 2,
)  # fmt: skip
LARGEST_IMAGE = 2**26  # in px, for the images that settings alone require; `MediaLimits` limits images from files


def check_preprocessing(config) -> None:
    """Raise TypeError or ValueError unless integer fields are positive and there is one mean and std per channel."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int:
            if check_positive_int(value, field.name) > LARGEST_SETTING:
                raise ValueError(f"{field.name}: expected at most 2**40, got {value}")
        elif field.name in ("image_mean", "image_std") and (not isinstance(value, Sequence) or len(value) != 3):
            raise ValueError(f"{field.name}: expected one value per RGB channel, got {value!r}")
    for names in AREAS:
        values = {name: getattr(config, name, 0) for name in names}
        if (pixels := math.prod(values[name] for name in names)) > LARGEST_IMAGE:
            given = ", ".join(f"{name}={value}" for name, value in values.items())
            got = f"{pixels:,} px from {given}"
            raise ValueError(f"{names[0]}: expected images of at most {LARGEST_IMAGE:,} px, got {got}")


def known_fields(config_class, values: dict) -> dict:
    """Return the entries of `values` that are fields of `config_class` and not None; lists become tuples."""
    known = {f.name: values[f.name] for f in fields(config_class) if values.get(f.name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


def from_dict(cls, values: dict, kind: str = "image") -> Any:
    """Read the contents of a preprocessor file; unknown keys are ignored, and missing keys get the defaults of `kind`.

    The pixel budget may be given as `min_pixels` and `max_pixels`, at the top level or inside `size`. It may also be
    given as the areas that `size` calls `shortest_edge` and `longest_edge`. Raises ValueError for settings that are not
    supported.
    """
    for name, wanted in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", 3)):
        if values.get(name, wanted) not in (wanted, None):
            raise ValueError(f"{name}: expected {wanted!r}, the only supported value, got {values[name]!r}")
    size = values.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"size: expected an object such as {{'longest_edge': ...}}, got {size!r}")
    known = known_fields(cls, values)
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        found = [v for v in (values.get(name), size.get(edge), size.get(name)) if v is not None]
        known |= {name: found[0]} if found else {}
    return cls.for_video(**known) if kind == "video" else cls(**known)


def from_folder(cls, folder, kind: str = "image") -> Any:
    """Read the settings in a checkpoint folder; kind is "image" or "video".

    As in transformers, the first source that exists is used: the section `image_processor` or `video_processor` of
    processor_config.json, then (for a video) video_preprocessor_config.json, then preprocessor_config.json. Raises
    FileNotFoundError if none exists, and ValueError if one cannot be read.
    """
    if kind not in ("image", "video"):
        raise ValueError(f'kind: expected "image" or "video", got {kind!r}')
    names = ["processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"]
    if kind == "image":
        del names[1]
    for path in (Path(folder) / name for name in names):
        values = read_json(path) if path.is_file() else None
        if values is not None and path.name == "processor_config.json":
            values = values.get(f"{kind}_processor")
        if values is not None:
            with blame(path):
                return cls.from_dict(values, kind)
    raise FileNotFoundError(f"folder: {folder} has no {kind} settings (looked for {', '.join(names)})")
