"""A comparison of two runs, on disk or in memory: which stage differs first, where, and by how much.

    trace.save(folder)          stages.safetensors, one tensor per name, and manifest.json, which describes them
    refvl.compare(a, b)         traces or such folders -> the first stage beyond tolerance, where and by how much

A tensor's name is "stage/what", such as "encode/0" for the first item. `Trace.stages` returns
refvl's stages. Other software can write folders of the same form, with some or all stages
(`refvl.study.recording`, `benchmarks/record_vllm.py`).
"""

import json
from dataclasses import astuple, dataclass, field, replace
from math import isnan, isqrt, nan, prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from refvl.checkpoints import open_shard
from refvl.checks import is_grid, read_json
from refvl.positions import MediaSpan
from refvl.positions.rotary import merge_block_coordinates
from refvl.study.causes import proven_cause

FORMAT, TENSORS, MANIFEST = "refvl stages 2", "stages.safetensors", "manifest.json"
STAGES = ("decode media", "patchify", "encode", "prune", "merge", "positions", "prefill", "decode tokens")
STATES, LOGITS, MARGINS = "prefill/last_states", "prefill/first_logits", "decode tokens/margins"
NEW_TOKENS = "decode tokens/token_ids"
RTOL = 1e-3  # for stages of media: above the float32 rounding in a tower, below that of bfloat16
# a text model may amplify a difference between its inputs by this factor; measured factors are at most 1
GROWTH = 8


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """The results of a run's stages: tensors keyed by "stage/what", in the order of the stages.

    source: the software that produced the run. layouts: for each item, (t, h, w) in patches, or
    None if the layout is not a grid. spans: the media's spans in the prompt; empty if
    unknown, or if tokens were pruned.
    """

    tensors: dict[str, Tensor]
    source: str
    layouts: list = field(default_factory=list)
    spans: list[MediaSpan] = field(default_factory=list)

    def save(self, folder: str | Path) -> None:
        """Write the stages into `folder`; raise FileExistsError if `folder` is a file, or a folder
        that is not empty.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"folder: {folder} already contains files; choose a different folder")
        tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in self.tensors.items()}
        save_file(tensors, folder / TENSORS)
        about = {"format": FORMAT, "source": self.source, "layouts": self.layouts, "tensors": list(tensors)}
        about["spans"] = [astuple(span) for span in self.spans]
        (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> "Stages":
        """Load a folder that `save` wrote.

        Raises FileNotFoundError or ValueError, naming the file, if a file is missing or has
        different contents.
        """
        file, manifest = Path(folder) / TENSORS, Path(folder) / MANIFEST
        about = read_json(manifest)
        if about.get("format") != FORMAT:
            raise ValueError(f"{manifest}: expected a manifest of saved stages (format {FORMAT!r})")
        with open_shard(file) as stored:
            tensors = {name: stored.get_tensor(name) for name in about["tensors"]}
        layouts = [tuple(layout) if is_grid(layout) else None for layout in about["layouts"]]
        return cls(tensors, about["source"], layouts, [MediaSpan(*span) for span in about["spans"]])


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """The comparison of one tensor in both runs: the largest difference, the largest value,
    and the rows beyond tolerance.
    """

    name: str
    differs: bool
    largest: float = 0.0
    scale: float = 0.0  # largest magnitude in b
    beyond: str = ""  # the number of rows beyond tolerance, and where the first one is
    cause: str = ""  # the cause that a recomputation proved; "" if none did

    def __str__(self) -> str:
        if not self.differs:
            return f"same, within {self.largest:.1e} of {self.scale:.3g}"
        size = "" if isnan(self.scale) else f"by {self.largest:.3g} of {self.scale:.3g}; "
        return f"DIFFERS: {size}{self.beyond}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """The comparison of two runs; `first` is the first tensor that differs,
    or None if no tensor differs.
    """

    a: str
    b: str
    rows: list[Difference]
    not_in_both: list[str]

    @property
    def first(self) -> Difference | None:
        return next((row for row in self.rows if row.differs), None)

    @property
    def stage(self) -> str | None:
        """The name of the first stage that differs."""
        return self.first.name.split("/")[0] if self.first else None

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.first is None and self.not_in_both:
            return f"undecided: the same where both recorded, but only one recorded {', '.join(self.not_in_both)}"
        if self.first is None:
            return "no difference"
        return f"first difference: {self.first.name}; {self.first.cause or 'no cause was proven'}"

    def __repr__(self) -> str:
        lines = [f"  {row.name:<24}{row}" for row in self.rows]
        lines += [f"  {name:<24}not recorded by both" for name in self.not_in_both]
        return "\n".join([f"{self.a} beside {self.b}", *lines, self.verdict])


def compare(a: Any, b: Any, *, rtol: float | None = None, atol: float = 0.0, model: Any = None) -> Comparison:
    """Find where two runs first differ, and by how much; each run is a `Trace`, `Stages`,
    or a folder that one of these saved.

    A value differs if |a - b| > atol + rtol * the largest magnitude in b: that of its tensor or, in
    the inputs and states of the text model, that of its row. By default, rtol is 1e-3 up to the
    positions; in the text model, it is the expected rounding error (see `rounding`). Integers and
    masks must be equal, and nan and inf must be at the same positions. Stages that only one run
    recorded are listed but not compared. model: the `VLM` of one of the runs, which recomputes the
    first stage that differs, to prove a cause (`refvl.study.causes`). Raises TypeError or
    ValueError, naming the argument; the runs must share a stage.
    """
    ours, theirs = _stages(a, "a"), _stages(b, "b")
    names = [name for name in ours.tensors if name in theirs.tensors]
    if not names:
        raise ValueError(f"a, b: {ours.source} and {theirs.source} share no recorded stage")
    names.sort(key=lambda name: STAGES.index(name.split("/")[0]))  # stable, so the order within a stage is kept
    rows = [_difference(name, ours, theirs, rtol, atol) for name in names]
    found = Comparison(ours.source, theirs.source, rows, sorted(ours.tensors.keys() ^ theirs.tensors.keys()))
    if model is not None and found.first is not None:
        trace = next((run for run in (a, b) if hasattr(run, "messages")), None)
        cause = proven_cause(found.first.name, model, ours, theirs, trace)
        rows[rows.index(found.first)] = replace(found.first, cause=cause)
    return found


def _stages(run: Any, name: str) -> Stages:
    if isinstance(run, (str, Path)):
        return Stages.load(run)
    stages = getattr(run, "stages", run)
    if not isinstance(stages, Stages):
        raise TypeError(f"{name}: expected a Trace, Stages or a folder of saved stages, got {type(run).__name__}")
    return stages


def _difference(name: str, ours: Stages, theirs: Stages, rtol: float | None, atol: float) -> Difference:
    a, b = ours.tensors[name], theirs.tensors[name]
    if a.shape != b.shape:
        return Difference(name, True, nan, nan, f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
    exact = not a.is_floating_point() and not b.is_floating_point()
    x, y = (a.double(), b.double()) if exact else (a.float(), b.float())
    same = (x == y) | (x.isnan() & y.isnan())  # also for inf
    apart = torch.where(same, 0.0, (x - y).abs().nan_to_num(nan=torch.inf))
    largest = float(apart.max()) if apart.numel() else 0.0
    scale = float(torch.where(y.isfinite(), y, 0.0).abs().max()) if y.numel() else 0.0
    wrong = apart > (0 if exact else atol + _allowed(name, ours, theirs, rtol, y, scale))
    if not wrong.any():
        return Difference(name, False, largest, scale)
    by_row = wrong.T if name.startswith("positions/") else wrong
    rows = by_row.reshape(len(by_row), -1).any(1)
    row = int(rows.int().argmax())
    beyond = f"{int(rows.sum())} of {len(rows)} rows, the first {_place(name, row, ours.layouts, len(rows))}"
    if name == NEW_TOKENS:
        beyond += _tie(row, ours, theirs)
    return Difference(name, True, largest, scale, beyond)


def _allowed(name: str, ours: Stages, theirs: Stages, rtol: float | None, y: Tensor, scale: float) -> Tensor | float:
    """Return the allowed difference: one number or, for the text model, a column of numbers, one
    per layer for its states and one per token for its inputs.
    """
    share = RTOL if rtol is None else rtol
    if name == STATES or name.startswith("merge/"):  # text has smaller values than media
        scales = y.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True)
        if name == STATES and rtol is None:
            return torch.tensor([[rounding(ours, theirs, layer)] for layer in range(len(y))]) * scales
        return share * scales
    if name in (LOGITS, MARGINS):
        scale = float(theirs.tensors.get(LOGITS, y).float().abs().max())
        return scale * (rounding(ours, theirs) if rtol is None else rtol)
    return share * scale


def rounding(ours: Stages, theirs: Stages, layers: int | None = None) -> float:
    """Return the difference that rounding explains after `layers` layers (None: after the head),
    as a share of the largest value.

    The share is 2 * sqrt(n) * eps if n values are rounded one after the other, each by at most eps
    / 2. The factor 2 covers the largest of about 10^5 errors (`tests/closeness.py` derives the
    formula), and eps is the machine epsilon of the coarser run. In float32, every term of a layer's
    sums is rounded: about ten times as many terms as the model's width. In half precision, sums are
    computed in float32, so only the ten or so results of a layer are rounded. `GROWTH` times the
    difference of the inputs is added.
    """
    runs = [run.tensors[name] for run in (ours, theirs) for name in (STATES, LOGITS) if name in run.tensors]
    states = [x for x in runs if x.ndim == 2]
    width, depth = (states[0].shape[1], len(states[0]) - 1) if states else (1024, 32)
    eps = max(torch.finfo(x.dtype).eps for x in runs) if runs else torch.finfo(torch.float32).eps
    steps = ((depth if layers is None else layers) + 1) * 10 * (width if eps < 1e-4 else 1)
    return 2 * steps**0.5 * eps + GROWTH * _inputs_apart(ours, theirs)


def _inputs_apart(ours: Stages, theirs: Stages) -> float:
    """Return the largest distance between both runs' inputs of the text model for a token,
    relative to their norm; 0 if unknown.
    """
    x, y = (run.tensors.get("merge/inputs_embeds") for run in (ours, theirs))
    if x is None or y is None or x.shape != y.shape or not x.numel():
        return 0.0
    norms = y.float().norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((x.float() - y.float()).norm(dim=1) / norms).nan_to_num(nan=0.0).max())


def _place(name: str, row: int, layouts: list, rows: int) -> str:
    """Describe a row as a frame, patch, token or layer."""
    stage, what = name.split("/", 1)
    if name == STATES:
        return f"after layer {row - 1}" if row else "into layer 0"
    units = {"decode media": "frame", "patchify": "patch", "prefill": "token id", "decode tokens": "new token"}
    unit = units.get(stage, "token")
    if not what.isdecimal():
        return f"at {unit} {row}"
    grid = layouts[int(what)] if int(what) < len(layouts) else None
    m = isqrt(prod(grid) // rows) if grid else 0  # each row covers a square of m x m patches
    if not grid or not m or m * m * rows != prod(grid) or any(side % 2 for side in grid[1:]):
        return f"at item {int(what) + 1}, {unit} {row}"
    t, within = divmod(row, rows // grid[0])
    if m == 1:
        h, w = merge_block_coordinates([(1, *grid[1:])])[within].tolist()
    else:
        h, w = divmod(within, grid[2] // m)
    return f"at item {int(what) + 1}, {unit} (t {t}, row {h}, column {w})"


def _tie(row: int, ours: Stages, theirs: Stages) -> str:
    """Describe the margin between the best two logits of a token,
    and the margin that rounding explains.
    """
    margins = [float(run.tensors[MARGINS][row]) for run in (ours, theirs) if row < len(run.tensors.get(MARGINS, ()))]
    if len(margins) < 2 or LOGITS not in theirs.tensors:
        return ""
    tie = 2 * rounding(ours, theirs) * float(theirs.tensors[LOGITS].float().abs().max())
    return f"; its best two logits are {min(margins):.2g} apart, and rounding explains {tie:.2g}"
