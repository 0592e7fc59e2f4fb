"""Boxes in answers, in pixels of the picture: the public door to `refvl.study.boxes`."""

from refvl.study.boxes import (
    CONVENTIONS,
    Convention,
    Region,
    find_convention,
    find_regions,
    from_picture,
    parse,
    rescale,
    space_of,
    to_picture,
)

__all__ = [
    "CONVENTIONS", "Convention", "Region", "find_convention", "find_regions", "from_picture", "parse", "rescale",
    "space_of", "to_picture",
]  # fmt: skip
