"""The tiny MiniCPM-V 4.5 as it is trained. Oracle: the public path (`refvl.load`) on the folder it writes."""

import numpy as np
import pytest
import torch

import refvl
from data import scenes
from data.tiny_minicpmv import FAMILY, QUERIES, SLICES
from data.tiny_model import PromptBuilder, TinyModel
from refvl.slices import slice_grid


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
    assert [s.offset for s in batch.spans] == [s.offset for s in trace.spans] and len(batch.spans) == (
        5 if picture else 3
    )
    with torch.no_grad():
        logits, media_BMD, *_ = model(batch)
    assert media_BMD.shape[1] == QUERIES * len(batch.spans)
    assert torch.allclose(media_BMD[0], trace.embeds[0], atol=1e-4)
    assert int(logits[0].argmax()) == trace.token_ids[0]


def test_released_names(tiny):
    weights = tiny[2].checkpoint_weights()
    assert {name.split(".")[0] for name in weights} == {"llm", "vpm", "resampler"}
    assert weights["vpm.embeddings.patch_embedding.weight"].shape == (96, 3, 14, 14)
    assert "vpm.encoder.layers.3.self_attn.v_proj.bias" in weights and "llm.lm_head.weight" in weights
