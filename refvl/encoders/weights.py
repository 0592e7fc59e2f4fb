"""Strict weight loading: every parameter filled once, or one error that lists all that is wrong."""

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field

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
) -> set[str]:
    """Copy (checkpoint name, tensor) pairs into `module`; returns the parameter names filled.

    rename: checkpoint name -> module name. fuse: e.g. ("q", "k", "v") lets `attn.q.weight`, `attn.k.weight`,
    `attn.v.weight` fill the rows of `attn.qkv.weight`. A tensor may have another shape with the same number of
    values only where the module stores a convolution kernel flattened (first size equal). Raises ValueError listing
    missing, unexpected, repeated and misshapen names; nothing is copied for a misshapen one.
    """
    parameters = dict(module.named_parameters()) | dict(_persistent_buffers(module))
    filled: dict[str, set[str]] = {}
    report = _Report()
    for checkpoint_name, tensor in weights:
        name, part = _find(rename(checkpoint_name), parameters, fuse)
        if name is None:
            report.unexpected.append(checkpoint_name)
            continue
        target = parameters[name]
        if part:
            target = target.chunk(len(fuse))[fuse.index(part)]
        if part in filled.get(name, ()) or ("" in filled.get(name, ())) or (not part and name in filled):
            report.repeated.append(checkpoint_name)
        elif not _fits(tensor, target):
            report.misshapen.append(f"{checkpoint_name} is {tuple(tensor.shape)}, expected {tuple(target.shape)}")
        else:
            with torch.no_grad():
                target.copy_(tensor.reshape(target.shape))
        filled.setdefault(name, set()).add(part)
    report.missing = _missing(parameters, filled, fuse)
    report.raise_if_any(type(module).__name__)
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


def _fits(tensor: Tensor, target: Tensor) -> bool:
    is_flat_kernel = target.ndim == 2 and tensor.ndim > 2 and tensor.shape[0] == target.shape[0]
    return tensor.shape == target.shape or (is_flat_kernel and tensor.numel() == target.numel())


def _missing(parameters: dict, filled: dict[str, set[str]], fuse: tuple[str, ...]) -> list[str]:
    missing = [name for name in parameters if name not in filled]
    for name, parts in filled.items():
        if "" not in parts:
            missing += [f"{name} ({part})" for part in fuse if part not in parts]
    return missing


def config_values(config, wanted: tuple[Field, ...], aliases: dict[str, str]) -> dict:
    """The values of a transformers config or a dict that name a wanted field (plus `hidden_act`, to be checked)."""
    if isinstance(config, dict):
        values = dict(config)
    elif hasattr(config, "to_dict"):
        values = config.to_dict()
    else:
        raise TypeError(f"config: expected a dict or a transformers config, got {type(config).__name__}")
    for old, new in aliases.items():
        if old in values:
            values.setdefault(new, values[old])
    return {name: values[name] for name in [*(f.name for f in wanted), "hidden_act"] if name in values}
