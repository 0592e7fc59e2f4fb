"""CUDA devices on a CPU build of torch: true numbers, CUDA's rules.

A `CudaTensor` says `cuda:0` and holds its numbers in a tensor on the CPU. Every ATen call on one, and every call that
makes one, passes `Machine.run`, which enforces what a GPU would, counts, and computes on the CPU:

    devices          operands share one; only CPU scalars may join them
    waiting          reading a value back, a copy to the host, a copy from pageable memory, a shape that depends on
                     values: counted, reported in the sync-debug modes, forbidden while a stream is capturing
    attention        the preconditions of the variable-length kernels; rows that they do not write hold NaN
    fresh memory     holds NaN, or the smallest integer
    graphs           a capture records what runs, a replay repeats it in place: Python is not executed again

What it cannot show: speed, the numbers of CUDA's own kernels, races between streams, the allocator.
"""

import contextlib
import ctypes
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
from simulated_kernels import KERNELS
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

ATEN = torch.ops.aten
EMPTY = {ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.new_empty.default, ATEN.empty_strided.default,
         ATEN.new_empty_strided.default}  # fmt: skip
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default}
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
WAITING = {ATEN.equal.default, ATEN.is_nonzero.default, ATEN.bincount.default, ATEN.masked_select.default}
CUDA, META = 1, 14  # of `c10::DeviceType`


class CudaError(RuntimeError):
    """What a CUDA device would have refused."""


class CudaTensor(Tensor):
    """A tensor that says it lies on a CUDA device; `numbers` holds its numbers."""

    numbers: Tensor
    machine: "Machine"
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, machine: "Machine", device: torch.device):
        tensor = Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
            device=device,
        )  # fmt: skip
        tensor.numbers, tensor.machine = numbers, machine
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        machine = next(leaf.machine for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, CudaTensor))
        return machine.run(function, args, kwargs or {})

    def __repr__(self):
        return f"CudaTensor({self.numbers!r}, {self.device})"

    def data_ptr(self):
        return self.numbers.data_ptr()

    def tolist(self):
        self.machine.wait("tolist")
        return self.numbers.tolist()


class Stream:
    """Work of all streams happens at once here; which one is current, and who waits for whom, is kept."""

    def __init__(self, device=None, **kwargs):
        self.device, self.waited_for = torch.device(_with_index(device or "cuda")), list["Stream"]()

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        pass


class CUDAGraph:
    """Records (function, arguments, results); a replay computes the results again and writes them where they lay."""

    def __init__(self):
        self.calls: list[tuple] | None = None

    def replay(self) -> None:
        if self.calls is None:
            raise CudaError("replay: this graph has not been captured")
        self.machine.counts["graph launches"] += 1
        with torch.inference_mode():
            for function, args, kwargs, kept in self.calls:
                for old, new in zip(kept, _tensors(function(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@dataclass
class Capture:
    """What a capture was asked for, and what it has recorded."""

    pool: Any
    stream: Any
    mode: str
    calls: list[tuple] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    broken: str = ""


class Machine:
    """One process with `devices` GPUs: what it was asked for is counted in `counts`."""

    def __init__(self, devices: int, capability: tuple[int, int]):
        self.devices, self.capability = devices, capability
        self.counts: Counter[str] = Counter()
        self.capture: Capture | None = None  # the one that is going on
        self.captures: list[Capture] = []
        self.sync_debug_mode, self.pinned = 0, WeakTensorKeyDictionary()
        self.of_thread = threading.local()
        self.pools = iter(range(1, 2**31))

    # --- rules --------------------------------------------------------------------------------------------------------

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self.counts["waits"] += 1
        self.refuse_in_capture(what)
        if self.sync_debug_mode:
            message = f"called a synchronizing CUDA operation ({what})"
            if self.sync_debug_mode == 2:
                raise CudaError(message)
            warnings.warn(message, stacklevel=2)

    def refuse_in_capture(self, what: str) -> None:
        if (capture := self.capture) is None:
            return
        if capture.thread == threading.get_ident():
            raise CudaError(f"{what}: operation not permitted when stream is capturing")
        if capture.mode == "global":  # what another thread does invalidates it
            capture.broken = what

    def copy(self, source: Tensor, to_device: bool, non_blocking: bool) -> None:
        """Count a copy between host and device; one on the device is a kernel like any other."""
        if isinstance(source, CudaTensor):
            return None if to_device else self.wait("copy to the host")
        self.counts["copies"] += 1
        self.counts["bytes"] += source.nbytes
        if source not in self.pinned:
            self.refuse_in_capture("copy from pageable memory")
        return None if non_blocking else self.wait("copy from the host")

    def check(self, function, args, kwargs, inputs: list[Tensor]) -> None:
        """Refuse operands on several devices; count what makes the host wait."""
        devices = {x.device for x in inputs if isinstance(x, CudaTensor) or x.ndim}
        if function in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                if not (len(args) > 2 and args[2].numel() == 1):  # that is a masked_fill
                    self.wait(f"{function} with a mask")
            elif any(not isinstance(index, CudaTensor) for index in indices):
                self.wait(f"{function} with indices on the CPU")
        elif len(devices) > 1:
            shapes = [tuple(x.shape) for x in inputs]
            raise CudaError(f"Expected all tensors to be on the same device, found {devices} ({function}, {shapes})")
        elif function in WAITING or (WAITING_TAGS & set(function.tags) and kwargs.get("output_size") is None):
            self.wait(str(function))

    # --- one call -----------------------------------------------------------------------------------------------------

    def run(self, function, args: tuple, kwargs: dict) -> Any:
        inputs = _tensors((args, kwargs))
        on_device = [x for x in inputs if isinstance(x, CudaTensor)]
        wanted = kwargs.get("device")
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        if not on_device and not to_device:
            return function(*args, **kwargs)
        if function is torch.ops.torch_attn._varlen_attn.default:  # an operation written in Python
            with _Dispatch(self):
                return torch_varlen._varlen_attn._init_fn(*args, **kwargs)
        if function is ATEN.is_pinned.default:
            return False
        arrives = to_device or (bool(on_device) and wanted is None)
        if function is ATEN.copy_.default:
            arrives = isinstance(args[0], CudaTensor)
            self.copy(args[1], arrives, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif function is ATEN._to_copy.default:
            self.copy(args[0], arrives, kwargs.get("non_blocking", False))
        else:
            self.check(function, args, kwargs, inputs)
        device = _with_index(wanted) if to_device else (on_device[0].device if on_device else None)
        return self._compute(function, args, kwargs, on_device, arrives, device)

    def _compute(self, function, args, kwargs, on_device, arrives: bool, device) -> Any:
        real_args, real_kwargs = tree_map(_real, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu") if arrives else real_kwargs["device"]
            real_kwargs.pop("pin_memory", None)
        compute = KERNELS.get(function, function)
        if compute is not function:
            self.counts[compute.__name__] += 1
        result = compute(*real_args, **real_kwargs)
        if not arrives:
            return result
        results = _tensors(result)
        if function in EMPTY:
            self._spoil(results[0])
        if function._schema.is_mutable or not _is_view(real_args, real_kwargs, results):
            self.counts["kernels"] += function not in EMPTY
            if self.capture is not None and self.capture.thread == threading.get_ident():
                self.capture.calls.append((compute, real_args, real_kwargs, results))
        written = {id(x.numbers): x for x in on_device}  # in place: the caller gets what it gave

        def wrap(x):
            return written[id(x)] if id(x) in written else CudaTensor(x, self, device)

        return tree_map(lambda x: wrap(x) if isinstance(x, Tensor) else x, result)

    def _spoil(self, fresh: Tensor) -> None:
        if fresh.is_floating_point():
            fresh.fill_(torch.nan)
        elif fresh.dtype not in (torch.bool, torch.uint64):
            fresh.fill_(torch.iinfo(fresh.dtype).min)

    # --- torch.cuda ---------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> list[Stream]:
        """Of this thread, the current one last."""
        if not hasattr(self.of_thread, "streams"):
            self.of_thread.streams = [Stream()]
        return self.of_thread.streams

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    @contextlib.contextmanager
    def graph(self, graph: CUDAGraph, pool=None, stream=None, capture_error_mode: str = "global"):
        if self.capture is not None:
            raise CudaError("graph: another capture is going on")
        self.capture = capture = Capture(pool, stream, capture_error_mode)
        self.captures.append(capture)
        try:
            yield
        finally:
            self.capture = None
        if capture.broken:
            raise CudaError(f"operation failed due to a previous error during capture ({capture.broken})")
        graph.calls, graph.machine = capture.calls, self

    def set_sync_debug_mode(self, mode: int | str) -> None:
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=2,
        )  # torch says so once in a process
        self.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def functions(self) -> dict[str, Any]:
        """What replaces the functions and classes of `torch.cuda`."""
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "device_count": lambda: self.devices,
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: "simulated",
            "get_device_properties": lambda device=None: SimpleNamespace(name="simulated", total_memory=80 << 30),
            "is_bf16_supported": lambda *args, **kwargs: self.capability >= (8, 0),
            "synchronize": lambda device=None: self.counts.update(["synchronize"]),
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
            "memory_snapshot": lambda *args, **kwargs: [],
            "Stream": Stream,  # a class: annotations name it
            "stream": self.stream,
            "current_stream": lambda device=None: self.streams[-1],
            "CUDAGraph": CUDAGraph,
            "graph": self.graph,
            "graph_pool_handle": lambda: (0, next(self.pools)),
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "is_current_stream_capturing": lambda: self.capture is not None,
        }


@contextlib.contextmanager
def simulated_cuda(devices: int = 1, capability: tuple[int, int] = (9, 0)):
    """While it lasts, this process has CUDA devices; yields the `Machine`."""
    machine = Machine(devices, capability)
    run, convert = threading.Thread.run, torch.__future__.get_overwrite_module_params_on_conversion()

    def run_on_machine(thread):
        with _modes(machine):  # modes belong to their thread
            run(thread)

    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.to` makes new parameters, of another class
    _set_device_guard()
    try:
        with (
            _replaced(torch.cuda, machine.functions()),
            _replaced(torch.inference_mode, {"__enter__": _enter_no_grad, "__exit__": _leave_no_grad}),
            _replaced(threading.Thread, {"run": run_on_machine}),
            _modes(machine),
        ):
            yield machine
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(convert)


def _set_device_guard() -> None:
    """Many calls switch to a tensor's device first, and a build without CUDA has no function for that.

    torch keeps one per kind of device in a table; that of `meta` does nothing, which is right here.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    table[CUDA] = table[CUDA] or table[META]
    torch._C._ensureCUDADeviceGuardSet()  # in a build with CUDA, where there is no device


@contextlib.contextmanager
def _replaced(owner: Any, replacements: dict[str, Any]):
    before = {name: getattr(owner, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _enter_no_grad(self) -> None:
    """A wrapper made in inference mode refuses views; without gradients the same is computed."""
    self.grad_was = torch.is_grad_enabled()
    torch.set_grad_enabled(self.grad_was and not self.mode)


def _leave_no_grad(self, *error) -> None:
    torch.set_grad_enabled(self.grad_was)


@contextlib.contextmanager
def _modes(machine: Machine):
    lift = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device="cuda")` is a copy from the host
    try:
        with _Dispatch(machine), _Python(machine):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)


class _Dispatch(TorchDispatchMode):
    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.machine.run(function, args, kwargs or {})


class _Python(TorchFunctionMode):
    """What a build without CUDA does otherwise before ATen is reached.

    Memory is pinned, "cuda" gets its index, and what CUDA has one kernel for stays whole.
    """

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is Tensor.pin_memory:
            pinned = args[0].clone()
            self.machine.pinned[pinned] = True
            return pinned
        if function is Tensor.is_pinned:
            return args[0] in self.machine.pinned
        if function in FUSED and isinstance(args[0], CudaTensor):
            return self.machine.run(*FUSED[function](*args, **kwargs))[0]
        if function is Tensor.cuda:
            return args[0].to("cuda:0")
        if function is not torch.device:
            args, kwargs = tree_map(_with_index, (args, kwargs))
        return function(*args, **kwargs)


def _rms_norm(x, shape, weight=None, eps=None):
    return ATEN._fused_rms_norm.default, (x, shape, weight, eps), {}


def _sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        return ATEN._scaled_dot_product_flash_attention.default, (q, k, v, dropout_p, is_causal), {"scale": scale}
    efficient = ATEN._scaled_dot_product_efficient_attention.default
    return efficient, (q, k, v, attn_mask, False, dropout_p, is_causal), {"scale": scale}


FUSED = {F.rms_norm: _rms_norm, F.scaled_dot_product_attention: _sdpa}  # which kernel CUDA runs


def _with_index(device: Any) -> Any:
    """ "cuda" is the current device; anything else passes."""
    is_plain = (isinstance(device, str) and device == "cuda") or (
        isinstance(device, torch.device) and device.type == "cuda" and device.index is None
    )
    return torch.device("cuda", 0) if is_plain else torch.device(device) if _names_a_device(device) else device


def _names_a_device(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("cuda:")


def _real(x: Any) -> Any:
    return x.numbers if isinstance(x, CudaTensor) else x


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_view(args, kwargs, results: list[Tensor]) -> bool:
    memory = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))} - {0}
    return any(x.untyped_storage().data_ptr() in memory for x in results)
