"""Adapting a tiny model to new words. Oracle: the public path on the same scenes, and the scenes before the change."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import refvl
from data.training import adapt, scenes
from data.training.run import average_gradients
from data.training.tiny_family import find_family
from refvl.serving import adapters

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def pupil():
    return adapt.Pupil.of(refvl.load(find_family().folder, device="cpu", progress=False))


@pytest.mark.parametrize("kind", adapt.NEW)
def test_only_the_first_object_is_new(kind):
    for index in range(6):
        old, new = scenes.draw_scene("test", index, objects=(1, 3)), adapt.new_scene("test", index, kind)
        assert getattr(new.things[0], kind) == adapt.NEW[kind] and new.things[1:] == old.things[1:]
        same = (
            {"color": old.things[0].color, "rgb": old.things[0].rgb}
            if kind == "color"
            else {"shape": old.things[0].shape}
        )
        assert replace(new, things=(replace(new.things[0], **same), *new.things[1:])) == old
        changed = (scenes.render(new) != scenes.render(old)).any(-1)
        row, column = divmod(new.things[0].place, 3)
        assert (
            changed.any()
            and changed[28 * row : 28 * row + 28, 28 * column : 28 * column + 28].sum() > 0.5 * changed.sum()
        )
        questions = adapt.draw_questions(new, kind, np.random.default_rng(0))
        assert questions[0].answer == adapt.NEW[kind] and adapt.NEW[kind] in questions[1].text


def test_a_pupil_answers_as_the_model_does(pupil):
    """Oracle: `chat`, letter by letter."""
    drawn = [scenes.draw_scene("test", i) for i in range(4)] + [adapt.new_scene("test", i, "color") for i in range(2)]
    asked = [scenes.draw_questions(scene, ["color", "place"], np.random.default_rng(0)) for scene in drawn]
    batch = pupil.batch(drawn, asked)
    right = pupil.answer(batch).argmax(-1) == batch.targets
    questions = [(scene, question) for scene, row in zip(drawn, asked, strict=True) for question in row]
    for number, (scene, question) in enumerate(questions):
        said = pupil.vlm.chat(question.text, images=[scenes.render(scene)], max_new_tokens=16)
        assert (said == question.answer) == bool(right[batch.question_of_target == number].all())


@pytest.mark.parametrize("steps", [4, 10])  # a tenth of ten is a warm-up of one step, which once divided by zero
def test_a_step_moves_the_adapter_alone(steps):
    """Oracle: the weights before. The loss on the same scenes is smaller afterwards."""
    vlm = refvl.load(find_family().folder, device="cpu", progress=False)
    plain = {name: weight.clone() for name, weight in vlm.language_model.named_parameters()}
    adapters.attach(vlm, peft.LoraConfig(r=4, lora_alpha=32, target_modules=adapters.layers(vlm, "language_model")))
    losses = [loss for _, loss in adapt.adapt(adapt.Pupil.of(vlm), steps, count=4)]
    assert losses[-1] < losses[0]
    for name, weight in vlm.language_model.named_parameters():
        if "lora_B" in name:
            assert weight.any()
        elif "lora_" not in name:
            assert torch.equal(weight, plain[name.replace(".base_layer", "")])


def test_a_trainer_alone_keeps_its_own_gradients():
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    before, losses = layer.weight.grad.clone(), torch.ones(2)
    assert average_gradients(layer, losses).equal(losses) and layer.weight.grad.equal(before)
