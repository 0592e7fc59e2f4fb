"""The command line as a user types it; oracle: the library's own answers and exceptions."""

import io
import json
import os
import struct
import subprocess
import sys
import tarfile

import jinja2
import pytest
import torch
from checkpoint_factory import make_checkpoint
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import refvl
from refvl.attention import BACKENDS
from refvl.paths import DATA
from refvl.pixels.crops import CropLayout
from refvl.pixels.media import load_image
from refvl.pixels.slices import SliceGroup
from refvl.study.report import layout_text
from refvl.tools.cli import Benchmark, Console, Stopped, app, report_mistakes
from refvl.tools.demo import show

LATIN = os.fsdecode(b"caf\xe9")  # bytes that are no UTF-8, as Python hands them over
PHOTO, CLIP = DATA / "pictures" / "coffee.jpg", DATA / "clips" / "bigbuckbunny.mp4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_chat_prints_the_answer(shell, folder):
    status, out, _ = shell("chat", folder, "What is it?", "--image", PHOTO, "--max-new-tokens", 5)
    expected = refvl.load(folder, progress=False).chat("What is it?", images=[PHOTO], max_new_tokens=5)
    assert (status, out) == (0, expected + "\n")


def test_trace_prints_every_stage(shell, folder):
    status, out, _ = shell(
        "trace", folder, "Hm?", "-i", PHOTO, "-v", CLIP, "--pruning-rate", 0.5, "--max-new-tokens", 3
    )
    stages = ["decode media", "patchify", "plan", "encode", "prune", "merge", "positions", "prefill", "decode tokens"]
    assert status == 0
    places = [out.index(stage) for stage in stages]
    assert places == sorted(places), "stages in the order of the path"
    assert "first token after" in out and "answer:" in out


def test_info_needs_no_weights(shell, folder):
    (folder / "model.safetensors").rename(folder / "away")
    status, out, _ = shell("info", folder, "--image", PHOTO)
    (folder / "away").rename(folder / "model.safetensors")
    assert status == 0 and "Qwen2.5-VL" in out and "memory needed" in out
    vlm = refvl.load(folder, progress=False)
    tokens = len(vlm.encode(images=[load_image(PHOTO)])[0])
    assert f"{tokens} tokens" in " ".join(out.replace("│", " ").split())


def test_info_on_a_released_config(shell):
    status, out, _ = shell("info", DATA / "configs" / "Qwen2.5-VL-7B-Instruct.json")
    assert status == 0 and "15.4 GiB" in out and "0.68 B" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "nowhere/at/all", "Hi"], "checkpoint: expected an existing folder, a hub id (owner/name) or a"),
        (["chat", "nowhere/at/all", "Hi"], "), got nowhere/at/all"),
        (["chat", "FOLDER", "Hi", "--image", "nothing.png"], "nothing.png"),
        (["chat", "FOLDER", "Hi", "--image", __file__], "test_cli.py"),
        (["chat", "FOLDER", "Hi", "--video", "nothing.mp4"], "nothing.mp4"),
        (["chat", "FOLDER", "Hi", "--pruning-rate", "1"], "pruning_rate: expected a pruning rate in [0, 1), got 1.0"),
        (["chat", "FOLDER", "Hi", "--max-new-tokens", "0"], "max_new_tokens: must be at least 1, got 0"),
        (["trace", "FOLDER", "Hi", "--dtype", "int3"], "dtype: expected"),
        (["info", "FOLDER", "--image", "nothing.png"], "nothing.png"),
        (
            ["chat", "FOLDER/config.json", "Hi"],
            "config.json is a config without weights; use it only with `refvl info`",
        ),
        (["chat", "FOLDER", LATIN], "prompt: expected text in UTF-8, got 'caf\\udce9'"),
        (["trace", "FOLDER", LATIN], "prompt: expected text in UTF-8, got 'caf\\udce9'"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(shell, folder, arguments, message):
    status, out, err = shell(*[a.replace("FOLDER", str(folder)) for a in arguments])
    assert status == 1 and out == ""
    assert err.count("\n") == 1 and err.startswith("refvl: ") and message in err, err


def test_bench_runs_a_benchmark_of_the_repository(shell):
    """And leaves what is kept under data/measurements as it is, unless it is told otherwise."""
    before = {path: path.stat().st_mtime_ns for path in (DATA / "measurements").iterdir()}
    status, out, _ = shell("bench", "generated_ids")
    assert status == 0 and "all 24" in out
    assert {path: path.stat().st_mtime_ns for path in (DATA / "measurements").iterdir()} == before
    for name in Benchmark:
        assert (DATA.parent / "benchmarks" / f"{name.value}.py").is_file()


def test_bench_says_what_it_will_do_and_prints_rows_as_they_come(shell, monkeypatch, capsys):
    """Before the first measurement stand inputs and seconds, before each further one the rows so far."""
    from benchmarks import tower

    kept = json.loads((DATA / "measurements" / "tower_cpu.json").read_text())
    times = (value for row in kept["rows"] for name, value in row.items() if name.endswith("_ms"))
    seconds = (3 + tower.WARM_UP) * sum(times) / 1e3
    said = []

    def measure(*_):
        said.append(capsys.readouterr().out)
        row = dict.fromkeys(("transformers_ms", "refvl_ms", "attention_ms", "plan_ms", "ratio"), 1)
        return row | {"patches": 1000 + len(said)}

    monkeypatch.setattr(tower, "measure", measure)
    monkeypatch.setattr(tower, "build_pair", lambda *_: (None, None))
    status, rest, _ = shell("bench", "tower", "--device", "cpu", "--repeats", 3)
    assert status == 0 and f"about {seconds:.0f} s on the machine of tower_cpu.json" in said[0] and "84 px" in said[0]
    assert len(said) == sum(len(tower.INPUTS["cpu"]) for _ in tower.TOWERS["cpu"])
    for i, text in enumerate([*said[1:], rest]):
        assert f" {1001 + i} " in text and text.count("\n") == 1


def damaged_media(folder) -> dict[str, str]:
    """One file of each kind of damage; name -> part of the message it must give."""
    Image.new("RGB", (1, 1)).save(folder / "one_pixel.png")
    Image.new("RGB", (805, 4)).save(folder / "thin.png")
    (folder / "cut.jpg").write_bytes(PHOTO.read_bytes()[:2000])
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.mp4").write_bytes(CLIP.read_bytes()[:5000])
    return {
        "one_pixel.png": "1 x 1",
        "thin.png": "200",
        "cut.jpg": "cut.jpg",
        "text.png": "text.png",
        "empty.png": "empty.png",
        "cut.mp4": "cut.mp4",
        "missing.png": "missing.png",
    }


def test_every_damaged_medium_is_one_line(shell, folder, tmp_path):
    for name, message in damaged_media(tmp_path).items():
        option = "--video" if name.endswith("mp4") else "--image"
        status, out, err = shell("chat", folder, "Hi", option, tmp_path / name)
        assert (status, out, err.count("\n")) == (1, "", 1) and message in err, (name, err)


def test_damaged_weights_are_one_line(shell, tmp_path):
    folder = make_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["visual.merger.ln_q.weight"] = torch.ones(7)
    del weights["visual.blocks.0.norm1.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    status, _, err = shell("chat", folder, "Hi")
    assert status == 1 and err.count("\n") == 1
    assert "missing (1): blocks.0.norm1.weight" in err and "misshapen (1): visual.merger.ln_q.weight is (7,)" in err


def test_unknown_family_and_long_prompt_are_one_line(shell, tmp_path):
    folder = make_checkpoint(tmp_path, text_config={"max_position_embeddings": 64})
    status, _, err = shell("chat", folder, "Hi " * 100)
    assert status == 1 and "do not fit the context of 64" in err and err.count("\n") == 1
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"qwen2_5_vl"', '"kosmos"', 1))
    status, _, err = shell("chat", folder, "Hi")
    assert status == 1 and "model_type: 'kosmos' is not supported; supported: qwen2_5_vl" in err


# --- whatever goes wrong ----------------------------------------------------------------------------------------------

KINDS = [
    SyntaxError("not a TIFF file"), struct.error("unpack requires a buffer"), KeyError("text_config"), MemoryError(),
    jinja2.TemplateError("roles must\nalternate"), SafetensorError("header too large"), RuntimeError("CUDA error"),
    RecursionError("too deep"), ZeroDivisionError("division by zero"),
]  # fmt: skip


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_any_error_is_one_line_that_says_its_kind(shell, folder, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("refvl.loading.load", fail)
    status, out, err = shell("chat", folder, "Hi")
    line = " ".join(f"refvl: {type(error).__name__}: {error}".split())
    assert (status, out, err.rstrip()) == (1, "", line) and err.count("\n") == 1
    monkeypatch.setenv("REFVL_TRACEBACK", "1")
    status, _, err = shell("chat", folder, "Hi")
    assert status == 1 and err.startswith("Traceback") and "in fail" in err and err.rstrip().endswith(line)


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt, 130), (Stopped, 143)])
def test_stopped_by_hand_is_a_line(shell, folder, monkeypatch, stop, status):
    def fail(*args, **kwargs):
        raise stop

    monkeypatch.setattr("refvl.loading.load", fail)
    assert shell("chat", folder, "Hi") == (status, "", "refvl: stopped\n")
    assert shell("encode", folder, folder, "--out", folder)[2] == "refvl: stopped; the same command continues\n"


def test_what_was_printed_is_flushed_where_a_broken_pipe_is_handled(tmp_path, monkeypatch):
    """At exit it would be too late: Python writes "Exception ignored" and leaves with status 120."""

    class Broken(io.StringIO):
        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            return file.fileno()

    with open(tmp_path / "file", "w") as file, monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "stdout", Broken())
        with report_mistakes():
            print("hi")
    assert stop.value.code == 141


def test_the_traceback_variable_is_in_the_help(shell):
    assert "REFVL_TRACEBACK=1" in shell("--help")[1]


def test_version(shell):
    assert shell("--version") == (0, f"refvl {refvl.__version__}\n", "")


def test_attention_help_names_every_backend(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert ", ".join(("auto", *BACKENDS)) in shell("chat", "--help")[1]


def test_pruning_without_a_video_is_said(shell, folder):
    status, _, err = shell("chat", folder, "Hi", "--image", PHOTO, "--pruning-rate", 0.5, "--max-new-tokens", 1)
    assert status == 0 and err == "refvl: --pruning-rate prunes only videos, and no video was given\n"
    assert shell("chat", folder, "Hi", "--video", CLIP, "--pruning-rate", 0.5, "--max-new-tokens", 1)[2] == ""


def test_layouts_are_told_in_a_few_words():
    """Dozens of slices as counts of their sizes; oracle: the layouts' own numbers."""
    slices = (SliceGroup(((14, 14),)), *[SliceGroup(((21, 15),))] * 6)
    assert layout_text(slices) == "slices: 1 of 14 x 14, 6 of 21 x 15"
    assert layout_text((SliceGroup(((14, 14), (14, 14)), (0, 1)),)) == "slices: 2 of 14 x 14"
    assert layout_text((1, 6, 8)) == "grid (1, 6, 8)"
    assert [layout_text(CropLayout(*size)) for size in ((0, 0), (2, 3))] == ["overview", "overview and 2 x 3 crops"]


@pytest.mark.thorough
def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "refvl", "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("chat", "trace", "info", "bench"))


@pytest.mark.parametrize("name", ["a[/b]c", "x[red]y", "d:smile:e", "f\x1b[31mg", "h\u202ei"])
def test_a_folder_is_called_by_its_name(shell, folder, tmp_path, name):
    """Neither rich's markup nor what commands a terminal is taken from a path; oracle: Python's own escapes."""
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(folder)
    status, out, err = shell("info", place)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    assert (status, err) == (0, "") and shown in out.replace("\n", "").replace(" ", "")
    assert not set("\x1b\u202e") & set(out)


@pytest.mark.parametrize(
    "arguments", [["\x1b[2J"], ["chat", "\x1b[2J", "Hi"], ["chat", "FOLDER", "Hi", "--image", "\x1b[2J.png"]], ids=len
)
def test_errors_command_no_terminal(shell, folder, arguments):
    status, out, err = shell(*[a.replace("FOLDER", str(folder)) for a in arguments])
    assert status and "\x1b" not in out + err and "\\x1b[2J" in err


def test_a_member_of_a_tar_file_commands_no_terminal(shell, folder, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(__file__, "\x1b[31mred.png")
        tar.add(PHOTO, "fine.jpg")
    status, out, err = shell("encode", folder, tmp_path / "a.tar", "--out", tmp_path / "out")
    assert status == 1 and "\\x1b[31mred.png" in err and "\x1b" not in out + err


TINY = str(DATA / "checkpoints" / "tiny-qwen2_5_vl")
COMMANDS = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
WITH_OUTPUT = [
    ["--help"], ["--version"], ["info", "--help"], ["info", TINY],
    ["chat", TINY, "Hi", "--max-new-tokens", "1", "--device", "cpu"],
    *(pytest.param(words, marks=pytest.mark.slow) for words in (
        *([name, "--help"] for name in COMMANDS if name != "info"),
        ["trace", TINY, "Hi", "--max-new-tokens", "1", "--device", "cpu"],
    )),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", WITH_OUTPUT, ids=lambda words: " ".join(words).replace(TINY, "tiny"))
def test_output_that_nobody_can_read(arguments):
    """Into a closed pipe: silence, status as in `report_mistakes`; onto a full disk: one line; no stdout: status 0."""
    command = [sys.executable, "-m", "refvl", *arguments]
    read, gone = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    nowhere = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    started = [
        subprocess.Popen(words, stdout=out, stderr=subprocess.PIPE, text=True)
        for words, out in ((command, gone), (command, full), (nowhere, None))
    ]
    os.close(gone)
    os.close(full)
    closed, disk, nothing = [(process.communicate()[1], process.returncode) for process in started]
    assert closed == ("", 141)
    assert disk[1] == 1 and disk[0].count("\n") == 1 and "No space left on device" in disk[0]
    assert nothing == ("", 0)


@pytest.mark.parametrize(("words", "said"), [
    (["--device", "cuda:3"], "device: 'cuda:3' needs CUDA, but this machine has no CUDA device"),
    (["--repeats", "1" + "0" * 30], "repeats: expected 1 to 10,000 timed calls, got 1" + "0" * 30),
])  # fmt: skip
def test_bench_says_what_it_cannot_do(shell, monkeypatch, words, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shell("bench", "tower", *words) == (1, "", f"refvl: {said}\n")


def test_demo_without_matplotlib_answers_and_names_the_extra(tmp_path, monkeypatch):
    """An installed wheel has no matplotlib unless an extra brings it. Oracle: the answers of data/README.md."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = io.StringIO()
    show(Console(markup=True, file=shown, width=120), tmp_path / "figures", "tiny-qwen2_5_vl", "cpu")
    assert "What color is the circle? red" in shown.getvalue()
    assert shown.getvalue().endswith("figures: matplotlib is missing; install it with pip install 'refvl[notebooks]'\n")
    assert not (tmp_path / "figures").exists()
