"""Prompts that are refused, and how: one sentence with the place. They are checked by hand-written cases."""

import numpy as np
import pytest
import torch
from PIL import Image

from refvl.processors.messages import as_messages, media_of
from refvl.processors.special_tokens import map_texts

PICTURE = Image.new("RGB", (60, 60))


def content(*parts) -> list[dict]:
    return [{"role": "user", "content": "Hi"}, {"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (None, TypeError, "prompt: expected a string or a non-empty list of messages, got NoneType"),
        (3, TypeError, "prompt: expected a string or a non-empty list of messages, got int"),
        (b"Hi", TypeError, "prompt: expected a string or a non-empty list of messages, got bytes"),
        ({"role": "user", "content": "Hi"}, TypeError, "prompt: expected a string or a non-empty list"),
        ([], ValueError, "prompt: expected a string or a non-empty list of messages, got an empty one"),
        (["Hi"], ValueError, r"prompt\[0\]: expected a dict with 'role' and 'content', got 'Hi'"),
        ([{"role": "user"}], ValueError, r"prompt\[0\]: expected a dict with 'role' and 'content'"),
        ([{"role": "user", "content": "Hi", "name": "x"}], ValueError, r"prompt\[0\]: .* also got \['name'\]"),
        ([{"role": None, "content": "Hi"}], TypeError, r"prompt\[0\]\.role: expected a string such as 'user'.*None"),
        ([{"role": ["user"], "content": "Hi"}], TypeError, r"prompt\[0\]\.role: expected a string"),
        ([{"role": "user", "content": None}], TypeError, r"prompt\[0\]\.content: expected a string or a list.*None"),
        ([{"role": "user", "content": 3}], TypeError, r"prompt\[0\]\.content: expected a string or a list of parts"),
        ([{"role": "user", "content": text_part("Hi")} for text_part in [lambda t: {"type": "text", "text": t}]],
         TypeError, r"prompt\[0\]\.content: expected a string or a list of parts, got {'type'"),
        (content("Hi"), TypeError, r"prompt\[1\]\.content\[0\]: expected a dict such as {'type': 'text'"),
        (content([{"type": "text", "text": "Hi"}]), TypeError, r"prompt\[1\]\.content\[0\]: expected a dict"),
        (content({"text": "Hi"}), ValueError, r"prompt\[1\]\.content\[0\]: expected type 'text', 'image' or 'video'"),
        (content({"type": ["text"]}), ValueError, r"content\[0\]: expected type 'text', 'image' or 'video', got \['te"),
        (content({"type": "audio", "audio": "x"}), ValueError, r"content\[0\]: expected type .*, got 'audio'"),
        (content({"type": "text"}), ValueError, r"content\[0\]: expected one text key from \['text'\], got none"),
        (content({"type": "text", "text": None}), TypeError, r"content\[0\]\.text: expected a string, got None"),
        (content({"type": "text", "text": 3}), TypeError, r"prompt\[1\]\.content\[0\]\.text: expected a string, got 3"),
        (content({"type": "text", "text": "x"}, {"type": "image"}), ValueError,
         r"prompt\[1\]\.content\[1\]: expected one image key from \['image', 'path', 'url'\], got none"),
        (content({"type": "image", "image": PICTURE, "path": "x.png"}), ValueError,
         r"expected one image key from .*, got \['image', 'path'\]"),
        (content({"type": "image", "image": PICTURE, "fps": 2}), ValueError,
         r"content\[0\]: expected only .* in image parts, but also got \['fps'\]"),
        (content({"type": "text", "text": "x", "image": PICTURE}), ValueError,
         r"in text parts, but also got \['image'\]"),
        (content({"type": "video", "video": "x.mp4", 3: 4}), ValueError, r"in video parts, but also got \['3'\]"),
        ("caf\udce9", ValueError, r"prompt: expected text that UTF-8 can encode, got '\\udce9'"),
        ([{"role": "user", "content": "caf\udce9"}], ValueError, r"prompt\[0\]\.content: expected text that UTF-8 can"),
        ([{"role": "\udce9", "content": "x"}], ValueError, r"prompt\[0\]\.role: expected text that UTF-8 can"),
        (content({"type": "text", "text": "\ud800"}), ValueError, r"content\[0\]\.text: expected text that UTF-8 can"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_with_its_place(prompt, error, message):
    with pytest.raises(error, match=message):
        as_messages(prompt)


@pytest.mark.parametrize("name", ["images", "videos"])
@pytest.mark.parametrize(
    ("media", "message"),
    [
        (None, "expected a list of media, got NoneType"),
        (3, "expected a list of media, got int"),
        ({"a": 1}, "expected a list of media, got dict"),
        (b"x.png", "expected a list of media, got bytes"),
        (np.zeros((90, 90, 3), np.uint8), "expected a list of media, got one ndarray; put it into a list"),
        (torch.zeros(3, 90, 90), "expected a list of media, got one Tensor; put it into a list"),
        (torch.zeros(90, 90, 3), "expected a list of media, got one Tensor; put it into a list"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_media_is_refused(name, media, message):
    with pytest.raises(TypeError, match=f"^{name}: {message}$"):
        as_messages("Hi", **{name: media})
    with pytest.raises(TypeError, match=f"^{name}: {message}$"):
        as_messages([{"role": "user", "content": "Hi"}], **{name: media})


def test_media_come_before_the_text_images_first():
    [message] = as_messages("why?", (p for p in [PICTURE, "a.png"]), "clip.mp4")
    assert [part["type"] for part in message["content"]] == ["image", "image", "video", "text"]
    assert list(media_of([message])) == [("image", PICTURE, {}), ("image", "a.png", {}), ("video", "clip.mp4", {})]
    assert as_messages("why?", PICTURE)[0]["content"][0]["image"] is PICTURE


def test_media_carry_their_options_and_messages_carry_their_media():
    messages = content({"type": "video", "path": "clip.mp4", "fps": 1, "max_frames": 8}, {"type": "text", "text": "x"})
    assert list(media_of(as_messages(messages))) == [("video", "clip.mp4", {"fps": 1, "max_frames": 8})]
    with pytest.raises(ValueError, match="pass no images or videos with it"):
        as_messages(messages, images=["x.png"])


def test_texts_are_changed_in_copies():
    messages = content({"type": "text", "text": "a"}, {"type": "image", "image": PICTURE})
    changed = map_texts(messages, str.upper)
    assert [m["role"] for m in changed] == ["USER"] * 2 and changed[0]["content"] == "HI"
    assert changed[1]["content"] == [{"type": "text", "text": "A"}, {"type": "image", "image": PICTURE}]
    assert messages[1]["content"][0]["text"] == "a"
