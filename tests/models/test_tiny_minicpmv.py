"""The tiny MiniCPM-V 4.5: as it is trained, and what it answers. Its weights are older than its recipe.

It is measured here on scenes 100,000 and following of the split "test": they are neither among those it was trained on,
nor among those that chose the recipe, nor among those of `data/measurements`.
"""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import assert_agree

import refvl
from data.training import demo_scenes, evaluate_tiny, photos, scenes
from data.training.tiny_minicpmv import FAMILY, PACKING, QUERIES, SLICES
from data.training.tiny_model import PromptBuilder, TinyModel
from refvl.encoders import SliceGroup
from refvl.paths import DATA
from refvl.pixels.slices import slice_grid

FIRST = 100_000
BAR = 0.95


@pytest.fixture(scope="module")
def tiny():
    """(tokenizer, config, model) with weights in the precision of the checkpoint, so that both paths have the same."""
    tokenizer = FAMILY.train_tokenizer()
    config = FAMILY.config(tokenizer)
    model = TinyModel(FAMILY, config)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return tokenizer, config, model.eval()


@pytest.fixture(scope="module")
def vlm(tiny, tmp_path_factory):
    tokenizer, config, model = tiny
    folder = tmp_path_factory.mktemp("tiny-minicpmv")
    FAMILY.write_checkpoint(folder, config, tokenizer, model.checkpoint_weights())
    return refvl.load(folder, device="cpu", dtype="float32", progress=False)


def test_a_scene_has_slices():
    assert slice_grid(scenes.SIDE, scenes.SIDE, SLICES) == (2, 2)


@pytest.mark.parametrize("sort", ["picture", "motion"])
def test_training_sees_what_the_public_path_sees(tiny, vlm, sort):
    """Prompt ids, embeddings of the medium and the logits of the answer, teacher-forced."""
    tokenizer, config, model = tiny
    builder = PromptBuilder(FAMILY, tokenizer, config)
    scene = scenes.draw_sort(sort, "select", 3)
    pixels, picture = scenes.render(scene), sort == "picture"
    [question] = scenes.draw_questions(scene, ["place" if picture else "motion"], np.random.default_rng(0))
    batch = builder.batch(
        (pixels[None] if picture else pixels)[None], [[question]], seconds=None if picture else [scenes.SECONDS]
    )
    trace = vlm.trace(question.text, **({"images": [pixels]} if picture else {"videos": [pixels]}), max_new_tokens=1)
    length = len(trace.full_ids)
    assert batch.ids_BL[0, :length].tolist() == trace.full_ids.tolist()
    assert [s.offset for s in batch.spans] == [s.offset for s in trace.spans]
    assert len(batch.spans) == (5 if picture else scenes.FRAMES // PACKING)
    with torch.no_grad():
        logits, media_BMD, *_ = model(batch)
    assert media_BMD.shape[1] == QUERIES * len(batch.spans)
    assert_agree(media_BMD[0], trace.embeds[0], vlm.encoder)
    assert int(logits[0].argmax()) == trace.token_ids[0]


def test_released_names(tiny):
    weights = tiny[2].checkpoint_weights()
    assert {name.split(".")[0] for name in weights} == {"llm", "vpm", "resampler"}
    assert weights["vpm.embeddings.patch_embedding.weight"].shape == (96, 3, 14, 14)
    assert "vpm.encoder.layers.3.self_attn.v_proj.bias" in weights and "llm.lm_head.weight" in weights


# ----------------------------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def trained():
    return refvl.load(FAMILY.folder, device="cpu", progress=False)


@pytest.mark.parametrize("kind", FAMILY.kinds)
def test_held_out_scenes(trained, kind):
    """Oracle: the scene's own answer, letter by letter."""
    asked = evaluate_tiny.evaluate(trained, kind, 60, first=FIRST)
    assert evaluate_tiny.share(asked) >= BAR, [(a.question, a.said) for a in asked if not a.is_right]


def test_motion_is_read_from_the_times(trained):
    """Frames of a pack swapped together with their times give the same tokens; the times alone, other ones."""
    [request] = evaluate_tiny.requests_for("motion", 1, first=FIRST)
    patches = trained.trace(**request.arguments, max_new_tokens=1).patches[0]
    rows = patches.pixel_values.split([h * w for group in patches.layout for h, w in group.slices])
    swapped_rows = torch.cat([rows[i] for pair in range(0, len(rows), 2) for i in (pair + 1, pair)])
    turned = tuple(replace(group, temporal_ids=group.temporal_ids[::-1]) for group in patches.layout)
    with torch.inference_mode():
        tokens, both, times = (
            trained.encoder(r, [layout])
            for r, layout in (
                (patches.pixel_values, patches.layout),
                (swapped_rows, turned),
                (patches.pixel_values, turned),
            )
        )
    assert all(isinstance(group, SliceGroup) and len(group.slices) == 2 for group in patches.layout)
    assert_agree(both, tokens, trained.encoder)
    assert (times - tokens).abs().max() > 0.1


@pytest.mark.parametrize("clip", [False, True])
def test_the_demo_files_are_answered(trained, clip):
    """Oracle: the scene they were rendered from; the clip went through H.264."""
    scene = demo_scenes.demo_clip() if clip else demo_scenes.demo_picture()
    media = {"videos": [demo_scenes.CLIP]} if clip else {"images": [demo_scenes.PICTURE]}
    for kind in ("motion", "color") if clip else ("color", "shape", "place"):
        for question in scenes.all_questions(scene)[kind]:
            assert trained.chat(question.text, **media, max_new_tokens=8) == question.answer


def test_photographs_are_recognised(trained):
    for name, answer in photos.PICTURES.items():
        assert trained.chat("What is in the picture?", images=[DATA / "pictures" / name], max_new_tokens=8) == answer


def test_the_measurements_are_of_these_weights_and_meet_the_bar():
    """Oracle: the checksum of the weights, and the bar for every kind."""
    record = json.loads(FAMILY.measurements.read_text())
    assert record["weights_sha256"] == hashlib.sha256((FAMILY.folder / "model.safetensors").read_bytes()).hexdigest()
    assert record["n"] >= 1000 and record["split"] == "test"
    assert record["accuracy"].keys() == FAMILY.kinds.keys()
    assert min(record["accuracy"].values()) >= BAR
