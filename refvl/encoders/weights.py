"""Strict weight loading: every parameter filled once, or one error that lists all that is wrong."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn


@dataclass
class _Report:
    """What does not fit, collected until the end so that one error tells everything."""

    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

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
) -> set[str]:
    """Copy (checkpoint name, tensor) pairs into `module`; returns the parameter names filled.

    rename: checkpoint name -> module name. fuse: e.g. ("q", "k", "v") lets `attn.q.weight`, `attn.k.weight`,
    `attn.v.weight` fill the rows of `attn.qkv.weight`. kernels: module name -> the shape in which checkpoints store a
    convolution kernel that the module keeps as a matrix. Raises ValueError listing all missing, unexpected, repeated
    and misshapen names; the module is then left as it was: nothing is copied before everything fits.
    """
    parameters = dict(module.named_parameters()) | dict(_persistent_buffers(module))
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ValueError(f"{type(module).__name__}: is on the meta device; give it memory first (`to_empty`)")
    filled: dict[str, set[str]] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    report = _Report()
    for checkpoint_name, tensor in weights:
        name, part = _find(rename(checkpoint_name), parameters, fuse)
        if name is None:
            report.unexpected.append(checkpoint_name)
            continue
        target = parameters[name]
        if part:
            target = target.chunk(len(fuse))[fuse.index(part)]
        seen = filled.setdefault(name, set())
        if part in seen or "" in seen or (seen and not part):
            report.repeated.append(checkpoint_name)
        elif misfit := _misfit(tensor, target, kernels.get(name)):
            report.misshapen.append(f"{checkpoint_name} {misfit}")
        else:
            pairs.append((target, tensor))
        seen.add(part)
    report.missing = _missing(parameters, filled, fuse)
    report.raise_if_any(type(module).__name__)
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor.reshape(target.shape))
    return set(filled)


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
    """Why `tensor` cannot fill `target`; None when it can. Quantised integers are not weights to be cast."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}, expected a torch.Tensor"
    if tensor.shape not in (target.shape, kernel_shape):
        return f"is {tuple(tensor.shape)}, expected {tuple(kernel_shape or target.shape)}"
    if tensor.is_floating_point() != target.is_floating_point():
        return f"holds {tensor.dtype}, expected {target.dtype}"
    return None


def _missing(parameters: dict, filled: dict[str, set[str]], fuse: tuple[str, ...]) -> list[str]:
    missing = [name for name in parameters if name not in filled]
    for name, parts in filled.items():
        if "" not in parts:
            missing += [f"{name} ({part})" for part in fuse if part not in parts]
    return missing


def config_values(config, wanted: tuple[Field, ...], aliases: dict[str, str]) -> dict:
    """The values of a transformers config or a dict that name a wanted field (plus `hidden_act`, to be checked).

    Given the config of a whole model, its `vision_config` is read.
    """
    if isinstance(config, dict):
        values = config
    elif hasattr(config, "to_dict"):
        values = config.to_dict()
    else:
        raise TypeError(f"config: expected a dict or a transformers config, got {type(config).__name__}")
    values = dict(values.get("vision_config", values))
    for old, new in aliases.items():
        if old in values:
            values.setdefault(new, values[old])
    return {name: values[name] for name in [*(f.name for f in wanted), "hidden_act"] if name in values}
