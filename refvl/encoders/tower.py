"""What all encoders have in common: configs, where the weights are, how a plan gets there, and how weights are loaded.

Each encoder is read in its own file. A config is a frozen dataclass on `TowerConfig`, an encoder a `Tower`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from math import prod
from threading import Lock
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from refvl.attention import available_backends, choose_backend
from refvl.encoders.weights import config_values, load_strict
from refvl.pixels.patches import Levels

Planned = TypeVar("Planned")
KEPT_BYTES = 2**22  # of an encoder's kept plans, together; Qwen2.5-VL's take up to 28 for each patch


class TowerConfig:
    """The base of the configs: sizes that follow from other sizes, and how a config.json is read.

    Fields carry the checkpoint's names: these are transformers' for CLIP and SigLIP.
    """

    __slots__ = ()
    activation: ClassVar[str | None] = None  # what the tower is written for
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})  # other names of fields in checkpoints
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    image_size: int
    patch_size: int

    def __post_init__(self):
        if self.hidden_size % self.num_heads:
            width, heads = map(self._theirs, ("hidden_size", "num_attention_heads"))
            raise ValueError(f"{width}: must be a multiple of {heads}={self.num_heads}, got {self.hidden_size}")
        self.check_image_size()

    def check_image_size(self) -> None:
        """Raise ValueError where the images of the position table are smaller than a patch."""
        if self.image_size < self.patch_size:
            name = self._theirs("image_size")
            raise ValueError(f"{name}: must be at least patch_size={self.patch_size}, got {self.image_size}")

    def _theirs(self, field: str) -> str:
        """What checkpoints call a field."""
        return next((alias for alias, name in self.aliases.items() if name == field), field)

    @classmethod
    def from_hf(cls, config) -> Self:
        """From a transformers vision config, the dict in `config.json`, or either of the whole model's.

        Unknown keys are ignored. Raises ValueError for another activation or sizes that do not go together.
        """
        values = config_values(config, cls, activation=cls.activation, aliases=cls.aliases)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    @property
    def depth(self) -> int:
        """Blocks of the tower."""
        return self.num_hidden_layers

    @property
    def num_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """K."""
        return self.hidden_size // self.num_heads

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """(C, P, P): what one patch row holds, flattened."""
        return (self.num_channels, self.patch_size, self.patch_size)

    @property
    def patch_values(self) -> int:
        """Values in one patch row."""
        return prod(self.patch_shape)

    @property
    def patch_kernel(self) -> tuple[int, ...]:
        """The shape of the patch embedding in checkpoints, where it is a convolution."""
        return (self.hidden_size, *self.patch_shape)


class Tower(nn.Module):
    """Patch rows in, embeddings out. An encoder adds its modules, `plan`, and what computes."""

    config_class: ClassVar[Any]
    plan_reads_weights: ClassVar[bool] = False  # True: a plan holds values of the weights and is stale when they change
    config: Any  # of config_class

    def __init__(self, config, *, attention: str = "auto"):
        super().__init__()
        self.config, self.attention = config, attention
        self.skipped: list[str] = []  # checkpoint names that `load_weights` left out
        self.is_compiled = False  # whether `compile_blocks` was called
        self._kept = KeptPlans()

    def compile_blocks(self) -> None:
        """Let torch compile each block of the tower as a whole, for all sizes, when it first runs.

        Blocks of a kind share what was compiled. For the backends that read no groups: with `sdpa` the number of groups
        is a part of the code. A hook on a block would be compiled too, and anew with every other hook: set none.
        """
        for block in self.blocks:  # type: ignore[union-attr]  # every encoder has them
            block.compile(dynamic=True)
        self.is_compiled = True

    @classmethod
    def from_config(cls, config, *, attention: str = "auto", **extra) -> Self:
        """Build from this tower's config, a transformers vision config, or the dict in `config.json`.

        attention: a backend of `refvl.attention`, or "auto" for the best one on the device the pixels come from.
        extra: other arguments of the constructor.
        """
        config = config if isinstance(config, cls.config_class) else cls.config_class.from_hf(config)
        return cls(config, attention=attention, **extra)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def head_dim(self) -> int:
        """K."""
        return self.config.head_dim

    @property
    def graph_attention(self) -> str:
        """The backend for a capture: one whose shapes do not depend on the lengths of the segments."""
        return "varlen" if "varlen" in available_backends(self.device, self.dtype, self.head_dim) else "masked"

    def backend(self, attention: str | None, device: torch.device) -> str:
        """The backend of `refvl.attention` for inputs on `device`; attention: what the call asks for, if anything."""
        return choose_backend(attention or self.attention, device, self.dtype, self.head_dim)

    @property
    def reads_groups(self) -> bool:
        """Whether the backend that runs unless a call asks for another reads the groups of a plan."""
        first = available_backends(self.device, self.dtype, self.head_dim)[0]
        return (first if self.attention == "auto" else self.attention) == "sdpa"

    def move(self, planned: Planned) -> Planned:
        """A plan, made on the CPU, with every tensor in it on the tower's device."""
        return _to_device(planned, self.device)

    def check_layouts(self, layouts, *, name: str = "layouts") -> Sequence[Any]:
        """The layouts of a batch, normalised, or a ValueError or TypeError that says what is wrong."""
        raise NotImplementedError

    def plan(self, layouts) -> Any:
        """Everything that depends on sizes, computed on the CPU and moved to the tower's device."""
        raise NotImplementedError

    def kept_plan(self, layouts) -> Any:
        """`plan`, kept from before where these sizes came lately. To be read alone: another call may have it as well.

        Plans with values of the weights are made anew: no counter or address tells every change of a tensor's values.
        """
        return self.plan(layouts) if self.plan_reads_weights else self._keep(self.check_layouts(layouts), self.plan)

    def _keep(self, checked: Sequence, plan: Callable[[tuple], Planned]) -> Planned:
        layouts, device = tuple(checked), self.device
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        stream = torch.cuda.current_stream(device) if on_gpu else None  # another may run ahead of the plan's copies
        return self._kept.get((layouts, self.config, device, stream, self.reads_groups), lambda: plan(layouts))

    def block_rows(self, metadata: Any) -> list[Tensor]:
        """For each time that a forward runs the blocks, the patch row at each place of their input; -1: none."""
        return [torch.arange(int(metadata.cu_seqlens[-1]), device=self.device)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; returns the names of the parameters that were filled.

        Names are read as `rename` says; q, k, v fused or separate. Those that match `unused` are left out and listed in
        `skipped`. All else that does not fit is listed in one ValueError, see `load_strict`.
        """
        self.skipped = []
        return load_strict(
            self, weights, rename=self.rename, fuse=("q", "k", "v"), kernels=self.kernels,
            skip=self.unused, skipped=self.skipped,
        )  # fmt: skip

    def rename(self, name: str) -> str:
        """The parameter that a checkpoint's tensor of this name fills."""
        return name

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> its shape in checkpoints, where that is another: a convolution's kernel, kept as a matrix."""
        return {}

    @property
    def unused(self) -> str:
        """A regular expression: how checkpoint names begin of parts that this encoder does not have."""
        return r"(?!)"


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


def send_rows(rows: Sequence[Levels | Tensor], encoder) -> Tensor:
    """Patch rows of several items, end to end, for `encoder` to read on its device.

    To a GPU travels as little as can, from pinned memory, so that the host does not wait: levels, to be normalised
    there, and rows that are normalised already in the encoder's dtype.
    """
    sent = [_send(item, encoder.device, encoder.dtype) for item in rows]
    return sent[0] if len(sent) == 1 else torch.cat(sent)


def _send(rows: Levels | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cuda":
        return (rows if isinstance(rows, Tensor) else rows.normalize()).to(device)
    if isinstance(rows, Tensor):
        rows = rows.to(dtype).pin_memory() if rows.device.type == "cpu" else rows
        return rows.to(device, non_blocking=True)
    N, C, _, values = rows.values.shape
    table, levels = rows.table.to(dtype).view(torch.uint8).flatten(), rows.values.flatten()  # one copy for both
    sent = torch.cat([table, levels]).pin_memory().to(device, non_blocking=True)
    table, levels = sent[: len(table)].view(dtype).view(C, -1), sent[len(table) :].view(rows.values.shape)
    patches = torch.empty(N, C, rows.frames, values, dtype=dtype, device=device)
    for channel in range(C):
        looked_up = table[channel].index_select(0, levels[:, channel].flatten().int())
        patches[:, channel] = looked_up.view(N, -1, values)
    return patches.flatten(1)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return tuple(_to_device(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _to_device(getattr(value, f.name), device) for f in fields(value)})
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else value
    return [tensor for part in parts for tensor in _tensors(part)] if isinstance(parts, (list, tuple)) else []
