"""What a caller writes is text: `<|im_end|>` in a question ends no turn, and `<|image_pad|>` asks for no image.

`render_flagged` puts a flag, a character that occurs nowhere else, before every place in the caller's strings where a
special token could begin. `encode_flagged` takes the flags out and spells the special tokens that begin there as
ordinary text. A prompt without special tokens in it needs none of this: it is tokenized as it is.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))  # characters without a meaning


class SpecialTokensAsText:
    """A part of every `ChatProcessor`."""

    def render_flagged(self: Any, messages: Sequence[dict], written: str) -> tuple[str, str]:
        """The prompt as text with flags in it, and the flag. written: all strings of the caller."""
        flag = next(character for character in PRIVATE_USE if character not in written)
        firsts = {token[0] for token in self.reserved_texts}
        flagged = map_texts(messages, lambda text: "".join(flag * (c in firsts) + c for c in text))
        return self.apply_template(flagged), flag

    def encode_flagged(self: Any, text: str, flag: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text with flags; special tokens that begin after one are spelled as ordinary text."""
        pieces = text.split(flag)
        flagged = set(accumulate(map(len, pieces[:-1])))  # places in the text without flags
        text = "".join(pieces)
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        ids: list[int] = []
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            is_text = token in self.reserved_ids and not flagged.isdisjoint(range(start, end))
            ids += self.spell(text[start:end]) if is_text else [token]
        return ids

    def spell(self: Any, token: str) -> list[int]:
        """Ids of a special token's characters, as if there were no special tokens.

        The same as `split_special_tokens=True`, which is a state of the tokenizer and would be seen by other threads.
        """
        backend = self.tokenizer.backend_tokenizer
        words = backend.pre_tokenizer.pre_tokenize_str(token) if backend.pre_tokenizer else [(token, None)]
        return [piece.id for word, _ in words for piece in backend.model.tokenize(word)]

    @cached_property
    def reserved_ids(self: Any) -> set[int]:
        """Tokens that only the template and the processor may write: placeholders, and all that are called special."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return special | {*self.tokenizer.all_special_ids, *self.token_ids.values()}

    @cached_property
    def reserved_texts(self: Any) -> list[str]:
        """What must not be taken from a caller's string for more than text."""
        added = self.tokenizer.added_tokens_decoder
        return [added[i].content for i in self.reserved_ids if i in added]


def map_texts(messages: Sequence[dict], change: Callable[[str], Any]) -> list[dict]:
    """Copies of checked messages with `change` of every string that the caller wrote, roles included, in its place."""

    def changed(content):
        if isinstance(content, str):
            return change(content)
        return [part | {"text": change(part["text"])} if part["type"] == "text" else part for part in content]

    return [{"role": change(message["role"]), "content": changed(message["content"])} for message in messages]
