"""`python -m refvl check-gpu` on the simulated device: it passes, and a planted mistake turns the verdict."""

import json
import sys
from functools import partial

import pytest
import torch

import refvl.attention as attention
from refvl.encoders import Qwen2_5_VisionConfig
from refvl.tools import check_gpu as checks
from refvl.tools import cli

check = partial(checks.check_gpu, config=Qwen2_5_VisionConfig.tiny(), sides=(4, 6), compiles=False)


@pytest.fixture(autouse=True)
def few_head_dims(monkeypatch):
    monkeypatch.setattr(checks, "HEAD_DIMS", (64, 80))


@pytest.mark.thorough
def test_the_command_passes_and_writes_what_it_found(machine, monkeypatch, tmp_path, capsys):
    """From the command line to the file, on a small tower."""
    monkeypatch.setattr(checks, "check_gpu", check)
    monkeypatch.setattr(sys, "argv", ["refvl", "check-gpu", "--out", str(tmp_path / "check.json")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    *_, verdict = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0, verdict
    assert verdict.startswith("check-gpu: simulated (9.0), torch ") and "passes all" in verdict
    result = json.loads((tmp_path / "check.json").read_text())
    assert result["passed"] and all(row["passed"] for row in result["rows"])
    named = {row["check"] for row in result["rows"]}
    assert {"varlen, bfloat16, heads of 80", "masked, float32, heads of 64", "56 px: graph"} <= named


@pytest.mark.thorough
def test_a_kernel_that_is_wrong_is_named(machine, monkeypatch):
    """Values that are one segment off, as by cumulative lengths of another batch."""
    right = attention._torch_varlen
    monkeypatch.setattr(attention, "_torch_varlen", lambda q, k, v, *rest: right(q, k, v.roll(64, 0), *rest))
    result = check()
    failed = {row["check"] for row in result["rows"] if not row["passed"]}
    assert "varlen, float16, heads of 64" in failed and "sdpa, float16, heads of 64" not in failed
    assert checks.verdict(result).count("varlen") == 4


def test_without_a_device_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="device: check-gpu needs a CUDA device, got 'cuda'"):
        check()
