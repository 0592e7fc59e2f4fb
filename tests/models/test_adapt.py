"""Adapting a tiny model to new words.

Oracle: the public path on the same scenes, and the scenes before the change.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import refvl
from data.training import adapt, scenes
from data.training.tiny_family import find_family
from refvl.serving import adapters

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("kind", adapt.NEW)
def test_only_the_first_object_is_new(kind):
    for index in range(6):
        old = scenes.draw_scene("test", index, objects=(1, 3))
        new = adapt.new_scene("test", index, kind)
        assert getattr(new.things[0], kind) == adapt.NEW[kind]
        assert new.things[1:] == old.things[1:]
        changes = ("color", "rgb") if kind == "color" else ("shape",)
        same = {name: getattr(old.things[0], name) for name in changes}
        assert replace(new, things=(replace(new.things[0], **same), *new.things[1:])) == old
        changed = (scenes.render(new) != scenes.render(old)).any(-1)
        row, column = divmod(new.things[0].place, 3)
        in_place = changed[28 * row :, 28 * column :][:28, :28]
        assert changed.any() and in_place.sum() > 0.5 * changed.sum()
        questions = adapt.draw_questions(new, kind, np.random.default_rng(0))
        assert questions[0].answer == adapt.NEW[kind]
        assert adapt.NEW[kind] in questions[1].text


@pytest.mark.parametrize("steps", [4, 10])  # a tenth of ten is a warm-up of one step, which once divided by zero
def test_a_step_moves_the_adapter_alone(steps):
    """Oracle: the weights before. The loss on the same scenes is smaller afterwards."""
    vlm = refvl.load(find_family().folder, device="cpu", progress=False)
    plain = {name: weight.clone() for name, weight in vlm.language_model.named_parameters()}
    torch.manual_seed(0)
    names = adapters.layers(vlm, "language_model")
    adapters.attach(vlm, peft.LoraConfig(r=4, lora_alpha=32, target_modules=names))
    losses = [loss for _, loss in adapt.adapt(adapt.Pupil.of(vlm), steps, count=4)]
    assert losses[-1] < losses[0]
    for name, weight in vlm.language_model.named_parameters():
        if "lora_B" in name:
            assert weight.any()
        elif "lora_" not in name:
            assert torch.equal(weight, plain[name.replace(".base_layer", "")])
