"""The results of each stage of a run, as HTML figures: shapes, some numbers, a small image.

No model runs here.

values          a stage of a `Journey` -> its figures
first_picture   the image of the question, for the top of the page
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from refvl.checks import is_grid
from refvl.pixels.media import Video
from refvl.positions import merge_block_coordinates
from refvl.study.follow import ASK, Journey
from refvl.study.report import layout_text
from refvl.viz import tensor_figures as draw

SHOWN_TILES, SHOWN_SLICES, SHOWN_TOKENS, SHOWN_ITEMS = 320, 12, 160, 2
LINE_END = "\N{RETURN SYMBOL}"
AXES = (("t", "time", 5.5, "none"), ("h", "height", 3.2, "7 4"), ("w", "width", 2.4, "2 3"))  # line width, dashes


def values(journey: Journey, stage: str) -> list[str]:
    """Return the figures of a stage; there are none if the stage made nothing to draw, or if its results were freed."""
    run = journey.trace
    match stage:
        case "decode media":
            return [_medium(medium, i) for i, medium in enumerate(run.media[:SHOWN_ITEMS])]
        case "patchify":
            return [drawn for item in run.patches[:SHOWN_ITEMS] for drawn in _patches(item)]
        case "plan":
            merged = [item.media_tokens.thw for item in run.patches]
            return [drawn for planned in run.metadata[:SHOWN_ITEMS] for drawn in _plan(planned, merged)]
        case "encode":
            embeds = enumerate(run.embeds[:SHOWN_ITEMS], 1)
            return [draw.tensor_figure(f"embeddings of item {number}", x) for number, x in embeds]
        case "prune":
            return _pruned(run)
        case "merge":
            found = [("inputs_embeds", run.inputs_embeds), ("deepstack", run.deepstack)]
            made = [draw.tensor_figure(name, x) for name, x in found if x is not None and x.numel()]
            return [_prompt(journey), *made]
        case "positions":
            return [_positions(run)]
        case "prefill" if journey.scores:
            return [_scores(journey)]
        case "decode tokens" | "generate":
            return [_answer(journey)]
    return [f'<p class="asked">{html.escape(journey.question)}</p>'] if stage == ASK else []


def first_picture(journey: Journey) -> str:
    """Return a thumbnail of the request's first media item,
    which for a video shows the middle frame.
    """
    for medium in journey.trace.media[:1]:
        is_video = isinstance(medium, Video)
        image = Image.fromarray(medium.frames[len(medium.frames) // 2]) if is_video else medium
        alt = "The middle frame of the video in question" if is_video else "The image in question"
        return draw.picture(draw.small(image, 360), alt, width=180)
    return ""


def _medium(medium: Any, number: int) -> str:
    """Return a figure of an image, or of a video's frames."""
    if isinstance(medium, Video):
        count = len(medium.frames)
        shown = draw.spread(count, draw.SHOWN_FRAMES)
        frames = np.stack([draw.small(Image.fromarray(medium.frames[i]), 160) for i in shown])
        alt = f"{len(shown)} of the {count} sampled frames of video {number + 1}, in order"
        numbers = ", ".join(map(str, medium.indices[:12])) + ", ..." * (len(medium.indices) > 12)
        caption = f"<b>frames</b> {medium.frames.shape} uint8; numbers in the file: {numbers}"
        return draw.figure(draw.picture(draw.mosaic(frames, 3, gap=4), alt, width=draw.WIDE), caption)
    alt = f"Image {number + 1} as it was decoded, {medium.width} x {medium.height} pixels"
    caption = f"<b>image</b> {medium.width} x {medium.height} pixels, RGB"
    return draw.figure(draw.picture(draw.small(medium, 360), alt, width=240), caption)


def _patches(item: Any) -> Iterator[str]:
    """Yield figures of an item's patches: where they were cut,
    their order, and their values.
    """
    rows = item.pixel_values.float().cpu()
    layout = f"<b>layout</b> {html.escape(layout_text(item.layout))}"
    tiles = draw.as_tiles(rows)
    if tiles is not None and is_grid(item.layout):
        step = " of the first step" * (item.layout[0] > 1)
        yield draw.figure(_cut(tiles, item), f"{layout}; each patch{step} is labelled with the number of its row")
        yield draw.figure(_in_order(tiles, 12), "the same patches in the order of their rows")
    elif tiles is not None and hasattr(item.layout[0], "slices"):
        sizes = [size for group in item.layout for size in group.slices]
        yield draw.figure(_slices(tiles, sizes), f"{layout}; rows are ordered slice by slice, line by line")
    elif tiles is not None:
        yield draw.figure(_in_order(tiles, 16), f"{layout}; patches in the order of their rows")
    yield draw.tensor_figure("pixel_values", rows)


def _in_order(tiles: np.ndarray, across: int) -> str:
    """Return an image of the first patches, in row order."""
    shown = tiles[:SHOWN_TILES]
    alt = f"The first {len(shown)} of {len(tiles)} patches in the order of their rows, {across} per line"
    return draw.picture(draw.mosaic(shown, across), alt, width=draw.WIDE)


def _slices(tiles: np.ndarray, sizes: Sequence[tuple[int, int]]) -> str:
    """Return images of slices of (h, w) patches, each reassembled from its rows."""
    drawn, at = [], 0
    for number, (h, w) in enumerate(sizes[:SHOWN_SLICES], 1):
        alt = f"Slice {number} of {len(sizes)}, {h} x {w} patches"
        drawn.append(draw.picture(draw.mosaic(tiles[at : at + h * w], w), alt, width=110))
        at += h * w
    return f'<div class="slices">{"".join(drawn)}</div>'


def _cut(tiles: np.ndarray, item: Any) -> str:
    """Return the first step of a grid, patch by patch, with the number of each patch row."""
    _, h, w = item.layout
    places = merge_block_coordinates([(1, h, w)], spatial_merge_size=h // item.media_tokens.thw[1])
    order = torch.empty(h, w, dtype=torch.int64)
    order[tuple(places.T)] = torch.arange(h * w)
    if h * w > SHOWN_TILES:
        tiles = tiles[:, ::2, ::2] if h * w <= 4 * SHOWN_TILES else tiles[:, ::4, ::4]
    sheet = draw.mosaic(tiles[order.flatten()], w)
    label = f"A grid of {h} x {w} patches; {draw.in_words(order)}"
    side = tiles.shape[1] + 2
    parts = [f'<image href="{draw.address(sheet)}" width="{sheet.shape[1]}" height="{sheet.shape[0]}"/>']
    if h * w <= draw.NUMBERED:
        for (y, x), number in np.ndenumerate(order.numpy()):
            middle = f'x="{(x + 0.5) * side - 1}" y="{(y + 0.5) * side - 1}"'
            parts.append(f"<text {middle}>{number}</text>")
    look = f'role="img" aria-label="{html.escape(label)}" style="font-size:{side * 0.42:.1f}px"'
    size = f'viewBox="0 0 {sheet.shape[1]} {sheet.shape[0]}"'
    return f'<svg class="cut" {look} {size}>{"".join(parts)}</svg>'


def _plan(planned: Any, merged: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    """Yield a figure of every tensor in the metadata, including nested ones,
    and of the angles from positions and frequencies.
    """
    if not is_dataclass(planned):
        return
    found = {field.name: getattr(planned, field.name) for field in fields(planned)}
    orders: dict[str, Tensor] = {}
    for name, value in found.items():
        if is_dataclass(value):
            yield from _plan(value, merged)
        elif isinstance(value, Tensor):
            undone = [other for other, order in orders.items() if draw.are_inverse(order, value)]
            note = "".join(f"; the inverse of {other}" for other in undone)
            yield draw.figure("", draw.facts(name, value) + note) if undone else draw.tensor_figure(name, value, merged)
            orders |= {name: value} if draw.is_permutation(value) else {}
    positions, frequencies = found.get("positions"), found.get("frequencies")
    if isinstance(positions, Tensor) and isinstance(frequencies, Tensor) and positions.ndim == 2:
        yield _angles(positions, frequencies)


def _angles(positions_N2: Tensor, frequencies: Tensor) -> str:
    """Return a heat map of the cosine of each rotary pair's angle by position."""
    angles = (positions_N2[..., None] * frequencies).flatten(1)
    note = f"cosines of the angles (positions times frequencies), {tuple(angles.shape)}; one line per position"
    return draw.figure(draw.heat(angles.cos().cpu(), f"Heat map of the {note}"), f"<b>angles</b> {note}")


def _pruned(run: Any) -> list[str]:
    """Return each pruned item's kept tokens, or a note that nothing was pruned."""
    if all(mask is None for mask in run.keep_masks):
        count = sum(len(rows) for rows in run.embeds)
        return [f"<p>No pruning rate was set, so all {count} embeddings are kept.</p>"] if count else []
    found = []
    for i, mask in enumerate(run.keep_masks):
        if mask is None:
            continue
        caption = f"<b>keep mask</b> of item {i + 1} {tuple(mask.shape)} bool; {draw.in_numbers(mask)}"
        found.append(draw.figure(_kept(mask.cpu(), run.patches[i].media_tokens.thw, run.media[i], i), caption))
    return found


def _kept(mask: Tensor, thw: tuple[int, int, int], medium: Any, number: int) -> str:
    """Return the frames of a video, with the dropped cells crossed out."""
    t, h, w = thw
    shown, side = draw.spread(t, draw.SHOWN_FRAMES), 26
    grid, parts = mask.view(t, h, w), []
    for i, step in enumerate(shown):
        left = i * (w + 0.4) * side
        if isinstance(medium, Video):
            frame = Image.fromarray(medium.frames[min(step * len(medium.frames) // t, len(medium.frames) - 1)])
            size = f'width="{w * side}" height="{h * side}" preserveAspectRatio="none"'
            parts.append(f'<image href="{draw.address(draw.small(frame, 120))}" x="{left}" {size}/>')
        for y, x in (~grid[step]).nonzero().tolist():
            place = f'transform="translate({left + x * side:.1f} {y * side})"'
            parts.append(f'<rect {place} width="{side}" height="{side}"/><path {place} d="M8 8l10 10m0-10l-10 10"/>')
    counts = ", ".join(f"{int(grid[step].sum())}" for step in shown)
    label = f"Tokens of video {number + 1} kept per step, out of {h * w}: {counts}"
    return draw.svg("kept", label, int((len(shown) * (w + 0.4) - 0.4) * side), h * side, "".join(parts))


def _prompt(journey: Journey) -> str:
    """Return the prompt token by token; the embeddings of a media item are one box."""
    run = journey.trace
    spans = {span.offset: span.num_tokens for span in run.spans}
    ids = run.full_ids.tolist()
    boxes: list[str] = []
    place = 0
    while place < len(ids) and len(boxes) < SHOWN_TOKENS:
        count = spans.get(place, 1)
        if place in spans:
            kept = int(run.keep[place : place + count].sum())
            some = f"{kept} of {count}" if kept < count else f"{count}"
            boxes.append(f'<span class="rows">{some} embedding{"s" * (count > 1)}</span>')
        else:
            text = journey.decode([ids[place]]).replace("\n", LINE_END)
            boxes.append(f"<span>{html.escape(text) or '&nbsp;'}</span>")
        place += count
    more = "" if place == len(ids) else f" and {len(ids) - place} more"
    return draw.figure(f'<p class="prompt">{"".join(boxes)}{more}</p>', draw.facts("input_ids", run.input_ids))


@dataclass(frozen=True, slots=True)
class _Plot:
    """The pixel coordinates in a plot of positions against tokens."""

    tokens: int
    high: int  # the largest position
    left: int = 28
    top: int = 8
    width: int = draw.WIDE - 36
    height: int = 190

    def x(self, token: float) -> float:
        return self.left + token * self.width / max(self.tokens - 1, 1)

    def y(self, position: float) -> float:
        return self.top + self.height - position * self.height / self.high

    def shade(self, start: int, stop: int) -> str:
        """Return the shading of an image's or a video's tokens."""
        size = f'width="{self.x(stop) - self.x(start):.1f}" height="{self.height}"'
        return f'<rect x="{self.x(start - 0.5):.1f}" y="{self.top}" {size}/>'

    def text(self, x: float, y: float, anchor: str, text: str) -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{text}</text>'


def _positions(run: Any) -> str:
    """Return a plot of t, h and w, whose lines differ in width and dashes, not only in colour."""
    positions = run.positions.cpu()
    plot = _Plot(positions.shape[1], max(int(positions.max()), 1))
    before = [0, *run.keep.cpu().cumsum(0).tolist()]  # kept tokens before each token of the full prompt
    media = [(before[span.offset], before[span.offset + span.num_tokens]) for span in run.spans]
    parts = [plot.shade(start, stop) for start, stop in media if stop > start]
    bottom, right = plot.top + plot.height, plot.tokens - 1
    for i, ((axis, name, thick, dashes), line) in enumerate(zip(AXES, positions.tolist(), strict=True)):
        look = f'class="{axis}" stroke-width="{thick}" stroke-dasharray="{dashes}"'
        points = " ".join(f"{plot.x(token):.1f},{plot.y(position):.1f}" for token, position in enumerate(line))
        parts.append(f'<polyline {look} points="{points}"/>')
        start = plot.left + i * 108
        parts.append(f'<line {look} x1="{start}" x2="{start + 26}" y1="{bottom + 36}" y2="{bottom + 36}"/>')
        parts.append(plot.text(start + 32, bottom + 36, "start", f"{axis} {name}"))
    parts += [plot.text(plot.left - 4, plot.y(value), "end", str(value)) for value in (0, plot.high)]
    parts += [plot.text(plot.x(0), bottom + 16, "start", "token 0")]
    parts += [plot.text(plot.x(right), bottom + 16, "end", f"token {right}")] * (right > 0)
    label = f"Positions of {plot.tokens} tokens: t, h and w range from 0 to {plot.high}; media tokens are shaded"
    note = f"generated tokens continue at position {plot.tokens} + delta, with delta {run.delta}"
    drawn = draw.svg("positions", label, draw.WIDE, plot.height + 52, "".join(parts))
    return draw.figure(drawn, f"<b>positions</b> {tuple(positions.shape)}; {note}")


def _scores(journey: Journey) -> str:
    """Return a table of the most likely first tokens."""
    shares = journey.scores[0].softmax(-1)
    best = shares.topk(min(5, len(shares)))
    lines = "".join(
        f'<tr><td class="token">{_word(journey, token)}</td><td class="number">{share:.1%}</td>'
        f'<td class="bar"><span style="width:{max(share, 0.005):.1%}"></span></td></tr>'
        for share, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    caption = f"<b>scores</b> ({len(shares)},); {draw.in_numbers(journey.scores[0])}; above: the most likely tokens"
    return draw.figure(f'<table><tr><th>first token</th><th colspan="2">probability</th></tr>{lines}</table>', caption)


def _answer(journey: Journey) -> str:
    """Return a table of new tokens, with ids and, if they are known, probabilities."""
    ids = journey.trace.token_ids[:SHOWN_TOKENS]
    shares = [float(s.softmax(-1)[i]) for s, i in zip(journey.scores, ids, strict=False)]
    lines = "".join(
        f'<tr><td class="number">{token}</td><td class="token">{_word(journey, token)}</td>'
        f'<td class="number">{f"{shares[i]:.1%}" if i < len(shares) else ""}</td></tr>'
        for i, token in enumerate(ids)
    )
    table = f"<table><tr><th>id</th><th>token</th><th>probability</th></tr>{lines}</table>"
    return draw.figure(table, f"<b>text</b> {html.escape(journey.trace.text)}")


def _word(journey: Journey, token: int) -> str:
    text = journey.decode([token])
    return html.escape(text.strip() or repr(text)[1:-1] or "nothing")
