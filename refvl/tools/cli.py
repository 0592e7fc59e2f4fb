"""`python -m refvl`: chat, trace, info, encode, bench. A user's mistake prints one line and exits with status 1."""

import importlib
import os
import sys
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Run a vision-language model, or look at what happens on the way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[str, typer.Argument(help="a checkpoint folder or a hub id (owner/name)")]
Prompt = Annotated[str, typer.Argument(help="the question")]
Images = Annotated[list[str] | None, typer.Option("--image", "-i", help="a picture; may be repeated")]
Videos = Annotated[list[str] | None, typer.Option("--video", "-v", help="a clip; may be repeated")]
MaxNewTokens = Annotated[int, typer.Option(help="stop after this many tokens")]
PruningRate = Annotated[float, typer.Option(help="share of video tokens that EVS drops, in [0, 1)")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")]
Graphs = Annotated[bool, typer.Option("--graphs", help="capture the vision tower in graphs first")]
Attention = Annotated[str, typer.Option(help="backend of the vision tower: auto, varlen, flash, sdpa")]


Benchmark = StrEnum("Benchmark", ["tower", "graphs", "evs_ttft", "generated_ids"])


@app.command()
def chat(
    checkpoint: Checkpoint, prompt: Prompt, image: Images = None, video: Videos = None,
    max_new_tokens: MaxNewTokens = 128, pruning_rate: PruningRate = 0.0,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """Answer a question about pictures and clips; the text streams as it is generated."""
    model = _load(checkpoint, device, dtype, attention, graphs)
    pieces = model.chat(
        prompt, images=image or (), videos=video or (), max_new_tokens=max_new_tokens, pruning_rate=pruning_rate,
        stream=True,
    )  # fmt: skip
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


@app.command()
def trace(
    checkpoint: Checkpoint, prompt: Prompt, image: Images = None, video: Videos = None,
    max_new_tokens: MaxNewTokens = 128, pruning_rate: PruningRate = 0.0,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """The same run, with every stage's shapes and seconds."""
    model = _load(checkpoint, device, dtype, attention, graphs)
    run = model.trace(
        prompt, images=image or (), videos=video or (), max_new_tokens=max_new_tokens, pruning_rate=pruning_rate
    )
    console = Console()
    console.print(stage_table(run))
    console.print(f"first token after {run.ttft:.3f} s")
    console.print(f"answer: {run.text}", markup=False)


@app.command()
def info(
    checkpoint: Annotated[str, typer.Argument(help="a checkpoint folder, a hub id, or a config's JSON file")],
    image: Images = None, video: Videos = None, dtype: Annotated[str, typer.Option(help="for memory")] = "bfloat16",
):  # fmt: skip
    """Family, sizes, tokens for given media, and the memory needed. Reads no weights."""
    from refvl.loading import load
    from refvl.tools.costs import describe

    model = load(checkpoint, weights="random", device="meta", dtype=dtype)
    media = model.processor.decode(model.processor.messages("", image or (), video or ()))
    table = Table(show_header=False, title=checkpoint)
    for row in describe(model, media).items():
        table.add_row(*row)
    Console().print(table)


@app.command()
def encode(
    checkpoint: Checkpoint,
    folder: Annotated[str, typer.Argument(help="a folder of pictures")],
    out: Annotated[str, typer.Option(help="a folder for shards and manifest.json; what it holds is not made again")],
    data_parallel: Annotated[bool, typer.Option("--data-parallel", help="share the work of torchrun")] = False,
    shard_size: Annotated[int, typer.Option(help="pictures per safetensors file")] = 64,
    device: Device = "auto", dtype: Dtype = "auto", attention: Attention = "auto", graphs: Graphs = False,
):  # fmt: skip
    """Encode a folder of pictures to safetensors, to be handed to an engine that accepts embeddings.

    torchrun --nproc-per-node 8 -m refvl encode CHECKPOINT FOLDER --out DIR --data-parallel

    A picture that cannot be read is named on stderr and in the manifest; the others are encoded, and the exit status
    is 1. A run that was killed is continued by the same command.
    """
    from refvl.tools.export import encode_folder

    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not data_parallel:
        raise ValueError("torchrun started several processes: give --data-parallel, so that they share the work")
    rank = int(os.environ.get("RANK", 0))
    vlm = _load(checkpoint, device, dtype, attention, graphs)
    manifest = encode_folder(vlm, folder, out, shard_size=shard_size, progress=sys.stderr.isatty() and rank == 0)
    if rank == 0:  # a failure of another rank would make torchrun end this one before it has spoken
        print(f"{len(manifest['images'])} pictures in {out}")
        for reason in manifest["unreadable"].values():
            print(f"refvl: {reason}", file=sys.stderr)
        raise SystemExit(1 if manifest["unreadable"] else 0)


@app.command()
def bench(
    name: Annotated[Benchmark, typer.Argument(help="what to measure")],
    device: Device = "auto",
    repeats: Annotated[int | None, typer.Option(help="timed calls; the default is the benchmark's own")] = None,
    write: Annotated[bool, typer.Option(help="keep the result under data/measurements")] = True,
):
    """Measure on this machine: needs a clone of the repository."""
    options = {} if name == Benchmark.generated_ids else {"device": device}
    options |= {} if repeats is None or name == Benchmark.generated_ids else {"repeats": repeats}
    _benchmark(name.value).run(write=write, **options)


def _benchmark(name: str):
    """The module benchmarks/NAME.py, which lies beside the package and is not installed with it."""
    from refvl.paths import DATA

    root = str(DATA.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(f"benchmarks.{name}")


def stage_table(run) -> Table:
    """A `Trace` as a table of stages, shapes and seconds."""
    table = Table("stage", "shapes", title="the path")
    table.add_column("seconds", justify="right")
    for stage, shapes, seconds in run.rows():
        table.add_row(stage, shapes, f"{seconds:.4f}")
    return table


def _load(checkpoint: str, device: str, dtype: str, attention: str, graphs: bool):
    from refvl.loading import load

    options = {"device": device, "dtype": dtype, "attention": attention, "graphs": graphs}
    return load(checkpoint, **options, progress=sys.stderr.isatty())


@contextmanager
def report_mistakes():
    """A user's mistake (and a missing file) becomes one line on stderr and exit status 1."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"refvl: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def main() -> None:
    """Run the command line."""
    with report_mistakes():
        app()


if __name__ == "__main__":
    main()
