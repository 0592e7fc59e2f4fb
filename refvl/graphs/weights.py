"""Detect changes to an encoder that a replay would miss.

A graph stores the addresses and dtypes of weights and calls no hooks.
"""

from torch import nn
from torch.nn.modules import module as torch_module

ADAPTER_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # attributes of PEFT's layers


def baked_in(encoder: nn.Module) -> tuple:
    """Return the values that a graph of `encoder` depends on; if any of them changes, the graph must be captured again.

    They are the address and dtype of each parameter, and the active adapters, their scaling and the merged adapters.
    """
    modules = _modules(encoder)
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    # a list is twice as fast as a generator
    return (*[(weight.data_ptr(), weight.dtype) for weight in weights], *_switches(modules))


def adapter_switches(module: nn.Module) -> list[str]:
    """Return the active adapters, their scaling and the merged adapters of each layer that PEFT put into `module`."""
    return _switches(_modules(module))


def _switches(modules: list[nn.Module]) -> list[str]:
    adapters = [own for module in modules if "merged_adapters" in (own := module.__dict__)]
    return [str([own.get(switch) for switch in ADAPTER_SWITCHES]) for own in adapters]


def has_hooks(encoder: nn.Module) -> bool:
    """Return whether a forward of `encoder` calls hooks, which are Python functions and not part of a graph."""
    of_all = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(of_all) or any(module._forward_hooks or module._forward_pre_hooks for module in _modules(encoder))


def _modules(encoder: nn.Module) -> list[nn.Module]:
    modules = [encoder]
    for module in modules:  # the list grows during the loop; `Module.modules` takes five times as long
        modules += [child for child in module._modules.values() if child is not None]
    return modules
