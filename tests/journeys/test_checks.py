"""The checks at the public border: what is allowed passes unchanged, what is not is named in the
error."""

import numpy as np
import pytest
import torch

from refvl.checks import (
    as_grids,
    as_seconds,
    check_floats,
    check_positive_int,
    check_prompts,
    check_pruning_rate,
    check_shape,
)

GRIDS = [(1, 4, 6), (2, 8, 4)]


@pytest.mark.parametrize(
    "grid_thw",
    [
        GRIDS,
        torch.tensor(GRIDS, dtype=torch.int32),
        np.array(GRIDS),
        [torch.tensor([1, 4, 6]), np.array([2, 8, 4])],
        [(np.int64(1), torch.tensor(4), 6), [2, 8, 4]],
    ],
    ids=["tuples", "tensor", "array", "tensors in a list", "integer scalars"],
)
def test_every_spelling_of_a_grid_means_the_same(grid_thw):
    """Oracle: the list of tuples of Python ints, written out."""
    grids = as_grids(grid_thw, spatial_merge_size=2)
    assert grids == GRIDS and all(type(n) is int for grid in grids for n in grid)
    assert as_grids(torch.empty(0, 3, dtype=torch.int64)) == []


X, IDS = torch.empty(3, 4), torch.tensor([[1, 2, 3]])
BAD_GRIDS = {  # what the error says
    "grid_thw: expected a sequence .* got int": 7,
    r"grid_thw\[0\]: expected integers \(t, h, w\), got \[1.0": torch.ones(1, 3),
    r"expected shape \(items, 3\), got \(1, 4\)": torch.ones(1, 4, dtype=torch.int64),
    r"grid_thw\[1\]: expected \(t, h, w\), got 5": [(1, 4, 4), 5],
    r"grid_thw\[0\]: expected integers": [(True, 4, 4)],
    r"grid_thw\[0\]: every extent must be at least 1": [(1, 4, 0)],
    "expected at most 4,194,304 patches in one plan": [(1, 2**11, 2**12)],
}
BAD_SHAPES = {
    "x: expected a torch.Tensor, got ndarray": (X.numpy(), ("N", 4)),
    r"x: expected 3 dimensions \(N, H, 4\), got shape \(3, 4\)": (X, ("N", "H", 4)),
    r"x: dimension 1 must be 5, got 4 \(shape .*, wanted \(N, 5\)\)": (X, ("N", 5)),
    "x: dimension 0 must be 2, got 3 patches": (X, (("patches", 2), "K")),
}
BAD_SECONDS = {
    "s: expected one number for each of 2 videos, got 3": torch.ones(3),
    "s: expected a sequence, got float": 1.0,
    r"s\[1\]: must be a finite number above 0, got 0.0": [1.0, 0.0],
    r"s\[0\]: must be a finite number above 0, got nan": [float("nan"), 1.0],
}
BAD_PROMPTS = {
    "input_ids: expected prompts of at least one token": (IDS[:, :0], None),
    "input_ids: expected token ids from 0 to 3, got 4": (IDS + 1, None),
    "attention_mask: expected padding only on the left": (IDS, torch.tensor([[1, 0, 1]])),
}


def refuses(message, check, *arguments):
    with pytest.raises((TypeError, ValueError), match=message):
        check(*arguments)


@pytest.mark.parametrize("message", BAD_GRIDS)
def test_bad_grids_are_named(message):
    refuses(message, as_grids, BAD_GRIDS[message])


@pytest.mark.parametrize("message", BAD_SHAPES)
def test_bad_shapes_are_named(message):
    refuses(message, check_shape, *BAD_SHAPES[message], "x")


@pytest.mark.parametrize("message", BAD_SECONDS)
def test_bad_seconds_are_named(message):
    refuses(message, as_seconds, BAD_SECONDS[message], 2, "s")


@pytest.mark.parametrize("message", BAD_PROMPTS)
def test_bad_prompts_are_named(message):
    refuses(message, check_prompts, *BAD_PROMPTS[message], 4)


def test_bad_numbers_are_named():
    refuses("n: must be at least 1, got 0", check_positive_int, 0, "n")
    refuses("n: expected an integer, got bool", check_positive_int, True, "n")
    for rate in (1.0, float("nan")):
        refuses(r"q: expected a pruning rate in \[0, 1\), got ", check_pruning_rate, rate)
    refuses("rate: expected a number, got str", check_pruning_rate, "0.5", "rate")
    refuses("x: expected floating-point numbers, got dtype torch.int64", check_floats, IDS, "x")


def test_merge_blocks_are_whole():
    with pytest.raises(ValueError, match=r"video\[1\]: h and w must be multiples of spatial_merge_size=2"):
        as_grids([(1, 4, 4), (1, 4, 5)], spatial_merge_size=2, name="video")


def test_what_is_allowed_passes():
    assert [check_positive_int(value, "n") for value in (1, np.int32(7), torch.tensor(7))] == [1, 7, 7]
    assert [check_pruning_rate(q) for q in (0, 0.999, np.float32(0.5))] == [0.0, 0.999, 0.5]
    assert check_shape(X, (None, 4), "x") is X and check_floats(X, "x") is X
    assert as_seconds([1, 0.5], 2, "s") == as_seconds(torch.tensor([1.0, 0.5]), 2, "s") == [1.0, 0.5]
    mask = check_prompts(torch.tensor([[9, 1], [2, 3]]), torch.tensor([[0, 1], [1, 1]]), 4)
    assert mask.tolist() == [[False, True], [True, True]]
