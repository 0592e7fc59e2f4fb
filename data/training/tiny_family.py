"""What the tiny models of all families share besides training, and what a family adds.

A family is a class in a module of its own, `tiny_<name>.py`, which ends in `FAMILY = ...`. It says what is in its
checkpoint folder - in the layout and under the names of the released checkpoints, so that one code path loads this
model and those - and how its prompts and its tower take a medium. The training and evaluation scripts
(`python -m data.training.train_tiny --model <name>`) and the tests know nothing else about it.
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
UNTRAINED = ("glm4v_table",)  # no weights of it ship
VOCABULARY = 1024  # tokens before the special ones; 256 of them are bytes


def find_family(name: str = DEFAULT) -> "TinyFamily":
    """The family in `data/training/tiny_<name>.py`; raises ValueError listing those that are there."""
    known = [*family_names(), *UNTRAINED]
    if name not in known:
        raise ValueError(f"model: expected one of {known}, got {name!r}")
    return importlib.import_module(f"data.training.tiny_{name}").FAMILY


def family_names() -> list[str]:
    """Of the checkpoints that ship, but for Step3's, which `train_step3.py` trains."""
    shared = {"family", "model", "step3", *UNTRAINED}
    return sorted({file.stem.removeprefix("tiny_") for file in Path(__file__).parent.glob("tiny_*.py")} - shared)


class TinyFamily:
    """The defaults are those of a model with M-RoPE whose media are one run of placeholders, as Qwen2.5-VL's are.

    grid: (t, h, w) of a medium in patches. seconds: of each of its t steps in time; () for an image.
    """

    name: str  # of the module and the folder
    special_tokens: tuple[str, ...]
    end_of_turn: str  # ends every answer
    end_of_media: dict[str, str]  # "image", "video" -> the token after a medium, where the questions begin
    chat_template: str
    pieces: str  # regular expression: how text is cut before bytes are merged
    normalizer = None
    texts: tuple[str, ...] = ()  # what the tokenizer learns besides the questions and answers
    clips: tuple[str, ...] = ("motion",)  # the sorts of videos it learns from, of `scenes.SORTS`
    sliced: bool = False  # whether an image becomes an overview and slices, whose order says where they are
    reads_places: bool = False  # whether the language model is to read from positions where a token is in an image
    moves_with_token: tuple[int, ...] = (0,)  # columns beside a token of a place whose positions are exchanged with it
    reads_canvas: bool = False  # ... where it is given to whole slices
    reads_steps: bool = False  # ... and when, in a video
    reads_table: bool = False  # whether the tower is to read it from its position table instead
    any_size: bool = False  # whether it learns from scenes that were resized, too; see `target_size`
    spells_seconds: bool = False  # whether seconds are written digit by digit, so that prompts differ in length
    packing: int = 0  # frames of a video that share tokens, whose temporal ids say when each was taken; 0: none do
    recipe: dict = {}  # noqa: RUF012  where its training differs from `train_tiny.Recipe`
    by_adam: tuple[str, ...] = ("embed_tokens", "lm_head")  # parts of names of matrices that Muon does not suit
    release: str | None = None  # names the folder, where a family has several releases
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
        """What is measured: kind of question -> sort of scene."""
        return {kind: sort for kind, sort in scenes.MEASURED.items() if sort in ("picture", *self.clips)}

    def config(self, tokenizer: Tokenizer) -> dict:
        """The dict of `config.json`."""
        raise NotImplementedError

    def side_files(self, config: dict) -> dict[str, dict]:
        """File name -> contents, for every JSON file but the tokenizer's own."""
        raise NotImplementedError

    def hf_config(self, config: dict) -> PretrainedConfig:
        """transformers' config object of the same sizes."""
        return AutoConfig.for_model(**config)

    def train_tokenizer(self) -> Tokenizer:
        """Byte-level BPE over all 256 bytes, so that any text has tokens; each word of the questions is one token.

        Other spellings of the questions, and what people say besides, come in a few pieces a word.
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
        """(question, answer) texts that hold every word of every question and answer."""
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
        """The parameters of `TinyModel` (`visual.`, `model.`, `lm_head.`) under released names, in released shapes."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------ tower and text model

    def tower(self, config: dict) -> torch.nn.Module:
        """refvl's encoder with weights that do not matter."""
        raise NotImplementedError

    def init_weights(self, model: torch.nn.Module) -> None:
        """What should start differently than `TinyModel.init_weights` has it; is called after it."""

    def begin_anew(self, model: torch.nn.Module) -> None:
        """What should start so even if the model begins with an earlier checkpoint."""

    def patchify(self, pixels: Tensor) -> tuple[Tensor, list]:
        """(B, frames, H, W, 3) uint8 of one size -> the encoder's rows (N, C), and the layout of each medium."""
        grid = self.grid(pixels.shape)
        return batch_rows(pixels), [grid] * len(pixels)

    def grid(self, shape) -> tuple[int, int, int]:
        """(t, h, w) in patches of each medium in pixels of the shape (B, frames, H, W, 3)."""
        return max(1, shape[1] // 2), shape[2] // 14, shape[3] // 14

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """The (height, width) to which the side files have images, or videos of `frames`, resized."""
        raise NotImplementedError

    def merged(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """The same in tokens."""
        return grid[0], grid[1] // 2, grid[2] // 2

    def plan(self, tower, layouts: list, kept: dict):
        """Metadata of media that look alike; `kept` remembers it, since only sizes count."""
        key = (len(layouts), layouts[0])
        if key not in kept:
            kept[key] = tower.plan(layouts)
        return kept[key]

    # ---------------------------------------------------------------------------------------- the prompt

    def media_token(self, config: dict, media: str) -> int:
        """The token for a medium in the prompt that the chat template makes."""
        return config[f"{media}_token_id"]

    def pad_id(self, config: dict) -> int:
        return config["text_config"]["pad_token_id"]

    def place_media(
        self, ids: list[int], token: int, grid: tuple[int, int, int], seconds: tuple, encode: Callable
    ) -> tuple[list[int], list[MediaSpan]]:
        """`ids` with the medium in place of its one `token`, and the spans that it fills.

        encode: text -> ids. The spans may depend on the grid and on differences of seconds, not on the seconds.
        """
        start = ids.index(token)
        span = MediaSpan(start, *self.merged(grid), self.time_factor(seconds))
        return [*ids[:start], *[token] * span.num_tokens, *ids[start + 1 :]], [span]

    def time_factor(self, seconds: tuple) -> float:
        return 1.0

    def time_columns(self, spans: list[MediaSpan]) -> list[int]:
        """Indices of the words that say when each step of a video was, or of what else stands once for a step."""
        return []

    def positions(self, length: int, spans: list[MediaSpan]) -> Tensor:
        """(3, length) int64."""
        return get_mrope_input_positions(length, spans)[0]

    def deeper_features(self, deeper_BLW: Tensor) -> dict:
        """Arguments of the text model for what the tower's rows hold besides embeddings, as far as they do."""
        return {}

    def text_positions(self, positions_3BL: Tensor) -> Tensor:
        """As transformers' text model takes them; (B, L) where it has no M-RoPE."""
        return positions_3BL


def batch_rows(
    pixels: Tensor, patch: int = 14, merge: int = 2, frames: int = 2, mean=CLIP_MEAN, std=CLIP_STD
) -> Tensor:
    """(B, frames, H, W, 3) uint8 -> (N, C*Tp*P*P) float32 in merge-block order; a single frame is repeated."""
    mean, std = torch.tensor(mean), torch.tensor(std)
    x = pixels * (1 / (255 * std)) - mean / std
    if x.shape[1] == 1:
        x = x.expand(-1, frames, -1, -1, -1)
    batch, count, height, width, channels = x.shape
    h, w = height // (patch * merge), width // (patch * merge)
    x = x.reshape(batch, count // frames, frames, h, merge, patch, w, merge, patch, channels)
    return x.permute(0, 1, 3, 6, 4, 7, 9, 2, 5, 8).reshape(-1, channels * frames * patch**2)
