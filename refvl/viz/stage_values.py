"""What each stage of a run made, as figures of HTML: shapes, some numbers, a small picture. Drawn, never computed here.

values          a stage of a `Journey` -> its figures
tensor_figure   any tensor: its name, shape and numbers, and the picture that fits what it holds
"""

import base64
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from math import isqrt
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import to_hex
from PIL import Image
from torch import Tensor

from refvl.pixels.media import Video
from refvl.positions import invert_permutation, merge_block_coordinates
from refvl.study.comparison import is_grid
from refvl.study.journey import ASK, Journey
from refvl.study.report import layout_text
from refvl.viz.style import SEQUENCE_CMAP, SEQUENCE_RANGES, ink_on

WIDE, NARROW = 360, 170  # pixels of the page that a picture takes at most, and if another stands beside it
SHOWN_TILES, SHOWN_SLICES, SHOWN_FRAMES, SHOWN_TOKENS, SHOWN_ITEMS = 320, 12, 6, 160, 2
NUMBERED = 64  # cells of a picture that are small enough to lose their numbers begin here
HEAT_ROWS, HEAT_COLUMNS = 48, 120
LINE_END = "\N{RETURN SYMBOL}"
AXES = (("t", "time", 5.5, "none"), ("h", "height", 3.2, "7 4"), ("w", "width", 2.4, "2 3"))  # width of line, dashes


def values(journey: Journey, stage: str) -> list[str]:
    """The figures of a stage; none for one that made nothing to look at, or that let it go."""
    run = journey.trace
    match stage:
        case "decode media":
            return [_medium(medium, i) for i, medium in enumerate(run.media[:SHOWN_ITEMS])]
        case "patchify":
            return [figure for item in run.patches[:SHOWN_ITEMS] for figure in _patches(item)]
        case "plan":
            merged = [item.merged.thw for item in run.patches]
            return [figure for planned in run.metadata[:SHOWN_ITEMS] for figure in _plan(planned, merged)]
        case "encode":
            return [tensor_figure(f"embeddings of item {i + 1}", x) for i, x in enumerate(run.embeds[:SHOWN_ITEMS])]
        case "prune":
            return _pruned(run)
        case "merge":
            found = [("inputs_embeds", run.inputs_embeds), ("deepstack", run.deepstack)]
            made = [tensor_figure(name, x) for name, x in found if x is not None and x.numel()]
            return [_prompt(journey), *made]
        case "positions":
            return [_positions(run)]
        case "prefill" if journey.scores:
            return [_scores(journey)]
        case "decode tokens" | "generate":
            return [_answer(journey)]
    return [f'<p class="asked">{html.escape(journey.question)}</p>'] if stage == ASK else []


def first_picture(journey: Journey) -> str:
    """The first picture that was asked about, or a frame from the middle of the first video, small."""
    for medium in journey.trace.media[:1]:
        is_video = isinstance(medium, Video)
        image = Image.fromarray(medium.frames[len(medium.frames) // 2]) if is_video else medium
        alt = "The middle frame of the video in question" if is_video else "The picture in question"
        return picture(_small(image, 360), alt, width=180)
    return ""


def _figure(drawn: str, caption: str) -> str:
    """A picture with its caption; two narrow ones may stand side by side."""
    width = re.match(r'<[^>]* width="(\d+)"', drawn)
    narrow = ' class="narrow"' if width and int(width[1]) <= NARROW else ""
    return f"<figure{narrow}>{drawn}<figcaption>{caption}</figcaption></figure>"


def _medium(medium: Any, number: int) -> str:
    """A picture, or the frames of a video."""
    if isinstance(medium, Video):
        count = len(medium.frames)
        shown = _spread(count, SHOWN_FRAMES)
        frames = np.stack([_small(Image.fromarray(medium.frames[i]), 160) for i in shown])
        alt = f"{len(shown)} of the {count} sampled frames of video {number + 1}, in their order"
        numbers = ", ".join(map(str, medium.indices[:12])) + ", ..." * (len(medium.indices) > 12)
        caption = f"<b>frames</b> {medium.frames.shape} uint8; taken from the file: {numbers}"
        return _figure(picture(mosaic(frames, 3, gap=4), alt, width=WIDE), caption)
    alt = f"Image {number + 1} as it was decoded, {medium.width} x {medium.height} pixels"
    caption = f"<b>image</b> {medium.width} x {medium.height} pixels, RGB"
    return _figure(picture(_small(medium, 360), alt, width=240), caption)


def _patches(item: Any) -> Iterator[str]:
    """The rows of an item in the order in which the tower reads them, and where on its grid each was cut."""
    rows = item.pixel_values.float().cpu()
    tiles = as_tiles(rows)
    layout = html.escape(layout_text(item.layout))
    if tiles is not None and is_grid(item.layout):
        step = " of the first step" * (item.layout[0] > 1)
        yield _figure(_cut(tiles, item), f"<b>layout</b> {layout}; each patch{step} has the number of its row")
        alt = f"The first {min(len(tiles), SHOWN_TILES)} of {len(tiles)} patches in the order of the rows, 12 to a line"
        yield _figure(picture(mosaic(tiles[:SHOWN_TILES], 12), alt, width=WIDE), "the same rows in their order")
    elif tiles is not None and hasattr(item.layout[0], "slices"):
        sizes = [size for group in item.layout for size in group.slices]
        yield _figure(_slices(tiles, sizes), f"<b>layout</b> {layout}; rows go slice by slice, line by line")
    elif tiles is not None:
        alt = f"The first {min(len(tiles), SHOWN_TILES)} of {len(tiles)} patches in the order of the rows, 16 to a line"
        yield _figure(
            picture(mosaic(tiles[:SHOWN_TILES], 16), alt, width=WIDE), f"<b>layout</b> {layout}; rows in order"
        )
    yield tensor_figure("pixel_values", rows)


def _slices(tiles: np.ndarray, sizes: Sequence[tuple[int, int]]) -> str:
    """Slices of (h, w) patches, each put together again from its rows."""
    drawn, at = [], 0
    for number, (h, w) in enumerate(sizes[:SHOWN_SLICES], 1):
        alt = f"Slice {number} of {len(sizes)}, {h} x {w} patches"
        drawn.append(picture(mosaic(tiles[at : at + h * w], w), alt, width=110))
        at += h * w
    return f'<div class="slices">{"".join(drawn)}</div>'


def as_tiles(rows_NK: Tensor) -> np.ndarray | None:
    """(N, 3 * frames * P * P) -> (N, P, P, 3) uint8: the first frame, stretched to 0 ... 255; None for other rows."""
    for frames in (1, 2):
        side = isqrt(rows_NK.shape[1] // (3 * frames))
        if len(rows_NK) and rows_NK.shape[1] == 3 * frames * side**2:
            first = rows_NK.view(-1, 3, frames, side, side)[:, :, 0].permute(0, 2, 3, 1).numpy()
            low, high = first.min((0, 1, 2)), first.max((0, 1, 2))
            return np.uint8(255 * (first - low) / np.maximum(high - low, 1e-9))
    return None


def mosaic(tiles: np.ndarray, across: int, *, gap: int = 2) -> np.ndarray:
    """(N, height, width, 3) -> one picture with an alpha channel: transparent gaps, `across` tiles to a line."""
    count, h, w, _ = tiles.shape
    down = -(-count // across)
    sheet = np.zeros((down * (h + gap) - gap, min(across, count) * (w + gap) - gap, 4), np.uint8)
    for i, tile in enumerate(tiles):
        top, left = i // across * (h + gap), i % across * (w + gap)
        sheet[top : top + h, left : left + w, :3] = tile
        sheet[top : top + h, left : left + w, 3] = 255
    return sheet


def _cut(tiles: np.ndarray, item: Any) -> str:
    """The first frame of a grid, patch by patch, with the row of each."""
    _, h, w = item.layout
    places = merge_block_coordinates([(1, h, w)], spatial_merge_size=h // item.merged.thw[1])
    order = torch.empty(h, w, dtype=torch.int64)
    order[tuple(places.T)] = torch.arange(h * w)
    if h * w > SHOWN_TILES:
        tiles = tiles[:, ::2, ::2] if h * w <= 4 * SHOWN_TILES else tiles[:, ::4, ::4]
    sheet = mosaic(tiles[order.flatten()], w)
    label = f"A grid of {h} x {w} patches; {_in_words(order)}"
    side = tiles.shape[1] + 2
    numbers = [
        f'<text x="{(x + 0.5) * side - 1}" y="{(y + 0.5) * side - 1}">{int(order[y, x])}</text>'
        for y in range(h)
        for x in range(w)
        if h * w <= NUMBERED
    ]
    height, width = sheet.shape[:2]
    return (
        f'<svg class="cut" role="img" aria-label="{html.escape(label)}" viewBox="0 0 {width} {height}" '
        f'style="font-size:{side * 0.42:.1f}px"><image href="{address(sheet)}" width="{width}" height="{height}"/>'
        f"{''.join(numbers)}</svg>"
    )


def _in_words(numbers_HW: Tensor) -> str:
    """A table of numbers as a sentence, its first lines if it is long."""
    lines = [", ".join(map(str, line)) for line in numbers_HW[:6, :12].tolist()]
    return "rows " + "; ".join(lines) + (" ..." if numbers_HW.numel() > 72 else "")


def _plan(planned: Any, merged: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    """Every tensor of the metadata, nested ones too, and the angles that its positions and frequencies lead to."""
    if not is_dataclass(planned):
        return
    found = {field.name: getattr(planned, field.name) for field in fields(planned)}
    orders: dict[str, Tensor] = {}
    for name, value in found.items():
        if is_dataclass(value):
            yield from _plan(value, merged)
        elif isinstance(value, Tensor):
            of = [other for other, x in orders.items() if _are_inverse(x, value)]
            yield (
                _figure("", f"{_facts(name, value)}; the inverse of {of[0]}")
                if of
                else tensor_figure(name, value, merged)
            )
            orders |= {name: value} if _is_permutation(value) else {}
    positions, frequencies = found.get("positions"), found.get("frequencies")
    if isinstance(positions, Tensor) and isinstance(frequencies, Tensor) and positions.ndim == 2:
        angles = (positions[..., None] * frequencies).flatten(1)
        note = f"cosines of the angles, positions times frequencies {tuple(angles.shape)}: a row for each position"
        yield _figure(heat(angles.cos(), f"Heat map of the {note}"), f"<b>angles</b> {note}")


def tensor_figure(name: str, x: Tensor, merged: Sequence[tuple[int, int, int]] = ()) -> str:
    """A tensor's name, shape, type and numbers, with a picture.

    Cumulative lengths become segments, a permutation an order (on the grid of `merged` (t, h, w) tokens if it has as
    many), other tensors a heat map.
    """
    x = x.detach().cpu()
    caption = _facts(name, x)
    if x.numel() == 0:
        return _figure("", caption)
    if _is_permutation(x):
        drawn = _order(x, name, merged)
        return _figure(drawn, caption + "; in each cell the token's place" * drawn.startswith("<svg"))
    if _is_whole(x) and x[0] == 0 and bool((x.diff() > 0).all()):
        return _figure(_segments(x, name), caption)
    flat = x[None] if x.ndim == 1 else x.flatten(1)
    flat = flat.T if flat.shape[1] <= 3 < flat.shape[0] else flat
    low, high = (f"{float(v):.3g}" for v in (flat.min(), flat.max()))
    return _figure(heat(flat, f"Heat map of {name}, from {low} (dark) to {high} (bright)"), caption)


def in_numbers(x: Tensor) -> str:
    """The first whole numbers, or the range of others."""
    if x.numel() == 0:
        return "empty"
    if x.dtype == torch.bool:
        return f"{int(x.sum())} of {x.numel()} are true"
    if not x.is_floating_point():
        first = x.flatten()[:10].tolist()
        return ", ".join(map(str, first)) + ", ..." * (x.numel() > 10)
    return f"{float(x.min()):.3g} to {float(x.max()):.3g}, mean {float(x.float().mean()):.3g}"


def _facts(name: str, x: Tensor) -> str:
    kind = str(x.dtype).removeprefix("torch.")
    return f"<b>{html.escape(name)}</b> {tuple(x.shape)} {kind}; {in_numbers(x)}"


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor is a list of at least two whole numbers."""
    return x.ndim == 1 and len(x) > 1 and not x.is_floating_point() and x.dtype != torch.bool


def _is_permutation(x: Tensor) -> bool:
    return _is_whole(x) and torch.equal(x.cpu().sort().values.long(), torch.arange(len(x)))


def _are_inverse(one: Tensor, other: Tensor) -> bool:
    return _is_permutation(other) and one.shape == other.shape and torch.equal(invert_permutation(one), other.long())


def _segments(lengths: Tensor, name: str) -> str:
    """(segments + 1,) cumulative lengths as boxes."""
    edges = lengths.tolist()
    if len(edges) > 200:
        return heat(lengths[None].float(), f"{name}: {len(edges) - 1} segments, cumulative")
    scale, height = WIDE / edges[-1], 22
    boxes = []
    for start, stop in pairwise(edges):
        width = (stop - start) * scale
        boxes.append(f'<rect x="{start * scale:.1f}" y="1" width="{max(width - 1, 0.5):.1f}" height="{height - 2}"/>')
        if width > 16:
            boxes.append(f'<text x="{start * scale + width / 2:.1f}" y="{height / 2}">{stop - start}</text>')
    sizes = ", ".join(str(stop - start) for start, stop in pairwise(edges[:13]))
    label = f"{name}: {len(edges) - 1} segments of {sizes}" + " ..." * (len(edges) > 13)
    return _svg("segments", label, WIDE, height, "".join(boxes))


def _order(order: Tensor, name: str, merged: Sequence[tuple[int, int, int]]) -> str:
    """A permutation: in each cell of the grid its place in the order."""
    places = invert_permutation(order.long())
    fits = [thw for thw in merged if thw[0] * thw[1] * thw[2] == len(order)]
    if not fits or len(order) > 4 * NUMBERED:
        return heat(places[None].float(), f"{name}: the place of each of {len(order)} rows in the order")
    t, h, w = fits[0]
    frames, side = min(t, SHOWN_FRAMES), 26
    grid = places.view(t, h, w)[:frames]
    colors = sequence_hex(len(order))
    cells = []
    for f, y, x in np.ndindex(frames, h, w):
        left, top, place = (f * (w + 0.5) + x) * side, y * side, int(grid[f, y, x])
        cells.append(f'<rect x="{left}" y="{top}" width="{side - 1}" height="{side - 1}" fill="{colors[place]}"/>')
        ink = ink_on(colors[place])
        cells.append(f'<text x="{left + side / 2}" y="{top + side / 2}" fill="{ink}">{place}</text>')
    label = f"{name}: the place of each token of a {t} x {h} x {w} grid in the order; {_in_words(grid[0])}"
    return _svg("order", label, int((frames * (w + 0.5) - 0.5) * side), h * side, "".join(cells))


def _pruned(run: Any) -> list[str]:
    """What stays of each video, or that nothing was asked for."""
    if all(mask is None for mask in run.keep_masks):
        count = sum(len(rows) for rows in run.embeds)
        return [f"<p>No pruning rate was given: all {count} embeddings stay.</p>"] if count else []
    found = []
    for i, mask in enumerate(run.keep_masks):
        if mask is None:
            continue
        caption = f"<b>keep mask</b> of item {i + 1} {tuple(mask.shape)} bool; {in_numbers(mask)}"
        found.append(_figure(_kept(mask.cpu(), run.patches[i].merged.thw, run.media[i], i), caption))
    return found


def _kept(mask: Tensor, thw: tuple[int, int, int], medium: Any, number: int) -> str:
    """The frames of a video; a crossed cell is dropped."""
    t, h, w = thw
    shown, side = _spread(t, SHOWN_FRAMES), 26
    grid, parts = mask.view(t, h, w), []
    for i, step in enumerate(shown):
        left = i * (w + 0.4) * side
        if isinstance(medium, Video):
            frame = Image.fromarray(medium.frames[min(step * len(medium.frames) // t, len(medium.frames) - 1)])
            size = f'width="{w * side}" height="{h * side}" preserveAspectRatio="none"'
            parts.append(f'<image href="{address(_small(frame, 120))}" x="{left}" {size}/>')
        for y, x in (~grid[step]).nonzero().tolist():
            place = f'transform="translate({left + x * side:.1f} {y * side})"'
            parts.append(f'<rect {place} width="{side}" height="{side}"/><path {place} d="M8 8l10 10m0-10l-10 10"/>')
    counts = ", ".join(f"{int(grid[step].sum())}" for step in shown)
    label = f"Tokens kept of video {number + 1}, {h * w} to a step: {counts}"
    return _svg("kept", label, int((len(shown) * (w + 0.4) - 0.4) * side), h * side, "".join(parts))


def _prompt(journey: Journey) -> str:
    """The prompt token by token; what stands for media is one box."""
    run = journey.trace
    inside = {
        place: i for i, span in enumerate(run.spans) for place in range(span.offset, span.offset + span.num_tokens)
    }
    boxes, place, ids = [], 0, run.full_ids.tolist()
    while place < len(ids) and len(boxes) < SHOWN_TOKENS:
        if place in inside:
            span = run.spans[inside[place]]
            kept = int(run.keep[place : place + span.num_tokens].sum())
            some = f"{kept} of {span.num_tokens}" if kept < span.num_tokens else f"{span.num_tokens}"
            boxes.append(f'<span class="rows">{some} embedding{"s" * (span.num_tokens > 1)}</span>')
            place += span.num_tokens
        else:
            text = journey.decode([ids[place]]).replace("\n", LINE_END)
            boxes.append(f"<span>{html.escape(text) or '&nbsp;'}</span>")
            place += 1
    more = "" if place == len(ids) else f" and {len(ids) - place} more"
    caption = f"<b>input_ids</b> {tuple(run.input_ids.shape)} {str(run.input_ids.dtype).removeprefix('torch.')}"
    return _figure(f'<p class="prompt">{"".join(boxes)}{more}</p>', f"{caption}; {in_numbers(run.input_ids)}")


def _positions(run: Any) -> str:
    """t, h and w along the prompt. Lines differ in width and dashes, so that they can be told apart without colours."""
    positions = run.positions.cpu()
    count, high = positions.shape[1], max(int(positions.max()), 1)
    left, top, width, height = 28, 8, WIDE - 36, 190

    def x(i: float) -> float:
        return left + i * width / max(count - 1, 1)

    def y(p: float) -> float:
        return top + height - p * height / high

    kept = run.keep.cpu()
    before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)]).tolist()
    parts = []
    for span in run.spans:
        start, stop = before[span.offset], before[span.offset + span.num_tokens]
        if stop > start:
            parts.append(
                f'<rect x="{x(start - 0.5):.1f}" y="{top}" width="{x(stop) - x(start):.1f}" height="{height}"/>'
            )
    for (axis, _, thick, dashes), line in zip(AXES, positions.tolist(), strict=True):
        points = " ".join(f"{x(i):.1f},{y(p):.1f}" for i, p in enumerate(line))
        parts.append(f'<polyline class="{axis}" stroke-width="{thick}" stroke-dasharray="{dashes}" points="{points}"/>')
    parts += [
        f'<text x="{left - 4}" y="{y(0):.0f}" text-anchor="end">0</text>',
        f'<text x="{left - 4}" y="{y(high):.0f}" text-anchor="end">{high}</text>',
        f'<text x="{x(0):.0f}" y="{top + height + 16}" text-anchor="start">token 0</text>',
        f'<text x="{x(count - 1):.0f}" y="{top + height + 16}" text-anchor="end">token {count - 1}</text>',
    ]
    for i, (axis, name, thick, dashes) in enumerate(AXES):
        at = left + i * 108
        line = f'<line class="{axis}" x1="{at}" x2="{at + 26}" y1="{top + height + 36}" y2="{top + height + 36}" '
        parts.append(f'{line}stroke-width="{thick}" stroke-dasharray="{dashes}"/>')
        parts.append(f'<text x="{at + 32}" y="{top + height + 36}" text-anchor="start">{axis} {name}</text>')
    label = f"Positions of {count} tokens: t, h and w run from 0 to {high}; shaded: tokens of images and videos"
    drawn = _svg("positions", label, WIDE, height + 52, "".join(parts))
    caption = f"<b>positions</b> {tuple(positions.shape)}; generated tokens go on at {count} + delta, delta {run.delta}"
    return _figure(drawn, caption)


def _scores(journey: Journey) -> str:
    """The likeliest first tokens."""
    shares = journey.scores[0].softmax(-1)
    best = shares.topk(min(5, len(shares)))
    lines = "".join(
        f'<tr><td class="token">{_word(journey, token)}</td><td class="number">{share:.1%}</td>'
        f'<td class="bar"><span style="width:{max(share, 0.005):.1%}"></span></td></tr>'
        for share, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    caption = f"<b>scores</b> ({len(shares)},); {in_numbers(journey.scores[0])}; above, the best as probabilities"
    return _figure(f'<table><tr><th>first token</th><th colspan="2">probability</th></tr>{lines}</table>', caption)


def _answer(journey: Journey) -> str:
    """Every new token with its id and, if it is known, its probability."""
    ids = journey.trace.token_ids[:SHOWN_TOKENS]
    shares = [float(s.softmax(-1)[i]) for s, i in zip(journey.scores, ids, strict=False)]
    lines = "".join(
        f'<tr><td class="number">{token}</td><td class="token">{_word(journey, token)}</td>'
        f'<td class="number">{f"{shares[i]:.1%}" if i < len(shares) else ""}</td></tr>'
        for i, token in enumerate(ids)
    )
    table = f"<table><tr><th>id</th><th>token</th><th>probability</th></tr>{lines}</table>"
    return _figure(table, f"<b>text</b> {html.escape(journey.trace.text)}")


def _word(journey: Journey, token: int) -> str:
    text = journey.decode([token])
    return html.escape(text.strip() or repr(text)[1:-1] or "nothing")


def heat(x: Tensor, alt: str) -> str:
    """A 2-D tensor as an image of coloured cells; of a large one, evenly spaced rows and columns."""
    x = x.float()[_spread(x.shape[0], HEAT_ROWS)][:, _spread(x.shape[1], HEAT_COLUMNS)].nan_to_num()
    low, high = x.min(), x.max()
    start, stop = SEQUENCE_RANGES["light"]
    scaled = start + (stop - start) * (x - low) / (high - low).clamp(min=1e-9)
    colors = np.uint8(255 * plt.get_cmap(SEQUENCE_CMAP)(scaled.numpy())[..., :3])
    rows, columns = x.shape
    width = min(WIDE, 14 * columns)
    height = max(min(rows * max(width // columns, 3), 170), 14)
    return picture(colors, alt, width=width, height=height)


def picture(pixels: np.ndarray, alt: str, *, width: int | None = None, height: int | None = None) -> str:
    """(height, width, 3 or 4) uint8 as an image of the page, of this size there."""
    width = width or min(WIDE, pixels.shape[1])
    height = height or max(round(width * pixels.shape[0] / pixels.shape[1]), 1)
    return f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" src="{address(pixels)}">'


def address(pixels: np.ndarray) -> str:
    """The `data:` address of an image: PNG, or WebP where that is smaller, as it is for photographs."""
    image = Image.fromarray(pixels)
    png, webp = io.BytesIO(), io.BytesIO()
    image.save(png, "png", optimize=True)
    if image.width * image.height > 4000:
        image.save(webp, "webp", quality=80)
    kind, raw = ("webp", webp.getvalue()) if 0 < len(webp.getvalue()) < len(png.getvalue()) else ("png", png.getvalue())
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def sequence_hex(count: int) -> list[str]:
    """Colours from first to last."""
    return [to_hex(c) for c in plt.get_cmap(SEQUENCE_CMAP)(np.linspace(*SEQUENCE_RANGES["light"], max(count, 1)))]


def _svg(kind: str, label: str, width: int, height: int, inside: str) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{min(width, WIDE)}"'
    return f'<svg class="{kind}" role="img" aria-label="{html.escape(label)}" {size}>{inside}</svg>'


def _small(image: Image.Image, side: int) -> np.ndarray:
    copy = image.convert("RGB")
    copy.thumbnail((side, side))
    return np.asarray(copy)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of 0 ... count - 1, evenly spaced."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
