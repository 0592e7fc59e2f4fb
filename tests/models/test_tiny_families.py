"""What holds of every small model that ships: its folder, its training, its answers, and what is held out.

The models are asked here about scenes 100,000 and following of the split "test": they are neither among those they
were trained on, nor among those that chose the recipe, nor among those of `data/measurements`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import refvl
from data.training import (
    demo_scenes,
    evaluate_step3,
    evaluate_tiny,
    everyday,
    measured,
    pages,
    photos,
    run,
    scenes,
    train_step3,
    train_tiny,
)
from data.training.tiny_family import family_names, find_family
from data.training.tiny_minicpmv import PACKING
from data.training.tiny_step3 import FAMILY as STEP3
from refvl.paths import DATA

FIRST, SAMPLE = 100_000, 16
SCENES = [find_family(name) for name in family_names()]
ALL = [*SCENES, STEP3]
KINDS = [(family, kind) for family in SCENES for kind in evaluate_tiny.kinds_of(family)]


def name_of(value) -> str:
    return getattr(value, "name", str(value))


@pytest.fixture(scope="module")
def load():
    """Each folder, loaded once."""
    kept = {}

    def loaded(folder):
        if folder not in kept:
            kept[folder] = refvl.load(folder, device="cpu", progress=False)
        return kept[folder]

    return loaded


# ---------------------------------------------------------------------------------------------- held out


@pytest.mark.parametrize("sort", scenes.SORTS)
def test_no_held_out_scene_can_be_drawn_in_training(sort, monkeypatch):
    """Every scene comes from one stream of numbers, named by split, index and sort: no two splits share a stream.

    Oracle: the names of the streams, as numpy gets them; and for a part of them the scenes themselves.
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


def test_no_held_out_page_can_be_drawn_in_training():
    """The same of pages, by what is drawn."""
    drawn = {(split, pages.draw_page(split, index)) for split in pages.SPLITS for index in range(200)}
    assert len({page for _, page in drawn}) == len(drawn) == 200 * len(pages.SPLITS)


def test_no_held_out_timing_can_be_drawn_in_training():
    """Seconds, rates and temporal ids of training and of the evaluation differ by a rule, whatever their order."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        assert not scenes.is_held_out(10 * s for s in scenes.draw_seconds(rng, scenes.STEPS, held_out=False))
        assert not scenes.is_held_out(round(10 * s) for s in train_tiny.tell_rate(scenes.FRAMES, rng))
        for frames in (train_tiny.WHOLE, *train_tiny.FRAMES_SHOWN):
            assert not scenes.is_held_out(train_tiny.draw_times(len(frames), PACKING, rng))
    for scene in (scenes.draw_change("train", i) for i in range(100)):
        assert not scenes.is_held_out(10 * s for s in scene.seconds)
        told = train_tiny.tell_other_seconds(scene, rng)
        assert not scenes.is_held_out(10 * s for s in told.seconds)
    for scene in (scenes.draw_change("test", i) for i in range(100)):
        assert scenes.is_held_out(10 * s for s in scene.seconds)
    assert scenes.is_held_out(10 * s for s in scenes.SECONDS), "of the clips that are asked about motion"


def test_no_held_out_sentence_can_be_drawn_in_training():
    """300 sentences, none of them among the lists, and `draw` throws them away even if the lists held them."""
    held_out = {everyday.normal(text) for text in everyday.held_out()}
    assert len(held_out) == len(everyday.held_out()) == 300
    learned = [*everyday.tokenizer_texts(), *(text for pair in scenes.all_phrases(("change",)) for text in pair)]
    learned += [text for pair in pages.all_phrases() for text in pair]
    assert not held_out & {everyday.normal(text) for text in learned}
    rng = np.random.default_rng(0)
    drawn = [everyday.draw(rng) for _ in range(20_000)]
    assert not held_out & {everyday.normal(text) for text in drawn}
    assert len(set(drawn)) > 10_000


def test_draw_throws_held_out_sentences_away(monkeypatch):
    """The guard itself: with nothing but held-out sentences and one other in the lists, only the other is drawn."""
    monkeypatch.setattr(everyday, "SENTENCES", (*everyday.held_out()[:50], "a sentence that is not held out"))
    rng = np.random.default_rng(0)
    drawn = {everyday.normal(everyday.draw(rng)) for _ in range(2000)}
    assert "a sentence that is not held out" in drawn
    assert not drawn & {everyday.normal(text) for text in everyday.held_out()}


# ---------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("family", ALL, ids=name_of)
def test_the_weights_are_those_of_the_log(family):
    """The log begins with the recipe of the code and ends with the digest of the weights."""
    rows = [json.loads(line) for line in (family.folder / "training_log.jsonl").read_text().splitlines()]
    recipe = train_step3.Recipe() if family is STEP3 else train_tiny.recipe_of(family)
    assert rows[0]["model"] == family.name and type(recipe)(**rows[0]["recipe"]) == recipe
    assert [row["step"] for row in rows[1:]] == sorted(row["step"] for row in rows[1:])
    assert rows[-1]["step"] == recipe.steps and rows[-1]["weights_sha256"] == run.digest(family.folder)


@pytest.mark.parametrize("family", ALL, ids=name_of)
def test_the_folder_is_what_the_script_writes(family, tmp_path):
    """Oracle: the same functions, run again; only the numbers in the weights are trained."""
    tokenizer = family.train_tokenizer()
    family.write_checkpoint(tmp_path, family.config(tokenizer), tokenizer, {"x": torch.zeros(1)})
    written = {file.name for file in tmp_path.iterdir()}
    assert written | {"training_log.jsonl"} == {file.name for file in family.folder.iterdir()}
    for name in written - {"model.safetensors"}:
        assert (tmp_path / name).read_text() == (family.folder / name).read_text(), name


@pytest.mark.parametrize("family", ALL, ids=name_of)
def test_the_measurements_are_of_these_weights_and_meet_their_goals(family):
    record = json.loads(family.measurements.read_text())
    assert record["weights_sha256"] == run.digest(family.folder)
    assert record["n"] >= 1000 and record["split"] == "test"
    if family is STEP3:
        assert not evaluate_step3.missed(record["accuracy"])
        return
    assert list(record["accuracy"]) == evaluate_tiny.kinds_of(family)
    assert not evaluate_tiny.missed(family, record["accuracy"])
    if family.prunable:
        curve = {row["q"]: row["motion"] for row in record["evs_curve"]}
        assert tuple(curve) == evaluate_tiny.RATES
        assert curve[0.5] >= curve[0.0] - 0.01, "EVS at 0.5 costs at most one point"


def test_the_tables_are_those_of_the_measurements():
    text = measured.README.read_text()
    assert f"{measured.BEGIN}{measured.tables()}{measured.END}" in text
    assert f"{measured.VLLM_BEGIN}{measured.in_vllm()}{measured.VLLM_END}" in text
    assert f"{measured.BOXES_BEGIN}{measured.of_boxes()}{measured.BOXES_END}" in text


def test_every_request_to_vllm_was_the_same_or_explained():
    """Oracle: a running vLLM, as `benchmarks/vllm_serving.py` asked it; at least 700 requests of four families."""
    folders = json.loads((DATA / "measurements" / "vllm.json").read_text())["folders"]
    rows = [row for record in folders.values() for row in record["rows"]]
    assert all(row["asked"] == row["same_prompt"] == row["agree"] for row in rows)
    assert all(row["apart_given"] <= 2e-5 for row in rows)
    assert all(row["same_answer"] == row["asked"] for row in rows if not row["q"]), "no answer turns on a resize"
    assert len(folders) >= 4 and sum(row["asked"] for row in rows) >= 700
    assert {row["q"] for row in rows} >= {0.25, 0.5, 0.75}


# ----------------------------------------------------------------------------------------------- answers


def within_goal(family, kind: str, asked: list[evaluate_tiny.Asked]) -> bool:
    """Whether a sample is no further from the goal than three standard deviations of a model just within it."""
    least, most = evaluate_tiny.goal_of(family, kind)
    low, high = (3 * (p * (1 - p) / len(asked)) ** 0.5 for p in (least, most))
    return least - low <= evaluate_tiny.share(asked) <= most + high


@pytest.mark.parametrize("family, kind", KINDS, ids=name_of)
def test_held_out_questions(load, family, kind):
    """Oracle: the scene's own answer, letter by letter; a sample of what is measured, on other scenes."""
    asked = evaluate_tiny.evaluate(load(family.folder), kind, SAMPLE, first=FIRST)
    assert within_goal(family, kind, asked), [(a.question, a.said) for a in asked if not a.is_right]


@pytest.mark.parametrize("family", SCENES, ids=name_of)
def test_shuffled_weights_miss_the_goals(family, tmp_path):
    """The evaluation can fail: with the numbers of every tensor in another order no kind meets its goal but those that
    ask for failure."""
    generator = torch.Generator().manual_seed(0)
    for file in family.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    shuffled = {
        name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
        for name, tensor in weights.items()
    }
    save_file(shuffled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = refvl.load(tmp_path, device="cpu", progress=False)
    kinds = ["color", "motion", "everyday"]
    shares = {kind: evaluate_tiny.share(evaluate_tiny.evaluate(model, kind, 10, first=FIRST)) for kind in kinds}
    assert evaluate_tiny.missed(family, shares) == kinds


@pytest.mark.parametrize("family", ALL, ids=name_of)
@pytest.mark.parametrize("text", ["hello", "Hello!", "Describe the image.", "", "   ", "???"])
def test_other_questions_get_a_sentence_that_says_what_to_ask(load, family, text):
    """About a held-out scene, a photograph, and nothing at all."""
    model, expected = load(family.folder), pages.HELP if family is STEP3 else scenes.HELP
    shown = [demo_scenes.PICTURE, DATA / "pictures/coffee.jpg"] if family in SCENES else [DATA / "pictures/page.png"]
    for images in ([], *([image] for image in shown)):
        assert model.chat(text, images=images, max_new_tokens=32) == expected, (text, images)


@pytest.mark.parametrize("family", SCENES, ids=name_of)
@pytest.mark.parametrize("clip", [False, True])
def test_the_demo_files_are_answered(load, family, clip):
    """Oracle: the scene they were rendered from; the clip went through H.264."""
    scene = demo_scenes.demo_clip() if clip else demo_scenes.demo_picture()
    media = {"videos": [demo_scenes.CLIP]} if clip else {"images": [demo_scenes.PICTURE]}
    for kind in ("motion", "color") if clip else ("color", "shape", "place"):
        for question in scenes.all_questions(scene)[kind]:
            assert load(family.folder).chat(question.text, **media, max_new_tokens=8) == question.answer


@pytest.mark.parametrize("family", SCENES, ids=name_of)
def test_photographs_are_recognised(load, family):
    """They were in the training."""
    model = load(family.folder)
    for name, answer in photos.PICTURES.items():
        assert model.chat("What is in the picture?", images=[DATA / "pictures" / name], max_new_tokens=8) == answer
    clip = DATA / "clips" / photos.CLIP
    if family.prunable:
        assert model.chat("What is in the clip?", videos=[clip], max_new_tokens=8) == photos.CLIP_ANSWER


# ---------------------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL, ids=name_of)
def test_a_stopped_run_continues_as_if_it_had_not_been(family, tmp_path):
    """Oracle: the same few steps without a stop; all phases, sorts, photographs, asides and pruning are passed."""
    if family is STEP3:
        recipe = train_step3.Recipe(steps=7, see=2, warmup=2, measure_every=100, measure_on=4)
        make, arguments, others = train_step3.Trainer, (recipe,), (train_step3.Recipe(steps=8),)
    else:
        small = {"pictures": 2, "clips": 2, "photos": 2, "picture_pool": 8, "clip_pool": 4, "measure_on": 4}
        recipe = train_tiny.Recipe(steps=11, see=2, warmup=2, measure_every=100, **small)
        make, arguments = train_tiny.make_trainer, (family.name, recipe)
        others = (family.name, train_tiny.Recipe(steps=8))
    run.train(make, arguments, tmp_path / "whole")
    run.train(make, arguments, tmp_path / "halves", stop=3)
    assert (tmp_path / "halves" / "training_state.pt").exists()
    with pytest.raises(Exception, match="resume: the state in .* belongs to another recipe"):
        run.train(make, others, tmp_path / "halves", resume=True)
    run.train(make, arguments, tmp_path / "halves", resume=True)
    whole, halves = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves"))
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    assert not (tmp_path / "halves" / "training_state.pt").exists()
    ends = [(tmp_path / name / "training_log.jsonl").read_text().splitlines()[-1] for name in ("whole", "halves")]
    assert len({json.loads(line)["weights_sha256"] for line in ends}) == 1


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="resume: .*training_state.pt does not exist"):
        train_tiny.train(train_tiny.Recipe(), tmp_path, resume=True)


# ------------------------------------------------------------------------------------ loading elsewhere

RELEASED = json.loads((Path(__file__).parent / "released_folders.json").read_text())


def keys_of(values: dict, before: str = "") -> set[str]:
    """Names of all keys, nested ones behind a dot."""
    found = set()
    for key, value in values.items():
        found |= {before + key} | (keys_of(value, f"{before}{key}.") if isinstance(value, dict) else set())
    return found


@pytest.mark.parametrize("family", ALL, ids=name_of)
def test_a_folder_differs_from_a_released_one_only_as_is_said(family):
    """File names and keys against a list of what released folders hold; data/README.md says why each file differs.

    `sources` says beside each list which public text it is from.
    """
    expected, files = RELEASED[family.folder.name], {file.name for file in family.folder.iterdir()}
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
