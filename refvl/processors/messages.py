"""The chat format of a prompt, checked before a file is opened or a template is applied.

prompt "What is it?", images, videos -> one user message: images, videos, text
prompt [{"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Why?"}]}]
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from refvl.pixels.media import Video

SAMPLING = {"fps", "num_frames", "min_frames", "max_frames"}  # keys of a video part in addition to its source
KEYS = {"text": {"text"}, "image": {"image", "path", "url"}, "video": {"video", "path", "url"}}


def as_messages(prompt: str | Sequence[dict], images: Iterable = (), videos: Iterable = ()) -> list[dict]:
    """Return one user message with images, videos and the text, in that order, or check and return the given messages.

    Raises TypeError for a wrong type and ValueError for a wrong value, with the indices of the message and the part.
    """
    media = [*_media_parts("image", images), *_media_parts("video", videos)]
    if isinstance(prompt, str):
        return [{"role": "user", "content": [*media, {"type": "text", "text": prompt}]}]
    if not isinstance(prompt, (list, tuple)):
        raise TypeError(f"prompt: expected a string or a list of messages, got {type(prompt).__name__}")
    if media or not prompt:
        raise ValueError("prompt: expected messages that contain their own media, and no images or videos with them")
    for i, message in enumerate(prompt):
        _check_message(message, f"prompt[{i}]")
    return list(prompt)


def media_of(messages: Sequence[dict]) -> list[tuple[str, Any, dict]]:
    """Return (kind, source, sampling options) of every item in checked messages, in order of appearance."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [
        (kind, part.get(kind, part.get("path", part.get("url"))), {key: part[key] for key in part if key in SAMPLING})
        for part in parts
        if (kind := part["type"]) != "text"
    ]


def map_texts(messages: Sequence[dict], change: Callable[[str], Any]) -> list[dict]:
    """Copy checked messages with `change` applied to every string that the caller wrote, including roles."""

    def changed(content):
        if isinstance(content, str):
            return change(content)
        return [part | {"text": change(part["text"])} if part["type"] == "text" else part for part in content]

    return [{"role": change(message["role"]), "content": changed(message["content"])} for message in messages]


def _media_parts(kind: str, media: Iterable) -> list[dict]:
    """Return message parts for media; a single path, image or video becomes a list; a bare array raises an error."""
    if isinstance(media, (str, Path, Image.Image, Video)):
        media = [media]
    if isinstance(media, (np.ndarray, Tensor)) or not isinstance(media, Iterable):
        raise TypeError(f"{kind}s: expected a list of media, got one {type(media).__name__}; put it into a list")
    return [{"type": kind, kind: item} for item in media]


def _check_message(message, name: str) -> None:
    if not isinstance(message, dict) or message.keys() != {"role", "content"} or not isinstance(message["role"], str):
        raise ValueError(f"{name}: expected a dict with only 'role', a string, and 'content', got {message!r}")
    content = message["content"]
    if isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)):
        raise TypeError(f"{name}.content: expected a string or a list of parts, got {content!r}")
    for j, part in enumerate(content):
        _check_part(part, f"{name}.content[{j}]")


def _check_part(part, name: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"{name}: expected a dict of type 'text', 'image' or 'video', got {part!r}")
    sources, given = KEYS[kind], part.keys() - {"type"} - (SAMPLING if kind == "video" else set())
    if len(given) != 1 or not given <= sources:
        raise ValueError(f"{name}: expected one {kind} key from {sorted(sources)}, got {sorted(map(str, given))}")
    if kind == "text" and not isinstance(part["text"], str):
        raise TypeError(f"{name}.text: expected a string, got {part['text']!r}")
