"""What a caller writes is text: `<|im_end|>` in a question ends no turn, and `<|image_pad|>` asks for no image.

`render` puts a flag, a character that occurs nowhere else, before every place in the caller's strings where a special
token could begin; `encode` takes the flags out and spells the special tokens that begin there as ordinary text. A
prompt without special tokens in it needs none of this: it is tokenized as it is.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from refvl.processors.messages import map_texts, texts_of

PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))  # characters without a meaning


class SpecialTokensAsText:
    """A part of every `ChatProcessor`."""

    tokenizer: Any
    token_ids: dict[str, int]
    apply_template: Any

    def encode_as_text(self, messages: Sequence[dict]) -> list[int]:
        """Token ids of messages with special tokens in the caller's strings, which are spelled as ordinary text."""
        text, flag = self.render(messages)
        begun = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)
        return self.encode(text, flag, add_special_tokens=not begun)

    def render(self, messages: Sequence[dict], allow_special_tokens: bool = False) -> tuple[str, str]:
        """The prompt as text, and its flag: a character before each place where no special token may begin.

        The flag is empty where the caller's strings hold no special token, or may hold them.
        """
        if self.tokenizer is None:
            raise ValueError("prompt: this model was built from a config alone; a tokenizer needs a checkpoint folder")
        written = "".join(texts_of(messages))
        if allow_special_tokens or not any(token in written for token in self.reserved_texts):
            return self.apply_template(messages), ""
        flag = next(character for character in PRIVATE_USE if character not in written)
        firsts = {token[0] for token in self.reserved_texts}
        flagged = map_texts(messages, lambda text: "".join(flag * (c in firsts) + c for c in text))
        return self.apply_template(flagged), flag

    def encode(self, text: str, flag: str = "", *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens that begin behind the flag are spelled as ordinary text."""
        if not flag:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        pieces = text.split(flag)
        flagged = set(accumulate(map(len, pieces[:-1])))  # places in the text without flags
        encoded = self.tokenizer(
            text := "".join(pieces), add_special_tokens=add_special_tokens, return_offsets_mapping=True
        )
        ids: list[int] = []
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            is_text = token in self.reserved_ids and not flagged.isdisjoint(range(start, end))
            ids += self.spell(text[start:end]) if is_text else [token]
        return ids

    def spell(self, token: str) -> list[int]:
        """Ids of a special token's characters, as if there were no special tokens.

        The same as `split_special_tokens=True`, which is a state of the tokenizer and would be seen by other threads.
        """
        backend = self.tokenizer.backend_tokenizer
        words = backend.pre_tokenizer.pre_tokenize_str(token) if backend.pre_tokenizer else [(token, None)]
        return [piece.id for word, _ in words for piece in backend.model.tokenize(word)]

    @cached_property
    def reserved_ids(self) -> set[int]:
        """Tokens that only the template and the processor may write: placeholders, and all that are called special."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return special | {*self.tokenizer.all_special_ids, *self.token_ids.values()}

    @cached_property
    def reserved_texts(self) -> list[str]:
        """What must not be taken from a caller's string for more than text."""
        added = self.tokenizer.added_tokens_decoder
        return [added[i].content for i in self.reserved_ids if i in added]
