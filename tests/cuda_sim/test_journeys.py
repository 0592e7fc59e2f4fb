"""The shipped models on the simulated device, from files to answers. Oracle: the same in bfloat16 on the CPU.

Each is loaded once, with graphs; without them it is the same model with `graphs = None`.
"""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from closeness import assert_agree
from packaging.version import Version
from shipped import is_read_here
from simulated_cuda import simulated_cuda

import refvl
from refvl.encoders.sending import ALIGNMENT
from refvl.graphs.buffers import metadata_tensors
from refvl.paths import DATA
from refvl.pixels.patches import Levels

SCENE, PAGE, CLIP = DATA / "pictures" / "scene.png", DATA / "pictures" / "page.png", DATA / "clips" / "scene.mp4"
CASES = {
    "tiny-qwen2_5_vl": ("What color is the circle?", {"images": [SCENE]}),
    "tiny-qwen3_vl": ("What color is the circle?", {"images": [SCENE]}),
    "tiny-glm4v": ("Which way does the circle move?", {"videos": [CLIP], "pruning_rate": 0.5}),
    "tiny-minicpmv-4_5": ("What color is the circle?", {"images": [SCENE]}),
    "tiny-minicpmv-4_7": ("Where is the circle?", {"images": [SCENE]}),
    "tiny-step3": ("Which letter is in the red box?", {"images": [PAGE]}),
}


SLOW = ("tiny-qwen3_vl", "tiny-minicpmv-4_5")
MODELS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES if is_read_here(name)]


@pytest.fixture(scope="module", params=MODELS)
def run(request):
    """Everything that is asked of one model, on the CPU and on the device."""
    folder, (question, media) = DATA / "checkpoints" / request.param, CASES[request.param]
    plain = {name: value for name, value in media.items() if name != "pruning_rate"}
    ask = {"max_new_tokens": 4, **media}
    cpu = refvl.load(folder, device="cpu", dtype="bfloat16", progress=False)
    found = SimpleNamespace(name=request.param, encoder=cpu.encoder, expected=cpu.trace(question, **ask))
    found.expected_embeds = cpu.encode(**plain)
    chunks = {"prefill_chunk": 32, "pruning": "vidcom2", **ask}
    found.expected_in_chunks = cpu.chat(question, **chunks)
    options = {"min_budget": 64, "max_budget": 64}
    with simulated_cuda(devices=2) as machine:  # the first one is the current device
        vlm = refvl.load(folder, device="cuda:1", dtype="bfloat16", graphs=options, progress=False)
        found.graphed = vlm.trace(question, **ask)
        found.replayed, found.replay_counts = machine.counted(lambda: vlm.trace(question, **ask))
        found.hits, found.misses = vlm.graphs.stats().hits, vlm.graphs.stats().misses
        vlm.graphs, steps = None, []
        vlm.language_model.register_forward_pre_hook(lambda *_: steps.append(Counter(machine.counts)))
        vlm.language_model.register_forward_hook(lambda *_: steps.append(Counter(machine.counts)))
        found.eager, found.counts = machine.counted(lambda: vlm.trace(question, **ask))
        found.decode = steps[-1] - steps[-2]
        found.in_chunks = vlm.chat(question, **chunks)
        found.streamed = "".join(vlm.chat(question, stream=True, **ask))
        embeds, found.encode_counts = machine.counted(lambda: vlm.encode(**plain))
        found.embeds = [rows.cpu() for rows in embeds]
    return found


@pytest.mark.thorough
def test_ids_equal_the_cpu_s(run):
    assert run.eager.token_ids == run.expected.token_ids
    assert run.graphed.token_ids == run.replayed.token_ids == run.expected.token_ids
    assert (run.streamed, run.in_chunks) == (run.expected.text, run.expected_in_chunks)
    assert (run.hits > 0, run.misses) == (True, 0)


def test_embeddings_come_as_near_as_bfloat16_rounds(run):
    """A block rounds to bfloat16 some twelve times, what is behind the tower as
    often as two blocks."""
    assert_agree(run.embeds, run.expected_embeds, 12 * (run.encoder.config.depth + 2))


def test_pixels_travel_once_and_as_the_smallest_type(run):
    """A byte for a value of a frame; Step3 resizes what is normalised already, and
    its values take two."""
    [patches] = run.expected.patches
    rows = patches.rows
    sent = rows.values.nbytes + 2 * rows.table.numel() if isinstance(rows, Levels) else 2 * rows.numel()
    assert isinstance(rows, Levels) == (run.name != "tiny-step3")
    assert sent <= patches.pixel_values.nbytes / (2 if run.name == "tiny-step3" else 3.5)
    tensors = [x for metadata in run.eager.metadata for x in metadata_tensors(metadata).values()]
    plan = sum(-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors)
    assert sent <= run.encode_counts["bytes"] <= sent + plan
    assert run.counts["bytes"] <= sent + plan + 64 * len(run.eager.full_ids)  # ids, positions and masks of the text


def test_a_decode_step_neither_copies_nor_waits(run):
    """Inside the text model; Step3's experts need no answer, either. transformers
    5.17 reads each mask, to drop it."""
    asks = Version(transformers.__version__) < Version("5.18")
    assert (run.decode["copies"], run.decode["waits"]) == (0, asks)


def test_graphs_ask_no_more_of_the_host(run):
    """The same copies, waits and bytes, the plan among them."""
    for name in ("copies", "bytes", "waits"):
        assert run.replay_counts[name] <= run.counts[name]
    assert run.replay_counts["graph launches"] >= 1 and run.replay_counts["kernels"] < run.counts["kernels"]


def test_old_gpus_answer_in_float16():
    """A T4 has no flash kernels and no bfloat16: it takes sdpa, masked graphs and
    float16, and is told so."""
    folder, (question, media) = DATA / "checkpoints" / "tiny-qwen2_5_vl", CASES["tiny-qwen2_5_vl"]
    with simulated_cuda(capability=(7, 5)):
        with pytest.warns(UserWarning, match="dtype: simulated does not compute in bfloat16; .* in float16"):
            vlm = refvl.load(folder, device="cuda", graphs={"budgets": [64]}, progress=False)
        assert (vlm.encoder.dtype, vlm.encoder.graph_attention) == (torch.float16, "masked")
        assert vlm.chat(question, max_new_tokens=4, **media) == "red"


def test_compile_has_torch_compile_every_block_before_it_returns(monkeypatch):
    """Whole, for all sizes, and run once. What comes of it:
    `tests/encoders/test_compiled_blocks.py`."""
    compiled, ran = [], []

    def compile_(module, **options):
        compiled.append((module, options))
        module.register_forward_hook(lambda *_: ran.append(module))

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    with simulated_cuda():
        folder = DATA / "checkpoints" / "tiny-qwen2_5_vl"
        vlm = refvl.load(folder, device="cuda", dtype="bfloat16", compile=True, progress=False)
        blocks = list(vlm.encoder.blocks)
        assert compiled == [(block, {"dynamic": True}) for block in blocks] and ran == blocks
        assert vlm.encoder.is_compiled


@pytest.fixture
def compiled(monkeypatch):
    """torch.compile leaves code as it is and does what "reduce-overhead" does;
    yields (mode, thread) of every call.

    It clears the workspaces, and until 2.12 records in the thread alone that
    imported it.
    """
    calls = []

    def compile_(function, mode="default", **options):
        def run(*args, **kwargs):
            own = threading.current_thread() is threading.main_thread()
            calls.append((mode, own))
            if mode != "reduce-overhead":
                return function(*args, **kwargs)
            assert own or torch.__version__ >= "2.13", "torch._C._is_key_in_tls(attr_name)"
            torch._C._cuda_clearCublasWorkspaces()  # as `clear_cublas_manager` of torch does
            try:
                return function(*args, **kwargs)
            finally:
                torch._C._cuda_clearCublasWorkspaces()

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    return calls


@pytest.mark.parametrize(("release", "mode"), [("2.11.0", "default"), ("2.12.1", "default"), ("2.13.0", None)])
def test_streams_of_old_releases_decode_without_graphs(compiled, monkeypatch, release, mode):
    """torch 2.11 and 2.12 record a decode step in one thread alone.

    From 2.13 on transformers' own mode is used.
    """
    folder, (question, media) = DATA / "checkpoints" / "tiny-qwen2_5_vl", CASES["tiny-qwen2_5_vl"]
    with simulated_cuda():
        vlm = refvl.load(folder, device="cuda", dtype="bfloat16", compile=True, max_cache_len=256, progress=False)
        assert vlm.language_model.generation_config.max_cache_len == 256
        ask = {"max_new_tokens": 4, **media}
        expected = vlm.chat(question, **ask)
        assert set(compiled) == {("reduce-overhead", True)}
        del compiled[:]
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(release))
        assert "".join(vlm.chat(question, stream=True, **ask)) == expected
    assert set(compiled) == {(mode or "reduce-overhead", False)}
