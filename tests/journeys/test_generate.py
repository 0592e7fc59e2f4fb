"""Oracle: transformers' `generate` on the same checkpoint; for long videos, where releases
disagree, transformers given our positions, and the rule itself."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from checkpoint_factory import change_json, make_checkpoint, transformers_model
from closeness import assert_agree
from packaging.version import Version
from prompts import PHOTOS

import refvl
from refvl.encoders import tower
from refvl.paths import DATA

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    # as the released checkpoints have it: a penalty counts the prompt's ids, so it must see them, and sampling
    # settings must not disturb greedy decoding
    as_released = {"repetition_penalty": 1.3, "temperature": 0.1, "top_k": 1, "eos_token_id": None}
    change_json(folder / "generation_config.json", lambda config: config | as_released)
    return folder


@pytest.fixture(scope="module")
def vlm(folder):
    return refvl.load(folder, device="cpu", progress=False)


@pytest.fixture(scope="module")
def oracle(folder):
    return transformers_model(folder)


def token_types(vlm, input_ids):
    return (input_ids == vlm.token_ids["image"]).int() + 2 * (input_ids == vlm.token_ids["video"]).int()


def test_left_padded_batch_equals_transformers_and_single_prompts(vlm, oracle):
    traces = [vlm.trace("What is it?", images=images, max_new_tokens=1) for images in (PHOTOS[:1], [], PHOTOS[1:])]
    prompts = [trace.full_ids for trace in traces]
    length = max(map(len, prompts))
    padding = [(length - len(prompt), 0) for prompt in prompts]
    pad = vlm.language_model.generation_config.pad_token_id
    input_ids = torch.stack([F.pad(ids, left, value=pad) for ids, left in zip(prompts, padding, strict=True)])
    mask = torch.stack([F.pad(torch.ones_like(ids), left) for ids, left in zip(prompts, padding, strict=True)])
    rows = torch.cat([patches.pixel_values for trace in traces for patches in trace.patches])
    grids = torch.tensor([grid for trace in traces for grid in trace.layouts])
    images = {"pixel_values": rows, "image_grid_thw": grids}
    ours = vlm.generate(input_ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **images)
    theirs = oracle.generate(
        input_ids=input_ids, attention_mask=mask, mm_token_type_ids=token_types(vlm, input_ids),
        max_new_tokens=NEW_TOKENS, do_sample=False, **images,
    )  # fmt: skip
    assert torch.equal(ours, theirs)
    first = {"pixel_values": rows[: grids[0].prod()], "image_grid_thw": grids[:1]}
    alone = vlm.generate(prompts[0][None], **first, max_new_tokens=NEW_TOKENS)
    assert torch.equal(alone[0, len(prompts[0]) :], ours[0, length:])


def test_long_video_follows_the_rule_of_vllm_and_transformers_5_2(vlm, oracle):
    """transformers 5.17 to 5.23 continue text at max(h, w) // 2 behind the start of a video and
    ignore its time (5.17 truncates second_per_grid as well): their positions differ from ours
    there, and given ours, their ids are ours."""
    grid, seconds = (6, 4, 4), 1.5
    start, stop = (getattr(vlm.config, f"vision_{end}_token_id") for end in ("start", "end"))
    input_ids = torch.tensor([[70, 71, start, *[vlm.token_ids["video"]] * 24, stop, 72, 73, 74]])
    rows = torch.randn(96, 1176, generator=torch.Generator().manual_seed(2))
    tensors = {"pixel_values_videos": rows, "video_grid_thw": torch.tensor([grid])}
    ours = vlm.generate(input_ids, second_per_grid_ts=[seconds], max_new_tokens=NEW_TOKENS, **tensors)

    frames = torch.tensor([int(i * seconds * 2) for i in range(6)])
    media = torch.stack(torch.meshgrid(frames, torch.arange(2), torch.arange(2), indexing="ij")).flatten(1) + 3
    last = int(media.max()) + 1
    positions = torch.cat([torch.arange(3).expand(3, -1), media, torch.arange(last, last + 4).expand(3, -1)], dim=1)
    theirs = oracle.generate(
        input_ids=input_ids, mm_token_type_ids=token_types(vlm, input_ids), position_ids=positions[:, None],
        second_per_grid_ts=torch.tensor([seconds]), max_new_tokens=NEW_TOKENS, do_sample=False, **tensors,
    )  # fmt: skip
    assert torch.equal(ours, theirs)

    if Version("5.17") <= Version(transformers.__version__) < Version("5.24"):
        own, _ = oracle.model.get_rope_index(
            input_ids, token_types(vlm, input_ids), video_grid_thw=torch.tensor([grid]),
            second_per_grid_ts=torch.tensor([seconds]),
        )  # fmt: skip
        assert own[:, 0, -4].tolist() == [3 + 2] * 3
        assert positions[:, -4].tolist() == [last] * 3


def test_a_long_encode_runs_in_several_forwards_with_a_progress_bar(vlm, monkeypatch, capsys):
    expected = vlm.encode(images=PHOTOS, videos=[DATA / "clips" / "bigbuckbunny.mp4"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(tower, "MAX_PATCHES_PER_FORWARD", 100)
    embeds = vlm.encode(images=PHOTOS, videos=[DATA / "clips" / "bigbuckbunny.mp4"])
    assert "encode" in capsys.readouterr().err
    assert_agree(embeds, expected, vlm.encoder)


def test_context_is_never_exceeded(tmp_path):
    folder = make_checkpoint(tmp_path, text_config={"max_position_embeddings": 40})
    vlm = refvl.load(folder, device="cpu", progress=False)
    trace = vlm.trace("Hi", max_new_tokens=1000, eos_token_id=-1)
    assert len(trace.input_ids) + len(trace.token_ids) == 40
    with pytest.raises(ValueError, match="do not fit the context of 40"):
        vlm.chat("Hi " * 100)
