"""Train the tiny Step3-VL that ships with refvl: `python -m data.training.train_step3`.

Every step asks the same kinds of questions about its pages twice, with crops and without. So lack of training
cannot be the reason if the model fails without crops. As in `train_tiny.py`, the tower learns first, with a
linear probe that predicts letter and colour in each crop, and the colour in each quarter of the overview. Then
the language model joins. Questions have several spellings, and some have no answer on the page (see
`everyday.py`).
"""

import argparse
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.training import everyday, pages, run, scenes
from data.training.run import WORKERS
from data.training.tiny_family import STEP3, TinyStep3
from data.training.tiny_model import Batch, PromptBuilder, TinyModel, are_right

KINDS = ("letter", "place", "color", "missing")  # the kinds of questions about each page
LABELS = (1 + len(pages.LETTERS), 1 + len(pages.COLORS))


@dataclass(frozen=True)
class Recipe:
    """Settings of the training, by default those of the committed checkpoint. Counts are per step and worker."""

    steps: int = 1150
    see: int = 230  # the number of steps in which only the tower learns
    crowded: int = 5  # pages full of boxes, from which the tower learns to read crops
    pages: int = 8  # pages in prompts with crops
    overviews: int = 8  # pages in prompts without crops
    asides: int = 6  # pages with off-topic questions, in every second step after `see`
    seeing: int = 4  # the factor for these counts while only the tower learns
    lr: float = 2e-3
    muon_lr: float = 3e-3
    warmup: int = 50
    probe_weight: float = 0.3
    seed: int = 0
    measure_every: int = 150
    measure_on: int = 64  # held-out pages


class Learner(nn.Module):
    """The model, and the probe that helps to train its tower."""

    def __init__(self, seed: int):
        super().__init__()
        self.vlm = TinyModel(STEP3)
        self.vlm.init_weights(seed)
        self.probe = nn.Linear(self.vlm.lm_head.in_features, sum(LABELS))
        nn.init.zeros_(self.probe.weight)
        nn.init.zeros_(self.probe.bias)

    def square_loss(self, media_BMD: Tensor, drawn: list[pages.Page], crops: bool) -> Tensor:
        """Return the probe's cross-entropy: letter and colour in crops, or only colours in an overview's quarters."""
        squares_BMD = media_BMD[:, :-4] if crops else media_BMD[:, -4:]
        labels = np.stack([pages.crop_labels(page) if crops else pages.quarter_labels(page) for page in drawn])
        letters, colors = self.probe(squares_BMD.flatten(0, 1)).split(LABELS, -1)
        letter, color = torch.from_numpy(labels).flatten(0, 1).unbind(1)
        of_colors = F.cross_entropy(colors, color)
        return of_colors + F.cross_entropy(letters, letter) if crops else of_colors


class Trainer(run.Trainer):
    def __init__(self, recipe: Recipe, rank: int):
        super().__init__(STEP3, recipe, rank)
        self.families = {True: STEP3, False: TinyStep3(enable_crops=False)}
        self.builders = {crops: PromptBuilder(family) for crops, family in self.families.items()}
        self.learner = Learner(recipe.seed)
        self.start()

    def losses(self) -> list[Tensor]:
        """Return five losses: answers and probe with crops, answers and probe without crops, and off-topic answers."""
        if self.step < self.recipe.see:
            return [*self._see(), torch.zeros(())]
        return [*self._speak(True), *self._speak(False), self._step_aside()]

    def measure(self) -> dict[str, float]:
        return self.accuracy("select", self.recipe.measure_on)

    def draw(self, count: int, *, crowded: bool = False) -> list[pages.Page]:
        """Draw the pages of this step and worker; later steps draw different pages."""
        first = (self.step * WORKERS + self.rank) * 64
        return [pages.draw_page("train", first + i, crowded=crowded) for i in range(count)]

    def _see(self) -> list[Tensor]:
        """Train only the tower, on crops of crowded pages and on overviews; add to the gradients; return the losses."""
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
        """Ask about pages with or without crops; add to the gradients; return the losses of answers and probe."""
        r = self.recipe
        drawn = self.draw(r.pages if crops else r.overviews)
        batch = self.ask(drawn, KINDS, crops, np.random.default_rng([r.seed, self.step, self.rank, crops]))
        logits, media_BMD, _ = self.learner.vlm(batch)
        answers = F.cross_entropy(logits, batch.targets)
        squares = self.learner.square_loss(media_BMD, drawn, crops)
        (answers + r.probe_weight * squares).backward()
        return answers.detach(), squares.detach()

    def _step_aside(self) -> Tensor:
        """Ask off-topic questions about pages with crops, pages without crops, or no page; add to the gradients."""
        turn, r = self.step // 2 % 4, self.recipe
        if self.step % 2:
            return torch.zeros(())
        rng = np.random.default_rng([r.seed, self.step, self.rank, 2])
        drawn = self.draw(r.asides)
        questions = [[draw_aside(page, rng) for _ in range(2)] for page in drawn]
        self.learner.vlm.family, builder = self.families[turn != 1], self.builders[turn != 1]
        if turn == 3:
            batch = builder.batch(
                None, [[replace(q, text=everyday.draw(rng), answer=pages.HELP) for q in row] for row in questions]
            )
        else:
            batch = builder.batch(_pixels(drawn), questions)
        loss = F.cross_entropy(self.learner.vlm(batch)[0], batch.targets)
        loss.backward()
        return loss.detach()

    def ask(self, drawn: list[pages.Page], kinds, crops: bool, rng: np.random.Generator) -> Batch:
        """Build a batch of pages with questions; from then on, the model's prompts have crops if `crops` is set."""
        self.learner.vlm.family = self.families[crops]
        questions = [pages.draw_questions(page, kinds, rng) for page in drawn]
        questions = [[replace(q, text=everyday.vary(q.text, rng)) for q in row] for row in questions]
        return self.builders[crops].batch(_pixels(drawn), questions)

    @torch.no_grad()
    def accuracy(self, split: str, count: int) -> dict[str, float]:
        """Return the share of exactly correct answers by kind, with and without crops."""
        shares, drawn = {}, [pages.draw_page(split, i) for i in range(count)]
        for crops, name in ((True, ""), (False, ", no crops")):
            batch = self.ask(drawn, KINDS, crops, np.random.default_rng(count))
            right = are_right(batch, self.learner.vlm(batch)[0])
            for i, kind in enumerate(KINDS):
                shares[kind + name] = round(sum(right[i :: len(KINDS)]) / count, 4)
        return shares


def draw_aside(page: pages.Page, rng: np.random.Generator) -> pages.Question:
    """Draw an everyday sentence, a question about a missing box, or a question that fits scenes but not pages."""
    sort = rng.random()
    if sort < 0.6:
        return pages.Question("everyday", everyday.draw(rng), pages.HELP)
    [question] = pages.draw_questions(page, ["missing"], rng)
    if sort < 0.8:
        phrases = [phrase for phrases in scenes.PHRASES.values() for phrase in phrases]
        thing = " ".join((str(rng.choice(list(scenes.COLORS))), str(rng.choice(scenes.SHAPES))))
        question = pages.Question("unfit", str(rng.choice(phrases)).format(x=thing), pages.HELP)
    return replace(question, text=everyday.vary(question.text, rng))


def _pixels(drawn: list[pages.Page]) -> Tensor:
    """Render pages as (B, 1, H, W, 3) uint8."""
    return torch.from_numpy(np.stack([pages.render(page) for page in drawn])[:, None])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run.add_arguments(parser)
    args = parser.parse_args()
    run.train(Trainer, (run.changed(Recipe(), args.set),), args.out or STEP3.folder)


if __name__ == "__main__":
    main()
