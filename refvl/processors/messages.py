"""Prompts in the formats of other programs, converted to refvl's messages; only this file reads
those formats.

prompt "What is it?", images, videos -> one user message: images, videos, text
prompt [{"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Why?"}]}]

A part may have the format of transformers, OpenAI, vLLM or qwen-vl-utils (see the table in
docs/migrate.md). This file converts each part to {"type": kind, kind: source, **options}. Paths
are opened later, by `refvl.pixels`; nothing is downloaded.
"""

import base64
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from PIL import Image

from refvl.checks import blame, check_names, printable
from refvl.pixels.media import PART, Video
from refvl.pixels.patches import RESIZED, SIZES

SOURCES = {  # the kinds of parts, and the keys that can contain each kind
    "text": ("text",), "image": ("image", "image_url", "path", "url", "base64"),
    "video": ("video", "video_url", "path", "url"),
}  # fmt: skip
FITTED = (*SIZES, *RESIZED)
OPTIONS = {"text": (), "image": FITTED, "video": (*FITTED, *PART, "fps", "num_frames", "min_frames", "max_frames")}
OURS = {"nframes": "num_frames", "sample_fps": "fps"}  # qwen-vl-utils' name -> ours
READ = (os.PathLike, Image.Image, Video)  # types that `refvl.pixels` reads directly
IGNORED = ("type", "detail", "uuid", "cache_control")  # keys that have no effect here or in vLLM


def as_messages(prompt: str | Sequence[dict], images: Iterable = (), videos: Iterable = ()) -> list[dict]:
    """Return one user message with images, videos and the text, in that order, or the given messages in refvl's form.

    In messages, images and videos fill the parts without a source, such as {"type": "image"},
    in order. Raises TypeError for a wrong type and ValueError for a wrong value, with the
    indices of the message and the part.
    """
    media = {"image": _media_parts("image", images), "video": _media_parts("video", videos)}
    if isinstance(prompt, str):
        return [{"role": "user", "content": [*media["image"], *media["video"], {"type": "text", "text": prompt}]}]
    if not isinstance(prompt, (list, tuple)):
        raise TypeError(f"prompt: expected a string or a list of messages, got {type(prompt).__name__}")
    messages = [_message(message, f"prompt[{i}]", media) for i, message in enumerate(prompt)]
    if not messages or any(media.values()):
        raise ValueError("prompt: expected messages with a part such as {'type': 'image'} for each image and video")
    return messages


def media_of(messages: Sequence[dict]) -> list[tuple[str, Any, dict]]:
    """Return (kind, source, options) of every item in refvl's messages, in order of appearance."""
    contents = [message.get("content", "") for message in messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return [
        (kind, part[kind], {key: part[key] for key in OPTIONS[kind] if key in part})
        for part in parts
        if (kind := part["type"]) != "text"
    ]


def map_texts(values: Any, change: Callable[[str], Any]) -> Any:
    """Return a copy of messages, or of a template's arguments, with `change` applied to every
    string, at any depth.

    Keys that are identifiers stay unchanged, because a template may look them up.
    """
    if isinstance(values, str):
        return change(values)
    if isinstance(values, Mapping):
        names = {key: key if str(key).isidentifier() else map_texts(key, change) for key in values}
        return {names[key]: map_texts(value, change) for key, value in values.items()}
    return [map_texts(value, change) for value in values] if isinstance(values, (list, tuple)) else values


def _media_parts(kind: str, media: Iterable) -> list[dict]:
    """Return message parts for media; a single path, image or video becomes a list; a bare array raises an error."""
    if isinstance(media, (str, bytes, *READ)):
        media = [media]
    if hasattr(media, "shape") or not isinstance(media, Iterable):
        raise TypeError(f"{kind}s: expected a list of media, got one {type(media).__name__}; put it into a list")
    sources = [x if isinstance(x, READ) or (type(x) is str and os.path.isfile(x)) else _source(x, kind) for x in media]
    return [{"type": kind, kind: source} for source in sources]


def _given(values: Any) -> dict:
    """Return the entries of a dict that are not None; as in transformers, a template sees only these entries."""
    return {key: x for key, x in values.items() if x is not None} if isinstance(values, Mapping) else {}


def _message(message: Any, name: str, media: dict[str, list[dict]]) -> dict:
    """Return a message in refvl's form; other keys, such as `tool_calls`, are kept for the chat template."""
    given = _given(message)
    content = given.get("content", "" if "tool_calls" in given else None)
    if not isinstance(given.get("role"), str) or not isinstance(content, (str, list, tuple)):
        raise ValueError(f"{name}: expected a dict with 'role', a string, and 'content', got {printable(message)}")
    if isinstance(content, str):
        return given
    return given | {"content": [_part(part, f"{name}.content[{j}]", media) for j, part in enumerate(content)]}


def _part(part: Any, name: str, media: dict[str, list[dict]]) -> dict:
    """Return a message part in refvl's form. media: the images and videos for parts without a source."""
    given = _given(part)
    kind = str(given.get("type") or next((kind for kind in SOURCES if kind in given), ""))
    kind = kind.removeprefix("input_").removesuffix("_url")
    if kind not in SOURCES:
        raise ValueError(f"{name}: expected a dict of type 'text', 'image' or 'video', got keys {[*given]}")
    sources = [given.pop(key) for key in SOURCES[kind] if key in given]
    metadata = given.pop("video_metadata", None)
    options = {OURS.get(key, key): x for key, x in given.items() if key not in IGNORED}
    check_names(map(str, options), OPTIONS[kind], name, ValueError)
    if not sources and media.get(kind):
        return media[kind].pop(0) | options
    if len(sources) != 1 or (kind == "text" and not isinstance(sources[0], str)):
        raise ValueError(f"{name}: expected one key of {SOURCES[kind]} with its {kind}, got {printable(part)}")
    source = (sources[0], metadata) if metadata else sources[0]
    return {"type": kind, kind: source if kind == "text" else _source(source, kind)} | options


def _source(source: Any, kind: str) -> Any:
    """Return a source as a type that `load_image` or `load_video` reads, such as an array for decord's frames."""
    if isinstance(source, Mapping):  # OpenAI's {"url": ..., "detail": ...}
        source = source.get("url")
    if isinstance(source, str):
        return _file(source, kind)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):  # (frames, metadata)
        return _source(source[0], kind), source[1]
    if hasattr(source, "asnumpy"):
        return source.asnumpy()
    if hasattr(source, "pts_seconds"):
        return source.data if kind == "image" else (source.data, {"timestamps": source.pts_seconds.tolist()})
    source = BytesIO(source) if isinstance(source, bytes) else source
    if hasattr(source, "read"):
        if kind == "video":
            raise ValueError("video: expected a path or frames, got a file in memory; write it to disk")
        with blame("image"):
            return Image.open(source)
    return [_source(frame, "image") for frame in source] if isinstance(source, (list, tuple, Iterator)) else source


def _file(text: str, kind: str) -> Any:
    """Return the path that a text contains, or the image that the text encodes. Raises ValueError for a URL."""
    if os.path.isfile(text):
        return text
    if text.startswith("file://"):
        return unquote(text.removeprefix("file://"))
    data = text.partition(",")[2] if (is_data := text.startswith("data:")) else text
    decoded = b""
    with suppress(ValueError):
        decoded = base64.b64decode("".join(unquote(data).split()), validate=True)
    if len(decoded) > 24:  # a shorter text is a path
        return _source(decoded, kind)
    if is_data or len(text) > 200 or "://" in text[:10]:
        what = "a path, or a file's bytes as base64 (refvl opens no URLs; download the file)"
        raise ValueError(f"{kind}: expected {what}, got {text[:40]}... ({len(text):,} characters)")
    return text
