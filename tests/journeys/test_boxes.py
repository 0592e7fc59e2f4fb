"""Where an answer points.

Oracles: the makers' examples and sentences, the inverse map, and the resizing itself.
"""

import numpy as np
import pytest
import torch
from closeness import assert_agree
from hypothesis import given, settings
from hypothesis import strategies as st

from refvl.families import FAMILIES
from refvl.pixels.by_hand import smart_resize
from refvl.study import boxes
from refvl.study.boxes import Region, find_regions, from_picture, parse, to_picture

BOTH = ("Qwen2.5-VL", "Qwen3-VL")  # pixels of the resized image; 0 to 1000
sides = st.integers(28, 5000)


def resize(width, height, **limits):
    """(width, height) as Qwen's processor resizes."""
    new_height, new_width = smart_resize(height, width, **limits)
    return new_width, new_height


# --- coordinates ------------------------------------------------------------------------------------------------------


def test_the_corners_of_the_space_are_the_corners_of_the_picture():
    """In 0 to 1000 whatever the resized size is, in resized pixels by it."""
    picture, resized = (1080, 1920), (728, 1316)
    whole = [[0, 0, *picture]]
    for family in ("Qwen3-VL", "Qwen3.5-9B", "Qwen3.6-27B", "Qwen3.8", "GLM-4.5V", "MiniCPM-V-4_5"):
        assert to_picture([[0, 0, 1000, 1000]], picture=picture, family=family).tolist() == whole
    assert to_picture([[0, 0, *resized]], picture=picture, resized=resized, family="qwen2_5_vl").tolist() == whole


def test_worked_examples():
    """Peekaboo#60: 283 of 1000 in a width of 1920 is pixel 543.

    Qwen3-VL#947: 1080 x 1920 becomes 1092 x 1932.
    """
    [box] = to_picture([[283, 263, 463, 295]], picture=(1920, 1080), family="GLM-4.6V-Flash").round().int().tolist()
    assert box == [543, 284, 889, 319]
    assert resize(1080, 1920, max_pixels=12_845_056) == (1092, 1932)
    points = to_picture([[1092, 966]], picture=(1080, 1920), resized=(1092, 1932), family="Qwen2.5-VL-7B-Instruct")
    assert points.tolist() == [[1080, 960]]


@settings(max_examples=80, deadline=None)
@given(sides, sides, st.sampled_from(BOTH), st.lists(st.tuples(*[st.floats(0, 1)] * 4), max_size=4))
def test_there_and_back(width, height, family, corners):
    """Oracle: the box itself; two roundings to float32 on the way there, two on the way back."""
    picture = {"picture": (width, height), "resized": resize(width, height), "family": family}
    given_boxes = torch.tensor(corners).reshape(-1, 4) * torch.tensor([width, height] * 2)
    there = from_picture(given_boxes, **picture)
    back = to_picture(there, **picture)
    assert there.dtype == back.dtype == torch.float32 and back.shape == given_boxes.shape
    assert_agree(back, given_boxes, 4)


def test_boxes_may_be_sequences_and_arrays():
    options = {"picture": (2000, 1000), "family": "Qwen3-VL"}
    for one in ([[1, 2, 3, 4]], (1, 2, 3, 4), np.arange(1, 5)):
        assert to_picture(one, **options).tolist() == [[2, 2, 6, 4]]
    assert to_picture([], **options).shape == (0, 4)


def test_bad_input_is_named():
    arguments = {"picture": (10, 10), "resized": (28, 28), "family": "Qwen2.5-VL"}
    for function in (to_picture, from_picture):
        with pytest.raises(ValueError, match=r"boxes: expected shape \(n, 4\) for boxes or \(n, 2\)"):
            function([[1, 2, 3]], **arguments)
        with pytest.raises(ValueError, match=r"resized: expected the \(width, height\) of the resized image"):
            function([[1, 2, 3, 4]], **arguments | {"resized": None})


def test_families_of_refvl_are_known_by_name_and_by_model_type_or_refused():
    """Every row of `FAMILIES` under both of its names: the same convention, or none."""
    documented = {}
    for family in FAMILIES:
        for name in (family.name, *(() if family.version else family.model_types)):
            try:
                documented.setdefault(family.name, set()).add(boxes.find_convention(name).title)
            except ValueError:
                documented.setdefault(family.name, set()).add("")
    assert all(len(titles) == 1 for titles in documented.values()), documented
    assert documented["Qwen2.5-VL"] == {"Qwen2.5-VL"}
    assert documented["MiniCPM-V 2.5"] == documented["Step3-VL"] == {""}


# --- answers ----------------------------------------------------------------------------------------------------------

JSON = r"""```json
[
    {"bbox_2d": [12, 40, 310, 96], "label": "a \"cup\""},
    {"bbox_2d": [1, 2, 3.5, 4], "label": "b"}
]
```"""
CUP, B = Region('a "cup"', (12, 40, 310, 96)), Region("b", (1, 2, 3.5, 4))
ANSWERS = [
    ("Qwen2.5-VL", JSON, [CUP, B]),
    ("Qwen3-VL", "{'label': 'b', 'bbox_2d': [1, 2, 3.5, 4],}", [B]),
    ("Qwen3-VL", 'Here: {"point_2d": [5, 6], "label": "tip"} {"bbox_2d": [1, 2, 3.5, 4], "label": "b"}',
     [Region("tip", (5, 6)), B]),
    ("Qwen2.5-VL", '{"objects": [{"bbox_2d": [[1, 2, 3.5, 4], [5, 6, 7, 8]], "label": "b"}], "size": [10, 20]}',
     [B, Region("b", (5, 6, 7, 8))]),
    ("Qwen2.5-VL", "The box is [1, 2, 3.5, 4].", [Region("", (1, 2, 3.5, 4))]),
    ("GLM-4.5V", "<think>[[9, 9, 9, 9]]?</think><|begin_of_box|>[[110,147,193,823], [190,330,313,852]]<|end_of_box|>",
     [Region("", (110, 147, 193, 823)), Region("", (190, 330, 313, 852))]),
    ("glm4v", "<|begin_of_box|>[[110,147,193,823]", [Region("", (110, 147, 193, 823))]),
    ("glm4v_moe", "[[110,147,193,823]]", [Region("", (110, 147, 193, 823))]),
    ("MiniCPM-V 4.5", "<ref>book</ref><box>1 2 3 4</box><point>5 6</point>",
     [Region("book", (1, 2, 3, 4)), Region("", (5, 6))]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "want"), ANSWERS)
def test_answers_are_read_in_the_family_s_notation(family, text, want):
    """Oracle: the makers' examples, with and without their marks, fences and quotes."""
    assert find_regions(text, family) == want
    assert parse(text, family).tolist() == [list(region.xy) for region in want if len(region.xy) == 4]


@pytest.mark.parametrize("family", [convention.title for convention in boxes.CONVENTIONS])
@pytest.mark.parametrize(
    "text",
    ["", "I see no cup.", "[1, 2, 3]", "[1, 2, 3, 4, 5]", '{"bbox_2d": [1, 2, "a", 4]}', '{"bbox_2d": null}',
     "(1,2),(3,", "<box>1 2 3</box>", "<box>1 2 3 4", f"[1, 2, 3, {'9' * 400}]"],
)  # fmt: skip
def test_what_is_no_box_is_passed_over(family, text):
    assert parse(text, family).shape == (0, 4) and find_regions(text, family) == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*'[](){},:." \n0189-', "bbox_2d", "label", "<box>", "</box>", "<ref>", "12, 3"])).map(
        "".join
    )
)
def test_no_text_raises_and_what_is_found_can_be_mapped(text):
    for convention in boxes.CONVENTIONS:
        found = parse(text, convention.title)
        picture = {"picture": (10, 10), "resized": (28, 28), "family": convention.title}
        assert to_picture(found, **picture).shape == found.shape


def test_an_answer_cut_off_anywhere_keeps_its_whole_boxes():
    """Oracle: how many lists are closed before the cut."""
    ends = [JSON.index(text) + len(text) for text in ("96]", "5, 4]")]
    for length in range(len(JSON) + 1):
        assert len(parse(JSON[:length], "Qwen2.5-VL")) == sum(length >= end for end in ends)


@pytest.mark.parametrize("piece", ["[", "[1,", "<ref>", '"label": "', "<box>1 ", "(1,2),", "bbox: ["])
def test_long_nonsense_is_no_trap(piece):
    """Patterns that backtrack would not come back."""
    for convention in boxes.CONVENTIONS:
        parse(10**5 // len(piece) * piece, convention.title)
