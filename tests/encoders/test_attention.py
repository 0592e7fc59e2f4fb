"""Every attention backend against one slow formula: each segment by itself, in float64."""

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_agree
from hypothesis import given, settings
from hypothesis import strategies as st

from refvl.attention import (
    BACKENDS,
    attend,
    available_backends,
    choose_backend,
    group_segments,
    varlen_attention,
    zero_padding,
)
from refvl.encoders.resampler import group_segment_pairs

HEAD_SIZES = (72, 128)
SEGMENTS = {
    "one token": [1],
    "one segment": [37],
    "equal windows": [16] * 5,
    "windows of one image": [64, 64, 32, 64, 64, 32, 16, 16, 8],
    "many lengths": [5, 1, 12, 3, 12, 40, 7, 2, 5],
    "empty segments": [0, 9, 0, 0, 4, 9, 0],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def slow_attention(q, k, v, pairs):
    """Segment by segment, of a queries and b keys each: softmax(q k^T / sqrt(K)) v in float64."""
    out, (q, k, v) = [], (x.double().transpose(0, 1) for x in (q, k, v))  # (H, n, K)
    for a, b in pairs:
        scores = q[:, :a] @ k[:, :b].mT / q.shape[-1] ** 0.5
        out.append((scores.softmax(-1) @ v[:, :b]).transpose(0, 1))
        q, k, v = q[:, a:], k[:, b:], v[:, b:]
    return torch.cat(out)


def cumulative(lengths, device="cpu"):
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)


def random_qkv(n, heads, head_size, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, n, heads, head_size, generator=generator).to(device, dtype).unbind()


def assert_exact(out, want, v, longest):
    """Averages of v. float32 rounds sums over K and over the longest segment, half
    precision weights and outputs."""
    steps = v.shape[-1] + longest if v.dtype == torch.float32 else 2
    assert_agree(out, want, steps, scale=float(v.nan_to_num().abs().max()))


def backends_of(*devices):
    """(device, backend, dtype) of each device that is named; those of a GPU run with `-m gpu`."""
    cpu = [("cpu", backend, dtype) for dtype in DTYPES for backend in ("sdpa", "masked")]
    gpu = [("cuda", backend, dtype) for dtype in DTYPES[1:] for backend in BACKENDS]
    marked = [pytest.param(*case, marks=pytest.mark.gpu) for case in gpu]
    found = {"cpu": cpu, "cuda": marked}
    return [case for device in devices for case in found[device]]


each_backend = pytest.mark.parametrize(("device", "backend", "dtype"), backends_of("cpu", "cuda"), ids=str)


def needs(device, backend, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if backend not in available_backends(device, dtype):
        pytest.skip(f"{backend} is not available here")


@each_backend
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("name", SEGMENTS)
def test_every_backend_equals_the_slow_formula(name, head_size, device, backend, dtype):
    """Oracle: `slow_attention` on the same rounded inputs."""
    needs(device, backend, dtype)
    lengths = SEGMENTS[name]
    q, k, v = random_qkv(sum(lengths), 3, head_size, dtype, device)
    out = varlen_attention(q, k, v, cumulative(lengths, device), max(lengths), backend=backend)
    assert (out.dtype, out.shape) == (dtype, q.shape)
    assert_exact(out, slow_attention(q, k, v, zip(lengths, lengths, strict=True)), v, max(lengths))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any), st.integers(0, 99))
def test_any_lengths_with_and_without_the_plan_s_groups(lengths, seed):
    """Oracle: `slow_attention`; groups computed ahead give the same bits as groups computed on the way."""
    q, k, v = random_qkv(sum(lengths), 2, 8, seed=seed)
    cu_seqlens = cumulative(lengths)
    out = varlen_attention(q, k, v, cu_seqlens, max(lengths), backend="sdpa")
    planned = varlen_attention(q, k, v, cu_seqlens, max(lengths), backend="sdpa", groups=group_segments(cu_seqlens))
    assert torch.equal(out, planned)
    assert_exact(out, slow_attention(q, k, v, zip(lengths, lengths, strict=True)), v, max(lengths))


PAIRS = {  # queries and keys per segment
    "one segment": [(4, 37)],
    "equal sets": [(6, 16)] * 5,
    "many lengths": [(4, 5), (4, 1), (2, 12), (4, 5), (3, 40), (1, 1)],
    "empty segments": [(0, 0), (4, 9), (0, 0), (2, 3), (0, 5)],
}


def cross_attention(q, k, v, cu_q, cu_k, max_q, max_k, backend):
    """As the resampler's `CrossAttention` calls it."""
    groups = group_segment_pairs(cu_q, cu_k)
    out = attend(q, k, v, cu_q, cu_k, max_q, max_k, backend, groups)
    return zero_padding(out, cu_q, backend)


@each_backend
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("padding", [3, 0])
@pytest.mark.parametrize("name", PAIRS)
def test_cross_attention_equals_the_slow_formula(name, padding, head_size, device, backend, dtype):
    """Oracle: `slow_attention`. Rows after the last segment hold NaN and come out as zero."""
    needs(device, backend, dtype)
    queries, keys = zip(*PAIRS[name], strict=True)
    q, _, _ = random_qkv(sum(queries) + padding, 3, head_size, dtype, device, seed=1)
    _, k, v = random_qkv(sum(keys) + padding, 3, head_size, dtype, device, seed=2)
    q[sum(queries) :], k[sum(keys) :], v[sum(keys) :] = (float("nan"),) * 3
    cu_q, cu_k = cumulative([*queries, 0], device), cumulative([*keys, 0], device)
    out = cross_attention(q, k, v, cu_q, cu_k, max(queries), max(keys), backend)
    assert (out.dtype, out.shape) == (dtype, q.shape)
    want = slow_attention(q, k, v, PAIRS[name])
    assert_exact(out[: len(want)], want, v, max(keys))
    assert not out[len(want) :].any()


SPOILED = [(torch.float32, float("nan")), (torch.float16, float("inf")), (torch.float32, 3e38)]


@pytest.mark.parametrize(("dtype", "value"), SPOILED, ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("backend", ["sdpa", "masked"])
def test_a_spoiled_segment_spoils_itself_alone(backend, which, dtype, value):
    """Oracle: the other segments with a zero in its place, bit for bit. Padding follows the last segment.

    With a mask the spoiled segment is not finite. (torch's own kernel on a CPU may give zero for a
    query that is nan.)
    """
    cu_q, cu_k = cumulative([4, 2, 3, 0]), cumulative([5, 7, 6, 0])
    q, k, v = random_qkv(20, 2, 8, dtype)
    inputs = {"q": q[:11].clone(), "k": k.clone(), "v": v.clone()}
    spoiled_row = inputs[which][5 if which == "q" else 8]
    outs = []
    for spoil in (0.0, value):
        spoiled_row[:] = spoil
        outs.append(cross_attention(*inputs.values(), cu_q, cu_k, 4, 7, backend))
    clean, spoiled = outs
    others = [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert torch.equal(spoiled[others], clean[others])
    assert clean.isfinite().all()
    if backend == "masked" and (which == "k" or value != 3e38):  # which is finite, though too large for a key
        assert not spoiled[4:6].isfinite().all()


def test_no_tokens():
    q, k, v = random_qkv(0, 2, 8)
    assert varlen_attention(q, k, v, cumulative([]), 0, backend="sdpa").shape == (0, 2, 8)


def test_auto_takes_the_first_that_is_available_and_a_request_wins():
    """sdpa is the first choice wherever the kernel for half precision on CUDA cannot run."""
    for device, dtype in [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float32)]:
        assert available_backends(device, dtype) == ["sdpa", "masked"]
    available = available_backends("cuda:0", torch.float16)
    assert choose_backend("auto", "cuda:0", torch.float16) == available[0]
    assert [choose_backend(name, "cuda:0", torch.float16) for name in available] == available


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "message"),
    [
        ("flashy", "cpu", torch.float32, r"attention: expected one of \('auto', .* got 'flashy'"),
        ("varlen", "cuda", torch.float32, r"'varlen' cannot run on cuda with torch.float32 and head_dim=64; available"),
    ],
)
def test_a_backend_that_cannot_run_is_named(requested, device, dtype, message):
    with pytest.raises(ValueError, match=message):
        choose_backend(requested, device, dtype)


def test_wrong_arguments_are_named():
    q, k, v = random_qkv(4, 2, 8)
    with pytest.raises(ValueError, match=r"backend: expected one of .* got 'auto'"):
        varlen_attention(q, k, v, cumulative([4]), 4, backend="auto")
    with pytest.raises(ValueError, match="k_NHK: dimension 1 must be 2, got 1"):
        varlen_attention(q, k[:, :1], v, cumulative([4]), 4, backend="sdpa")


@pytest.mark.parametrize(("device", "backend", "dtype"), backends_of("cuda"), ids=str)
def test_padding_rows_on_the_gpu_are_zero_whatever_memory_held(device, backend, dtype):
    """As a captured graph runs it: spare rows, repeated cumulative lengths, a larger max_seqlen."""
    needs(device, backend, dtype)
    lengths = SEGMENTS["windows of one image"]
    n = sum(lengths)
    q, k, v = random_qkv(n + 48, 2, 80, dtype, device)
    for x in (q, k, v):
        x[n:] = float("nan")
    cu_seqlens = cumulative([*lengths, 0, 0, 0], device)
    freed = [torch.full_like(q, float("nan")) for _ in range(4)]  # what the allocator hands out next
    torch.cuda.synchronize()
    del freed
    out = varlen_attention(q, k, v, cu_seqlens, 2 * max(lengths), backend=backend)
    assert_exact(out[:n], slow_attention(q, k, v, zip(lengths, lengths, strict=True)), v, max(lengths))
    assert torch.equal(out[n:], torch.zeros_like(out[n:]))
