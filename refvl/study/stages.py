"""Nine functions on the path of Qwen2.5-VL that you can write yourself: `model.with_stages(window_index=mine)`.

    target_size  patch_rows               pixels      the size of a media item, and its patches
    window_index  rotate  attend  fold    tower       which patches attend to each other, and the order of the tokens
    mrope  evs                            positions   the positions of tokens, and the video tokens that are kept
    replay                                graphs      one recording for batches of all sizes

`trace(replace=...)` changes a result, whereas here your function runs in place of the library's,
with the same arguments. notebooks/mine.py specifies each
function.

Sizes: T frames, C channels; N patches, M tokens of m x m patches, H heads of K; L tokens in a
prompt. Grids in tokens.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from refvl.attention import Segments, plan_segments
from refvl.encoders.qwen2_5_vl import Qwen2_5_VisionTransformer, VisionAttention
from refvl.encoders.tower import to_device
from refvl.graphs.buffers import fields_to_fill, metadata_tensors
from refvl.graphs.manager import EncoderGraphManager
from refvl.pipeline import Pipeline
from refvl.pixels.media import Video
from refvl.pixels.patches import PatchConfig, fit_budget
from refvl.positions.rotary import apply_rotary, rotary_cos_sin, rotary_frequencies
from refvl.processors.qwen2_5_vl import Qwen2_5_VLProcessor
from refvl.serving.features import share_weights


def rotate(x: Tensor, row: Tensor, column: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotate x (N, H, K) by the row and the column of each patch, (N,) each."""
    frequencies = rotary_frequencies(x.shape[-1], theta=theta, device=x.device)
    return apply_rotary(x, *rotary_cos_sin(torch.stack([row, column], dim=1), frequencies))


def fold(x: Tensor, merge: int, project: Callable[[Tensor], Tensor], inverse: Tensor) -> Tensor:
    """Turn (N, E) patches in window order into (M, D) tokens in reading order."""
    return project(x.reshape(len(x) // merge**2, -1))[inverse]


@dataclass(frozen=True)
class Stages:
    """The nine functions. None means that the library's own function runs; the defaults of `rotate`
    and `fold` are plain forms of the library's functions.
    """

    # height, width, factor, min_pixels, max_pixels -> height, width
    target_size: Callable = fit_budget
    # pixels (T, C, H, W), patch, merge, steps -> (N, C * steps * patch * patch)
    patch_rows: Callable | None = None
    # grids, side -> index (M,), inverse (M,), lengths
    window_index: Callable | None = None
    # x (N, H, K), row, column -> (N, H, K)
    rotate: Callable = rotate
    # q, k, v (N, H, K), lengths -> (N, H, K)
    attend: Callable | None = None
    # x (N, E), merge, project, inverse -> (M, D)
    fold: Callable = fold
    # length, [(offset, t, h, w, factor), ...] -> positions (3, length), delta
    mrope: Callable | None = None
    # embeds (M, D), steps, rate, positions, offset -> keep (L,), the kept positions, delta
    evs: Callable | None = None
    # graph, buffers, rules, [(contents, tokens), ...] -> [(tokens, D), ...]
    replay: Callable | None = None


@dataclass(frozen=True)
class StagedConfig(PatchConfig):
    """The settings for images or videos, with your `target_size`."""

    stages: Any = None

    def target_size(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        return self.stages.target_size(height, width, self.factor, self.min_pixels, self.frame_budget(num_frames))


class StagedProcessor(Qwen2_5_VLProcessor):
    """A processor whose patch rows come from `stages`."""

    def rows_of(self, medium: Any) -> Any:
        """Reassemble the normalised pixels, and cut them with the reader's `patch_rows`."""
        rows: Any = super().rows_of(medium)
        if self.image_config.stages.patch_rows is None:
            return rows
        config, count = (self.video_config, len(medium.frames)) if isinstance(medium, Video) else (self.image_config, 1)
        (t, h, w), m, P, Tp = self.layout_of(medium), config.merge_size, config.patch_size, config.temporal_patch_size
        blocks = rows.normalize().view(t, h // m, w // m, m, m, 3, Tp, P, P)
        pixels = blocks.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(t * Tp, 3, h * P, w * P)
        return config.stages.patch_rows(pixels[:count], P, m, Tp)


class StagedAttention(VisionAttention):
    """A block's attention; `rotary` calls the reader's `rotate`, and `backend` may be `attend`."""

    def forward(self, x: Tensor, rotary: Any, segments: Segments, backend: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        return self.proj(segments.attend(rotary(q), rotary(k), v, backend))


class StagedTower(Qwen2_5_VisionTransformer):
    """The tower with the same weights; `stages` determines windows, rotation, attention and the
    order of tokens.
    """

    stages: Stages

    def plan_checked(self, grids: Any) -> Any:
        plan, m = super().plan_checked(grids), self.config.spatial_merge_size
        if self.stages.window_index is None:
            return plan
        side, tokens = self.config.window_side, [(t, h // m, w // m) for t, h, w in grids]
        index, inverse, lengths = self.stages.window_index(tokens, side)
        windows = Segments(**plan_segments([n * m * m for n in lengths]))
        places = plan.positions.unflatten(0, (-1, m * m))[plan.reverse_index][index].flatten(0, 1)
        plan = replace(plan, positions=places, window_index=index, reverse_index=inverse, window_groups=windows.groups,
                       cu_window_seqlens=windows.cu_seqlens, max_window_seqlen=windows.max_seqlen)  # fmt: skip
        return to_device(plan, self.device)

    def forward(self, pixel_values: Tensor, grid_thw=None, *, metadata=None, attention: str | None = None) -> Tensor:
        """Encode with `stages`. A recording cannot read lengths, so a capture uses the library's attention."""
        stages, m = self.stages, self.config.spatial_merge_size
        patches, plan, backend = self.inputs(pixel_values, grid_thw, metadata, attention)
        backend = backend if attention else stages.attend or backend
        windows = Segments(plan.cu_window_seqlens, plan.window_groups, plan.max_window_seqlen)
        x = self.patch_embed(patches).unflatten(0, (-1, m * m))[plan.window_index].flatten(0, 1)
        for i, block in enumerate(self.blocks):
            segments = plan if i in self.config.fullatt_block_indexes else windows
            x = block(x, lambda qk: stages.rotate(qk, *plan.positions.T), segments, backend)
        return stages.fold(self.merger.ln_q(x), m, self.merger.mlp, plan.reverse_index)


class StagedGraphs(EncoderGraphManager):
    """A manager of one graph; in one call for all batches, `replay` fills its buffers and copies its results."""

    def _encode_all(self, batches: list, rows: Any, metadata: list) -> Any:
        replay = self.encoder.stages.replay
        if replay is None or None in [batch.budget for batch in batches]:
            return super()._encode_all(batches, rows, metadata)
        [captured] = self.captured.values()
        rules = {name: rule for *_, rule, name in fields_to_fill(captured.metadata, metadata[0])}
        contents = [{"pixel_values": x, **metadata_tensors(plan)} for x, plan in zip(rows, metadata, strict=True)]
        work = [(values, batch.tokens) for values, batch in zip(contents, batches, strict=True)]
        return replay(captured.graph, captured.buffers, {"pixel_values": "zero", **rules}, work)


class StagedPath(Pipeline):
    """A pipeline that runs `evs` and `mrope` of its encoder's `stages`."""

    def read(self, request: Any) -> Any:
        """Read as the library does, then let `evs` prune the video, which must be the prompt's only media item."""
        evs = self.encoder.stages.evs
        if evs is None or not request.pruning_rate or request.pruning != "evs":
            return super().read(request)
        trace = super().read(replace(request, pruning_rate=0.0))
        if len(trace.media) != 1 or not isinstance(trace.media[0], Video):
            raise ValueError(f"with_stages: `evs` prunes prompts with one video, got {len(trace.media)} media")
        [span], [embeds] = trace.spans, trace.embeds
        keep, *placed = evs(embeds, span.t, request.pruning_rate, trace.full_positions, span.offset)
        trace.keep_masks = [keep[span.offset : span.offset + span.num_tokens]]
        self.merge(trace, trace.full_ids, [patches.media_tokens for patches in trace.patches])
        trace.positions, trace.delta = placed
        return trace

    def position(self, trace: Any) -> None:
        """Set the positions with `mrope`. Only VidCom2 drops tokens before this stage, and it never
        drops the last token of a prompt.
        """
        if self.encoder.stages.mrope is None:
            return super().position(trace)
        spans = [(span.offset, span.t, span.h, span.w, span.t_factor) for span in trace.spans]
        trace.full_positions, delta = self.encoder.stages.mrope(len(trace.full_ids), spans)
        trace.positions, trace.delta = trace.full_positions[:, trace.keep], delta + int((~trace.keep).sum())


def with_stages(vlm: Any, functions: dict[str, Callable]) -> Any:
    """Return a model that shares all weights with `vlm` and runs `functions`, keyed as in `Stages`.

    Graphs are captured again if `vlm` has any. Raises ValueError for families except Qwen2.5-VL.
    """
    if vlm.family.name != "Qwen2.5-VL":
        raise ValueError(f"with_stages: expected Qwen2.5-VL, whose tower has all stages, got {vlm.family.name}")
    stages = Stages(**functions)
    model, processor, tower = copy(vlm), copy(vlm.processor), share_weights(vlm.encoder)
    model.__class__ = type("StagedVLM", (StagedPath, type(vlm)), {})
    processor.__class__, tower.__class__ = StagedProcessor, StagedTower
    for block in tower.blocks:
        block.attn.__class__ = StagedAttention
    for name in ("image_config", "video_config"):
        setattr(processor, name, StagedConfig(**asdict(getattr(processor, name)), stages=stages))
    tower.stages, model.encoder, model.processor, model.media_cache = stages, tower, processor, copy(vlm.media_cache)
    if vlm.graphs:
        model.graphs = StagedGraphs(tower, budgets=vlm.graphs.limits[""].budgets[-1:], max_items=1, progress=False)
    return model
