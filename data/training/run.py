"""The training of any tiny model: two processes that average gradients, and the state, log and checkpoint of a run.

Muon updates matrices, and AdamW updates everything else. The learning rate rises linearly, then falls to zero as a
cosine. Two processes with one thread each take half of the examples and average their gradients, because the operations
are too small for several threads. The input of a step depends only on (seed, step, worker), so a stopped run continues
as if it had never been stopped.

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
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from refvl.serving.linear import use_faster_linear

WORKERS = 2


class Trainer:
    """One worker of a training run; all workers have the same weights.

    A subclass sets `tokenizer`, `config` and `learner` (whose `vlm` is the model), then calls `start`, and defines the
    `losses` of a step and `measure`. recipe: a frozen dataclass with `steps`, `lr`, `muon_lr`, `warmup`,
    `measure_every` and `see`, the number of steps before the model answers questions.
    """

    tokenizer: Any
    config: dict
    learner: nn.Module
    weights_file = "model.safetensors"  # in the checkpoint's folder

    def __init__(self, family, recipe, rank: int):
        self.family, self.recipe, self.rank, self.step = family, recipe, rank, 0

    def start(self) -> None:
        """Choose the kernel of `learner`'s linear layers as `refvl.load` does, and build the optimizers."""
        use_faster_linear(self.learner)
        self.optimizers = make_optimizers(self.learner, self.recipe, (*self.family.by_adam, "probe"))
        self.peaks = [group["lr"] for group in self._groups()]

    def losses(self) -> list[Tensor]:
        """Add the gradients of one step, and return its losses (scalars)."""
        raise NotImplementedError

    def measure(self) -> dict[str, float]:
        """Measure accuracy on the held-out examples that the recipe was chosen on; workers may share the work."""
        raise NotImplementedError

    def write(self, out: Path) -> None:
        """Write the checkpoint in its current state."""
        self.family.write_checkpoint(out, self.config, self.tokenizer, self.learner.vlm.checkpoint_weights())

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

    def save_state(self, path: Path) -> None:
        """Save everything that `load_state` needs; after an interruption, the file is either the old or the new one."""
        state = {
            "step": self.step,
            "model": self.family.name,
            "recipe": asdict(self.recipe),
            "learner": self.learner.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        if (state["model"], state["recipe"]) != (self.family.name, asdict(self.recipe)):
            raise ValueError(
                f"resume: expected a state of this model and recipe in {path}, got {state['model']}, {state['recipe']}"
            )
        self.step = state["step"]
        self.learner.load_state_dict(state["learner"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


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


def own_share(parts: list) -> list:
    """Return this worker's half of the parts, or all of them if it runs alone."""
    return parts[dist.get_rank() :: WORKERS] if dist.is_initialized() else parts


def from_others(value: Any) -> list:
    """Return the values of the other workers; every worker has to call this."""
    if not dist.is_initialized():
        return []
    values = [None] * WORKERS
    dist.all_gather_object(values, value)
    return [other for rank, other in enumerate(values) if rank != dist.get_rank()]


def digest(folder: Path, weights_file: str = Trainer.weights_file) -> str:
    """Return the SHA-256 of the weights file in a folder."""
    return hashlib.sha256((folder / weights_file).read_bytes()).hexdigest()


def _work(rank: int, make: Callable[..., Trainer], arguments: tuple, out: Path, meet: str, resume: bool, stop) -> None:
    """Train in one process; rank 0 also shows progress and writes state, log and checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=WORKERS)
    trainer, state = make(*arguments, rank), out / "training_state.pt"
    recipe, before = trainer.recipe, 0.0
    if resume:
        trainer.load_state(state)
        before = json.loads((out / "training_log.jsonl").read_text().splitlines()[-1])["seconds"]
    elif rank == 0:
        _log(out, {"model": trainer.family.name, "recipe": asdict(recipe)})
    last, begin = min(recipe.steps, stop or recipe.steps), time.time()
    with tqdm(initial=trainer.step, total=recipe.steps, disable=rank > 0, mininterval=2) as bar:
        while trainer.step < last:
            losses = trainer.train_step()
            bar.set_postfix(loss="/".join(f"{x:.3f}" for x in losses.tolist()), refresh=False)
            bar.update()
            is_due = trainer.step % recipe.measure_every == 0 or trainer.step == last
            if is_due:
                measured = trainer.measure() if trainer.step > recipe.see else {}
            if rank == 0 and is_due:
                _report(trainer, out, losses, before + time.time() - begin, measured)
                trainer.save_state(state)
    dist.barrier()
    if rank == 0 and trainer.step == recipe.steps:
        state.unlink()
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


def train(
    make: Callable[..., Trainer], arguments: tuple, out: Path, *, resume: bool = False, stop: int | None = None
) -> None:
    """Train `make(*arguments, rank)` in `WORKERS` processes, into the folder `out`.

    resume: continue from its `training_state.pt`; stop: pause after this many steps.

    Raises FileNotFoundError if there is nothing to resume, ValueError if the state belongs to a different recipe.
    """
    if resume and not (out / "training_state.pt").exists():
        raise FileNotFoundError(f"resume: {out / 'training_state.pt'} does not exist; train without --resume first")
    out.mkdir(parents=True, exist_ok=True)
    if not resume:
        (out / "training_log.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _work, args=(make, arguments, out, f"{folder}/rendezvous", resume, stop), nprocs=WORKERS
        )


def add_arguments(parser: argparse.ArgumentParser, recipe: type) -> None:
    """Add an option for each field of the recipe, and the options of `train`."""
    for field in fields(recipe):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=field.type, help=f"{field.default}, or the model's own value"
        )
    parser.add_argument("--out", type=Path, help="the checkpoint folder to write (default: the shipped one)")
    parser.add_argument("--resume", action="store_true", help="continue a run that was stopped")
    parser.add_argument("--stop", type=int, help="pause after this many steps")
