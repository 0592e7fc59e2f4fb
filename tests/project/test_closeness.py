"""The bound that every comparison of floats uses: sums in two orders stay within it, one that lacks a term does not."""

import pytest
import torch
from closeness import assert_agree, assert_as_exact_as, assert_differ, gain, roundings
from torch import nn


def in_order(x):
    """Sums over the last axis, one term after the other."""
    return x.cumsum(-1)[..., -1]


@pytest.mark.parametrize("terms", [16, 256, 4096])
def test_rounding_stays_within_the_bound_and_a_forgotten_term_does_not(terms):
    """Oracle: the sums in float64."""
    x = torch.randn(1000, terms, generator=torch.Generator().manual_seed(0))
    forwards, backwards, exact = in_order(x), in_order(x.flip(-1)), x.double().sum(-1)
    assert_agree(forwards, backwards, terms)
    assert_agree(forwards, exact, terms)
    assert_agree(in_order(x.bfloat16()), x.bfloat16().double().sum(-1), terms)
    assert_differ(in_order(x[:, 1:]), exact, terms, "sums")
    with pytest.raises(AssertionError, match="sums differ by .* where rounding explains"):
        assert_differ(forwards, backwards, terms, "sums")
    assert_as_exact_as(forwards, backwards, exact)
    with pytest.raises(AssertionError, match="times as far"):
        assert_as_exact_as(in_order(x[:, 1:]), forwards, exact)


def test_a_gain_is_how_much_faster_than_its_input_an_output_changes():
    """Oracle: the derivative, of functions of numbers that are all one."""
    x = torch.ones(10_000, dtype=torch.float64)
    assert gain(lambda x: x**3, x) == pytest.approx(3, rel=0.05)
    assert gain(lambda x: 1000 + x, x) == 1
    scores = torch.linspace(0, 1000, 1000)
    assert gain(lambda s: s.softmax(0), scores) > 1


def test_nan_other_shapes_and_other_dtypes_never_agree():
    x = torch.ones(3)
    for other, message in (
        (torch.tensor([1.0, float("nan"), 1.0]), "differ by nan"),
        (torch.ones(1), "shapes differ"),
        (x.half(), "dtypes differ"),
        (x + 1e-5, "where rounding explains"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_agree(x, other, 4)
    assert_agree(torch.zeros(0), torch.zeros(0), 4)


def test_steps_of_a_module_are_the_terms_of_its_sums():
    module = nn.Sequential(nn.Conv2d(3, 8, 2), nn.LayerNorm(8), nn.Linear(8, 5), nn.Linear(5, 2))
    module.experts = nn.Parameter(torch.zeros(6, 4, 7))
    assert roundings(module) == 3 * 2 * 2 + 8 + 5 + 7 and roundings(9) == 9
