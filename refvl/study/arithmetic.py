"""Counts of the multiplications and additions of a tower and a prefill, derived from sizes alone."""

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from refvl.language.model import CausalTextModel
from refvl.language.step3_vl import Step3TextMoE

EXPERTS_VISITED = {"moe_top_k": "moe_num_experts", "num_experts_per_tok": "n_routed_experts"}  # keys in text configs


def encoder_operations(encoder: Any, layouts: list) -> int:
    """Count one forward without padding; torch counts on a copy of the encoder that needs no memory.

    This takes seconds.
    """
    with torch.device("meta"):
        shadow = type(encoder).from_config(encoder.config, attention="sdpa")
        rows = torch.empty(sum(encoder.item_size(layout)[0] for layout in layouts), encoder.config.patch_values)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        shadow(rows, layouts)
    return counter.get_total_flops()


def prefill_operations(language_model: CausalTextModel, tokens: int, cached: int = 0) -> int:
    """Count the operations of a text model's layers: each weight once per token, and attention over all pairs.

    tokens: the length of the prompt. cached: how many of the first tokens are cached and not run again. For each token,
    only the experts that it uses are counted. Pairs hidden by the causal mask are also counted, as in torch's counter.
    The head, which runs for one token, is not counted.
    """
    text, layers = language_model.config, language_model.model
    weights = sum(m.weight.numel() for m in layers.modules() if isinstance(m, nn.Linear))
    if experts := sum(p.numel() for p in layers.parameters() if p.ndim == 3):  # (E, out, in)
        visited, of_all = next((k, n) for k, n in EXPERTS_VISITED.items() if hasattr(text, k))
        weights += experts * getattr(text, visited) // getattr(text, of_all)
        by_product = sum(isinstance(m, Step3TextMoE) for m in layers.modules())  # they sum the rows of an expert
        weights += by_product * getattr(text, visited) * text.hidden_size
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = 4 * (tokens - cached) * tokens * text.num_attention_heads * head_dim * text.num_hidden_layers
    return 2 * (tokens - cached) * weights + pairs
