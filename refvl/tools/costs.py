"""What a model costs before it is loaded: parameters, memory, tokens - from the config and sizes alone."""

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from refvl.contracts import Encoder
from refvl.pipeline import VLM
from refvl.pixels.crops import CropConfig, plan_crops
from refvl.pixels.media import Video
from refvl.pixels.patches import PatchConfig, count_tokens
from refvl.pixels.slices import count_sets, plan_slices
from refvl.positions import MediaSpan

BEYOND_ANY_BUDGET = 9_999_999  # px, the side of the image that upstream plans with
MAX_FRAMES_PER_VIDEO = 600


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """What an image or a video becomes. `patches` go through the encoder, `tokens` through the language model."""

    kind: str
    size: str  # as decoded
    becomes: str  # size and grid after resizing
    layout: Hashable  # (t, h, w) in patches for Qwen and GLM
    patches: int
    tokens: int


def plan_media(vlm: VLM, medium) -> MediaPlan:
    """Plan a decoded image (PIL) or a `Video`."""
    if isinstance(medium, Video):
        frames, height, width = medium.frames.shape[:3]
        kind, size = "video", f"{frames} frames of {width} x {height} px"
    else:
        kind, size = "image", f"{medium.width} x {medium.height} px"
    layout = vlm.processor.layout_of(medium)
    patches, tokens, _ = vlm.encoder.item_size(layout)
    becomes = describe_layout(vlm.processor.image_config, medium, layout, tokens)
    return MediaPlan(kind, size, becomes, layout, patches, tokens)


def blank_clip(vlm: VLM, seconds: float, width: int, height: int, source_fps: float = 25.0) -> Video:
    """What the model would read of a file of this length and size: black frames that take no memory.

    Raises ValueError where no videos are taken.
    """
    total = max(1, round(seconds * source_fps))
    indices = vlm.processor.frame_indices(total, source_fps)
    frames = np.broadcast_to(np.zeros(3, np.uint8), (len(indices), height, width, 3))
    return Video(frames, len(indices) / total * source_fps, source_fps, tuple(indices), total, total / source_fps)


def count_positions(vlm: VLM, medium) -> int:
    """How far a decoded medium moves the positions of the text behind it, without the text in it."""
    config, kind = vlm.processor.video_config, "video" if isinstance(medium, Video) else "image"
    is_scaled = kind == "video" and isinstance(config, PatchConfig)
    second_per_grid = config.temporal_patch_size / medium.fps if is_scaled else 1.0
    merged = vlm.processor.merged(kind, vlm.processor.layout_of(medium), second_per_grid)
    starts = itertools.accumulate((t * h * w for t, h, w in merged.runs), initial=0)
    spans = [MediaSpan(start, *run, merged.t_factor) for start, run in zip(starts, merged.runs, strict=False)]
    return int(vlm.language_model.positions(merged.num_tokens, spans).max()) + 1


def describe_layout(config: Any, medium, layout: Any, tokens: int) -> str:
    """What the preprocessing of `config` makes of a decoded medium, in words."""
    if isinstance(config, PatchConfig):
        _, h, w = layout
        return f"{w * config.patch_size} x {h * config.patch_size} px -> grid {layout}"
    if isinstance(config, CropConfig):
        width, height = plan_crops(medium.width, medium.height, config).canvas
        crops = f"{layout.rows} x {layout.columns} crops of {config.crop_size} px, " if layout.crops else ""
        return f"{width} x {height} px -> {crops}overview of {config.image_size} px"
    if isinstance(medium, Video):
        (h, w), patches = layout[0].slices[0], sum(h * w for group in layout for h, w in group.slices)
        size = f"{w * config.patch_size} x {h * config.patch_size} px"
        return f"{size} in {count_sets(layout)} sets of frames, {patches / tokens:.3g} patches a token"
    plan = plan_slices(medium.width, medium.height, config)
    slices = " and {} x {} slices of {} x {} px".format(*plan.grid, *plan.cell) if plan.grid and plan.cell else ""
    return "overview {} x {} px".format(*plan.overview) + slices


def image_size_with_most_features(config: PatchConfig) -> tuple[int, int]:
    """(height, width) in px that a square image, larger than any budget, is resized to.

    One image, not a video: GLM's budgets count frames, and planning an image as a video of sixteen would find it
    eight times too small. Upstream: `get_image_size_with_most_features` (vLLM).
    """
    return config.fit(BEYOND_ANY_BUDGET, BEYOND_ANY_BUDGET)


def frames_that_fit(
    max_tokens: int, size: tuple[int, int], config: PatchConfig, *, limit: int = MAX_FRAMES_PER_VIDEO
) -> int:
    """How many frames of `size` (height, width) px a video may have before its tokens exceed `max_tokens`.

    GLM shrinks the frames of a longer video, so that once the largest video fits, any does: `limit` is returned.
    Upstream: `_get_max_video_frames` (vLLM).
    """
    frames = 0
    while frames < limit and count_tokens(*size, config, frames + 1) <= max_tokens:
        frames += 1
    return frames


def num_frames_with_most_features(
    context: int, image_config: PatchConfig, video_config: PatchConfig, *, images: int = 0, videos: int = 1
) -> int:
    """Frames per video to plan with when a prompt of `context` tokens holds so many images and videos; at least one.

    The images are as large as can be, and so are the frames. Upstream: `get_num_frames_with_most_features` (vLLM).
    """
    size, videos = image_size_with_most_features(image_config), max(videos, 1)
    left = context - images * count_tokens(*size, image_config)
    return max(1, frames_that_fit(left, size, video_config, limit=videos * MAX_FRAMES_PER_VIDEO) // videos)


def parameter_count(module: nn.Module | Encoder) -> int:
    """Parameters, a shared one counted once."""
    return sum(p.numel() for p in module.parameters())


def kv_cache_bytes_per_token(text_config, dtype: torch.dtype) -> int:
    """Keys and values of all layers for one token."""
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return 2 * text_config.num_hidden_layers * text_config.num_key_value_heads * head_dim * dtype.itemsize


def encoder_activation_bytes(encoder, patches: int) -> int:
    """An estimate of the tower's peak: residual, normed input, q, k, v and output, and what is inside the MLP."""
    mlp = next(module for name, module in encoder.named_modules() if name.endswith("mlp"))
    width = sum(layer.out_features for layer in mlp.modules() if isinstance(layer, nn.Linear))  # counts the output, too
    return patches * (5 * encoder.config.num_heads * encoder.config.head_dim + width) * encoder.dtype.itemsize


def describe(vlm: VLM, media=()) -> dict[str, str]:
    """Rows for a table: family, sizes, tokens and memory of `media`; `vlm` may live on `meta`."""
    tower, text = vlm.encoder.config, vlm.language_model.config
    dtype = vlm.encoder.dtype
    encoder, language = parameter_count(vlm.encoder), parameter_count(vlm.language_model)
    plans = [plan_media(vlm, medium) for medium in media]
    rows = {
        "family": vlm.family.name,
        "vision tower": f"{tower.depth} blocks of width {tower.num_heads * tower.head_dim}, {tower.num_heads} heads: "
        f"{_count(encoder)}",
        "language model": f"{text.num_hidden_layers} layers of width {text.hidden_size}, "
        f"{text.num_attention_heads} heads ({text.num_key_value_heads} kv): {_count(language)}",
        "context": f"{vlm.max_context:,} tokens",
        f"weights in {str(dtype).removeprefix('torch.')}": _bytes((encoder + language) * dtype.itemsize),
        "kv cache": f"{_bytes(kv_cache_bytes_per_token(text, dtype))} a token",
    }
    if isinstance(config := vlm.processor.image_config, PatchConfig):
        height, width = image_size_with_most_features(config)
        rows["largest square picture"] = f"{width} x {height} px -> {count_tokens(height, width, config):,} tokens"
    if vlm.processor.clip_sampling:
        rows["clip sampling"] = vlm.processor.clip_sampling
    for i, plan in enumerate(plans):
        rows[f"{plan.kind} {i + 1}"] = (
            f"{plan.size} -> {plan.becomes} = {plan.patches:,} patches -> {plan.tokens:,} tokens"
        )
    if plans:
        patches, tokens = sum(p.patches for p in plans), sum(p.tokens for p in plans)
        peak = encoder_activation_bytes(vlm.encoder, patches)
        cache = tokens * kv_cache_bytes_per_token(text, dtype)
        total = (encoder + language) * dtype.itemsize + peak + cache
        rows["memory for these media"] = f"kv cache {_bytes(cache)}, tower activations about {_bytes(peak)}"
        rows["memory needed"] = f"about {_bytes(total)}"
    return rows


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B parameters" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M parameters"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
