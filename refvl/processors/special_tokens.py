"""A caller's strings are text: `<|im_end|>` in a question does not end a turn, and `<|image_pad|>` is not an image.

`render_flagged` inserts a flag, a character that occurs nowhere else, wherever a special token could begin in the
caller's strings. `encode_flagged` removes the flags and tokenises the special tokens that begin there as plain text. A
prompt without special tokens skips these steps and is tokenised unchanged.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))  # characters without an assigned meaning


class SpecialTokensAsText:
    """The part of a `ChatProcessor` that tokenises a caller's special tokens as plain text."""

    def render_flagged(self: Any, messages: Sequence[dict], written: str) -> tuple[str, str]:
        """Return the prompt as text that contains flags, and the flag. written: all strings that the caller wrote."""
        flag = next(character for character in PRIVATE_USE if character not in written)
        firsts = {token[0] for token in self.reserved_texts}
        flagged = map_texts(messages, lambda text: "".join(flag * (c in firsts) + c for c in text))
        return self.apply_template(flagged), flag

    def encode_flagged(self: Any, text: str, flag: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a flagged text; a special token that starts at a flag is tokenised as plain text."""
        pieces = text.split(flag)
        flagged = set(accumulate(map(len, pieces[:-1])))  # offsets of the flags in the text without flags
        text = "".join(pieces)
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        ids: list[int] = []
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            is_text = token in self.reserved_ids and not flagged.isdisjoint(range(start, end))
            ids += self.spell(text[start:end]) if is_text else [token]
        return ids

    def spell(self: Any, token: str) -> list[int]:
        """Return the ids of a special token's characters, as if there were no special tokens.

        This equals `split_special_tokens=True`, but that setting is part of the tokenizer, so it would affect other
        threads.
        """
        backend = self.tokenizer.backend_tokenizer
        words = backend.pre_tokenizer.pre_tokenize_str(token) if backend.pre_tokenizer else [(token, None)]
        return [piece.id for word, _ in words for piece in backend.model.tokenize(word)]

    @cached_property
    def reserved_ids(self: Any) -> set[int]:
        """The ids that only the template and the processor may write: placeholders and all special tokens."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return special | {*self.tokenizer.all_special_ids, *self.token_ids.values()}

    @cached_property
    def reserved_texts(self: Any) -> list[str]:
        """The strings that count as plain text if a caller writes them."""
        added = self.tokenizer.added_tokens_decoder
        return [added[i].content for i in self.reserved_ids if i in added]


def map_texts(messages: Sequence[dict], change: Callable[[str], Any]) -> list[dict]:
    """Copy checked messages with `change` applied to every string that the caller wrote, including roles."""

    def changed(content):
        if isinstance(content, str):
            return change(content)
        return [part | {"text": change(part["text"])} if part["type"] == "text" else part for part in content]

    return [{"role": change(message["role"]), "content": changed(message["content"])} for message in messages]
