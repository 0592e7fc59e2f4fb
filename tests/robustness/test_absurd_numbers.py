"""Every subcommand with numbers that no machine can hold: an answer or one sentence, in 2 GB and 20 seconds."""

import json
import resource
import signal
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from refvl.paths import DATA
from refvl.tools.cli import app

MEMORY = 2 * 2**30  # bytes of data that the process may hold, its libraries included
SECONDS = 20  # of CPU time for each command
TINY, NINES = DATA / "checkpoints", "9" * 30
QWEN, MINICPM = str(TINY / "tiny-qwen2_5_vl"), str(TINY / "tiny-minicpmv-4_5")
PICTURE, CLIP = str(DATA / "pictures" / "scene.png"), str(DATA / "clips" / "scene.mp4")
TRILLION = "1" + "0" * 12
COMMANDS = [
    *(["info", str(path), "--max-pixels", number] for path in sorted(TINY.iterdir()) for number in (TRILLION, NINES)),
    ["info", QWEN, "--min-pixels", NINES, "--max-pixels", NINES, "--image", PICTURE],
    ["info", QWEN, "--min-pixels", "9" * 11, "--max-pixels", "9" * 12, "--image", PICTURE],
    ["info", QWEN, "--video", CLIP, "--num-frames", NINES],
    ["info", QWEN, "--video", CLIP, "--fps", "1e300"],
    ["info", MINICPM, "--video", CLIP, "--fps", "1e-300"],
    ["info", QWEN, "--video", CLIP, "--pruning-rate", "0.9999999999999999"],
    ["chat", QWEN, "What?", "--image", PICTURE, "--max-new-tokens", NINES],
    ["chat", QWEN, "What?", "--image", PICTURE, "--max-new-tokens", "2", "--prefill-chunk", NINES],
    ["chat", QWEN, "What?", "--image", PICTURE, "--max-new-tokens", "2", "--prompt-lookup-num-tokens", NINES],
    ["chat", QWEN, "What?", "--video", CLIP, "--max-new-tokens", "2", "--pruning-rate", "0.9999999999999999"],
    ["chat", QWEN, "x" * 120_000, "--max-new-tokens", "2"],
    ["chat", QWEN, "--jsonl", "FOLDER/long.jsonl", "--max-new-tokens", "2"],
    ["trace", QWEN, "What?", "--image", PICTURE, "--max-new-tokens", NINES, "--prefill-chunk", "1"],
    ["trace", QWEN, "What?", "--video", CLIP, "--max-new-tokens", "2", "--pruning-rate", "1e308"],
    ["trace", QWEN, "What?", "--max-new-tokens", "2", "--prompt-lookup-num-tokens", "1000000"],
    ["encode", QWEN, PICTURE.rpartition("/")[0], "--out", "FOLDER/out", "--shard-size", NINES],
    ["compare", "FOLDER", "FOLDER", "--rtol", "1e308", "--atol", "1e308"],
    ["bench", "generated_ids", "--repeats", NINES],
    ["demo", "--device", "cuda:" + NINES],
    ["notebooks", "FOLDER/" + NINES * 9],
    ["check-gpu", "--device", "cuda:" + NINES],
    *(["info", f"FOLDER/{name}.json"] for name in ("depth", "width", "heads", "layers", "vocabulary")),
]  # fmt: skip


def main(folder: str) -> None:
    """Run all commands; print a line of JSON for each: status, what was said, CPU seconds."""
    from kinds import run_command

    def stop(number, frame):
        raise TimeoutError("out of time")

    signal.signal(signal.SIGVTALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for command in COMMANDS:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        code, out, err = run_command([word.replace("FOLDER", folder) for word in command])
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps([code, err, len(out)]), flush=True)


def write_hostile_files(folder) -> None:
    """Requests of 20 MB, and configs of towers and text models beyond any machine."""
    long = {"prompt": "x" * 20_000_000}
    (folder / "long.jsonl").write_text("".join(json.dumps(request) + "\n" for request in (long, {"prompt": "What?"})))
    config = json.loads((TINY / "tiny-qwen2_5_vl" / "config.json").read_text())
    text = config.get("text_config", config)
    changes = {
        "depth": (config["vision_config"], {"depth": 10**9}),
        "width": (config["vision_config"], {"hidden_size": 4 * 10**15, "intermediate_size": 10**15}),
        "heads": (config["vision_config"], {"num_heads": 10**15}),
        "layers": (text, {"num_hidden_layers": 10**9, "layer_types": None}),
        "vocabulary": (text, {"vocab_size": 10**15}),
    }
    for name, (part, values) in changes.items():
        before = {key: part.get(key) for key in values}
        part |= values
        (folder / f"{name}.json").write_text(json.dumps(config))
        part |= before


def test_every_command_and_every_number_is_tried():
    """Oracle: the functions behind the commands, and those of their parameters that are numbers."""
    for registered in app.registered_commands:
        name = registered.callback.__name__.replace("_", "-")
        tried = {word for command in COMMANDS if command[0] == name for word in command}
        kinds = get_type_hints(registered.callback).items()
        numbers = {f"--{option.replace('_', '-')}" for option, kind in kinds if {int, float} & {kind, *get_args(kind)}}
        assert tried and numbers <= tried, (name, numbers - tried)


@pytest.mark.thorough
def test_every_command_is_bounded(tmp_path):
    """One process under the limits runs all of them: a status of 0, 1 or 2, and one line or a usage message."""
    write_hostile_files(tmp_path)
    paths = {"PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__, tmp_path], capture_output=True, text=True, env=paths, timeout=600, check=False
    )
    ends = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert len(ends) == len(COMMANDS), run.stderr[-2000:]
    for command, (code, err, said) in zip(COMMANDS, ends, strict=True):
        assert code in (0, 1, 2) and "Traceback" not in err, (command, err[-500:])
        assert "out of time" not in err and "MemoryError" not in err and "memory" not in err, (command, err)
        assert said if code == 0 else err.count("refvl: ") == 1 or code == 2, (command, err)


if __name__ == "__main__":
    main(sys.argv[1])
