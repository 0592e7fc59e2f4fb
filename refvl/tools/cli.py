"""The commands of `python -m refvl`. An error is printed as one line on stderr, with exit status 1."""

import faulthandler
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.table import Table

import refvl

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
Console = partial(rich.console.Console, markup=False, emoji=False)  # brackets in a path are not markup
TRACEBACK = "REFVL_TRACEBACK"  # environment variable

Checkpoint = Annotated[
    str, typer.Argument(help="a checkpoint folder, a hub id (owner/name) or a shipped model (tiny-...)")
]
Prompt = Annotated[str, typer.Argument(help="the question")]
Images = Annotated[list[str] | None, typer.Option("--image", "-i", help="an image: path or shipped name; repeatable")]
Videos = Annotated[list[str] | None, typer.Option("--video", "-v", help="a video: path or shipped name; repeatable")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="stop after this many tokens")]
PruningRate = Annotated[float, typer.Option(min=0, max=1, help="share of video tokens to drop, below 1")]
PrefillChunk = Annotated[int | None, typer.Option(min=1, help="number of prompt tokens to prefill at a time")]
Adapter = Annotated[
    list[str] | None, typer.Option(help="a folder or hub id of a LoRA adapter; the effects of several adapters add up")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")]
Graphs = Annotated[bool, typer.Option("--graphs", help="capture the vision tower in CUDA graphs at the start")]
Attention = Annotated[str, typer.Option(help="backend of the vision tower: auto, varlen, sdpa, masked")]
Pixels = Annotated[int | None, typer.Option(min=1, help="override the checkpoint's limit")]

Pruning = StrEnum("Pruning", ["evs", "vidcom2"])  # the keys of refvl.positions.PRUNERS, which is not imported here
PruningRule = Annotated[Pruning, typer.Option("--pruning", help="the method that selects the tokens to drop")]
Other = StrEnum("Other", ["transformers"])
Benchmark = StrEnum("Benchmark", ["tower", "graphs", "performance"])


@contextmanager
def report_mistakes() -> Iterator[None]:
    """Turn an error into one line on stderr and exit status 1, and Ctrl-C into a line and status 130.

    If REFVL_TRACEBACK=1 is set in the environment, the traceback is printed first.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe has exited, which typer handles
        raise
    except KeyboardInterrupt:
        print("refvl: stopped", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exc()
        message = " ".join(str(error).split()).replace("path_or_id:", "checkpoint:")
        is_worded = message and isinstance(error, (ValueError, TypeError, OSError, ImportError))
        print(f"refvl: {message if is_worded else f'{type(error).__name__}: {message}'}", file=sys.stderr)
        raise SystemExit(1) from None


def command() -> Callable:
    """Turn a function into a command that reports errors in one line."""
    return lambda function: app.command()(report_mistakes()(function))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"refvl {refvl.__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")]


@app.callback(epilog=f"Set {TRACEBACK}=1 to show the traceback of an error.")
def _options(version: Version = False):
    """Run a vision-language model, or inspect its stages."""


@command()
def chat(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Argument(help="the question; omit it with --jsonl")] = None,
    image: Images = None, video: Videos = None,
    jsonl: Annotated[str | None, typer.Option(help="answer a file of requests, one JSON object per line")] = None,
    out: Annotated[str | None, typer.Option(help="the file for the answers (default: FILE.answers.jsonl)")] = None,
    max_new_tokens: MaxNewTokens = 128, pruning_rate: PruningRate = 0.0, pruning: PruningRule = Pruning.evs,
    prefill_chunk: PrefillChunk = None, adapter: Adapter = None,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """Answer a question about images and videos; the text is streamed as it is generated.

    Each line of the --jsonl file is {"id": ..., "prompt": ..., "images": [...], "videos": [...]};
    "max_new_tokens" and "pruning_rate" are optional. A failed request gets an error instead of an
    answer, and the exit status is then 1. To continue a run that was stopped, run the same command
    again; it skips ids that are answered.
    """
    if (prompt is None) == (jsonl is None):
        raise ValueError("prompt: expected a question, or a file of requests with --jsonl")
    model = _load(checkpoint, device, dtype, attention, graphs, adapters=adapter)
    common = {"max_new_tokens": max_new_tokens, "pruning_rate": pruning_rate, "pruning": pruning}
    if jsonl is not None:
        from refvl.serving.requests import answer_file

        answers = Path(out or f"{jsonl}.answers.jsonl")
        errors = answer_file(model, Path(jsonl), answers, common=common, progress=sys.stderr.isatty())
        print(f"answers in {answers}", flush=True)
        for name, error in errors.items():
            print(f"refvl: {jsonl}, id {name}: {error}", file=sys.stderr)
        raise SystemExit(1 if errors else 0)
    media = {"images": image or (), "videos": video or ()}
    for piece in model.chat(prompt, **media, stream=True, prefill_chunk=prefill_chunk, **common):
        print(piece, end="", flush=True)
    print()


@command()
def trace(
    checkpoint: Checkpoint, prompt: Prompt, image: Images = None, video: Videos = None,
    max_new_tokens: MaxNewTokens = 128, pruning_rate: PruningRate = 0.0, pruning: PruningRule = Pruning.evs,
    prefill_chunk: PrefillChunk = None, adapter: Adapter = None,
    with_: Annotated[
        Other | None, typer.Option("--with", help="also run transformers' model, and compare the two runs")
    ] = None,
    save: Annotated[str | None, typer.Option(help="save tensors of all stages to a new or empty folder")] = None,
    source: Annotated[bool, typer.Option("--source", help="print the code that ran, in call order")] = False,
    page: Annotated[Path | None, typer.Option(help="write the code that ran as a page, to an .html file")] = None,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """Answer a question, and print the shapes and the time of every stage.

    With --source, first print the code that ran: every function in call order, with executed lines
    marked and checks folded. With --page FILE.html, write the code as a page, with the results of
    each stage.
    """
    if with_ and (pruning_rate or adapter):
        raise ValueError(f"with: {with_.value} prunes nothing and gets no adapter; remove --pruning-rate and --adapter")
    if page and page.exists():
        raise FileExistsError(f"page: {page} already exists; choose a different file")
    model = _load(checkpoint, device, dtype, attention, graphs, adapters=adapter)
    options: dict[str, Any] = {"images": image or (), "videos": video or (), "max_new_tokens": max_new_tokens}
    options |= {"pruning_rate": pruning_rate, "pruning": pruning, "prefill_chunk": prefill_chunk}
    if source or page:
        from refvl.study.follow import follow

        journey = follow(model, prompt, **options)
        run = journey.trace
        if source:
            print(journey, end="\n\n")
        if page:
            from refvl.paths import write_whole
            from refvl.viz import journey as journeys

            write_whole(page, journeys.page(journey, title=Path(checkpoint).name).encode())
    else:
        run = model.trace(prompt, **options)
    console = Console()
    from refvl.tools.demo import stage_table

    console.print(stage_table(run))
    console.print(f"first token after {run.ttft:.3f} s\nanswer: {run.text}")
    if save:
        run.save(save)
    if with_:
        from refvl.study.recording import record_transformers

        theirs = record_transformers(checkpoint, model, run, max_new_tokens=max_new_tokens)
        print(refvl.compare(run, theirs, model=model))


@command()
def compare(
    a: Annotated[str, typer.Argument(help="a folder that `trace --save` wrote")],
    b: Annotated[str, typer.Argument(help="a second such folder, from a run with the same prompt and media")],
    rtol: Annotated[float | None, typer.Option(
        help="tolerance, relative to a stage's largest value; default: 0.001, or the expected rounding error in the "
        "text model")] = None,
    atol: Annotated[float, typer.Option(help="absolute tolerance, added to the relative tolerance")] = 0.0,
    model: Annotated[
        str | None, typer.Option(help="the checkpoint of one of the runs, to prove the cause of a difference")
    ] = None,
):  # fmt: skip
    """Compare two saved runs: print the first difference, its size, its location and its cause, if a cause was proven.

    The exit status is 1 if the runs differ.
    """
    vlm = refvl.load(model, progress=False) if model else None
    comparison = refvl.compare(a, b, rtol=rtol, atol=atol, model=vlm)
    print(comparison)
    raise SystemExit(1 if comparison.first else 0)


@command()
def info(
    checkpoint: Annotated[str, typer.Argument(help="a checkpoint folder, a hub id, or a config's JSON file or name")],
    image: Images = None, video: Videos = None, min_pixels: Pixels = None, max_pixels: Pixels = None,
    fps: Annotated[float | None, typer.Option(help="frames per second to sample from a video file")] = None,
    num_frames: Annotated[int | None, typer.Option(help="number of frames to sample from a video file")] = None,
    pruning_rate: PruningRate = 0.0, pruning: PruningRule = Pruning.evs,
    dtype: Annotated[str, typer.Option(help="dtype for the memory estimate")] = "bfloat16",
    tower: Annotated[bool, typer.Option("--tower", help="include only the vision tower, as in `encode`")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
):  # fmt: skip
    """Print a model's family and sizes, the token counts of the given media step by step, and the memory needed.

    Reads no weights.
    """
    from refvl.study.costs import costs, describe, set_pixel_limits, stored_text_bytes

    sampling = {name: value for name, value in (("fps", fps), ("num_frames", num_frames)) if value is not None}
    model = refvl.load(checkpoint, weights="random", device="meta", dtype=dtype, text=not tower)
    set_pixel_limits(model.processor, min_pixels=min_pixels, max_pixels=max_pixels)
    parts: list[dict[str, Any]] = [{"type": "image", "image": file} for file in image or ()]
    parts += [{"type": "video", "video": file} | sampling for file in video or ()]
    media = model.processor.decode([{"role": "user", "content": parts}])
    options: dict[str, Any] = {"pruning_rate": pruning_rate, "pruning": pruning}
    if not tower and Path(checkpoint).is_dir() and getattr(model.config, "quantization_config", None):
        options["text_bytes"] = stored_text_bytes(Path(checkpoint), model.family.vision_prefix)
    if as_json:
        print(json.dumps(costs(model, media, **options), indent=2))
        return
    table = Table(show_header=False, title=checkpoint)
    for row in describe(model, media, **options).items():
        table.add_row(*row)
    Console().print(table)


@command()
def encode(
    checkpoint: Checkpoint,
    media: Annotated[list[str], typer.Argument(help="a folder of images and videos, or files")],
    out: Annotated[str, typer.Option(help="the folder for the embeddings; unchanged media already there are skipped")],
    data_parallel: Annotated[bool, typer.Option("--data-parallel", help="share the work among the ranks")] = False,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """Encode images and videos to safetensors, one file per item, for an engine that accepts embeddings.

    torchrun --nproc-per-node 8 -m refvl encode CHECKPOINT FOLDER --out DIR --data-parallel

    Videos are sampled as in `chat`; those in folders are skipped if the model accepts only images.
    If an item cannot be encoded, stderr names it and the reason, the other items are encoded, and
    the exit status is 1. To continue a run that was stopped, or to add new or changed media, run
    the same command again. `refvl.serving.export.vllm_inputs` prepares the embeddings for vLLM.
    """
    from refvl.serving.export import encode_folder

    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not data_parallel:
        raise ValueError("torchrun started several processes; add --data-parallel to share the work")
    rank = int(os.environ.get("RANK", 0))
    vlm = _load(checkpoint, device, dtype, attention, graphs, text=False)
    result = encode_folder(vlm, media, out, progress=sys.stderr.isatty() and rank == 0)
    # if another rank exited with an error, torchrun would stop this rank before it could print
    if rank == 0:
        print(f"{len(result['encoded'])} encoded, {len(result['skipped'])} skipped in {out}", flush=True)
        for name, reason in result["failed"].items():
            print(f"refvl: {name}: {reason}", file=sys.stderr)
        raise SystemExit(1 if result["failed"] else 0)


@command()
def bench(
    name: Annotated[Benchmark, typer.Argument(help="the benchmark to run")],
    device: Device = "auto",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="number of timed calls; each benchmark has its own default")
    ] = None,
    write: Annotated[bool, typer.Option(help="write the result to data/measurements")] = False,
):
    """Run a benchmark on this machine. This needs a clone of the repository."""
    from refvl.paths import CLONE, ROOT

    if ROOT != CLONE:
        raise FileNotFoundError("`refvl bench` needs a clone of the repository: an installed package has no benchmarks")
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(f"benchmarks.{name.value}")  # benchmarks are next to the package and not installed
    given = {"device": device, "repeats": repeats}
    taken = inspect.signature(module.run).parameters
    module.run(write=write, **{option: value for option, value in given.items() if option in taken and value})


@command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the figures")] = Path("outputs/demo"), device: Device = "auto"
):
    """Ask two questions about an image and two about a video; print a table of stages and write figures."""
    from refvl.tools.demo import show

    show(Console(markup=True), out, device)


@command()
def notebooks(folder: Annotated[Path, typer.Argument(help="a new folder, or a folder without notebooks and data")]):
    """Copy the notebooks of the course and their data into a folder."""
    from refvl.paths import copy_course

    print(f"the course is in {copy_course(folder)}; open it with: jupyter lab --notebook-dir={folder}")


@command()
def check_gpu(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...")] = "cuda",
    thorough: Annotated[
        bool, typer.Option("--all/--quick", help="run every check, or only those that fit in a minute")
    ] = False,
    out: Annotated[str, typer.Option(help="the JSON file to attach to an issue")] = "check-gpu.json",
):
    """Check a CUDA device: attention, towers, answers, graphs, streams and timings.

    The default, --quick, takes a minute, and --all takes at most ten. If a check fails, the exit
    status is 1, but the files are complete.
    """
    from refvl.tools import check_gpu as checks

    # end the process if a kernel hangs
    faulthandler.dump_traceback_later(checks.SECONDS[thorough] + 120, exit=True, file=sys.__stderr__ or 2)
    try:
        result = checks.check_gpu(device, out, thorough=thorough)
    finally:
        faulthandler.cancel_dump_traceback_later()
    Console().print(checks.table(result))
    print(f"{checks.verdict(result)}; attach {out} to an issue")
    raise SystemExit(0 if result["passed"] else 1)


def _load(checkpoint: str, device: str, dtype: str, attention: str, graphs: bool, **options: Any):
    options |= {"device": device, "dtype": dtype, "attention": attention, "graphs": graphs}
    return refvl.load(checkpoint, progress=sys.stderr.isatty(), **options)


def main() -> None:
    """Run the command line."""
    app()
