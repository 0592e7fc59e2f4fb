"""The special tokens of MiniCPM-V's prompts, and the settings in a checkpoint's files; both are read once on loading.

The special tokens enclose query tokens. Their texts are fixed unless preprocessor_config.json sets different ones; the
tokenizer determines their ids.
"""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from refvl.checks import read_json

MARKS = {
    "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
    "im_id_start": "<image_id>", "im_id_end": "</image_id>", "unk": "<unk>",
}  # fmt: skip
TEXT_ID = -2  # the id that represents unknown tokens in the text
# tokens that end an answer; the vocabulary determines which of them exist
TERMINATORS = ("</s>", "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")
SLICING = ("max_slice_nums", "scale_resolution", "patch_size", "use_image_id", "slice_mode")


def marks_in(folder: Path) -> dict[str, str]:
    """Return the special tokens whose texts preprocessor_config.json sets; version 2.0 has no such file."""
    file = folder / "preprocessor_config.json"
    values = read_json(file) if file.is_file() else {}
    return {name: values[name] for name in MARKS if name in values}


def ids_of_marks(vocabulary: dict[str, int], marks: dict[str, str], numbers_images: bool) -> dict[str, int]:
    """Return the id of each special token.

    The tokens around a number get TEXT_ID if the vocabulary lacks them and images are not numbered (before 2.6).
    Raises ValueError, with the token's name, if the vocabulary lacks any other special token.
    """
    for name, mark in marks.items():
        if mark not in vocabulary and (numbers_images or not name.startswith("im_id")):
            raise ValueError(f"tokenizer: has no special token {mark!r}, which MiniCPM-V's prompts need")
    return {name: vocabulary.get(mark, TEXT_ID) for name, mark in marks.items()}


def slicing_of(config: PretrainedConfig, numbers_images: bool) -> dict[str, Any]:
    """Return the slicing settings in config.json, at the top level or in `slice_config`.

    numbers_images: whether images are numbered if the file does not set this.
    """
    top = {name: getattr(config, name) for name in SLICING if getattr(config, name, None) is not None}
    nested = getattr(config, "slice_config", None) or {}
    return {"use_image_id": numbers_images} | top | {name: nested[name] for name in SLICING if name in nested}
