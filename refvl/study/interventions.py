"""`VLM.trace(..., replace={stage: f})` replaces the result of a stage with f(result),
and the run continues with the new result.

    stage            what f receives and returns
    patchify         list of `Patches`, one per item; f may return only their rows, as tensors (N, C)
    plan             list of plans, one per forward of the tower
    encode, embeds   list of tensors (M, W), one per item
    prune            list of masks (M,) bool or None, one per item
    merge            (L, D) embeddings of the prompt
    positions        (3, L) positions; decode steps continue after their maximum, on all axes
    position_table   the weights of the tower's learned position table, if there is one
    window_index     this tensor of the plan, or any other tensor by its name

The model itself is not changed. A run with replacements is eager even if the model has graphs, and
it uses no media cache.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from refvl.pixels.patches import Patches
from refvl.positions import mrope_delta
from refvl.serving.features import share_weights
from refvl.study.report import Trace

RESULTS = {  # stage -> the field of the trace that the stage fills
    "patchify": "patches", "plan": "metadata", "encode": "embeds", "prune": "keep_masks", "merge": "inputs_embeds",
    "positions": "positions",
}  # fmt: skip
TABLE = re.compile(r"(^|\.)(pos_embed|position_embedding|positional_embedding)(\.weight)?$")  # in towers


@dataclass(slots=True, eq=False, repr=False)
class Intervened(Trace):
    """A trace whose results are replaced during the run."""

    changes: Mapping[str, Callable] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, then replace its result if `changes` has a function for the stage."""
        with Trace.stage(self, name):
            yield
        if name == "plan":
            self.metadata[:] = [self._changed_plan(plan) for plan in self.metadata]
        if name in self.changes:
            made = getattr(self, RESULTS[name])
            changed = _fitting(name, made, self.changes[name](made))
            if isinstance(made, list):
                made[:] = changed  # in place, because the run holds a reference to this list
            else:
                setattr(self, RESULTS[name], changed)
            if name == "positions":
                self.delta = mrope_delta(changed)

    def _changed_plan(self, plan: Any) -> Any:
        tensors = [name for name in plan.__dataclass_fields__ if isinstance(getattr(plan, name), Tensor)]
        named = self.changes.keys() - RESULTS.keys() - {"position_table"}
        if unknown := sorted(named - set(tensors)):
            stages = dict.fromkeys([*RESULTS, "position_table", *tensors])
            raise ValueError(f"replace: expected one of the stages {', '.join(stages)}, got {unknown[0]!r}")
        return replace(plan, **{n: _fitting(n, getattr(plan, n), self.changes[n](getattr(plan, n))) for n in named})


def with_replacements(model: Any, changes: Mapping[str, Callable]) -> Any:
    """Return a copy of `model`, with the same weights, that applies the replacements in every run.

    Raises ValueError without a position table; a run raises it for an unknown stage.
    """
    changes = {"encode" if name == "embeds" else name: function for name, function in changes.items()}
    changed = copy.copy(model)
    changed.graphs = changed.media_cache = None
    changed.record = lambda **given: Intervened(changes=changes, **given)
    if table := changes.get("position_table"):
        changed.encoder = share_weights(model.encoder)
        found = [name for name, _ in model.encoder.named_parameters() if TABLE.search(name)]
        if not found:
            raise ValueError(f"replace: the tower of {model.family.name} has no position_table")
        owner, _, name = found[0].rpartition(".")
        weight = changed.encoder.get_parameter(found[0]).detach()
        values = _fitting("position_table", weight, table(weight.clone()))
        setattr(changed.encoder.get_submodule(owner), name, nn.Parameter(values, requires_grad=False))
    return changed


def _fitting(name: str, made: Any, changed: Any) -> Any:
    """Return `changed` with the device and dtype of `made`.

    Raises ValueError if the length, the shape or the kind of numbers differs.
    """
    if isinstance(made, list):
        if len(changed) != len(made):
            raise ValueError(f"replace[{name!r}]: expected {len(made)} items, got {len(changed)}")
        return [_fitting(name, old, new) for old, new in zip(made, changed, strict=True)]
    if isinstance(made, Patches) and isinstance(changed, Tensor):
        return replace(made, rows=_fitting(name, made.pixel_values, changed))
    if isinstance(made, Tensor):
        same_kind = changed.dtype == made.dtype or (changed.is_floating_point() and made.is_floating_point())
        if changed.shape != made.shape or not same_kind:
            wanted = f"a tensor of shape {tuple(made.shape)} and {made.dtype}"
            raise ValueError(f"replace[{name!r}]: expected {wanted}, got {tuple(changed.shape)}, {changed.dtype}")
        return changed.to(made)
    return changed
