"""What a review of the GPU path on paper found, each kept as a test on the simulated device."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from closeness import assert_agree
from graph_families import build, make_case
from simulated_cuda import simulated_cuda

import refvl
from refvl.attention import available_backends, cumulative_lengths, varlen_attention
from refvl.language.model import CausalTextModel
from refvl.language.step3_vl import Step3TextConfig, Step3TextMoE
from refvl.paths import DATA
from refvl.serving.linear import fuse_layers
from refvl.serving.media_cache import Embeddings, copied
from refvl.serving.parallel import run_dp_sharded_mrope_vision_model
from refvl.trace import synchronized_time


class Nccl:
    """Ranks as threads, each with a GPU of its own, and two rules of NCCL: CUDA
    tensors alone, no GPU shared."""

    def __init__(self, ranks: int):
        self.ranks, self.rank, self.barrier = ranks, threading.local(), threading.Barrier(ranks)
        self.given: dict[int, object] = {}

    def exchange(self, value) -> list:
        """What every rank gave, in order."""
        self.given[self.rank.number] = value
        self.barrier.wait(60)
        values = [self.given[rank] for rank in range(self.ranks)]
        self.barrier.wait(60)
        return values

    def broadcast_object_list(self, objects, group=None, group_src=0, device=None):
        devices = [device for device, _ in self.exchange((device, objects))]
        assert len({str(device) for device in devices}) == self.ranks, f"Duplicate GPU detected: {devices}"
        objects[:] = self.exchange(list(objects))[group_src]

    def all_gather_into_tensor(self, output, local, group=None):
        assert local.device == output.device == torch.device("cuda", self.rank.number)
        output.copy_(torch.cat(self.exchange(local.cpu())))

    def install(self, monkeypatch):
        for name, value in {
            "is_available": lambda: True, "is_initialized": lambda: True, "get_backend": lambda group=None: "nccl",
            "get_rank": lambda group=None: self.rank.number, "get_world_size": lambda group=None: self.ranks,
            "broadcast_object_list": self.broadcast_object_list,
            "all_gather_into_tensor": self.all_gather_into_tensor,
        }.items():  # fmt: skip
            monkeypatch.setattr(dist, name, value)


@pytest.mark.parametrize("layouts", [[(1, 4, 4), (1, 2, 4), (2, 4, 6)], [(1, 4, 4)]], ids=["three items", "idle rank"])
def test_every_rank_uses_its_own_gpu(monkeypatch, layouts):
    """A2. Oracle: each item alone on the CPU."""
    case, nccl = make_case(build("Qwen2.5-VL"), layouts), Nccl(2)
    nccl.install(monkeypatch)

    def work(rank):
        nccl.rank.number = rank
        return [x.cpu() for x in run_dp_sharded_mrope_vision_model(encoders[rank], case.rows, layouts)]

    with simulated_cuda(devices=2) as machine:
        encoders = [build("Qwen2.5-VL").to(f"cuda:{rank}") for rank in range(2)]  # here: threads share one seed
        machine.counts.clear()
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(work, range(2)))
        assert machine.counts["bytes"] < 1.5 * case.rows.nbytes  # a rank copies its own rows alone
    for found in results:
        assert_agree(found, case.wanted, build("Qwen2.5-VL"))


@pytest.mark.parametrize(("device", "rank"), [("auto", "1"), ("cuda", "1"), ("cuda", None)])
def test_a_process_loads_onto_its_own_gpu(monkeypatch, device, rank):
    """A2: torchrun's or the current one. B4: text weights go straight there,
    without a whole model on the host."""
    pytest.importorskip("accelerate")
    if rank:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(CausalTextModel, "to", lambda *args: pytest.fail("moved after it was loaded"))
    with simulated_cuda(devices=2):
        torch.cuda.set_device(int(rank is None))
        vlm = refvl.load(DATA / "checkpoints" / "tiny-qwen2_5_vl", device=device, progress=False)
        for half in (vlm.encoder, vlm.language_model):
            assert {parameter.device for parameter in half.parameters()} == {torch.device("cuda:1")}


def test_timers_and_copies_for_other_threads_wait_for_the_device_of_the_tensors():
    """Another device is the current one."""
    with simulated_cuda(devices=2) as machine:
        rows = torch.ones(2, 4, device="cuda:1")
        assert copied([Embeddings(rows, 0.0)])[0].rows.device == rows.device
        synchronized_time(rows.device)
        assert machine.finished == [torch.cuda.default_stream("cuda:1")] * 2


def test_no_segments_are_no_work_and_padding_is_zero(machine):
    """B7. The kernels refuse the former ("batch size must be positive"), and do
    not write the latter."""
    q, none = torch.zeros(0, 2, 16).bfloat16().cuda(), cumulative_lengths([]).cuda()
    assert varlen_attention(q, q, q, none, 0, backend="varlen").shape == (0, 2, 16)
    q = torch.ones(3, 2, 16).bfloat16().cuda()
    assert not varlen_attention(q, q, q, cumulative_lengths([2]).cuda(), 2, backend="varlen")[2:].cpu().any()
    encoder = build("Qwen2.5-VL").to("cuda", torch.bfloat16)
    fuse_layers(encoder)
    with torch.inference_mode():
        assert encoder(torch.zeros(0, encoder.config.patch_values, device="cuda"), []).shape[0] == 0


@pytest.mark.parametrize(("dtype", "waits"), [(torch.bfloat16, 0), (torch.float32, 1)], ids=str)
def test_experts_wait_once_in_a_layer_at_most(machine, dtype, waits):
    """B5. In bfloat16 not at all, by a grouped matmul. Oracle: every token by its
    own experts, in float64."""
    torch.manual_seed(0)
    config = Step3TextConfig(hidden_size=16, moe_intermediate_size=24, moe_num_experts=6, moe_top_k=2)
    moe, x = Step3TextMoE(config), torch.randn(1, 9, 16).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    moe = moe.to(dtype).requires_grad_(False)
    weights, chosen = moe.route(x[0])
    exact = copy.deepcopy(moe).double()
    exact.route = lambda x_TD: (weights.double(), chosen)
    exact = exact(x.double())[0]
    on_device, rows = moe.to("cuda"), x.cuda()
    machine.counts.clear()
    out = on_device(rows)
    assert machine.counts["waits"] <= waits
    error = (out.cpu()[0].double() - exact).norm() / exact.norm()
    assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("head_dim", "major", "first"), [(64, 7, "sdpa"), (64, 8, "varlen"), (12, 8, "sdpa")])
def test_flash_attention_begins_with_ampere(head_dim, major, first):
    """Oracle: flash-attn 2 "only supports Ampere GPUs or newer"; a T4 is 7.5. A
    head has a multiple of 8 values."""
    with simulated_cuda(capability=(major, 0)):
        assert available_backends("cuda", torch.bfloat16, head_dim)[0] == first
