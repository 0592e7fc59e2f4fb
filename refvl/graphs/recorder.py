"""The trace backend: CUDA-graph semantics on any device, in plain Python.

While a forward runs once, a dispatch mode writes down every ATen operation together with the tensors it touched.
Replay runs that list again, in place over the same tensors: Python is not executed, sizes and scalars are baked in,
outputs keep their addresses, and what is not copied into a static buffer is stale. So the mistakes that break a CUDA
graph break this one too, where they can be looked at. It does not show speed, the shared memory pool, or the silent
use of freed memory.

Views are not replayed: they alias a recorded tensor and see its new contents. `torch.fx` with `make_fx` was the
alternative; it rebuilds a graph on fresh tensors at every call, so addresses change, nothing is ever stale or
overwritten, and `.tolist()` is baked without a word - the very things to be shown.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Reading values back to Python does not always reach the dispatcher on a CPU: refuse it by name as well.
READ_BACK = (
    "item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__",
)  # fmt: skip
FORBIDDEN_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class CaptureError(RuntimeError):
    """The forward does something that a graph cannot hold."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded call: on replay the results are computed again and written into `outputs`."""

    function: Callable
    args: tuple
    kwargs: dict
    outputs: tuple[Tensor, ...]  # empty for an operation that writes into its arguments

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(out.shape)) for out in self.outputs) or "in place"
        return f"{self.function} -> {shapes}"


class TraceGraph:
    """Records one run of a function (`capture`), then repeats it (`replay`). Upstream: `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.output: Tensor | None = None

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Run `function` once and record it; copy new contents into the tensors it closes over before `replay`.

        Raises CaptureError when it reads a value back or a shape depends on data.
        """
        if self.output is not None:
            raise CaptureError("capture: this graph already holds a recording")
        with torch.inference_mode(), _RefuseReadBack(), _Recorder(self.operations):
            self.output = function()
        return self.output

    def replay(self) -> Tensor:
        """Run the recorded operations on what the buffers hold now; returns the output, at its captured address."""
        if self.output is None:
            raise CaptureError("replay: nothing has been captured")
        with torch.inference_mode():
            for operation in self.operations:
                results = operation.function(*operation.args, **operation.kwargs)
                for kept, new in zip(operation.outputs, _tensors(results), strict=bool(operation.outputs)):
                    kept.copy_(new)
        return self.output

    def memory_bytes(self) -> int:
        """Bytes held by the recorded outputs, views counted once."""
        storages = [out.untyped_storage() for operation in self.operations for out in operation.outputs]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]):
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(tag in function.tags for tag in FORBIDDEN_TAGS) and not _is_integer_indexing(function, args):
            raise CaptureError(f"capture: {function} needs a value of its input, which a graph cannot read")
        result = function(*args, **kwargs)
        if function._schema.is_mutable:
            self.operations.append(Operation(function, args, kwargs, ()))
        elif not _aliases((args, kwargs), result):
            self.operations.append(Operation(function, args, kwargs, _tensors(result)))
        return result


class _RefuseReadBack(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READ_BACK:
            raise CaptureError(f"capture: Tensor.{name} reads a value back to Python, which a graph cannot do")
        return function(*args, **(kwargs or {}))


def _is_integer_indexing(function, args: tuple) -> bool:
    """`x[index]` is tagged for the sake of boolean masks; with integer indices its shape is known."""
    is_indexing = function is torch.ops.aten.index.Tensor
    return is_indexing and all(index is None or index.dtype != torch.bool for index in args[1])


def _aliases(arguments, result) -> bool:
    """Whether the result is a view. The schema alone does not tell: `x.to(dtype)` returns x itself or a copy."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
    return any(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors(result))


def _tensors(result) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
