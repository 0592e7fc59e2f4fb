"""What the files of a MiniCPM-V checkpoint say of marks and slicing, read once when it is loaded.

The marks around media have fixed texts, unless preprocessor_config.json has others; their ids are the tokenizer's.
"""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from refvl.checks import read_json

MARKS = {
    "im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>",
    "im_id_start": "<image_id>", "im_id_end": "</image_id>", "unk": "<unk>",
}  # fmt: skip
TEXT_ID = -2  # of unknown tokens that stand for nothing
# ends of an answer; which of them there are depends on the vocabulary
TERMINATORS = ("</s>", "<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")
SLICING = ("max_slice_nums", "scale_resolution", "patch_size", "use_image_id", "slice_mode")


def marks_in(folder: Path) -> dict[str, str]:
    """The marks whose texts preprocessor_config.json gives; version 2.0 has no such file."""
    file = folder / "preprocessor_config.json"
    values = read_json(file) if file.is_file() else {}
    return {name: values[name] for name in MARKS if name in values}


def vocabulary_ids(tokenizer: Any, marks: dict[str, str], numbers_images: bool) -> dict[str, int]:
    """The id of each mark, {} without a tokenizer.

    The marks of a number have TEXT_ID if the vocabulary lacks them and images have no numbers, as before version 2.6.
    Raises ValueError naming any other mark that the vocabulary lacks.
    """
    ids = {} if tokenizer is None else {name: tokenizer.get_vocab().get(mark) for name, mark in marks.items()}
    for name, id_ in ids.items():
        if id_ is None:
            if numbers_images or not name.startswith("im_id"):
                raise ValueError(f"tokenizer: has no token {marks[name]!r}, which MiniCPM-V's prompts need")
            ids[name] = TEXT_ID
    return ids


def stop_ids(tokenizer: Any) -> list[int]:
    """Tokens of this vocabulary that end an answer."""
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    return [vocabulary[token] for token in TERMINATORS if token in vocabulary]


def slicing_of(config: PretrainedConfig, numbers_images: bool) -> dict[str, Any]:
    """What config.json says of slicing: at the top, or in `slice_config`. numbers_images: unless it says otherwise."""
    top = {name: getattr(config, name) for name in SLICING if getattr(config, name, None) is not None}
    nested = getattr(config, "slice_config", None) or {}
    return {"use_image_id": numbers_images} | top | {name: nested[name] for name in SLICING if name in nested}
