"""Teach a shipped model to answer with boxes: `python -m data.training.train_boxes --model qwen3_vl`.

Only a LoRA adapter of the language model is trained, `adapters/boxes-qwen3_vl`: the shipped weights do not change, and
neither do any answers while the adapter is off. Each of the tower's tokens describes the content in its middle; so
here, too, every object lies within one token's cell, slightly off centre. Images have many sizes and aspect ratios. The
processor stretches them to 4 x 3 or 3 x 4 tokens, so the unit of coordinates (see `refvl.study.boxes`) determines where
a box appears in the image. As in `train_tiny.py`, probes help: in the last layer, each token of the image predicts its
row and column, and each word of an answer predicts the whole box.
"""

import argparse
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import peft
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import refvl
from data.training import run, scenes
from data.training.evaluate_tiny import versions
from data.training.tiny_family import TinyFamily, find_family
from data.training.tiny_model import Batch, PromptBuilder, TinyModel
from data.training.train_tiny import expose
from refvl.paths import DATA
from refvl.serving import adapters
from refvl.study import boxes

TITLES = {"qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
PHRASES = scenes.PHRASES["place"]  # the model answers with a place while the adapter is off
SIDES, ASPECTS = (160, 280), ((1.1, 1.5), (1 / 1.5, 1 / 1.1))  # ranges of sqrt(area) in px, and of width / height
CELLS = ((4, 3), (3, 4))  # (columns, rows) of tokens for each shape
RADII, JITTER = (9 / 28, 11.5 / 28), 2 / 28  # sides of objects, in cells, as in `scenes.py`
ASKED = 2  # the number of questions about each image
MEASUREMENTS, GOAL = DATA / "measurements" / "boxes.json", 0.7  # the mean overlap to reach
BOX_WEIGHT = 4.0  # the weight of the box probe's loss


def folder_of(name: str) -> Path:
    return DATA / "adapters" / f"boxes-{name}"


# ------------------------------------------------------------------------------------------------- scenes


def draw_scene(split: str, index: int) -> scenes.Scene:
    """Draw image number `index` of a split: wide and tall ones alternate, so every second image has the same grid.

    It is the image of that number in `scenes.draw_scene`, with a different size and different places, so the same
    scenes are held out.
    """
    rng = np.random.default_rng([scenes.SEED, scenes.SPLITS[split], index, 11])
    scene, (columns, rows) = scenes.draw_scene(split, index), CELLS[index % 2]
    side, stretch = rng.uniform(*SIDES), rng.uniform(*ASPECTS[index % 2]) ** 0.5
    width, height = round(side * stretch), round(side / stretch)
    cell = np.array([width / columns, height / rows])
    placed = []
    for thing, place in zip(scene.things, rng.permutation(columns * rows), strict=False):
        x, y = cell * (np.array([place % columns, place // columns]) + 0.5 + rng.uniform(-JITTER, JITTER, 2))
        placed.append(replace(thing, center=(float(x), float(y)), radius=float(cell.min() * rng.uniform(*RADII))))
    return replace(scene, things=tuple(placed), size=(width, height))


def box_of(thing: scenes.Thing, size: tuple[int, int]) -> list[int]:
    """Return x1, y1, x2, y2 in pixels of the image, around all pixels of which the object covers at least half."""
    (x, y), covered = scenes.coverage(thing, thing.center, size)
    rows, columns = (np.flatnonzero((covered >= 0.5).any(axis)) for axis in (1, 0))
    return [int(v) for v in (x + columns[0], y + rows[0], x + columns[-1] + 1, y + rows[-1] + 1)]


def resized_size(vlm: refvl.VLM, size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) to which the processor resizes an image."""
    return vlm.processor.image_config.target_size(*size[::-1])[::-1]


def ask(scene: scenes.Scene, number: int, phrase: str, resized: tuple[int, int], title: str) -> scenes.Question:
    """Write the question for object `number`, and the answer in the coordinates of the family `title`."""
    thing = scene.things[number % len(scene.things)]
    name, box = f"{thing.color} {thing.shape}", box_of(thing, scene.size)
    [told] = boxes.from_picture([box], picture=scene.size, resized=resized, family=title).round().int().tolist()
    return scenes.Question("box", phrase.format(x=name), str(told))


# ----------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recipe:
    """Settings of the training; the defaults are those of the committed adapters."""

    steps: int = 2000
    pool: int = 2000  # images per worker, which are reused with different questions
    asked: int = 16  # images per step
    rank: int = 32
    alpha: int = 64
    lr: float = 3e-3
    warmup: int = 20
    see: int = 0  # the tower is already trained
    seed: int = 0
    measure_every: int = 200
    measure_on: int = 48  # held-out images


class SeenModel(TinyModel):
    """A model whose media are already encoded: it accepts the tower's outputs, (B, M, D) or wider."""

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels


class Learner(nn.Module):
    """The language model with its new adapter, and the probes that help its training."""

    def __init__(self, vlm: refvl.VLM, family: TinyFamily, config: dict, recipe: Recipe):
        super().__init__()
        torch.manual_seed(recipe.seed)
        layers = [*adapters.layers(vlm, "language_model"), "lm_head"]
        adapters.attach(vlm, peft.LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=layers)).train()
        with torch.device("meta"):
            self.vlm = SeenModel(family, config)
        self.vlm.visual, self.vlm.model = vlm.encoder, vlm.language_model.model
        self.vlm.lm_head = vlm.language_model.lm_head
        width = config["text_config"]["hidden_size"]
        self.place_probe, self.box_probe = nn.Linear(width, 2 * max(CELLS[0])), nn.Linear(width, 4)
        for probe in (self.place_probe, self.box_probe):
            nn.init.zeros_(probe.weight)
            nn.init.zeros_(probe.bias)

    def place_loss(self, batch: Batch, inner_BLD: Tensor) -> Tensor:
        """Return the loss of the probe that predicts each image token's row and column from the last layer."""
        [span] = batch.spans
        media_BMD = inner_BLD[:, span.offset : span.offset + span.num_tokens]
        place = torch.cartesian_prod(torch.arange(span.h), torch.arange(span.w)).expand(len(media_BMD), -1, 2)
        row, column = self.place_probe(media_BMD).flatten(0, 1).chunk(2, -1)
        return F.cross_entropy(row, place[..., 0].flatten()) + F.cross_entropy(column, place[..., 1].flatten())

    def box_loss(self, batch: Batch, inner_BLD: Tensor, boxes_Q4: Tensor) -> Tensor:
        """Return the loss of the probe that predicts the box from each answer token in the last layer.

        boxes_Q4: boxes as fractions of the sides.
        """
        found = self.box_probe(inner_BLD[batch.target_rows, batch.target_columns])
        return BOX_WEIGHT * F.l1_loss(found, boxes_Q4[batch.question_of_target])


class Trainer(run.Trainer):
    weights_file = adapters.WEIGHTS

    def __init__(self, name: str, recipe: Recipe, rank: int):
        super().__init__(find_family(name), recipe, rank)
        self.loaded = refvl.load(self.family.folder, device="cpu", dtype="float32", progress=False)
        config = json.loads((self.family.folder / "config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(self.family.folder / "tokenizer.json"))
        self.builder = PromptBuilder(self.family, self.tokenizer, config)
        self.learner = Learner(self.loaded, self.family, config, recipe)
        weights = [weight for weight in self.learner.parameters() if weight.requires_grad]
        self.optimizers = [torch.optim.AdamW(weights, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)]
        self.peaks = [group["lr"] for group in self._groups()]

    def losses(self) -> list[Tensor]:
        """Return the losses of answers, places and boxes."""
        batch, told = self.ask(np.random.default_rng([self.recipe.seed, self.step, self.rank]))
        logits, _, inner = self.learner.vlm(batch)
        losses = [
            F.cross_entropy(logits, batch.targets),
            self.learner.place_loss(batch, inner),
            self.learner.box_loss(batch, inner, told),
        ]
        sum(losses).backward()
        return [x.detach() for x in losses]

    @cached_property
    def seen(self) -> list[tuple[Tensor, list[scenes.Scene], tuple[int, int]]]:
        """Return for each shape: the tower's outputs for its images (N, M, W), their scenes, and their resized size."""
        found, rng = [], np.random.default_rng([self.recipe.seed, self.rank])
        for shape in range(len(ASPECTS)):
            numbers = range(shape, self.recipe.pool, 2)
            drawn = [draw_scene("train", i + self.rank * self.recipe.pool) for i in numbers]
            rows = list[Tensor]()
            for i in range(0, len(drawn), 100):
                pixels = [torch.tensor(scenes.render(scene))[None, None] for scene in drawn[i : i + 100]]
                shown = [Image.fromarray(expose(x, rng)[0, 0].numpy()) for x in pixels]
                rows += self.loaded.encode(shown, progress=False)
            found.append((torch.stack(rows), drawn, resized_size(self.loaded, drawn[0].size)))
        return found

    def ask(self, rng: np.random.Generator) -> tuple[Batch, Tensor]:
        """Draw `ASKED` questions about each image, and the boxes in question (Q, 4), as fractions of the sides."""
        rows, drawn, (width, height) = self.seen[self.step % 2]
        chosen = rng.choice(len(rows), self.recipe.asked, replace=False)
        picked, title = [drawn[i] for i in chosen], self.loaded.family.name
        asked = [[ask(s, i, str(rng.choice(PHRASES)), (width, height), title) for i in range(ASKED)] for s in picked]
        sides = (28 * side // self.loaded.processor.image_config.factor for side in (height, width))
        batch = self.builder.batch(torch.empty(len(picked), 1, *sides, 3, device="meta"), asked)
        things = [(scene.things[i % len(scene.things)], scene.size) for scene in picked for i in range(ASKED)]
        told = np.array([np.divide(box_of(thing, size), (*size, *size)) for thing, size in things], np.float32)
        return replace(batch, pixels=rows[chosen]), torch.from_numpy(told)

    def measure(self) -> dict[str, float]:
        self.loaded.adapters.eval()
        found = summary(ask_all(self.loaded, "select", range(self.recipe.measure_on)))
        self.loaded.adapters.train()
        return {name: round(value, 4) for name, value in found.items()}

    def write(self, out: Path) -> None:
        """Write the adapter, in bfloat16 like the weights that it adapts."""
        self.loaded.adapters.save_pretrained(out)
        (out / "README.md").unlink(missing_ok=True)  # PEFT's template
        weights = load_file(out / adapters.WEIGHTS)
        save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, out / adapters.WEIGHTS)
        (out / adapters.WEIGHTS).chmod(0o644)


# --------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer about one object of a held-out image, and its overlap with the object's box (IoU).

    own: the overlap if the answer is read in the family's convention; other: if it is read in the other family's.
    """

    index: int
    scene: scenes.Scene
    thing: scenes.Thing
    said: str
    own: float
    other: float


def request(split: str, index: int) -> dict:
    """Return arguments of `chat` that ask for the first object of an image."""
    scene = draw_scene(split, index)
    name = f"{scene.things[0].color} {scene.things[0].shape}"
    return {"prompt": PHRASES[index % 3].format(x=name), "images": [Image.fromarray(scenes.render(scene))]}


def ask_all(vlm: refvl.VLM, split: str, indices: Sequence[int], batch: int = 50) -> list[Answer]:
    """Ask about the first object of each image; parse the answers and convert their boxes."""
    said = list[str]()
    for i in range(0, len(indices), batch):
        said += vlm.chat_batch([request(split, index) for index in indices[i : i + batch]], max_new_tokens=32)
    [other] = [title for title in TITLES.values() if title != vlm.family.name]
    answers = []
    for index, text in zip(indices, said, strict=True):
        scene = draw_scene(split, index)
        found, truth = boxes.parse(text, vlm.family.name)[:1], box_of(scene.things[0], scene.size)
        sizes = {"picture": scene.size, "resized": resized_size(vlm, scene.size)}
        overlaps = [
            iou(box, truth)
            for title in (vlm.family.name, other)
            for box in boxes.to_picture(found, **sizes, family=title).tolist() or [[0.0] * 4]
        ]
        answers.append(Answer(index, scene, scene.things[0], text, *overlaps))
    return answers


def middle_box(answer: Answer) -> list[float]:
    """Return a box of the mean size in the middle of the object's cell: the best guess from the cell alone."""
    cell = np.divide(answer.scene.size, CELLS[answer.index % 2])
    middle = (np.floor_divide(answer.thing.center, cell) + 0.5) * cell
    radius = cell.min() * sum(RADII) / 2
    return [*(middle - radius).tolist(), *(middle + radius).tolist()]


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """Return mean overlaps of the answers, and of boxes in the middle of the correct cell and of a different cell."""
    truths = [box_of(a.thing, a.scene.size) for a in answers]
    middles = [middle_box(a) for a in answers]
    return {
        "mean_iou": float(np.mean([a.own for a in answers])),
        "at_least_0.5": float(np.mean([a.own >= 0.5 for a in answers])),
        "mean_iou_in_the_other_convention": float(np.mean([a.other for a in answers])),
        "mean_iou_of_the_cell": float(np.mean(list(map(iou, middles, truths)))),
        "mean_iou_of_another_cell": float(np.mean(list(map(iou, middles[2:] + middles[:2], truths)))),
    }


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the intersection over union of two boxes x1, y1, x2, y2."""
    sides = [max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)]
    areas = [max(0.0, x2 - x1) * max(0.0, y2 - y1) for x1, y1, x2, y2 in (a, b)]
    return sides[0] * sides[1] / (sum(areas) - sides[0] * sides[1])


def measure(name: str, count: int) -> dict:
    """Measure a model's adapter on held-out images; return its row of `MEASUREMENTS`."""
    vlm = refvl.load(find_family(name).folder, device="cpu", dtype="float32", progress=False)
    adapters.attach(vlm, folder_of(name))
    row = {"model": name, "weights_sha256": run.digest(folder_of(name), adapters.WEIGHTS)}
    return row | {key: round(value, 4) for key, value in summary(ask_all(vlm, "test", range(count))).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TITLES, help="the family to train; if omitted, measure the shipped adapters")
    parser.add_argument("-n", type=int, default=500, help="held-out images to measure on")
    run.add_arguments(parser, Recipe)
    args = vars(parser.parse_args())
    name, out, resume, stop, count = (args.pop(key) for key in ("model", "out", "resume", "stop", "n"))
    if name is not None:
        recipe = Recipe(**{key: value for key, value in args.items() if value is not None})
        run.train(Trainer, (name, recipe), out or folder_of(name), resume=resume, stop=stop)
        return
    record = {"what": "overlap (IoU) of answered and painted boxes, held-out pictures, greedy decoding", "n": count}
    record |= {"split": "test", "seed": scenes.SEED, "date": datetime.date.today().isoformat(), "versions": versions()}
    record["models"] = [measure(name, count) for name in TITLES]
    MEASUREMENTS.write_text(json.dumps(record, indent=2) + "\n")
    print(MEASUREMENTS.read_text())


if __name__ == "__main__":
    main()
