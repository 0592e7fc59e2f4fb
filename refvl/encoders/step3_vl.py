"""The Step3-VL vision encoder, from top to bottom: tower, two-stage downsampler and projector together.

    squares of pixels (B, C, S, S)                S = 728 for overviews ("global"), 504 for crops ("local")
       | patch_embedding     one matmul (a convolution with stride = kernel size)
       | class_embedding     one learned token before each square
       | position_embedding  a learned table, resized bicubically for squares of other sizes
       | repeat              the class token four times, as in training
    (B, 4 + n*n, E)          n = S / P patches per side
       | layers              x + LN(attn(x)); x + LN(mlp(x)): the *output* of each sub-layer is normalised
       | drop                the four class tokens, which have no further use
    (B, E, n, n)
       | vit_downsampler     convolution 2 x 2, then 3 x 3 with stride 2: 52 -> 26 -> 13 patches per side
       | vit_large_projector one linear layer
    embeddings (B, M, D)     169 tokens of an overview, 81 of a crop

An image is one overview and any number of crops (`refvl.pixels.crops`), so a batch has squares
of two sizes. Squares do not attend to each other. `plan(layouts)` computes the indices of the
patch rows of each size, and all squares of one size run as one stack. The embeddings are
returned in the order of the prompt, crops first. `paths` contains the two stacks for graphs
(`SquarePath`). `Tower` defines device, backends and weight names.

Shape suffixes: B squares, N patch rows, T tokens of a square, M output tokens, E tower width, D
language width, H heads, K head dimension. Upstream: `Step3VisionTransformer` and
`Step3VLForConditionalGeneration` (vLLM).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refvl.attention import Segments, equal_segments
from refvl.checks import Grid, check_pixel_rows
from refvl.encoders.config import TowerConfig
from refvl.encoders.tower import Tower, to_device
from refvl.encoders.weights import config_dict, config_values
from refvl.pixels.crops import CropLayout, as_crop_layouts, count_square_tokens, square_patch_rows
from refvl.positions.tables import resize_position_table

CLASS_TOKENS = 4
OUTER = {  # sizes in the config of the whole model -> fields
    "understand_projector_stride": "understand_projector_stride",
    "hidden_size": "out_hidden_size",
    "projector_bias": "projector_bias",
}


@dataclass(frozen=True, slots=True)
class Step3VisionConfig(TowerConfig):
    """The sizes of the encoder; the first fields have the names and defaults of the checkpoint's `vision_config`."""

    activation = "quick_gelu"
    hidden_size: int = 1792
    intermediate_size: int = 3072
    output_hidden_size: int = 4096  # channels after the first downsampling convolution; the second doubles them
    num_hidden_layers: int = 63
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 728  # the side in pixels of an overview and of the position table
    crop_size: int = 504  # constant in the released model
    patch_size: int = 14
    layer_norm_eps: float = 1e-5
    understand_projector_stride: int = 2  # this field and the next two come from the config of the whole model
    out_hidden_size: int = 7168  # the width of the language model
    projector_bias: bool = False

    def __post_init__(self):
        TowerConfig.__post_init__(self)
        for name in ("image_size", "crop_size"):
            size = getattr(self, name)
            if size < 2 * self.patch_size:
                raise ValueError(f"{name}: must be at least two patches of {self.patch_size} px, got {size} px")

    @classmethod
    def from_hf(cls, config, *, understand_projector_stride=None, hidden_size=None, projector_bias=None) -> Self:
        """Build a config from a vision config or a whole model's config: an object, or the dict in `config.json`.

        hidden_size: the width of the language model. Arguments that are None are read from the
        whole model's config, if that is passed. Unknown keys are ignored.
        """
        values = config_values(config, cls, activation=cls.activation, aliases=cls.aliases)
        whole = config_dict(config)
        given = {"hidden_size": hidden_size, "projector_bias": projector_bias}
        given["understand_projector_stride"] = understand_projector_stride
        sources = [whole.get("text_config", {}), whole] if "vision_config" in whole else []
        for name, ours in OUTER.items():
            found = [source[name] for source in (*sources, given) if source.get(name) is not None]
            values |= {ours: found[-1]} if found else {}  # a later source overrides an earlier one
        return cls(**values)

    @classmethod
    def tiny(cls) -> "Step3VisionConfig":
        """Return small sizes for tests and figures: three blocks, overviews of 6 x 6 patches, crops of 4 x 4."""
        return cls(
            hidden_size=48, intermediate_size=80, output_hidden_size=40, num_hidden_layers=3, num_attention_heads=4,
            image_size=84, crop_size=56, out_hidden_size=56,
        )  # fmt: skip

    def patches_per_side(self, size: int) -> int:
        """Return the number of patches along a side of `size` pixels."""
        return size // self.patch_size

    def tokens_of(self, size: int) -> int:
        """Return the number of output tokens of a square of `size` pixels per side."""
        return count_square_tokens(size, self.patch_size, self.understand_projector_stride)

    @property
    def image_tokens(self) -> int:
        """The number of output tokens of an overview."""
        return self.tokens_of(self.image_size)

    @property
    def crop_tokens(self) -> int:
        """The number of output tokens of a crop."""
        return self.tokens_of(self.crop_size)


@dataclass(frozen=True, slots=True, eq=False)
class VisionMetadata:
    """The inputs of a forward pass over images, other than the pixels.

    Graphs capture the two stacks separately, with `StackMetadata`.
    """

    local_rows: Tensor  # (crops * n_l^2,) int64: the patch rows of crops
    global_rows: Tensor  # (overviews * n_g^2,) int64
    local_position_embeds: Tensor  # (1 + n_l^2, E) in the tower's dtype; the class token comes first
    global_position_embeds: Tensor  # (1 + n_g^2, E)
    order: Tensor  # (M,) int64: sorts the tokens (all crops, then all overviews) by image

    @property
    def summary(self) -> str:
        """Return a one-line description for tables."""
        crops = len(self.local_rows) // math.isqrt(len(self.local_position_embeds)) ** 2
        overviews = len(self.global_rows) // math.isqrt(len(self.global_position_embeds)) ** 2
        return f"{crops} crops, {overviews} overviews"


class Step3VisionEncoder(Tower):
    """The encoder: squares in, embeddings of the language model's width out; parameter names are the checkpoint's."""

    config_class = Step3VisionConfig
    config: Step3VisionConfig

    def __init__(self, config: Step3VisionConfig, *, attention: str = "auto"):
        super().__init__(config, attention=attention)
        self.vision_model = VisionTransformer(config)
        width = config.output_hidden_size
        self.vit_downsampler = nn.Conv2d(config.hidden_size, width, 2, stride=config.understand_projector_stride)
        self.vit_downsampler2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.vit_large_projector = nn.Linear(2 * width, config.out_hidden_size, bias=config.projector_bias)
        self.prepare_squares()

    def prepare_squares(self) -> None:
        """Set the sizes of crops and overviews, and store the convolutions' weights channels-last, like the input."""
        for convolution in (self.vit_downsampler, self.vit_downsampler2):
            convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
        config = self.config
        self.crop_side, self.crop_tokens = config.patches_per_side(config.crop_size), config.crop_tokens
        self.image_side, self.image_tokens = config.patches_per_side(config.image_size), config.image_tokens
        self.patch_values = config.patch_values  # the number of values in a row, C * P * P

    def plan_checked(self, layouts: Sequence[CropLayout]) -> VisionMetadata:
        """Compute the row indices of each stack and the token order on the CPU; move both to the encoder's device.

        Only the position table is resized on the encoder's device. The plan contains values
        computed from the current weights, so plan again after loading new weights. layouts: the
        (rows, columns) of each image's crops; `plan` also accepts tensors, and checks the layouts.
        """
        crops = [rows * columns for rows, columns in layouts]
        local_rows, global_rows = _split_places([(n * self.crop_side**2, self.image_side**2) for n in crops])
        # The position of each computed token in the result; a sort inverts this permutation.
        places = torch.cat(_split_places([(n * self.crop_tokens, self.image_tokens) for n in crops]))
        metadata = VisionMetadata(
            local_rows=local_rows,
            global_rows=global_rows,
            local_position_embeds=self.position_embeds(self.crop_side),
            global_position_embeds=self.position_embeds(self.image_side),
            order=places.argsort(),
        )
        return to_device(metadata, self.device)

    def position_embeds(self, side: int) -> Tensor:
        """Return (1 + side^2, E), the position table for squares of side x side patches."""
        return resize_class_and_positions(self.vision_model.embeddings.position_embedding.weight, side)

    def forward(self, pixel_values: Tensor, layouts=None, *, metadata=None, attention: str | None = None) -> Tensor:
        """Encode squares (B, C, S, S) as (B, M, D), or patch rows of images (N, C*P*P) as (M, D), with images in order.

        An image's rows are the patches of its crops in order, then those of the overview, each
        in row-major order; the image's embeddings have the same order. With patch rows, pass
        `layouts`, which this call plans, or the `metadata` of an earlier `plan`. `attention`
        overrides the encoder's backend. Raises ValueError if the rows do not match the plan,
        and TypeError if they are not floats.
        """
        if pixel_values.ndim == 4:
            check_pixel_rows(pixel_values, ("B", self.config.num_channels, "S", "S"))
            side = self.config.patches_per_side(pixel_values.shape[-1])
            rows_NC = square_patch_rows(pixel_values, self.config.patch_size)
            return self.encode_stack(rows_NC, self.position_embeds(side), attention=attention)
        if (metadata is None) == (layouts is None):
            raise ValueError("forward: with patch rows, pass exactly one of layouts and metadata")
        metadata = self.plan(layouts) if metadata is None else metadata
        weight = next(self.parameters())
        num_rows = len(metadata.local_rows) + len(metadata.global_rows)
        if pixel_values.shape != (num_rows, self.patch_values) or not pixel_values.is_floating_point():
            check_pixel_rows(pixel_values, (("patches", num_rows), ("values", self.patch_values)))
        stacks = [
            (metadata.local_rows, metadata.local_position_embeds),
            (metadata.global_rows, metadata.global_position_embeds),
        ]
        embeds = [torch.empty(0, self.config.out_hidden_size, dtype=weight.dtype, device=weight.device)]
        for rows, position_embeds in stacks:
            if len(rows):
                embeds.append(self.encode_stack(pixel_values[rows], position_embeds, attention=attention).flatten(0, 1))
        return torch.cat(embeds)[metadata.order]  # sorts the tokens (all crops, then all overviews) by image

    def encode_stack(self, rows_NC: Tensor, position_embeds: Tensor, *, attention: str | None = None) -> Tensor:
        """Encode (B * n^2, C*P*P) rows of squares, with (1 + n^2, E) positions, into (B, M, D); read no value back."""
        x_BTE = self.vision_model(rows_NC, position_embeds, self.backend(attention, rows_NC.device))
        side = math.isqrt(len(position_embeds))
        x_BEnn = x_BTE.transpose(1, 2).unflatten(2, (side, side))
        x_BEmm = self.vit_downsampler2(self.vit_downsampler(x_BEnn))
        return self.vit_large_projector(x_BEmm.flatten(2).transpose(1, 2))  # (B, M, D)

    def item_size(self, layout: CropLayout) -> tuple[int, int, int]:
        """Return the numbers of (rows, output tokens, squares) of an image."""
        rows, columns = layout
        crops = rows * columns
        patches = crops * self.crop_side**2 + self.image_side**2
        return patches, crops * self.crop_tokens + self.image_tokens, crops + 1

    def check_layouts(self, layouts, *, name: str = "layouts") -> list[CropLayout]:
        """Return (rows, columns) of crops per image, normalised; raise TypeError or ValueError for invalid ones."""
        return as_crop_layouts(layouts, name)

    @classmethod
    def from_config(cls, config, *, attention: str = "auto", **extra) -> Self:
        """Build an encoder from a `Step3VisionConfig`, a vision config, or the config of the whole model.

        extra: sizes that a vision config lacks (see `Step3VisionConfig.from_hf`). attention: a
        backend of `refvl.attention`, or "auto" for the best one on the pixels' device.
        """
        config = config if isinstance(config, cls.config_class) else cls.config_class.from_hf(config, **extra)
        return cls(config, attention=attention)

    @property
    def paths(self) -> dict[str, "SquarePath"]:
        """The two stacks as encoders that graphs can capture, in the order of an image's rows and embeddings."""
        return {
            "local": SquarePath(self, self.crop_side, self.crop_tokens),
            "global": SquarePath(self, self.image_side, self.image_tokens),
        }

    def path_layouts(self, layout: CropLayout) -> dict[str, Grid | None]:
        """Return an image's layout (squares, n, n) on each path; None for a path without squares."""
        crops = (layout.crops, self.crop_side, self.crop_side)
        return {"local": crops if layout.crops else None, "global": (1, self.image_side, self.image_side)}

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The blocks of the tower."""
        return self.vision_model.transformer["layers"].children()

    def block_rows(self, metadata: VisionMetadata) -> list[Tensor]:
        """Return the patch-row indices (N,) of crops, then of overviews; -1 marks each square's class tokens."""
        local_Bn = metadata.local_rows.view(-1, self.crop_side**2)
        global_Bn = metadata.global_rows.view(-1, self.image_side**2)
        return [F.pad(rows, (CLASS_TOKENS, 0), value=-1).flatten() for rows in (local_Bn, global_Bn) if len(rows)]

    def rename(self, name: str) -> str:
        """Return the parameter's name: `name` without a leading `model.`."""
        return name.removeprefix("model.")

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Return the kernel shape of the patch embedding."""
        return {"vision_model.embeddings.patch_embedding.weight": self.config.patch_kernel}


@dataclass(frozen=True, slots=True, eq=False)
class StackMetadata:
    """The only input of a path besides the pixels; everything else follows from the shape of the pixels."""

    position_embeds: Tensor = field(metadata={"pad": "zero"})  # (1 + n^2 or n^2, E), the same for all squares of a path


class SquarePath:
    """The stack of crops or of overviews, as an encoder that `refvl.graphs` packs and captures separately.

    A layout is (number of squares, n, n), with n in patches. All squares of a path have the
    same size, so padding consists of whole squares, to which no other square attends.
    """

    def __init__(self, encoder: Step3VisionEncoder, side: int, tokens: int):
        """Wrap one stack. side: the number of patches along a square's side; tokens: a square's output tokens."""
        self.encoder, self.side, self.tokens = encoder, side, tokens

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.dtype

    @property
    def graph_attention(self) -> str:
        """The backend for graph capture: "varlen" if available, otherwise "sdpa", as equal segments need no mask."""
        return "varlen" if self.encoder.graph_attention == "varlen" else "sdpa"

    def item_size(self, layout: Grid) -> tuple[int, int, int]:
        """Return the numbers of (rows, output tokens, squares) of `layout`."""
        squares, h, w = layout
        return squares * h * w, squares * self.tokens, squares

    def plan(self, layouts: Sequence[Grid]) -> StackMetadata:
        """Return the positions of one square, from the current weights; every batch has the same positions."""
        return StackMetadata(self.encoder.position_embeds(self.side))

    def plan_capacity(self, max_tokens: int, max_frames: int) -> StackMetadata:
        """Return metadata, which has the same size for any capacity."""
        return StackMetadata(torch.zeros_like(self.encoder.position_embeds(self.side)))

    def pixel_buffer(self, max_tokens: int) -> Tensor:
        """Return zeros of shape (patch rows, C*P*P), for as many squares as `max_tokens` output tokens allow."""
        rows = max_tokens // self.tokens * self.side**2
        return torch.zeros(rows, self.encoder.patch_values, dtype=self.dtype, device=self.device)

    def __call__(self, pixel_values: Tensor, *, metadata: StackMetadata, attention: str | None = None) -> Tensor:
        """Encode (N, C*P*P) rows of whole squares into (M, D), with the code that an eager forward runs."""
        return self.encoder.encode_stack(pixel_values, metadata.position_embeds, attention=attention).flatten(0, 1)


class VisionTransformer(nn.Module):
    """The embeddings, followed by the layers; the four class tokens are dropped at the end."""

    def __init__(self, config: Step3VisionConfig):
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.transformer = nn.ModuleDict({"layers": layers})

    def forward(self, rows_NC: Tensor, position_embeds: Tensor, backend: str) -> Tensor:
        x_BTE = self.embeddings(rows_NC, position_embeds)
        B, T, _ = x_BTE.shape
        segments = equal_segments(B, T, x_BTE.device)
        x_NE = x_BTE.flatten(0, 1)  # from here on N is the number of tokens of all squares
        for layer in self.transformer["layers"].children():
            x_NE = layer(x_NE, segments, backend)
        return x_NE.unflatten(0, (B, T))[:, CLASS_TOKENS:]


class VisionEmbeddings(nn.Module):
    """The embeddings of patches and a class token, each with its position; the class token is then repeated."""

    def __init__(self, config: Step3VisionConfig):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.patch_embedding = nn.Linear(config.patch_values, config.hidden_size)
        num_positions = config.patches_per_side(config.image_size) ** 2 + 1
        self.position_embedding = nn.Embedding(num_positions, config.hidden_size)

    def forward(self, rows_NC: Tensor, position_embeds: Tensor) -> Tensor:
        x_NE = self.patch_embedding(rows_NC.to(position_embeds.dtype))
        patches_BTE = x_NE.unflatten(0, (-1, len(position_embeds) - 1)) + position_embeds[1:]
        class_E = (self.class_embedding + position_embeds[:1])[0]
        return torch.cat([class_E.expand(len(patches_BTE), CLASS_TOKENS, -1), patches_BTE], dim=1)


class VisionLayer(nn.Module):
    """A layer: x + LN(attn(x)), then x + LN(mlp(x)). The residual stream itself is never normalised."""

    def __init__(self, config: Step3VisionConfig):
        super().__init__()
        self.self_attn = VisionAttention(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x_NE: Tensor, segments: Segments, backend: str) -> Tensor:
        x_NE = x_NE + self.layer_norm1(self.self_attn(x_NE, segments, backend))
        return x_NE + self.layer_norm2(self.mlp(x_NE))


class VisionAttention(nn.Module):
    """Attention with a fused QKV projection; each token attends only within its own square."""

    def __init__(self, config: Step3VisionConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_NE: Tensor, segments: Segments, backend: str) -> Tensor:
        q_NHK, k_NHK, v_NHK = self.qkv_proj(x_NE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        return self.out_proj(segments.attend(q_NHK, k_NHK, v_NHK, backend))  # (N, E)


class VisionMLP(nn.Module):
    """Linear - quick GELU (x * sigmoid(1.702 x), as in CLIP) - Linear."""

    def __init__(self, config: Step3VisionConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_NE: Tensor) -> Tensor:
        x_NE = self.fc1(x_NE)
        return self.fc2(x_NE * torch.sigmoid(1.702 * x_NE))


def resize_class_and_positions(table: Tensor, side: int) -> Tensor:
    """Resize (1 + S*S, E) to (1 + side*side, E): keep the class token's entry, and resize the others like an image.

    The resize is bicubic with antialiasing, in float32. Upstream: `get_abs_pos`.
    """
    return torch.cat([table[:1], resize_position_table(table[1:], (side, side), antialias=True)])


def _split_places(sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the indices of all first pieces and those of all second pieces, for items of two pieces each."""
    pieces = torch.arange(sum(map(sum, sizes))).split([size for pair in sizes for size in pair])
    empty = torch.arange(0)
    return torch.cat([empty, *pieces[::2]]), torch.cat([empty, *pieces[1::2]])
