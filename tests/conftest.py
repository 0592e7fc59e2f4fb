"""Fixtures that several test files share, and what must happen before any of them imports
transformers."""

import gc
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from PIL import Image
from tiers import mark_repeats, quick_tier, with_few_examples

from refvl.paths import DATA


def _complete_torchvision():
    """Let torchvision be imported where it was installed alone, as an oracle: without its compiled
    operators.

    Its import then fails for want of two operators, and with it that of transformers; empty
    definitions are enough. Returns what must stay alive.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    import torch  # here, because the process that only hands out tests would wait for it

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


TORCHVISION_OPERATORS = _complete_torchvision()

settings.register_profile("shared machine", deadline=None)  # slow is not wrong
settings.load_profile("shared machine")
OPTIONAL = ("accelerate", "anywidget", "av", "nbformat", "peft")  # packages that a rented machine may lack


@pytest.fixture(scope="module")
def width_first():
    """Let one call of Pillow resize the width before the height, so that transformers' Pillow backend does, too.

    Pillow 13.0 takes the other order for some sizes; tests/pixels/test_resize.py holds the order
    without this.
    """
    once = Image.Image.resize

    def resize(self, size, resample=None, **options):
        return once(once(self, (size[0], self.height), resample, **options), size, resample)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", resize)
        yield


def pytest_addoption(parser):
    parser.addoption("--simulated-cuda", action="store_true", help="this process has a CUDA device: tests/cuda_sim")
    parser.addoption(
        "--tier", choices=("quick", "rest", "all"), default="all", help="a part of the tests: tests/tiers.py"
    )
    parser.addoption("--examples", choices=("few", "all"), help="of property tests; few in the quick tier, if not said")


def pytest_configure(config):
    """Before tests are collected, because they ask then whether there is a device."""
    if config.getoption("--simulated-cuda"):
        # AMX multiplies what lies behind a row's end by zero: NaN of unwritten memory would reach other rows
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        importlib.import_module("torch._dynamo")  # before the device: in torch 2.11, it compares what is replaced
        from simulated_cuda import simulated_cuda

        device = simulated_cuda()
        device.__enter__()
        config.add_cleanup(lambda: device.__exit__(None, None, None))


def pytest_runtest_makereport(item, call):
    """A test that fails because one of `OPTIONAL` is missing is skipped."""
    error = call.excinfo and call.excinfo.value
    if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
        call.excinfo = pytest.CallInfo.from_call(lambda: pytest.skip(str(error)), call.when).excinfo


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """pytest itself selects by marks in between."""
    mark_repeats(items)
    yield
    _rest_coverage(items)
    tier = config.getoption("tier")
    quick = quick_tier(items)
    if (config.getoption("examples") or ("few" if tier == "quick" else "all")) == "few":
        for item in items:
            with_few_examples(item)
    if tier != "all":
        chosen = set(quick) if tier == "quick" else set(items) - set(quick)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def pytest_collection_finish(session):
    """What is imported stays: the garbage collector need not visit it again and again."""
    gc.freeze()


def _rest_coverage(items) -> None:
    """Coverage, which makes Python half as slow again, rests where a test repeats what others have
    run.

    That is in property tests, on trained models, on hostile input, and from a test's fourth case
    on.
    """
    cases = Counter()
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)  # a notebook has only its name
        cases[test] += 1
        repeats = item.get_closest_marker("hypothesis") or item.path.parent.name in ("models", "robustness")
        if repeats or cases[test] > 3:
            item.add_marker("no_cover")


@pytest.fixture(scope="session")
def clip() -> Path:
    """A real clip: 320 x 180, 132 frames, 25 per second."""
    pytest.importorskip("av")
    return DATA / "clips" / "bigbuckbunny.mp4"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """A random Qwen2.5-VL checkpoint, which tests leave as it is."""
    from random_models import random_folder

    return random_folder("Qwen2.5-VL")


@pytest.fixture(scope="session")
def vlm():
    """Its model, which tests leave as it is."""
    from random_models import random_model

    return random_model("Qwen2.5-VL")


@pytest.fixture(scope="session")
def torchvision_processor():
    """transformers' `Qwen2VLVideoProcessor`, the class; skips where torchvision, which it needs, is
    missing."""
    pytest.importorskip("torchvision")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    return Qwen2VLVideoProcessor


@pytest.fixture
def shell(monkeypatch, capsys):
    """Run `refvl ARGUMENTS` in this process; returns (exit status, stdout, stderr)."""
    from refvl.tools.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["refvl", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run
