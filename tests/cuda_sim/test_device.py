"""The simulated device keeps CUDA's rules. Oracle: the CUDA C++ programming guide and torch's own error messages."""

import threading

import pytest
import torch
from simulated_cuda import CudaError, CudaTensor, simulated_cuda

from refvl.attention import available_backends, cumulative_lengths, varlen_attention


def test_numbers_are_true(machine):
    """Oracle: the same on the CPU."""
    x = torch.randn(4, 6)
    y = x.to("cuda")
    assert (y.device, y.is_cuda, type(y)) == (torch.device("cuda:0"), True, CudaTensor)
    z = torch.nn.functional.layer_norm(y[1:, ::2] @ y[1:, 3:].T, (3,))
    z[torch.tensor([2, 0], device="cuda"), :] += 1
    want = torch.nn.functional.layer_norm(x[1:, ::2] @ x[1:, 3:].T, (3,))
    want[torch.tensor([2, 0]), :] += 1
    assert torch.equal(z.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_rms_norm_is_one_kernel_and_rounds_no_more_than_its_parts(machine, dtype):
    """Oracle: the formula in float64. The kernel rounds to dtype once, its parts before the weight as well."""
    norm, x = torch.nn.RMSNorm(64, eps=1e-6).to(dtype), torch.randn(32, 64).to(dtype)
    torch.nn.init.normal_(norm.weight)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    parts, on_device = norm(x), x.cuda()
    machine.counts.clear()
    whole = norm.to("cuda")(on_device)
    assert machine.counts["fused_rms_norm"] == 1
    inside = 64 * torch.finfo(torch.float32).eps  # a sum of 64 squares, in any order
    for out, times in ((parts, 2), (whole.cpu(), 1)):
        rounding = (times * torch.finfo(dtype).eps / 2 + inside) * (exact.abs() + torch.finfo(dtype).tiny)
        assert ((out.double() - exact).abs() <= rounding).all()


def test_operands_share_a_device(machine):
    x = torch.ones(3, device="cuda")
    with pytest.raises(CudaError, match="Expected all tensors to be on the same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]  # scalars may come from the CPU


def test_copies_and_waits_are_counted(machine):
    """A pinned copy does not wait; a pageable one, a value read back and a mask that looks up do."""
    x = torch.ones(4)
    x.pin_memory().to("cuda", non_blocking=True)
    assert machine.counts == {"copies": 1, "bytes": 16, "kernels": 1}
    y = x.to("cuda")
    assert machine.counts["waits"] == 1
    for read in (y.tolist, lambda: y[0].item(), lambda: bool((y > 0).all()), lambda: y[y > 0], y.cpu, y.nonzero):
        before = machine.counts["waits"]
        read()
        assert machine.counts["waits"] == before + 1


def test_fresh_memory_holds_nan(machine):
    assert torch.empty(3, device="cuda").isnan().all()
    assert (torch.empty(3, dtype=torch.int32, device="cuda") < -(2**30)).all()


def test_a_new_tensor_is_on_the_device_of_the_old(machine):
    """As on CUDA, where it is a copy from the host; with the old one's dtype, unless another is given."""
    old = torch.ones(2, dtype=torch.float64, device="cuda")
    new = old.new_tensor([0.25, 0.5])
    assert (new.device, new.dtype) == (old.device, old.dtype) and (old * new).tolist() == [0.25, 0.5]
    assert old.new_tensor([1], dtype=torch.int64).dtype == torch.int64 and not old.new_tensor([1], device="cpu").is_cuda


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.tolist(),
        lambda x: x + torch.tensor([1.0, 2.0], device="cuda"),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
    ],
    ids=["tolist", "copy from the host", "mask", "copy to the host"],
)
def test_a_capture_forbids_waiting(machine, forbidden):
    x = torch.ones(2, device="cuda")
    with (
        pytest.raises(CudaError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        forbidden(x)
    assert machine.capture is None


def test_a_replay_repeats_what_was_captured_and_nothing_else(machine):
    """Contents of buffers are read again, Python is not; the output keeps its address and is overwritten."""
    x, graph, factor = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph(), 2
    with torch.cuda.graph(graph):
        y = (x * factor)[:1] + 1
    factor = 100
    assert y.isnan().all()  # a capture runs nothing
    x.fill_(5)
    graph.replay()
    assert (y.tolist(), factor) == ([11], 100)


@pytest.mark.parametrize(("mode", "breaks"), [("global", True), ("thread_local", False)])
def test_another_thread_disturbs_a_global_capture_alone(machine, mode, breaks):
    x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph, capture_error_mode=mode):
            y = x + 1
            other = threading.Thread(target=x.tolist)
            other.start()
            other.join()
        return y

    if breaks:
        with pytest.raises(CudaError, match="previous error during capture"):
            capture()
    else:
        y = capture()
        graph.replay()
        assert y.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, cu: (q.float(), cu), "fp16 and bf16 data type, got torch.float32"),
        (lambda q, cu: (q, cu.long()), "cu_seqlens of dtype int32, got torch.int64"),
        (lambda q, cu: (q[..., :12], cu), "a head size of at most 256 in steps of 8, got 12"),
        (lambda q, cu: (q, cu + 1), "segments inside of the rows"),
        (lambda q, cu: (q, cu.flip(0)), "cu_seqlens that do not fall"),
    ],
    ids=["float32", "int64", "head size", "too long", "falling"],
)
def test_the_kernel_is_particular(machine, change, message):
    q, cu_seqlens = change(torch.randn(6, 2, 16).bfloat16(), cumulative_lengths([4, 2]))
    q, cu_seqlens = q.cuda(), cu_seqlens.cuda()
    with pytest.raises(RuntimeError, match=message):
        varlen_attention(q, q, q, cu_seqlens, 4, backend="varlen")


def test_a_segment_longer_than_was_said_is_refused(machine):
    q, cu_seqlens = torch.randn(6, 2, 16).bfloat16().cuda(), cumulative_lengths([4, 2]).cuda()
    with pytest.raises(RuntimeError, match="no longer than max_seqlen"):
        varlen_attention(q, q, q, cu_seqlens, 3, backend="varlen")


@pytest.mark.parametrize(
    ("capability", "first"), [((7, 0), "sdpa"), ((7, 5), "sdpa"), ((8, 0), "varlen"), ((9, 0), "varlen")]
)
def test_flash_attention_begins_with_ampere(capability, first):
    """Oracle: flash-attn 2 "only supports Ampere GPUs or newer"; a T4 is 7.5, a V100 7.0."""
    with simulated_cuda(capability=capability):
        assert available_backends("cuda", torch.bfloat16)[0] == first
