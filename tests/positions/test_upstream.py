"""The upstream rules that the notebooks contrast with ours: against vLLM's golden data; transformers' in test_mrope."""

import json
from pathlib import Path

import pytest
import torch

from refvl.positions import MediaSpan, compute_mrope_for_media, restrict_positions
from refvl.study.releases import bfloat16_position_channels, width_offset_positions

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "evs.json").read_text())["recompute"]


def unpruned(case):
    """(tokens, spans, keep) of the prompt from which a golden case was pruned, found by its media's positions.

    A kept token is matched with the first token of the whole medium, from the last match on, that
    has its position.
    """
    spans, keep, done = [], [], 0
    for medium in case["media"]:
        seconds = medium["second_per_grid"]
        options = {} if seconds is None else {"tokens_per_second": 2, "video_second_per_grid": seconds}
        whole = compute_mrope_for_media(medium["grid_thw"], 2, **options)[:, :3].tolist()
        keep += [True] * (medium["offset"] - done)
        t, h, w = medium["grid_thw"]
        spans.append(MediaSpan(len(keep), t, h // 2, w // 2, 1.0 if seconds is None else 2.0 * seconds))
        wanted = [position[:3] for position in medium["mm_positions"]]
        for position in whole:
            keep.append(bool(wanted) and position == wanted[0])
            wanted = wanted[1:] if keep[-1] else wanted
        assert not wanted, "the kept tokens are part of the medium, in order"
        done = medium["offset"] + medium["length"]
    keep += [True] * (len(case["input_ids"]) - done)
    return len(keep), spans, torch.tensor(keep)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["name"])
def test_width_offset_is_what_vllm_computes(case):
    """Oracle: vLLM 0.33.0, its EVS positions of the whole prompt in one piece; its clips have integer seconds."""
    num_tokens, spans, keep = unpruned(case)
    positions, delta = restrict_positions(width_offset_positions(num_tokens, spans)[0], keep)
    assert positions.tolist() == case["sequential_positions"]
    assert delta == case["sequential_delta"]


def test_bfloat16_keeps_integers_up_to_256_only():
    """bfloat16 has 8 significant bits: up to 256 every integer, then every second one, then every fourth."""
    positions = torch.arange(1024)
    rounded = bfloat16_position_channels(positions)
    assert rounded.dtype == torch.int64
    assert torch.equal(rounded[:257], positions[:257])
    assert len(rounded[256:513].unique()) == 129
    assert len(rounded[512:].unique()) == 129
