"""The tiny MiniCPM-V 4.5: as it is trained, and how it reads times. `test_tiny_families.py` asks it what it can do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import assert_agree

import refvl
from data.training import evaluate_tiny, scenes
from data.training.tiny_minicpmv import FAMILY, PACKING, QUERIES, SLICES
from data.training.tiny_model import PromptBuilder, TinyModel
from refvl.pixels.slices import SliceGroup, slice_grid


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


def test_motion_is_read_from_the_times(trained):
    """Frames of a pack swapped together with their times give the same tokens; the times alone, other ones."""
    [request] = evaluate_tiny.requests_for("motion", 1)
    patches = trained.trace(**request.arguments, max_new_tokens=1).patches[0]
    rows = patches.pixel_values.split([h * w for group in patches.layout for h, w in group.slices])
    packs = [rows[i : i + PACKING] for i in range(0, len(rows), PACKING)]
    swapped_rows = torch.cat([row for pack in packs for row in reversed(pack)])
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
    assert all(isinstance(group, SliceGroup) and len(group.slices) == PACKING for group in patches.layout)
    assert_agree(both, tokens, trained.encoder)
    assert (times - tokens).abs().max() > 0.1
