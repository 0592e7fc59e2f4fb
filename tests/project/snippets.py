"""Run the Python and the commands of Markdown pages, in page order and each page in its own empty folder.

`python snippets.py PAGE...` prints how many ran, and where the shipped files are. Those below "In a
clone" are left out, as are those that need a module which is not installed. Oracles: answers and
shapes in the pages' comments.
"""

import contextlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from typer.testing import CliRunner

from refvl.paths import DATA
from refvl.tools.cli import app

SNIPPET = re.compile(r"^```(python|bash|jsonl)\n(.*?)^```|^- `((?:python|torchrun) [^`]* refvl [^`]*)`", re.S | re.M)
NEEDS = {"--with transformers": "torchvision", "BitsAndBytesConfig": "bitsandbytes"}


def run_python(source: str) -> None:
    names = {}
    with contextlib.redirect_stdout(StringIO()) as shown:
        exec(compile(source, "snippet", "exec"), names)
    for answer in re.findall(r"^print\(.*chat\(.*\)\)  # (.+)$", source, re.M):
        assert answer in shown.getvalue().splitlines(), (answer, shown.getvalue())
    for name, several, shape in re.findall(r"^(\w+) = .*# (two of )?\((.*)\)$", source, re.M):
        tensors = names[name] if several else [names[name]]
        assert {x.ndim for x in tensors} == {len(shape.split(", "))}, (name, shape)


def run_command(line: str) -> None:
    command, _, answer = line.partition(" # ")
    words = shlex.split(command)
    if words[0] == "torchrun":
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *words[1:]], check=True)
    elif words[0] == "python":
        done = CliRunner().invoke(app, words[3:])
        assert done.exit_code == 0 or words[3] == "check-gpu", done.output
        assert words[3] != "chat" or not answer or done.stdout.strip() == answer, done.output


def run(page: Path) -> int:
    text, count = page.read_text(encoding="utf-8"), 0
    for found in SNIPPET.finditer(text):
        body = found[2] or found[3].replace("\n", " ")
        before = text[: found.start()].rstrip().rpartition("\n\n")[2]
        lacking = [name for word, name in NEEDS.items() if word in body and importlib.util.find_spec(name) is None]
        if before.startswith("In a clone") or lacking:
            continue
        # without the hub and a GPU
        body = body.replace("Qwen/Qwen2.5-VL-7B-Instruct", "tiny-qwen2_5_vl").replace('"cuda"', '"cpu"')
        print(f"{page.name}: {body}", file=sys.stderr)
        match found[1]:
            case "jsonl":
                Path("requests.jsonl").write_text(body)
            case "python":
                run_python(body)
            case _:
                for line in body.splitlines():
                    run_command(line)
        count += 1
    return count


if __name__ == "__main__":
    counts = []
    for page in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
            counts.append(run(page.resolve()))
    print(sum(counts), DATA)
