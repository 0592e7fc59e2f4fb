"""refvl beside transformers' own processor and model, from the same messages and files: every stage is equal, or the
difference is listed. Oracle: transformers, which is given nothing that refvl computed.

Its video processors need torchvision, so prompts with videos are skipped where that is missing.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from random_models import HAS_5_23, MAKERS, MORE, OTHERS, random_folder, random_model, their_model

import refvl
from refvl.paths import DATA
from refvl.study import recording

RANDOM = np.random.default_rng(0)
SCENE, PHOTO = (DATA / "pictures" / name for name in ("scene.png", "coffee.jpg"))
CLIP, SHORT = (DATA / "clips" / name for name in ("bigbuckbunny.mp4", "scene.mp4"))
ODD, STRIP, SMALL = (Image.fromarray(RANDOM.integers(0, 256, (*s, 3), np.uint8)) for s in ((61, 83), (30, 200), (9, 5)))
FRAMES = RANDOM.integers(0, 256, (5, 45, 67, 3), np.uint8)
ANSWER = {"role": "assistant", "content": "Yes."}


def user(*parts) -> dict:
    """A user's turn; a part is words, an image, or (video, sampling options)."""
    made = {str: lambda x: {"type": "text", "text": x}, tuple: lambda x: {"type": "video", "video": x[0], **x[1]}}
    content = [made[type(x)](x) if type(x) in made else {"type": "image", "image": x} for x in parts]
    return {"role": "user", "content": content}


MESSAGES = {
    "image": [user(SCENE, "What is it?")],
    "photo": [user(PHOTO, "What is it?")],
    "words first": [user("Look:", PHOTO, "What is it?")],
    "two images": [user(SCENE, PHOTO, "Which is red?")],
    "words between": [user(SCENE, "or", ODD, "?")],
    "three images": [user(ODD, SCENE, STRIP, "Which?")],
    "odd sides": [user(ODD, "What is it?")],
    "a strip": [user(STRIP, "What is it?")],
    "a few pixels": [user(SMALL, "What is it?")],
    "two turns": [user(SCENE, "Is it red?"), ANSWER, user("Why?")],
    "an image in each turn": [user(SCENE, "Is it red?"), ANSWER, user(PHOTO, "And this?")],
    "a system's turn": [{"role": "system", "content": "Be brief."}, user(SCENE, "What is it?")],
    "special tokens in words": [user(SCENE, "What is <|im_end|><|endoftext|>?")],
    "clip": [user((CLIP, {}), "What moves?")],
    "few frames": [user((CLIP, {"num_frames": 6}), "What moves?")],
    "two clips": [user((SHORT, {}), (CLIP, {}), "Which is longer?")],
    "an odd number of frames": [user((FRAMES, {}), "What moves?")],
    "image and clip": [user(SCENE, "and", (SHORT, {}), "?")],
    "clip and image": [user((FRAMES, {}), SCENE, "Is it the same?")],
    "a clip, then an image": [user((SHORT, {}), "What moves?"), ANSWER, user(SCENE, "And here?")],
}
VIDEOS = list(MESSAGES)[13:]
NAMES = [name for name in MAKERS | MORE | OTHERS if name.lower().startswith(("qwen", "glm", "minicpm-v 4.6"))]
NAMES += ["MiniCPM-V 4.7"] * HAS_5_23
USUAL = {"Qwen2.5-VL", "qwen3_vl", "GLM-4.6V"}
QUICK = {"two images", "an image in each turn", "special tokens in words", "clip", "image and clip"}


def listed(name: str, asked: str) -> tuple[str, str]:
    """The first difference that is a choice, and the cause that is proven: see `refvl.study.releases`."""
    if asked == "special tokens in words":
        return "merge/input_ids", "a choice of refvl: special tokens in a user's text are text"
    if name.startswith("qwen3") and asked == "clip":
        return "merge/input_ids", "a choice of refvl: Qwen3-VL's videos without the outer special tokens"
    if name == "Qwen2.5-VL" and asked in VIDEOS:
        return "positions/ids", "larger_side_positions (releases), in b"
    if name.startswith(("GLM", "glm", "MiniCPM")) and asked == "few frames":
        return "decode media/0", ""  # in transformers, these classes ignore num_frames
    if name.startswith("MiniCPM") and asked in VIDEOS:
        return "merge/inputs_embeds", ""  # frames that transformers resizes by torchvision
    return "", ""


CASES = [
    pytest.param(name, asked, marks=[] if name in USUAL and asked in QUICK else pytest.mark.slow)
    for name in NAMES
    for asked in MESSAGES
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "asked"), CASES)
def test_every_stage_is_equal_or_listed(name, asked, monkeypatch):
    """With `outer_tokens`, Qwen3-VL's prompts are those of transformers as well."""
    if asked in VIDEOS:
        pytest.importorskip("torchvision")
    cached = SimpleNamespace(from_pretrained=lambda folder, dtype: their_model(name))
    monkeypatch.setattr(recording, "AutoModelForImageTextToText", cached)
    vlm, (stage, cause) = random_model(name), listed(name, asked)
    if name.startswith("qwen3"):
        monkeypatch.setattr(vlm.processor, "outer_tokens", asked != "clip")
    run = vlm.trace(MESSAGES[asked], max_new_tokens=2)
    theirs = recording.record_transformers(str(random_folder(name)), vlm, run, max_new_tokens=2)
    compared = refvl.compare(run, theirs, rtol=1e-3, model=vlm)
    if compared.first is None:
        assert not stage or name.startswith("MiniCPM"), asked  # of whose frames some need no resize
        stages = {row.split("/")[0] for row in compared.not_in_both}
        both_of_glm = "glm" in name.lower() and "image" in asked and asked in VIDEOS
        expected = {"patchify", "encode"} if name.startswith("MiniCPM") and stages else set()
        assert stages == ({*["encode", "merge", "positions", "prefill"], "decode tokens"} if both_of_glm else expected)
        assert compared.verdict.startswith("undecided: " if stages else "no difference")
    else:
        assert compared.first.name == stage and compared.first.cause.startswith(cause), compared


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in NAMES])
def test_families_without_a_processor_in_transformers_are_named(name):
    run = random_model(name).trace("Hi", max_new_tokens=1)
    with pytest.raises(ValueError, match=f"a processor in transformers, got {random_model(name).family.name}"):
        recording.record_transformers("tiny-glm4v", random_model(name), run)


def test_what_videos_need_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(recording, "find_spec", lambda name: None)
    vlm = random_model("GLM-4.1V")
    with pytest.raises(ImportError, match=r"^with: .* need torchvision: pip install 'refvl\[compare\]'$"):
        recording.record_transformers("tiny-glm4v", vlm, vlm.trace(MESSAGES["an odd number of frames"]))
