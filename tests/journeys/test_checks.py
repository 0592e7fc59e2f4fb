"""The checks at the public border: what is allowed passes unchanged, what is not is named in the error."""

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
REFUSED = [  # a call, the error, and its message
    (as_grids, (7,), TypeError, "grid_thw: expected a sequence .* got int"),
    (as_grids, ("1x2x3",), TypeError, "grid_thw: expected a sequence .* got str"),
    (as_grids, (torch.ones(1, 3),), TypeError, r"grid_thw\[0\]: expected integers \(t, h, w\), got \[1.0"),
    (as_grids, (torch.ones(1, 4, dtype=torch.int64),), ValueError, r"expected shape \(items, 3\), got \(1, 4\)"),
    (as_grids, ([(1, 4, 4), 5],), ValueError, r"grid_thw\[1\]: expected \(t, h, w\), got 5"),
    (as_grids, ([(True, 4, 4)],), TypeError, r"grid_thw\[0\]: expected integers"),
    (as_grids, ([(1, 4, 0)],), ValueError, r"grid_thw\[0\]: every extent must be at least 1, got \(1, 4, 0\)"),
    (as_grids, ([(1, 2**11, 2**12)],), ValueError, "expected at most 4,194,304 patches in one plan"),
    (check_positive_int, (0, "n"), ValueError, "n: must be at least 1, got 0"),
    (check_positive_int, (True, "n"), TypeError, "n: expected an integer, got bool"),
    (check_positive_int, (torch.tensor(4.0), "n"), TypeError, "n: expected an integer"),
    (check_positive_int, (np.float64(4), "n"), TypeError, "n: expected an integer"),
    (check_pruning_rate, (1.0,), ValueError, r"q: expected a pruning rate in \[0, 1\), got 1.0"),
    (check_pruning_rate, (-0.01,), ValueError, r"q: expected a pruning rate in \[0, 1\), got -0.01"),
    (check_pruning_rate, (float("nan"),), ValueError, r"q: expected a pruning rate in \[0, 1\), got nan"),
    (check_pruning_rate, ("0.5", "rate"), TypeError, "rate: expected a number, got str"),
    (check_shape, (X.numpy(), ("N", 4), "x"), TypeError, "x: expected a torch.Tensor, got ndarray"),
    (check_shape, (X, ("N", "H", 4), "x"), ValueError, r"x: expected 3 dimensions \(N, H, 4\), got shape \(3, 4\)"),
    (check_shape, (X, ("N", 5), "x"), ValueError, r"x: dimension 1 must be 5, got 4 \(shape .*, wanted \(N, 5\)\)"),
    (check_shape, (X, (("patches", 2), "K"), "x"), ValueError, "x: dimension 0 must be 2, got 3 patches"),
    (check_floats, (IDS, "x"), TypeError, "x: expected floating-point numbers, got dtype torch.int64"),
    (as_seconds, (torch.ones(3), 2, "s"), ValueError, "s: expected one number for each of 2 videos, got 3"),
    (as_seconds, (1.0, 1, "s"), TypeError, "s: expected a sequence, got float"),
    (as_seconds, ([1.0, 0.0], 2, "s"), ValueError, r"s\[1\]: must be a finite number above 0, got 0.0"),
    (as_seconds, ([float("nan")], 1, "s"), ValueError, r"s\[0\]: must be a finite number above 0, got nan"),
    (check_prompts, (IDS[0], None, 4), ValueError, r"input_ids: expected 2 dimensions \(B, L\)"),
    (check_prompts, (IDS.float(), None, 4), TypeError, "input_ids: expected integers, got dtype torch.float32"),
    (check_prompts, (IDS[:, :0], None, 4), ValueError, "input_ids: expected prompts of at least one token"),
    (check_prompts, (IDS, None, 3), ValueError, "input_ids: expected token ids from 0 to 2, got 3"),
    (check_prompts, (IDS, torch.tensor([[1, 0, 1]]), 4), ValueError, "attention_mask: expected padding only on the"),
    (check_prompts, (IDS, torch.tensor([[1, 1, 0]]), 4), ValueError, "attention_mask: expected padding only on the"),
]


@pytest.mark.parametrize(("check", "arguments", "error", "message"), REFUSED)
def test_what_is_refused_is_named(check, arguments, error, message):
    with pytest.raises(error, match=message):
        check(*arguments)


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
