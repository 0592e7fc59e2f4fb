"""The training of any tiny model: two processes that average gradients, and the log and checkpoint of a run.

Muon updates matrices, and AdamW updates everything else. The learning rate rises linearly, then falls to zero as a
cosine. Two processes with one thread each take half of the examples and average their gradients, because the operations
are too small for several threads. The input of a step depends only on (seed, step, worker).

The log of a run is next to its weights. Its first line is the recipe. Each following line is a measurement on the
split "select", with the digest of the weights at that step; the last digest is that of the weights in the folder.
"""

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from refvl.serving.linear import choose_linear, use_onednn

WORKERS = 2
BY_ADAM = ("embed_tokens", "lm_head", "probe")  # parts of names of matrices that do not suit Muon


class Trainer:
    """One worker of a training run; all workers have the same weights.

    A subclass sets `learner` (whose `vlm` is the model), then calls `start`, and defines the
    `losses` of a step and `measure`. recipe: a frozen dataclass with `steps`, `lr`, `muon_lr`, `warmup`,
    `measure_every` and `see`, the number of steps before the model answers questions.
    """

    learner: nn.Module
    weights_file = "model.safetensors"  # in the checkpoint's folder

    def __init__(self, family, recipe, rank: int):
        self.family, self.recipe, self.rank, self.step = family, recipe, rank, 0

    def start(self) -> None:
        """Choose the kernel of `learner`'s linear layers as `refvl.load` does, and build the optimizers."""
        weight = next(self.learner.parameters())
        if choose_linear("auto", weight.device, weight.dtype) == "onednn":  # as `refvl.load` does
            use_onednn(self.learner)
        self.optimizers = make_optimizers(self.learner, self.recipe, (*BY_ADAM, *self.family.by_adam))
        self.peaks = [group["lr"] for group in self._groups()]

    def losses(self) -> list[Tensor]:
        """Add the gradients of one step, and return its losses (scalars)."""
        raise NotImplementedError

    def measure(self) -> dict[str, float]:
        """Measure accuracy on the held-out examples that the recipe was chosen on."""
        raise NotImplementedError

    def write(self, out: Path) -> None:
        """Write the checkpoint in its current state."""
        self.family.write_checkpoint(out, self.family.config(), self.learner.vlm.checkpoint_weights())

    def train_step(self) -> Tensor:
        """Run one step; return the mean of the workers' losses."""
        losses = average_gradients(self.learner, torch.stack(self.losses()))
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        for group, peak in zip(self._groups(), self.peaks, strict=True):
            group["lr"] = peak * learning_rate(self.step, self.recipe)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return losses

    def _groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class Muon(torch.optim.Optimizer):
    """torch's Muon with `adjust_lr_fn="match_rms_adamw"`, in float32, because many CPUs have no bfloat16 matmuls.

    On such CPUs, torch's own Muon takes five times as long as the rest of a step.
    """

    def __init__(self, matrices: list[Tensor], *, lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in (w for w in group["params"] if w.grad is not None):
                state = self.state[weight]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(mean, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * group["lr"] * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of a matrix close to one, by Newton-Schulz iteration."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def make_optimizers(learner: nn.Module, recipe, by_adam: tuple[str, ...]) -> list[torch.optim.Optimizer]:
    """Build Muon for matrices inside the blocks, and AdamW for embeddings, head, norms, biases and `by_adam`."""
    matrices, rest = [], []
    for name, parameter in learner.named_parameters():
        is_inner = parameter.ndim == 2 and not any(part in name for part in by_adam)
        (matrices if is_inner else rest).append(parameter)
    return [
        Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def learning_rate(step: int, recipe) -> float:
    """Return the learning rate as a share of its maximum: a linear rise, then a cosine down to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.5 * (1 + math.cos(math.pi * share))


def average_gradients(learner: nn.Module, losses: Tensor) -> Tensor:
    """Average the gradients over the workers; also return the workers' mean of `losses` (1-D).

    A trainer outside of `train` runs alone and exchanges nothing.
    """
    if not dist.is_initialized():
        return losses
    parameters = list(learner.parameters())
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(used)
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count and parameter.grad is None:  # a probe that only the other worker's scenes needed
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    message = torch.cat([losses, *(g.flatten() for g in gradients)])
    dist.all_reduce(message)
    losses, *means = (message / WORKERS).split([len(losses), *(g.numel() for g in gradients)])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))
    return losses


def digest(folder: Path, weights_file: str = Trainer.weights_file) -> str:
    """Return the SHA-256 of the weights file in a folder."""
    return hashlib.sha256((folder / weights_file).read_bytes()).hexdigest()


def _work(rank: int, make: Callable[..., Trainer], arguments: tuple, out: Path, meet: str) -> None:
    """Train in one process; rank 0 also shows progress and writes log and checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=WORKERS)
    trainer, begin = make(*arguments, rank), time.time()
    recipe = trainer.recipe
    if rank == 0:
        _log(out, {"model": trainer.family.name, "recipe": asdict(recipe)})
    for _ in tqdm(range(recipe.steps), disable=rank > 0, mininterval=2):
        losses = trainer.train_step()
        if trainer.step % recipe.measure_every == 0 or trainer.step == recipe.steps:
            measured = trainer.measure() if trainer.step > recipe.see else {}
            if rank == 0:
                _report(trainer, out, losses, time.time() - begin, measured)
    dist.destroy_process_group()


def _report(trainer: Trainer, out: Path, losses: Tensor, seconds: float, measured: dict[str, float]) -> None:
    """Write the current checkpoint, and a line of the log."""
    trainer.write(out)
    row = {"step": trainer.step, "seconds": round(seconds), "loss": [round(x, 4) for x in losses.tolist()]}
    _log(out, row | measured | {"weights_sha256": digest(out, trainer.weights_file)})


def _log(out: Path, row: dict) -> None:
    with (out / "training_log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    tqdm.write(json.dumps(row))


def train(make: Callable[..., Trainer], arguments: tuple, out: Path) -> None:
    """Train `make(*arguments, rank)` in `WORKERS` processes, into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "training_log.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, args=(make, arguments, out, f"{folder}/rendezvous"), nprocs=WORKERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training script."""
    parser.add_argument("--out", type=Path, help="the checkpoint folder to write (default: the shipped one)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="other values in the recipe")


def changed(recipe: Any, settings: list[str]) -> Any:
    """Return the recipe with other values, each written as "name=number"."""
    pairs = (setting.split("=") for setting in settings)
    return replace(recipe, **{name: type(getattr(recipe, name))(value) for name, value in pairs})
