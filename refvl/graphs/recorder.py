"""The trace backend: CUDA-graph semantics on any device, in plain Python.

While a forward runs once, a dispatch mode records every ATen operation together with the tensors it
used. A replay runs these operations again, in place on the same tensors. Python is not executed,
sizes and scalars are baked in, and outputs keep their addresses. Inputs that are not copied into a
static buffer have no effect. So the mistakes that break a CUDA graph also break a trace, in which
they can be inspected. The trace backend does not model speed, the shared memory pool, the silent
use of freed memory, or copies between host and device.

Views are not replayed, because they alias a recorded tensor and see its new contents. The
alternative, `torch.fx` with `make_fx`, would run on fresh tensors at every call: addresses would
change, nothing would ever be stale or overwritten, and `.tolist()` would silently be baked in.
This backend is meant to show stale and overwritten values.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from types import FrameType

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# On a CPU, reading values back to Python does not always reach the dispatcher, so these functions are also refused by
# name.
READ_BACK = (
    "item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "__bool__", "__int__", "__float__", "__index__",
    "__contains__", "__array__", "__dlpack__", "__repr__",
)  # fmt: skip
FORBIDDEN_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
ATEN = torch.ops.aten
# one lock for the process: a mode belongs to its thread, but torch's tables of operations do not
ONE_CAPTURE = Lock()
INDEXING = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default)


class CaptureError(RuntimeError):
    """Raised if a forward contains an operation that a graph cannot record."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded operation; a replay computes its results again and writes them into `outputs`."""

    function: OpOverload
    args: tuple
    kwargs: dict
    outputs: tuple[Tensor, ...]
    module: nn.Module | None = None  # the module whose forward called the operation

    def reads(self, *tensors: Tensor) -> bool:
        """Return whether an argument is in the memory of one of `tensors`; views of a tensor also count."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return any(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors((self.args, self.kwargs)))

    @property
    def is_in_place(self) -> bool:
        """Whether the operation writes into its arguments."""
        return self.function._schema.is_mutable

    def replay(self) -> None:
        results = _tensors(self.function(*self.args, **self.kwargs))
        for kept, new in zip(self.outputs, results, strict=True):
            if new.data_ptr() != kept.data_ptr():  # if the operation wrote in place, the addresses are equal
                kept.copy_(new)

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(out.shape)) for out in self.outputs)
        return f"{self.function} -> {shapes}" + ", in place" * self.is_in_place


class TraceGraph:
    """A recording of one run of a function (`capture`), which can be repeated (`replay`).

    Upstream: `torch.cuda.CUDAGraph`.
    """

    def __init__(self):
        self.operations: list[Operation] = []
        self.output: Tensor | None = None

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Run `function` once and record it; before `replay`, copy new contents into the
        tensors that `function` closes over.

        Captures from several threads run one after the other. Raises CaptureError if `function`
        reads a value back or a shape depends on data; in that case nothing is recorded.
        """
        if self.output is not None:
            raise CaptureError("capture: this graph already has a recording")
        operations: list[Operation] = []
        with ONE_CAPTURE, _Recorder(operations), refuse_read_back():
            output = function()
        self.operations, self.output = operations, output
        return output

    def replay(self) -> Tensor:
        """Run the recorded operations on the buffers' current contents; return the output at its captured address.

        The output keeps the shape it had in the capture. Raises CaptureError if nothing was
        captured.
        """
        if self.output is None:
            raise CaptureError("replay: nothing has been captured")
        with torch.inference_mode():
            for operation in self.operations:
                operation.replay()
        return self.output

    def memory_bytes(self) -> int:
        """Return the size in bytes of the recorded outputs; memory that views share is counted once."""
        fresh = [out for operation in self.operations if not operation.is_in_place for out in operation.outputs]
        storages = [out.untyped_storage() for out in fresh]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def refuse_read_back():
    """Raise CaptureError if code inside this context reads a value back to Python, or makes a shape depend on data.

    Inference mode is off, so composite operations arrive as their parts and cannot hide a part that
    reads a value.
    """
    with _uncompiled(), torch.inference_mode(False), torch.no_grad(), _RefuseByName(), _RefuseByTag():
        yield


def _uncompiled() -> AbstractContextManager:
    """Run compiled code eagerly, because a dispatch mode would make torch discard the compiled version."""
    has_compiler = "torch._dynamo" in sys.modules  # importing it takes seconds; until then, nothing is compiled
    return torch.compiler.set_stance("force_eager") if has_compiler else nullcontext()


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]):
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function._schema.is_mutable or not _aliases((args, kwargs), result):
            module = _calling_module(sys._getframe(1))
            self.operations.append(Operation(function, args, kwargs, _tensors(result), module))
        return result


class _RefuseByTag(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_indexing = function in INDEXING  # their tags do not distinguish masks from integers
        if _is_masked(args) if is_indexing else any(tag in function.tags for tag in FORBIDDEN_TAGS):
            raise CaptureError(f"capture: {function} has to read a value of its input, which a graph cannot do")
        return function(*args, **(kwargs or {}))


class _RefuseByName(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READ_BACK or (function is torch.tensor and _tensors(args)):
            raise CaptureError(f"capture: {name} reads a value back to Python, which a graph cannot do")
        return function(*args, **(kwargs or {}))


def _calling_module(frame: FrameType | None) -> nn.Module | None:
    """Return the innermost module with a method on the stack.

    Hooks would also find the module, but hooks affect all threads.
    """
    while frame is not None:
        is_method = frame.f_code.co_varnames[:1] == ("self",)  # reading f_locals would keep the locals alive
        if is_method and isinstance(module := frame.f_locals["self"], nn.Module):
            return module
        frame = frame.f_back
    return None


def _is_masked(args: tuple) -> bool:
    """Return whether a call is `x[mask]` or `x[mask] = values`, but not `x[mask] = 1`, which calls `masked_fill`."""
    indices, values = args[1], args[2:3]
    has_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return has_mask and not (values and values[0].numel() == 1)


def _aliases(arguments, result) -> bool:
    """Return whether the result is a view of an argument.

    The schema alone is not enough, because `x.to(dtype)` may return x or a copy.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)} - {0}  # 0: empty tensors
    return any(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors(result))


def _tensors(result) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
