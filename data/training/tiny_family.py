"""The common parts of the tiny models of all families, apart from training, and the parts that a family adds.

A family is a class in a module of its own, `tiny_<name>.py`, which ends in `FAMILY = ...`. It defines the contents of
its checkpoint folder, in the layout and under the names of the released checkpoints, so one code path loads both. It
also defines how its prompts and its tower accept a media item. The training and evaluation scripts (`python -m
data.training.train_tiny --model <name>`) and the tests know nothing else about it.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from data.training import everyday, photos, scenes
from refvl.paths import DATA
from refvl.positions import MediaSpan, get_mrope_input_positions

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
DEFAULT = "qwen2_5_vl"
VARIANTS = ("glm4v_table",)  # families that differ from another one only in their training
VOCABULARY = 1024  # the tokens before the special ones; 256 of them are bytes


def find_family(name: str = DEFAULT) -> "TinyFamily":
    """Return the family in `data/training/tiny_<name>.py`; raise ValueError listing the existing ones."""
    known = [*family_names(), *VARIANTS]
    if name not in known:
        raise ValueError(f"model: expected one of {known}, got {name!r}")
    return importlib.import_module(f"data.training.tiny_{name}").FAMILY


def family_names() -> list[str]:
    """Return the families of the shipped checkpoints, except for the variants, and Step3's (`train_step3.py`)."""
    shared = {"family", "model", "step3", *VARIANTS}
    return sorted({file.stem.removeprefix("tiny_") for file in Path(__file__).parent.glob("tiny_*.py")} - shared)


class TinyFamily:
    """The defaults are those of a model with M-RoPE whose media are one run of placeholders, as Qwen2.5-VL's are.

    grid: (t, h, w) of a media item in patches. seconds: the timestamp of each of its t steps; () for an image.
    """

    name: str  # the name of the module and the folder
    special_tokens: tuple[str, ...]
    end_of_turn: str  # ends every answer
    end_of_media: dict[str, str]  # "image", "video" -> the token after the item, where the questions begin
    chat_template: str
    pieces: str  # regular expression that splits text before bytes are merged
    normalizer = None
    texts: tuple[str, ...] = ()  # texts from which the tokenizer learns, in addition to questions and answers
    clips: tuple[str, ...] = ("motion",)  # the sorts of videos in its training, from `scenes.SORTS`
    sliced: bool = False  # whether an image becomes an overview and slices, whose order indicates locations
    reads_places: bool = False  # whether the language model should read a token's location in an image from positions
    moves_with_token: tuple[int, ...] = (0,)  # columns next to a place's token whose positions are exchanged with it
    reads_canvas: bool = False  # ... if places are given to whole slices
    reads_steps: bool = False  # ... and the time of each step in a video
    reads_table: bool = False  # whether the tower should read it from its position table instead
    reads_neighbours: bool = False  # whether answers depend on the coordinates of the tower's tokens; see `relations`
    reads_windows: bool = False  # ... and on which tokens share a window
    spells_seconds: bool = False  # whether timestamps are spelt digit by digit, so prompts differ in length
    packing: int = 0  # the number of a video's frames that share tokens and have temporal ids; 0: none do
    recipe: dict = {}  # noqa: RUF012  where its training differs from `train_tiny.Recipe`
    by_adam: tuple[str, ...] = ("embed_tokens", "lm_head")  # parts of names of matrices that do not suit Muon
    release: str | None = None  # the suffix of the folder if a family has several releases
    prunable: bool = True  # videos by EVS

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

    def config(self, tokenizer: Tokenizer) -> dict:
        """The dict of `config.json`."""
        raise NotImplementedError

    def side_files(self, config: dict) -> dict[str, dict]:
        """Return file name -> contents, for every JSON file except the tokenizer's own."""
        raise NotImplementedError

    def hf_config(self, config: dict) -> PretrainedConfig:
        """Return transformers' config object with the same sizes."""
        return AutoConfig.for_model(**config)

    def train_tokenizer(self) -> Tokenizer:
        """Train a byte-level BPE over all 256 bytes, so any text has tokens; each word of the questions is one token.

        Other spellings of the questions, and everyday sentences, take a few pieces per word.
        """
        tokenizer = Tokenizer(models.BPE())
        if self.normalizer is not None:
            tokenizer.normalizer = self.normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(self.pieces), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        phrases = [text for pair in self.phrases() for text in pair]
        others = {
            everyday.rewrite(text, british=british, case=case)
            for text in phrases for british in (False, True) for case in everyday.CASES
        }  # fmt: skip
        texts = [*self.texts, *phrases, *photos.answers()] * 8 + sorted(others) + everyday.tokenizer_texts()
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_special_tokens(list(self.special_tokens))
        return tokenizer

    def phrases(self) -> list[tuple[str, str]]:
        """Return (question, answer) texts with every word of all questions and answers."""
        return scenes.all_phrases(self.clips)

    def write_checkpoint(self, folder: Path, config: dict, tokenizer: Tokenizer, weights: dict[str, Tensor]) -> None:
        """Write the whole folder; `weights` are under checkpoint names and are stored in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(self.chat_template)
        for name, values in self.side_files(config).items():
            (folder / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
        tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
        partial = folder / "model.safetensors.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        partial.replace(folder / "model.safetensors")

    def checkpoint_weights(self, weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
        """Return the parameters of `TinyModel` (`visual.`, `model.`, `lm_head.`) with released names and shapes."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------ tower and text model

    def tower(self, config: dict) -> torch.nn.Module:
        """Build refvl's encoder with arbitrary weights."""
        raise NotImplementedError

    def init_weights(self, model: torch.nn.Module) -> None:
        """Initialise weights differently from `TinyModel.init_weights`, after which this is called."""

    def patchify(self, pixels: Tensor) -> tuple[Tensor, list]:
        """Turn (B, frames, H, W, 3) uint8 of one size into the encoder's rows (N, C), and the layout of each item."""
        grid = self.grid(pixels.shape)
        return batch_rows(pixels), [grid] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        """Return (t, h, w) in patches of each item, for pixels of the shape (B, frames, H, W, 3)."""
        return max(1, shape[1] // 2), shape[2] // 14, shape[3] // 14

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """Return the (height, width) to which the side files resize images, or videos of `frames`."""
        raise NotImplementedError

    def cells(self, shape) -> tuple[int, int]:
        """Return the rows and columns of the tokens of an image or frame that have places of their own."""
        return self.merged(self.grid(shape))[1:]

    def merged(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the same size in tokens."""
        return grid[0], grid[1] // 2, grid[2] // 2

    def plan(self, tower, layouts: list, kept: dict):
        """Plan items that look alike; `kept` caches the plan, because only sizes count."""
        key = (len(layouts), layouts[0])
        if key not in kept:
            kept[key] = tower.plan(layouts)
        return kept[key]

    # ---------------------------------------------------------------------------------------- the prompt

    def media_token(self, config: dict, media: str) -> int:
        """Return the token of an item in the prompt of the chat template."""
        return config[f"{media}_token_id"]

    def pad_id(self, config: dict) -> int:
        return config["text_config"]["pad_token_id"]

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
        """Return the indices of the tokens with each step's timestamp, or of other tokens that occur once per step."""
        return []

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        """(3, length) int64."""
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
