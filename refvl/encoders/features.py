"""From a tower's hidden states to the features that a language model gets: which layers, which tokens, normed or not.

    hidden states of all layers -> those selected -> their tokens selected -> post-norm on the last -> side by side

For CLIP-like towers (LLaVA and its kin); the towers of this library come with their merger and need none of it.
Shape suffixes: B pictures, N tokens, D tower width. Upstream: `resolve_visual_encoder_outputs` (vLLM).
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from refvl.checks import check_positive_int, check_shape

FeatureSelectStrategy = Literal["class", "default", "full"] | Callable[[Tensor], Tensor]

FEATURE_SELECTORS = {
    "class": lambda x_BND: x_BND[:, 0],  # the class token: (B, D)
    "default": lambda x_BND: x_BND[:, 1:],  # everything but the class token
    "full": lambda x_BND: x_BND,
}


def get_feature_selector(strategy: FeatureSelectStrategy) -> Callable[[Tensor], Tensor]:
    """The function (B, N, D) -> selected tokens of a strategy; a callable is its own. Refuses unknown names."""
    if callable(strategy):
        return strategy
    if strategy not in FEATURE_SELECTORS:
        raise ValueError(
            f"feature_select_strategy: expected one of {tuple(FEATURE_SELECTORS)} or a callable, got {strategy!r}"
        )
    return FEATURE_SELECTORS[strategy]


def get_num_selected_vision_tokens(num_vision_tokens: int, strategy: FeatureSelectStrategy) -> int:
    """How many of a tower's tokens a strategy keeps.

    >>> get_num_selected_vision_tokens(577, "default")
    576
    """
    tokens_1ND = torch.empty(1, check_positive_int(num_vision_tokens, "num_vision_tokens"), 1, device="meta")
    selected = get_feature_selector(strategy)(tokens_1ND)
    return 1 if selected.ndim == 2 else selected.shape[1]


def resolve_visual_encoder_outputs(
    encoder_outputs: Tensor | Sequence[Tensor],
    post_layer_norm: nn.Module | None,
    *,
    select_layers: Sequence[int] | None = None,
    max_possible_layers: int | None = None,
    feature_select_strategy: FeatureSelectStrategy | None = None,
) -> Tensor:
    """One tensor of features: the last layer's output, or several hidden states side by side.

    encoder_outputs: (B, N, D), the output of the last layer; with `select_layers`, the list of hidden states, the
    input of the first layer in front. post_layer_norm: the norm behind the last layer, or None.
    select_layers: 0 is the first layer's input, k the output of layer k, and negative ones count back from the last of
    `max_possible_layers`, the depth of the whole tower, even when fewer layers were loaded.
    feature_select_strategy: "class" (the first token, (B, D)), "default" (all others), "full", or a callable.

    The norm belongs to the last layer: it is applied when the list of selected layers ends in -1 or in
    max_possible_layers - 1. (The second is upstream's rule, off by one: the layer of that index is the last but one,
    and the true last index, max_possible_layers, gets no norm. Write -1.)

    Returns (B, N', D * selected layers), or (B, D * selected layers) for "class". Raises ValueError for a list without
    `select_layers`, a tensor with them, and layers that are not there. A negative index beyond the loaded layers
    reads, as upstream, an earlier one: that is a warning.
    """
    select = get_feature_selector(feature_select_strategy or "full")
    if select_layers is None:
        if not isinstance(encoder_outputs, Tensor):
            raise ValueError(
                "encoder_outputs: without select_layers, expected the last layer's output (one tensor), "
                f"got {type(encoder_outputs).__name__}"
            )
        features = select(check_shape(encoder_outputs, ("B", "N", "D"), "encoder_outputs"))
        return features if post_layer_norm is None else post_layer_norm(features)
    if max_possible_layers is None:
        raise ValueError("max_possible_layers: must be given with select_layers, which count from it")
    if isinstance(encoder_outputs, Tensor):
        raise ValueError("encoder_outputs: with select_layers, expected the list of all hidden states, got one tensor")
    if not select_layers:
        raise ValueError("select_layers: expected at least one layer, got none")
    features = [select(_hidden_state(encoder_outputs, layer, max_possible_layers)) for layer in select_layers]
    if post_layer_norm is not None and select_layers[-1] in (-1, max_possible_layers - 1):
        features[-1] = post_layer_norm(features[-1])
    return torch.cat(features, dim=-1)


def _hidden_state(hidden_states: Sequence[Tensor], layer: int, max_possible_layers: int) -> Tensor:
    """Hidden state `layer`; a negative one is relative to the whole tower, of which fewer layers may be there."""
    loaded = len(hidden_states) - 1
    index = layer if layer >= 0 else layer + max_possible_layers - loaded
    if not -len(hidden_states) <= index < len(hidden_states):
        raise ValueError(f"select_layers: layer {layer} is not among {loaded} loaded of {max_possible_layers}")
    if layer < 0 <= index:
        warnings.warn(
            f"select_layers: layer {layer} of {max_possible_layers} is behind the {loaded} loaded ones; "
            f"what is read instead is hidden state {index}",
            stacklevel=3,
        )
    return check_shape(hidden_states[index], ("B", "N", "D"), f"encoder_outputs[{index}]")
