"""What a model costs before it is loaded: parameters, memory, tokens - from the config and sizes alone."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import nn

from refvl.media import Video
from refvl.pipeline import VLM


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """What a picture or clip becomes. `patches` go through the encoder, `tokens` through the language model."""

    kind: str
    size: str  # as decoded
    becomes: str  # size and grid after resizing
    layout: Hashable  # (t, h, w) in patches for Qwen and GLM
    patches: int
    tokens: int


def plan_media(vlm: VLM, medium) -> MediaPlan:
    """Plan a decoded picture (PIL) or a `Video`."""
    if isinstance(medium, Video):
        frames, height, width = medium.frames.shape[:3]
        kind, size = "video", f"{frames} frames of {width} x {height} px"
    else:
        kind, size = "image", f"{medium.width} x {medium.height} px"
    becomes, layout = vlm.processor.plan(medium)
    patches, tokens, _ = vlm.encoder.item_size(layout)
    return MediaPlan(kind, size, becomes, layout, patches, tokens)


def parameter_count(module: torch.nn.Module) -> int:
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
    return patches * (5 * encoder.config.hidden_size + width) * encoder.dtype.itemsize


def describe(vlm: VLM, media=()) -> dict[str, str]:
    """Rows for a table: family, sizes, tokens and memory of `media`; `vlm` may live on `meta`."""
    vision, text = vlm.encoder.config, vlm.language_model.config
    dtype = vlm.encoder.dtype
    encoder, language = parameter_count(vlm.encoder), parameter_count(vlm.language_model)
    plans = [plan_media(vlm, medium) for medium in media]
    rows = {
        "family": vlm.family.name,
        "vision tower": f"{vision.depth} blocks of width {vision.hidden_size}, {vision.num_heads} heads: "
        f"{_count(encoder)}",
        "language model": f"{text.num_hidden_layers} layers of width {text.hidden_size}, "
        f"{text.num_attention_heads} heads ({text.num_key_value_heads} kv): {_count(language)}",
        "context": f"{vlm.max_context:,} tokens",
        f"weights in {str(dtype).removeprefix('torch.')}": _bytes((encoder + language) * dtype.itemsize),
        "kv cache": f"{_bytes(kv_cache_bytes_per_token(text, dtype))} a token",
    }
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
