"""Which rule prunes, on every way into a model.

Oracles: the rule itself on the embeddings before pruning, the full run restricted to what the rule
keeps, and transformers given the survivors.
"""

from functools import partial

import pytest
import torch
from random_models import random_model, their_model

from refvl.paths import DATA
from refvl.positions import PRUNERS

CLIP, PHOTO = DATA / "clips" / "bigbuckbunny.mp4", DATA / "pictures" / "coffee.jpg"
ASK = {"prompt": "What moves?", "images": [PHOTO], "videos": [CLIP], "max_new_tokens": 8}
PRUNED = {"pruning_rate": 0.6, "pruning": "vidcom2"}


@pytest.fixture(params=["Qwen2.5-VL", "qwen3_vl", "GLM-4.1V"])
def vlm(request):
    return random_model(request.param)


@pytest.mark.parametrize("rule", PRUNERS)
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "qwen3_vl", "qwen3_5", "GLM-4.1V", "GLM-4.6V", "GLM-OCR"])
def test_a_trace_keeps_what_the_rule_keeps(name, rule):
    """And every frame keeps its timestamp."""
    vlm = random_model(name)
    full, run = vlm.trace(**ASK), vlm.trace(**ASK, pruning_rate=0.6, pruning=rule)
    image, video = run.keep_masks
    assert torch.equal(video, vlm.trace(**ASK, pruning_rate=0.6).keep_masks[1]) is (rule == "evs"), "the default"
    want = PRUNERS[rule].mask(run.embeds[1], run.patches[1].media_tokens.thw, 1, 0.6)
    assert image is None and torch.equal(video, want) and 0 < want.sum() < len(want)
    assert torch.equal(run.positions, full.positions[:, run.keep])
    assert run.delta == full.delta + int((~want).sum())
    assert torch.equal(run.inputs_embeds, full.inputs_embeds[run.keep])
    assert torch.equal(run.deepstack, full.deepstack[run.keep])
    assert run.keep[vlm.processor.placeholders(full.full_ids) != vlm.token_ids["video"]].all()
    if run.deepstack.numel():  # transformers takes none beside embeddings
        return
    length = len(run.input_ids)
    given = {"input_ids": run.input_ids[None], "inputs_embeds": run.inputs_embeds[None]}
    given |= {"position_ids": run.positions[:, None], "attention_mask": torch.ones(1, length)}
    theirs = their_model(name).generate(**given, max_new_tokens=8, do_sample=False)
    assert run.token_ids == theirs[0, length:].tolist()


def test_every_way_in_prunes_alike(vlm):
    """Oracle: `trace`. `generate` is given the embeddings that trace had."""
    run = vlm.trace(**ASK, **PRUNED)
    assert vlm.chat(**ASK, **PRUNED) == run.text == "".join(vlm.chat(**ASK, **PRUNED, stream=True))
    request = {key: value for key, value in ASK.items() if key != "max_new_tokens"}
    assert vlm.chat_batch([request, request], max_new_tokens=8, **PRUNED) == [run.text] * 2
    (image, video), (image_layout, video_layout) = run.embeds, run.layouts
    seconds = [run.patches[1].media_tokens.t_factor / getattr(vlm.config.vision_config, "tokens_per_second", 1)]
    ids = vlm.generate(
        run.full_ids[None], image_embeds=image, image_grid_thw=[image_layout], video_embeds=video,
        video_grid_thw=[video_layout], second_per_grid_ts=seconds, max_new_tokens=8, **PRUNED,
    )  # fmt: skip
    assert ids[0, len(run.full_ids) :].tolist() == run.token_ids


def test_at_rate_zero_the_rule_does_not_matter(vlm):
    run = vlm.trace(**ASK, pruning="vidcom2")
    assert run.keep_masks == [None, None] and run.token_ids == vlm.trace(**ASK).token_ids


def test_an_unknown_rule_is_refused_before_anything_is_encoded(vlm, monkeypatch):
    monkeypatch.setattr(type(vlm.encoder), "forward", None)
    calls = (vlm.chat, partial(vlm.chat, stream=True), vlm.trace, lambda _, **o: vlm.chat_batch([{"prompt": ""}], **o))
    for call in (*calls, lambda _, **o: vlm.generate(torch.tensor([[5, 6]]), **o)):
        with pytest.raises(ValueError, match="pruning: expected 'evs' or 'vidcom2', got 'random'"):
            call("What moves?", pruning="random")
