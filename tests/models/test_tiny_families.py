"""What holds of every small model that ships: its folder, its training, its answers, and what is
held out.

The models are asked here about scenes 100,000 and following of the split "test": they are neither
among those they were trained on, nor among those that chose the recipe, nor among those of
`data/measurements`.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from prompts import inputs_of
from shipped import is_read_here, shipped

import refvl
from data.training import (
    demo_scenes,
    evaluate_step3,
    evaluate_tiny,
    everyday,
    pages,
    photos,
    run,
    scenes,
    train_step3,
    train_tiny,
)
from data.training.tiny_family import STEP3, TinyMiniCPMV, family_names, find_family
from refvl.paths import DATA
from refvl.pixels.media import load_image, load_video

FIRST, SAMPLE, BAR = 100_000, 16, 0.95
SCENES = [family for family in map(find_family, family_names()) if is_read_here(family.folder.name)]
ALL = [*SCENES, STEP3]
KINDS = [(family, kind) for family in SCENES for kind in evaluate_tiny.kinds_of(family)]
TABLE = find_family("glm4v_table")
OF_TABLE = ("place", evaluate_tiny.MIRRORED, "place, table of zeros")  # its other kinds are those of GLM
KINDS += [(TABLE, kind) for kind in OF_TABLE]
LISTED = [family for family in ALL if family.folder.name != "tiny-minicpmv-4_7"]  # whose released files are known


def name_of(value) -> str:
    return getattr(value, "name", str(value))


# ---------------------------------------------------------------------------------------------- held out


@pytest.mark.parametrize("sort", scenes.SORTS)
def test_no_held_out_scene_can_be_drawn_in_training(sort, monkeypatch):
    """Every scene comes from one stream of numbers, named by split, index and sort: no two splits
    share a stream.

    Oracle: the names of the streams, as numpy gets them; and for a part of them the scenes
    themselves.
    """
    streams: dict[tuple, str] = {}
    make = np.random.default_rng

    def watched(seed):
        assert seed[0] == scenes.SEED and streams.setdefault(tuple(seed), split) == split
        return make(seed)

    monkeypatch.setattr(np.random, "default_rng", watched)
    drawn = {}
    for split in scenes.SPLITS:
        for index in range(60):
            scene = scenes.draw_sort(sort, split, index)
            assert drawn.setdefault(scene, split) == split
    assert len(drawn) == 60 * len(scenes.SPLITS)
    assert {seed[1] for seed, split in streams.items() if split == "train"} == {scenes.SPLITS["train"]}
    assert len(set(scenes.SPLITS.values())) == len(scenes.SPLITS)


def test_no_held_out_timing_can_be_drawn_in_training():
    """Seconds, rates and temporal ids of training and of the evaluation differ by a rule, whatever
    their order."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        assert not scenes.is_held_out(10 * s for s in scenes.draw_seconds(rng, scenes.STEPS, held_out=False))
        assert not scenes.is_held_out(round(10 * s) for s in train_tiny.tell_rate(scenes.FRAMES, rng))
        for frames in (train_tiny.WHOLE, *train_tiny.FRAMES_SHOWN):
            assert not scenes.is_held_out(train_tiny.draw_times(len(frames), TinyMiniCPMV.packing, rng))
    for scene in (scenes.draw_change("train", i) for i in range(100)):
        assert not scenes.is_held_out(10 * s for s in scene.seconds)
        told = train_tiny.tell_other_seconds(scene, rng)
        assert not scenes.is_held_out(10 * s for s in told.seconds)
    for scene in (scenes.draw_change("test", i) for i in range(100)):
        assert scenes.is_held_out(10 * s for s in scene.seconds)
    assert scenes.is_held_out(10 * s for s in scenes.SECONDS), "of the clips that are asked about motion"


def test_no_held_out_sentence_can_be_drawn_in_training(monkeypatch):
    """300 sentences, and `draw` throws them away even if the lists held them."""
    held_out = {everyday.normal(text) for text in everyday.held_out()}
    assert len(held_out) == len(everyday.held_out()) == 300
    rng = np.random.default_rng(0)
    drawn = [everyday.draw(rng) for _ in range(10_000)]
    assert not held_out & {everyday.normal(text) for text in drawn}
    assert len(set(drawn)) > 5000
    monkeypatch.setattr(everyday, "SENTENCES", (*everyday.held_out()[:50], "a sentence that is not held out"))
    drawn = {everyday.normal(everyday.draw(rng)) for _ in range(2000)}
    assert "a sentence that is not held out" in drawn and not drawn & held_out


# ---------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("family", [*ALL, TABLE], ids=name_of)
def test_the_weights_are_those_of_the_log(family):
    """The log begins with the recipe of the code and ends with the digest of the weights."""
    log = (family.folder / "training_log.jsonl").read_text()
    first, *rows = map(json.loads, log.splitlines())
    recipe = train_step3.Recipe() if family is STEP3 else train_tiny.recipe_of(family)
    assert first["model"] == family.name and type(recipe)(**first["recipe"]) == recipe
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] == recipe.steps
    assert rows[-1]["weights_sha256"] == run.digest(family.folder)


def test_a_variant_differs_in_its_weights_alone():
    """Oracle: the other files of the folder with which its training began."""
    first = find_family("glm4v").folder
    names = {file.name for file in first.iterdir()}
    assert names == {file.name for file in TABLE.folder.iterdir()}
    same = {name for name in names if (first / name).read_bytes() == (TABLE.folder / name).read_bytes()}
    assert names - same == {"model.safetensors", "training_log.jsonl"}


CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "glm4v": "Glm4vForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}  # fmt: skip
IN_TRANSFORMERS = [find_family(name) for name in CLASSES]


@pytest.mark.parametrize("family", IN_TRANSFORMERS, ids=name_of)
def test_transformers_loads_it_and_nothing_is_missing(family):
    """So every weight has the name of the releases; none is shared with another."""
    from_pretrained = getattr(transformers, CLASSES[family.name]).from_pretrained
    loaded, info = from_pretrained(family.folder, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    assert not torch.equal(loaded.lm_head.weight, loaded.get_input_embeddings().weight)


@pytest.mark.parametrize("family", ALL, ids=name_of)
def test_the_measurements_are_of_these_weights_and_meet_their_goals(family):
    record = json.loads(family.measurements.read_text())
    assert record["weights_sha256"] == run.digest(family.folder)
    assert record["n"] >= 1000 and record["split"] == "test"
    if family is STEP3:
        assert not evaluate_step3.missed(record["accuracy"])
        return
    measured = {kind: record["accuracy"][kind] for kind in evaluate_tiny.kinds_of(family)}
    assert not evaluate_tiny.missed(family, measured)
    text = (DATA / "README.md").read_text()
    assert all(f"| {share:.1%} |" in text for share in measured.values())


# ----------------------------------------------------------------------------------------------- answers


def within_goal(family, kind: str, asked: list[evaluate_tiny.Asked]) -> bool:
    """Whether a sample is no further from the goal than three standard deviations of a model just
    within it."""
    least, most = evaluate_tiny.goal_of(family, kind)
    low, high = (3 * (p * (1 - p) / len(asked)) ** 0.5 for p in (least, most))
    return least - low <= evaluate_tiny.share(asked) <= most + high


@pytest.mark.parametrize("family, kind", KINDS, ids=name_of)
def test_held_out_questions(family, kind):
    """Oracle: the scene's own answer, letter by letter; a sample of what is measured, on other
    scenes."""
    model, clips = shipped(family.folder.name), bool(family.clips)
    asked = evaluate_tiny.evaluate(model, kind, SAMPLE, first=FIRST, clips=clips)
    assert within_goal(family, kind, asked), [(a.question, a.said) for a in asked if not a.is_right]


@pytest.mark.parametrize("family", ALL, ids=name_of)
@pytest.mark.parametrize("text", ["Hello!", "Describe the image.", ""])
def test_other_questions_get_a_sentence_that_says_what_to_ask(family, text):
    """About a held-out scene, a photograph, and nothing at all."""
    model = shipped(family.folder.name)
    expected = pages.HELP if family is STEP3 else scenes.HELP
    shown = [demo_scenes.PICTURE, DATA / "pictures/coffee.jpg"] if family in SCENES else [DATA / "pictures/page.png"]
    for images in ([], *([image] for image in shown)):
        assert model.chat(text, images=images, max_new_tokens=32) == expected, (text, images)


@pytest.mark.parametrize("family", SCENES, ids=name_of)
@pytest.mark.parametrize("clip", [False, True])
def test_the_demo_files_are_answered(family, clip):
    """Oracle: the scene they were rendered from; the clip went through H.264."""
    if clip and not family.clips:
        pytest.skip("not asked about videos")
    scene = demo_scenes.demo_clip() if clip else demo_scenes.demo_picture()
    media = {"videos": [demo_scenes.CLIP]} if clip else {"images": [demo_scenes.PICTURE]}
    pixels = load_video(demo_scenes.CLIP).frames if clip else np.asarray(load_image(demo_scenes.PICTURE))
    assert abs(pixels.astype(int) - scenes.render(scene)).mean() < (6 if clip else 2)
    for kind in ("motion", "color") if clip else ("color", "shape", "place"):
        for question in scenes.all_questions(scene)[kind]:
            assert shipped(family.folder.name).chat(question.text, **media, max_new_tokens=8) == question.answer


@pytest.mark.parametrize("family", SCENES, ids=name_of)
def test_photographs_are_recognised(family):
    """They were in the training."""
    model = shipped(family.folder.name)
    for name, answer in photos.PICTURES.items():
        assert model.chat("What is in the picture?", images=[DATA / "pictures" / name], max_new_tokens=8) == answer
    clip = DATA / "clips" / photos.CLIP
    if family.prunable:
        assert model.chat("What is in the clip?", videos=[clip], max_new_tokens=8) == photos.CLIP_ANSWER


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", IN_TRANSFORMERS, ids=name_of)
def test_ids_equal_transformers_generate(family, dtype):
    """Oracle: transformers' whole model on the pixels and the prompt that refvl made."""
    model = refvl.load(family.folder, device="cpu", dtype=dtype, progress=False)
    oracle = getattr(transformers, CLASSES[family.name]).from_pretrained(family.folder, dtype=dtype).eval()
    for kind in ("place", "motion", *(["change"] if "change" in family.clips else [])):
        for request in evaluate_tiny.requests_for(kind, 2, first=FIRST):
            trace = model.trace(**request.arguments, max_new_tokens=8)
            inputs = inputs_of(model, trace)
            theirs = oracle.generate(**inputs, max_new_tokens=8, do_sample=False)
            assert theirs[0, len(trace.full_ids) :].tolist() == trace.token_ids


TELL_SECONDS = [find_family(name) for name in ("glm4v", "qwen3_vl")]


@pytest.mark.parametrize("family", TELL_SECONDS, ids=name_of)
def test_the_second_is_read_from_the_text(family):
    """The same frames, told other seconds, now and then with a digit more: the answer is the new
    second."""
    requests = [request.arguments for request in evaluate_tiny.requests_for("change", 30, first=FIRST)]
    drawn = [scenes.draw_change("test", FIRST + index) for index in range(30)]
    told = [replace(scene, seconds=tuple(s + 1 for s in scene.seconds)) for scene in drawn]
    for request, scene in zip(requests, told, strict=True):
        before, request["videos"] = request["videos"][0], [evaluate_tiny.sampled_clip(scene)]
        assert np.array_equal(request["videos"][0].frames, before.frames)
    after = shipped(family.folder.name).chat_batch(requests, max_new_tokens=8)
    right = [answer == str(scene.seconds[scene.step]) for answer, scene in zip(after, told, strict=True)]
    assert sum(right) >= BAR * len(requests)


# ------------------------------------------------------------------------------------ loading elsewhere

RELEASED = json.loads((Path(__file__).parent / "released_folders.json").read_text())


def keys_of(values: dict, before: str = "") -> set[str]:
    """Names of all keys, nested ones behind a dot."""
    found = set()
    for key, value in values.items():
        found |= {before + key} | (keys_of(value, f"{before}{key}.") if isinstance(value, dict) else set())
    return found


@pytest.mark.parametrize("family", LISTED, ids=name_of)
def test_a_folder_differs_from_a_released_one_only_as_is_said(family):
    """File names and keys against a list of what released folders hold; data/README.md says why
    each file differs.

    `sources` says beside each list which public text it is from.
    """
    expected = RELEASED[family.folder.name]
    files = {file.name for file in family.folder.iterdir()}
    assert files ^ set(expected["files"]) == set(expected["differing_files"])
    text = (DATA / "README.md").read_text()
    assert all(f"`{name}`" in text for name in expected["differing_files"])
    for name, keys in expected["keys"].items():
        ours = json.loads((family.folder / name).read_text()).keys()
        assert ours - set(keys) == set(expected["added_keys"].get(name, ())), name
        assert set(keys) - ours == set(expected["missing_keys"].get(name, ())), name
    assert expected["sources"].keys() == {"files", *expected["keys"]}
    ours = keys_of(json.loads((family.folder / "config.json").read_text()))
    theirs = keys_of(json.loads((DATA / "configs" / f"{expected['release']}.json").read_text()))
    assert ours - theirs == set(expected["config_added"])
    assert theirs - ours == set(expected["config_missing"])
