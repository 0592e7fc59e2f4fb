"""`refvl demo`: questions about shipped images and videos, a table of every stage, and figures.

Everything shown comes from a `Trace`.
"""

import importlib.util
from pathlib import Path

from rich.console import Console
from rich.table import Table

from refvl.loading import load
from refvl.model import VLM
from refvl.paths import DATA
from refvl.pixels.patches import PatchConfig
from refvl.study.report import Trace

PICTURE, CLIP = DATA / "pictures" / "scene.png", DATA / "clips" / "scene.mp4"
PICTURE_QUESTIONS = ("What color is the circle?", "Where is the circle?")
CLIP_QUESTIONS = ("Which way does the circle move?", "What color is the circle?")
PHOTO, FILM = DATA / "pictures" / "coffee.jpg", DATA / "clips" / "bigbuckbunny.mp4"
PHOTO_QUESTION, FILM_QUESTION = "What is in the picture?", "What is in the clip?"  # data/README.md lists the answers
PRUNING_RATE = 0.5
TOY = """\
The shipped models are toys, trained on drawn scenes of coloured shapes. The next image and video are held-out scenes.
Ask about the color, shape, place or motion of an object. If you ask anything else, such as "hello", they reply:"""


def show(console: Console, out: Path, device: str) -> None:
    """Ask two questions about an image and two about a video; print a table of stages and write figures."""
    model = load("tiny-qwen2_5_vl", device=device, progress=console.is_terminal)
    console.print(f"tiny-qwen2_5_vl, a model of the family {model.family.name}, on {model.device}")
    console.print(f"\n{TOY} [bold]{model.chat('hello')}[/bold]")
    picture = ask(console, model, PICTURE, PICTURE_QUESTIONS, images=[PICTURE])
    clip = ask(console, model, CLIP, CLIP_QUESTIONS, videos=[CLIP])
    pruned = model.trace(CLIP_QUESTIONS[0], videos=[CLIP], pruning_rate=PRUNING_RATE)
    before, after = (len(trace.input_ids) for trace in (clip, pruned))
    console.print(
        f"\nthe video with {PRUNING_RATE:.0%} of its tokens pruned: {CLIP_QUESTIONS[0]} [bold]{pruned.text}[/bold] "
        f"({before} prompt tokens became {after})"
    )
    console.print("\nThe next photo and video were in the training data, so the shipped model has memorised them.")
    photo = ask(console, model, PHOTO, (PHOTO_QUESTION,), images=[PHOTO])
    film = model.trace(FILM_QUESTION, videos=[FILM], pruning_rate=PRUNING_RATE)
    console.print(f"\n{FILM.relative_to(DATA.parent)}: {FILM_QUESTION} [bold]{film.text}[/bold]")
    if importlib.util.find_spec("matplotlib") is None:
        missing = "figures: matplotlib is missing; install it with pip install 'refvl[notebooks]'"
        console.print(missing, markup=False, highlight=False)
        return
    write_figures(model, picture, clip, pruned, photo, film, out)
    console.print(f"the figures are in {out}", highlight=False)


def ask(console: Console, model: VLM, medium: Path, questions: tuple[str, ...], **media) -> Trace:
    """Print the stages of the first question and the answers to all questions; return the trace of the first."""
    traces = [model.trace(question, **media) for question in questions]
    console.print(f"\n{medium.relative_to(DATA.parent)}", style="bold", highlight=False)
    console.print(stage_table(traces[0]))
    for question, trace in zip(questions, traces, strict=True):
        console.print(f"{question} [bold]{trace.text}[/bold]   (first token after {trace.ttft * 1e3:.0f} ms)")
    return traces[0]


def write_figures(model: VLM, picture: Trace, clip: Trace, pruned: Trace, photo: Trace, film: Trace, out: Path):
    """Write a PNG for each stage's figure, and one overview."""
    from refvl import viz
    from refvl.viz.overview import plot_overview

    config = model.processor.image_config
    window_size = model.config.vision_config.window_size
    media, (patches,) = picture.media[0], clip.patches
    positions, keep_mask = clip.positions, pruned.keep_masks[0]
    assert positions is not None and keep_mask is not None, "a finished run has positions, and its video was pruned"
    figures = {
        "patches": lambda: viz.plot_patches(media, config),
        "windows": lambda: viz.plot_windows(media, config, window_size=window_size),
        "positions": lambda: viz.plot_positions(positions, clip.spans),
        "keep_mask": lambda: viz.plot_keep_mask(clip.media[0].frames, keep_mask, patches.media_tokens.thw)[0],
        "timings": lambda: viz.plot_stage_timings(clip),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        draw().figure.savefig(out / f"{name}.png", dpi=120)
    plot_overview(photo.media[0], PatchConfig(), film).savefig(out / "overview.jpg", dpi=95)


def stage_table(run: Trace) -> Table:
    """Return a `Trace` as a table of stages, shapes and seconds."""
    table = Table("stage", "shapes", title="the path")
    table.add_column("max |x|", justify="right")
    table.add_column("seconds", justify="right")
    for stage, shapes, seconds in run.rows():
        table.add_row(stage, shapes, run.magnitude(stage), f"{seconds:.4f}")
    return table
