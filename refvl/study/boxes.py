"""Boxes and points in answers: how to find them in the text, and how to convert them to and
from image pixels.

The unit of coordinates differs from family to family, and answers do not state it:

    Qwen2.5-VL                            pixels of the *resized* image that the processor produced
    Qwen3-VL, Qwen3.5 to 3.8              0 to 1000 of each side
    GLM-4.1V, GLM-4.5V, GLM-4.6V          0 to 1000 of each side
    MiniCPM-V and -o 2.6, MiniCPM-V 4.x   0 to 1000 of each side

The makers state these units in QwenLM/Qwen3-VL#676, #866 and #1486, zai-org/GLM-V#114 and #161,
OpenBMB/MiniCPM-V#772 and #982. We assume, without a statement, that Qwen3.5 to 3.8 follow
Qwen3-VL, and that MiniCPM-V 4.0, 4.6 and 4.7 follow 2.6 and 4.5. We found no documentation for
GLM-OCR, GLM-GA, MiniCPM-V 2.0 and 2.5, Step3-VL and Step-3.7.

Sizes are (width, height), boxes are x1, y1, x2, y2, and points are x, y, all measured from the
upper left corner. The size of an image is its size after the EXIF orientation has been applied,
as `refvl.pixels.media.load_image` does.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Region(NamedTuple):
    """A box (4 numbers) or a point (2 numbers) in the model's coordinates,
    and its label in the answer ("" if there is none).
    """

    label: str
    xy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Convention:
    """The notation and the coordinate space of a family's boxes.

    names: a regular expression for `family` in lower case, without punctuation.

    notation: "json" (bbox_2d, point_2d or bare lists) or "tags" (<box>x1 y1 x2 y2</box>).
    """

    title: str
    names: str
    notation: str
    space: tuple[int, int] | None = (1000, 1000)  # the lower right corner; None: the size of the resized image


CONVENTIONS = (
    Convention("Qwen2.5-VL", r"qwen25vl.*", "json", None),
    Convention("Qwen3-VL", r"qwen3vl.*", "json"),
    Convention("Qwen3.5, Qwen3.6, Qwen3.8", r"qwen3[568].*", "json"),
    Convention("GLM-4.1V, GLM-4.5V, GLM-4.6V", r"glm4[1-6]v.*|glm4v(moe|text)?", "json"),
    Convention("MiniCPM-V 2.6 or later", r"minicpm[vo]((26|4).*)?", "tags"),
)


def find_convention(family: str) -> Convention:
    """Return the box convention of a family, given as a release, a hub id
    ("Qwen2.5-VL-7B-Instruct"), a `model_type` or a `Family.name`.

    The name "minicpmv" counts as MiniCPM-V 2.6 or later. Raises ValueError if the convention is
    not documented.
    """
    plain = re.sub(r"[^a-z0-9]", "", re.split(r"[,(]", family.split("/")[-1])[0].lower())
    for convention in CONVENTIONS:
        if re.fullmatch(convention.names, plain):
            return convention
    known = "; ".join(convention.title for convention in CONVENTIONS)
    raise ValueError(f"family: expected a family with a known box convention ({known}), got {family!r}")


def space_of(family: str, resized: Sequence[int] | None = None) -> tuple[int, int]:
    """Return the (width, height) of a family's coordinate space.

    resized: (width, height) of the image as the tower sees it; for a grid (1, h, w) of 14 px
    patches it is (14 * w, 14 * h). This argument is required for Qwen2.5-VL and ignored for other
    families. Raises ValueError if the family's coordinates are pixels of the resized image and
    `resized` is None.
    """
    convention = find_convention(family)
    if convention.space is not None:
        return convention.space
    if resized is None:
        raise ValueError(f"resized: expected the (width, height) of the resized image for {convention.title}, got None")
    width, height = resized
    return width, height


def to_picture(boxes, *, picture: Sequence[int], resized: Sequence[int] | None = None, family: str) -> Tensor:
    """Convert boxes in an answer to pixels of the image: (n, 4) float32, or (n, 2) for points.

    boxes: (n, 4) or (n, 2), or a single box or point, as nested sequences or an array. picture: the
    (width, height) of the image before it was resized. resized, family: see `space_of`. Boxes that
    reach beyond the image are not clipped. Raises ValueError for other shapes or families.

    >>> to_picture([[546, 0, 1092, 966]], picture=(1080, 1920), resized=(1092, 1932), family="Qwen2.5-VL").tolist()
    [[540.0, 0.0, 1080.0, 960.0]]
    """
    return rescale(boxes, space_of(family, resized), picture)


def from_picture(boxes, *, picture: Sequence[int], resized: Sequence[int] | None = None, family: str) -> Tensor:
    """Convert boxes in pixels of the image to a family's coordinates: (n, 4) float32,
    or (n, 2) for points.
    """
    return rescale(boxes, picture, space_of(family, resized))


def rescale(boxes, size: Sequence[int], new_size: Sequence[int]) -> Tensor:
    """Convert boxes or points from a space of `size` (width, height) to a space of `new_size`;
    return (n, 4) or (n, 2) float32.
    """
    rows = _rows(boxes)
    factors = torch.tensor([new / old for old, new in zip(size, new_size, strict=True)], dtype=torch.float64)
    return (rows * factors.repeat(rows.shape[1] // 2).to(rows.device)).float()


def _rows(boxes) -> Tensor:
    """Return boxes as (n, 4) or points as (n, 2), in float64; an empty list becomes (0, 4)."""
    rows = torch.as_tensor(boxes).double()
    rows = rows.reshape(0, 4) if rows.shape == (0,) else rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or rows.shape[1] not in (2, 4):
        raise ValueError(f"boxes: expected shape (n, 4) for boxes or (n, 2) for points, got {tuple(rows.shape)}")
    return rows


# ----------------------------------------------------------------------------------------------- in the text of answers

_NUMBER = r"-?\d{1,7}(?:\.\d{1,9})?"  # the digits are limited, because longer numbers are not coordinates
_PAIR = rf"{_NUMBER}\s*,\s*{_NUMBER}"
_LIST = re.compile(rf"\[\s*({_PAIR}(?:\s*,\s*{_PAIR})?)\s*\]")
_KEY = re.compile(r"""\b(?:bbox|point)(?:_2d)?["']?\s*:\s*(\[[\[\]\s\d.,-]*)""")
_LABEL = re.compile(r"""\blabel["']?\s*:\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)')""")
_TAGS = re.compile(rf"(?:<ref>([^<]*)</ref>\s*)?<(box|point)>\s*({_NUMBER}(?:[\s,]+{_NUMBER})*)\s*</\2>")
_MARKED = re.compile(r"<\|begin_of_box\|>(.*?)(?:<\|end_of_box\|>|$)", re.S)  # GLM's answer, which follows its thoughts


def parse(text: str, family: str) -> Tensor:
    """Return the boxes in an answer, (n, 4) float32 in the model's coordinates, for `to_picture`.

    Boxes keep the order of the text, and their corners are returned as written. No text raises an
    error: anything except four numbers in the family's notation is skipped. If the answer is
    truncated, only complete boxes are returned. Without any boxes, the result has shape (0, 4).

    >>> parse('```json [{"bbox_2d": [12, 40, 310, 96], "label": "a cup"}, {"bbox_2d": [7,', "Qwen2.5-VL").tolist()
    [[12.0, 40.0, 310.0, 96.0]]
    """
    found = [region.xy for region in find_regions(text, family) if len(region.xy) == 4]
    return torch.tensor(found, dtype=torch.float32).reshape(-1, 4)


def find_regions(text: str, family: str) -> list[Region]:
    """Return every box and point in an answer with its label, in order; see `parse`.

    Delimiters may be special tokens, which `chat` drops but
    `processor.tokenizer.decode(trace.token_ids)` keeps. MiniCPM-V's boxes cannot be found without
    their delimiters. GLM's delimiters enclose the answer, so thoughts before them are ignored.
    """
    return list(_NOTATIONS[find_convention(family).notation](text))


def _json_regions(text: str) -> Iterator[Region]:
    """Yield the boxes and points of objects with their labels, or bare lists if no object has any.

    A JSON parser would fail, because answers may end anywhere, use single quotes or omit commas.
    """
    text = "\n".join(_MARKED.findall(text)) or text
    objects = [(_LABEL.search(part), _KEY.findall(part)) for part in text.split("{")[1:] if "[" in part]
    for label, values in objects:
        said = re.sub(r"\\(.)", r"\1", label[1] or label[2] or "") if label else ""
        yield from (Region(said, xy) for value in values for xy in _lists(value))
    if not any(values for _, values in objects):
        yield from (Region("", xy) for xy in _lists(text))


def _lists(text: str) -> Iterator[tuple[float, ...]]:
    return (_floats(numbers) for numbers in _LIST.findall(text))


def _tag_regions(text: str) -> Iterator[Region]:
    found = (Region(label.strip(), _floats(numbers)) for label, _, numbers in _TAGS.findall(text))
    return (region for region in found if len(region.xy) in (2, 4))


def _floats(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, re.split(r"[\s,]+", numbers)))


_NOTATIONS = {"json": _json_regions, "tags": _tag_regions}
