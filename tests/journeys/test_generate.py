"""Oracle: transformers' `generate` on the same checkpoint; for long videos, where releases disagree, transformers
given our positions, and the rule itself."""

import json

import pytest
import torch
import transformers
from checkpoint_factory import make_checkpoint, transformers_model
from closeness import assert_agree
from packaging.version import Version
from prompts import CONTENTS, PHOTOS

import refvl
from refvl.encoders import tower
from refvl.paths import DATA
from refvl.pixels.by_hand import patchify_image
from refvl.pixels.media import load_image
from refvl.pixels.patches import PatchConfig

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = json.loads((folder / "generation_config.json").read_text())
    # as the released checkpoints have it: a penalty counts the prompt's ids, so it must see them, and sampling
    # settings must not disturb greedy decoding
    (folder / "generation_config.json").write_text(
        json.dumps(config | {"repetition_penalty": 1.3, "temperature": 0.1, "top_k": 1, "eos_token_id": None})
    )
    return folder


@pytest.fixture(scope="module")
def vlm(folder):
    return refvl.load(folder, device="cpu", progress=False)


@pytest.fixture(scope="module")
def oracle(folder):
    return transformers_model(folder)


def image_tensors(folder, paths):
    config = PatchConfig.from_folder(folder)
    rows, grids = zip(*(patchify_image(load_image(path), config) for path in paths), strict=True)
    return torch.cat(rows), torch.tensor(grids)


def token_types(vlm, input_ids):
    return (input_ids == vlm.token_ids["image"]).int() + 2 * (input_ids == vlm.token_ids["video"]).int()


def generate_both(vlm, oracle, input_ids, **tensors):
    ours = vlm.generate(input_ids, max_new_tokens=NEW_TOKENS, **tensors)
    types = token_types(vlm, input_ids)
    theirs = oracle.generate(
        input_ids=input_ids, mm_token_type_ids=types, max_new_tokens=NEW_TOKENS, do_sample=False, **tensors
    )
    return ours, theirs


def prompt_ids(vlm, content) -> torch.Tensor:
    """(1, L): the chat template around `content`, placeholders repeated."""
    messages = vlm.processor.messages([{"role": "user", "content": content}])
    patches = vlm.processor.patchify(vlm.processor.decode(messages))
    return torch.tensor([vlm.processor.tokenize(messages, [p.media_tokens for p in patches])])


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_ids_equal_transformers(vlm, oracle, folder, content):
    input_ids = prompt_ids(vlm, content)
    paths = [part["image"] for part in content if part["type"] == "image"]
    tensors = {}
    if paths:
        tensors["pixel_values"], tensors["image_grid_thw"] = image_tensors(folder, paths)
    ours, theirs = generate_both(vlm, oracle, input_ids, **tensors)
    assert torch.equal(ours, theirs)
    assert len(set(ours[0, input_ids.shape[1] :].tolist())) > 3, "the oracle must be able to disagree"
    trace = vlm.trace([{"role": "user", "content": content}], max_new_tokens=NEW_TOKENS)
    assert trace.full_ids.tolist() == input_ids[0].tolist()
    assert trace.token_ids == theirs[0, input_ids.shape[1] :].tolist()


def test_left_padded_batch_equals_transformers_and_single_prompts(vlm, oracle, folder):
    prompts = [prompt_ids(vlm, CONTENTS[name])[0] for name in ("one image", "text only", "images between text")]
    length = max(map(len, prompts))
    pad = vlm.language_model.generation_config.pad_token_id
    input_ids = torch.stack([torch.cat([torch.full((length - len(p),), pad), p]) for p in prompts])
    mask = torch.stack([(torch.arange(length) >= length - len(p)).long() for p in prompts])
    rows, grids = image_tensors(folder, [PHOTOS[0], PHOTOS[2], PHOTOS[1]])
    ours, theirs = generate_both(vlm, oracle, input_ids, attention_mask=mask, pixel_values=rows, image_grid_thw=grids)
    assert torch.equal(ours, theirs)
    alone = vlm.generate(prompts[0][None], pixel_values=rows[: grids[0].prod()], image_grid_thw=grids[:1], max_new_tokens=NEW_TOKENS)  # fmt: skip  # noqa: E501
    assert torch.equal(alone[0, len(prompts[0]) :], ours[0, length:])


def video_prompt(vlm, grid):
    start, stop = (getattr(vlm.config, f"vision_{end}_token_id") for end in ("start", "end"))
    tokens = grid[0] * grid[1] * grid[2] // 4
    return torch.tensor([[70, 71, start, *[vlm.token_ids["video"]] * tokens, stop, 72, 73, 74]])


def test_short_video_equals_transformers(vlm, oracle):
    """The clip's time does not reach beyond its height or width: all releases place later text alike."""
    grid = (2, 8, 8)
    rows = torch.randn(128, 1176, generator=torch.Generator().manual_seed(1))
    tensors = {"pixel_values_videos": rows, "video_grid_thw": torch.tensor([grid])}
    ours, theirs = generate_both(
        vlm, oracle, video_prompt(vlm, grid), second_per_grid_ts=torch.tensor([1.0]), **tensors
    )
    assert torch.equal(ours, theirs)


def test_long_video_follows_the_rule_of_vllm_and_transformers_5_2(vlm, oracle):
    """transformers 5.17 to 5.23 continue text at max(h, w) // 2 behind the start of a video and ignore its time (5.17
    truncates second_per_grid as well): their positions differ from ours there, and given ours, their ids are ours."""
    grid, seconds = (6, 4, 4), 1.5
    input_ids = video_prompt(vlm, grid)
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
        assert own[:, 0, -4].tolist() == [3 + 2] * 3 and positions[:, -4].tolist() == [last] * 3


def test_evs_ids_equal_transformers_on_the_shortened_prompt(vlm, oracle):
    """Oracle: transformers driven with the surviving embeddings and their positions."""
    trace = vlm.trace("go", videos=[DATA / "clips" / "bigbuckbunny.mp4"], max_new_tokens=NEW_TOKENS, pruning_rate=0.75)
    theirs = oracle.generate(
        input_ids=trace.input_ids[None], inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None],
        attention_mask=torch.ones(1, len(trace.input_ids)), max_new_tokens=NEW_TOKENS, do_sample=False,
    )  # fmt: skip
    assert trace.token_ids == theirs[0, len(trace.input_ids) :].tolist()


def test_a_long_encode_runs_in_several_forwards_with_a_progress_bar(vlm, monkeypatch, capsys):
    expected = vlm.encode(images=PHOTOS, videos=[DATA / "clips" / "bigbuckbunny.mp4"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(tower, "MAX_PATCHES_PER_FORWARD", 100)
    embeds = vlm.encode(images=PHOTOS, videos=[DATA / "clips" / "bigbuckbunny.mp4"])
    assert "encode" in capsys.readouterr().err
    for ours, whole in zip(embeds, expected, strict=True):
        assert_agree(ours, whole, vlm.encoder)


def test_context_is_never_exceeded(tmp_path):
    folder = make_checkpoint(tmp_path, text_config={"max_position_embeddings": 40})
    vlm = refvl.load(folder, device="cpu", progress=False)
    trace = vlm.trace("Hi", max_new_tokens=1000, eos_token_id=-1)
    assert len(trace.input_ids) + len(trace.token_ids) == 40
    with pytest.raises(ValueError, match="do not fit the context of 40"):
        vlm.chat("Hi " * 100)
