"""Vision utilities for CLIP-like towers (e.g. LLaVA's); no tower in this library needs them.

    get_vision_encoder_info           the number of tokens of an image
    get_vit_attn_backend              the tower's attention backend
    resolve_visual_encoder_outputs    hidden states of all layers -> selected layers -> selected tokens
                                      -> post-norm on the last -> concatenated

Shape suffixes: B images, N tokens, D tower width. Upstream: `VisionEncoderInfo` and subclasses,
`get_vit_attn_backend`, `resolve_visual_encoder_outputs` (vLLM).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from refvl.attention import available_backends
from refvl.checks import check_shape


@dataclass(frozen=True)
class VisionEncoderInfo:
    """The sizes of a tower that resizes every image to one square, so all images have the same number of tokens."""

    image_size: int  # in pixels: the side of the square; for Pixtral, the limit of the longer side
    patch_size: int  # the side in pixels of the square that becomes one token
    class_tokens: ClassVar[int] = 0  # the number of class tokens before the patches

    @classmethod
    def from_hf(cls, hf_config) -> Self:
        """Build the info from a whole model's config; the sizes are in its `vision_config`."""
        return cls(hf_config.vision_config.image_size, hf_config.vision_config.patch_size)

    def get_image_size(self) -> int:
        """Return the number of pixels along a side of a resized image."""
        return self.image_size

    def get_patch_size(self) -> int:
        """Return the number of pixels along a token's side."""
        return self.patch_size

    def get_patch_grid_length(self) -> int:
        """Return the number of whole tokens along a side of the largest image."""
        return self.image_size // self.patch_size

    def get_patch_grid_size(self, *, image_width: int, image_height: int) -> tuple[int, int]:
        """Return (tokens across, tokens down) of an image of this size in pixels, without a class token."""
        return self.get_patch_grid_length(), self.get_patch_grid_length()

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Return the number of tokens of an image of this size in pixels."""
        across, down = self.get_patch_grid_size(image_width=image_width, image_height=image_height)
        return across * down + self.class_tokens


class SiglipEncoderInfo(VisionEncoderInfo):
    """SigLIP's sizes, without a class token."""


class CLIPEncoderInfo(VisionEncoderInfo):
    """CLIP's sizes; a class token precedes the patches."""

    class_tokens = 1


class PixtralHFEncoderInfo(VisionEncoderInfo):
    """The sizes of Pixtral, which keeps aspect ratios; a model that merges patches (Mistral 3) has larger tokens.

    A longer side above image_size is scaled down to image_size; then both sides are rounded up
    to whole tokens.
    """

    @classmethod
    def from_hf(cls, hf_config) -> Self:
        info = super().from_hf(hf_config)
        return cls(info.image_size, info.patch_size * getattr(hf_config, "spatial_merge_size", 1))

    def get_patch_grid_size(self, *, image_width: int, image_height: int) -> tuple[int, int]:
        ratio = max(image_width / self.image_size, image_height / self.image_size, 1.0)
        width = max(1, int(image_width / ratio))  # a very thin image is at least one pixel wide
        height = max(1, int(image_height / ratio))
        return ceil(width / self.patch_size), ceil(height / self.patch_size)


ENCODER_INFOS = {
    "clip_vision_model": CLIPEncoderInfo, "siglip_vision_model": SiglipEncoderInfo, "pixtral": PixtralHFEncoderInfo,
}  # fmt: skip


def get_vision_encoder_info(hf_config) -> VisionEncoderInfo:
    """Return the info for the `model_type` of a model's `vision_config`; raise ValueError listing the known types.

    >>> from transformers import LlavaConfig
    >>> get_vision_encoder_info(LlavaConfig()).get_num_image_tokens(image_width=640, image_height=480)  # CLIP, 336 px
    577
    """
    model_type = getattr(getattr(hf_config, "vision_config", None), "model_type", None)
    if model_type not in ENCODER_INFOS:
        raise ValueError(f"vision_config: model_type must be one of {list(ENCODER_INFOS)}, got {model_type!r}")
    return ENCODER_INFOS[model_type].from_hf(hf_config)


def get_vit_attn_backend(head_size: int, dtype: torch.dtype, device) -> str:
    """Return the fastest backend of `refvl.attention` for such a tower."""
    return available_backends(device, dtype, head_size)[0]


FEATURE_SELECTORS = {
    "class": lambda x_BND: x_BND[:, 0],  # the class token: (B, D)
    "default": lambda x_BND: x_BND[:, 1:],  # all tokens except the class token
    "full": lambda x_BND: x_BND,
}


def resolve_visual_encoder_outputs(
    encoder_outputs: Tensor | Sequence[Tensor],
    post_layer_norm: nn.Module | None,
    *,
    select_layers: Sequence[int] | None = None,
    max_possible_layers: int | Any = None,
    feature_select_strategy: str | Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return one tensor of features: the last layer's output, or several hidden states concatenated.

    encoder_outputs: (B, N, D), the output of the last layer; with `select_layers`, the list of hidden states, starting
    with the input of the first layer. post_layer_norm: the norm after the last layer, or None.
    select_layers: 0 is the first layer's input, and k the output of layer k. Negative numbers count back from the last
        of `max_possible_layers`, the depth of the whole tower, even if fewer layers were loaded.
    feature_select_strategy: "class" (the first token, (B, D)), "default" (all others), "full", or a callable.

    The norm belongs to the last layer: it is applied if the list of selected layers ends in -1
    or in max_possible_layers - 1. The second case is upstream's rule, which is off by one,
    because that index selects the second-to-last layer. No norm is applied to the true last
    index, max_possible_layers. Use -1 instead.

    Returns (B, N', D * selected layers), or (B, D * selected layers) for "class". Raises
    ValueError for missing layers. As upstream, a negative index that points beyond the loaded
    layers selects an earlier layer than the requested one.
    """
    strategy = feature_select_strategy or "full"
    if not callable(strategy) and strategy not in FEATURE_SELECTORS:
        raise ValueError(f"feature_select_strategy: expected one of {[*FEATURE_SELECTORS]}, got {strategy!r}")
    select = strategy if callable(strategy) else FEATURE_SELECTORS[strategy]
    if select_layers is None:
        selected = select(check_shape(encoder_outputs, ("B", "N", "D"), "encoder_outputs"))
        return selected if post_layer_norm is None else post_layer_norm(selected)
    features = [select(_hidden_state(encoder_outputs, layer, max_possible_layers)) for layer in select_layers]
    if post_layer_norm is not None and select_layers[-1] in (-1, max_possible_layers - 1):
        features[-1] = post_layer_norm(features[-1])
    return torch.cat(features, dim=-1)


def _hidden_state(hidden_states: Tensor | Sequence[Tensor], layer: int, max_possible_layers: int) -> Tensor:
    """Return hidden state `layer`; a negative index counts from the end of the whole tower,
    even if fewer layers are loaded.
    """
    loaded = len(hidden_states) - 1
    index = layer if layer >= 0 else layer + max_possible_layers - loaded
    if not -len(hidden_states) <= index < len(hidden_states):
        known = f"one of the {loaded} loaded layers (the whole tower has {max_possible_layers})"
        raise ValueError(f"select_layers: expected {known}, got layer {layer}")
    return check_shape(hidden_states[index], ("B", "N", "D"), f"encoder_outputs[{index}]")
