"""The upstream rules that the notebooks contrast with ours: against vLLM's golden data and transformers itself."""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLModel

from refvl.positions import (
    MediaSpan,
    compute_mrope_for_media,
    compute_retention_mask,
    get_mrope_input_positions,
    recompute_mrope_positions,
    restrict_positions,
)
from refvl.study.releases import (
    bfloat16_position_channels,
    closed_up_positions,
    joined_videos_masks,
    larger_side_positions,
    second_per_grid_truncated,
    text_uncounted_positions,
    width_offset_positions,
)

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "evs.json").read_text())["recompute"]
TWO_MEDIA = json.loads((FOLDER / "evs_two_media.json").read_text())
CLIP = MediaSpan(3, t=10, h=2, w=3, t_factor=2 * 1.7)


def unpruned(case):
    """(tokens, spans, keep) of the prompt from which a golden case was pruned, found by its media's positions.

    A kept token is matched with the first token of the whole medium, from the last match on, that has its position.
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


@pytest.mark.parametrize("case", TWO_MEDIA["cases"], ids=lambda c: c["name"])
def test_text_uncounted_is_what_vllm_computes(case):
    """Oracle: vLLM 0.32.0, prompts of several media in one piece."""
    pieces = [torch.tensor(medium["positions"]) for medium in case["media"]]
    ids = TWO_MEDIA["meta"]["token_ids"]
    positions, delta = text_uncounted_positions(case["input_ids"], pieces, *ids.values())
    assert positions.tolist() == case["positions"] and delta == case["delta"]


def test_a_second_medium_is_written_over_the_first_behind_a_longer_text():
    """By hand: 9 tokens of an image behind 14 of text, then 13 of a video; and nothing happens behind 4 of text.

    Extents stand in place of widths, so that the search is all that differs from ours.
    """
    start, image, video = ids = tuple(TWO_MEDIA["meta"]["token_ids"].values())
    pieces = [compute_mrope_for_media(grid, 2).T for grid in ((1, 6, 6), (3, 6, 6))]
    pieces[1] = pieces[1][:, :13]
    for front, is_lost in ((14, True), (4, False)):
        prompt = [1] * front + [start, *[image] * 9, 2, start, *[video] * 13, 2, 1]
        ours, _ = recompute_mrope_positions(prompt, pieces, torch.arange(len(prompt)).repeat(3, 1), 0, *ids)
        theirs, _ = text_uncounted_positions(prompt, pieces, *ids)
        assert torch.equal(ours, theirs) != is_lost
        first = slice(front + 1, front + 10)
        assert torch.equal(theirs[:, first], (pieces[1] if is_lost else pieces[0])[:3, :9] + front + 1)


def test_the_width_rule_differs_from_ours_where_width_is_not_the_longest_axis():
    wide, tall = MediaSpan(2, 1, 3, 5), MediaSpan(2, 1, 5, 3)
    assert torch.equal(width_offset_positions(20, [wide])[0], get_mrope_input_positions(20, [wide])[0])
    ours, theirs = get_mrope_input_positions(20, [tall])[0], width_offset_positions(20, [tall])[0]
    assert torch.equal(ours[:, :17], theirs[:, :17])
    assert torch.equal(ours[:, 17:], theirs[:, 17:] + 2)


def test_larger_side_and_truncated_seconds_are_what_transformers_computes():
    """Oracle: `get_rope_index` of the installed release; only 5.17 truncates the seconds per grid step."""
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 8, "num_hidden_layers": 0, "num_attention_heads": 2, "num_key_value_heads": 1},
        vision_config={"depth": 0, "hidden_size": 8, "num_heads": 2, "tokens_per_second": 2},
    )
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    num_tokens = 3 + CLIP.num_tokens + 4
    types = torch.zeros(1, num_tokens, dtype=torch.int64)
    types[0, 3 : 3 + CLIP.num_tokens] = 2
    want, want_delta = model.get_rope_index(
        torch.zeros_like(types), types, video_grid_thw=torch.tensor([[10, 4, 6]]), second_per_grid_ts=[1.7]
    )
    truncates = version("transformers").startswith("5.17.")
    span = second_per_grid_truncated(CLIP) if truncates else CLIP
    positions, delta = larger_side_positions(num_tokens, [span])
    assert torch.equal(positions, want[:, 0])
    assert delta == want_delta


def test_truncated_seconds():
    """1.7 seconds become 1, half a second becomes none; a picture has no seconds."""
    assert second_per_grid_truncated(CLIP).t_factor == 2.0
    fast = second_per_grid_truncated(MediaSpan(3, 10, 2, 3, t_factor=2 * 0.5))
    assert fast.grid_positions()[0].tolist() == [0] * 60
    image = MediaSpan(3, 1, 2, 3)
    assert second_per_grid_truncated(image) == image


def test_bfloat16_keeps_integers_up_to_256_only():
    """bfloat16 has 8 significant bits: up to 256 every integer, then every second one, then every fourth."""
    positions = torch.arange(1024)
    rounded = bfloat16_position_channels(positions)
    assert rounded.dtype == torch.int64
    assert torch.equal(rounded[:257], positions[:257])
    assert len(rounded[256:513].unique()) == 129
    assert len(rounded[512:].unique()) == 129


def tiny_nemotron_omni(q: float):
    """transformers' own module with one Mamba and one attention layer, frames of four tokens, 32 wide."""
    theirs = pytest.importorskip("transformers.models.nemotron_h_omni")
    vision = {
        "model_type": "radio", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1.0,
        "patch_size": 4, "image_size": 16, "max_img_size": 64, "video_temporal_patch_size": 2,
    }  # fmt: skip
    text = {
        "model_type": "nemotron_h", "vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "layers_block_type": ["linear_attention", "full_attention"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    }  # fmt: skip
    config = theirs.NemotronH_Omni_Reasoning_V3_Config(
        vision_config=vision, text_config=text, image_token_id=7, video_pruning_rate=q, vision_hidden_size=32,
        projector_hidden_size=32,
    )  # fmt: skip
    return theirs.NemotronH_Omni_Reasoning_V3(config).eval()


@pytest.mark.parametrize("frames", [(3, 2), (1, 4), (5,)])
@pytest.mark.parametrize("q", [0.3, 0.5, 0.7])
def test_joined_videos_and_closed_up_positions_are_what_nemotron_computes(frames, q):
    """Oracle: transformers' `NemotronH_Omni_Reasoning_V3`, by what its layers receive.

    Embeddings are given, because the module's own video path ends in a TypeError in 5.23: `torch.cat` of one tensor.
    """
    generator = torch.Generator().manual_seed(0)
    videos = [torch.randn(t, 4, 32, generator=generator) for t in frames]
    model, seen = tiny_nemotron_omni(q), []
    layers = model.language_model.model.layers
    layers[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    ids = torch.tensor([[1, 2, *[7] * (4 * sum(frames)), 3]])
    with torch.no_grad():
        model(input_ids=ids, mm_encoder_outputs={"video": SimpleNamespace(pooler_output=videos)})
    [[hidden], kwargs] = seen[0]

    masks = joined_videos_masks([video.flatten(0, 1) for video in videos], 4, q)
    kept = torch.cat([video.flatten(0, 1)[mask] for video, mask in zip(videos, masks, strict=True)])
    assert torch.equal(hidden[0, 2:-1], kept)
    positions, delta = closed_up_positions(len(kept) + 3)
    assert torch.equal(kwargs["position_ids"].expand(3, -1), positions) and delta == 0


def test_a_second_video_that_begins_as_the_first_ends_loses_its_first_frame():
    """By hand, frames of two tokens: video B starts with the last frame of A. Alone, B keeps its first frame."""
    a, b, c = torch.eye(6).view(3, 2, 6)
    first, second = torch.cat([a, b]), torch.cat([b, c])
    masks = joined_videos_masks([first, second], tokens_per_frame=2, q=0.25)
    assert [mask.tolist() for mask in masks] == [[True] * 4, [False, False, True, True]]
    assert compute_retention_mask(second, (2, 1, 2), 1, 0.25)[:2].all()
