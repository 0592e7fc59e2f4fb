"""Train the tiny Step3-VL that ships with refvl: `python -m data.training.train_step3`.

Every step asks about some pages with crops and about others without, the same kinds of questions: what the model cannot
answer without crops is not for lack of training. As in `train_tiny.py` the tower learns first, with a linear probe that
names letter and colour in each crop and in each quarter of the overview; then the language model joins. Two processes
of one thread each take half of the pages and average their gradients. In float32: sequences of 20 tokens are so short
that bfloat16 took three times as long.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from data.training import pages
from data.training.tiny_model import Batch, PromptBuilder, TinyModel
from data.training.tiny_step3 import FAMILY, TinyStep3
from data.training.train_tiny import WORKERS, average_gradients, learning_rate, make_optimizers

KINDS = ("letter", "place", "color")  # asked about each page
LABELS = (1 + len(pages.LETTERS), 1 + len(pages.COLORS))


@dataclass(frozen=True)
class Recipe:
    """The defaults are those of the committed checkpoint. Counts of pages are per step and worker."""

    steps: int = 1300
    see: int = 250  # steps in which only the tower learns
    crowded: int = 5  # pages full of boxes, of which the tower learns to read crops
    pages: int = 8  # asked about with crops
    overviews: int = 8  # asked about without
    seeing: int = 4  # times as many of these while only the tower learns
    lr: float = 2e-3
    muon_lr: float = 3e-3
    warmup: int = 50
    probe_weight: float = 0.3
    seed: int = 0
    measure_every: int = 150
    measure_on: int = 64  # held-out pages


class Learner(nn.Module):
    """The model and the probe that helps its tower."""

    def __init__(self, config: dict, seed: int):
        super().__init__()
        self.vlm = TinyModel(FAMILY, config)
        self.vlm.init_weights(seed)
        self.probe = nn.Linear(self.vlm.lm_head.in_features, sum(LABELS))
        nn.init.zeros_(self.probe.weight)
        nn.init.zeros_(self.probe.bias)

    def square_loss(self, media_BMD: Tensor, drawn: list[pages.Page], crops: bool) -> Tensor:
        """Cross-entropy of the probe: letter and colour in crops, or colours alone in the quarters of an overview."""
        squares_BMD = media_BMD[:, :-4] if crops else media_BMD[:, -4:]
        labels = np.stack([pages.crop_labels(page) if crops else pages.quarter_labels(page) for page in drawn])
        letters, colors = self.probe(squares_BMD.flatten(0, 1)).split(LABELS, -1)
        letter, color = torch.from_numpy(labels).flatten(0, 1).unbind(1)
        of_colors = F.cross_entropy(colors, color)
        return of_colors + F.cross_entropy(letters, letter) if crops else of_colors


class Trainer:
    """One of the workers; all hold the same weights."""

    def __init__(self, recipe: Recipe, rank: int):
        self.recipe, self.rank, self.step = recipe, rank, 0
        self.tokenizer = FAMILY.train_tokenizer()
        self.config = FAMILY.config(self.tokenizer)
        self.families = {True: FAMILY, False: TinyStep3(enable_crops=False)}
        self.builders = {
            crops: PromptBuilder(family, self.tokenizer, self.config) for crops, family in self.families.items()
        }
        self.learner = Learner(self.config, recipe.seed)
        self.optimizers = make_optimizers(self.learner, recipe, (*FAMILY.by_adam, "probe"))
        self.peaks = [group["lr"] for group in self._groups()]

    def train_step(self) -> Tensor:
        """One step; returns the workers' mean losses: answers and squares with crops, answers and quarters without."""
        losses = self._see() if self.step < self.recipe.see else [*self._speak(True), *self._speak(False)]
        losses = average_gradients(self.learner, torch.stack(losses))
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        for group, peak in zip(self._groups(), self.peaks, strict=True):
            group["lr"] = peak * learning_rate(self.step, self.recipe)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return losses

    def draw(self, count: int, *, crowded: bool = False) -> list[pages.Page]:
        """Pages of this step and worker, never drawn again."""
        first = (self.step * WORKERS + self.rank) * 64
        return [pages.draw_page("train", first + i, crowded=crowded) for i in range(count)]

    def _see(self) -> list[Tensor]:
        """The tower alone: crops of crowded pages, and overviews; adds to the gradients, returns the losses."""
        losses = []
        for crops, count in ((True, self.recipe.crowded), (False, self.recipe.overviews * self.recipe.seeing)):
            drawn = self.draw(count, crowded=crops)
            self.learner.vlm.family = self.families[crops]
            media_BMD = self.learner.vlm.encode(_pixels(drawn))
            loss = self.learner.square_loss(media_BMD, drawn, crops)
            loss.backward()
            losses += [torch.zeros(()), loss.detach()]
        return losses

    def _speak(self, crops: bool) -> tuple[Tensor, Tensor]:
        """Pages asked about with or without crops; adds to the gradients, returns the losses of answers and squares."""
        r = self.recipe
        drawn = self.draw(r.pages if crops else r.overviews)
        batch = self.ask(drawn, KINDS, crops, np.random.default_rng([r.seed, self.step, self.rank, crops]))
        logits, media_BMD, _ = self.learner.vlm(batch)
        answers = F.cross_entropy(logits, batch.targets)
        squares = self.learner.square_loss(media_BMD, drawn, crops)
        (answers + r.probe_weight * squares).backward()
        return answers.detach(), squares.detach()

    def ask(self, drawn: list[pages.Page], kinds, crops: bool, rng: np.random.Generator) -> Batch:
        """Pages with their questions; from now on the model takes its media with crops, or without."""
        self.learner.vlm.family = self.families[crops]
        questions = [pages.draw_questions(page, kinds, rng) for page in drawn]
        return self.builders[crops].batch(_pixels(drawn), questions)

    @torch.no_grad()
    def accuracy(self, split: str, count: int) -> dict[str, float]:
        """Share of questions answered exactly right by kind, with and without crops (`train_tiny.accuracy`)."""
        shares, kinds = {}, tuple(pages.PHRASES)
        for crops in (True, False):
            right = []
            for first in range(0, count, 32):
                drawn = [pages.draw_page(split, i) for i in range(first, min(count, first + 32))]
                batch = self.ask(drawn, kinds, crops, np.random.default_rng([first]))
                is_right = self.learner.vlm(batch)[0].argmax(-1) == batch.targets
                numbers = batch.question_of_target
                right += [bool(is_right[numbers == i].all()) for i in range(len(drawn) * len(kinds))]
            for i, kind in enumerate(kinds):
                hits = right[i :: len(kinds)]
                shares[kind if crops else f"{kind}, no crops"] = round(sum(hits) / len(hits), 4)
        return shares

    def _groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


def _pixels(drawn: list[pages.Page]) -> Tensor:
    """(B, 1, H, W, 3) uint8."""
    return torch.from_numpy(np.stack([pages.render(page) for page in drawn])[:, None])


def run_worker(rank: int, recipe: Recipe, out: Path, rendezvous: str) -> None:
    """Train in one process; rank 0 also shows progress, measures, and writes log and checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORKERS)
    trainer, begin = Trainer(recipe, rank), time.time()
    for _ in tqdm(range(recipe.steps), disable=rank > 0, mininterval=2):
        losses = trainer.train_step()
        if rank == 0 and (trainer.step % recipe.measure_every == 0 or trainer.step == recipe.steps):
            FAMILY.write_checkpoint(out, trainer.config, trainer.tokenizer, trainer.learner.vlm.checkpoint_weights())
            row = {"step": trainer.step, "seconds": round(time.time() - begin)}
            row |= {"loss": [round(x, 4) for x in losses.tolist()]}
            row |= trainer.accuracy("select", recipe.measure_on) if trainer.step > recipe.see else {}
            with (out / "training_log.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            tqdm.write(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def train(recipe: Recipe, out: Path) -> None:
    """Train into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "training_log.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_worker, args=(recipe, out, f"{folder}/rendezvous"), nprocs=WORKERS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    parser.add_argument("--out", type=Path, default=FAMILY.folder, help="the checkpoint folder to write")
    args = vars(parser.parse_args())
    out = args.pop("out")
    train(Recipe(**args), out)


if __name__ == "__main__":
    main()
