"""A comparison of two runs, on disk or in memory: the first stage that differs, and why.

    trace.save(folder)          stages.safetensors, one tensor per name, and manifest.json, which describes them
    refvl.compare(a, b)         traces or such folders -> the first stage beyond tolerance, by how much, where and why

A name is "stage/what", such as "encode/0" for the first item. `Trace.stages` returns refvl's stages. Other software can
write folders of the same form, with some or all stages (`refvl.study.recording`, `benchmarks/record_vllm.py`).
"""

import html
import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from refvl.checkpoints import open_shard
from refvl.checks import check_number, is_grid, read_json
from refvl.positions.rotary import merge_block_coordinates
from refvl.study.text_causes import explain
from refvl.study.tower_causes import explain_tower

FORMAT, TENSORS, MANIFEST = "refvl stages 1", "stages.safetensors", "manifest.json"
STAGES = {  # stage -> dimensions of its tensors; None: 1 or 2
    "patchify": 2, "encode": 2, "prune": 1, "merge": None, "positions": 2, "prefill": None, "decode tokens": 1,
}  # fmt: skip
STATES, LOGITS, MARGINS = "prefill/last_states", "prefill/first_logits", "decode tokens/margins"
NEW_TOKENS = "decode tokens/token_ids"
ROUNDING = 0.03  # a fraction of the norm: a bfloat16 tower differs by less, a wrong tower almost always by more
RTOL = 1e-3  # for stages of media: allows float32 rounding in a tower, and detects bfloat16
GROWTH = 8  # a text model may amplify a difference between its inputs by this factor; the measured factor is at most 1


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """The results of each stage of a run: tensors by "stage/what", in the order of the stages.

    source: the software that produced the run. layouts: one per item: (t, h, w) in patches, or None if the layout is
    not a grid.
    files: digests of the files that determine the model, if they are known. inputs: `digest_of_inputs`, if it is
    known.
    """

    tensors: dict[str, Tensor]
    source: str
    layouts: list = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    inputs: str = ""

    def save(self, folder: str | Path) -> None:
        """Write `folder`, which must be new or empty, in one step, so other processes see either nothing or everything.

        Raises FileExistsError for a folder that contains files, and for a file.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"folder: expected a new or empty folder, got the file {folder}")
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"folder: {folder} already contains files; choose a different folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in self.tensors.items()}
        about = {"format": FORMAT, "source": self.source, "layouts": self.layouts, "tensors": _shapes(tensors)}
        about |= {"files": self.files, "inputs": self.inputs}
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            unfinished = Path(temporary, folder.name)
            unfinished.mkdir()
            save_file(tensors, unfinished / TENSORS)
            (unfinished / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "Stages":
        """Load a folder that `save` wrote.

        Raises FileNotFoundError or ValueError, naming the file, if the folder has different contents.
        """
        file, manifest = Path(folder) / TENSORS, Path(folder) / MANIFEST
        if missing := [path.name for path in (manifest, file) if not path.is_file()]:
            raise FileNotFoundError(f"{folder}: contains no saved stages ({missing[0]} is missing)")
        about = read_json(manifest)
        promised, layouts = about.get("tensors"), about.get("layouts")
        if about.get("format") != FORMAT or not isinstance(promised, dict) or not isinstance(layouts, list):
            raise ValueError(f"{manifest}: expected a manifest of saved stages (format {FORMAT!r})")
        with open_shard(file) as stored:
            found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        shapes = _shapes(found)
        if shapes != promised:
            differing = min(name for name in {*shapes, *promised} if shapes.get(name) != promised.get(name))
            raise ValueError(f"{file}: expected the tensors listed in {MANIFEST}, but {differing!r} differs")
        for name, x in found.items():
            stage, _, what = name.partition("/")
            if stage not in STAGES or not what:
                raise ValueError(
                    f"{manifest}: expected names of the form stage/name, with a stage from {list(STAGES)}, got {name!r}"
                )
            if x.ndim not in ((STAGES[stage],) if STAGES[stage] else (1, 2)) or x.is_complex():
                wanted = f"real numbers in {STAGES[stage] or '1 or 2'} dimension(s) for {name!r}"
                raise ValueError(f"{file}: expected {wanted}, got {x.dtype} of shape {tuple(x.shape)}")
        grids = [tuple(x) if is_grid(x) else None for x in layouts]
        files = about.get("files")
        return cls(
            {name: found[name] for name in promised},
            str(about.get("source")),
            grids,
            files if isinstance(files, dict) else {},
            str(about.get("inputs") or ""),
        )


def _shapes(tensors: dict[str, Tensor]) -> dict[str, list]:
    """Return the dtype and shape of each tensor, in the form in which a manifest lists them."""
    return {name: [str(x.dtype).removeprefix("torch."), *x.shape] for name, x in tensors.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """One tensor compared in both runs: the largest difference and value, and the rows beyond tolerance."""

    name: str
    differs: bool
    largest: float = 0.0
    scale: float = 0.0  # largest magnitude in b
    beyond: str = ""  # the number of rows, and the location of the first one
    cause: str = ""  # the usual cause of such a difference, or the cause that was found
    row: int = 0  # the index of the first row beyond tolerance
    tried: bool = False  # whether the cause was confirmed by running the model with it

    def __str__(self) -> str:
        if not self.differs:
            return f"same, within {self.largest:.1e} of {self.scale:.3g}"
        return f"DIFFERS: by {self.largest:.3g} of {self.scale:.3g}; {self.beyond}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """The comparison of two runs; `first` is the first tensor that differs, or None if they are equal."""

    a: str
    b: str
    rows: list[Difference]
    not_in_both: list[str]
    files: list[str] = field(default_factory=list)  # differing files of the models; "media" if the media differ

    @property
    def first(self) -> Difference | None:
        return next((row for row in self.rows if row.differs), None)

    @property
    def stage(self) -> str | None:
        """The first stage that differs."""
        return self.first.name.split("/")[0] if self.first else None

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.first is None:
            return "no difference in the stages that both recorded"
        kind = "cause" if self.first.tried else "usual cause"
        return f"first difference: {self.first.name}; {kind}: {self.first.cause}"

    def __repr__(self) -> str:
        lines = [f"  {name:<24}{found}" for name, found in self._cells()]
        return "\n".join([f"{self.a} beside {self.b}", *lines, self.verdict])

    def _repr_html_(self) -> str:
        """Return the comparison as a table, for notebooks."""
        return html_table(f"{self.a} beside {self.b}: {self.verdict}", ("stage", "difference"), self._cells())

    def _cells(self) -> list[tuple[str, str]]:
        alone = [(name, "not recorded by both") for name in self.not_in_both]
        differing = [("files that differ", ", ".join(self.files))] if self.files else []
        return [(row.name, str(row)) for row in self.rows] + alone + differing


def html_table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for notebooks; the texts are escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><caption>{html.escape(caption)}</caption>{row(titles, 'th')}{body}</table>"


def compare(a: Any, b: Any, *, rtol: float | None = None, atol: float = 0.0, model: Any = None) -> Comparison:
    """Find where two runs first differ, and why. Each run is a `Trace`, `Stages`, or a folder that either saved.

    A value differs if |a - b| > atol + rtol * the largest magnitude of its tensor in b. By default, rtol is 1e-3 up to
    the positions; in the text model it is the expected rounding error (see `rounding`). Integers and masks must be
    equal, and nan and inf must be in the same places. Stages that only one run recorded are listed but not compared.
    model: the `VLM` of one of the runs. If the first difference is in the text model or the tower, possible causes are
    tested one by one (`refvl.study.text_causes`). This takes a few hundred forwards of the layers up to that
    difference. Raises TypeError or ValueError, naming the argument; the runs must share a stage.
    """
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if tolerance is not None and not check_number(tolerance, name) >= 0:
            raise ValueError(f"{name}: must be 0 or more, got {tolerance}")
    if model is not None and not hasattr(model, "language_model"):
        raise TypeError(f"model: expected a VLM, as refvl.load returns, got {type(model).__name__}")
    ours, theirs = _stages(a, "a"), _stages(b, "b")
    names = [name for name in ours.tensors if name in theirs.tensors]
    if not names:
        raise ValueError(f"a, b: {ours.source} and {theirs.source} share no recorded stage")
    order = list(STAGES)
    names.sort(key=lambda name: order.index(name.split("/")[0]))  # stable, so each stage keeps the recorded order
    rows = [_difference(name, ours, theirs, rtol, atol) for name in names]
    alone = sorted(ours.tensors.keys() ^ theirs.tensors.keys())
    known = sorted(ours.files.keys() | theirs.files.keys()) if ours.files and theirs.files else []
    files = [name for name in known if ours.files.get(name) != theirs.files.get(name)]
    if known and not files and ours.inputs != theirs.inputs:
        files = ["media"]
    found = Comparison(ours.source, theirs.source, rows, alone, files)
    if model is not None and found.first is not None:
        rows[rows.index(found.first)] = _tried(found.first, model, ours, theirs)
    return found


def _tried(first: Difference, model: Any, ours: Stages, theirs: Stages) -> Difference:
    """Return the first difference, with its cause if one of the tested causes explains it."""
    if "nan" in f"{first.largest} {first.scale}":  # the shapes or the model's inputs differ
        return first
    stage, what = first.name.split("/", 1)
    explained = None
    if stage == "prefill":
        row = first.row if first.name == STATES else len(ours.tensors.get(STATES, ()))
        explained = explain(model.language_model, ours.tensors, theirs.tensors, row)
    elif stage == "encode" and (rows := ours.tensors.get(f"patchify/{what}")) is not None and ours.layouts[int(what)]:
        embeds = ours.tensors[first.name], theirs.tensors[first.name]
        explained = explain_tower(model.encoder, rows, ours.layouts, int(what), *embeds)
    if explained is None:
        return first
    side, cause = explained
    where = f"in {side} ({(ours if side == 'a' else theirs).source})"
    if not cause:
        return replace(first, cause=f"{first.cause}; {where}, and no known cause explains it")
    return replace(first, cause=f"{cause}, {where}", tried=True)


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
        shapes = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        return Difference(name, True, float("nan"), float("nan"), shapes, CAUSES_OF_SHAPES[name.split("/")[0]])
    if name == MARGINS:
        a, b = (x[: _same_tokens(ours, theirs) + 1] for x in (a, b))  # up to the first token that differs
    exact = not a.is_floating_point() and not b.is_floating_point()
    x, y = (a.double(), b.double()) if exact else (a.float(), b.float())
    same = (x == y) | (x.isnan() & y.isnan())  # == covers inf
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
    cause = _cause_in_text(name, row, ours, theirs) if name in (STATES, LOGITS, NEW_TOKENS, MARGINS) else ""
    return Difference(name, True, largest, scale, beyond, cause or _cause(name, a, b), row)


def _allowed(name: str, ours: Stages, theirs: Stages, rtol: float | None, y: Tensor, scale: float) -> Tensor | float:
    """Return the allowed difference between values: a number, or a tensor (layers + 1, 1) for the states."""
    if name == STATES:
        scales = y.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1, keepdim=True)
        shares = [rounding(ours, theirs, layer) if rtol is None else rtol for layer in range(len(y))]
        return torch.tensor(shares)[:, None] * scales
    if name in (LOGITS, MARGINS):
        logits = theirs.tensors.get(LOGITS)
        scale = scale if logits is None else float(logits.float().abs().max())
        return scale * (rounding(ours, theirs) if rtol is None else rtol)
    return scale * (RTOL if rtol is None else rtol)


def rounding(ours: Stages, theirs: Stages, layers: int | None = None) -> float:
    """Return the share of the largest value that rounding explains after `layers` layers; None means after the head.

    The share is 2 * sqrt(n) * eps: n values are rounded one after the other, each by at most eps / 2. The largest of
    about 10^5 values determines it (`tests/closeness.py` derives the formula). The machine epsilon, eps, is that of the
    coarser run. Float32 rounds every term of a layer's sums, which are about ten times as long as the model is wide. In
    half precision, sums are computed in float32, so only the ten or so results of a layer are rounded. `GROWTH` times
    the difference of the inputs is added.
    """
    runs = [run.tensors[name] for run in (ours, theirs) for name in (STATES, LOGITS) if name in run.tensors]
    states = [x for x in runs if x.ndim == 2]
    width, depth = (states[0].shape[1], len(states[0]) - 1) if states else (1024, 32)
    eps = max(torch.finfo(x.dtype).eps for x in runs) if runs else torch.finfo(torch.float32).eps
    steps = ((depth if layers is None else layers) + 1) * 10 * (width if eps < 1e-4 else 1)
    return 2 * steps**0.5 * eps + GROWTH * _inputs_apart(ours, theirs)


def _inputs_apart(ours: Stages, theirs: Stages) -> float:
    """Return the largest distance between two inputs of the text model, relative to the row's norm; 0 if unknown."""
    x, y = (run.tensors.get("merge/inputs_embeds") for run in (ours, theirs))
    if x is None or y is None or x.shape != y.shape or not x.numel():
        return 0.0
    norms = y.float().norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((x.float() - y.float()).norm(dim=1) / norms).nan_to_num(nan=0.0).max())


def _same_tokens(ours: Stages, theirs: Stages) -> int:
    """Count the matching new tokens before the first mismatch."""
    x, y = (run.tensors.get(NEW_TOKENS) for run in (ours, theirs))
    if x is None or y is None:
        return 0
    count = min(len(x), len(y))
    return int((x[:count] == y[:count]).int().cumprod(0).sum())


def _place(name: str, row: int, layouts: list, rows: int) -> str:
    """Describe a row as a patch, token or layer."""
    stage, what = name.split("/", 1)
    if name == STATES:
        return f"after layer {row - 1}" if row else "into layer 0"
    unit = {"patchify": "patch", "prefill": "token id", "decode tokens": "new token"}.get(stage, "token")
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


CAUSES_OF_SHAPES = {
    "patchify": "resize: different limits (min_pixels, max_pixels), or a different image",
    "encode": "resize: different limits; or a different merge size",
    "prune": "a different number of tokens before pruning",
    "merge": "tokens: chat template, tokenizer, number of placeholders, or pruning",
    "positions": "tokens: a different prompt",
    "prefill": "a different text model",
    "decode tokens": "a different number of new tokens",
}


def _cause(name: str, a: Tensor, b: Tensor) -> str:
    """Return the usual cause of a difference between two tensors of the same shape."""
    stage, what = name.split("/", 1)
    x, y = a.float(), b.float()
    is_rounded = float((x - y).norm()) < ROUNDING * float(y.norm())
    if is_rounded and a.dtype != b.dtype:
        return f"precision: {a.dtype} against {b.dtype}".replace("torch.", "")
    if stage == "prune":
        return "pruning: a different rule or rate, or embeddings that almost tie"
    if what == "input_ids":
        return "tokens: chat template or tokenizer"
    if stage == "positions":
        return _cause_of_positions(x, y)
    if not (x.isfinite().all() and y.isfinite().all()):
        return "overflow: inf or nan, as beyond 65,504 in float16"
    if stage == "patchify":
        return "order: the patch rows (merge-block or row-major)" if _is_permuted(x, y) else _cause_of_pixels(x, y)
    if is_rounded:
        return "precision: a tower in bfloat16 or float16, TF32, or different kernels"
    if _is_permuted(x, y):
        return "order: the same rows in different positions (a window order that was not undone, media exchanged)"
    return "weights; or positions and attention inside the tower" if stage == "encode" else "weights of the embedding"


def _is_permuted(x: Tensor, y: Tensor) -> bool:
    """Return whether the rows are equal but in a different order; each row is represented by one random projection."""
    direction = torch.randn(x.shape[1], dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    a, b = x @ direction, y @ direction
    near = 1e-3 * b.abs().max()
    return bool((a.sort().values - b.sort().values).abs().max() < near <= (a - b).abs().max())


def _cause_of_pixels(x: Tensor, y: Tensor) -> str:
    """Return the cause: the normalisation if y is a multiple of x plus a constant in every channel; else the resize."""
    if x.shape[1] % 3 == 0:
        x, y = (rows.reshape(len(rows), 3, -1).transpose(0, 1).reshape(3, -1) for rows in (x, y))
        centred = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        slope = (centred[0] * centred[1]).sum(1) / centred[0].square().sum(1).clamp(min=1e-12)
        rest = centred[1] - slope[:, None] * centred[0]
        if rest.abs().max() < 1e-3 * y.abs().max():
            return "normalisation: mean, std or scale of a channel"
    return "resize: different filter, antialiasing, decoder, or order of channels"


def _cause_of_positions(x: Tensor, y: Tensor) -> str:
    """Return the cause of different positions x and y, (3, L); the same shift on all axes means shifted text."""
    moved = x - y
    uneven = (moved != moved[:1]).any(0)
    if not uneven.any():
        return "positions: how far an item moves the text after it (max(h, w), or its largest position + 1)"
    for order in itertools.permutations(range(3)):
        if torch.equal(x[list(order)], y):
            return f"positions: order of the axes ({', '.join('thw'[axis] for axis in order)} instead of t, h, w)"
    if torch.equal(moved[1, uneven], moved[2, uneven]):
        return "positions: seconds between frames, because only axis t differs inside an item"
    return "positions: order of the axes, seconds between frames, or text numbered without media"


def _cause_in_text(name: str, row: int, ours: Stages, theirs: Stages) -> str:
    """Return the usual cause of a difference in the text model; `explain` tests which cause applies."""
    if name == STATES:
        parts = "its norms, rotary, attention or weights" if row else "the embedding of the last token"
        deeper = row > 1 and "merge/deepstack" in {**ours.tensors, **theirs.tensors}
        return f"layer {max(row - 1, 0)}: {parts}" + f", or deepstack of layer {row - 2}" * deeper
    if name == LOGITS:
        return "head: the final norm, or the weights of the output"
    margins = [run.tensors[MARGINS] for run in (ours, theirs) if MARGINS in run.tensors]
    if name == MARGINS:
        return "decoding: positions of new tokens, or their cache" if row else "head: the output's weights or scale"
    if len(margins) < 2 or LOGITS not in theirs.tensors:
        return "weights or kernels of the text model; two tokens that almost tie"
    margin = min(float(x[row]) for x in margins if row < len(x))
    tie = 2 * rounding(ours, theirs) * float(theirs.tensors[LOGITS].float().abs().max())
    if margin <= tie:
        return f"two tokens that almost tie: their logits are {margin:.2g} apart, and rounding explains {tie:.2g}"
    if row == 0:
        return "decoding: the same logits, a different choice (sampling, a penalty, suppressed tokens)"
    return f"decoding: positions of new tokens, or their cache; no tie, because the best two are {margin:.2g} apart"
