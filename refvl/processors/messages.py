"""The chat format of a prompt, checked before a file is opened or a template is applied.

prompt "What is it?", images, videos -> one user message: images, videos, text
prompt [{"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Why?"}]}]
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from refvl.pixels.media import Video

MAX_CHARACTERS = 2**21  # a limit for a request: longer than any context, and tokenised within seconds
SAMPLING = ("fps", "num_frames", "min_frames", "max_frames")  # keys of a video part in addition to its source
KEYS = {"text": {"text"}, "image": {"image", "path", "url"}, "video": {"video", "path", "url", *SAMPLING}}


def as_messages(prompt: str | Sequence[dict], images: Iterable = (), videos: Iterable = ()) -> list[dict]:
    """Return one user message with images, videos and the text, in that order, or check and return the given messages.

    Raises TypeError for a wrong type and ValueError for a wrong value, with the indices of the message and the part.
    """
    media = [*_media_parts("image", images), *_media_parts("video", videos)]
    if isinstance(prompt, str):
        text = {"type": "text", "text": _check_text(prompt, "prompt")}
        return [{"role": "user", "content": [*media, text]}]
    if not isinstance(prompt, (list, tuple)):
        raise TypeError(f"prompt: expected a string or a non-empty list of messages, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError("prompt: expected a string or a non-empty list of messages, got an empty one")
    if media:
        raise ValueError("prompt: a list of messages contains its own media; pass no images or videos with it")
    return _check_messages(prompt)


def media_of(messages: Sequence[dict]) -> list[tuple[str, Any, dict]]:
    """Return (kind, source, sampling options) of every item in checked messages, in order of appearance."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [
        (kind, part.get(kind, part.get("path", part.get("url"))), {key: part[key] for key in SAMPLING if key in part})
        for part in parts
        if (kind := part["type"]) != "text"
    ]


def texts_of(messages: Sequence[dict]) -> list[str]:
    """Return every string in checked messages that the caller wrote, including roles, in order."""
    texts = list[str]()
    for message in messages:
        content = message["content"]
        texts.append(message["role"])
        if isinstance(content, str):
            texts.append(content)
        else:
            texts += [part["text"] for part in content if part["type"] == "text"]
    return texts


def _media_parts(kind: str, media: Iterable) -> list[dict]:
    """Return message parts for media; a single path, image or video becomes a list; a bare array raises an error."""
    name = f"{kind}s"
    if isinstance(media, (str, Path, Image.Image, Video)):
        media = [media]
    if isinstance(media, (np.ndarray, Tensor)):
        raise TypeError(f"{name}: expected a list of media, got one {type(media).__name__}; put it into a list")
    if not isinstance(media, Iterable) or isinstance(media, (Mapping, bytes)):
        raise TypeError(f"{name}: expected a list of media, got {type(media).__name__}")
    return [{"type": kind, kind: item} for item in media]


def _check_messages(messages: Sequence) -> list[dict]:
    for i, message in enumerate(messages):
        _check_message(message, f"prompt[{i}]")
    if (length := sum(map(len, texts_of(messages)))) > MAX_CHARACTERS:
        raise ValueError(f"prompt: expected at most {MAX_CHARACTERS:,} characters in all messages, got {length:,}")
    return list(messages)


def _check_message(message, name: str) -> None:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise ValueError(f"{name}: expected a dict with 'role' and 'content', got {message!r}")
    if unknown := sorted(map(str, message.keys() - {"role", "content"})):
        raise ValueError(f"{name}: expected only 'role' and 'content', but also got {unknown}")
    if not isinstance(message["role"], str):
        raise TypeError(f"{name}.role: expected a string such as 'user', got {message['role']!r}")
    _check_text(message["role"], f"{name}.role")
    content = message["content"]
    if isinstance(content, str):
        _check_text(content, f"{name}.content")
    elif isinstance(content, (list, tuple)):
        for j, part in enumerate(content):
            _check_part(part, f"{name}.content[{j}]")
    else:
        raise TypeError(f"{name}.content: expected a string or a list of parts, got {content!r}")


def _check_part(part, name: str) -> None:
    if not isinstance(part, dict):
        raise TypeError(f"{name}: expected a dict such as {{'type': 'text', 'text': 'Hi'}}, got {part!r}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"{name}: expected type 'text', 'image' or 'video', got {kind!r}")
    sources = KEYS[kind] - set(SAMPLING)
    if len(given := part.keys() & sources) != 1:
        raise ValueError(f"{name}: expected one {kind} key from {sorted(sources)}, got {sorted(given) or 'none'}")
    if unknown := sorted(map(str, part.keys() - KEYS[kind] - {"type"})):
        raise ValueError(f"{name}: expected only the keys {sorted(KEYS[kind])} in {kind} parts, but also got {unknown}")
    if kind == "text":
        _check_text(part["text"], f"{name}.text")


def _check_text(text, name: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a string, got {text!r}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{name}: expected at most {MAX_CHARACTERS:,} characters, got {len(text):,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected text that UTF-8 can encode, got {text[error.start]!r}") from error
    return text
