"""Strict weight loading: every parameter filled once, or one error that lists all that is wrong."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import torch
from torch import Tensor, nn

from refvl.checks import FLOATS


@dataclass
class _Report:
    """What does not fit, collected until the end so that one error lists everything."""

    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)  # or of another kind
    nonfinite: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def accepts(self, name: str, tensor, target: Tensor, kernel_shape: tuple[int, ...] | None) -> bool:
        """Whether `tensor` can fill `target`; noted where it cannot."""
        if misfit := _misfit(tensor, target, kernel_shape):
            self.misshapen.append(f"{name} {misfit}")
        elif not tensor.isfinite().all():
            self.nonfinite.append(name)
        else:
            return True
        return False

    def raise_if_any(self, owner: str) -> None:
        lines = [f"  {kind} ({len(names)}): {', '.join(names)}" for kind, names in vars(self).items() if names]
        if lines:
            raise ValueError(f"{owner}: the weights do not match the model\n" + "\n".join(lines))


def load_strict(
    module: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    *,
    rename: Callable[[str], str] = lambda name: name,
    fuse: tuple[str, ...] = (),
    kernels: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    skip: str = "(?!)",
    skipped: list[str] | None = None,
) -> set[str]:
    """Copy (checkpoint name, tensor) pairs into `module`; returns the parameter names filled.

    rename: checkpoint name -> module name. fuse: e.g. ("q", "k", "v") lets `attn.q.weight`, `attn.k.weight`,
    `attn.v.weight` fill the rows of `attn.qkv.weight`. kernels: module name -> the shape in which checkpoints store a
    convolution kernel that the module keeps as a matrix. skip: a regular expression; checkpoint names that begin with
    it are left out, and added to `skipped`. Raises TypeError when `weights` does not consist of pairs, and ValueError
    listing all missing, unexpected and repeated names, tensors of another shape or kind (quantised, float8, sparse, on
    the meta device), and tensors that hold nan or inf. The module is then left as it was: nothing is copied before
    everything fits.
    """
    parameters: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(_persistent_buffers(module))}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ValueError(f"{type(module).__name__}: is on the meta device; give it memory first (`to_empty`)")
    report, left_out = _Report(), [] if skipped is None else skipped
    pairs: list[tuple[Tensor, Tensor]] = []  # of a parameter, or a part of it, and what fills it
    filled: dict[str, set[str]] = {}
    for name, tensor in named_tensors(weights):
        if re.match(skip, name):
            left_out.append(name)
            continue
        parameter, part = _find(rename(name), parameters, fuse)
        if parameter is None:
            report.unexpected.append(name)
            continue
        target = parameters[parameter].chunk(len(fuse))[fuse.index(part)] if part else parameters[parameter]
        seen = filled.setdefault(parameter, set())
        if part in seen or "" in seen or (seen and not part):
            report.repeated.append(name)
        elif report.accepts(name, tensor, target, kernels.get(parameter)):
            pairs.append((target, tensor))
        seen.add(part)
    report.missing = _missing(parameters, filled, fuse)
    report.raise_if_any(type(module).__name__)
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor.reshape(target.shape))
    return set(filled)


def named_tensors(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of `weights`; TypeError for a dict (pass its `items()`) and whatever is not a pair."""
    if isinstance(weights, Mapping) or not isinstance(weights, Iterable):
        raise TypeError(
            f"weights: expected (name, tensor) pairs (of a dict its `items()`), got {type(weights).__name__}"
        )
    for i, pair in enumerate(weights):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"weights[{i}]: expected a pair (name, tensor), got {type(pair).__name__}")
        yield pair[0], pair[1]


def _persistent_buffers(module: nn.Module):
    kept = module.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


def _find(name: str, parameters: dict, fuse: tuple[str, ...]) -> tuple[str | None, str]:
    """(parameter, part): part is "" for a whole tensor, one of `fuse` for a piece, parameter None if unknown."""
    if name in parameters:
        return name, ""
    *path, last, kind = name.split(".") if name.count(".") >= 2 else ("", "", "")
    fused = ".".join([*path, "".join(fuse), kind])
    return (fused, last) if last in fuse and fused in parameters else (None, "")


def _misfit(tensor, target: Tensor, kernel_shape: tuple[int, ...] | None) -> str | None:
    """Why `tensor` cannot fill `target`; None when it can."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}, expected a torch.Tensor"
    if tensor.shape not in (target.shape, kernel_shape):
        return f"is {tuple(tensor.shape)}, expected {tuple(kernel_shape or target.shape)}"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    # quantised integers and float8 mean nothing without their scale: they are not weights to be cast
    wanted = FLOATS if target.is_floating_point() else (target.dtype,)
    if tensor.dtype not in wanted:
        return f"holds {tensor.dtype}, expected {target.dtype}"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}, expected a dense tensor"
    return None


def _missing(parameters: dict, filled: dict[str, set[str]], fuse: tuple[str, ...]) -> list[str]:
    missing = [name for name in parameters if name not in filled]
    for name, parts in filled.items():
        if "" not in parts:
            missing += [f"{name} ({part})" for part in fuse if part not in parts]
    return missing


def config_values(
    config, wanted: type, *, activation: str | None, aliases: Mapping[str, str] = MappingProxyType({})
) -> dict:
    """The values of a transformers config or a dict that name a field of the dataclass `wanted`.

    Given the config of a whole model, its `vision_config` is read. activation: what the tower computes; ValueError when
    `hidden_act` asks for another (None: not read). aliases: other names of fields.
    """
    values = config_dict(config)
    values = dict(values.get("vision_config", values))
    for old, new in aliases.items():
        if old in values:
            values.setdefault(new, values[old])
    if activation and values.get("hidden_act", activation) != activation:
        raise ValueError(f"hidden_act: the tower is written for {activation!r}, got {values['hidden_act']!r}")
    return {f.name: values[f.name] for f in fields(wanted) if f.name in values}


def config_dict(config) -> dict:
    """A dict or a transformers config as a dict; TypeError for anything else."""
    if isinstance(config, dict):
        return config
    if not hasattr(config, "to_dict"):
        raise TypeError(f"config: expected a dict or a transformers config, got {type(config).__name__}")
    return config.to_dict()
