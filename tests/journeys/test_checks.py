"""The checks at the public border: what is allowed passes unchanged, what is not is named in the error."""

import numpy as np
import pytest
import torch

from refvl.checks import (
    as_grids,
    as_seconds,
    check_floats,
    check_positive_int,
    check_pruning_rate,
    check_shape,
    check_token_ids,
)


@pytest.mark.parametrize(
    "grid_thw",
    [
        [(1, 4, 6), (2, 8, 4)],
        ((1, 4, 6), [2, 8, 4]),
        torch.tensor([[1, 4, 6], [2, 8, 4]]),
        torch.tensor([[1, 4, 6], [2, 8, 4]], dtype=torch.int32),
        np.array([[1, 4, 6], [2, 8, 4]]),
        [torch.tensor([1, 4, 6]), np.array([2, 8, 4])],
        [(np.int64(1), torch.tensor(4), 6), (2, 8, 4)],
    ],
    ids=["tuples", "lists", "int64 tensor", "int32 tensor", "array", "tensors in a list", "integer scalars"],
)
def test_every_spelling_of_a_grid_means_the_same(grid_thw):
    """Oracle: the list of tuples of Python ints, written out."""
    grids = as_grids(grid_thw, spatial_merge_size=2)
    assert grids == [(1, 4, 6), (2, 8, 4)]
    assert all(type(n) is int for grid in grids for n in grid)


def test_no_items_are_allowed():
    assert as_grids([]) == [] == as_grids(torch.empty(0, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("grid_thw", "error", "message"),
    [
        (7, TypeError, "grid_thw: expected a sequence .* got int"),
        ("1x2x3", TypeError, "grid_thw: expected a sequence .* got str"),
        (torch.ones(1, 3), TypeError, "grid_thw: expected integers, got dtype torch.float32"),
        (torch.ones(1, 3, dtype=torch.bool), TypeError, "grid_thw: expected integers, got dtype torch.bool"),
        (torch.ones(3, dtype=torch.int64), ValueError, r"grid_thw: expected shape \(items, 3\), got \(3,\)"),
        (torch.ones(1, 4, dtype=torch.int64), ValueError, r"grid_thw: expected shape \(items, 3\), got \(1, 4\)"),
        ([(1, 4)], ValueError, r"grid_thw\[0\]: expected \(t, h, w\), got \(1, 4\)"),
        ([(1, 4, 4), 5], ValueError, r"grid_thw\[1\]: expected \(t, h, w\), got 5"),
        ([(1, 4.0, 4)], TypeError, r"grid_thw\[0\]: expected integers \(t, h, w\), got \(1, 4.0, 4\)"),
        ([(True, 4, 4)], TypeError, r"grid_thw\[0\]: expected integers"),
        ([(0, 4, 4)], ValueError, r"grid_thw\[0\]: every extent must be at least 1, got \(0, 4, 4\)"),
        ([(1, 4, -4)], ValueError, r"grid_thw\[0\]: every extent must be at least 1, got \(1, 4, -4\)"),
        ([(1, 4, 4), (1, 4, 5)], ValueError, r"grid_thw\[1\]: h and w must be multiples of spatial_merge_size=2"),
    ],
)
def test_a_bad_grid_is_named(grid_thw, error, message):
    with pytest.raises(error, match=message):
        as_grids(grid_thw, spatial_merge_size=2)


def test_the_name_in_the_message_is_the_caller_s():
    with pytest.raises(ValueError, match=r"video_grid_thw\[0\]"):
        as_grids([(1, 2)], name="video_grid_thw")


@pytest.mark.parametrize("value", [1, 7, np.int32(7), torch.tensor(7)])
def test_positive_integers_pass(value):
    assert check_positive_int(value, "n") == int(value)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)])
def test_other_numbers_do_not(value, error):
    with pytest.raises(error, match=f"n: .*{value}"):
        check_positive_int(value, "n")


@pytest.mark.parametrize(
    "value",
    [
        *(torch.tensor(value) for value in (4.7, 4.0, 4j, True, [4])),
        torch.tensor(4, device="meta"),
        np.float64(4),
        np.bool_(True),
        "4",
        None,
    ],
    ids=str,
)
def test_not_everything_with_an_index_is_an_integer(value):
    """Every tensor has `__index__`, which cuts a fraction off."""
    with pytest.raises(TypeError, match="n: expected an integer"):
        check_positive_int(value, "n")
    with pytest.raises(TypeError, match=r"grid_thw\[0\]: expected integers"):
        as_grids([(value, 4, 4)])


@pytest.mark.parametrize("q", [0, 0.0, 0.5, 0.999, np.float32(0.5), np.float64(0.5)])
def test_pruning_rates_pass(q):
    assert check_pruning_rate(q) == float(q)


@pytest.mark.parametrize("q", [1, 1.0, -0.01, 2.5, float("nan"), float("inf")])
def test_pruning_rates_outside_the_interval_do_not(q):
    with pytest.raises(ValueError, match=rf"q: expected a pruning rate in \[0, 1\), got {q}"):
        check_pruning_rate(q)


@pytest.mark.parametrize("q", ["0.5", None, True])
def test_a_pruning_rate_is_a_number(q):
    with pytest.raises(TypeError, match=f"pruning_rate: expected a number, got {type(q).__name__}"):
        check_pruning_rate(q, "pruning_rate")


def test_shapes():
    x = torch.empty(3, 4)
    assert check_shape(x, ("N", 4), "x") is x
    assert check_shape(x, (None, "K"), "x") is x
    with pytest.raises(TypeError, match=r"x: expected a torch.Tensor, got ndarray"):
        check_shape(x.numpy(), ("N", 4), "x")
    with pytest.raises(ValueError, match=r"x: expected 3 dimensions \(N, H, 4\), got shape \(3, 4\)"):
        check_shape(x, ("N", "H", 4), "x")
    with pytest.raises(ValueError, match=r"x: dimension 1 must be 5, got 4 \(shape \(3, 4\), wanted \(N, 5\)\)"):
        check_shape(x, ("N", 5), "x")
    with pytest.raises(ValueError, match=r"x: dimension 0 must be 2, got 3 patches \(shape .*, wanted \(2, K\)\)"):
        check_shape(x, (("patches", 2), "K"), "x")


def test_seconds_pass():
    assert as_seconds([1, 0.5], 2, "s") == as_seconds(torch.tensor([1.0, 0.5]), 2, "s") == [1.0, 0.5]
    assert as_seconds((torch.tensor(0.25),), 1, "s") == as_seconds(np.array([0.25]), 1, "s") == [0.25]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1.0], ValueError, "s: expected one number for each of 2 videos, got 1"),
        (torch.ones(3), ValueError, "s: expected one number for each of 2 videos, got 3"),
        (torch.ones(2, 1), TypeError, r"s\[0\]: expected a number, got list"),
        (1.0, TypeError, "s: expected a sequence, got float"),
        ([1.0, "2"], TypeError, r"s\[1\]: expected a number, got str"),
        ([0.0, 1.0], ValueError, r"s\[0\]: expected more than 0 and at most 1,000,000 seconds, got 0.0"),
        ([1.0, float("nan")], ValueError, r"s\[1\]: expected more than 0 and at most 1,000,000 seconds, got nan"),
    ],
)
def test_other_seconds_do_not(values, error, message):
    with pytest.raises(error, match=message):
        as_seconds(values, 2, "s")


def test_kinds_of_numbers():
    ids, floats = torch.tensor([[1, 2]]), torch.ones(1, 2)
    assert check_token_ids(ids) is ids and check_floats(floats, "x") is floats
    with pytest.raises(TypeError, match="input_ids: expected integers, got dtype torch.float32"):
        check_token_ids(floats)
    with pytest.raises(ValueError, match=r"input_ids: expected 2 dimensions \(B, L\)"):
        check_token_ids(ids[0])
    with pytest.raises(TypeError, match="x: expected floating-point numbers, got dtype torch.int64"):
        check_floats(ids, "x")
