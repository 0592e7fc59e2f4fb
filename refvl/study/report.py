"""What a run says of itself: a table of its stages, and the tensors of each for `refvl.compare`."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

import refvl
from refvl.graphs.budgets import padding_waste
from refvl.pixels.crops import CropLayout
from refvl.pixels.media import Video
from refvl.study.comparison import Stages, html_table, is_grid
from refvl.trace import Trace

FLOAT16_LIMIT = torch.finfo(torch.float16).max  # 65,504


def as_text(trace: Trace) -> str:
    """A line per stage: its name, shapes and seconds."""
    lines = [f"  {stage:<14}{s:9.4f} s  {magnitude(trace, stage):>9}  {shapes}" for stage, shapes, s in rows(trace)]
    return "\n".join([f"Trace of {trace.text!r}, first token after {trace.ttft:.3f} s", *lines])


def as_html(trace: Trace) -> str:
    """The same as a table, for notebooks."""
    cells = [(stage, shapes, magnitude(trace, stage), f"{seconds:.4f}") for stage, shapes, seconds in rows(trace)]
    caption = f"{trace.text} (first token after {trace.ttft:.3f} s)"
    return html_table(caption, ("stage", "shapes", "max |x|", "seconds"), cells)


def magnitude(trace: Trace, stage: str) -> str:
    """The largest magnitude of a stage in words, with a mark where float16 could not hold it."""
    largest = trace.largest.get(stage)
    return "" if largest is None else f"{largest:.3g}" + "!" * (not largest < FLOAT16_LIMIT)


def stages(trace: Trace) -> Stages:
    """What each stage made, for `refvl.compare`."""
    media: dict[str, Sequence[Tensor | None]]
    media = {"patchify": [p.pixel_values for p in trace.patches], "encode": trace.embeds, "prune": trace.keep_masks}
    found: dict[str, Tensor | None] = {f"{stage}/{i}": x for stage, items in media.items() for i, x in enumerate(items)}
    found |= {"merge/input_ids": trace.input_ids, "merge/inputs_embeds": trace.inputs_embeds}
    found |= {"merge/deepstack": trace.deepstack, "positions/ids": trace.positions}
    found |= {"decode tokens/token_ids": torch.tensor(trace.token_ids)}
    made = {name: x.detach().cpu() for name, x in found.items() if x is not None and x.numel()}
    grids = [layout if is_grid(layout) else None for layout in trace.layouts]
    return Stages(made, f"refvl {refvl.__version__}", grids)


def rows(trace: Trace) -> list[tuple[str, str, float]]:
    """(stage, shapes, seconds) of every stage, for tables."""
    return [(stage, _shapes(trace, stage), seconds) for stage, seconds in trace.seconds.items()]


def _shapes(trace: Trace, stage: str) -> str:
    match stage:
        case "decode media":
            return ", ".join(_media_size(m) for m in trace.media) or "text only"
        case "patchify":
            return ", ".join(f"{tuple(p.pixel_values.shape)} {layout_text(p.layout)}" for p in trace.patches)
        case "plan":
            return _packing(trace) if trace.graph_batches else ", ".join(m.summary for m in trace.metadata)
        case "encode":
            return ", ".join(str(tuple(e.shape)) for e in trace.embeds) + _graph_report(trace)
        case "prune":
            return ", ".join(f"{int(k.sum())} of {len(k)} kept" for k in trace.keep_masks if k is not None)
        case "tokenize":
            return f"prompt ({len(trace.full_ids)},)"
        case "merge":
            return f"prompt ({len(trace.input_ids)},), embeddings {tuple(trace.inputs_embeds.shape)}"
        case "positions":
            return f"{tuple(trace.positions.shape)}, delta {trace.delta}"
        case "generate":
            return f"{len(trace.token_ids)} tokens"
        case "prefill":
            chunks = f"{sum(trace.chunks)} tokens in chunks of {max(trace.chunks)}, " if trace.chunks else ""
            return chunks + "the first token"
        case "decode tokens":
            return _decoding(trace)
    return ""


def _decoding(trace: Trace) -> str:
    """How many tokens after the first forward's, how fast, and how many of all were drafts."""
    more, seconds = len(trace.token_ids) - (trace.passes or [1])[0], trace.seconds["decode tokens"]
    speed = f", {more / seconds:.0f} a second" if more and seconds else ""
    drafts = f"; {trace.accepted} of {len(trace.token_ids)} were accepted drafts" if trace.accepted else ""
    return f"{more} more{speed}{drafts}"


def _packing(trace: Trace) -> str:
    """What the graphs planned, in one line."""
    items = len({i for batch in trace.graph_batches for i in batch.indices})
    eager = sum(batch.budget is None for batch in trace.graph_batches)
    replays = len(trace.graph_batches) - eager
    counts = f"{items} item{'s' * (items != 1)} in {replays} replay{'s' * (replays != 1)}"
    return f"{counts}, {padding_waste(trace.graph_batches):.0%} padding" + f", {eager} eager" * bool(eager)


def _graph_report(trace: Trace) -> str:
    """What each replay held: hit or miss, budget, waste."""
    lines = []
    for batch in trace.graph_batches:
        ran = f"graph of {batch.budget}, {padding_waste([batch]):.0%} padding" if batch.budget else "eager"
        path = f"{batch.path} path of " if batch.path else ""
        lines.append(f"{path}media {', '.join(str(i + 1) for i in batch.indices)}: {ran}")
    return "; " + "; ".join(lines) if lines else ""


def layout_text(layout) -> str:
    """How a medium's rows lie, in a few words: the grid, the crops, or how many slices of which sizes."""
    if isinstance(layout, CropLayout):
        return f"overview and {layout.rows} x {layout.columns} crops" if layout.crops else "overview"
    if not hasattr(layout[0], "slices"):
        return f"grid {layout}"
    sizes = Counter(size for group in layout for size in group.slices)
    return "slices: " + ", ".join(f"{count} of {h} x {w}" for (h, w), count in sizes.items())


def _media_size(medium) -> str:
    return f"frames {medium.frames.shape}" if isinstance(medium, Video) else f"{medium.width} x {medium.height} px"
