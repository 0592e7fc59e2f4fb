"""How a change of the weights is noticed, which graphs have baked in."""

from collections.abc import Iterable

from torch import Tensor, nn


def modules_of(encoder) -> list[nn.Module]:
    """All modules of an encoder, or of the one it is a path of; `Module.modules` takes five times as long."""
    modules: list[nn.Module] = [encoder if isinstance(encoder, nn.Module) else encoder.encoder]
    for module in modules:  # grows meanwhile
        modules += [child for child in module._modules.values() if child is not None]
    return modules


def weights_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Their parameters."""
    return [weight for module in modules for weight in module._parameters.values() if weight is not None]


def adapters_of(modules: Iterable[nn.Module]) -> tuple:
    """Which of PEFT's adapters a graph has baked in: those that act, how strongly, and those that are merged."""
    layers = [own for module in modules if "merged_adapters" in (own := module.__dict__)]
    switches = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    return tuple([str([own.get(switch) for switch in switches]) for own in layers])


def addresses(weights: Iterable[Tensor]) -> tuple:
    """Where a graph finds the weights, and as what: it must be captured again when this changes."""
    return tuple([(weight.data_ptr(), weight.dtype) for weight in weights])  # a list: twice as fast as a generator
