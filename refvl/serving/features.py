"""Images as grids of features.

    feature_map(image)                 (t, h, w, D)    the embeddings, each at its token's location in the image
    feature_map(image, blocks=[3, 7])  (t, H, W, E)    for each block, every patch's state after that block
    feature_map([image, image])        a list of maps  one per item

MiniCPM-V and Step3-VL cut an image into slices or crops; MiniCPM-V also cuts a video into frames.
For these families, `feature_map` returns a list of (box, map), one per slice, crop or frame, in the
encoder's order.

Shape suffixes: t steps in time, h x w tokens, H x W patches, N patches of all cuts, D the language
model's width, E the tower's.
"""

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from math import isqrt
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from refvl.checks import is_grid
from refvl.encoders.tower import send_rows
from refvl.pixels.crops import CropLayout, plan_crops
from refvl.pixels.media import is_video
from refvl.pixels.patches import Patches

Box = tuple[float, float, float, float]  # (left, top, right, bottom) in pixels of the image
Size = tuple[int, int, int]  # (t, h, w)
Module = TypeVar("Module", bound=nn.Module)


class Cut(NamedTuple):
    """A part of a media item that the tower reads as one grid."""

    box: Box  # a crop may extend beyond the image, where pixels are black
    patches: Size
    tokens: Size


@torch.inference_mode()
def feature_map(model: Any, medium: Any, *, blocks: Sequence[int] | None = None) -> Any:
    """Return an image or video as a grid of features, (t, h, w, D): the result of `encode` without DeepStack features.

    medium: an image or a video; for a list of items, the result is a list with one map per item. A
    path with a video's suffix, an array with four dimensions, a `Video` and a tuple of frames count
    as videos. The encoder runs in inference mode; for gradients, call `model.encoder`
    (docs/train.md). blocks: the tower blocks, with -1 for the last. With blocks, the result for an
    item is a list with one map per block, (t, H, W, E): the states after that block, with patches
    in row-major order. Models that cut images return a list of (box, map) instead of a single map.
    The queries of MiniCPM-V 2.5 to 4.5 have no location in the image, so the map of a slice is
    (1, 1, Q, D). Raises ValueError or TypeError for media that cannot be read, or for blocks that
    do not exist.
    """
    if isinstance(medium, list):
        return [feature_map(model, item, blocks=blocks) for item in medium]
    depth = len(list(model.encoder.blocks))
    if blocks is not None and not all(type(i) is int and -depth <= i < depth for i in blocks):
        raise ValueError(f"blocks: expected indices of the tower's {depth} blocks, got {blocks!r}")
    kind = "videos" if is_video(medium) else "images"
    [patches] = model.processor.patchify(model.processor.decode(model.processor.messages("", **{kind: [medium]})))
    cuts = cuts_of(model, patches)
    boxes = None if is_grid(patches.layout) else [cut.box for cut in cuts]
    if blocks is None:
        record = model.record()
        model.encode_rows(record, [patches.rows], [patches.layout], progress=False)
        [rows_MW] = record.embeds
        rows_MD = rows_MW[:, : getattr(model.encoder.config, "out_hidden_size", None)]  # DeepStack features follow
        return _as_map(rows_MD, [cut.tokens for cut in cuts], boxes)
    m = getattr(model.encoder.config, "spatial_merge_size", 1)
    maps = []
    for x_NE in block_states(model.encoder, patches, [i % depth for i in blocks]):
        side = isqrt(len(patches.rows) // len(x_NE))  # 2 after MiniCPM-V 4.6's fold
        sizes = [(t, h // side, w // side) for t, h, w in (cut.patches for cut in cuts)]
        maps.append(_as_map(_in_reading_order(x_NE, cuts[0], m), sizes, boxes))
    return maps


def cuts_of(model: Any, patches: Patches) -> list[Cut]:
    """Return the parts of an item that the tower reads as grids, in the order of its rows."""
    medium, layout, tokens = patches.source, patches.layout, patches.media_tokens
    width, height = medium.size if isinstance(medium, Image.Image) else medium.frames.shape[2:0:-1]
    whole = (0, 0, width, height)
    if is_grid(layout):
        return [Cut(whole, layout, tokens.thw)]
    if isinstance(layout, CropLayout):
        plan = plan_crops(width, height, model.processor.image_config)
        x, y = (padded / side for padded, side in zip(plan.padded, plan.canvas, strict=True))
        boxes = [(left * x, top * y, right * x, bottom * y) for left, top, right, bottom in plan.boxes]
        sides = [model.encoder.crop_side] * layout.crops + [model.encoder.image_side]
        extents = [(1, side, side) for side in sides]
        return list(map(Cut, [*boxes, (0, 0, *plan.padded)], extents, tokens.runs))
    columns, rows = getattr(tokens, "grid", None) or (0, 0)
    x, y = width / max(1, columns), height / max(1, rows)
    slices = [(c * x, r * y, (c + 1) * x, (r + 1) * y) for r in range(rows) for c in range(columns)]
    boxes = [whole, *slices] if isinstance(medium, Image.Image) else [whole] * len(layout)
    groups = [(len(group.slices), *group.slices[0]) for group in layout]
    if sizes := getattr(tokens, "sizes", None):  # from 4.6 on, tokens have locations in a slice
        return list(map(Cut, boxes, groups, [(1, h, w) for h, w in sizes]))
    side = getattr(model.encoder.resampler, "grid_size", None)  # in version 2.0, the queries form a square
    of_slice = (1, side, side) if side else tokens.runs[0]
    return [Cut(box, size, of_slice) for box, size in zip(boxes, groups, strict=True)]


def block_states(encoder: Any, patches: Patches, blocks: Sequence[int]) -> list[Tensor]:
    """Return the states after each of these blocks, (N, E), in the order of the patch rows."""
    watched = share_weights(encoder)
    kept: dict[int, list[Tensor]] = {i: [] for i in blocks}
    for i, block in enumerate(watched.blocks):
        if i in kept:
            block.register_forward_hook(partial(keep_output, kept[i]))
    metadata = watched.plan_checked([patches.layout])
    watched(send_rows([patches.rows], watched), metadata=metadata)
    places = watched.block_rows(metadata)
    return [in_patch_order(kept[i], places) for i in blocks]


def share_weights(module: Module) -> Module:
    """Copy a module: submodules, hooks and configs are copied, but tensors are shared."""
    return copy.deepcopy(module, {id(x): x for x in itertools.chain(module.parameters(), module.buffers())})


def keep_output(states: list[Tensor], block: nn.Module, args: tuple, output: Tensor) -> None:
    """Append the output of a block to `states`; with `states` bound, this function is a forward hook."""
    states.append(output)


def first_rows(places: Tensor, lengths: list[int]) -> Tensor:
    """Return the patch index of each row in a block; after a fold, the index of the first patch in each window."""
    return places[:: len(places) // sum(lengths)]


def in_patch_order(runs: list[Tensor], rows: list[Tensor]) -> Tensor:
    """Return states without class tokens, (N, E) in patch order; after a fold, (N / 4, E), ordered by first patch."""
    state = torch.cat(runs)
    places = torch.cat([first_rows(places, [len(run)]) for run, places in zip(runs, rows, strict=True)])
    is_patch = places >= 0
    return state[is_patch][places[is_patch].argsort()]


def _in_reading_order(x_NE: Tensor, cut: Cut, m: int) -> Tensor:
    """Reorder the patches of m x m merge blocks to row-major order, which they already have without merging."""
    if m == 1:
        return x_NE
    t, h, w = cut.patches
    return x_NE.view(t, h // m, w // m, m, m, -1).transpose(2, 3).flatten(0, 4)


def _as_map(rows: Tensor, sizes: Sequence[Size], boxes: Sequence[Box] | None) -> Any:
    parts = rows.split([t * h * w for t, h, w in sizes])
    maps = [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]
    return maps[0] if boxes is None else list(zip(boxes, maps, strict=True))
