"""Teach a tiny model new words with a LoRA adapter: the functions of notebook 13.

The new words are a colour, "orange", and a shape, "ring", which no shipped model has seen or said. A scene is drawn as
usual, and then its first object gets the new colour or shape, so new and old scenes differ in nothing else. Questions,
prompts and their layout are those of the training (`tiny_model.py`). The weights are those of a loaded `VLM`; only the
layers that PEFT inserts are trained.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import refvl
from data.training import scenes
from data.training.tiny_family import find_family
from data.training.tiny_model import Batch, PromptBuilder, TinyModel, are_right

NEW = {"color": "orange", "shape": "ring"}  # kind of question -> the new word that answers it
RGB = (240, 130, 30)
POOL = 256  # the number of scenes, which are reused with different questions


def new_scene(split: str, index: int, kind: str) -> scenes.Scene:
    """Draw scene number `index` of a split, with an orange first object or a ring as its first object."""
    scene = scenes.draw_scene(split, index, objects=(1, 3))
    first = scene.things[0]
    if kind == "color":
        jitter = np.random.default_rng([scenes.SEED, scenes.SPLITS[split], index, 9]).uniform(-15, 15, 3)
        first = replace(first, color=NEW[kind], rgb=tuple(float(v) for v in np.clip(RGB + jitter, 0, 255)))
    else:
        first = replace(first, shape=NEW[kind])
    return replace(scene, things=(first, *scene.things[1:]))


@dataclass
class Pupil:
    """A loaded model in a form for training: the same modules, which accept batches of scenes and questions."""

    vlm: refvl.VLM
    builder: PromptBuilder
    model: TinyModel

    @classmethod
    def of(cls, vlm: refvl.VLM, name: str = "qwen2_5_vl") -> "Pupil":
        """Wrap `vlm`, a model loaded from the shipped folder of the family `name`."""
        family = find_family(name)
        with torch.device("meta"):
            model = TinyModel(family)
        model.visual, model.model = vlm.encoder, vlm.language_model.model
        return cls(vlm, PromptBuilder(family), model)

    def batch(self, drawn: list[scenes.Scene], questions: list[list[scenes.Question]]) -> Batch:
        """Build a batch of images, with the same number of questions about each."""
        pixels = torch.from_numpy(np.stack([scenes.render(scene) for scene in drawn]))
        return self.builder.batch(pixels[:, None], questions)

    def answer(self, batch: Batch) -> Tensor:
        """Return the logits of every answer token (A, V)."""
        self.model.lm_head = self.vlm.language_model.lm_head  # PEFT may have replaced this layer
        return self.model(batch)[0]


def draw_questions(scene: scenes.Scene, kind: str, rng: np.random.Generator) -> list[scenes.Question]:
    """Draw three questions: one that the new word answers, one that contains it, and one about any object."""
    found = scenes.all_questions(scene)
    answered = [q for k in (kind, f"{kind}_at") for q in found.get(k, ()) if q.answer == NEW[kind]]
    asking = [q for q in found["place"] if NEW[kind] in q.text]
    anything = [q for k in ("color", "shape", "place") for q in found.get(k, ())]
    return [pool[int(rng.integers(len(pool)))] for pool in (answered, asking, anything)]


def training_batch(pupil: Pupil, step: int, count: int, replay: float) -> Batch:
    """Build a batch of `count` scenes with three questions each; a share `replay` of them has no new word."""
    rng = np.random.default_rng([scenes.SEED, step])
    drawn, asked = [], []
    for i in range(step * count, (step + 1) * count):
        kind, index = ("color", "shape")[i % 2], i % POOL
        if rng.random() < replay:
            drawn.append(scenes.draw_scene("train", index))
            asked.append(scenes.draw_questions(drawn[-1], ["color", "shape", "place"], rng))
        else:
            drawn.append(new_scene("train", index, kind))
            asked.append(draw_questions(drawn[-1], kind, rng))
    return pupil.batch(drawn, asked)


def adapt(
    pupil: Pupil, steps: int, *, lr: float = 8e-3, count: int = 6, replay: float = 0.0
) -> Iterator[tuple[int, float]]:
    """Train the trainable weights for `steps` steps of `count` scenes; yield (step, loss) after each."""
    weights = [weight for weight in pupil.vlm.adapters.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=max(0.1, 2 / steps))
    pupil.vlm.adapters.train()
    for step in range(steps):
        batch = training_batch(pupil, step, count, replay)
        loss = F.cross_entropy(pupil.answer(batch), batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield step + 1, loss.item()
    pupil.vlm.adapters.eval()


@torch.no_grad()
def accuracy(pupil: Pupil, what: str, count: int = 50) -> float:
    """Return the share of correct answers to one question about each of `count` held-out scenes, decoded greedily.

    what: "color" or "shape", for answers with the new word; "place": the places of new objects; "old": scenes and
    questions of the first training, about colour, shape and place.
    """
    rng, drawn, asked = np.random.default_rng(count), [], []
    for index in range(count):
        kind = what if what in NEW else ("color", "shape")[index % 2]
        drawn.append(scenes.draw_scene("test", index) if what == "old" else new_scene("test", index, kind))
        if what == "old":
            asked.append(scenes.draw_questions(drawn[-1], [str(rng.choice(["color", "shape", "place"]))], rng))
        else:
            answered, asking, _ = draw_questions(drawn[-1], kind, rng)
            asked.append([asking if what == "place" else answered])
    batch = pupil.batch(drawn, asked)
    return sum(are_right(batch, pupil.answer(batch))) / count
