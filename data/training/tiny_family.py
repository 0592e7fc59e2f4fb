"""The tiny models, apart from training: one class per family, which describes its prompts and its tower.

Sizes, tokenizer, chat template and pixel limits are the files of the shipped folder, in the layout and under the names
of the released checkpoints. Training reads them there and writes only weights. The training and evaluation scripts
(`python -m data.training.train_tiny --model <name>`) and the tests know nothing else about a family.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PretrainedConfig

from data.training import pages, scenes
from refvl.encoders import (
    Glm4vVisionTransformer,
    MiniCPMV4_7Encoder,
    Qwen2_5_VisionTransformer,
    Qwen3VLVisionTransformer,
)
from refvl.encoders.minicpmv import MiniCPMV4_5Encoder
from refvl.encoders.step3_vl import Step3VisionEncoder, resize_class_and_positions
from refvl.families import read_config
from refvl.paths import DATA
from refvl.pixels.crops import CropLayout, square_patch_rows
from refvl.pixels.patch_configs import Glm4vPatchConfig, Qwen3VLPatchConfig, Qwen3VLVideoPatchConfig
from refvl.pixels.patches import PatchConfig
from refvl.pixels.slices import SliceConfig, SliceGroup, levels_of_slices, plan_slices
from refvl.positions import CanvasMarks, MediaSpan, canvas_positions, get_mrope_input_positions
from refvl.processors.minicpmv import MiniCPMV4_5Processor, SlicedMedia
from refvl.processors.minicpmv4_6 import FoldedMedia, write_media
from refvl.processors.minicpmv_video import TENTHS

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)  # Qwen3-VL's mean and standard deviation of every channel
DEFAULT = "qwen2_5_vl"
VARIANTS = ("glm4v_table",)  # families that differ from another family only in their training
NAMES_IN_MODEL = {r"^model\.": "model.language_model.", r"^visual\.": "model.visual."}
REFINING = {  # settings in the recipes of all families; their training continued from earlier weights
    "warmup": 30, "pictures": 12, "picture_batches": 2, "asides": 2, "photos": 4, "measure_on": 96,
    "measure_every": 200,
}  # fmt: skip
WEIGHTS_AND_LOG = ("model.safetensors", "training_log.jsonl")


class TinyFamily:
    """The base of all families; the defaults suit a model with M-RoPE that fills one run of
    placeholders per item.

    grid: (t, h, w) of a media item in patches. seconds: the timestamp of each of its t steps; () for an image.
    """

    name: str
    release: str | None = None  # the suffix of the folder's name if it is not `name`
    end_of_turn = "<|im_end|>"  # ends every answer
    end_of_media: dict[str, str]  # "image", "video" -> the token after the item, where the questions begin
    encoder: type  # the class of the tower
    limits: tuple  # the configs that determine the final size of an image, and of a video
    renamed: dict[str, str] = {}  # noqa: RUF012  patterns in names of `TinyModel`'s weights -> those of the release
    kernels: dict[str, tuple[int, ...]] = {}  # noqa: RUF012  ends of names of convolutions -> their inner sizes
    clips: tuple[str, ...] = ("motion",)  # the sorts of videos in its training, from `scenes.SORTS`
    sliced: bool = False  # whether an image becomes an overview and slices, whose order indicates locations
    reads_places: bool = False  # whether the language model should read a token's location in an image from positions
    moves_with_token: tuple[int, ...] = (0,)  # columns next to a place's token whose positions are exchanged with it
    reads_canvas: bool = False  # whether positions indicate the location of a whole slice
    reads_steps: bool = False  # whether the language model should also read the time of each step in a video
    reads_table: bool = False  # whether the tower should read locations from its position table instead
    reads_neighbours: bool = False  # whether answers depend on the coordinates of the tower's tokens; see `relations`
    reads_windows: bool = False  # whether answers also depend on which tokens share a window
    spells_seconds: bool = False  # whether timestamps are spelt digit by digit, so prompts differ in length
    packing: int = 0  # the number of a video's frames that share tokens and have temporal ids; 0: none do
    prunable: bool = True  # whether EVS can prune its videos
    recipe: dict = {}  # noqa: RUF012  where its training differs from `train_tiny.Recipe`
    by_adam: tuple[str, ...] = ()  # parts of names of matrices that do not suit Muon, apart from embedding and head

    # -------------------------------------------------------------------------------------- the folder

    @property
    def folder(self) -> Path:
        return DATA / "checkpoints" / f"tiny-{self.release or self.name}"

    @property
    def measurements(self) -> Path:
        return DATA / "measurements" / f"tiny-{self.release or self.name}.json"

    @property
    def kinds(self) -> dict[str, str]:
        """The measurements: kind of question -> sort of scene."""
        return {kind: sort for kind, sort in scenes.MEASURED.items() if sort in ("picture", *self.clips)}

    def config(self) -> dict:
        return json.loads((self.folder / "config.json").read_text())

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def chat_template(self) -> str:
        return (self.folder / "chat_template.jinja").read_text()

    def hf_config(self, config: dict) -> PretrainedConfig:
        return read_config(config)

    def copy_files(self, folder: Path) -> None:
        """Copy the files of the shipped folder except for the weights and their log."""
        if folder.resolve() != self.folder:
            shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns(*WEIGHTS_AND_LOG), dirs_exist_ok=True)

    def write_checkpoint(self, folder: Path, config: dict, weights: dict[str, Tensor]) -> None:
        """Write the whole folder; `weights` are under checkpoint names and are stored in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        self.copy_files(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
        partial = folder / "model.safetensors.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        partial.replace(folder / "model.safetensors")

    def checkpoint_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of `TinyModel` (`visual.`, `model.`, `lm_head.`) with released names and shapes."""
        found = {}
        for name, weight in weights.items():
            for end, sizes in self.kernels.items():
                weight = weight.unflatten(1, sizes) if name.endswith(end) else weight
            for pattern, other in self.renamed.items():
                name = re.sub(pattern, other, name)
            if "self_attn.qkv." in name:  # the release has three layers
                found |= {name.replace("qkv", f"{x}_proj"): w for x, w in zip("qkv", weight.chunk(3), strict=True)}
            else:
                found[name] = weight
        return found

    # ------------------------------------------------------------------------------ tower and text model

    def tower(self, config: dict) -> nn.Module:
        """Build refvl's encoder with arbitrary weights."""
        return self.encoder.from_config(config["vision_config"], attention="sdpa")

    def init_weights(self, model: nn.Module) -> None:
        """Initialise weights differently from `TinyModel.init_weights`, after which this is called."""

    def patchify(self, pixels: Tensor) -> tuple[Tensor, list]:
        """Turn (B, frames, H, W, 3) uint8 of one size into the encoder's rows (N, C), and the layout of each item."""
        grid = self.grid(pixels.shape)
        return batch_rows(pixels), [grid] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        """Return (t, h, w) in patches of each item, for pixels of the shape (B, frames, H, W, 3)."""
        return max(1, shape[1] // 2), shape[2] // 14, shape[3] // 14

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """Return the (height, width) to which the processor resizes images, or videos of `frames`."""
        return self.limits[frames > 1].target_size(height, width, frames)

    def cells(self, shape) -> tuple[int, int]:
        """Return the rows and columns of the tokens of an image or frame that have places of their own."""
        return self.merged(self.grid(shape))[1:]

    def merged(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the same size in tokens."""
        return grid[0], grid[1] // 2, grid[2] // 2

    def plan(self, tower, layouts: list, kept: dict):
        """Plan items of equal layout; `kept` caches the plan, which depends only on sizes."""
        key = (len(layouts), layouts[0])
        if key not in kept:
            kept[key] = tower.plan(layouts)
        return kept[key]

    # ---------------------------------------------------------------------------------------- the prompt

    def media_token(self, config: dict, media: str):
        """Return the token of an item in the prompt of the chat template."""
        return config[f"{media}_token_id"]

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return `ids` with the item in place of its one `token`, and the spans that it fills.

        encode: text -> ids. The spans may depend on the grid and on differences between timestamps, not on the
            timestamps themselves.
        """
        start = ids.index(token)
        span = MediaSpan(start, *self.merged(grid), self.time_factor(seconds))
        return [*ids[:start], *[token] * span.num_tokens, *ids[start + 1 :]], [span]

    def time_factor(self, seconds: tuple) -> float:
        return 1.0

    def time_columns(self, spans: list[MediaSpan]) -> list[int]:
        """Return the columns of each step's timestamp, or of the separator after each step or set of queries."""
        return [span.offset + span.num_tokens for span in spans]

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        """Return the positions of all tokens, (3, length) int64."""
        return get_mrope_input_positions(length, spans)[0]

    def deeper_features(self, deeper_BLW: Tensor) -> dict:
        """Return arguments of the text model for those parts of the tower's rows that are not embeddings."""
        return {}

    def text_positions(self, positions_3BL: Tensor) -> Tensor:
        """Return positions in the form of transformers' text model; (B, L) if it has no M-RoPE."""
        return positions_3BL


def batch_rows(
    pixels: Tensor, patch: int = 14, merge: int = 2, frames: int = 2, mean=CLIP_MEAN, std=CLIP_STD
) -> Tensor:
    """Turn (B, frames, H, W, 3) uint8 into (N, C*Tp*P*P) float32 in merge-block order; a single frame is repeated."""
    mean, std = torch.tensor(mean), torch.tensor(std)
    x = pixels * (1 / (255 * std)) - mean / std
    if x.shape[1] == 1:
        x = x.expand(-1, frames, -1, -1, -1)
    batch, count, height, width, channels = x.shape
    h, w = height // (patch * merge), width // (patch * merge)
    x = x.reshape(batch, count // frames, frames, h, merge, patch, w, merge, patch, channels)
    return x.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8).reshape(-1, channels * frames * patch**2)


class SampledTable(TinyFamily):
    """A family whose tower samples a position table: plans depend on weights, so every step samples it once."""

    def plan(self, tower, layouts: list, kept: dict):
        with torch.no_grad():
            plan = super().plan(tower, layouts, kept)
        one = tower.plan(layouts[:1])
        return replace(plan, position_embeds=one.position_embeds.repeat(len(layouts), 1))


class IndexPositions(TinyFamily):
    """A family without M-RoPE: the position of every token, media included, is its index."""

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        return torch.arange(length).expand(3, -1)

    def text_positions(self, positions_3BL: Tensor) -> Tensor:
        return positions_3BL[0]


class TinyQwen2_5_VL(TinyFamily):
    name = "qwen2_5_vl"
    end_of_media = {"image": "<|vision_end|>", "video": "<|vision_end|>"}  # noqa: RUF012
    encoder = Qwen2_5_VisionTransformer
    limits = (PatchConfig(min_pixels=84 * 84, max_pixels=112 * 112),) * 2  # 9 to 16 merged tokens per image or frame
    kernels = {"patch_embed.proj.weight": (3, 2, 14, 14)}  # noqa: RUF012
    reads_places = reads_steps = reads_neighbours = reads_windows = True
    by_adam = ("merger.mlp.0",)  # a matrix that is too large for Muon
    recipe = REFINING | {
        "begin_with": "65333cd4545874e20eac54c71cd6aed99bca1f694e0e288cf939adcdb4371558",
        "seed": 3, "steps": 1600, "see": 100, "clips": 3, "lr": 0.0012, "muon_lr": 0.002,
    }  # fmt: skip

    def time_factor(self, seconds: tuple) -> float:
        """Return the positions per step on a video's time axis, at `tokens_per_second` (2)."""
        return 2 * (seconds[1] - seconds[0]) if len(seconds) > 1 else 1.0

    def time_columns(self, spans: list[MediaSpan]) -> list[int]:
        return []


class TinyQwen3VL(SampledTable):
    """Each step of a video is preceded by its timestamp, which is rounded to a tenth of a second and split into digits.

    So <12.2 seconds> is one token longer than <7.2 seconds>. The separator after a frame is the first token
    that can attend to both the timestamp and the event. The budget is 9 to 16 merged tokens of 32 x 32 px per
    image, and per frame of a video of ten frames. It turns a scene of 84 x 84 px into 96 x 96 px.
    """

    name = "qwen3_vl"
    end_of_media = {"image": "<|vision_end|>", "video": "<|vision_end|>"}  # noqa: RUF012
    encoder = Qwen3VLVisionTransformer
    limits = (
        Qwen3VLPatchConfig(min_pixels=96 * 96, max_pixels=128 * 128),
        Qwen3VLVideoPatchConfig(min_pixels=2 * 96 * 96, max_pixels=10 * 128 * 128),
    )
    renamed = NAMES_IN_MODEL
    kernels = {"patch_embed.proj.weight": (3, 2, 16, 16)}  # noqa: RUF012
    clips = ("motion", "change")
    reads_places = spells_seconds = reads_neighbours = True
    by_adam = ("pos_embed", "merger.linear_fc1", "deepstack_merger_list")  # wide matrices
    recipe = REFINING | {
        "begin_with": "49f5f9e5dd02cfd79d1361e527b84d04e1dfe8b9a90338dd7c34dff4e604c21c",
        "seed": 4, "steps": 1400, "see": 100, "clips": 3, "lr": 0.001, "muon_lr": 0.0016,
    }  # fmt: skip

    def init_weights(self, model: nn.Module) -> None:
        """Scale down DeepStack features, which nothing reads at first, so they would be noise later."""
        for merger in model.visual.deepstack_merger_list:
            merger.linear_fc2.weight.data.mul_(0.2)

    def patchify(self, pixels: Tensor) -> tuple[Tensor, list]:
        """Return patch rows and layouts; images are resized as in the processor, so 28 px of a token become 32.

        Sides that are multiples of 32 are final.
        """
        grid = self.grid(pixels.shape)
        height, width = (16 * patches for patches in grid[1:])
        frames = pixels.flatten(0, 1).permute(0, 3, 1, 2).contiguous()
        resized = F.interpolate(frames, (height, width), mode="bicubic", antialias=True).permute(0, 2, 3, 1)
        rows = batch_rows(resized.unflatten(0, pixels.shape[:2]), patch=16, mean=HALF, std=HALF)
        return rows, [grid] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        side = 14 if shape[2] % 32 else 16
        return max(1, shape[1] // 2), shape[2] // side, shape[3] // side

    def deeper_features(self, deeper_BLW: Tensor) -> dict:
        """Return DeepStack features as the arguments of transformers' text model."""
        visual_BL = deeper_BLW.detach().any(-1)
        return {
            "visual_pos_masks": visual_BL,
            "deepstack_visual_embeds": deeper_BLW[visual_BL].unflatten(-1, (2, -1)).unbind(1),
        }

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return ids in which each step of a video is an image of its own after its timestamp, and their spans.

        The separators of these images replace those of the template. The timestamp of two frames, half a second
        apart, is their mean time.
        """
        if not seconds:
            return super().place_media(ids, token, grid, seconds, encode)
        start, (_, h, w) = ids.index(token), self.merged(grid)
        placed, spans = ids[: start - 1], []
        for second in seconds:
            placed = [*placed, *encode(f"<{second + 0.5 / scenes.FPS:.1f} seconds>"), *encode("<|vision_start|>")]
            spans.append(MediaSpan(len(placed), 1, h, w))
            placed = [*placed, *[token] * (h * w), *encode("<|vision_end|>")]
        return placed + ids[start + 2 :], spans


class TinyGlm4v(SampledTable):
    """Each step of a video is followed by its timestamp, and the model learns to answer when an event happened.

    Budgets count the pixels of all frames, and an image counts as two frames: 9 to 18 merged
    tokens per image, and 9 to 16 per frame of a video of ten frames. A scene of up to 17 frames
    keeps its size.
    """

    name = "glm4v"
    end_of_turn = "<|user|>"
    end_of_media = {"image": "<|end_of_image|>", "video": "<|end_of_video|>"}  # noqa: RUF012
    encoder = Glm4vVisionTransformer
    limits = (
        Glm4vPatchConfig(min_pixels=2 * 84 * 84, max_pixels=2 * 84 * 168),
        Glm4vPatchConfig(min_pixels=2 * 84 * 84, max_pixels=10 * 112 * 112),
    )
    renamed = NAMES_IN_MODEL
    kernels = {"patch_embed.proj.weight": (3, 2, 14, 14), "visual.downsample.weight": (96, 2, 2)}  # noqa: RUF012
    clips = ("motion", "change")
    reads_places = True
    by_adam = ("position_embedding", "downsample")  # a table, and a wide kernel
    recipe = REFINING | {
        "begin_with": "fc33ca2863ace02ab159f5d66e22ad233595d33c6008f0e1527d505376d12978",
        "seed": 6, "steps": 1200, "see": 150, "clips": 3, "lr": 0.002, "muon_lr": 0.003, "measure_every": 250,
    }  # fmt: skip

    def init_weights(self, model: nn.Module) -> None:
        """Set the norms after attention and MLP to 0.2, because full-size updates would dominate
        the word embeddings.
        """
        for layer in model.model.layers:
            nn.init.constant_(layer.post_self_attn_layernorm.weight, 0.2)
            nn.init.constant_(layer.post_mlp_layernorm.weight, 0.2)

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return ids in which each step of a video is an image of its own before its timestamp, and their spans."""
        if not seconds:
            return super().place_media(ids, token, grid, seconds, encode)
        start, (_, h, w) = ids.index(token), self.merged(grid)
        begin, image, end = map(encode, ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"))
        placed, spans = ids[:start], []
        for second in seconds:
            spans.append(MediaSpan(len(placed) + 1, 1, h, w))
            placed = [*placed, *begin, *image * (h * w), *end, *encode(str(int(second)))]
        return placed + ids[start + 1 :], spans

    def time_columns(self, spans: list[MediaSpan]) -> list[int]:
        """Return the column of each timestamp, which follows the end of its image."""
        return [column + 1 for column in super().time_columns(spans)]


class TinyGlm4vTable(TinyGlm4v):
    """The GLM-4.1V whose tower has to read its position table.

    Its training began with weights of `tiny-glm4v`, which reads places from M-RoPE, and with a new table. It
    continued with exchanged vectors of the table and with scenes of other sizes: see points 8 and 10 of
    `train_tiny.py`. Apart from the weights, both folders are the same.
    """

    name, release = "glm4v_table", "glm4v-table"
    reads_places = False
    reads_table = True
    recipe = REFINING | {
        "begin_with": "502bfc06a919644edc20d05c23c0a86241374c2644fa26669c83745df574ac5a",
        "seed": 4, "steps": 1000, "see": 150, "clips": 3, "lr": 0.002, "muon_lr": 0.003,
    }  # fmt: skip

    def init_weights(self, model: nn.Module) -> None:
        """Enlarge the table, because patches are normalised before it is added; a table as small as other
        matrices has no effect.
        """
        super().init_weights(model)
        table = model.visual.embeddings["position_embedding"].weight
        nn.init.normal_(table, generator=torch.Generator().manual_seed(7))


class Sliced(TinyFamily):
    """A MiniCPM-V: an image is an overview and slices. patch: the side of a patch in px."""

    patch: int
    slices: SliceConfig
    prunable = False

    def tower(self, config: dict) -> nn.Module:
        return self.encoder.from_config(config, attention="sdpa")

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """Return whole patches; the processor accepts any size, but the grid counts patches."""
        return round(height / self.patch) * self.patch, round(width / self.patch) * self.patch

    def slice_rows(self, pixels: Tensor, config: SliceConfig, order: Sequence[int] | None) -> tuple[Tensor, list]:
        """Return the patch rows of all slices, and the (h, w) of each slice of one image or frame.

        order: the order of the slices after the overview.
        """
        plan = plan_slices(pixels.shape[3], pixels.shape[2], config)
        images = [Image.fromarray(frame.numpy()) for frame in pixels.flatten(0, 1)]
        rows = levels_of_slices(images, config).normalize()
        if order is not None:
            parts = rows.unflatten(0, (len(pixels), len(plan.tgt_sizes), -1))  # all slices have the overview's size
            rows = parts[:, [0, *(1 + i for i in order)]].flatten(0, 2)
        return rows, list(plan.tgt_sizes)


class TinyMiniCPMV(Sliced, IndexPositions):
    """A scene of 84 x 84 px is larger than its overview of 56 x 56, so it is also cut into 2 x 2 slices of 56 x 56.

    No image has more than four slices, because more would have positions that the model never saw in training. Frames
    of a video are overviews; three of them share a set of queries, and only temporal ids distinguish them. A set has
    nine queries: while the tower learns to see, query i of the overview has to name the object in place i.
    """

    name, release = "minicpmv", "minicpmv-4_5"
    end_of_media = {"image": "</image>", "video": "</image>"}  # noqa: RUF012
    encoder = MiniCPMV4_5Encoder
    renamed = {r"^(model|lm_head)\.": r"llm.\1.", r"^visual\.": ""}  # noqa: RUF012
    kernels = {"patch_embedding.weight": (3, 14, 14)}  # noqa: RUF012
    queries, patch = 9, 14
    slices = SliceConfig(scale_resolution=56, max_slice_nums=4, use_image_id=True)
    frames = SliceConfig(scale_resolution=56, max_slice_nums=1)
    by_adam = ("position_embedding", "resampler.query")
    sliced = True
    packing = 3
    recipe = REFINING | {
        "begin_with": "b7dfa7a60d02663875c1a4a1366efd810d2fca54a9526cc811d65dbb9e7bd266",
        "seed": 3, "steps": 1000, "see": 80, "clips": 9, "lr": 0.0012, "muon_lr": 0.002,
    }  # fmt: skip

    def media_token(self, config: dict, media: str) -> str:
        return "<unk>"  # found by its separators (see `place_media`)

    def patchify(
        self, pixels: Tensor, *, order: Sequence[int] | None = None, times: Sequence[int] | None = None
    ) -> tuple[Tensor, list]:
        """Return patch rows and layouts; images are sliced, and videos are packed, with a frame every half second.

        times: temporal ids to use instead, one per frame.
        """
        if pixels.shape[1] == 1:
            rows, sizes = self.slice_rows(pixels, self.slices, order)
            return rows, [tuple(SliceGroup((size,)) for size in sizes)] * len(pixels)
        rows, sizes = self.slice_rows(pixels, self.frames, None)
        ids = [round(i / scenes.FPS * TENTHS) for i in range(pixels.shape[1])] if times is None else list(times)
        packs = [ids[i : i + self.packing] for i in range(0, len(ids), self.packing)]
        return rows, [tuple(SliceGroup(tuple(sizes) * len(pack), tuple(pack)) for pack in packs)] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        """Return the grid as in other families, except that t counts the sets of queries of a video."""
        return -(-shape[1] // self.packing), shape[2] // self.patch, shape[3] // self.patch

    def cells(self, shape) -> tuple[int, int]:
        """Return 3 x 3: each of the nine queries reads one place of the overview, whatever the overview's size."""
        return 3, 3

    def plan(self, tower, layouts: list, kept: dict):
        """Plan a batch; plans of videos are not cached, because their times differ at every step."""
        return super().plan(tower, layouts, kept if layouts[0][0].temporal_ids is None else {})

    def place_media(
        self, ids: list[int], token: str, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return the ids that the processor writes for an image or a video, and the spans of its unknown tokens."""
        t, h, w = grid
        processor = MiniCPMV4_5Processor(SimpleNamespace(query_num=self.queries), image_config=self.slices)
        if seconds:
            text = processor.write_video(SlicedMedia("video", (t, 1, self.queries)))
        else:
            plan = plan_slices(w * self.patch, h * self.patch, self.slices)
            medium = SlicedMedia("image", (len(plan.tgt_sizes), 1, self.queries), grid=plan.grid)
            text = processor.write_image(medium, 0)
        (begin, unknown, _), written = encode("<image><unk></image>"), encode(text)
        start = next(i for i in range(len(ids)) if ids[i : i + 2] == [begin, unknown])
        placed = [*ids[:start], *written, *ids[start + 3 :]]
        return placed, [MediaSpan(first, 1, 1, self.queries) for first in runs_of(placed, unknown)]


def runs_of(ids: list[int], token: int) -> list[int]:
    """Return the first index of each run of a token."""
    return [next(run) for is_run, run in groupby(range(len(ids)), lambda i: ids[i] == token) if is_run]


class TinyMiniCPMV4_7(Sliced):
    """A scene of 84 x 84 px is cut into 3 x 3 slices of 28 x 28, one for each place, after an overview of 28 x 28.

    Patches have 7 px, so the fold and the merger turn the 4 x 4 patches of a slice into one token. The tower encodes
    every slice alone, so only the canvas indicates where a slice is. All layers of the text model use attention,
    because a linear layer cannot keep several questions in one sequence apart. The model accepts only images.
    """

    name, release = "minicpmv4_7", "minicpmv-4_7"
    end_of_media = {"image": "<|image_pad|>"}  # noqa: RUF012
    encoder = MiniCPMV4_7Encoder
    renamed = {  # noqa: RUF012
        r"^model\.": "model.language_model.", r"^visual\.merger\.": "model.merger.mlp.0.",
        r"^visual\.": "model.vision_tower.",
    }  # fmt: skip
    kernels = {"patch_embedding.weight": (3, 7, 7)}  # noqa: RUF012
    patch = 7
    slices = SliceConfig(scale_resolution=28, max_slice_nums=9, patch_size=7, multiple=4, use_image_id=True)
    clips = ()
    reads_places = reads_canvas = True
    moves_with_token = (-1, 0, 1)  # a slice with its separators
    by_adam = ("position_embedding", "merger.linear")
    recipe = REFINING | {
        "begin_with": "2f99566e1268d93dad9f0a1932f228a8f1e4e0db6c0fdb82a4c0805c095c9858",
        "seed": 6, "steps": 1000, "few": 0.5, "see": 150, "lr": 0.002, "muon_lr": 0.003,
    }  # fmt: skip

    def patchify(self, pixels: Tensor, *, order: Sequence[int] | None = None) -> tuple[Tensor, list]:
        rows, sizes = self.slice_rows(pixels, self.slices, order)
        return rows, [tuple(SliceGroup((size,)) for size in sizes)] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        return 1, shape[2] // self.patch, shape[3] // self.patch

    def cells(self, shape) -> tuple[int, int]:
        """Return the rows and columns of slices, of one token each."""
        columns, rows = plan_slices(shape[3], shape[2], self.slices).grid or (1, 1)
        return rows, columns

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return the ids that the processor writes for an image, and the spans of its overview and slices."""
        plan = plan_slices(grid[2] * self.patch, grid[1] * self.patch, self.slices)
        sizes = [(h // 4, w // 4) for h, w in plan.tgt_sizes]
        medium = FoldedMedia("image", (1, 1, sum(h * w for h, w in sizes)), sizes=tuple(sizes), grid=plan.grid)
        start = ids.index(token)
        placed = [*ids[:start], *encode(write_media(medium, "<|image_pad|>", number=0)), *ids[start + 1 :]]
        return placed, [MediaSpan(i, 1, h, w) for i, (h, w) in zip(runs_of(placed, token), sizes, strict=True)]

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        """Return positions on the canvas. Separators enclose each span; a larger gap to the next slice ends a line."""
        marks = CanvasMarks(1, 2, 3, 4, 5)
        ids = torch.zeros(length, dtype=torch.int64)
        for i, span in enumerate(spans):
            end = span.offset + span.num_tokens
            ids[span.offset - 1], ids[end] = (3, 4) if i else (1, 2)
            if i and i + 1 < len(spans) and spans[i + 1].offset - end > 2:
                ids[end + 1] = marks.newline
        return canvas_positions(ids, spans, marks)


class TinyStep3(IndexPositions):
    """The family reads pages (`pages.py`), whose letters are too small for the overview; see `train_step3.py`.

    enable_crops: False for prompts that contain only the overview. config.json sets `crop_size` and `max_side`, because
        they differ from the released ones.
    """

    name = "step3"
    end_of_turn = "<|EOT|>"
    end_of_media = {"image": "<im_patch>"}  # noqa: RUF012  as the template writes it: one token, without marks
    encoder = Step3VisionEncoder
    renamed = {r"^visual\.": ""}  # noqa: RUF012
    kernels = {"patch_embedding.weight": (3, pages.CELL, pages.CELL)}  # noqa: RUF012
    overview = 84  # px
    clips = ()
    by_adam = ("position_embedding", "class_embedding", "moe.gate")

    def __init__(self, *, enable_crops: bool = True):
        self.enable_crops = enable_crops

    def tower(self, config: dict) -> Step3VisionEncoder:
        return self.encoder.from_config(config, attention="sdpa")

    def grid(self, shape) -> CropLayout:
        return CropLayout(shape[2] // pages.WINDOW, shape[3] // pages.WINDOW) if self.enable_crops else CropLayout(0, 0)

    def patchify(self, pixels: Tensor) -> tuple[Tensor, list]:
        """Do the work of `patchify_crops` for a whole batch: (B, 1, H, W, 3) uint8, where windows divide H and W."""
        mean, std = torch.tensor(CLIP_MEAN), torch.tensor(CLIP_STD)
        x = ((pixels[:, 0].float() / 255 - mean) / std).permute(0, 3, 1, 2)  # (B, 3, H, W)
        overview = F.interpolate(x, size=(self.overview, self.overview), mode="bilinear", antialias=True)
        rows = [square_patch_rows(overview, pages.CELL).unflatten(0, (len(x), -1))]
        if self.enable_crops:
            windows = x.unfold(2, pages.WINDOW, pages.WINDOW).unfold(3, pages.WINDOW, pages.WINDOW)
            crops = windows.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # (B * rows * columns, 3, 56, 56)
            rows = [square_patch_rows(crops, pages.CELL).unflatten(0, (len(x), -1)), *rows]
        return torch.cat(rows, dim=1).flatten(0, 1), [self.grid(pixels.shape)] * len(x)

    def plan(self, tower, layouts: list, kept: dict):
        """Plan a batch; positions depend on weights, so their table is resized at every step."""
        with torch.no_grad():
            plan = super().plan(tower, layouts, kept)
        table, paths = tower.vision_model.embeddings.position_embedding.weight, tower.paths
        return replace(
            plan,
            local_position_embeds=resize_class_and_positions(table, paths["local"].side),
            global_position_embeds=resize_class_and_positions(table, paths["global"].side),
        )

    def place_media(
        self, ids: list[int], token: int, grid: CropLayout, seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """Return the ids and spans: one token per crop and 2 x 2 for the overview, each between separator tokens."""
        text = "".join("<patch_start><im_patch><patch_end>" + "<patch_newline>" * end for end in grid.newline_mask)
        start = ids.index(token)
        placed = [*ids[:start], *encode(text + "<im_start>" + "<im_patch>" * 4 + "<im_end>"), *ids[start + 1 :]]
        places = [i for i, other in enumerate(placed) if other == token]
        spans = [MediaSpan(place, 1, 1, 1) for place in places[: grid.crops]]
        return placed, [*spans, MediaSpan(places[grid.crops], 1, 2, 2)]


OF_SCENES = (TinyQwen2_5_VL, TinyQwen3VL, TinyGlm4v, TinyGlm4vTable, TinyMiniCPMV, TinyMiniCPMV4_7)
FAMILIES = {family.name: family() for family in OF_SCENES}
STEP3 = TinyStep3()


def find_family(name: str = DEFAULT) -> TinyFamily:
    """Return the family of this name that answers about scenes; raise ValueError listing the existing ones."""
    if name not in FAMILIES:
        raise ValueError(f"model: expected one of {list(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def family_names() -> list[str]:
    """Return the names of all families but the variants and Step3's, sorted."""
    return sorted(FAMILIES.keys() - VARIANTS)
