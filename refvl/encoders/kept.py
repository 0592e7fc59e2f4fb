"""Plans that are kept: where the same sizes come again, nothing is planned anew."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

Planned = TypeVar("Planned")
KEPT_BYTES = 2**22  # of an encoder's kept plans, together; Qwen2.5-VL's take up to 28 for each patch


class KeptPlans:
    """The most recent plans, for any number of threads; a copy starts empty."""

    def __init__(self):
        self._kept: OrderedDict[Hashable, tuple[Any, list[Tensor], list[int]]] = OrderedDict()
        self._bytes, self._lock = 0, Lock()

    def __reduce__(self):
        return KeptPlans, ()

    def get(self, key: Hashable, make: Callable[[], Planned]) -> Planned:
        """What was kept as `key`, unless somebody wrote into it; else what `make` gives, which is kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                plan, tensors, versions = self._kept[key]
                if [tensor._version for tensor in tensors] == versions:
                    return plan
        with torch.inference_mode(False):  # what is kept may be read by a forward with gradients, too
            plan = make()  # outside of the lock: two threads may plan the same sizes
        tensors = _tensors(plan)
        with self._lock:
            self._drop(key)
            self._kept[key] = plan, tensors, [tensor._version for tensor in tensors]
            self._bytes += sum(tensor.nbytes for tensor in tensors)
            while self._bytes > KEPT_BYTES:
                self._drop(next(iter(self._kept)))
        return plan

    def _drop(self, key: Hashable) -> None:
        _, tensors, _ = self._kept.pop(key, (None, [], []))
        self._bytes -= sum(tensor.nbytes for tensor in tensors)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else value
    return [tensor for part in parts for tensor in _tensors(part)] if isinstance(parts, (list, tuple)) else []
