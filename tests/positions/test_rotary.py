"""2-D rotary angles: against a loop over patches, transformers, and the properties of a rotation."""

import importlib

import pytest
import torch
from closeness import assert_agree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from refvl import positions
from refvl.positions import apply_rotary, vision_rotary_cos_sin

GRIDS = [(1, 4, 6), (2, 2, 2), (3, 8, 4)]


def blocks_slowly(grids, merge):
    """(row, column) of every patch: for each frame, block row, block column, row and column inside the block."""
    return [
        (block_row * merge + row, block_column * merge + column)
        for t, h, w in grids
        for _ in range(t)
        for block_row in range(h // merge)
        for block_column in range(w // merge)
        for row in range(merge)
        for column in range(merge)
    ]


@st.composite
def grids_and_merge(draw):
    merge, extent = draw(st.integers(1, 3)), st.integers(1, 6)
    grids = draw(st.lists(st.tuples(st.integers(1, 3), extent, extent), min_size=1, max_size=3))
    return [(t, h * merge, w * merge) for t, h, w in grids], merge


@settings(max_examples=50, deadline=None)
@given(grids_and_merge(), st.sampled_from([4, 8, 20, 64, 72, 80]), st.sampled_from([100.0, 10000.0]))
def test_equals_the_slow_formula(problem, head_dim, theta):
    """Oracle: per patch, position / theta^(2i / (head_dim / 2)) for the row, then for the column, in float64."""
    grids, merge = problem
    frequencies = [theta ** (-2 * i / (head_dim // 2)) for i in range(head_dim // 4)]
    angles = [[p * f for p in patch for f in frequencies] for patch in blocks_slowly(grids, merge)]
    cos, sin = vision_rotary_cos_sin(grids, head_dim=head_dim, spatial_merge_size=merge, theta=theta)
    assert cos.dtype == sin.dtype == torch.float32
    angles = torch.tensor(angles, dtype=torch.float64)
    largest = 1 + float(angles.max())  # an angle is rounded before its cosine is
    assert_agree(cos, angles.cos(), 4, scale=largest)
    assert_agree(sin, angles.sin(), 4, scale=largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_application_equals_transformers(dtype):
    """Oracle: `apply_rotary_pos_emb_vision`, which takes each angle twice, and both against float64.

    Of two products and a sum, each rounded to float32, then to dtype, whose smallest numbers have
    equal steps. Where the CPU adds a product in one step it is rounded once less than in
    transformers, so bits may differ.
    """
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    cos, sin = vision_rotary_cos_sin(GRIDS, head_dim=16)
    q, k = torch.randn(2, len(cos), 3, 16).to(dtype)
    want = apply_rotary_pos_emb_vision(q, k, torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1))
    for x, theirs in zip((q, k), want, strict=True):
        ours, (first, second) = apply_rotary(x, cos, sin), x.double().chunk(2, dim=-1)
        turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
        exact = torch.cat([turned.real, turned.imag], dim=-1)
        rounding = torch.finfo(torch.float32).eps * (first.abs() + second.abs()).repeat(1, 1, 2)
        rounding += torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
        for rotated in (ours, theirs):
            assert rotated.dtype == dtype
            assert ((rotated.double() - exact).abs() <= rounding).all()


def test_one_thread_makes_the_first_calls_of_cosine_and_sine():
    """Oracle: the functions that importing the package calls; MKL's first call is wrong where two threads share it."""
    calls = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append((function.__name__, [len(x) for x in args if isinstance(x, torch.Tensor)]))
            return function(*args, **(kwargs or {}))

    with Watch():
        importlib.reload(positions)
    assert ("cos", [1]) in calls and ("sin", [1]) in calls


def test_no_items_no_angles():
    cos, sin = vision_rotary_cos_sin([], head_dim=16)
    assert cos.shape == sin.shape == (0, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 6}, "head_dim: must be a multiple of 4 .* got 6"),
        ({"theta": 0}, "theta: must be a finite number above 0, got 0"),
        ({"spatial_merge_size": 0}, "spatial_merge_size: must be at least 1, got 0"),
        ({"spatial_merge_size": 3}, r"grid_thw\[0\]: h and w must be multiples of spatial_merge_size=3"),
    ],
    ids=str,
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        vision_rotary_cos_sin([(1, 2, 2)], **{"head_dim": 16} | arguments)
