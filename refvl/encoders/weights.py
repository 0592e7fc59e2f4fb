"""Strict weight loading: every parameter is filled once, or a single error lists all problems."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType

import torch
from torch import Tensor, nn

from refvl.checkpoints import raise_for_weights
from refvl.checks import FLOATS


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
    """Copy (checkpoint name, tensor) pairs into `module`; return the names of the filled parameters.

    rename: checkpoint name -> module name. fuse: e.g. ("q", "k", "v") lets `attn.q.weight`, `attn.k.weight`,
    `attn.v.weight` fill the rows of `attn.qkv.weight`. kernels: module name -> the checkpoint shape of a convolution
    kernel that the module stores as a matrix. skip: a regular expression; checkpoint names that match it at the start
    are skipped and added to `skipped`. Raises TypeError if `weights` does not consist of pairs. Raises one ValueError
    that lists missing, unexpected and repeated names, and tensors that do not fit. A tensor does not fit if its shape
    differs, or if it contains nan or inf. It must not be quantised, float8, sparse, or on the meta device. After an
    error, the module is unchanged, because nothing is copied until everything fits.
    """
    stored: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if any(parameter.is_meta for parameter in stored.values()):
        raise ValueError(f"{type(module).__name__}: expected a real device, got the meta device; call `to_empty` first")
    targets, owners = _targets(stored, fuse)
    left_out = [] if skipped is None else skipped
    problems = {kind: list[str]() for kind in ("unexpected", "misshapen", "nonfinite", "repeated", "missing")}
    pairs: list[tuple[Tensor, Tensor]] = []  # pairs of a parameter (or a part of it) and the tensor that fills it
    filled: dict[str, set[str]] = {}  # parameter -> the names of the tensors that fill it or its parts
    for checkpoint_name, tensor in named_tensors(weights):
        if re.match(skip, checkpoint_name):
            left_out.append(checkpoint_name)
            continue
        name = rename(checkpoint_name)
        if name not in targets:
            problems["unexpected"].append(checkpoint_name)
            continue
        owner = owners.get(name, name)
        seen = filled.setdefault(owner, set())
        if name in seen or owner in seen or (seen and name == owner):
            problems["repeated"].append(checkpoint_name)
        elif misfit := _misfit(tensor, targets[name], kernels.get(name)):
            problems["misshapen"].append(f"{checkpoint_name} {misfit}")
        elif tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # like `isfinite`, without copies
            problems["nonfinite"].append(checkpoint_name)
        else:
            pairs.append((targets[name], tensor))
        seen.add(name)
    problems["missing"] = _missing(stored, filled, fuse)
    raise_for_weights(type(module).__name__, "model", problems)
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor.reshape(target.shape))
    return set(filled)


def _targets(stored: dict[str, Tensor], fuse: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return parameters and parts of fused parameters by name, and the parameter to which each part belongs."""
    targets, owners = dict(stored), dict[str, str]()
    for owner, parameter in stored.items():
        if parts := _parts(owner, fuse).values():
            targets |= zip(parts, parameter.chunk(len(fuse)), strict=True)
            owners |= dict.fromkeys(parts, owner)
    return targets, owners


def _parts(owner: str, fuse: tuple[str, ...]) -> dict[str, str]:
    """Return the name of each part of a fused parameter: {"q": "attn.q.weight", ...} for "attn.qkv.weight"."""
    fused = f".{''.join(fuse)}."
    return {part: owner.replace(fused, f".{part}.") for part in fuse if fused in owner}


def _missing(stored: dict[str, Tensor], filled: dict[str, set[str]], fuse: tuple[str, ...]) -> list[str]:
    """Return the parameters without any tensor, then the missing parts of the other parameters."""
    missing = [name for name in stored if name not in filled]
    for owner, names in filled.items():
        if owner not in names:
            missing += [f"{owner} ({part})" for part, name in _parts(owner, fuse).items() if name not in names]
    return missing


def named_tensors(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of `weights`.

    Raise TypeError for a dict (pass its `items()`), or for values that are not pairs.
    """
    if isinstance(weights, Mapping) or not isinstance(weights, Iterable):
        kind = type(weights).__name__
        raise TypeError(f"weights: expected (name, tensor) pairs, such as the `items()` of a dict, got {kind}")
    for i, pair in enumerate(weights):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"weights[{i}]: expected a pair (name, tensor), got {type(pair).__name__}")
        yield pair[0], pair[1]


def _misfit(tensor, target: Tensor, kernel_shape: tuple[int, ...] | None) -> str | None:
    """Return the reason why `tensor` cannot fill `target`, or None if it can."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}, expected a torch.Tensor"
    if tensor.shape not in (target.shape, kernel_shape):
        return f"is {tuple(tensor.shape)}, expected {tuple(kernel_shape or target.shape)}"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    # quantised integers and float8 have no meaning without their scale, so a cast would give incorrect values
    wanted = FLOATS if target.is_floating_point() else (target.dtype,)
    if tensor.dtype not in wanted:
        return f"has dtype {tensor.dtype}, expected {target.dtype}"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}, expected a dense tensor"
    return None


def config_values(
    config, wanted: type, *, activation: str | None, aliases: Mapping[str, str] = MappingProxyType({})
) -> dict:
    """Return the values of a transformers config or a dict whose keys are fields of the dataclass `wanted`.

    For the config of a whole model, its `vision_config` is used. activation: the tower's activation (None: not
    checked); raises ValueError if `hidden_act` requires a different one. aliases: alternative names of fields.
    """
    values = config_dict(config)
    values = dict(values.get("vision_config", values))
    for old, new in aliases.items():
        if old in values:
            values.setdefault(new, values[old])
    if activation and values.get("hidden_act", activation) != activation:
        raise ValueError(f"hidden_act: expected {activation!r}, got {values['hidden_act']!r}")
    return {f.name: values[f.name] for f in fields(wanted) if f.name in values}


def config_dict(config) -> dict:
    """Return a dict or a transformers config as a dict; raise TypeError for other types."""
    if isinstance(config, dict):
        return config
    if not hasattr(config, "to_dict"):
        raise TypeError(f"config: expected a dict or a transformers config, got {type(config).__name__}")
    return config.to_dict()
