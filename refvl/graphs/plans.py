"""Plans that are kept, and how a change of the weights is noticed.

A plan depends on sizes alone, and sizes repeat, so the most recent plans are kept. The exception is a plan that reads
weights, such as one that samples a table of positions (`plan_reads_weights`): it is made anew every time, because no
counter or address tells every change of a tensor's values.
"""

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from torch import Tensor, nn

CACHED_PATCHES = 2**16  # of kept plans, together: at most 0.4 KiB of device memory each for Qwen


class PlanCache:
    """Plans of one encoder with the weights it has now, for any number of threads."""

    def __init__(self, encoder):
        self._encoder = encoder
        self._kept: OrderedDict[tuple, tuple[object, int]] = OrderedDict()  # layouts -> plan, patches
        self._patches, self._lock = 0, Lock()

    def plan(self, layouts: tuple, patches: int):
        """`encoder.plan(layouts)`, made now or kept from before. patches: rows of all items of the batch."""
        with self._lock:
            if layouts in self._kept:
                self._kept.move_to_end(layouts)
                return self._kept[layouts][0]
        plan = self._encoder.plan(layouts)  # outside of the lock: two threads may plan the same sizes
        if not self._encoder.plan_reads_weights:
            with self._lock:
                self._keep(layouts, plan, patches)
        return plan

    def _keep(self, layouts: tuple, plan, patches: int) -> None:
        self._patches += patches - self._kept.pop(layouts, (None, 0))[1]
        self._kept[layouts] = plan, patches
        while len(self._kept) > 1 and self._patches > CACHED_PATCHES:
            self._patches -= self._kept.popitem(last=False)[1][1]

    def layouts(self) -> list[tuple]:
        """What is kept, the most recent last."""
        with self._lock:
            return list(self._kept)


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
