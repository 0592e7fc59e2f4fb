"""The common base of all encoders: weight loading, input checks, plan transfers, and batches split over forwards.

Each encoder has its own file. A config is a frozen dataclass derived from `TowerConfig`, and an
encoder is a subclass of `Tower`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from refvl.attention import available_backends, choose_backend
from refvl.checks import check_pixel_rows, check_plan
from refvl.encoders.weights import load_strict
from refvl.pixels.patches import Levels

MAX_PATCHES_PER_FORWARD = 2**16  # larger batches run in several forward passes, with a progress bar


class Tower(nn.Module):
    """The base class of all encoders, which turn patch rows into embeddings.

    Subclasses add the modules, `plan_checked` and `forward`.
    """

    config_class: ClassVar[Any]
    config: Any  # an instance of config_class
    # (layouts, *, name) -> the normalised layouts of a batch; raises an error for invalid layouts
    check_layouts: Any
    block_size: Any  # patches per token, if the number is constant
    patch_values: Any  # the number of values in a patch row
    plan_checked: Any  # (layouts) -> the plan for layouts that are already checked, such as a processor's

    def __init__(self, config, *, attention: str = "auto"):
        super().__init__()
        self.config, self.attention = config, attention
        self.head_dim = getattr(config, "head_dim", 0)  # K
        self.is_compiled = False  # whether `compile_blocks` was called

    def compile_blocks(self) -> None:
        """Let torch compile each block of the tower as a whole, for all sizes, when the block first runs.

        Blocks of one class share the compiled code. With `sdpa` the number of groups becomes
        part of the compiled code, so use a different backend. Do not set hooks on blocks,
        because each hook would also be compiled and would cause a new compilation.
        """
        for block in self.blocks:  # type: ignore[union-attr]  # every encoder has blocks
            block.compile(dynamic=True)
        self.is_compiled = True

    @classmethod
    def from_config(cls, config, *, attention: str = "auto", **extra) -> Self:
        """Build an encoder from its own config, a transformers vision config, or the dict in `config.json`.

        attention: a backend of `refvl.attention`, or "auto" for the best one on the pixels' device.
        extra: further arguments of the constructor.
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
    def graph_attention(self) -> str:
        """The backend for graph capture; its tensor shapes do not depend on segment lengths."""
        return "varlen" if "varlen" in available_backends(self.device, self.dtype, self.head_dim) else "masked"

    def backend(self, attention: str | None = None, device: torch.device | None = None) -> str:
        """Return the backend of `refvl.attention` for inputs on `device`; attention: the caller's choice, if any."""
        weight = next(self.parameters())
        return choose_backend(attention or self.attention, device or weight.device, weight.dtype, self.head_dim)

    def inputs(self, pixel_values: Tensor, grid_thw: Any, metadata: Any, attention: str | None) -> tuple:
        """Return the checked inputs of `forward`: (rows in the tower's dtype and on its device, metadata, backend).

        If metadata is None, the method plans `grid_thw`. Raises ValueError if the rows do not
        match the plan, and TypeError if they are not floats.
        """
        if (metadata is None) == (grid_thw is None):
            raise ValueError("forward: pass exactly one of the layouts (grid_thw) and metadata")
        metadata = self.plan(grid_thw) if metadata is None else metadata
        patches = len(metadata.positions)
        if pixel_values.shape != (patches, self.patch_values) or not pixel_values.is_floating_point():
            check_pixel_rows(pixel_values, (("patches", patches), ("values", self.patch_values)))
        return pixel_values.to(next(self.parameters())), metadata, self.backend(attention)

    def plan(self, layouts) -> Any:
        """Compute the plan on the CPU, and move it to the tower's device.

        Raises ValueError before memory is allocated if there are more patches than one plan
        allows (`check_plan`).
        """
        return self.plan_checked(check_plan(self, self.check_layouts(layouts)))

    def block_rows(self, metadata: Any) -> list[Tensor]:
        """Return the patch row's index at each input position (-1: none), as one tensor per pass through the blocks."""
        return [torch.arange(int(metadata.cu_seqlens[-1]), device=self.device)]

    def item_size(self, layout: Any) -> tuple[int, int, int]:
        """Return an item's counts (patch rows, output tokens, frames); the item is a grid (t, h, w) of patches."""
        t, h, w = layout
        return t * h * w, t * h * w // self.block_size, t

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """Return zeros of shape (patch rows, values) for `max_tokens` output tokens of `block_size` patches each."""
        return next(self.parameters()).new_zeros(max_tokens * self.block_size, self.patch_values)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> set[str]:
        """Load (checkpoint name, tensor) pairs strictly; return the names of the parameters that were filled.

        `split_weights` changes the tensors, and `rename` changes the names; q, k and v may be
        fused or separate. Names that match `unused` are skipped. Raises one ValueError that
        lists all other mismatches (see `load_strict`).
        """
        pairs = self.split_weights(weights.items() if isinstance(weights, Mapping) else weights)
        return load_strict(self, pairs, rename=self.rename, kernels=self.kernels, skip=self.unused)

    def split_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return a checkpoint's pairs, with tensors split and reordered as this tower stores them."""
        return pairs

    def rename(self, name: str) -> str:
        """Return the name of the parameter that the checkpoint's tensor `name` fills."""
        return name

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint's shapes of convolution kernels that the module stores as matrices."""
        return {}

    @property
    def unused(self) -> str:
        """A regular expression for the start of checkpoint names that belong to parts this encoder does not have."""
        return r"(?!)"


def to_device(plan: Any, device: torch.device) -> Any:
    """Return a plan that was made on the CPU, with all of its tensors on `device`."""
    if device.type == "cpu":
        return plan
    from refvl.encoders import sending

    return sending.send_plan(plan, device)


@dataclass(frozen=True, slots=True, eq=False)
class EagerPlan:
    """The items of each forward pass, the number of tokens of each item, and the plan of each forward pass."""

    groups: list[list[int]]
    tokens: list[int]
    metadata: list
    batches: list = field(default_factory=list)  # only graphs have batches


def plan_eagerly(encoder: Any, layouts: Sequence) -> EagerPlan:
    """Plan forward passes over consecutive items, with at most MAX_PATCHES_PER_FORWARD patches each;
    a larger item has its own.
    """
    sizes = [encoder.item_size(layout) for layout in layouts]
    groups, rows = list[list[int]](), 0
    for i, (patches, _, _) in enumerate(sizes):
        if not groups or rows + patches > MAX_PATCHES_PER_FORWARD:
            groups.append([])
            rows = 0
        groups[-1].append(i)
        rows += patches
    metadata = [encoder.plan_checked([layouts[i] for i in group]) for group in groups]
    return EagerPlan(groups, [tokens for _, tokens, _ in sizes], metadata)


def encode_eagerly(
    encoder: Any, rows: Sequence[Levels | Tensor], plan: EagerPlan, *, progress: bool = True
) -> list[Tensor]:
    """Return the embeddings (M, W) of each item. Rows are copied to the encoder's device just
    before the forward pass.
    """
    embeds = list[Tensor]()
    bar = tqdm(plan.groups, desc="encode", disable=not progress or len(plan.groups) < 2, leave=False)
    for group, metadata in zip(bar, plan.metadata, strict=True):
        together = encoder(send_rows([rows[i] for i in group], encoder), metadata=metadata)
        embeds += together.split([plan.tokens[i] for i in group])
    return embeds


def send_rows(rows: Sequence[Levels | Tensor], encoder) -> Tensor:
    """Return the normalised patch rows of several items, concatenated, on the encoder's device."""
    device = encoder.device
    if device.type == "cuda":
        from refvl.encoders import sending

        sent = [sending.send_levels(item, device, encoder.dtype) for item in rows]
    else:
        sent = [item if isinstance(item, Tensor) else item.normalize() for item in rows]
    return sent[0].to(device) if len(sent) == 1 else torch.cat(sent).to(device)
