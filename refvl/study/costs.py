"""The costs of a model, computed from its config and sizes before the model is loaded.

plan_media, costs, describe               parameters, memory and tokens
encoder_operations, prefill_operations    multiplications and additions
launch_timeline                           the start and end of operations on a device, computed from launch costs
"""

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import FlopCounterMode

from refvl.checkpoints import weight_headers
from refvl.encoders import StepVLEncoder
from refvl.encoders.grid import GridEncoder
from refvl.pixels.crops import CropConfig, plan_crops
from refvl.pixels.media import Video
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import count_sets, plan_slices
from refvl.positions import find_pruner
from refvl.study.report import layout_text

BEYOND_ANY_BUDGET = 9_999_999  # px: the side of the image with which vLLM plans
EXPERTS_VISITED = {"moe_top_k": "moe_num_experts", "num_experts_per_tok": "n_routed_experts"}  # keys in text configs


class Blank(NamedTuple):
    """The size of an image without the pixels, which may be too many for memory."""

    width: int  # px
    height: int

    @property
    def size(self) -> tuple[int, int]:
        """The (width, height), as in Pillow."""
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """The planned sizes of an image or a video.

    The encoder reads `patches` rows; the language model reads `kept` tokens.
    """

    kind: str
    size: str  # the size after decoding
    becomes: str  # the limit, and the size and grid after resizing
    layout: Hashable  # (t, h, w) in patches for Qwen and GLM
    patches: int
    tokens: int
    kept: int  # the number of tokens after pruning


def plan_media(vlm: Any, medium, pruning_rate: float = 0.0, pruning: str = "evs") -> MediaPlan:
    """Plan a decoded image (PIL or `Blank`) or a `Video`; `pruning` names a method in `PRUNERS`.

    Raises ValueError if the family, the processor or the pruner does not accept the item.
    """
    if pruning_rate > 0:
        vlm.family.require("pruning")
    frames, height, width = _shape(medium)
    kind, size = "image", f"{width} x {height} px"
    if isinstance(medium, Video):
        kind, size = "video", f"{frames} frames of {size}"
    layout = vlm.processor.layout_of(medium)
    patches, tokens, _ = vlm.encoder.item_size(layout)
    becomes = describe_layout(vlm.processor, medium, layout, tokens)
    t, h, w = vlm.processor.media_tokens(kind, layout).thw
    kept = find_pruner(pruning).count(h * w, t, pruning_rate) if kind == "video" and pruning_rate else tokens
    return MediaPlan(kind, size, becomes, layout, patches, tokens, kept)


def _shape(medium) -> tuple[int, int, int]:
    """Return (frames, height, width) of a decoded item; an image is one frame."""
    return medium.frames.shape[:3] if isinstance(medium, Video) else (1, medium.height, medium.width)


def describe_layout(processor: Any, medium, layout: Any, tokens: int) -> str:
    """Describe the preprocessing of a decoded item, step by step."""
    config = processor.image_config
    if isinstance(config, PatchConfig):
        (frames, height, width), (t, h, w) = _shape(medium), layout
        each = steps = ""
        if isinstance(medium, Video):
            config, each, steps = processor.video_config, " a frame", f"{t} x "
        least, most = config.frame_floor(frames), config.frame_budget(frames)
        limit = f"at least {least:,} px" if height * width < least else f"at most {most:,} px"
        size = f"{w * config.patch_size} x {h * config.patch_size} px"
        return f"{limit}{each} -> {size} -> {steps}{w} x {h} patches"
    if isinstance(config, CropConfig):
        width, height = plan_crops(medium.width, medium.height, config).canvas
        crops = f"{layout.rows} x {layout.columns} crops of {config.crop_size} px, " if layout.crops else ""
        return f"{width} x {height} px -> {crops}overview of {config.image_size} px"
    if isinstance(medium, Video):
        (h, w), patches = layout[0].slices[0], sum(h * w for group in layout for h, w in group.slices)
        size = f"{w * config.patch_size} x {h * config.patch_size} px"
        return f"{size} in {count_sets(layout)} sets of frames, {patches / tokens:.3g} patches a token"
    plan = plan_slices(medium.width, medium.height, config)
    slices = " and {} x {} slices of {} x {} px".format(*plan.grid, *plan.cell) if plan.grid and plan.cell else ""
    return "overview {} x {} px".format(*plan.overview) + slices


def image_size_with_most_features(config: PatchConfig) -> tuple[int, int]:
    """Return the (height, width) in px to which a square image larger than any budget is resized.

    The item is an image, not a video, because GLM's budgets count the pixels of all frames. A frame
    of a video with sixteen frames would have an eighth of the area. Upstream:
    `get_image_size_with_most_features` (vLLM).
    """
    return config.target_size(BEYOND_ANY_BUDGET, BEYOND_ANY_BUDGET)


def _tensor_bytes(weight: Tensor) -> int:
    """Return the size of a parameter in bytes; for a quantised parameter,
    the sum over its tensors.
    """
    if not is_traceable_wrapper_subclass(weight):
        return weight.numel() * weight.dtype.itemsize
    names, _ = weight.__tensor_flatten__()  # every quantised subclass defines this method
    return sum(_tensor_bytes(getattr(weight, name)) for name in names if getattr(weight, name) is not None)


def stored_text_bytes(folder: Path, vision_prefix: str) -> int:
    """Return the size in bytes of a checkpoint's weights, except those of the vision tower,
    as stated in the headers of its files.
    """
    text = [header for name, header in weight_headers(folder).items() if not re.match(vision_prefix, name)]
    return sum(header.data_offsets[1] - header.data_offsets[0] for header in text)


def kv_cache_bytes_per_token(text_config, dtype: torch.dtype, kind: str = "full_attention") -> int:
    """Return the size in bytes of one token's keys and values in all layers of `kind`."""
    layers = _layer_kinds(text_config).count(kind)
    return 2 * layers * text_config.num_key_value_heads * _head_dim(text_config) * dtype.itemsize


def kv_cache_bytes_per_prompt(text_config, dtype: torch.dtype) -> int:
    """Return how many bytes the layers without a full cache keep for a prompt of any length.

    Layers with a sliding window keep the prompt's last window - 1 tokens. A layer with linear
    attention keeps the last inputs of its convolution, and one float32 matrix per head.
    """
    window = (getattr(text_config, "sliding_window", None) or 1) - 1
    size = window * kv_cache_bytes_per_token(text_config, dtype, "sliding_attention")
    if layers := _layer_kinds(text_config).count("linear_attention"):
        keys = text_config.linear_num_key_heads * text_config.linear_key_head_dim
        values = text_config.linear_num_value_heads * text_config.linear_value_head_dim
        inputs = (2 * keys + values) * text_config.linear_conv_kernel_dim
        matrices = values * text_config.linear_key_head_dim
        size += layers * (inputs * dtype.itemsize + matrices * torch.float32.itemsize)
    return size


def _layer_kinds(text_config) -> list[str]:
    return getattr(text_config, "layer_types", None) or ["full_attention"] * text_config.num_hidden_layers


def _head_dim(text_config) -> int:
    return getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads


def encoder_activation_bytes(encoder, patches: int) -> int:
    """Estimate the tower's peak memory in bytes, reached in a block's MLP or in the rotation of queries and keys.

    Patch rows, the residual and the normed input are in memory in both cases. The rotation adds
    two float32 copies of queries and keys, and a third copy in which the halves of each head
    are swapped.
    """
    *_, mlp = (x for x in next(iter(encoder.blocks)).children() if not isinstance(x, nn.LayerNorm | nn.RMSNorm))
    widths = [layer.out_features for layer in mlp.modules() if isinstance(layer, nn.Linear)]
    E, size = encoder.config.num_heads * encoder.config.head_dim, encoder.dtype.itemsize
    in_mlp = (sum(widths[:-1]) + max(widths)) * size
    rotates = isinstance(encoder, GridEncoder | StepVLEncoder)
    in_attention = 3 * E * size + (2 * E * (4 + size + 4) + 8 * encoder.config.head_dim if rotates else E * size)
    pixels = getattr(encoder.config, "vision", encoder.config).patch_values
    return patches * ((pixels + 2 * E) * size + max(in_mlp, in_attention))


def encoder_operations(encoder: Any, layouts: list) -> int:
    """Count the operations of one forward without padding, with torch's counter on the "meta"
    device.

    Counting takes seconds.
    """
    with torch.device("meta"):
        shadow = type(encoder).from_config(encoder.config, attention="sdpa")
        rows = torch.empty(sum(encoder.item_size(layout)[0] for layout in layouts), encoder.config.patch_values)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        shadow(rows, layouts)
    return counter.get_total_flops()


def prefill_operations(language_model: Any, tokens: int) -> int:
    """Count the operations of a text model's layers: each weight once per token, and all pairs of tokens.

    tokens: the length of the prompt. For each token, only the experts that it uses are counted.
    Pairs hidden by the causal mask are also counted, as in torch's counter. The head, which runs
    for only one token, is not counted.
    """
    from refvl.language.step3_vl import Step3TextMoE  # imported here, so figures do not import transformers

    text, layers = language_model.config, language_model.model
    weights = sum(m.weight.numel() for m in layers.modules() if isinstance(m, nn.Linear))
    if experts := sum(p.numel() for p in layers.parameters() if p.ndim == 3):  # (E, out, in)
        visited, of_all = next((k, n) for k, n in EXPERTS_VISITED.items() if hasattr(text, k))
        weights += experts * getattr(text, visited) // getattr(text, of_all)
        by_product = sum(isinstance(m, Step3TextMoE) for m in layers.modules())  # each adds its experts by a matmul
        weights += by_product * getattr(text, visited) * text.hidden_size
    width = text.num_attention_heads * _head_dim(text)
    return 2 * tokens * weights + 4 * tokens**2 * width * text.num_hidden_layers


def launch_timeline(device_us: Sequence[float], launch_us: float) -> list[tuple[float, float]]:
    """Return the start and end of each operation on a device whose kernels one host launches,
    in microseconds.

    Operations run in order, each one after its launch. device_us: the duration of each operation.
    launch_us: the host's time per launch; launches follow each other without gaps. Nothing is
    measured.
    """
    times, end = [], 0.0
    for number, duration in enumerate(device_us, 1):
        start = max(number * launch_us, end)
        end = start + duration
        times.append((start, end))
    return times


def costs(
    vlm: Any, media: Sequence = (), *, pruning_rate: float = 0.0, pruning: str = "evs", text_bytes: int | None = None
) -> dict[str, Any]:
    """Return every number that `describe` prints, ready for JSON: parameters, tokens, px, bytes.

    `vlm` may be on "meta". Without a language model (`load(..., text=False)`), the context is None,
    and text weights and cache are 0 bytes.

    media: decoded media (see `VLM.processor.decode`). pruning_rate: the pruning rate of videos, in
    [0, 1). pruning: the pruning method. text_bytes: the size of the language model's weights, if
    `vlm` stores them in a different form from the checkpoint (`stored_text_bytes`). An item's
    `activation_bytes` estimates the peak of a tower that encodes this item alone; `memory_bytes`
    assumes that the tower encodes all items together.
    """
    dtype, processor, text = vlm.encoder.dtype, vlm.processor, vlm.language_model or None
    per_token = kv_cache_bytes_per_token(text.config, dtype) if text else 0
    per_prompt = kv_cache_bytes_per_prompt(text.config, dtype) if text else 0

    def cost(medium: Any, rate: float = 0.0) -> dict[str, Any]:
        plan = plan_media(vlm, medium, rate, pruning)
        return asdict(plan) | {
            "layout": layout_text(plan.layout),
            "kv_cache_bytes": plan.kept * per_token,
            "activation_bytes": encoder_activation_bytes(vlm.encoder, plan.patches),
        }

    limits = processor.image_config if isinstance(processor.image_config, PatchConfig) else None
    planned = [cost(medium, pruning_rate) for medium in media]
    halves = {"encoder": vlm.encoder, "language_model": text or nn.Identity()}
    stored = {name: sum(map(_tensor_bytes, half.parameters())) for name, half in halves.items()}
    stored["language_model"] = text_bytes or stored["language_model"]
    weights = sum(stored.values())
    together = encoder_activation_bytes(vlm.encoder, sum(medium["patches"] for medium in planned))
    cache = sum(medium["kv_cache_bytes"] for medium in planned)
    return {
        "family": vlm.family.name,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": {name: _parameters(half) for name, half in halves.items()},
        "weights_bytes": weights,
        "weights_bytes_of": stored,
        "context": vlm.max_context if text else None,
        "kv_cache_bytes_per_token": per_token,
        "kv_cache_bytes_per_prompt": per_prompt,
        "max_pixels": limits and limits.max_pixels,
        "limits_assumed": processor.assumed,
        "largest_square_picture": cost(Blank(BEYOND_ANY_BUDGET, BEYOND_ANY_BUDGET)),
        "media": planned,
        "memory_bytes": weights + together + cache + per_prompt,
    }


def describe(vlm: Any, media: Sequence = (), **options: Any) -> dict[str, str]:
    """Return `costs` as text, by row of a table. options: the options of `costs`."""
    found = costs(vlm, media, **options)
    tower, halves, largest = vlm.encoder.config, found["weights_bytes_of"], found["largest_square_picture"]
    size = f"{tower.depth} blocks of width {tower.num_heads * tower.head_dim}, {tower.num_heads} heads"
    assumed = " (assumed: no file sets the limits)" * found["limits_assumed"]
    rows = {"family": found["family"], "vision tower": f"{size}: {_count(found['parameters']['encoder'])}"}
    if vlm.language_model:
        text = vlm.language_model.config
        heads = f"{text.num_attention_heads} heads ({text.num_key_value_heads} kv)"
        size = f"{text.num_hidden_layers} layers of width {text.hidden_size}, {heads}"
        rows["language model"] = f"{size}: {_count(found['parameters']['language_model'])}"
        rows["context"] = f"{found['context']:,} tokens"
        rows["kv cache"] = f"{_bytes(found['kv_cache_bytes_per_token'])} a token"
        if per_prompt := found["kv_cache_bytes_per_prompt"]:
            rows["kv cache"] += f" and {_bytes(per_prompt)} a prompt"
    rows |= {
        f"weights in {found['dtype']}": f"{_bytes(found['weights_bytes'])}: encoder {_bytes(halves['encoder'])}, "
        f"language model {_bytes(halves['language_model'])}" + ", quantised" * bool(options.get("text_bytes")),
        "largest square image": f"{largest['becomes']} -> {largest['tokens']:,} tokens{assumed}",
        "a server reserves": f"for it, about {_bytes(largest['activation_bytes'])} of tower activations and "
        f"{_bytes(largest['kv_cache_bytes'])} of key-value cache",
    }
    if vlm.processor.clip_sampling:
        rows["video sampling"] = vlm.processor.clip_sampling
    for i, medium in enumerate(found["media"]):
        kept = f", {medium['kept']:,} kept" * (medium["kept"] < medium["tokens"])
        steps = f"{medium['size']} -> {medium['becomes']} -> {medium['tokens']:,} tokens{kept}"
        rows[f"{medium['kind']} {i + 1}"] = f"{steps}; key-value cache {_bytes(medium['kv_cache_bytes'])}"
    if media:
        rows["memory needed"] = f"about {_bytes(found['memory_bytes'])}, tower activations included"
    return rows


def overview(vlm: Any) -> str:
    """Return a model's `repr`: its family, device, dtype, and the sizes of its parts."""
    text = "none: loaded with text=False"
    if vlm.language_model:
        config = vlm.language_model.config
        sizes = f"{config.num_hidden_layers} layers of {config.hidden_size}, vocabulary of {config.vocab_size}"
        text = f"{type(vlm.language_model).__name__}, {sizes}, {_count(_parameters(vlm.language_model))}"
    rows = {
        "encoder": f"{type(vlm.encoder).__name__}, {_count(_parameters(vlm.encoder))}",
        "language_model": text,
        "processor": type(vlm.processor).__name__,
        "graphs": type(vlm.graphs).__name__ if vlm.graphs else "none: the encoder runs eagerly",
        "adapters": ", ".join(vlm.adapters.peft_config) if vlm.adapters is not None else "",
        "media_cache": vlm.media_cache.stats() if vlm.media_cache is not None else "",
    }
    lines = [f"  {name:<16}{value}" for name, value in rows.items() if value]
    return "\n".join([f"VLM of the family {vlm.family.name} on {vlm.device}, {vlm.encoder.dtype}", *lines])


def set_pixel_limits(processor: Any, *, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
    """Set new pixel limits for images and videos, as keyword arguments of transformers'
    `from_pretrained` do.

    Raises ValueError, naming the argument, for families without pixel limits, and for a minimum
    above the maximum.
    """
    given = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(processor.image_config, PatchConfig):
        processor.image_config = replace(processor.image_config, **changes)
        processor.video_config = processor.video_config and replace(processor.video_config, **changes)
    elif changes:
        raise ValueError(f"{next(iter(changes))}: not supported by this family, which has no limits in pixels")


def _parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B parameters" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M parameters"


def _bytes(size: float) -> str:
    power = min(int(math.log(max(size, 1), 1024)), 3)
    return f"{size / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
