"""CUDA devices on a CPU build of torch: true numbers, CUDA's rules.

A `CudaTensor` says `cuda:0` and holds its numbers in a tensor on the CPU. Every ATen call on one,
and every call that makes one, passes `Machine.run`, which enforces what a GPU would, counts, and
computes on the CPU:

    devices          operands share one; only CPU scalars may join them
    waiting          reading a value back, a copy to the host, a copy from pageable memory, a shape that depends on
                     values: counted, reported in the sync-debug modes, forbidden while a stream is capturing
    attention        the preconditions of the variable-length kernels; rows that they do not write hold NaN
    kernels          counted; a foreach call is one if its tensors share a dtype
    fresh memory     holds NaN, or the smallest integer
    graphs           a capture records what runs on its stream and computes nothing that lasts; a replay computes it in
                     place, and Python is not executed again
    workspaces       of matrix products, one per stream, as torch keeps them up to 2.14

What it cannot show: speed, the numbers of CUDA's own kernels, races between streams, how the
allocator cuts memory.
"""

import contextlib
import ctypes
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # here: it compares signatures with those of torch, which a machine replaces
import torch.nn.functional as F
from simulated_kernels import KERNELS
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
EMPTY = {ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.new_empty.default, ATEN.empty_strided.default,
         ATEN.new_empty_strided.default}  # fmt: skip
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default}
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
WAITING = {ATEN.equal.default, ATEN.is_nonzero.default, ATEN.bincount.default, ATEN.masked_select.default}
PRODUCTS = {ATEN.mm.default, ATEN.addmm.default, ATEN.addmm_.default, ATEN.bmm.default, ATEN.baddbmm.default,
            ATEN.mm.out, ATEN.addmm.out}  # fmt: skip
STAGED = 1 << 16  # bytes: a larger copy from pageable memory waits until it has been staged
CUDA, META = 1, 14  # of `c10::DeviceType`


class CudaError(RuntimeError):
    """What a CUDA device would have refused."""


class Stream:
    """`torch.cuda.Stream`. It belongs to one device; work on it is done at once."""

    machine: Any  # set when the device is simulated

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = self.machine.device_of("cuda" if device is None else device)
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        self.machine.refuse_in_capture("synchronize")
        self.machine.finished.append(self)


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
        raise CudaError(f"{function} on a device that is gone")

    def data_ptr(self):
        return self.numbers.data_ptr()

    def untyped_storage(self):
        return self.numbers.untyped_storage()

    def tolist(self):
        self.machine.wait("tolist")
        return self.numbers.tolist()


class Generator(torch.Generator):
    """One of a CUDA device draws on the CPU."""

    def __new__(cls, device: Any = "cpu"):
        generator = super().__new__(cls, "cpu")
        generator.is_cuda = torch.device(device).type == "cuda"
        return generator


class CUDAGraph:
    """Records (function, arguments, results); a replay computes the results again
    and writes them where they lay."""

    def finish(self, capture: "Capture", machine: "Machine") -> None:
        """Nothing has run yet: outputs hold what fresh memory holds."""
        self.calls = capture.calls
        self.machine = machine
        self.pool = capture.pool
        for x in (x for call in self.calls for x in call.fresh):
            machine._spoil(x)

    def replay(self) -> None:
        self.machine.counts["graph launches"] += 1
        with torch.inference_mode():
            for call in self.calls:
                if call.workspace and not call.workspace.is_kept and call.workspace.pool != self.pool:
                    raise CudaError("replay: the workspace of a matrix product in this graph has been freed")
                for old, new in zip(call.kept, _tensors(call.function(*call.args, **call.kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@dataclass
class Workspace:
    """Scratch memory of matrix products on one stream, out of a graph's pool or of
    everybody's memory."""

    pool: Any
    is_kept: bool = True  # until the workspaces are cleared


@dataclass(frozen=True)
class Call:
    """A kernel in a graph: what it runs, what it left, and what of that is new memory."""

    function: Any
    args: tuple
    kwargs: dict
    kept: list[Tensor]
    fresh: list[Tensor]
    workspace: Workspace | None


@dataclass
class Capture:
    """What a capture was asked for, and what it has recorded."""

    pool: Any
    stream: Any
    mode: str
    calls: list[Call] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)


class Machine:
    """One process with `devices` GPUs: what it was asked for is counted in `counts`."""

    def __init__(self, devices: int, capability: tuple[int, int]):
        Stream.machine = self
        self.devices, self.capability = devices, capability
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()  # those that kernels read or write
        self.capture: Capture | None = None  # the one that is going on
        self.captures: list[Capture] = []
        self.finished: list[Stream] = []  # those that the host has waited for
        self.sync_debug_mode = self.pools = 0
        self.of_thread, self.lock = threading.local(), threading.RLock()
        self.workspaces: dict[Stream, Workspace] = {}
        self.default_streams = [Stream(index) for index in range(devices)]

    # --- rules --------------------------------------------------------------------------------------------------------

    def wait(self, what: str) -> None:
        """The host waits for the current stream of a device."""
        self.counts["waits"] += 1
        self.refuse_in_capture(what)
        if self.sync_debug_mode:
            message = f"called a synchronizing CUDA operation ({what})"
            if self.sync_debug_mode == 2:
                raise CudaError(message)
            warnings.warn(message, stacklevel=2)

    def refuse_in_capture(self, what: str) -> None:
        if self.capture is not None and self.capture.thread == threading.get_ident():
            raise CudaError(f"{what}: operation not permitted when stream is capturing")

    def copy(self, source: Tensor, target: Tensor | None, to_device: bool, non_blocking: bool) -> str:
        """Count a copy between host and device; one on the device is a kernel like
        any other. target: None for new.

        Copies from pinned memory and to it are done when the stream is waited
        for. Pageable memory is staged: large copies from it wait, and copies to
        it always do. What `.to("cpu", non_blocking=True)` makes is pinned.
        Returns what the host waits for, if anything.
        """
        if isinstance(source, CudaTensor):
            is_async = to_device or (non_blocking and (target is None or is_pinned(target)))
            return "" if is_async else "copy to the host"
        self.counts["copies"] += 1
        self.counts["bytes"] += source.nbytes
        if not is_pinned(source):
            self.refuse_in_capture("copy from pageable memory")
            self.counts["staged"] += source.nbytes
            non_blocking = non_blocking and source.nbytes <= STAGED
        return "" if non_blocking else "copy from the host"

    def check(self, function, args, kwargs, inputs: list[Tensor]) -> str:
        """Refuse operands on several devices; returns what the host waits for, if
        anything."""
        devices = {x.device for x in inputs if isinstance(x, CudaTensor) or x.ndim}
        if function in INDEXING:
            indices = [index for index in args[1] if index is not None]
            refused = [x for x in indices if isinstance(x, CudaTensor)] + [x for x in args[2:3] if x.ndim]
            if {x.device for x in refused} - {args[0].device}:
                raise CudaError(f"indices and values should be where the indexed tensor is, {args[0].device}")
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                if not (len(args) > 2 and args[2].numel() == 1):  # that is a masked_fill
                    return f"{function} with a mask"
            elif any(not isinstance(index, CudaTensor) for index in indices):
                return f"{function} with indices on the CPU"
        elif len(devices) > 1:
            shapes = [tuple(x.shape) for x in inputs]
            raise CudaError(f"Expected all tensors to be on the same device, found {devices} ({function}, {shapes})")
        elif function in WAITING or (WAITING_TAGS & set(function.tags) and kwargs.get("output_size") is None):
            return str(function)
        return ""

    def counted(self, function: Callable) -> tuple[Any, Counter]:
        """What a call returns, and what it asked of the device."""
        self.counts.clear()
        result = function()
        return result, Counter(self.counts)

    # --- one call -----------------------------------------------------------------------------------------------------

    def run(self, function, args: tuple, kwargs: dict) -> Any:
        inputs = _tensors((args, kwargs))
        on_device = [x for x in inputs if isinstance(x, CudaTensor)]
        wanted = kwargs.get("device")
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        if not on_device and not to_device:
            return function(*args, **kwargs)
        # tensors of two devices are copied one by one
        if function is ATEN._foreach_copy_.default and len(on_device) < len(inputs):
            for pair in zip(*args[:2], strict=True):
                self.run(ATEN.copy_.default, (*pair, *args[2:]), kwargs)
            return None
        with self.lock:
            return self._launch(function, args, kwargs, inputs, self.device_of(wanted) if to_device else None)

    def _launch(self, function, args, kwargs, inputs, wanted: torch.device | None) -> Any:
        homes = [x.device for x in inputs if isinstance(x, CudaTensor)]
        to_host = wanted is None and kwargs.get("device") is not None
        if function is ATEN.copy_.default:
            to_host = not isinstance(args[0], CudaTensor)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            waits = self.copy(args[1], args[0], not to_host, non_blocking)
        elif function is ATEN._to_copy.default:
            waits = self.copy(args[0], None, not to_host, kwargs.get("non_blocking", False))
            self.counts["bytes"] += args[0].nbytes if homes and wanted not in (None, homes[0]) else 0
        else:
            waits = self.check(function, args, kwargs, inputs)
        if waits:
            self.refuse_in_capture(waits)
        device = wanted or homes[0]
        result = self._compute(function, args, kwargs, device, to_host)
        if waits:
            self.wait(waits)
        return result

    def _compute(self, function, args, kwargs, device: torch.device, to_host: bool) -> Any:
        """Compute on the CPU what a stream of `device` would; results are wrapped
        unless they are the host's."""
        real_args, real_kwargs = _mapped(_real, (args, kwargs))
        if "device" in real_kwargs and not to_host:
            real_kwargs["device"] = torch.device("cpu")
            real_kwargs.pop("pin_memory", None)
        compute = KERNELS.get(function, function)
        if compute is not function:
            self.counts[compute.__name__] += 1
        result = compute(*real_args, **real_kwargs)
        results = _tensors(result)
        reads = _tensors((real_args, real_kwargs))
        stream = self.current_stream(device)
        capture = self.capture
        if capture and (capture.thread, capture.stream) != (threading.get_ident(), stream):
            capture = None  # it records its own thread and its own stream
        memory = {x.untyped_storage().data_ptr() for x in reads} - {0}
        fresh = [x for x in results if not to_host and x.untyped_storage().data_ptr() not in memory]
        is_view = not function._schema.is_mutable and len(fresh) < len(results) and not to_host
        if function in EMPTY:
            self._spoil(results[0])
        elif not is_view:
            lists = [x for x in args if isinstance(x, list)] if "_foreach" in str(function) else []
            is_mixed = any(len({x.dtype for x in tensors}) > 1 for tensors in lists)
            self.counts["kernels"] += len(lists[0]) if is_mixed else 1
            if function in PRODUCTS:  # fast if rows begin at multiples of 16 bytes
                strides = [stride for x in reads if x.itemsize == 2 for stride in x.stride()]
                self.counts["unaligned products"] += any(n > 1 and n % 8 for n in strides)
            self.dtypes |= {x.dtype for x in (*reads, *results)}
            workspace = self._workspace(stream, capture) if function in PRODUCTS else None
            if capture:
                capture.calls.append(Call(compute, real_args, real_kwargs, results, fresh, workspace))
        if to_host:
            return result
        given = {id(x.numbers): x for x in _tensors((args, kwargs)) if isinstance(x, CudaTensor)}

        def wrap(x):  # in place: the caller gets what it gave
            return given[id(x)] if id(x) in given else CudaTensor(x, self, device)

        return _mapped(lambda x: wrap(x) if isinstance(x, Tensor) else x, result)

    def _workspace(self, stream: Stream, capture: Capture | None) -> Workspace:
        return self.workspaces.setdefault(stream, Workspace(capture and capture.pool))

    def clear_workspaces(self) -> None:
        for workspace in self.workspaces.values():
            workspace.is_kept = False
        self.workspaces.clear()

    def _spoil(self, fresh: Tensor) -> None:
        if fresh.is_floating_point():
            fresh.fill_(torch.nan)
        elif fresh.dtype not in (torch.bool, torch.uint64):
            fresh.fill_(torch.iinfo(fresh.dtype).min)

    # --- torch.cuda ---------------------------------------------------------------------------------------------------

    def device_of(self, device: Any) -> torch.device:
        """With an index: that of "cuda" is the current device's."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return device if device.index is not None else torch.device("cuda", self.current_device())

    def current_device(self) -> int:
        return getattr(self.of_thread, "device", 0)

    def current_stream(self, device=None) -> Stream:
        index = self.device_of(device).index
        return getattr(self.of_thread, "streams", {}).get(index, self.default_streams[index])

    def set_device(self, device) -> None:
        self.of_thread.device = self.device_of(device).index

    def set_stream(self, stream: Stream) -> None:
        self.set_device(stream.device)
        self.of_thread.streams = getattr(self.of_thread, "streams", {}) | {stream.device.index: stream}

    @contextlib.contextmanager
    def device(self, device):
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None):
        before = self.current_stream(stream.device)
        with self.device(stream.device):
            self.set_stream(stream)
            try:
                yield
            finally:
                self.set_stream(before)

    def synchronize(self, device=None) -> None:
        self.current_stream(device).synchronize()

    @contextlib.contextmanager
    def graph(self, graph: CUDAGraph, pool=None, stream=None, capture_error_mode: str = "global"):
        if self.capture is not None:
            raise CudaError("graph: another capture is going on")
        self.synchronize()
        capture = Capture(pool or self.pool_handle(), stream or Stream(), capture_error_mode)
        self.captures.append(capture)
        with self.stream(capture.stream):
            self.capture = capture
            try:
                yield
            finally:
                self.capture = None
        graph.finish(capture, self)

    def pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

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
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "device_count": lambda: self.devices,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "device": self.device,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: "simulated",
            "get_device_properties": lambda device=None: SimpleNamespace(name="simulated", total_memory=80 << 30),
            "is_bf16_supported": lambda *args, **kwargs: self.capability >= (8, 0),
            "synchronize": self.synchronize,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
            "Stream": Stream,  # a class: annotations name it
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.default_streams[self.device_of(device).index],
            "CUDAGraph": CUDAGraph,
            "graph": self.graph,
            "graph_pool_handle": self.pool_handle,
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "is_current_stream_capturing": lambda: self.capture is not None,
        }


@contextlib.contextmanager
def simulated_cuda(devices: int = 1, capability: tuple[int, int] = (9, 0)):
    """While it lasts, this process has CUDA devices; yields the `Machine`."""
    before = getattr(Stream, "machine", None)
    machine = Machine(devices, capability)
    run = threading.Thread.run
    is_compatible = torch._has_compatible_shallow_copy_type

    def run_on_machine(thread):
        with _modes(machine):  # modes belong to their thread
            run(thread)

    def is_replaced_in_place(old, new):  # by `.to`: otherwise it makes new parameters, of another class
        return not any(isinstance(x, CudaTensor) for x in (old, new)) and is_compatible(old, new)

    _set_device_guard()
    clear = {"_cuda_clearCublasWorkspaces": machine.clear_workspaces}
    try:
        with (
            _replaced(torch.cuda, machine.functions()),
            _replaced(torch._C, clear),
            _replaced(torch, {"Generator": Generator, "_has_compatible_shallow_copy_type": is_replaced_in_place}),
            _replaced(torch.inference_mode, {"__enter__": _enter_no_grad, "__exit__": _leave_no_grad}),
            _replaced(threading.Thread, {"run": run_on_machine}),
            _modes(machine),
        ):
            yield machine
    finally:
        Stream.machine = before


def _set_device_guard() -> None:
    """Many calls switch to a tensor's device first, and a build without CUDA has
    no function for that.

    torch keeps one per kind of device in a table; that of `meta` does nothing,
    which is right here.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    table[CUDA] = table[CUDA] or table[META]
    torch._C._ensureCUDADeviceGuardSet()  # in a build with CUDA, where there is no device


@contextlib.contextmanager
def _replaced(owner: Any, replacements: dict[str, Any]):
    before = {name: getattr(owner, name, None) for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _enter_no_grad(self) -> None:
    """A wrapper made in inference mode refuses views; without gradients the same
    is computed."""
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
        if function is Tensor.pin_memory or (kwargs.get("pin_memory") and "device" not in kwargs):
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            pinned = args[0].clone() if function is Tensor.pin_memory else function(*args, **kwargs)
            pinned.untyped_storage().is_pinned_here = True
            return pinned
        if function is torch.tensor:  # of scalars, in a list
            args = _mapped(lambda x: x.item() if isinstance(x, CudaTensor) else x, args)
        if function in FUSED and isinstance(args[0], CudaTensor):
            return self.machine.run(*FUSED[function](*args, **kwargs))[0]
        if not getattr(kwargs.get("generator"), "is_cuda", True) and isinstance(args[0], CudaTensor):
            raise CudaError("Expected a 'cuda' device type for generator but found 'cpu'")
        if function is Tensor.cuda:
            return args[0].to(self.machine.device_of(kwargs.get("device", *args[1:2])))
        if function is not torch.device:
            args, kwargs = _mapped(_with_index, (args, kwargs))
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
    is_device = isinstance(device, str | torch.device) and re.fullmatch(r"cuda(:\d+)?", str(device))
    return Stream.machine.device_of(torch.device(device)) if is_device else device


def _real(x: Any) -> Any:
    return x.numbers if isinstance(x, CudaTensor) else x


def _mapped(function: Callable, tree: Any) -> Any:
    """`tree_map` of what operators take and return; torch's takes half of the time
    of a simulated call."""
    if type(tree) in (tuple, list):
        return type(tree)([_mapped(function, x) for x in tree])
    return {name: _mapped(function, x) for name, x in tree.items()} if type(tree) is dict else function(tree)


def _tensors(values: Any) -> list[Tensor]:
    leaves: list = []
    _mapped(leaves.append, values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def is_pinned(x: Tensor) -> bool:
    return not isinstance(x, CudaTensor) and hasattr(x.untyped_storage(), "is_pinned_here")
