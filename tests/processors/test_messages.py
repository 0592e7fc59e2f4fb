"""Prompts that are refused, and how: one sentence with the place. They are checked by hand-written cases."""

import numpy as np
import pytest
import torch
from PIL import Image

from refvl.processors.messages import as_messages, map_texts, media_of

PICTURE = Image.new("RGB", (60, 60))


def content(*parts) -> list[dict]:
    return [{"role": "user", "content": "Hi"}, {"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: expected messages with a part"),
        (["Hi"], r"prompt\[0\]: expected a dict with 'role', a string, and 'content', got Hi"),
        ([{"role": "user"}], r"prompt\[0\]: expected a dict with 'role'"),
        ([{"role": None, "content": "Hi"}], r"prompt\[0\]: expected a dict with 'role', a string"),
        ([{"role": "user", "content": 3}], r"\[0\]: expected a dict with .* 'content', got "),
        (content({"type": "text", "text": 3}), r"\[1\]\.content\[0\]: expected one key of \('text',\) with its text"),
        (content("Hi"), r"prompt\[1\]\.content\[0\]: expected a dict of type 'text', 'image'"),
        (content({"type": ["text"]}), r"content\[0\]: expected a dict of type 'text'"),
        (content({"type": "image"}), r"\[0\]: expected one key of .*'path', 'url', 'base64'\)"),
        (content({"type": "image", "image": PICTURE, "path": "x.png"}), r"expected one key of \('image', "),
        (content({"type": "video", "video": "x.mp4", 3: 4}), r"3: prompt\[1\]\.content\[0\] accepts no such argument"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(prompt, message):
    with pytest.raises(ValueError, match=message):
        as_messages(prompt)


def test_what_is_neither_text_nor_messages_is_refused():
    with pytest.raises(TypeError, match="prompt: expected a string or a list of messages, got NoneType"):
        as_messages(None)


@pytest.mark.parametrize("name", ["images", "videos"])
@pytest.mark.parametrize("media", [3, np.zeros((90, 90, 3), np.uint8), torch.zeros(3, 90, 90)])
def test_what_is_no_list_of_media_is_refused(name, media):
    with pytest.raises(TypeError, match=f"^{name}: expected a list of media, got one .*; put it into a list$"):
        as_messages("Hi", **{name: media})


def test_media_come_before_the_text_images_first():
    [message] = as_messages("why?", (p for p in [PICTURE, "a.png"]), "clip.mp4")
    assert [part["type"] for part in message["content"]] == ["image", "image", "video", "text"]
    assert list(media_of([message])) == [("image", PICTURE, {}), ("image", "a.png", {}), ("video", "clip.mp4", {})]
    assert as_messages("why?", PICTURE)[0]["content"][0]["image"] is PICTURE


def test_media_carry_their_options_and_messages_carry_their_media():
    messages = content({"type": "video", "path": "clip.mp4", "fps": 1, "max_frames": 8}, {"type": "text", "text": "x"})
    assert list(media_of(as_messages(messages))) == [("video", "clip.mp4", {"fps": 1, "max_frames": 8})]
    with pytest.raises(ValueError, match="expected messages with a part such as {'type'"):
        as_messages(messages, images=["x.png"])


def test_texts_are_changed_in_copies():
    messages = content({"type": "text", "text": "a"}, {"type": "image", "image": PICTURE})
    messages[0]["tool_calls"] = [{"arguments": {"<a>": ["b", 3]}}]
    changed = map_texts(messages, str.upper)
    assert [m["role"] for m in changed] == ["USER"] * 2 and changed[0]["content"] == "HI"
    assert changed[0]["tool_calls"] == [{"arguments": {"<A>": ["B", 3]}}]
    assert changed[1]["content"] == [{"type": "TEXT", "text": "A"}, {"type": "IMAGE", "image": PICTURE}]
    assert messages[1]["content"][0]["text"] == "a"
