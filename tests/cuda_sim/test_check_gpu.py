"""`python -m refvl check-gpu` on the simulated device: all of it passes, and every check sees a planted mistake."""

import json
import re
import sys
import threading
import time
import zipfile
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from simulated_cuda import simulated_cuda

from refvl import attention
from refvl.checks import read_json
from refvl.encoders import Qwen2_5_VisionConfig, sending
from refvl.graphs.cuda import CudaGraph
from refvl.graphs.manager import CapturedBudget
from refvl.paths import DATA, ROOT
from refvl.positions import rotary
from refvl.tools import check_gpu as runner
from refvl.tools import cli, gpu_checks

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
TOWERS, QUESTIONS = gpu_checks.towers, gpu_checks.QUESTIONS  # all of them
ONE_TEST = ("tests/cuda_sim/test_driver.py", "-k", "read_back")  # in the place of `pytest -m gpu`


class Event:
    """A CUDA event by the host's clock."""

    def __init__(self, enable_timing=False):
        self.time = 0.0

    def record(self, stream=None):
        self.time = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


@pytest.fixture
def gpus(monkeypatch):
    """Two simulated GPUs, on which torch.compile leaves code as it is; and checks that are small and run on a CPU."""
    with simulated_cuda(devices=2) as machine:
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: WHEEL)
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
        monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
        monkeypatch.setattr(gpu_checks, "HEAD_DIMS", (64, 80))
        few = {name: gpu_checks.towers()[name] for name in ("Qwen2.5-VL", "MiniCPM-V 4.5", "Step3-VL")}
        monkeypatch.setattr(gpu_checks, "towers", lambda: few)  # `test_journeys` and `tests/graphs` run the others
        monkeypatch.setattr(gpu_checks, "QUESTIONS", dict(list(gpu_checks.QUESTIONS.items())[:1]))
        monkeypatch.setattr(gpu_checks, "RANKS", ("gloo", "cpu"))
        monkeypatch.setattr(gpu_checks, "ALL", gpu_checks.ALL | {"suite": suite(ONE_TEST)})
        yield machine
        monkeypatch.undo()  # here: later it would bring functions of this machine back


def suite(arguments):
    return partial(gpu_checks.run_suite, arguments=arguments)


def small_bench(device="cuda:0") -> gpu_checks.Bench:
    return gpu_checks.Bench(
        torch.device(device),
        tower=Qwen2_5_VisionConfig.tiny(),
        small=Qwen2_5_VisionConfig.tiny(),
        sides=(4, 6),
        clip=(2, 4, 4),
        text=read_json(DATA / "checkpoints" / "tiny-qwen2_5_vl" / "config.json"),
        prompt=16,
        repeats=1,
    )


def run(out, *names, device="cuda:1", seconds=600, **options):
    checks = {name: gpu_checks.ALL[name] for name in names} or None
    result = runner.check_gpu(device, out, bench=small_bench(device), checks=checks, seconds=seconds, **options)
    assert json.loads(out.read_text()) == result
    return result


@pytest.mark.thorough
def test_all_checks_pass_on_the_second_gpu_and_leave_a_zip(gpus, monkeypatch, tmp_path, capsys):
    """From the command line to the files."""
    whole = partial(runner.check_gpu, bench=small_bench(), seconds=600)
    monkeypatch.setattr(runner, "check_gpu", whole)
    out = tmp_path / "check.json"
    monkeypatch.setattr(sys, "argv", ["refvl", "check-gpu", "--all", "--device", "cuda:1", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    *_, verdict = capsys.readouterr().out.splitlines()
    result = json.loads(out.read_text())
    states = {name: (entry["state"], entry.get("reason")) for name, entry in result["checks"].items()}
    assert states == dict.fromkeys(gpu_checks.ALL, ("passed", None))
    assert ended.value.code == 0 and result["passed"]
    assert verdict.startswith("check-gpu: simulated (9.0), torch ") and "passes 11 checks; attach" in verdict
    with zipfile.ZipFile(out.with_suffix(".zip")) as archive:
        assert set(archive.namelist()) == {"check.json", "table.txt", "suite.txt"}
        assert json.loads(archive.read("check.json")) == result
        assert b"28 px" not in archive.read("table.txt") and b"56 px: graph alone" in archive.read("table.txt")
    said = "refvl commit os torch torch_cuda built_for nvidia_smi capability gpus"  # nvidia-smi: the driver
    assert set(said.split()) <= result["environment"].keys()
    named = {row["check"] for entry in result["checks"].values() for row in entry["rows"]}
    assert {"varlen, bfloat16, head dimension 80", "Step3-VL, float16, graphs", "rank 1 against a CPU"} <= named


@pytest.mark.slow
@pytest.mark.parametrize("check", ["towers", "compiled", "answers"])
def test_every_tower_and_every_answer(gpus, monkeypatch, tmp_path, check):
    """The others run some of them: here, each family and each shipped model is checked and passes."""
    monkeypatch.setattr(gpu_checks, "towers", TOWERS)
    monkeypatch.setattr(gpu_checks, "QUESTIONS", QUESTIONS)
    result = run(tmp_path / "check.json", check)
    rows = result["checks"][check]["rows"]
    assert result["passed"], [row for row in rows if not row["passed"]]
    named = {row["check"].split(",")[0] for row in rows}
    compiled = {name for name in TOWERS() if f"{name}, float16, compiled" in {row["check"] for row in rows}}
    assert named == {"towers": set(TOWERS()), "compiled": compiled, "answers": set(QUESTIONS)}[check] and named


def wrong_rotary(monkeypatch):
    right = rotary.rotary_matrices
    monkeypatch.setattr(rotary, "rotary_matrices", lambda cos, sin: right(torch.ones_like(cos), torch.zeros_like(sin)))


def values_of_another_segment(monkeypatch):
    right = attention._flash_attention
    monkeypatch.setattr(attention, "_flash_attention", lambda q, k, v, *rest: right(q, k, v.roll(64, 0), *rest))


def wrong_levels(monkeypatch):
    right = sending.send_levels
    monkeypatch.setattr(sending, "send_levels", lambda *args: right(*args) * 1.01)


def plan_of_the_first_image(monkeypatch):
    monkeypatch.setattr("refvl.graphs.manager.fill_metadata", lambda *args: None)


def buffers_that_are_not_filled(monkeypatch):
    monkeypatch.setattr(CapturedBudget, "fill", lambda *args: None)


def wrong_in_threads(monkeypatch):
    right = CudaGraph.replay
    in_main = lambda: threading.current_thread() is threading.main_thread()  # noqa: E731
    monkeypatch.setattr(CudaGraph, "replay", lambda self: right(self) if in_main() else right(self) * 2)


def ranks_that_swap_items(monkeypatch):
    class Ranks:
        processes = ()

        def __init__(self, run, arguments, **options):
            encoder, rows, grids = gpu_checks._shared_items()
            with torch.inference_mode():
                embeds = encoder(rows, grids).roll(6, 0).contiguous()
            for rank in range(2):
                save_file({"embeds": embeds}, f"{arguments[-1]}/{rank}.safetensors")

        def join(self, timeout):
            return True

    monkeypatch.setattr(gpu_checks.multiprocessing, "spawn", Ranks)


def wrong_compiled_code(monkeypatch):
    def compile_(module, **options):
        module.register_forward_hook(lambda module, inputs, output: output * 1.5)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)


def tests_that_fail(monkeypatch):
    def run(command, stdout=None, **options):
        if "pytest" not in command:
            raise FileNotFoundError(command[0])  # git and nvidia-smi
        stdout.write("FAILED tests/graphs/test_graph_cuda.py::test\n1 failed, 7 passed in 3.00s\n")
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(gpu_checks.subprocess, "run", run)


def events_that_fail(monkeypatch):
    def fails(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Event, "elapsed_time", fails)


PLANTED = {
    "attention": (values_of_another_segment, "failed"),
    "pixels": (wrong_levels, "failed"),
    "towers": (wrong_rotary, "failed"),
    "answers": (buffers_that_are_not_filled, "failed"),
    "graphs": (plan_of_the_first_image, "failed"),
    "streams": (wrong_in_threads, "failed"),
    "data parallel": (ranks_that_swap_items, "failed"),
    "compiled": (wrong_compiled_code, "failed"),
    "suite": (tests_that_fail, "failed"),
    "times": (events_that_fail, "error"),
    "decode": (events_that_fail, "error"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_fails_its_check_and_leaves_the_others_and_the_files(gpus, monkeypatch, tmp_path, name):
    """`pixels`, or for that check `attention`, runs after it and passes."""
    plant, state = PLANTED[name]
    plant(monkeypatch)
    after = "attention" if name == "pixels" else "pixels"
    result = run(tmp_path / "check.json", name, after)
    found = result["checks"][name]
    assert (found["state"], result["passed"]) == (state, False)
    assert result["checks"][after]["state"] == "passed"
    assert f"1 of 2 checks did not pass on simulated (9.0), torch {torch.__version__}: {name}" in runner.verdict(result)
    assert state == "failed" or found["traceback"]
    with zipfile.ZipFile(tmp_path / "check.zip") as archive:
        assert json.loads(archive.read("check.json")) == result


def test_what_stops_a_run_leaves_what_was_found(gpus, monkeypatch, tmp_path):
    """Ctrl-C after a row, and a time that is up; measured values that JSON cannot hold."""

    def interrupted(bench):
        yield gpu_checks.row("a row", float("nan"), 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.check_gpu("cuda", tmp_path / "a.json", checks={"first": interrupted, "second": interrupted})
    kept = json.loads((tmp_path / "a.json").read_text())
    assert [entry["state"] for entry in kept["checks"].values()] == ["stopped", "not reached"]
    assert kept["checks"]["first"]["rows"][0]["measured"] == "nan" and not kept["passed"]
    result = run(tmp_path / "b.json", "attention", seconds=0)
    assert result["checks"]["attention"]["reason"] == "the time limit was reached after 1 rows"


def test_one_gpu_is_no_failure_of_data_parallel(gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_checks, "RANKS", ("nccl", "cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = run(tmp_path / "a.json", "data parallel", device="cuda:0")
    assert result["passed"] and "two GPUs" in result["checks"]["data parallel"]["reason"]


SMI = "Tesla V100, 535.1, 32 GiB"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update"
PROBLEMS = [  # available, CUDA of the build, what nvidia-smi lists, what torch says, compute capability, index
    ("CPU wheel: ", False, None, SMI, "", (9, 0), 0),
    ("no GPU: ", False, "13.0", "", "", (9, 0), 0),
    ("old driver: ", False, "13.0", SMI, TOO_OLD, (9, 0), 0),
    ("no GPU that torch can use: No CUDA GPUs", False, "13.0", SMI, "No CUDA GPUs are available", (9, 0), 0),
    ("no such GPU: expected a GPU for cuda:3, but torch sees 2", True, "13.0", SMI, "", (9, 0), 3),
    ("GPU too old: simulated has compute capability 7.0", True, "13.0", SMI, "", (7, 0), 0),
    ("GPU too new: simulated has compute capability 13.0", True, "13.0", SMI, "", (13, 0), 0),
]  # fmt: skip


@pytest.mark.parametrize(("words", "available", "cuda", "listed", "said", "capability", "index"), PROBLEMS)
def test_why_nothing_can_run_is_said_in_words(
    gpus, monkeypatch, tmp_path, words, available, cuda, listed, said, capability, index
):
    """Oracle of what torch says: `_lazy_init` and c10/cuda of torch 2.11 to 2.15."""

    def init():
        raise RuntimeError(said)

    gpus.capability = capability
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(runner, "_say", lambda *command: listed if command[0] == "nvidia-smi" else "")
    result = run(tmp_path / "check.json", "pixels", device=f"cuda:{index}")
    assert result["problem"].startswith(words) and not result["passed"]
    assert runner.verdict(result) == f"check-gpu: {result['problem']}"
    assert result["checks"]["pixels"]["state"] == "not reached"


CARDS = {(7, 0): False, (7, 5): True, (8, 9): True, (9, 0): True, (11, 0): False, (12, 1): True}


@pytest.mark.parametrize(("capability", "runs"), CARDS.items())
def test_kernels_run_on_their_major_capability_from_their_minor_one_on(capability, runs):
    """Oracle: NVIDIA's rules of binary compatibility; a wheel of torch 2.13 as it lists itself."""
    assert runner.has_kernels(capability, WHEEL) == runs
    assert runner.has_kernels((13, 0), [*WHEEL, "compute_120"])
    assert not runner.has_kernels((9, 1), ["sm_90a"])


def test_readme_and_docs_say_which_cards_the_wheels_run_on():
    """Oracle: the architectures of a wheel, as `GPU too old` prints them."""
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/gpu.md"))
    lowest, highest = (".".join(map(str, runner._capability(WHEEL[i]))) for i in (0, -1))
    assert f"need compute capability {lowest} and a CUDA-13 driver" in readme
    assert f"a driver for CUDA 13 and a GPU of compute capability {lowest} to {highest};" in page
    assert re.search(rf"kernels for {WHEEL[0]}\s+to\s+{WHEEL[-1]} and need a CUDA-13 driver", page)


@pytest.mark.thorough
def test_the_expected_results_are_those_of_this_cpu():
    """The committed file. Oracle: the same computed here; ids must be equal."""
    kept, fresh = load_file(gpu_checks.EXPECTED), gpu_checks.cpu_results()
    assert kept.keys() == fresh.keys()
    for key, value in fresh.items():
        if key.startswith("ids"):
            assert torch.equal(value, kept[key])
        else:
            encoder, rows, layouts = gpu_checks.build_tower(key.removeprefix("tower "))
            allowed = gpu_checks._allowed(encoder, torch.float32) * gpu_checks._growth(encoder, rows, layouts)
            assert gpu_checks._error(value, kept[key]) <= allowed


def without_positions(plan):
    """A plan whose positions are zero."""
    if isinstance(plan, tuple):
        return tuple(map(without_positions, plan))
    if not is_dataclass(plan):
        return plan
    values = {f.name: getattr(plan, f.name) for f in fields(plan) if f.init}
    zeroed = {
        key: torch.zeros_like(value) if "position" in key else without_positions(value) for key, value in values.items()
    }
    return replace(plan, **zeroed)


@pytest.mark.parametrize("name", gpu_checks.towers())
@torch.inference_mode()
def test_the_towers_that_are_checked_are_sensitive_to_positions(name):
    """Positions at zero change the output by a tenth, and by three times what float16 is allowed to."""
    encoder, rows, layouts = gpu_checks.build_tower(name)
    right, wrong = encoder(rows, layouts), encoder(rows, metadata=without_positions(encoder.plan(layouts)))
    allowed = gpu_checks._allowed(encoder, torch.float16) * gpu_checks._growth(encoder, rows, layouts)
    assert gpu_checks._error(wrong, right) > max(0.1, 3 * allowed)


@pytest.mark.parametrize("name", gpu_checks.QUESTIONS)
def test_rounding_turns_no_token_of_the_answers(name):
    """Every token of the answer wins by three logits."""
    from shipped import shipped

    question, media = gpu_checks.QUESTIONS[name]
    assert min(shipped(name).trace(question, max_new_tokens=8, **media).margins) > 3


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device: expected the name of a CUDA device, got 'cpu'"):
        runner.check_gpu("cpu")
