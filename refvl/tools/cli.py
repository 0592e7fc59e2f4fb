"""The commands of `python -m refvl`. Any error is printed as one line on stderr.

Exit status: 1 for an error, 2 for a command line that cannot be read, 130 after Ctrl-C, 143 after SIGTERM, and 141 if
the reader of a pipe has exited.
"""

import faulthandler
import importlib
import inspect
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import rich.console
import typer
import typer.core
import typer.rich_utils
from rich.segment import Segment
from rich.table import Table

import refvl
from refvl.checks import plain
from refvl.tools.tables import stage_table

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
MOST_REPEATS = 10_000  # a benchmark times at most this many calls
TRACEBACK = "REFVL_TRACEBACK"  # environment variable

Checkpoint = Annotated[
    str, typer.Argument(help="a checkpoint folder, a hub id (owner/name) or a shipped model (tiny-...)")
]
Prompt = Annotated[str, typer.Argument(help="the question")]
Images = Annotated[list[str] | None, typer.Option("--image", "-i", help="an image file; may be repeated")]
Videos = Annotated[list[str] | None, typer.Option("--video", "-v", help="a video file; may be repeated")]
MaxNewTokens = Annotated[int, typer.Option(help="stop after this many tokens")]
PruningRate = Annotated[float, typer.Option(help="share of video tokens to drop, in [0, 1)")]
PrefillChunk = Annotated[int | None, typer.Option(help="number of prompt tokens to prefill at a time")]
SourceFile = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="[FILE.html]",
        help="print the code that ran, in call order, or write it as a page to the given file",
    ),
]
Adapter = Annotated[
    list[str] | None, typer.Option(help="a folder or hub id of a LoRA adapter; the effects of several adapters add up")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")]
Graphs = Annotated[bool, typer.Option("--graphs", help="capture the vision tower in CUDA graphs at the start")]
Attention = Annotated[str, typer.Option(help="backend of the vision tower: auto, varlen, sdpa, masked")]

Pruning = StrEnum("Pruning", ["evs", "vidcom2"])  # the keys of refvl.positions.PRUNERS, which is not imported here
PruningRule = Annotated[Pruning, typer.Option("--pruning", help="the method that selects the tokens to drop")]
Other = StrEnum("Other", ["transformers"])
Benchmark = StrEnum(
    "Benchmark",
    [
        "tower", "graphs", "evs_ttft", "pruning_accuracy", "generated_ids", "prefill_chunks", "cost_curves",
        "performance", "quantized", "ablations",
    ],
)  # fmt: skip


class Stopped(KeyboardInterrupt):
    """The exception raised on SIGTERM, which needs the same cleanup as Ctrl-C."""


class Console(rich.console.Console):
    """A rich console that prints text literally, without markup, emoji codes or control characters."""

    def __init__(self, **options):
        super().__init__(**{"markup": False, "emoji": False} | options)

    def render(self, renderable, options=None) -> Iterator[Segment]:
        """Yield rich's segments, with control characters in the text escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)

    def on_broken_pipe(self) -> None:
        """End the program; see `leave_pipe`."""
        leave_pipe()


def leave_pipe() -> NoReturn:
    """Exit silently, with the status of a program whose pipe was closed (`| head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that output flushed at exit raises no error
    raise SystemExit(128 + signal.SIGPIPE) from None


@contextmanager
def report_mistakes(stopped: str = "stopped") -> Iterator[None]:
    """Turn an error into one line on stderr and exit status 1; Ctrl-C and SIGTERM get their own statuses.

    stopped: the text printed after Ctrl-C or SIGTERM. If REFVL_TRACEBACK=1 is set in the environment, the traceback is
    printed first.
    """
    try:
        with _sigterm_raises():
            yield
            _flush()
    except BrokenPipeError:
        leave_pipe()
    except KeyboardInterrupt as stop:
        print(f"refvl: {stopped}", file=sys.stderr)
        raise SystemExit(128 + (signal.SIGTERM if isinstance(stop, Stopped) else signal.SIGINT)) from None
    except Exception as error:
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exc()
        print(f"refvl: {_one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _flush() -> None:
    """Flush stdout now, because a broken pipe or a full disk cannot be handled at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the output is flushed at exit
        raise OSError(f"stdout: cannot be written ({error.strerror})") from None


def _one_line(error: Exception) -> str:
    """Return the message with command-line names; the error's type comes first unless refvl wrote the message."""
    message = re.sub(r"^path_or_id:", "checkpoint:", plain(" ".join(str(error).split())))
    worded = message and isinstance(error, (ValueError, TypeError, OSError, ImportError))
    return message if worded else f"{type(error).__name__}: {message}"


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise SIGTERM as an exception, so files are closed and locks are removed; only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(stopped: str = "stopped", **options) -> Callable:
    """Turn a function into a command that reports errors in one line. options: the options of typer's `command`."""
    return lambda function: app.command(**options)(report_mistakes(stopped)(function))


class SourceCommand(typer.core.TyperCommand):
    """A command whose option --source accepts an optional file, which ends in .html."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        """Rewrite the option as a single argument, "--source=FILE" or "--source="."""
        words = list[str]()
        for word in args:
            if words and words[-1] == "--source=" and word.endswith(".html"):
                words[-1] += word
            else:
                words.append("--source=" if word == "--source" else word)
        return super().parse_args(ctx, words)


def _print_version(wanted: bool) -> None:
    if wanted:
        with report_mistakes():
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

    Each line of the --jsonl file is {"id": ..., "prompt": ..., "images": [...], "videos": [...]}; "max_new_tokens" and
    "pruning_rate" are optional. A failed request gets an error instead of an answer, and the exit status is then 1. To
    continue a run that was stopped, run the same command again; it skips ids that are answered.
    """
    load = partial(_load, checkpoint, device, dtype, attention, graphs, adapter)
    common = {"max_new_tokens": max_new_tokens, "pruning_rate": pruning_rate, "pruning": pruning}
    alone = {"prefill_chunk": prefill_chunk}
    if jsonl is not None:
        _answer_file(load, jsonl, out, {"PROMPT": prompt, "image": image, "video": video} | alone, common)
    if out is not None:
        raise ValueError("out: supported only with --jsonl, which writes a file of answers")
    if prompt is None:
        raise ValueError("prompt: expected a question, or a file of requests with --jsonl")
    _check_request(prompt, video, pruning_rate)
    for piece in load().chat(prompt, images=image or (), videos=video or (), stream=True, **common, **alone):
        print(plain(piece), end="", flush=True)
    print()


def _answer_file(load: Callable, jsonl: str, out: str | None, single: dict, common: dict) -> None:
    """Answer a file of requests, report the failed ones, and exit. single: the arguments for a single question."""
    from refvl.serving.requests import answer_file

    if given := [name for name, value in single.items() if value not in (None, [])]:
        raise ValueError(f"jsonl: its lines contain the requests; remove {', '.join(given)}")
    answers = Path(out or f"{jsonl}.answers.jsonl")
    errors = answer_file(load(), Path(jsonl), answers, common=common, progress=sys.stderr.isatty())
    print(plain(f"answers in {answers}"), flush=True)
    for name, error in errors.items():
        print("refvl:", *plain(f"{jsonl}, id {name}: {error}").split(), file=sys.stderr)
    raise SystemExit(1 if errors else 0)


@command(cls=SourceCommand)
def trace(
    checkpoint: Checkpoint, prompt: Prompt, image: Images = None, video: Videos = None,
    max_new_tokens: MaxNewTokens = 128, pruning_rate: PruningRate = 0.0, pruning: PruningRule = Pruning.evs,
    prefill_chunk: PrefillChunk = None, adapter: Adapter = None,
    with_: Annotated[
        Other | None, typer.Option("--with", help="also run transformers' model, and compare the two runs")
    ] = None,
    save: Annotated[str | None, typer.Option(help="save tensors of all stages to a new or empty folder")] = None,
    source: SourceFile = None,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """Answer a question, and print the shapes and the time of every stage.

    With --source, first print the code that ran: every function in call order, with executed lines marked and checks
    folded. With --source FILE.html, write the code as a page, with the results of each stage.
    """
    _check_request(prompt, video, pruning_rate)
    if source:
        _check_page(source)
    if with_ and pruning_rate:
        raise ValueError(f"pruning_rate: must be 0 with {with_.value}, which prunes nothing, got {pruning_rate}")
    if with_ and adapter:
        raise ValueError(f"adapter: not supported with {with_.value}, because it would not be attached to that model")
    model = _load(checkpoint, device, dtype, attention, graphs, adapter)
    if with_:
        from refvl.study.recording import check_recordable, record_transformers

        check_recordable(model, [kind for kind, media in (("image", image), ("video", video)) if media])
    given = {
        "images": image, "videos": video, "max_new_tokens": max_new_tokens, "pruning_rate": pruning_rate,
        "pruning": pruning, "prefill_chunk": prefill_chunk,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    run = model.trace(prompt, **options) if source is None else _show_source(model, prompt, options, checkpoint, source)
    console = Console()
    console.print(stage_table(run))
    console.print(f"first token after {run.ttft:.3f} s")
    console.print(f"answer: {run.text}")
    if save:
        run.save(save)
    if with_:
        theirs = record_transformers(checkpoint, model, run, max_new_tokens=max_new_tokens)
        print(plain(str(refvl.compare(run, theirs, model=model))))


def _check_page(source: str) -> None:
    """Check a page's file name before a model is loaded."""
    if not source.endswith(".html"):
        raise ValueError(f"source: expected a path that ends in .html, or nothing, got {source!r}")
    if not Path(source).absolute().parent.is_dir():
        raise FileNotFoundError(f"source: expected a path in an existing folder, got {source!r}")


def _show_source(model, prompt: str, options: dict, checkpoint: str, source: str):
    """Print the code that answers a question, or write it as a page; return the `Trace` of the same request."""
    from refvl.study.follow import follow

    journey = follow(model, prompt, **options)
    if not source:
        print(plain(str(journey)), end="\n\n")
        return journey.trace
    from refvl.viz.journey import page

    Path(source).write_text(page(journey, title=Path(checkpoint).name), encoding="utf-8")
    print(plain(f"the code that ran is in {source}"))
    return journey.trace


@command()
def compare(
    a: Annotated[str, typer.Argument(help="a folder that `trace --save` wrote")],
    b: Annotated[str, typer.Argument(
        help="a second folder that `trace --save` wrote, from a run with the same prompt and media")],
    rtol: Annotated[float | None, typer.Option(
        help="tolerance, relative to a stage's largest value; default: 0.001, or the expected rounding error in the "
        "text model")] = None,
    atol: Annotated[float, typer.Option(help="absolute tolerance, added to the relative tolerance")] = 0.0,
    model: Annotated[
        str | None, typer.Option(help="the checkpoint of one of the runs, to prove the cause of a difference")
    ] = None,
):  # fmt: skip
    """Compare two saved runs: print the first difference, its size, its location and its cause, if one was proven.

    The exit status is 1 if they differ.
    """
    vlm = refvl.load(model, progress=False) if model else None
    comparison = refvl.compare(a, b, rtol=rtol, atol=atol, model=vlm)
    print(plain(str(comparison)))
    raise SystemExit(1 if comparison.first else 0)


@command()
def info(
    checkpoint: Annotated[str, typer.Argument(help="a checkpoint folder, a hub id, or a config's JSON file")],
    image: Images = None, video: Videos = None,
    min_pixels: Annotated[int | None, typer.Option(help="override the checkpoint's limit")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="override the checkpoint's limit")] = None,
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
    from refvl.loading import load
    from refvl.study.costs import costs, describe, set_pixel_limits, stored_text_bytes

    sampling = {name: value for name, value in (("fps", fps), ("num_frames", num_frames)) if value is not None}
    _check_request("", video, pruning_rate, **sampling)
    model = load(checkpoint, weights="random", device="meta", dtype=dtype, text=not tower)
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
    table = Table(show_header=False, title=plain(checkpoint))
    for row in describe(model, media, **options).items():
        table.add_row(*row)
    Console().print(table)


@command(stopped="stopped; the same command continues")
def encode(
    checkpoint: Checkpoint,
    media: Annotated[list[str], typer.Argument(help="a folder of images and videos, or files")],
    out: Annotated[str, typer.Option(help="the folder for the embeddings; unchanged media already there are skipped")],
    data_parallel: Annotated[bool, typer.Option("--data-parallel", help="share the work among the ranks")] = False,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """Encode images and videos to safetensors, one file per item, for an engine that accepts embeddings.

    torchrun --nproc-per-node 8 -m refvl encode CHECKPOINT FOLDER --out DIR --data-parallel

    Videos are sampled as in `chat`; those in folders are skipped if the model accepts only images. If an item cannot be
    encoded, stderr names it and the reason, the other items are encoded, and the exit status is 1. To continue a run
    that was stopped, or to add new or changed media, run the same command again. `refvl.serving.export.vllm_inputs`
    prepares the embeddings for vLLM.
    """
    from refvl.serving.export import encode_folder

    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not data_parallel:
        raise ValueError("torchrun started several processes; add --data-parallel to share the work")
    rank = int(os.environ.get("RANK", 0))
    vlm = _load(checkpoint, device, dtype, attention, graphs, text=False)
    result = encode_folder(vlm, media, out, progress=sys.stderr.isatty() and rank == 0)
    if rank == 0:  # if another rank exited with an error, torchrun would stop this rank before it could print
        print(plain(f"{len(result['encoded'])} encoded, {len(result['skipped'])} skipped in {out}"), flush=True)
        for name, reason in result["failed"].items():
            print("refvl:", *plain(f"{name}: {reason}").split(), file=sys.stderr)
        raise SystemExit(1 if result["failed"] else 0)


@command()
def bench(
    name: Annotated[Benchmark, typer.Argument(help="the benchmark to run")],
    device: Device = "auto",
    repeats: Annotated[
        int | None, typer.Option(help="number of timed calls; each benchmark has its own default")
    ] = None,
    write: Annotated[bool, typer.Option(help="write the result to data/measurements")] = False,
):
    """Run a benchmark on this machine. This needs a clone of the repository."""
    import torch

    from refvl.paths import DATA, check_clone

    check_clone("`refvl bench`")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} needs CUDA, but this machine has no CUDA device")
    if repeats is not None and not 1 <= repeats <= MOST_REPEATS:
        raise ValueError(f"repeats: expected 1 to {MOST_REPEATS:,} timed calls, got {repeats}")
    if (root := str(DATA.parent)) not in sys.path:
        sys.path.insert(0, root)
    options = {"device": device} | ({} if repeats is None else {"repeats": repeats})
    module = importlib.import_module(f"benchmarks.{name.value}")  # benchmarks are next to the package and not installed
    taken = inspect.signature(module.run).parameters
    module.run(write=write, **{option: value for option, value in options.items() if option in taken})


@command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the figures")] = Path("outputs/demo"),
    checkpoint: Annotated[
        str, typer.Option(help="a checkpoint folder, a hub id or a shipped model")
    ] = "tiny-qwen2_5_vl",
    device: Device = "auto",
):
    """Ask two questions about an image and two about a video; print a table of stages and write figures."""
    from refvl.tools.demo import show

    show(Console(markup=True), out, checkpoint, device)


@command()
def notebooks(folder: Annotated[Path, typer.Argument(help="a new folder, or a folder without notebooks and data")]):
    """Copy the notebooks of the course and their data into a folder."""
    from refvl.paths import copy_course

    print(f"the course is in {copy_course(folder)}; open it with: jupyter lab --notebook-dir={folder}")


@command(stopped="stopped; the JSON contains the checks so far")
def check_gpu(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...")] = "cuda",
    thorough: Annotated[
        bool, typer.Option("--all/--quick", help="run every check, or only those that fit in a minute")
    ] = False,
    out: Annotated[str, typer.Option(help="the JSON file, to attach to an issue")] = "check-gpu.json",
):
    """Check a CUDA device: towers, graphs, answers and times.

    The default, --quick, takes a minute, and --all takes at most ten. If a check fails, the exit status is 1, but the
    file is complete.
    """
    from refvl.tools import check_gpu as checks

    limit = checks.SECONDS[thorough] + 120
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)  # if a kernel hangs
    try:
        result = checks.check_gpu(device, out, thorough=thorough)
    finally:
        faulthandler.cancel_dump_traceback_later()
    for table in checks.tables(result):
        Console().print(table)
    print(plain(f"{checks.verdict(result)}; attach {out} to an issue"))
    raise SystemExit(0 if result["passed"] else 1)


def _load(
    checkpoint: str, device: str, dtype: str, attention: str, graphs: bool, adapters: list[str] | None = None, **options
):
    from refvl.loading import load

    if checkpoint.endswith(".json"):
        raise ValueError(f"checkpoint: {checkpoint} is a config without weights; use it only with `refvl info`")
    progress = sys.stderr.isatty()
    options |= {"device": device, "dtype": dtype, "attention": attention, "graphs": graphs}
    return load(checkpoint, adapters=adapters or None, progress=progress, **options)


def _check_request(prompt: str, video: list[str] | None, pruning_rate: float, **sampling) -> None:
    """Check the request before a model is loaded. sampling: the video options that were given."""
    from refvl.checks import check_pruning_rate

    check_pruning_rate(pruning_rate, "pruning_rate")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError(f"prompt: expected text in UTF-8, got {prompt!r}") from None
    if sampling and not video:
        raise ValueError(f"{next(iter(sampling))}: needs a video file, but none was given")
    if pruning_rate and not video:
        print("refvl: --pruning-rate prunes only videos, and no video was given", file=sys.stderr)


def main() -> None:
    """Run the command line."""
    if sys.stdout is None:  # `>&-` has closed it
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names need not be valid UTF-8
    typer.rich_utils.Console = partial(Console, markup=True)  # type: ignore[misc, assignment]  # for help and errors
    with report_mistakes():
        try:
            app()
        finally:
            _flush()


if __name__ == "__main__":
    main()
