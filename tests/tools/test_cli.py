"""The command line as a user types it; oracle: the library's own answers and exceptions."""

import io
import re
import sys
from unittest.mock import Mock

import pytest
import torch

import refvl
from refvl import paths
from refvl.attention import BACKENDS
from refvl.paths import DATA
from refvl.pixels.crops import CropLayout
from refvl.pixels.media import load_image
from refvl.pixels.slices import SliceGroup
from refvl.positions import PRUNERS
from refvl.positions.packed import PackingCollator
from refvl.study.report import layout_text
from refvl.tools.cli import Console
from refvl.tools.demo import show
from refvl.trace import Record

PHOTO = DATA / "pictures" / "coffee.jpg"


def test_trace_prints_every_stage(shell, checkpoint, clip):
    status, out, _ = shell(
        "trace", checkpoint, "Hm?", "-i", PHOTO, "-v", clip, "--pruning-rate", 0.5, "--max-new-tokens", 3
    )
    stages = ["decode media", "patchify", "plan", "encode", "prune", "merge", "positions", "prefill", "decode tokens"]
    assert status == 0
    places = [out.index(stage) for stage in stages]
    assert places == sorted(places), "stages in the order of the path"
    assert "first token after" in out and "answer:" in out


def test_trace_shows_the_code_that_ran(shell, tmp_path):
    """Oracle: the names of three functions, in the order in which they are called."""
    asked = ("trace", "tiny-qwen2_5_vl", "What color is the circle?", "-i", DATA / "pictures" / "scene.png")
    status, out, _ = shell(*asked, "--source", "--page", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert status == 0 and "answer: red" in out
    for text in (out, page):
        places = [text.index(name) for name in ("VLM.chat", "Pipeline.read", "merge_embeddings")]
        assert places == sorted(places)


def test_info_needs_no_weights(shell, checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "away")
    status, out, _ = shell("info", checkpoint, "--image", PHOTO)
    (checkpoint / "away").rename(checkpoint / "model.safetensors")
    assert status == 0 and "Qwen2.5-VL" in out and "memory needed" in out
    vlm = refvl.load(checkpoint, progress=False)
    tokens = len(vlm.encode(images=[load_image(PHOTO)])[0])
    assert f"{tokens} tokens" in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "nowhere/at/all", "Hi"], "checkpoint: expected an existing folder, a hub id (owner/name) or a"),
        (["chat", "FOLDER", "Hi", "--image", __file__], "test_cli.py"),
        (["chat", "FOLDER"], "prompt: expected a question, or a file of requests with --jsonl"),
        (["chat", "FOLDER", "Hi", "--pruning-rate", "1"], "pruning_rate: expected a pruning rate in [0, 1), got 1.0"),
        (["info", "FOLDER", "--image", "nothing.png"], "nothing.png"),
        (["bench", "tower", "--device", "cuda:3"], "cuda"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(shell, checkpoint, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = shell(*[a.replace("FOLDER", str(checkpoint)) for a in arguments])
    assert status == 1 and out == ""
    assert err.count("\n") == 1 and err.startswith("refvl: ") and message in err, err


@pytest.mark.parametrize("error", [KeyError("text_config"), MemoryError(), RuntimeError("CUDA\nerror")], ids=repr)
def test_any_error_is_one_line_that_says_its_kind(shell, checkpoint, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("refvl.load", fail)
    status, out, err = shell("chat", checkpoint, "Hi")
    line = " ".join(f"refvl: {type(error).__name__}: {error}".split())
    assert (status, out, err.rstrip()) == (1, "", line) and err.count("\n") == 1
    monkeypatch.setenv("REFVL_TRACEBACK", "1")
    status, _, err = shell("chat", checkpoint, "Hi")
    assert status == 1
    assert err.startswith("Traceback")
    assert "in fail" in err
    assert err.rstrip().endswith(line)


def test_stopped_by_hand_is_a_line(shell, checkpoint, monkeypatch):
    monkeypatch.setattr("refvl.load", Mock(side_effect=KeyboardInterrupt))
    assert shell("chat", checkpoint, "Hi") == (130, "", "refvl: stopped\n")


def test_the_help_is_complete(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "REFVL_TRACEBACK=1" in shell("--help")[1]
    assert ", ".join(("auto", *BACKENDS)) in shell("chat", "--help")[1]
    assert shell("--version") == (0, f"refvl {refvl.__version__}\n", "")


def test_layouts_are_told_in_a_few_words():
    """Dozens of slices as counts of their sizes; oracle: the layouts' own numbers."""
    slices = (SliceGroup(((14, 14),)), *[SliceGroup(((21, 15),))] * 6)
    assert layout_text(slices) == "slices: 1 of 14 x 14, 6 of 21 x 15"
    assert layout_text((SliceGroup(((14, 14), (14, 14)), (0, 1)),)) == "slices: 2 of 14 x 14"
    assert layout_text((1, 6, 8)) == "grid (1, 6, 8)"
    assert [layout_text(CropLayout(*size)) for size in ((0, 0), (2, 3))] == ["overview", "overview and 2 x 3 crops"]


def test_demo_without_matplotlib_answers_and_names_the_extra(tmp_path, monkeypatch):
    """An installed wheel has no matplotlib unless an extra brings it.

    Oracle: the answers of data/README.md.
    """
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = io.StringIO()
    show(Console(markup=True, file=shown, width=120), tmp_path / "figures", "cpu")
    assert "What color is the circle? red" in shown.getvalue()
    assert shown.getvalue().endswith("figures: matplotlib is missing; install it with pip install 'refvl[notebooks]'\n")
    assert not (tmp_path / "figures").exists()


def test_the_course_is_copied_whole_or_not_at_all(shell, tmp_path, monkeypatch):
    """A file that cannot be copied leaves nothing, and the same command then works; what is there is refused."""

    small = tmp_path / "clone"
    monkeypatch.setattr(paths, "ROOT", small)
    for name in ("notebooks/00.ipynb", "data/pictures/scene.png", "data/README.md"):
        (small / name).parent.mkdir(parents=True, exist_ok=True)
        (small / name).write_text(name)
    (small / "data/gone.png").symlink_to(tmp_path / "nowhere")
    status, _, err = shell("notebooks", tmp_path / "course")
    assert status == 1 and err.startswith("refvl: folder: [Errno 2] No such file") and err.count("\n") == 1
    assert list((tmp_path / "course").iterdir()) == []
    (small / "data/gone.png").unlink()
    assert shell("notebooks", tmp_path / "course")[0] == 0
    copied = {path.relative_to(tmp_path / "course").as_posix() for path in (tmp_path / "course").rglob("*.*")}
    assert copied == {"notebooks/00.ipynb", "data/pictures/scene.png", "data/README.md"}
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling/data").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "course", tmp_path / "dangling", small / "data/README.md"):
        status, _, err = shell("notebooks", folder)
        assert status == 1 and "already exists; choose a different folder" in err


def test_a_page_of_the_user_is_not_replaced(shell, tmp_path):
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    status, _, err = shell("trace", "tiny-qwen2_5_vl", "Hi", "--page", mine)
    assert (status, err) == (1, f"refvl: page: {mine} already exists; choose a different file\n")
    assert mine.read_text() == "mine"


def test_what_a_prompt_shows_has_no_address():
    """Of everything that a user reads at a prompt."""
    model = refvl.load("tiny-qwen2_5_vl", device="cpu", graphs=True, media_cache=100, progress=False)
    trace = model.trace("Hi", images=[DATA / "pictures/scene.png"], videos=[DATA / "clips/scene.mp4"], max_new_tokens=1)
    shown = [model, model.processor, model.graphs, model.media_cache, trace, *trace.media[1:], *trace.patches]
    shown += [trace.patches[0].rows, trace.spans, model.family, model.encoder.config]
    shown += [PackingCollator(), PRUNERS, Record()]
    assert [text for text in map(repr, shown) if re.search("0x[0-9a-f]{6}", text) or len(text) > 1500] == []
