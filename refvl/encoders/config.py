"""The base class of the towers' configs, which derives sizes and reads a config.json."""

from collections.abc import Mapping
from dataclasses import fields
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Self

from refvl.checkpoints import check_sizes
from refvl.encoders.weights import config_values


class TowerConfig:
    """The base class of the towers' configs, which derives sizes and reads a config.json.

    Fields have the names used in checkpoints; the fields below follow transformers' names for
    CLIP and SigLIP.
    """

    __slots__ = ()
    activation: ClassVar[str | None] = None  # the only activation that the tower supports; None: not checked
    # the head dimension must be a multiple of this number: 4 if rows and columns each rotate half of a head
    head_unit: ClassVar[int] = 1
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})  # alternative names of fields in checkpoints
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    image_size: int
    patch_size: int

    def __post_init__(self):
        own: Any = self  # subclasses are dataclasses
        check_sizes({field.name: getattr(self, field.name) for field in fields(own)}, type(self).__name__)
        unit = self.num_heads * self.head_unit
        if self.hidden_size % unit:
            wanted = f"a multiple of {unit} for {self.num_heads} heads"
            raise ValueError(f"hidden_size: must be {wanted}, got {self.hidden_size}")
        if getattr(self, "image_size", self.patch_size) < self.patch_size:
            raise ValueError(f"image_size: must be at least patch_size={self.patch_size}, got {self.image_size}")

    @classmethod
    def from_hf(cls, config) -> Self:
        """Build a config from a transformers vision config or a whole model's config, each an object or a dict.

        Unknown keys are ignored. Raises ValueError for an unsupported activation or
        inconsistent sizes.
        """
        values = config_values(config, cls, activation=cls.activation, aliases=cls.aliases)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    @property
    def depth(self) -> int:
        """The number of blocks of the tower."""
        return self.num_hidden_layers

    @property
    def num_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """K, the dimension of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """(C, P, P): the shape of a patch row before it is flattened."""
        return (self.num_channels, self.patch_size, self.patch_size)

    @property
    def patch_values(self) -> int:
        """The number of values in a patch row."""
        return prod(self.patch_shape)

    @property
    def patch_kernel(self) -> tuple[int, ...]:
        """The shape of the patch embedding's weight in checkpoints, where the embedding is a convolution."""
        return (self.hidden_size, *self.patch_shape)
