"""The tokenizer of a checkpoint folder, and its chat template."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from refvl.checks import read_json

READ_TOKENIZER = partial(AutoTokenizer.from_pretrained, trust_remote_code=False)
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")


def load_tokenizer(folder: Path, read: Callable[[Path], Any] = READ_TOKENIZER, template: str | None = None) -> Any:
    """Return the tokenizer of a checkpoint folder, loaded by `read`; `template` is used if the folder has no template.

    Returns None if the folder has no tokenizer; raises ValueError if the tokenizer cannot be
    read or has no template. Code in the folder is never run; transformers renders a chat
    template in jinja2's sandbox.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = read(folder)
    except Exception as error:  # transformers and tokenizers can raise any kind of error
        raise ValueError(f"{folder}: its tokenizer or chat template cannot be read ({error})") from error
    file = folder / "chat_template.json"  # older checkpoints store the template in this file
    older = read_json(file).get("chat_template") if file.is_file() and not tokenizer.chat_template else None
    tokenizer.chat_template = tokenizer.chat_template or older or template
    if not str(tokenizer.chat_template or "").strip():
        wanted = "chat_template.jinja, or a chat template in tokenizer_config.json"
        raise ValueError(f"{folder}: expected {wanted}, got neither")
    return tokenizer
