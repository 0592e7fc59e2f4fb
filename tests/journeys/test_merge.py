"""Oracle: lists written out by hand."""

import pytest
import torch

from refvl.merge import MediaTokens, find_media_spans, keep_in_prompt, left_pad, merge_embeddings
from refvl.positions import MediaSpan
from refvl.processors.chat import expand_placeholders

IDS = {"image": 100, "video": 200}
IMAGE = MediaTokens("image", (1, 2, 2))
VIDEO = MediaTokens("video", (3, 1, 1), t_factor=1.5)


def test_expand_then_find_spans_whatever_the_order_of_kinds():
    prompt = [1, 200, 2, 100, 3]
    expanded = expand_placeholders(prompt, [VIDEO, IMAGE], IDS)
    assert expanded == [1, 200, 200, 200, 2, 100, 100, 100, 100, 3]
    ids = torch.tensor(expanded)
    assert find_media_spans(ids, [VIDEO, IMAGE], IDS) == [MediaSpan(1, 3, 1, 1, 1.5), MediaSpan(5, 1, 2, 2)]
    assert find_media_spans(ids, [IMAGE, VIDEO], IDS) == [MediaSpan(5, 1, 2, 2), MediaSpan(1, 3, 1, 1, 1.5)]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([100, 100, 100, 1], r"expected 4 image placeholders for 1 image\(s\), got 3"),
        ([100] * 5, r"expected 4 image placeholders for 1 image\(s\), got 5"),
        ([100, 100, 1, 100, 100], "got a gap"),
        ([100] * 4 + [200], r"expected 0 video placeholders for 0 video\(s\), got 1"),
    ],
)
def test_find_spans_refuses_runs_that_do_not_match(ids, message):
    with pytest.raises(ValueError, match=message):
        find_media_spans(torch.tensor(ids), [IMAGE], IDS)


def test_merge_replaces_exactly_the_span():
    text = torch.arange(12.0).view(6, 2)
    merged = merge_embeddings(text, [MediaSpan(1, 1, 2, 2)], [torch.full((4, 2), -1.0)])
    assert merged.tolist() == [[0, 1], *[[-1, -1]] * 4, [10, 11]]
    assert text[1, 0] == 2, "the input is not written to"
    with pytest.raises(ValueError, match="media_embeds: dimension 0 must be 4, got 3"):
        merge_embeddings(text, [MediaSpan(1, 1, 2, 2)], [torch.zeros(3, 2)])


def test_keep_marks_text_and_survivors():
    keep = keep_in_prompt(
        6, [MediaSpan(1, 3, 1, 1), MediaSpan(4, 1, 1, 1)], [torch.tensor([True, False, True]), None], [3, 1]
    )
    assert keep.tolist() == [True, True, False, True, True, True]


def test_left_pad():
    batch, mask = left_pad([torch.tensor([1, 2, 3]), torch.tensor([4])], value=9)
    assert batch.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
