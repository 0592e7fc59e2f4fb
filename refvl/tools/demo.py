"""`make demo`: questions about a shipped picture and a shipped clip, every stage on the way, and a figure.

Everything shown comes from a `Trace`; `python -m refvl.tools.demo --help` lists other media and questions.
"""

from pathlib import Path
from typing import Annotated

import typer

from refvl.loading import load
from refvl.paths import DATA, check_clone
from refvl.pixels.patches import PatchConfig
from refvl.serving.model import VLM
from refvl.study.report import Trace
from refvl.tools.cli import Console, Device, report_mistakes, stage_table

CHECKPOINT = DATA / "checkpoints" / "tiny-qwen2_5_vl"
PICTURE, CLIP = DATA / "pictures" / "scene.png", DATA / "clips" / "scene.mp4"
PICTURE_QUESTIONS = ("What color is the circle?", "Where is the circle?")
CLIP_QUESTIONS = ("Which way does the circle move?", "What color is the circle?")
PHOTO, FILM = DATA / "pictures" / "coffee.jpg", DATA / "clips" / "bigbuckbunny.mp4"
PHOTO_QUESTION, FILM_QUESTION = "What is in the picture?", "What is in the clip?"  # known by heart, see data/README.md
PRUNING_RATE = 0.5
TOY = """\
The shipped models are toys, trained on drawn scenes of coloured shapes; the next image and video are held-out scenes.
Ask about the color, shape, place or motion of an object; to anything else they say so:"""


@report_mistakes()
def main(
    out: Annotated[Path, typer.Option(help="folder for the figure")] = Path("outputs/demo"),
    checkpoint: Annotated[str, typer.Option(help="a checkpoint folder or a hub id")] = str(CHECKPOINT),
    device: Device = "auto",
) -> None:
    """Two questions about an image and two about a video, with a table of stages and a figure."""
    check_clone("the demo")
    console = Console()
    model = load(checkpoint, device=device, progress=console.is_terminal)
    console.print(f"{model.family.name} from {checkpoint}, on {model.device}")
    if checkpoint == str(CHECKPOINT):
        console.print(f"\n{TOY} hello [bold]{model.chat('hello')}[/bold]")
    ask(console, model, PICTURE, PICTURE_QUESTIONS, images=[PICTURE])
    clip = ask(console, model, CLIP, CLIP_QUESTIONS, videos=[CLIP])
    pruned = model.trace(CLIP_QUESTIONS[0], videos=[CLIP], pruning_rate=PRUNING_RATE)
    before, after = (len(trace.input_ids) for trace in (clip, pruned))
    console.print(
        f"\nthe same clip with {PRUNING_RATE:.0%} of its tokens pruned: {CLIP_QUESTIONS[0]} [bold]{pruned.text}[/bold] "
        f"({before} prompt tokens became {after})"
    )
    console.print("\nThe next photo and video were in the shipped model's training data: it knows them by heart.")
    photo = ask(console, model, PHOTO, (PHOTO_QUESTION,), images=[PHOTO])
    film = model.trace(FILM_QUESTION, videos=[FILM], pruning_rate=PRUNING_RATE)
    console.print(f"\n{FILM.relative_to(DATA.parent)}: {FILM_QUESTION} [bold]{film.text}[/bold]")
    from refvl.viz.overview import plot_overview  # matplotlib takes a second

    out.mkdir(parents=True, exist_ok=True)
    plot_overview(photo.media[0], PatchConfig(), film).savefig(out / "overview.jpg", dpi=95)
    console.print(f"figure: {out / 'overview.jpg'}", highlight=False)


def ask(console: Console, model: VLM, medium: Path, questions: tuple[str, ...], **media) -> Trace:
    """Print the stages of the first question and the answers to all; returns the trace of the first."""
    traces = [model.trace(question, **media) for question in questions]
    console.print(f"\n{medium.relative_to(DATA.parent)}", style="bold", highlight=False)
    console.print(stage_table(traces[0]))
    for question, trace in zip(questions, traces, strict=True):
        console.print(f"{question} [bold]{trace.text}[/bold]   (first token after {trace.ttft * 1e3:.0f} ms)")
    return traces[0]


if __name__ == "__main__":
    typer.run(main)
