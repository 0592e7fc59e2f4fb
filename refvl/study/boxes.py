"""Boxes and points in answers: found in the text, mapped to pixels of the picture, and back.

What a coordinate counts differs from family to family, and nothing in an answer says it:

    Qwen2.5-VL                            pixels of the *resized* picture, as the processor made it
    Qwen2-VL, Qwen3-VL, Qwen3.5 to 3.8    0 to 1000 of each side
    GLM-4.1V, GLM-4.5V, GLM-4.6V          0 to 1000 of each side
    MiniCPM-V and -o 2.6, MiniCPM-V 4.x   0 to 1000 of each side

The makers say so: QwenLM/Qwen3-VL#676, #866 and #1486, zai-org/GLM-V#114 and #161, OpenBMB/MiniCPM-V#772 and #982.
Assumed, for want of a maker's word: that Qwen3.5 to 3.8 do as Qwen3-VL, and MiniCPM-V 4.0, 4.6 and 4.7 as 2.6 and 4.5.
Of the others (GLM-OCR, GLM-GA, MiniCPM-V 2.0 and 2.5, Step3-VL, Step-3.7) we found no documentation; they are refused.

Sizes are (width, height), boxes x1, y1, x2, y2, points x, y, all from the upper left corner. A picture's size is that
after its EXIF orientation, as `refvl.pixels.media.load_image` returns it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from refvl.arguments import as_integers
from refvl.checks import check_values
from refvl.printing import printable

__all__ = [
    "CONVENTIONS", "Convention", "Region", "find_convention", "find_regions", "from_picture", "parse", "rescale",
    "space_of", "to_picture",
]  # fmt: skip


class Region(NamedTuple):
    """A box (4 numbers) or a point (2), in the model's coordinates, and what the answer calls it ("" for nothing)."""

    label: str
    xy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Convention:
    """How a family writes boxes. names: regular expression of what `family` may be, in lower case without marks.

    notation: "json" (bbox_2d, point_2d or bare lists), "round" ((x1,y1),(x2,y2)) or "tags" (<box>x1 y1 x2 y2</box>).
    """

    title: str
    names: str
    notation: str
    space: tuple[int, int] | None = (1000, 1000)  # what the far corner is called; None: the resized picture's size


CONVENTIONS = (
    Convention("Qwen2-VL", r"qwen2vl.*", "round"),
    Convention("Qwen2.5-VL", r"qwen25vl.*", "json", None),
    Convention("Qwen3-VL", r"qwen3vl.*", "json"),
    Convention("Qwen3.5, Qwen3.6, Qwen3.8", r"qwen3[568].*", "json"),
    Convention("GLM-4.1V, GLM-4.5V, GLM-4.6V", r"glm4[1-6]v.*|glm4v(moe|text)?", "json"),
    Convention("MiniCPM-V 2.6 or later", r"minicpm[vo]((26|4).*)?", "tags"),
)


def find_convention(family: str) -> Convention:
    """The row of a release or a hub id ("Qwen2.5-VL-7B-Instruct"), a `model_type` ("qwen2_5_vl"), or `Family.name`.

    "minicpmv" is taken for 2.6 or later. Raises ValueError where the convention is not documented.
    """
    if not isinstance(family, str):
        raise TypeError(f"family: expected a name such as 'Qwen2.5-VL', got {type(family).__name__}")
    plain = re.sub(r"[^a-z0-9]", "", re.split(r"[,(]", family.split("/")[-1])[0].lower())
    for convention in CONVENTIONS:
        if re.fullmatch(convention.names, plain):
            return convention
    known = "; ".join(convention.title for convention in CONVENTIONS)
    raise ValueError(f"family: how {printable(family)!r} writes boxes is not documented; known: {known}")


def space_of(family: str, resized: Sequence[int] | None = None) -> tuple[int, int]:
    """(width, height) of the space in which a family's coordinates lie.

    resized: (width, height) of the picture as the tower got it, for a grid (1, h, w) of patches of 14 px (14 * w,
    14 * h). Needed for Qwen2.5-VL, not read for others.
    Raises ValueError if the family counts pixels of the resized image and `resized` is None.
    """
    convention = find_convention(family)
    if convention.space is not None:
        return convention.space
    if resized is None:
        raise ValueError(f"resized: {convention.title} counts pixels of the resized picture; give its (width, height)")
    return _size(resized, "resized")


def to_picture(boxes, *, picture: Sequence[int], resized: Sequence[int] | None = None, family: str) -> Tensor:
    """(n, 4) float32: boxes of an answer in pixels of the picture; points (n, 2) likewise.

    boxes: (n, 4) or (n, 2), or one alone, as nested sequences or an array. picture: its (width, height) before it was
    resized. resized, family: see `space_of`. What lies outside the picture stays outside. Raises TypeError or
    ValueError naming the argument.

    >>> to_picture([[546, 0, 1092, 966]], picture=(1080, 1920), resized=(1092, 1932), family="Qwen2.5-VL").tolist()
    [[540.0, 0.0, 1080.0, 960.0]]
    """
    return rescale(boxes, space_of(family, resized), _size(picture, "picture"))


def from_picture(boxes, *, picture: Sequence[int], resized: Sequence[int] | None = None, family: str) -> Tensor:
    """(n, 4) float32: the inverse, for prompts and training data. Models write whole numbers: round them."""
    return rescale(boxes, _size(picture, "picture"), space_of(family, resized))


def rescale(boxes, size: Sequence[int], new_size: Sequence[int]) -> Tensor:
    """(n, 4) or (n, 2) float32: coordinates in a space of (width, height) as they are in another."""
    rows = _rows(boxes)
    factors = torch.tensor([new / old for old, new in zip(size, new_size, strict=True)], dtype=torch.float64)
    return (rows * factors.repeat(rows.shape[1] // 2).to(rows.device)).float()


def _size(size, name: str) -> tuple[int, int]:
    width, height = as_integers(size, "(width, height)", name, most=2**60)  # px, not patches
    return width, height


def _rows(boxes) -> Tensor:
    """(n, 4) or (n, 2) float64; no boxes are (0, 4)."""
    try:
        rows = check_values(torch.as_tensor(boxes), "boxes").double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"boxes: expected numbers in rows of 4 (boxes) or 2 (points): {printable(error)}") from error
    rows = rows.reshape(0, 4) if rows.shape == (0,) else rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or rows.shape[1] not in (2, 4):
        raise ValueError(f"boxes: expected shape (n, 4) for boxes or (n, 2) for points, got {tuple(rows.shape)}")
    if not rows.isfinite().all():
        raise ValueError("boxes: holds nan or inf")
    return rows


# ----------------------------------------------------------------------------------------------- in the text of answers

_NUMBER = r"-?\d{1,7}(?:\.\d{1,9})?"  # no more digits than a coordinate has: longer ones are none
_PAIR = rf"{_NUMBER}\s*,\s*{_NUMBER}"
_LIST = re.compile(rf"\[\s*({_PAIR}(?:\s*,\s*{_PAIR})?)\s*\]")
_KEY = re.compile(r"""\b(?:bbox|point)(?:_2d)?["']?\s*:\s*(\[[\[\]\s\d.,-]*)""")
_LABEL = re.compile(r"""\blabel["']?\s*:\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)')""")
_ROUND = re.compile(
    r"(?:<\|object_ref_start\|>([^<]*)<\|object_ref_end\|>\s*)?(?:<\|box_start\|>\s*)?"
    rf"\(\s*({_PAIR})\s*\)\s*,\s*\(\s*({_PAIR})\s*\)"
)
_TAGS = re.compile(rf"(?:<ref>([^<]*)</ref>\s*)?<(box|point)>\s*({_NUMBER}(?:[\s,]+{_NUMBER})*)\s*</\2>")
_MARKED = re.compile(r"<\|begin_of_box\|>(.*?)(?:<\|end_of_box\|>|$)", re.S)  # GLM's answer, behind its thinking


def parse(text: str, family: str, *, points: bool = False) -> Tensor:
    """(n, 4) float32: the boxes in an answer, in the model's coordinates, as `to_picture` takes them; or points (n, 2).

    In the order of the text, corners as they were said. No text raises: what is not four (two) numbers in the family's
    notation is passed over, and of an answer that was cut off the whole boxes are read. (0, 4) where there are none.

    >>> parse('```json [{"bbox_2d": [12, 40, 310, 96], "label": "a cup"}, {"bbox_2d": [7,', "Qwen2.5-VL").tolist()
    [[12.0, 40.0, 310.0, 96.0]]
    """
    width = 2 if points else 4
    found = [region.xy for region in find_regions(text, family) if len(region.xy) == width]
    return torch.tensor(found, dtype=torch.float32).reshape(-1, width)


def find_regions(text: str, family: str) -> list[Region]:
    """Every box and point in an answer with its label, in order; see `parse`.

    Marks may be special tokens, which `chat` leaves out: `processor.tokenizer.decode(trace.token_ids)` keeps them.
    MiniCPM-V's boxes need theirs, Qwen2-VL's labels too; between GLM's is the answer, and what was thought before does
    not count. Raises TypeError for an answer that is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected the text of an answer, got {type(text).__name__}")
    return list(_NOTATIONS[find_convention(family).notation](text))


def _json_regions(text: str) -> Iterator[Region]:
    """Objects with bbox_2d or point_2d and a label; where there are none, bare lists. Read without a JSON parser,
    because answers end anywhere, use single quotes and forget commas."""
    text = "\n".join(_MARKED.findall(text)) or text
    objects = [(_LABEL.search(part), _KEY.findall(part)) for part in text.split("{")[1:] if "[" in part]
    for label, values in objects:
        said = re.sub(r"\\(.)", r"\1", label[1] or label[2] or "") if label else ""
        yield from (Region(said, xy) for value in values for xy in _lists(value))
    if not any(values for _, values in objects):
        yield from (Region("", xy) for xy in _lists(text))


def _lists(text: str) -> Iterator[tuple[float, ...]]:
    return (_floats(numbers) for numbers in _LIST.findall(text))


def _round_regions(text: str) -> Iterator[Region]:
    return (Region(label.strip(), _floats(f"{a},{b}")) for label, a, b in _ROUND.findall(text))


def _tag_regions(text: str) -> Iterator[Region]:
    found = (Region(label.strip(), _floats(numbers)) for label, _, numbers in _TAGS.findall(text))
    return (region for region in found if len(region.xy) in (2, 4))


def _floats(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, re.split(r"[\s,]+", numbers)))


_NOTATIONS = {"json": _json_regions, "round": _round_regions, "tags": _tag_regions}
