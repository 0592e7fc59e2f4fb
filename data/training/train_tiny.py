"""Train the tiny models that ship with refvl: `python -m data.training.train_tiny --model qwen2_5_vl`.

With the following methods, a model of 1.4 million parameters learns this in minutes:

1. **See, then speak.** During the first steps only the vision tower learns, with a linear probe on its output that
   names shape, colour, movement and place of every cell. Nine labels per image teach more than one answered question.
   Then the language model joins; the probe remains a small part of the loss and is not part of the checkpoint.
2. **Questions share a scene, but not each other.** See `tiny_model.py`.
3. **Every second scene is a confusing one**: objects in one row or column, few shapes and colours. Without such
   scenes, the second word of "bottom left" is guessed from whatever else is in the bottom row. The share of
   correct places stayed at 85 % for as long as we looked, and rose to 98 % within 300 steps of confusing
   scenes.

A model whose prompts contain timestamps (`scenes.draw_change`) needs two more methods:

4. **Timestamp tokens learn what happened.** A second probe, on the states of these tokens before the last
   layer, names the movement in the step before them.
5. **A video is shown four times, each time with different timestamps.** To answer "when", the model has to find
    the step and repeat its timestamp. To learn to repeat any number, it needs many numbers, but most of the
    time of training goes into pixels.

If timestamps are spelt digit by digit before a frame (Qwen3-VL), the probe reads the token after the frame
instead, and also predicts the timestamp from this token.

With neither method, 30 % of the answers were correct after 2,500 steps. With the probe, 83 %
were correct after 1,700 steps. With both methods, helper questions for the first and last
timestamp, and 30 seconds instead of 40, 83 % were correct after 700 steps.

A model reads an input only if nothing else contains the same information:

6. **Positions are shuffled.** In most batches of images the nine tokens exchange their places, and the
   questions follow the positions. In half of the videos, the steps' times run backwards, and the correct answer
   is the opposite direction. The probe does not ask for the place, because otherwise the tower would learn to
   encode it. A second probe, in the last layer, predicts from each token the place or the step that the token's
   position indicates. Without this probe, the direction of a motion remained a guess for 1,600 steps.
7. **Slices are shuffled, and temporal ids are reversed or exchanged.** An object in a corner,
   which is whole in one of MiniCPM-V's slices, is at the location of that slice. In 35 % of the
   videos, all times are reversed; in 15 %, the times within each pack; in up to 10 %, packs are
   exchanged. A probe on the separator after each pack predicts what happened in the pack. Time
   enters only the resampler's keys, so only the order of times *inside* a pack can be read, if
   the pack's frames differ. Directions are learned last: when nearly all other answers were
   correct, only 50 to 70 % of the directions were. So this family has as many videos as images
   in a step, and its questions about images are mostly about places. With 14 images, 6 videos
   and five questions each, training took a third more time. With 8 images, 9 videos and the
   questions of other families, only 94 % of the answers about exchanged slices were correct.
8. **Position tables are shuffled.** A second GLM (`glm4v_table`) learns to read places from its table. In most
   batches of images, the tokens exchange their vectors, and the questions follow the table. The first probe
   also follows the table; in this model, it predicts the place. M-RoPE does not change. At the start, the
   table's values are as large as the patches to which it is added.
9. **Some questions need the tower's coordinates and windows** (`relations.py`). In most batches of images the
   nine tokens exchange their rows and columns in the tower, by rotary angles or by vectors of the tower's
   table. The answer to "What is right of the red circle?" follows this exchange. The language model's positions
   are exchanged separately, so it cannot find the neighbour. For "What is with the red circle?", the windows
   contain other tokens. A probe predicts from every token its four neighbours, and the other tokens in its
   window.
10. **Scenes are resized**: six in ten batches of images and a quarter of the videos, to sides of 56 to 168 px
   and ratios of 1:2 to 2:1. The checkpoint's preprocessor files then determine the final size. If there are not
   nine tokens, a token contains parts of several cells, so a further probe predicts the object at each of the
   token's four patches. Positions are then mirrored or transposed instead of exchanged. Every number of rows
   and columns is equally frequent. With evenly drawn sizes, 65 % of the colours at 168 x 84 px were correct
   after 2,000 steps; after 1,000 more steps with equally frequent numbers, 92 % were correct. In the last part
   of MiniCPM-V 4.7's training, half of the resized batches have four slices (`few`). At 56 px, 98 % of the
   answers were then correct, instead of 93 %. GLM's budget first allowed 5 x 2 tokens at 168 x 84 px, and 92 to
   94 % were correct whatever the training; with 6 x 3 tokens, 100 % were correct.
11. **Asides.** In each step, a few questions about scenes are off topic (`everyday.py`), or about objects that do not
    exist.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import refvl
from data.training import everyday, photos, relations, run, scenes
from data.training.run import WORKERS
from data.training.tiny_family import DEFAULT, FAMILIES, TinyFamily, find_family
from data.training.tiny_model import Batch, PromptBuilder, TinyModel, are_right

TELLINGS = 4  # showings of a video in which a colour changes, each with different timestamps
HELPERS = ("row", "column", "color_at", "shape_at", "thing_at", "thing_at", "count")
PARTS = 5  # the parts of a sliced image: an overview and four slices
RATES = (5, 6, 8, 9, 11, 12, 14, 15, 18, 20)  # tenths of a second between a video's steps; see `scenes.is_held_out`
SHUFFLED = 0.7  # the share of image batches whose tokens exchange their places
INNER_ORDERS = (  # orders of the 2 x 2 patches of a token: transposed, mirrored and rotated
    (0, 2, 1, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0), (3, 1, 2, 0), (1, 3, 0, 2), (2, 0, 3, 1),
)  # fmt: skip
RESIZED = {"picture": 0.6, "motion": 0.25, "change": 0.25}  # the share of batches that are resized
SIDES, RATIOS = (56, 168), (0.5, 2.0)  # the side in px of a square with the same area, and width / height
FRAMES_SHOWN = ((0, 3, 5), (1, 4, 5), (1, 3, 5), (0, 2, 4), (2, 4, 5), (1, 5), (0, 4), (0, 2, 4, 5))  # of a video
WHOLE = tuple(range(scenes.FRAMES))
PATCHES = 4  # the patches of a token


@dataclass(frozen=True)
class Recipe:
    """Settings of the training, by default those of the committed checkpoint. Counts of scenes
    are per step and worker.
    """

    steps: int = 1800
    see: int = 150  # the number of steps in which only the tower learns
    pictures: int = 14
    picture_batches: int = 1  # the batches into which the images are divided, each with its own size
    clips: int = 5
    asides: int = 4  # off-topic questions, every second step after seeing
    seeing: float = 1.5  # the factor for these counts while only the tower learns
    picture_pool: int = 8000  # scenes of each worker, asked about repeatedly with different questions
    clip_pool: int = 2000
    lr: float = 2e-3
    muon_lr: float = 3e-3
    warmup: int = 100
    probe_weight: float = 0.3
    clip_weight: float = 1.0
    prune_up_to: float = 0.6  # every second step prunes its videos by EVS at random rates below this one
    photos: int = 6  # crops of photographs, every fourth step after seeing; the video every eighth step
    photo_weight: float = 0.3
    few: float = 0.0  # the share of resized batches that have the fewest tokens, apart from the others
    seed: int = 0
    measure_every: int = 150
    measure_on: int = 256  # held-out scenes
    begin_with: str = ""  # weights_sha256 of an earlier checkpoint, in git's history; "": none


class Learner(nn.Module):
    """The model, and the probe that helps its tower."""

    def __init__(self, family: TinyFamily, seed: int):
        super().__init__()
        self.vlm = TinyModel(family)
        self.vlm.init_weights(seed)
        movements = 1 + len(scenes.DIRECTIONS) + ("change" in family.clips)
        self.labels = (1 + len(scenes.SHAPES), 1 + len(scenes.COLORS), movements)
        if not family.reads_places:
            self.labels += (len(scenes.PLACES) + family.sliced,)
        self.probe = nn.Linear(self.vlm.lm_head.in_features, sum(self.labels))
        self.patch_probe = nn.Linear(self.probe.in_features, PATCHES * sum(self.labels))
        self.relation_sizes = relations.sizes(family) if family.reads_neighbours else []
        questions = sum(self.relation_sizes)
        self.relation_probe = nn.Linear(self.probe.in_features, questions) if questions else None
        is_told = family.packing or "change" in family.clips
        self.time_probe = nn.Linear(self.probe.in_features, movements) if is_told else None
        seconds = (scenes.LAST_SECOND + 1) * family.spells_seconds
        self.second_probe = nn.Linear(self.probe.in_features, seconds) if seconds else None
        tells_places = family.reads_places or family.reads_table
        places = len(scenes.PLACES) if tells_places else PARTS if family.sliced else 0
        steps = scenes.FRAMES // 2 * family.reads_steps
        self.place_probe = nn.Linear(self.probe.in_features, places) if places else None
        self.step_probe = nn.Linear(self.probe.in_features, steps) if steps else None
        for name, probe in self.named_children():
            if name.endswith("probe"):
                nn.init.zeros_(probe.weight)
                nn.init.zeros_(probe.bias)

    def cell_loss(self, media_BMD: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of the probe, summed over its questions. labels: (B * cells, 4), of which the last
        is the place, or (B * cells, 4 patches, 4).

        A sliced image begins with an overview, to whose tokens these cells belong. The tokens of its slices are
        averaged separately. The slices' tokens have no place in the whole image, and "no place" is a label of
        its own. A query contributes one token to the overview and one to each slice; without this label,
        nothing would distinguish these tokens.
        """
        if labels.ndim == 3:
            return self._patch_loss(media_BMD, labels)
        labels_BC4, overview = labels.view(len(media_BMD), -1, labels.shape[-1]), len(scenes.PLACES)
        cells = labels_BC4.shape[1]
        # Only the overview has labels if the slices have none; without queries, the overview has none
        media_BMD = media_BMD[:, :cells] if self.vlm.family.sliced else media_BMD[:, -cells:]
        sizes = [overview, cells - overview] if self.vlm.family.sliced and cells == PARTS * overview else [cells]
        loss = torch.zeros(())
        for media, told in zip(media_BMD.split(sizes, 1), labels_BC4.split(sizes, 1), strict=True):
            logits = self.probe(media[..., : self.probe.in_features].flatten(0, 1)).split(self.labels, -1)
            loss = loss + sum(F.cross_entropy(x, told[..., i].flatten()) for i, x in enumerate(logits))
        return loss

    def _patch_loss(self, media_BMD: Tensor, labels: Tensor) -> Tensor:
        media_BMD = media_BMD[:, -len(labels) // len(media_BMD) :, : self.probe.in_features]
        logits = self.patch_probe(media_BMD).unflatten(-1, (PATCHES, -1)).flatten(0, 2).split(self.labels, -1)
        return sum(F.cross_entropy(x, labels[..., i].flatten()) for i, x in enumerate(logits))

    def relation_loss(self, media_BMD: Tensor, labels: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the cross-entropy of the probe that predicts each token's neighbours and window; see `relations`."""
        if labels is None:
            return torch.zeros(())
        names, others = labels
        found = self.relation_probe(media_BMD[..., : self.probe.in_features].flatten(0, 1))
        *near, around = found.split(self.relation_sizes, -1)
        loss = sum(F.cross_entropy(x, names[:, i // 2, i % 2]) for i, x in enumerate(near))
        return loss + 4 * F.binary_cross_entropy_with_logits(around, others) if len(around.T) else loss

    def told_loss(self, batch: Batch, inner_BLD: Tensor) -> Tensor:
        """Return the cross-entropy of the probe that predicts the place or step of each of the item's tokens in
        the last layer.
        """
        if batch.told is None:
            return torch.zeros(())
        columns = media_columns(batch)[-len(batch.told) :]
        probe = self.place_probe if batch.pixels.shape[1] == 1 else self.step_probe
        logits = probe(inner_BLD[:, columns])
        return F.cross_entropy(logits.flatten(0, 1), batch.told.repeat(len(logits)))

    def time_loss(self, batch: Batch, inner_BLD: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of the probe that predicts an object's movement from a timestamp's token, or
        a pack's separator.

        If the timestamp is spelt before its frame, the probe also predicts the timestamp from the token after
        the frame.
        """
        words_BTD = inner_BLD[:, self.vlm.family.time_columns(batch.spans)]
        movements_BT = labels.view(len(batch.pixels), words_BTD.shape[1], -1, 4)[..., 2].amax(-1)
        movements_BT = movements_BT.repeat_interleave(len(words_BTD) // len(movements_BT), 0)
        loss = F.cross_entropy(self.time_probe(words_BTD).flatten(0, 1), movements_BT.flatten())
        if self.second_probe is None:
            return loss
        return loss + F.cross_entropy(self.second_probe(words_BTD).flatten(0, 1), batch.seconds.flatten())


# ------------------------------------------------------------------------------------------------- scenes


class Pool:
    """The scenes of one worker, drawn and rendered on first use."""

    def __init__(self, recipe: Recipe, rank: int):
        self.recipe, self.rank, self.kept = recipe, rank, {}

    def draw(self, sort: str, first: int, count: int) -> tuple[tuple, Tensor, Tensor]:
        """Return scenes first, first + 1, ..., their pixels (B, frames, 84, 84, 3) uint8, and labels (B * M, 4)."""
        drawn, pixels, labels = zip(*(self[sort, first + i] for i in range(count)), strict=True)
        return drawn, torch.from_numpy(np.stack(pixels)), with_places(np.stack(labels))

    def __getitem__(self, key: tuple[str, int]):
        sort, picture = key[0], key[0] == "picture"
        number = key[1] % (self.recipe.picture_pool if picture else self.recipe.clip_pool)
        if (sort, number) not in self.kept:
            how = {"objects": (1, 4)} if number % 2 else {"objects": (2, 4), "alike": True}
            scene = scenes.draw_sort(sort, "train", number * WORKERS + self.rank, **how)
            pixels = scenes.render(scene)
            self.kept[sort, number] = scene, pixels[None] if picture else pixels, scenes.cell_labels(scene)
        return self.kept[sort, number]


@dataclass(frozen=True)
class Drawn:
    """Scenes of one size as they are shown.

    scenes: the scenes that the questions are about, after an exchange of places. labels: (B * M,
    4), or (B * M, 4 patches, 4). shown: arguments of `TinyModel.encode`. seen: the coordinates and
    windows that the tower is given, if questions depend on them.
    """

    scenes: list
    pixels: Tensor
    labels: Tensor
    shown: dict
    told: Tensor | None = None  # the place that each token's vectors in the table indicate
    seen: relations.Arrangement | None = None

    @property
    def relation_labels(self) -> tuple[Tensor, Tensor] | None:
        return self.seen and relations.labels_of(self.scenes, self.seen)


def places_of(cells: tuple[int, int]) -> np.ndarray:
    """Return (tokens,) the place in which the middle of each token lies."""
    rows, columns = ((np.arange(n) + 0.5) * 3 // n for n in cells)
    return np.add.outer(3 * rows, columns).astype(np.int64).flatten()


def patch_labels(drawn: Sequence[scenes.Scene], cells: tuple[int, int]) -> Tensor:
    """Return (B * t * tokens, 4, 4): the labels of the four patches of each token of resized scenes."""
    fine = 2 * cells[0], 2 * cells[1]
    labels = with_places(np.stack([scenes.cell_labels(scene, fine) for scene in drawn]), fine)
    return labels.unflatten(0, (-1, cells[0], 2, cells[1], 2)).transpose(2, 3).flatten(0, 2).flatten(1, 2)


def with_places(labels: np.ndarray, cells: tuple[int, int] = (3, 3)) -> Tensor:
    """Turn (B, t, cells, 3) into (B * t * cells, 4): the number of the place is the fourth label."""
    places = np.broadcast_to(places_of(cells)[:, None], (*labels.shape[:3], 1))
    return torch.from_numpy(np.concatenate([labels, places], axis=-1)).flatten(0, 2)


def expose(pixels: Tensor, rng: np.random.Generator) -> Tensor:
    """Vary exposure and white balance of each scene, so a repeated scene is not the same image."""
    gain = torch.from_numpy(rng.uniform(0.88, 1.1, (len(pixels), 1, 1, 1, 3)).astype(np.float32))
    return (pixels * gain).clamp(0, 255).to(torch.uint8)


def draw_size(rng: np.random.Generator) -> tuple[int, int]:
    """Draw a (height, width) within `SIDES` and `RATIOS`: small and large, tall and wide sizes are equally frequent."""
    side, ratio = (math.exp(rng.uniform(*map(math.log, between))) for between in (SIDES, RATIOS))
    height, width = side / ratio**0.5, side * ratio**0.5
    return round(min(max(height, SIDES[0]), SIDES[1])), round(min(max(width, SIDES[0]), SIDES[1]))


@cache
def sizes_of_cells(family: TinyFamily, frames: int) -> list[list[tuple[int, int]]]:
    """Return 1,000 sizes in a list for each number of rows and columns of tokens that they become, except 3 x 3."""
    rng, found = np.random.default_rng(0), {}
    for _ in range(1000):
        size = draw_size(rng)
        shape = (1, frames, *family.target_size(*size, frames), 3)
        found.setdefault(family.cells(shape), []).append(size)
    return [sizes for cells, sizes in found.items() if cells != (3, 3)] or [*found.values()]


def resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize (B, frames, H, W, 3) uint8 to a different (height, width)."""
    frames_NCHW = pixels.flatten(0, 1).permute(0, 3, 1, 2)
    resized = F.interpolate(frames_NCHW.contiguous(), size=size, mode="bicubic", antialias=True)
    return resized.permute(0, 2, 3, 1).unflatten(0, pixels.shape[:2]).contiguous()


def draw_table(cells: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each patch's vector in the table, and the place that is indicated for each place.

    Nine tokens take the nine places in any order. In half of these images, the four patches of each token are
    also mirrored or transposed, which indicates the same place. If there are not nine tokens, all patches are
    mirrored or transposed.
    """
    if cells == (3, 3):
        order, _ = draw_order(cells, rng)
        inner = INNER_ORDERS[int(rng.integers(len(INNER_ORDERS)))] if rng.random() < 0.5 else range(PATCHES)
        return np.add.outer(PATCHES * order, inner).flatten(), order
    h, w = cells
    patches = np.arange(PATCHES * h * w).reshape(h, w, 2, 2).swapaxes(1, 2).reshape(2 * h, 2 * w)
    patches, places = mirror(patches, rng) if rng.random() < SHUFFLED else (patches, np.arange(9))
    return patches.reshape(h, 2, w, 2).swapaxes(1, 2).flatten(), places


def draw_order(cells: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each token, the token whose place it gets, and for each place the place that is indicated.

    Nine tokens take the nine places in any order. If there are not nine tokens, the tokens are mirrored or transposed.
    """
    if rng.random() >= SHUFFLED:
        return np.arange(cells[0] * cells[1]), np.arange(len(scenes.PLACES))
    if cells == (3, 3):
        order = rng.permutation(len(scenes.PLACES))
        return order, order
    tokens, places = mirror(np.arange(cells[0] * cells[1]).reshape(cells), rng)
    return tokens.flatten(), places


def mirror(grid: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid that is mirrored along some axes and, if it is square, possibly transposed; also return the
    new places.

    An axis of two is not mirrored, because an object in the middle is in both halves.
    """
    places = np.arange(len(scenes.PLACES)).reshape(3, 3)
    if grid.shape[0] == grid.shape[1] and rng.random() < 0.5:
        grid, places = grid.T, places.T
    for axis in (0, 1):
        if grid.shape[axis] > 2 and rng.random() < 0.5:
            grid, places = np.flip(grid, axis), np.flip(places, axis)
    return grid, places.flatten()


def kinds_to_ask(scene: scenes.Scene, rng: np.random.Generator, *, sliced: bool = False) -> list[str]:
    """Return the kinds of questions to ask about a scene. sliced: whether the image's slices indicate the place.

    With slices, there are fewer questions, and more of them are about places.
    """
    sort, ends = scene.sort, [str(rng.choice(["begin", "end"]))] if scene.seconds else []
    if sort == "motion":
        return [*ends, "motion", str(rng.choice(["color", "shape"])), str(rng.choice(["mover", "missing"]))]
    if sort == "change":
        return [*ends, "change", str(rng.choice(["changer", "becomes", "color", "missing"]))]
    helper = str(rng.choice(["place", *HELPERS]))
    if sliced:
        return [str(rng.choice(["color", "shape"])), "place", helper, str(rng.choice(["place", "missing"]))]
    return ["color", "shape", "place", helper, "missing"]


def ask_about(builder: PromptBuilder, shown: Drawn, sort: str, rng: np.random.Generator) -> Batch:
    """Prepare scenes of one sort and questions, with other places, steps or timestamps if the family reads them."""
    family, seconds, move, drawn, pixels = builder.family, None, None, shown.scenes, shown.pixels
    cells = family.cells(pixels.shape)
    if sort == "picture" and family.reads_places:
        order, places = draw_order(cells, rng)
        drawn = [at_places(scene, places) for scene in drawn]
        move = partial(move_places, order=order, beside=family.moves_with_token, cells=cells)
    if sort == "motion" and family.reads_steps and rng.random() < 0.5:
        drawn, move = [replace(s, direction=scenes.OPPOSITE[s.direction]) for s in drawn], reverse_steps
    if sort != "picture" and "change" in family.clips:
        tellings = TELLINGS if sort == "change" else 1
        drawn = tell_others_seconds([scene for scene in drawn for _ in range(tellings)], family, rng)
        seconds = [scene.seconds for scene in drawn]
    elif sort == "motion":
        seconds = [tell_rate(pixels.shape[1], rng)] * len(drawn)
    sliced = family.sliced or family.reads_canvas
    asked = [ask(scene, kinds_to_ask(scene, rng, sliced=sliced), rng) for scene in drawn]
    if shown.seen is not None:
        for row, scene in zip(asked, shown.scenes, strict=True):
            kinds = ("neighbour", *relations.kinds_of(family))
            row += [relations.draw_question(scene, shown.seen, kind, rng) for kind in kinds]
    batch = replace(builder.batch(pixels, asked, seconds=seconds, shown=shown.shown), told=shown.told)
    if sort == "picture" and family.sliced and "order" in shown.shown:
        batch = replace(batch, told=torch.arange(PARTS).repeat_interleave(len(scenes.PLACES)))
    if sort == "motion" and family.reads_steps:
        batch = replace(batch, told=torch.arange(scenes.FRAMES // 2).repeat_interleave(cells[0] * cells[1]))
    return batch if move is None else move(batch)


def ask(scene: scenes.Scene, kinds: list[str], rng: np.random.Generator) -> list[scenes.Question]:
    """Draw one question of each kind, in a random spelling."""
    drawn = iter(scenes.draw_questions(scene, [kind for kind in kinds if kind != "missing"], rng))
    found = [scenes.missing_question(scene, rng) if kind == "missing" else next(drawn) for kind in kinds]
    return [replace(question, text=everyday.vary(question.text, rng)) for question in found]


def draw_aside(scene: scenes.Scene | None, rng: np.random.Generator) -> scenes.Question:
    """Draw an off-topic input: an everyday sentence, or a question that asks too much or does not fit.

    scene: None for no image, or for a photograph.
    """
    sort = rng.random()
    if scene is None or sort < 0.7:
        return scenes.Question("everyday", everyday.draw(rng), scenes.HELP)
    question = scenes.unfit_question(scene, rng) if sort < 0.85 else scenes.missing_question(scene, rng)
    return replace(question, text=everyday.vary(question.text, rng))


def summing_up(scene: scenes.Scene, rng: np.random.Generator) -> scenes.Question:
    """Ask what is in the image or the video; videos in which a colour changes are left out."""
    kinds = [kind for kind in ("what", "what_clip") if kind in scenes.all_questions(scene)]
    if not kinds:
        return draw_aside(scene, rng)
    [question] = scenes.draw_questions(scene, kinds, rng)
    return replace(question, text=everyday.vary(question.text, rng))


def at_places(scene: scenes.Scene, order) -> scenes.Scene:
    """Return the scene after place i has been replaced by place order[i]."""
    things = tuple(replace(thing, place=int(order[thing.place])) for thing in scene.things)
    return replace(scene, things=things)


def media_columns(batch: Batch) -> Tensor:
    """Return (M,) indices of the item's tokens; the tokens that have places come last."""
    return torch.cat([span.offset + torch.arange(span.num_tokens) for span in batch.spans])


def move_places(batch: Batch, order, beside: Sequence[int] = (0,), cells: tuple[int, int] = (3, 3)) -> Batch:
    """Give token i the position of token order[i], and do the same for the columns `beside` it.

    cells: rows and columns of the tokens, which are the last ones of the item.
    """
    order = torch.as_tensor(np.ascontiguousarray(order))
    columns, positions = media_columns(batch)[-len(order) :], batch.positions_3L.clone()
    for step in beside:
        positions[:, columns + step] = batch.positions_3L[:, columns[order] + step]
    return replace(batch, positions_3L=positions, told=torch.from_numpy(places_of(cells))[order])


def reverse_steps(batch: Batch) -> Batch:
    """Reverse a video's temporal positions; height and width do not change."""
    [span] = batch.spans
    part, positions = slice(span.offset, span.offset + span.num_tokens), batch.positions_3L.clone()
    positions[0, part] = positions[0, part].unflatten(0, (span.t, -1)).flip(0).flatten()
    return replace(batch, positions_3L=positions, told=None if batch.told is None else batch.told.flip(0))


def draw_times(count: int, size: int, rng, *, how: str | None = None, held_out: bool = False) -> tuple[int, ...]:
    """Draw temporal ids of `count` frames in packs of `size`: at a random rate, with gaps, and in one of four orders.

    how: "in order"; "within": each pack runs backwards; "packs": packs are exchanged; or "all": everything runs
        backwards, so every frame gets a time from a different pack, if there are two. None draws one.
    """
    while True:
        gaps = rng.integers(3, 9) * rng.choice([1, 1, 1, 2, 3], count)
        times = (np.cumsum(gaps) - gaps[0] + rng.integers(0, 10)).tolist()
        if scenes.is_held_out(times) == held_out:
            break
    dealt = how or str(rng.choice(["in order", "within", "packs", "all"], p=[0.4, 0.15, 0.1, 0.35]))
    cuts = range(0, count, size)
    if dealt == "all":
        return tuple(times[::-1])
    if dealt == "packs" and count % size == 0:
        return tuple(time for i in reversed(cuts) for time in times[i : i + size])
    return tuple(time for i in cuts for time in times[i : i + size][:: -1 if dealt == "within" else 1])


def tell_rate(frames: int, rng: np.random.Generator) -> tuple[float, ...]:
    """Draw timestamps of a video's steps at one of the rates for training."""
    return tuple((np.arange(frames // 2) * rng.choice(RATES) / 10).tolist())


def tell_other_seconds(scene: scenes.Scene, rng: np.random.Generator, digits: list[int] | None = None) -> scenes.Scene:
    """Return the same video with different timestamps, half of the time in random order, so
    only the text indicates them.

    digits: the number of digits of each timestamp.
    """
    count = scenes.STEPS if scene.sort == "change" else scenes.FRAMES // 2
    while True:
        seconds = scenes.draw_seconds(rng, count, held_out=False)
        seconds = tuple(rng.permutation(seconds).tolist()) if rng.random() < 0.5 else seconds
        if digits in (None, count_digits(seconds)):
            return replace(scene, seconds=seconds)


def tell_others_seconds(drawn: list, family: TinyFamily, rng: np.random.Generator) -> list:
    """Apply `tell_other_seconds` to each scene.

    The prompts of a batch have the same length, so spelt timestamps are equally long.
    """
    first = tell_other_seconds(drawn[0], rng)
    digits = count_digits(first.seconds) if family.spells_seconds else None
    return [first, *(tell_other_seconds(scene, rng, digits) for scene in drawn[1:])]


def count_digits(seconds: tuple[int, ...]) -> list[int]:
    return [len(str(second)) for second in seconds]


# ------------------------------------------------------------------------------------------------ training


class Trainer(run.Trainer):
    """Train a family on scenes."""

    def __init__(self, family: TinyFamily, recipe: Recipe, rank: int):
        super().__init__(family, recipe, rank)
        self.builder = PromptBuilder(family)
        self.learner, self.pool = self.make_learner(), Pool(recipe, rank)
        if recipe.begin_with:
            self.take_over(family.folder)
        self.start()

    def make_learner(self) -> Learner:
        return Learner(self.family, self.recipe.seed)

    def take_over(self, folder: Path) -> None:
        """Load the weights in a folder. Raises ValueError if they are not those that the recipe names."""
        if (found := run.digest(folder)) != self.recipe.begin_with:
            raise ValueError(f"begin_with: expected the digest of the weights in {folder}, {found}; check it out first")
        self.learner.vlm.take_over(refvl.load(folder, device="cpu", dtype=torch.float32, progress=False))

    def losses(self) -> list[Tensor]:
        """Return the losses of images' answers and cells, videos' answers and cells, photos and off-topic answers.

        Each batch of images has its own losses. If there are several sorts of videos, the sorts alternate.
        """
        r = self.recipe
        clips, losses = self.family.clips, []
        n = r.picture_batches
        parts = [("picture", r.pictures // n, self.step * n + i, 1 / n) for i in range(n)]
        if clips:
            parts.append((clips[self.step % len(clips)], r.clips, self.step // len(clips), r.clip_weight))
        for i, (sort, count, number, weight) in enumerate(parts):
            rng = np.random.default_rng([r.seed, sort != "picture", self.step, self.rank, *([i] if 0 < i < n else [])])
            part = (self._see if self.step < r.see else self._speak)(sort, count, number, rng)
            loss = part[0] + r.probe_weight * part[1] if self.step >= r.see else part[1]
            (loss * weight).backward()
            losses += [x.detach() for x in part]
        losses.append(self._recognise(np.random.default_rng([r.seed, 2, self.step, self.rank])))
        losses.append(self._step_aside(np.random.default_rng([r.seed, 3, self.step, self.rank])))
        return losses

    def _draw(self, sort: str, count: int, number: int, rng: np.random.Generator) -> Drawn:
        """Draw scenes in their final form, with the labels of their cells."""
        drawn, pixels, labels = self.pool.draw(sort, number * count, count)
        family, resized = self.family, rng.random() < RESIZED[sort]
        if resized:
            groups = sizes_of_cells(family, pixels.shape[1])
            group = groups[int(rng.integers(len(groups)))]  # every number of rows and columns is equally frequent
            if self.recipe.few and rng.random() < self.recipe.few:
                group = min(groups, key=lambda sizes: min(map(math.prod, sizes)))
            size = group[int(rng.integers(len(group)))]
            pixels = resize(resize(pixels, size), family.target_size(*size, pixels.shape[1]))
        if (cells := family.cells(pixels.shape)) != (3, 3):
            labels = patch_labels(drawn, cells)
        if sort == "motion" and family.packing:
            frames = WHOLE if rng.random() < 0.5 else FRAMES_SHOWN[int(rng.integers(len(FRAMES_SHOWN)))]
            times = draw_times(len(frames), family.packing, rng)
            packs = scenes.packs_of(frames, times, family.packing)
            labels = with_places(np.stack([scenes.pack_labels(scene, packs) for scene in drawn]))
            told = [scenes.retell(scene, packs) for scene in drawn]
            return Drawn(told, expose(pixels[:, list(frames)], rng), labels, {"times": times})
        drawn, pixels = list(drawn), expose(pixels, rng)
        if sort == "picture" and family.reads_table:
            table, order = draw_table(cells, rng)
            labels[..., -1] = torch.from_numpy(order)[labels[..., -1]]
            told = torch.from_numpy(order[places_of(cells)])
            return Drawn([at_places(scene, order) for scene in drawn], pixels, labels, {"table": table.tolist()}, told)
        if sort == "picture" and family.sliced and not resized:
            order = rng.permutation(4) if rng.random() < SHUFFLED else np.arange(4)
            parts = torch.from_numpy(np.stack([scenes.slice_labels(scene, order) for scene in drawn]))
            parts = F.pad(parts, (0, 1), value=len(scenes.PLACES))  # slices have no place in the whole
            labels = torch.cat([labels.view(len(drawn), -1, 4), parts], 1).flatten(0, 1)
            told = [at_places(scene, scenes.places_of_slices(order)) for scene in drawn]
            return Drawn(told, pixels, labels, {"order": order.tolist()})
        if sort == "picture" and family.reads_neighbours and cells == (3, 3):
            seen = relations.Arrangement.draw(rng, family)
            return Drawn(drawn, pixels, labels, {"change": seen}, seen=seen)
        return Drawn(drawn, pixels, labels, {})

    def _see(self, sort: str, count: int, number: int, rng) -> tuple[Tensor, Tensor]:
        drawn = self._draw(sort, int(count * self.recipe.seeing), number, rng)
        media_BMD, learner = self.learner.vlm.encode(drawn.pixels, **drawn.shown), self.learner
        loss = learner.cell_loss(media_BMD, drawn.labels) + learner.relation_loss(media_BMD, drawn.relation_labels)
        return torch.zeros(()), loss

    def _speak(self, sort: str, count: int, number: int, rng) -> tuple[Tensor, Tensor]:
        drawn, learner = self._draw(sort, count, number, rng), self.learner
        batch = ask_about(self.builder, drawn, sort, rng)
        is_pruned = sort != "picture" and number % 2 and self.family.prunable
        prune = torch.from_numpy(rng.uniform(0, self.recipe.prune_up_to, count)) if is_pruned else None
        logits, media_BMD, inner_BLD = learner.vlm(batch, prune=prune)
        probes = learner.cell_loss(media_BMD, drawn.labels) + learner.told_loss(batch, inner_BLD)
        probes = probes + learner.relation_loss(media_BMD, drawn.relation_labels)
        if sort != "picture" and learner.time_probe:
            probes = probes + learner.time_loss(batch, inner_BLD, drawn.labels)
        return F.cross_entropy(logits, batch.targets), probes

    def _recognise(self, rng) -> Tensor:
        """Train on photographs in some steps; add to the gradients and return the loss (0 in other steps)."""
        is_clip = self.step % 8 == 2 and bool(self.family.clips)
        if self.step < self.recipe.see or not (self.step % 4 == 0 or is_clip):
            return torch.zeros(())
        pixels, questions = photos.draw_clip(rng) if is_clip else photos.draw_pictures(rng, self.recipe.photos)
        for row in questions:
            missing = not is_clip and rng.random() < 0.5
            row.append(scenes.missing_question(None, rng) if missing else draw_aside(None, rng))
        seconds = [photos.seconds(pixels.shape[1])] if is_clip else None
        batch = self.builder.batch(expose(torch.from_numpy(pixels), rng), questions, seconds=seconds)
        return self._answer(batch, self.recipe.photo_weight)

    def _step_aside(self, rng) -> Tensor:
        """Alternate images, videos of all sorts, and text alone with off-topic questions; see `_recognise`."""
        if self.step < self.recipe.see or self.step % 2:
            return torch.zeros(())
        turns = ("picture", *self.family.clips, None, "picture", *self.family.clips)
        sort, count = turns[self.step // 2 % len(turns)], self.recipe.asides
        if sort is None:
            return self._answer(self.builder.batch(None, [[draw_aside(None, rng)] for _ in range(2 * count)]), 1.0)
        number = int(rng.integers(self.recipe.clip_pool))
        shown, seconds = self._draw(sort, count, number, rng), None
        drawn, pixels = shown.scenes, shown.pixels
        if sort != "picture":
            seconds = [tell_rate(pixels.shape[1], rng)] * count
            if "change" in self.family.clips:
                drawn = tell_others_seconds(drawn, self.family, rng)
                seconds = [scene.seconds for scene in drawn]
        questions = [[*(draw_aside(scene, rng) for _ in range(2)), summing_up(scene, rng)] for scene in drawn]
        return self._answer(self.builder.batch(pixels, questions, seconds=seconds, shown=shown.shown), 1.0)

    def _answer(self, batch: Batch, weight: float) -> Tensor:
        logits, *_ = self.learner.vlm(batch)
        loss = F.cross_entropy(logits, batch.targets)
        (weight * loss).backward()
        return loss.detach()

    def measure(self) -> dict[str, float]:
        return accuracy(self.learner.vlm, self.builder, "select", self.recipe.measure_on)


@torch.no_grad()
def accuracy(model: TinyModel, builder: PromptBuilder, split: str, count: int) -> dict[str, float]:
    """Return the share of exactly correct answers by kind, on the first `count` scenes of a held-out split.

    Changed positions, tables, times and slices are left to `evaluate_tiny`.
    """
    hits: dict[str, list[bool]] = {}
    for sort, index in itertools.product(("picture", *model.family.clips), range(count)):
        scene, rng = scenes.draw_sort(sort, split, index), np.random.default_rng(index)
        asked = scenes.draw_questions(scene, [kind for kind, of in model.family.kinds.items() if of == sort], rng)
        asked += [scenes.missing_question(scene, rng), draw_aside(scene, rng), summing_up(scene, rng)]
        pixels = scenes.render(scene)
        if sort == "picture":
            batch = builder.batch(pixels[None, None], [asked])
        else:
            batch = builder.batch(pixels[None], [asked], seconds=[scene.seconds or scenes.SECONDS])
        for question, is_right in zip(asked, are_right(batch, model(batch)[0]), strict=True):
            hits.setdefault(f"{question.kind}, {sort}", []).append(is_right)
    return {kind: round(sum(found) / len(found), 4) for kind, found in hits.items()}


# ------------------------------------------------------------------------------------------------- running


def make_trainer(model: str, recipe: Recipe, rank: int) -> Trainer:
    return Trainer(find_family(model), recipe, rank)


def recipe_of(family: TinyFamily) -> Recipe:
    """Return the recipe of the family's committed checkpoint."""
    return Recipe(**family.recipe)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, default=DEFAULT)
    run.add_arguments(parser)
    args = parser.parse_args()
    family = find_family(args.model)
    run.train(make_trainer, (args.model, run.changed(recipe_of(family), args.set)), args.out or family.folder)


if __name__ == "__main__":
    main()
