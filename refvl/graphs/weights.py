"""How a change of the weights is noticed: a graph has their addresses and dtypes baked in."""

from torch import nn

ADAPTER_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of PEFT's layers


def baked_in(encoder: nn.Module) -> tuple:
    """Return what a graph of `encoder` depends on, to be compared: it must be captured again when this changes.

    That is where each parameter lies and as what dtype, and which adapters act, how strongly, and which are merged.
    """
    modules = [encoder]
    for module in modules:  # grows meanwhile; `Module.modules` takes five times as long
        modules += [child for child in module._modules.values() if child is not None]
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    adapters = [own for module in modules if "merged_adapters" in (own := module.__dict__)]
    return (
        *[(weight.data_ptr(), weight.dtype) for weight in weights],  # a list: twice as fast as a generator
        *[str([own.get(switch) for switch in ADAPTER_SWITCHES]) for own in adapters],
    )
