"""Train the tiny models that ship with refvl: `python -m data.training.train_tiny --model qwen2_5_vl`.

Three things make a model of 1.4 million parameters learn this in minutes:

1. **See, then speak.** For the first steps only the vision tower learns, with a linear probe on its output that names
   shape, colour, movement and place of every cell. Nine labels per image teach more than one answered question.
   Then the language model joins; the probe stays as a small part of the loss and is not part of the checkpoint.
2. **Questions share a scene, but not each other.** See `tiny_model.py`.
3. **Every second scene is a confusing one**: objects in one row or column, few shapes and colours. Without them the
   second word of "bottom left" is guessed from whatever else is in the bottom row: place stayed at 85 % for as
   long as we looked, and rose to 98 % within 300 steps of confusing scenes.

A model that is told the time (`scenes.draw_change`) needs two more:

4. **Words that tell the time know what happened.** A second probe, on those words as the last layer gets them, names
   the movement in the step before the word.
5. **A video is shown four times, each time at different seconds.** Answering "when" is finding the step and saying its
   second again, and saying any number again takes many numbers; pixels are what costs time.

With neither, 30 % of the answers were right after 2,500 steps; with the probe, 83 % after 1,700; with both, helper
questions for the first and last second, and 30 seconds instead of 40, 83 % after 700.

Matrices are updated by Muon, everything else by AdamW; linear warm-up, cosine to zero. Two processes of one thread
each take half of the scenes and average their gradients: the operations are too small to be worth splitting.
What a step sees depends on (seed, step, worker) alone, so a run that was stopped continues as if it had not been.
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from data.training import photos, scenes
from data.training.tiny_family import DEFAULT, TinyFamily, family_names, find_family
from data.training.tiny_model import Batch, PromptBuilder, TinyModel

WORKERS = 2
TELLINGS = 4  # of a video in which a colour changes, each time at other seconds
HELPERS = ("row", "column", "color_at", "shape_at", "thing_at", "thing_at", "count", "what")


@dataclass(frozen=True)
class Recipe:
    """The defaults are those of the committed checkpoint. Counts of scenes are per step and worker."""

    steps: int = 2700
    see: int = 210  # steps in which only the tower learns
    pictures: int = 16
    clips: int = 4
    seeing: float = 1.5  # times as many scenes while only the tower learns
    picture_pool: int = 8000  # scenes of a worker; each is asked about again and again, with other questions
    clip_pool: int = 2000
    lr: float = 2e-3
    muon_lr: float = 3e-3
    warmup: int = 100
    probe_weight: float = 0.3
    clip_weight: float = 0.5
    prune_up_to: float = 0.6  # every second step prunes its videos by EVS at random rates below this
    photos: int = 6  # crops of photographs, every fourth step after seeing; the video comes every eighth
    photo_weight: float = 0.3
    precision: str = "bfloat16"  # of matrix products; "float32" is quicker where they are many and small
    seed: int = 0
    measure_every: int = 250
    measure_on: int = 256  # held-out scenes


class Learner(nn.Module):
    """The model and the probe that helps its tower."""

    def __init__(self, family: TinyFamily, config: dict, seed: int):
        super().__init__()
        self.vlm = TinyModel(family, config)
        self.vlm.init_weights(seed)
        movements = 1 + len(scenes.DIRECTIONS) + ("change" in family.clips)
        places = len(scenes.PLACES) + family.sliced
        self.labels = (1 + len(scenes.SHAPES), 1 + len(scenes.COLORS), movements, places)
        self.probe = nn.Linear(self.vlm.lm_head.in_features, sum(self.labels))
        self.time_probe = nn.Linear(self.probe.in_features, movements) if "change" in family.clips else None
        for probe in filter(None, (self.probe, self.time_probe)):
            nn.init.zeros_(probe.weight)
            nn.init.zeros_(probe.bias)

    def cell_loss(self, media_BMD: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the probe, summed over its four questions. labels: (B * cells, 4).

        A medium with more tokens than cells begins with an overview, whose tokens these are. The others are slices'
        and have no place in the whole, which is a label of its own: a query gives one token of each, and without that
        label nothing tells them apart.
        """
        cells = len(labels) // len(media_BMD)
        logits = self.probe(media_BMD[:, :cells].flatten(0, 1).float()).split(self.labels, -1)
        loss = sum(F.cross_entropy(x, labels[:, i]) for i, x in enumerate(logits))
        if media_BMD.shape[1] == cells:
            return loss
        places = self.probe(media_BMD[:, cells:].flatten(0, 1).float()).split(self.labels, -1)[-1]
        return loss + F.cross_entropy(places, torch.full((len(places),), len(scenes.PLACES)))

    def time_loss(self, words_BTD: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of what each second's word knows of its own step: how something moved, if anything did."""
        movements_BT = labels.view(-1, words_BTD.shape[1], len(scenes.PLACES), 4)[..., 2].amax(-1)
        movements_BT = movements_BT.repeat_interleave(len(words_BTD) // len(movements_BT), 0)
        return F.cross_entropy(self.time_probe(words_BTD.float()).flatten(0, 1), movements_BT.flatten())


# ------------------------------------------------------------------------------------------------- scenes


class Pool:
    """Scenes of one worker, drawn and rendered when first asked for."""

    def __init__(self, recipe: Recipe, rank: int):
        self.recipe, self.rank, self.kept = recipe, rank, {}

    def draw(self, sort: str, first: int, count: int) -> tuple[tuple, Tensor, Tensor]:
        """Running numbers first, first + 1, ...: scenes, pixels (B, frames, 84, 84, 3) uint8, labels (B * M, 4)."""
        drawn, pixels, labels = zip(*(self[sort, first + i] for i in range(count)), strict=True)
        labels = np.stack(labels)
        places = np.broadcast_to(np.arange(9)[:, None], (*labels.shape[:3], 1))
        labels = torch.from_numpy(np.concatenate([labels, places], axis=-1)).flatten(0, 2)
        return drawn, torch.from_numpy(np.stack(pixels)), labels

    def __getitem__(self, key: tuple[str, int]):
        sort, picture = key[0], key[0] == "picture"
        number = key[1] % (self.recipe.picture_pool if picture else self.recipe.clip_pool)
        if (sort, number) not in self.kept:
            how = {"objects": (1, 4)} if number % 2 else {"objects": (2, 4), "alike": True}
            scene = scenes.draw_sort(sort, "train", number * WORKERS + self.rank, **how)
            pixels = scenes.render(scene)
            self.kept[sort, number] = scene, pixels[None] if picture else pixels, scenes.cell_labels(scene)
        return self.kept[sort, number]


def expose(pixels: Tensor, rng: np.random.Generator) -> Tensor:
    """Another exposure and white balance of each scene, so that one seen again is not the same image."""
    gain = torch.from_numpy(rng.uniform(0.88, 1.1, (len(pixels), 1, 1, 1, 3)).astype(np.float32))
    return (pixels * gain).clamp(0, 255).to(torch.uint8)


def kinds_to_ask(scene: scenes.Scene, rng: np.random.Generator) -> list[str]:
    sort, ends = scene.sort, [str(rng.choice(["begin", "end"]))] if scene.seconds else []
    if sort == "motion":
        about = [str(rng.choice(["color", "shape"])), str(rng.choice(["mover", "mover", "what_clip"]))]
        return [*ends, "motion", *about]
    if sort == "change":
        return [*ends, "change", str(rng.choice(["changer", "becomes", "color"]))]
    return ["color", "shape", "place", "place", str(rng.choice(HELPERS))]


def ask_about(builder: PromptBuilder, drawn, pixels: Tensor, sort: str, rng: np.random.Generator) -> Batch:
    seconds = None
    if sort != "picture" and "change" in builder.family.clips:
        tellings = TELLINGS if sort == "change" else 1
        drawn = [tell_other_seconds(scene, rng) for scene in drawn for _ in range(tellings)]
        seconds = [scene.seconds for scene in drawn]
    elif sort == "motion":
        seconds = [scenes.SECONDS] * len(drawn)
    questions = [scenes.draw_questions(scene, kinds_to_ask(scene, rng), rng) for scene in drawn]
    return builder.batch(pixels, questions, seconds=seconds)


def tell_other_seconds(scene: scenes.Scene, rng: np.random.Generator) -> scenes.Scene:
    """The same video, taken at other times: every second time in no order, so that only the text tells the second."""
    seconds = scenes.draw_seconds(rng, scenes.STEPS if scene.sort == "change" else scenes.FRAMES // 2)
    return replace(scene, seconds=tuple(rng.permutation(seconds).tolist()) if rng.random() < 0.5 else seconds)


# ------------------------------------------------------------------------------------------------ training


class Trainer:
    """One of the workers; all hold the same weights."""

    def __init__(self, family: TinyFamily, recipe: Recipe, rank: int):
        self.family, self.recipe, self.rank, self.step = family, recipe, rank, 0
        self.tokenizer = family.train_tokenizer()
        self.config = family.config(self.tokenizer)
        self.builder = PromptBuilder(family, self.tokenizer, self.config)
        self.learner, self.pool = Learner(family, self.config, recipe.seed), Pool(recipe, rank)
        self.optimizers = make_optimizers(self.learner, recipe, (*family.by_adam, "probe"))
        self.peaks = [group["lr"] for group in self._groups()]

    def train_step(self) -> Tensor:
        """One step; returns the workers' mean losses: images' answers and cells, videos' answers and cells, photos.

        Where there are several sorts of videos they take turns.
        """
        r = self.recipe
        clips, losses = self.family.clips, []
        clip_part = clips[self.step % len(clips)], r.clips, self.step // len(clips)
        for sort, count, number in (("picture", r.pictures, self.step), clip_part):
            clip = sort != "picture"
            rng = np.random.default_rng([r.seed, clip, self.step, self.rank])
            part = (self._see if self.step < r.see else self._speak)(sort, count, number, rng)
            loss = part[0] + r.probe_weight * part[1] if self.step >= r.see else part[1]
            (loss * (r.clip_weight if clip else 1)).backward()
            losses += [x.detach() for x in part]
        losses.append(self._recognise(np.random.default_rng([r.seed, 2, self.step, self.rank])))
        losses = average_gradients(self.learner, torch.stack(losses))
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        for group, peak in zip(self._groups(), self.peaks, strict=True):
            group["lr"] = peak * learning_rate(self.step, r)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return losses

    def _see(self, sort: str, count: int, number: int, rng) -> tuple[Tensor, Tensor]:
        count = int(count * self.recipe.seeing)
        _, pixels, labels = self.pool.draw(sort, number * count, count)
        with self._autocast():
            media_BMD = self.learner.vlm.encode(expose(pixels, rng))
        return torch.zeros(()), self.learner.cell_loss(media_BMD, labels)

    def _speak(self, sort: str, count: int, number: int, rng) -> tuple[Tensor, Tensor]:
        drawn, pixels, labels = self.pool.draw(sort, number * count, count)
        batch = ask_about(self.builder, drawn, expose(pixels, rng), sort, rng)
        is_pruned = sort != "picture" and number % 2 and self.family.prunable
        prune = torch.from_numpy(rng.uniform(0, self.recipe.prune_up_to, count)) if is_pruned else None
        with self._autocast():
            logits, media_BMD, words_BTD = self.learner.vlm(batch, prune=prune)
        probes = self.learner.cell_loss(media_BMD, labels)
        if sort != "picture" and self.learner.time_probe:
            probes = probes + self.learner.time_loss(words_BTD, labels)
        return F.cross_entropy(logits.float(), batch.targets), probes

    def _recognise(self, rng) -> Tensor:
        """Photographs, now and then; adds to the gradients and returns the loss (0 when it is not their turn)."""
        is_clip = self.step % 8 == 2
        if self.step < self.recipe.see or not (self.step % 4 == 0 or is_clip):
            return torch.zeros(())
        pixels, questions = photos.draw_clip(rng) if is_clip else photos.draw_pictures(rng, self.recipe.photos)
        seconds = [photos.seconds(pixels.shape[1])] if is_clip else None
        batch = self.builder.batch(expose(torch.from_numpy(pixels), rng), questions, seconds=seconds)
        with self._autocast():
            logits, *_ = self.learner.vlm(batch)
        loss = F.cross_entropy(logits.float(), batch.targets)
        (self.recipe.photo_weight * loss).backward()
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.precision == "bfloat16")

    def _groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def save_state(self, path: Path) -> None:
        """Everything that `load_state` needs, written so that an interruption leaves the old file or the new one."""
        state = {
            "step": self.step,
            "model": self.family.name,
            "recipe": self.recipe,
            "learner": self.learner.state_dict(),
        }
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load_state(self, path: Path) -> None:
        with torch.serialization.safe_globals([Recipe]):
            state = torch.load(path, weights_only=True)
        if (state["model"], state["recipe"]) != (self.family.name, self.recipe):
            raise ValueError(
                f"resume: the state in {path} belongs to another recipe: {state['model']}, {state['recipe']}"
            )
        self.step = state["step"]
        self.learner.load_state_dict(state["learner"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def make_optimizers(learner: nn.Module, recipe: Recipe, by_adam: tuple[str, ...]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, the head, norms, biases and names in `by_adam`."""
    matrices, rest = [], []
    for name, parameter in learner.named_parameters():
        is_inner = parameter.ndim == 2 and not any(part in name for part in by_adam)
        (matrices if is_inner else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def learning_rate(step: int, recipe: Recipe) -> float:
    """Share of the highest rate: a linear rise, then a cosine down to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)))


def average_gradients(learner: nn.Module, losses: Tensor) -> Tensor:
    """Mean of the gradients over the workers, in one message; returns the mean of `losses` (1-D) as well."""
    gradients = [p.grad for p in learner.parameters() if p.grad is not None]
    message = torch.cat([losses, *(g.flatten() for g in gradients)])
    dist.all_reduce(message)
    losses, *means = (message / WORKERS).split([len(losses), *(g.numel() for g in gradients)])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))
    return losses


@torch.no_grad()
def accuracy(model: TinyModel, builder: PromptBuilder, split: str, count: int, *, q: float = 0.0) -> dict[str, float]:
    """Share of questions answered exactly right by kind, on the first `count` scenes of a held-out split.

    The answer is teacher-forced: every token is the most likely one exactly when greedy decoding gives the answer.
    """
    hits: dict[str, list[bool]] = {}
    for sort in ("picture", *model.family.clips):
        kinds = [kind for kind, of in model.family.kinds.items() if of == sort]
        for first in range(0, count, 64):
            drawn = [scenes.draw_sort(sort, split, i) for i in range(first, min(count, first + 64))]
            rng = np.random.default_rng([first, sort != "picture"])
            questions = [scenes.draw_questions(scene, kinds, rng) for scene in drawn]
            pixels = np.stack([scenes.render(scene) for scene in drawn])
            pixels = pixels[:, None] if sort == "picture" else pixels
            seconds = None if sort == "picture" else [scene.seconds or scenes.SECONDS for scene in drawn]
            batch = builder.batch(pixels, questions, seconds=seconds)
            right = model(batch, prune=torch.full((len(drawn),), q) if sort != "picture" and q else None)[0].argmax(-1)
            right = right == batch.targets
            for number, question in enumerate(q for row in questions for q in row):
                if question.kind in kinds:
                    hits.setdefault(question.kind, []).append(bool(right[batch.question_of_target == number].all()))
    return {kind: round(sum(h) / len(h), 4) for kind, h in hits.items()}


# ------------------------------------------------------------------------------------------------- running


def run_worker(
    rank: int, model: str, recipe: Recipe, out: Path, rendezvous: str, resume: bool, stop: int | None
) -> None:
    """Train in one process; rank 0 also shows progress, measures, and writes state, log and checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORKERS)
    trainer, state = Trainer(find_family(model), recipe, rank), out / "training_state.pt"
    if resume:
        trainer.load_state(state)
    last, begin = min(recipe.steps, stop or recipe.steps), time.time()
    with tqdm(initial=trainer.step, total=recipe.steps, disable=rank > 0, mininterval=2) as bar:
        while trainer.step < last:
            losses = trainer.train_step()
            bar.set_postfix(loss="/".join(f"{x:.3f}" for x in losses.tolist()), refresh=False)
            bar.update()
            is_due = trainer.step % recipe.measure_every == 0 or trainer.step == last
            if rank == 0 and is_due:
                report(trainer, out, losses, time.time() - begin)
                trainer.save_state(state)
    dist.barrier()
    if rank == 0 and trainer.step == recipe.steps:
        state.unlink()
    dist.destroy_process_group()


def report(trainer: Trainer, out: Path, losses: Tensor, seconds: float) -> None:
    """A line of the log, and the checkpoint as it is now."""
    model = trainer.learner.vlm
    trainer.family.write_checkpoint(out, trainer.config, trainer.tokenizer, model.checkpoint_weights())
    row = {"step": trainer.step, "seconds": round(seconds), "loss": [round(x, 4) for x in losses.tolist()]}
    if trainer.step > trainer.recipe.see:
        row |= accuracy(model, trainer.builder, "select", trainer.recipe.measure_on)
    with (out / "training_log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    tqdm.write(json.dumps(row))


def train(recipe: Recipe, out: Path, *, model: str = DEFAULT, resume: bool = False, stop: int | None = None) -> None:
    """Train the family `model` into the folder `out`.

    resume: continue from its `training_state.pt`; stop: pause after this many steps.

    Raises FileNotFoundError when there is nothing to resume, ValueError when it belongs to another recipe.
    """
    if resume and not (out / "training_state.pt").exists():
        raise FileNotFoundError(f"resume: {out / 'training_state.pt'} does not exist")
    out.mkdir(parents=True, exist_ok=True)
    if not resume:
        (out / "training_log.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (model, recipe, out, f"{folder}/rendezvous", resume, stop)
        torch.multiprocessing.spawn(run_worker, args=arguments, nprocs=WORKERS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=family_names(), default=DEFAULT)
    for field in fields(Recipe):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=field.type, help=f"{field.default}, or the model's"
        )
    parser.add_argument("--out", type=Path, help="the checkpoint folder to write (default: the one that ships)")
    parser.add_argument("--resume", action="store_true", help="continue a run that was stopped")
    parser.add_argument("--stop", type=int, help="pause after this many steps")
    args = vars(parser.parse_args())
    model, out, resume, stop = (args.pop(name) for name in ("model", "out", "resume", "stop"))
    family = find_family(model)
    recipe = Recipe(**(family.recipe | {name: value for name, value in args.items() if value is not None}))
    train(recipe, out or family.folder, model=model, resume=resume, stop=stop)


if __name__ == "__main__":
    main()
