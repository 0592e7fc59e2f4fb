"""Which rule prunes, on every way into a model. Oracle: the rule itself on the embeddings before pruning."""

import sys
from functools import partial

import pytest
import torch
from checkpoint_factory import make_checkpoint, make_glm_checkpoint, make_qwen3_checkpoint, make_step3_checkpoint
from checkpoint_factory_minicpmv import make_minicpmv_checkpoint

import refvl
from refvl.paths import DATA
from refvl.positions import PRUNERS
from refvl.tools.cli import Pruning, main

CLIP, PHOTO = DATA / "clips" / "bigbuckbunny.mp4", DATA / "pictures" / "coffee.jpg"
FAMILIES = {
    "Qwen2.5-VL": make_checkpoint,
    "Qwen3-VL": partial(make_qwen3_checkpoint, model_type="qwen3_vl"),
    "Qwen3-VL with experts": partial(make_qwen3_checkpoint, model_type="qwen3_vl_moe"),
    "GLM-4.1V": partial(make_glm_checkpoint, model_type="glm4v", processor_class="Glm4vProcessor"),
    "GLM-OCR": partial(make_glm_checkpoint, model_type="glm_ocr", processor_class="Glm46VProcessor"),
}
ASK = {"prompt": "What moves?", "images": [PHOTO], "videos": [CLIP], "max_new_tokens": 8}
PRUNED = {"pruning_rate": 0.6, "pruning": "vidcom2"}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    FAMILIES[request.param](folder)
    return folder


@pytest.fixture(scope="module")
def vlm(folder):
    return refvl.load(folder, device="cpu", progress=False)


@pytest.mark.parametrize("name", PRUNERS)
def test_a_trace_keeps_what_the_rule_keeps(vlm, name):
    """Oracles: the rule, and the full run restricted to what it keeps."""
    full, run = vlm.trace(**ASK), vlm.trace(**ASK, pruning_rate=0.6, pruning=name)
    image, video = run.keep_masks
    want = PRUNERS[name].mask(run.embeds[1], run.patches[1].media_tokens.thw, 1, 0.6)
    assert image is None and torch.equal(video, want) and 0 < want.sum() < len(want)
    assert torch.equal(run.positions, full.positions[:, run.keep])
    assert torch.equal(run.inputs_embeds, full.inputs_embeds[run.keep])
    assert torch.equal(run.deepstack, full.deepstack[run.keep])


def test_rules_differ_and_evs_is_the_default(vlm):
    unnamed, evs = (vlm.trace(**ASK, pruning_rate=0.6, **rule).keep_masks[1] for rule in ({}, {"pruning": "evs"}))
    assert torch.equal(unnamed, evs)
    assert not torch.equal(vlm.trace(**ASK, **PRUNED).keep_masks[1], evs)


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


@pytest.mark.parametrize("name", PRUNERS)
def test_families_without_places_refuse_every_rule(name, tmp_path, monkeypatch):
    """MiniCPM-V's query tokens stand for no place; Step3 takes no videos. Nothing is encoded before that is said."""
    cases = {
        "pruning_rate: must be 0 for MiniCPM-V's videos": make_minicpmv_checkpoint(tmp_path / "minicpmv", "4.5"),
        "videos: Step3": make_step3_checkpoint(tmp_path / "step3"),
    }
    for message, folder in cases.items():
        vlm = refvl.load(folder, device="cpu", progress=False)
        monkeypatch.setattr(type(vlm.encoder), "forward", None)
        with pytest.raises(ValueError, match=message):
            vlm.chat("What moves?", videos=[CLIP], pruning_rate=0.5, pruning=name)


def test_the_command_line_names_the_same_rules(vlm, folder, monkeypatch, capsys):
    assert list(Pruning) == list(PRUNERS)
    want = vlm.chat("Hm?", videos=[CLIP], max_new_tokens=8, **PRUNED)
    command = ["refvl", "chat", folder, "Hm?", "-v", CLIP, "--max-new-tokens", "8", "--pruning-rate", "0.6"]
    monkeypatch.setattr(sys, "argv", [*map(str, command), "--pruning", "vidcom2"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == want + "\n"
