"""What holds of every small model that ships: its folder, its training, its answers, and what is held out.

The models are asked here about scenes 100,000 and following of the split "test": they are neither among those they
were trained on, nor among those that chose the recipe, nor among those of `data/measurements`.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from closeness import assert_differ
from prompts import inputs_of
from safetensors.torch import load_file, save_file
from shipped import is_read_here, shipped

import refvl
from data.training import (
    demo_scenes,
    evaluate_step3,
    evaluate_tiny,
    everyday,
    measured,
    other_scenes,
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
from refvl.pixels.media import load_image, load_video
from refvl.study.watch import media_attention

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


@pytest.mark.parametrize("family", [*ALL, TABLE], ids=name_of)
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
def test_weights_are_small_and_in_bfloat16(family):
    weights = load_file(family.folder / "model.safetensors")
    assert (family.folder / "model.safetensors").stat().st_size < 8e6
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ALL, ids=name_of)
def test_any_text_has_tokens(family):
    tokenizer = shipped(family.folder.name).processor.tokenizer
    for text in ("Ça va, 你好?", "naïve\n\n\ttabs 1234", "🐇 <b>&amp;</b>", "What color is the circle?"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert all(len(tokenizer(text).input_ids) == 1 for text in map(str, range(100))) or family.name != "glm4v"


QWEN_TURNS = (
    "<|im_start|>user\nOne <|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
    "<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
)
GLM_TURNS = (
    "<|user|>\nOne <|begin_of_image|><|image|><|end_of_image|><|begin_of_video|><|video|><|end_of_video|>"
    "<|assistant|>\ntwo<|user|>\nthree<|assistant|>\n"
)
SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "without_system", "with_system"),
    [
        (
            "qwen2_5_vl",
            SYSTEM.format("You are a helpful assistant.") + QWEN_TURNS,
            SYSTEM.format("Brief.") + QWEN_TURNS,
        ),
        ("qwen3_vl", QWEN_TURNS, SYSTEM.format("Brief.") + QWEN_TURNS),
        ("glm4v", "[gMASK]<sop>" + GLM_TURNS, "[gMASK]<sop><|system|>\nBrief." + GLM_TURNS),
    ],
)
def test_chat_template(name, without_system, with_system):
    """Oracle: what the templates of the releases give for the same messages, written out."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "image"}, {"type": "video"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    tokenizer = shipped(find_family(name).folder.name).processor.tokenizer
    for system, expected in ([], without_system), ([{"role": "system", "content": "Brief."}], with_system):
        said = tokenizer.apply_chat_template(system + messages, tokenize=False, add_generation_prompt=True)
        assert said == expected


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
    assert f"{measured.OTHER_BEGIN}{measured.of_other_scenes()}{measured.OTHER_END}" in text
    assert f"{measured.VLLM_BEGIN}{measured.in_vllm()}{measured.VLLM_END}" in text
    assert f"{measured.BOXES_BEGIN}{measured.of_boxes()}{measured.BOXES_END}" in text


def test_the_goal_holds_on_scenes_of_other_seeds():
    """In each of five draws, and for the 95 % interval of all of them; oracle: the scenes' own answers."""
    record = json.loads(other_scenes.FILE.read_text())
    least, _ = evaluate_tiny.GOALS[record["kind"]]
    assert record["n"] >= 1000 and len(set(other_scenes.SEEDS) - {scenes.SEED}) >= 5
    measured_families = [f for f in map(find_family, family_names()) if f.folder.name in record["models"]]
    assert len(measured_families) == len(record["models"]) == 5
    for family in measured_families:
        model = record["models"][family.folder.name]
        right, n = list(model["right"].values()), record["n"]
        assert list(model["right"]) == [str(seed) for seed in other_scenes.SEEDS]
        assert model["weights_sha256"] == run.digest(family.folder)
        low, _ = evaluate_tiny.interval(sum(right) / (len(right) * n), len(right) * n)
        assert min(right) / n >= least and low > least, family.folder.name


def test_other_seeds_draw_other_scenes():
    """And leave the seed as it was; oracle: the questions of the seed that the tables are measured on."""
    [family, *_] = SCENES
    model, seed = shipped(family.folder.name), scenes.SEED
    answers = [
        [asked.question.answer for asked in other_scenes.ask(model, drawn, bool(family.clips), 8)]
        for drawn in (seed, 1)
    ]
    usual = evaluate_tiny.evaluate(model, other_scenes.KIND, 8, clips=bool(family.clips))
    assert answers[0] == [asked.question.answer for asked in usual] != answers[1] and seed == scenes.SEED


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
def test_held_out_questions(family, kind):
    """Oracle: the scene's own answer, letter by letter; a sample of what is measured, on other scenes."""
    model, clips = shipped(family.folder.name), bool(family.clips)
    asked = evaluate_tiny.evaluate(model, kind, SAMPLE, first=FIRST, clips=clips)
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
    kinds, clips = ["color", *family.clips[:1], "everyday"], bool(family.clips)
    asked = {kind: evaluate_tiny.evaluate(model, kind, 10, first=FIRST, clips=clips) for kind in kinds}
    shares = {kind: evaluate_tiny.share(found) for kind, found in asked.items()}
    assert evaluate_tiny.missed(family, shares) == kinds


@pytest.mark.parametrize("family", ALL, ids=name_of)
@pytest.mark.parametrize("text", ["hello", "Hello!", "Describe the image.", "", "   ", "???"])
def test_other_questions_get_a_sentence_that_says_what_to_ask(family, text):
    """About a held-out scene, a photograph, and nothing at all."""
    model, expected = shipped(family.folder.name), pages.HELP if family is STEP3 else scenes.HELP
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
        for request in evaluate_tiny.requests_for(kind, 4, first=FIRST):
            trace = model.trace(**request.arguments, max_new_tokens=8)
            inputs = inputs_of(model, trace)
            theirs = oracle.generate(**inputs, max_new_tokens=8, do_sample=False)
            assert theirs[0, len(trace.full_ids) :].tolist() == trace.token_ids


def test_blind_it_cannot_answer():
    """The bar means something: with another scene's picture it is missed by far."""
    todo = evaluate_tiny.requests_for("place", 60, first=FIRST)
    pictures = [request.arguments["images"] for request in todo]
    others = [*pictures[1:], pictures[0]]
    swapped = [request.arguments | {"images": other} for request, other in zip(todo, others, strict=True)]
    answers = shipped("tiny-qwen2_5_vl").chat_batch(swapped, max_new_tokens=8)
    right = [said == request.question.answer for said, request in zip(answers, todo, strict=True)]
    assert sum(right) / len(right) < 0.5


def colors_at_places(count: int):
    """(place, picture, question) of scenes with a question for the colour of what is somewhere."""
    for index in range(FIRST, FIRST + 10 * count):
        scene = scenes.draw_scene("test", index)
        asked = [q for q in scenes.all_questions(scene)["color_at"] if q.answer in scenes.COLORS]
        if asked:
            place = max((p for p in scenes.PLACES if p in asked[0].text), key=len)
            yield scenes.PLACES.index(place), scenes.render(scene), asked[0]
            count -= 1
        if not count:
            return


def test_the_answer_looks_at_the_place_asked_about():
    """Asked for the colour at a place, the last layer takes most from that place's token; chance is one in nine."""
    found = shares = 0
    for place, picture, question in colors_at_places(40):
        trace = shipped("tiny-qwen2_5_vl").trace(question.text, images=[picture], max_new_tokens=2, attentions=True)
        looked = media_attention(trace)[-1].mean(0)  # heads averaged
        found, shares = found + (int(looked.argmax()) == place), shares + float(looked[place])
    assert found >= BAR * 40 and shares > 0.5 * 40


TELL_SECONDS = [find_family(name) for name in ("glm4v", "qwen3_vl")]


@pytest.mark.parametrize("family", TELL_SECONDS, ids=name_of)
def test_the_second_is_read_from_the_text(family):
    """The same frames, told other seconds, now and then with a digit more: the answer is the new second."""
    requests = [request.arguments for request in evaluate_tiny.requests_for("change", 30, first=FIRST)]
    drawn = [scenes.draw_change("test", FIRST + index) for index in range(30)]
    told = [replace(scene, seconds=tuple(s + 1 for s in scene.seconds)) for scene in drawn]
    for request, scene in zip(requests, told, strict=True):
        before, request["videos"] = request["videos"][0], [evaluate_tiny.sampled_clip(scene)]
        assert np.array_equal(request["videos"][0].frames, before.frames)
    after = shipped(family.folder.name).chat_batch(requests, max_new_tokens=8)
    right = [answer == str(scene.seconds[scene.step]) for answer, scene in zip(after, told, strict=True)]
    assert sum(right) >= BAR * len(requests)


@pytest.mark.parametrize("family", TELL_SECONDS, ids=name_of)
def test_the_second_holds_when_half_of_the_clip_is_pruned(family):
    """EVS drops tokens of frames, never the seconds."""
    asked = evaluate_tiny.evaluate(shipped(family.folder.name), "change", 60, q=0.5, first=FIRST)
    assert evaluate_tiny.share(asked) >= BAR


def test_a_file_of_one_frame_per_second_and_one_of_two_are_told_apart(tmp_path):
    """The same frames, other seconds."""
    av = pytest.importorskip("av")
    changes = (scenes.draw_change("demo", i) for i in range(99))
    scene = next(s for s in changes if s.things[0].shape == "circle" and s.step)
    for rate, second in ((1, 2 * scene.step), (2, scene.step)):
        path = tmp_path / f"{rate}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=rate, options={"crf": "10", "threads": "1"})
            stream.height, stream.width, stream.pix_fmt = 84, 84, "yuv420p"
            for image in scenes.render(scene):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode())
        said = shipped("tiny-glm4v").chat("When does the circle change color?", videos=[path], max_new_tokens=8)
        assert said == str(second)


def test_deeper_features_reach_the_logits():
    """With zeros in their place they differ by more than rounding; nothing is said of the answers (notebook 12)."""
    model, [request] = shipped("tiny-qwen3_vl"), evaluate_tiny.requests_for("color", 1, first=FIRST)
    trace = model.trace(**request.arguments, max_new_tokens=1)
    given = {"inputs_embeds": trace.inputs_embeds[None], "position_ids": trace.positions[:, None]}
    with torch.inference_mode():
        deeper = (trace.deepstack[None], torch.zeros_like(trace.deepstack)[None])
        logits = [model.language_model(**given, deepstack_embeds=features).logits for features in deeper]
    assert_differ(*logits, model.language_model)


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
    with pytest.raises(Exception, match="resume: expected a state of this model and recipe in .*, got"):
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


@pytest.mark.parametrize("family", LISTED, ids=name_of)
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
