"""How many multiplications and additions a tower takes, counted from sizes: nothing is computed."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from refvl.contracts import Encoder


def encoder_operations(encoder: Encoder, layouts: list) -> int:
    """Of one forward without padding, counted by torch on a copy of the encoder that has no memory; takes seconds."""
    with torch.device("meta"):
        shadow = type(encoder).from_config(encoder.config, attention="sdpa")
        rows = torch.empty(sum(encoder.item_size(layout)[0] for layout in layouts), encoder.config.patch_values)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        shadow(rows, layouts)
    return counter.get_total_flops()
