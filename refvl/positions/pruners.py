"""The registry of methods for pruning a video.

Each method has a token count, computed from sizes and the pruning rate, and a mask, computed from the embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from refvl.positions.evs import compute_retained_tokens_count, compute_retention_mask
from refvl.positions.vidcom2 import vidcom2_retained_tokens_count, vidcom2_retention_mask


@dataclass(frozen=True, slots=True)
class Pruner:
    """A method: `count(tokens_per_frame, num_frames, q)` is the sum of `mask(video_embeds, thw, merge_size, q)`."""

    title: str
    count: Callable[[int, int, float], int]
    mask: Callable[..., Tensor]


PRUNERS = {
    "evs": Pruner("EVS", compute_retained_tokens_count, compute_retention_mask),
    "vidcom2": Pruner("VidCom2", vidcom2_retained_tokens_count, vidcom2_retention_mask),
}


def find_pruner(name: str) -> Pruner:
    """Return the pruner registered under `name`; raise ValueError listing the valid names."""
    if not isinstance(name, str) or name not in PRUNERS:
        raise ValueError(f"pruning: expected {' or '.join(map(repr, PRUNERS))}, got {name!r}")
    return PRUNERS[name]
