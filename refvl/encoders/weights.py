"""Strict weight loading: every parameter is filled once, or a single error lists all problems."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType

import torch
from torch import Tensor, nn

from refvl.checkpoints import raise_for_weights
from refvl.checks import FLOATS

FUSED = re.compile(r"\.qkv\.")  # names of parameters that a checkpoint may store as three tensors


def load_strict(
    module: nn.Module, weights: Iterable[tuple[str, Tensor]], *, rename: Callable[[str], str] = lambda name: name,
    kernels: Mapping[str, tuple[int, ...]] = MappingProxyType({}), skip: str = "(?!)",
) -> set[str]:  # fmt: skip
    """Copy (checkpoint name, tensor) pairs into `module`; return the names of the filled parameters.

    rename: checkpoint name -> module name; `attn.q.weight`, `attn.k.weight` and `attn.v.weight`
    fill the rows of `attn.qkv.weight`. kernels: module name -> the checkpoint shape of a
    convolution kernel that the module stores as a matrix. skip: a regular expression;
    checkpoint names that match it at the start are skipped. Raises one ValueError that lists
    missing, unexpected and repeated names, and tensors that do not fit. A tensor does not fit
    if its shape is different, if it contains nan or inf, or if its dtype has no meaning without
    a scale. After an error, the module is unchanged, because nothing is copied until everything
    fits.
    """
    stored: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if any(parameter.is_meta for parameter in stored.values()):
        raise ValueError(f"{type(module).__name__}: expected a real device, got the meta device; call `to_empty` first")
    targets, parts = dict(stored), {name: [name] for name in stored}
    for whole in filter(FUSED.search, stored):
        parts[whole] = [whole.replace(".qkv.", f".{part}.") for part in "qkv"]
        targets |= zip(parts[whole], stored[whole].chunk(3), strict=True)
    pending = {name for names in parts.values() for name in names}  # parameters without values so far
    problems = {kind: list[str]() for kind in ("unexpected", "misshapen", "nonfinite", "repeated", "missing")}
    pairs: list[tuple[Tensor, Tensor]] = []  # each parameter (or a part of one) and the tensor that fills it
    for checkpoint_name, tensor in weights:
        if re.match(skip, checkpoint_name):
            continue
        name = rename(checkpoint_name)
        if name not in targets:
            problems["unexpected"].append(checkpoint_name)
            continue
        filled = set(parts.get(name, [name]))
        if not filled <= pending:
            problems["repeated"].append(checkpoint_name)
        elif misfit := _misfit(tensor, targets[name], kernels.get(name)):
            problems["misshapen"].append(f"{checkpoint_name} {misfit}")
        elif tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # like `isfinite`, without copies
            problems["nonfinite"].append(checkpoint_name)
        else:
            pairs.append((targets[name], tensor))
        pending -= filled
    problems["missing"] = [name for name in targets if name in pending]
    raise_for_weights(type(module).__name__, "model", problems)
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor.reshape(target.shape))
    return set(stored)


def _misfit(tensor: Tensor, target: Tensor, kernel_shape: tuple[int, ...] | None) -> str | None:
    """Return the reason why `tensor` cannot fill `target`, or None if it can."""
    if tensor.shape not in (target.shape, kernel_shape):
        return f"is {tuple(tensor.shape)}, expected {tuple(kernel_shape or target.shape)}"
    # quantised integers and float8 have no meaning without their scale, so a cast would give incorrect values
    wanted = FLOATS if target.is_floating_point() else (target.dtype,)
    return None if tensor.dtype in wanted else f"has dtype {tensor.dtype}, expected {target.dtype}"


def config_values(
    config, wanted: type, *, activation: str | None, aliases: Mapping[str, str] = MappingProxyType({})
) -> dict:
    """Return the values of a transformers config or a dict whose keys are fields of the dataclass `wanted`.

    If `config` is a whole model's, its `vision_config` is used. activation: the tower's
    activation (None: not checked); raises ValueError if `hidden_act` requires a different one.
    aliases: alternative names of fields.
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
