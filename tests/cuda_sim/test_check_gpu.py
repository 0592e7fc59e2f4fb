"""`python -m refvl check-gpu` on the simulated device: all of it passes, and every check sees a planted mistake."""

import json
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import typer
from simulated_cuda import simulated_cuda
from typer.testing import CliRunner

from benchmarks import graphs, tower
from benchmarks.report import resolve_device
from refvl.encoders import Qwen2_5_VisionConfig
from refvl.paths import CLONE
from refvl.positions import rotary
from refvl.tools import check_gpu as runner
from refvl.tools import cli, gpu_checks


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Two simulated GPUs, on which torch.compile leaves code as it is; and checks
    that are small and run on a CPU."""
    with simulated_cuda(devices=2) as machine:
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
        few = {name: gpu_checks.towers()[name] for name in ("Qwen2.5-VL", "Step3-VL")}
        monkeypatch.setattr(gpu_checks, "towers", lambda: few)
        monkeypatch.setattr(gpu_checks, "QUESTIONS", dict(list(gpu_checks.QUESTIONS.items())[:1]))
        (tmp_path / "test_one.py").write_text("def test_one(): pass")  # in the place of `pytest -m gpu`
        suite = partial(gpu_checks.run_suite, arguments=(f"--rootdir={tmp_path}", str(tmp_path / "test_one.py")))
        times = partial(gpu_checks.measure_times, tower=Qwen2_5_VisionConfig.tiny())
        monkeypatch.setattr(gpu_checks, "ALL", gpu_checks.ALL | {"suite": suite, "times": times})
        monkeypatch.setattr(gpu_checks, "SIDES", (4, 6))
        monkeypatch.setattr(runner, "SECONDS", {False: 600, True: 600})
        monkeypatch.setattr(runner, "describe_machine", lambda: {"nvidia_gpu_models": "two"})
        yield machine
        monkeypatch.undo()  # here: later it would bring functions of this machine back


def run(monkeypatch, out, checks, device="cuda:1"):
    monkeypatch.setattr(gpu_checks, "QUICK", checks)
    result = runner.check_gpu(device, out)
    assert json.loads(out.read_text()) == result
    return result


@pytest.mark.thorough
def test_all_checks_pass_on_the_second_gpu(gpus, monkeypatch, tmp_path, capsys):
    """From the command line to the file."""
    out = tmp_path / "check.json"
    monkeypatch.setattr(sys, "argv", ["refvl", "check-gpu", "--all", "--device", "cuda:1", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said, result = " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())
    states = {name: (entry["state"], entry.get("reason")) for name, entry in result["checks"].items()}
    assert states == dict.fromkeys(gpu_checks.ALL, ("passed", None))
    assert ended.value.code == 0 and result["passed"]
    assert f"check-gpu: simulated (9.0), torch {torch.__version__} passes 5 checks; attach" in said
    named = {row["check"] for entry in result["checks"].values() for row in entry["rows"]}
    assert all(0 <= row["allowed"] < 0.05 for row in result["checks"]["towers"]["rows"])  # wrong places make a tenth
    assert {"Step3-VL, torch.float16, graphs", "Qwen2.5-VL, torch.float16, compiled"} <= named


def tests_that_fail(monkeypatch):
    def fails_on_the_second(*args, env, **options):
        return SimpleNamespace(returncode=int(env["CUDA_VISIBLE_DEVICES"]), stdout="7 passed in 3.00s")

    monkeypatch.setattr(gpu_checks, "subprocess", SimpleNamespace(run=fails_on_the_second))


def timers_that_fail(monkeypatch):
    def fails(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_checks.Timer, "blocked_autorange", fails)


PLANTED = {
    "towers": (lambda patch: patch.setattr(rotary, "rotate_by_offsets", lambda x, cos, sin: x), "failed"),
    "suite": (tests_that_fail, "failed"),
    "times": (timers_that_fail, "error"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_fails_its_check_and_leaves_the_others(gpus, monkeypatch, tmp_path, name):
    """What runs after it passes."""
    plant, state = PLANTED[name]
    plant(monkeypatch)
    checks = {name: gpu_checks.ALL[name], "after": lambda device: iter([gpu_checks.row("a row", 1, 2)])}
    result = run(monkeypatch, tmp_path / "check.json", checks)
    assert (result["checks"][name]["state"], result["passed"]) == (state, False)
    assert result["checks"]["after"]["state"] == "passed"
    assert f"1 of 2 checks did not pass on simulated (9.0), torch {torch.__version__}: {name}" in runner.verdict(result)


def test_what_stops_a_run_leaves_what_was_found(gpus, monkeypatch, tmp_path):
    """Ctrl-C after a row, and a time that is up; measured values that JSON cannot hold."""

    def interrupted(device):
        yield gpu_checks.row("a row", float("nan"), 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path / "a.json", {"first": interrupted, "second": interrupted})
    kept = json.loads((tmp_path / "a.json").read_text())
    assert [entry["state"] for entry in kept["checks"].values()] == ["running", "not reached"]
    [nan] = kept["checks"]["first"]["rows"]
    assert (nan["measured"], nan["passed"], kept["passed"]) == ("nan", False, False)
    monkeypatch.setattr(runner, "SECONDS", {False: 0.01})
    result = run(monkeypatch, tmp_path / "b.json", {name: gpu_checks.ALL[name] for name in ("towers", "answers")})
    assert [entry["state"] for entry in result["checks"].values()] == ["unfinished", "not reached"]
    assert result["checks"]["towers"]["reason"] == "the time limit was reached after 1 rows" and not result["passed"]


def test_why_nothing_can_run_is_said_in_words(gpus, monkeypatch, tmp_path):
    """By torch, if it finds no GPU: here the simulated machine is asked for a
    third one, then torch fails."""
    result = run(monkeypatch, tmp_path / "a.json", gpu_checks.QUICK, "cuda:3")
    assert "device: expected one of the 2 GPUs that torch sees, counted from 0, got cuda:3" in result["problem"]

    def init():
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "init", init)
    result = run(monkeypatch, tmp_path / "b.json", gpu_checks.QUICK)
    assert result["problem"] == "RuntimeError: No CUDA GPUs are available" and not result["passed"]
    assert runner.verdict(result).startswith(f"check-gpu: {result['problem']}; nvidia-smi lists ")


def test_a_machine_is_described_without_a_gpu():
    """Oracle: the versions, and git's own word for the commit."""
    found = runner.describe_machine()
    assert found["torch_version"] == torch.__version__ and found["refvl"] and "nvidia_gpu_models" in found
    assert json.dumps(found)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device: expected the name of a CUDA device, got 'cpu'"):
        runner.check_gpu("cpu")


@pytest.mark.thorough
def test_the_steps_of_the_first_run_on_a_gpu_run_on_the_second_one(gpus, monkeypatch):
    """Those of benchmarks/first_gpu.sh, with a small tower and without replays;
    `check-gpu` runs above."""
    written = []
    monkeypatch.setattr(tower, "TOWERS", {"cuda": {"tiny": Qwen2_5_VisionConfig.tiny()}})
    monkeypatch.setattr(tower, "INPUTS", {"cuda": {"56 px": [(1, 4, 4)]}})
    monkeypatch.setattr(tower, "write_measurement", lambda name, result: written.append(name))
    monkeypatch.setattr(graphs, "run_tower", lambda *arguments: written.append(arguments))
    script = (CLONE / "benchmarks" / "first_gpu.sh").read_text()
    steps = {name: arguments.split() for name, arguments in re.findall(r"^step \d+ \w+ (\S+)(.*)", script, re.M)}
    for module in (tower, graphs):
        app = typer.Typer()
        app.command()(module.run)
        ran = CliRunner().invoke(app, [*steps[module.__name__], "--device", "cuda:1"])
        assert ran.exit_code == 0 and torch.cuda.current_device() == 1, ran.exception
    assert written == ["tower_cuda", *((name, "cuda", 10, True) for name in graphs.TOWERS)]
    with pytest.raises(ValueError, match="device: expected one of the 2 CUDA devices of this machine, got 'cuda:2'"):
        resolve_device("cuda:2")
