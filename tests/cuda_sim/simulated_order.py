"""What happens before what: streams, events and the host have clocks, and memory remembers who touched it.

Work runs at once on the CPU, in the order of the program, but only what CUDA orders counts as ordered:

    a stream         runs its work in order; a launch comes after all that the host has seen
    wait_stream, wait_event      what a stream does next comes after what the other has been given
    synchronize, a blocking copy, a value read back     what the host does next comes after what the stream was given

A read that is not ordered after the last write, or a write that is not ordered after every read and the last write,
raises `RaceError` with both places. So does memory that its stream may hand out again while another stream uses it.
Threads of the host share one clock: locks order them, which is not modelled.
"""

import re
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class CudaError(RuntimeError):
    """What a CUDA device would have refused."""


class RaceError(CudaError):
    """Two accesses to the same memory that nothing orders."""


class Timeline:
    """Work in order. `seen[other]`: how many steps of `other` come before the next step here."""

    def __init__(self):
        self.seen: Counter[Timeline] = Counter()

    def join(self, other: "Timeline") -> None:
        for line, steps in list(other.seen.items()):
            self.seen[line] = max(self.seen[line], steps)


class Access(NamedTuple):
    """The step of a timeline that touched memory, and where the program asked for it."""

    line: Timeline
    step: int
    place: str

    def precedes(self, line: Timeline) -> bool:
        return line.seen[self.line] >= self.step


class Lease:
    """Lives as long as a tensor of the program lies in a memory."""


class Memory:
    """Of one storage: which stream allocated it, who wrote it last, who has read it since."""

    def __init__(self, home: Any = None, nbytes: int = 0, *, pinned: bool = False):
        self.home, self.nbytes, self.pinned = home, nbytes, pinned
        self.written: Access | None = None
        self.reads: dict[Timeline, Access] = {}
        self.recorded: set[Timeline] = set()  # by `record_stream`
        self.lease: Any = lambda: None

    def read(self, line: Timeline) -> None:
        now = Access(line, line.seen[line], place())
        self._after(self.written, now, "read", "written")
        self.reads[line] = now

    def write(self, line: Timeline) -> None:
        now = Access(line, line.seen[line], place())
        for access in self.reads.values():
            self._after(access, now, "write", "read")
        self._after(self.written, now, "write", "written")
        self.written, self.reads = now, {}

    def _after(self, before: Access | None, now: Access, does: str, was: str) -> None:
        if before is not None and not before.precedes(now.line):
            raise RaceError(f"{now.place}: this {does} does not wait for {before.place}, where the memory was {was}")

    def check_reuse(self) -> None:
        """Its stream hands it out again: whatever other streams did with it must have been waited for."""
        for access in (*self.reads.values(), *([self.written] if self.written else [])):
            if access.line not in self.recorded and not access.precedes(self.home):
                raise RaceError(f"{place()}: this may get memory that is still used at {access.place}")


def memory_of(x: Tensor) -> Memory | None:
    """The memory of a tensor on the CPU, or of a CudaTensor's numbers; None where nobody tracks it."""
    return getattr(x.untyped_storage(), "memory", None)


class Stream(Timeline):
    """`torch.cuda.Stream`. It belongs to one device."""

    machine: Any  # set when the device is simulated

    def __init__(self, device=None, priority=0, **kwargs):
        super().__init__()
        self.device = self.machine.device_of("cuda" if device is None else device)
        self.waited_for: list[Stream] = []
        self.machine.all_streams.append(self)

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)
        self.join(other)

    def wait_event(self, event: "Event") -> None:
        self.join(event)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.refuse_in_capture("synchronize")
        self.machine.host_waits_for(self)

    def query(self) -> bool:
        return self.seen[self] <= self.machine.host.seen[self]


class Event(Timeline):
    """`torch.cuda.Event`: a moment of a stream."""

    def __init__(self, enable_timing=False, **kwargs):
        super().__init__()
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.seen, self.at = Counter(), time.perf_counter()
        self.join(stream or Stream.machine.current_stream())

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.machine.current_stream()).join(self)

    def synchronize(self) -> None:
        Stream.machine.host_waits_for(self)

    def query(self) -> bool:
        return all(Stream.machine.host.seen[line] >= steps for line, steps in self.seen.items())

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


class Order:
    """The part of a machine that keeps streams, the host's clock and memory in order."""

    def __init__(self):
        self.host = Timeline()
        self.all_streams: list[Stream] = []
        self.pending: list[tuple[Access, Tensor, Tensor]] = []  # copies to the host: when, to where, what
        self.freed: list[Memory] = []
        self.live = self.peak = 0  # bytes that the program holds

    def touch(self, line: Timeline, reads: Iterable[Memory | None], writes: Iterable[Memory | None]) -> None:
        """One kernel or copy on a stream, or one operation of the host, on memory that is in order for it."""
        line.join(self.host)
        line.seen[line] += 1
        written = set(writes) - {None}
        for memory in set(reads) - {None} - written:
            memory.read(line)
        for memory in written:
            memory.write(line)

    def host_waits_for(self, line: Timeline) -> None:
        """Copies to the host that `line` has seen are there now."""
        self.host.join(line)
        for entry in [entry for entry in self.pending if entry[0].precedes(self.host)]:
            self.pending.remove(entry)
            entry[1].copy_(entry[2])

    def allocate(self, storage: Any, stream: Stream) -> Memory:
        """Memory of a new storage, out of what `stream` has been given back."""
        stream.join(self.host)
        again = [memory for memory in self.freed if memory.home is stream]
        self.freed = [memory for memory in self.freed if memory.home is not stream]
        for memory in again:
            memory.check_reuse()
        storage.memory = Memory(stream, storage.nbytes())
        return storage.memory

    def lease(self, memory: Memory) -> Lease:
        """The same as long as a tensor of the program has it; then the memory goes back to its stream."""
        lease = memory.lease()
        if lease is None:
            lease = Lease()
            memory.lease = weakref.ref(lease, lambda _: self.free(memory))
            self.live += memory.nbytes
            self.peak = max(self.peak, self.live)
        return lease

    def free(self, memory: Memory) -> None:
        self.live -= memory.nbytes
        if memory.home is not None:
            self.freed.append(memory)


def place() -> str:
    """Where the program is: the innermost frame that is neither torch's nor the simulation's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and HIDDEN.search(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


HIDDEN = re.compile(r"site-packages|simulated_\w+\.py|contextlib\.py|/lib/python")
