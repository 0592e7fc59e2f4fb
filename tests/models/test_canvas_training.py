"""MiniCPM-V 4.7 as it is trained. Oracle: refvl on the folder that training writes, question by question."""

import numpy as np
import pytest
import torch
from closeness import assert_agree
from PIL import Image
from random_models import NEEDS_5_23

import refvl
from data.training import scenes
from data.training.tiny_minicpmv4_7 import FAMILY
from data.training.tiny_model import PromptBuilder, TinyModel

pytestmark = NEEDS_5_23


@pytest.mark.thorough
def test_rows_of_questions_are_what_refvl_answers(tmp_path):
    """Logits of two questions about one scene, in one row, against each alone; and every weight gets a gradient."""
    tokenizer = FAMILY.train_tokenizer()
    config = FAMILY.config(tokenizer)
    model, builder = TinyModel(FAMILY, config), PromptBuilder(FAMILY, tokenizer, config)
    model.init_weights(0, std=0.2)
    with torch.no_grad():
        for parameter in model.parameters():  # as the folder holds them
            parameter.copy_(parameter.to(torch.bfloat16))
    FAMILY.write_checkpoint(tmp_path, config, tokenizer, model.checkpoint_weights())

    scene = scenes.draw_sort("picture", "test", 2)
    questions = scenes.draw_questions(scene, ["color", "place"], np.random.default_rng(0))
    pixels = scenes.render(scene)[None, None]
    logits, _, _ = model(batch := builder.batch(pixels, [questions]))
    torch.nn.functional.cross_entropy(logits, batch.targets).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []

    vlm = refvl.load(tmp_path, device="cpu", progress=False)
    for i, question in enumerate(questions):
        trace = vlm.trace(question.text, images=[Image.fromarray(pixels[0, 0])], max_new_tokens=1)
        assert trace.layouts == FAMILY.patchify(torch.from_numpy(pixels))[1]
        alone = vlm.language_model(
            inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None], logits_to_keep=1
        ).logits[0, 0]
        first = int((batch.question_of_target == i).nonzero()[0])
        assert_agree(logits[first].detach(), alone, model)
