"""The small GLM-4.1V, which is told the time.

It is measured here on scenes 100,000 and following of the split "test": they are neither among those it was trained on,
nor among those that chose the recipe, nor among those of `data/measurements`.
"""

import hashlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from closeness import assert_agree
from safetensors.torch import load_file

import refvl
from data.training import evaluate_tiny, scenes
from data.training.tiny_family import batch_rows, find_family
from data.training.tiny_model import PromptBuilder, TinyModel
from refvl.pixels import by_hand, patch_configs
from refvl.tools.cli import main

FAMILY = find_family("glm4v")
FOLDER, WEIGHTS = FAMILY.folder, FAMILY.folder / "model.safetensors"
FIRST = 100_000
BAR = 0.95


@pytest.fixture(scope="module")
def model():
    return refvl.load(FOLDER, device="cpu", progress=False)


@pytest.fixture(scope="module")
def oracle():
    from transformers import Glm4vForConditionalGeneration

    return Glm4vForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()


# ------------------------------------------------------------------------------------------------- scenes


def test_exactly_one_object_changes_and_only_when_the_scene_says():
    """Oracle: the frames. Only the place of the first object differs, and from the second frame of the step on."""
    for index in range(40):
        scene = scenes.draw_change("test", index)
        assert scene == scenes.draw_change("test", index)
        frames = scenes.render(replace(scene, jpeg_quality=None)).astype(int)
        assert frames.shape == (2 * scenes.STEPS, 84, 84, 3)
        changed = [int(abs(b - a).max()) > 0 for a, b in pairwise(frames)]
        assert [i for i, is_new in enumerate(changed) if is_new] == [2 * scene.step]
        y, x, _ = np.nonzero(frames[-1] - frames[0])
        assert int(y.mean() // 28) * 3 + int(x.mean() // 28) == scene.things[0].place
        assert scene.becomes.color != scene.things[0].color and scene.becomes.shape == scene.things[0].shape


def test_the_second_cannot_be_guessed():
    """Of 1,000 clips: every second is an answer, none in 6 % of them; every step is the one in at least 20 %."""
    drawn = [scenes.draw_change("test", index) for index in range(1000)]
    seconds = np.array([scene.seconds for scene in drawn])
    steps = np.array([scene.step for scene in drawn])
    assert (np.diff(seconds) > 0).all() and seconds.max() <= scenes.LAST_SECOND
    assert np.bincount(steps, minlength=scenes.STEPS).min() > 200
    for step in range(scenes.STEPS):
        assert np.bincount(seconds[:, step]).max() < 200, "one frame carries many different seconds"
    answers = [q.answer for scene in drawn for q in scenes.all_questions(scene)["change"][:1]]
    assert answers == [str(scene.seconds[scene.step]) for scene in drawn]
    said, counts = np.unique(answers, return_counts=True)
    assert len(said) == scenes.LAST_SECOND + 1 and counts.max() < 60


def test_scenes_are_still_those_that_the_first_checkpoint_was_trained_on():
    """Oracle: a checksum taken before there were clips in which a colour changes, of all but the questions."""
    expected = {
        False: "a665223a58950193",
        True: "9ffb6aaee939d432",
    }
    for clip, start in expected.items():
        digest = hashlib.sha256()
        for split in scenes.SPLITS:
            for index in range(50):
                s = scenes.draw_scene(split, index, clip=clip)
                drawn = [
                    s.things,
                    s.background,
                    s.slope,
                    s.noise,
                    s.noise_seed,
                    s.jpeg_quality,
                    s.direction,
                    s.distance,
                ]
                for part in (repr(drawn).encode(), scenes.cell_labels(s).tobytes()):
                    digest.update(part)
        assert digest.hexdigest().startswith(start)


# ----------------------------------------------------------------------------------------- the checkpoint


def test_checkpoint_is_small_in_bfloat16_under_the_released_names():
    """Oracle: the naming of GLM-4.1V-9B-Thinking."""
    weights = load_file(WEIGHTS)
    assert WEIGHTS.stat().st_size < 8e6
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {".".join(name.split(".")[:2]) for name in weights} == {
        "model.visual", "model.language_model", "lm_head.weight",
    }  # fmt: skip
    assert weights["model.visual.patch_embed.proj.weight"].shape == (96, 3, 2, 14, 14)
    assert weights["model.visual.downsample.weight"].shape == (128, 96, 2, 2)
    assert weights["model.visual.embeddings.position_embedding.weight"].shape == (64, 96)
    assert {
        "model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.gate_proj.weight",
        "model.language_model.layers.0.mlp.gate_up_proj.weight", "model.language_model.layers.0.self_attn.q_proj.bias",
        "model.language_model.layers.0.post_mlp_layernorm.weight",
    } <= weights.keys()  # fmt: skip


def test_transformers_loads_it_and_nothing_is_missing():
    from transformers import Glm4vForConditionalGeneration

    loaded, info = Glm4vForConditionalGeneration.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.vision_config.image_size == 112


def test_any_text_has_tokens_and_every_second_has_one(model):
    tokenizer = model.processor.tokenizer
    for text in ("Ça va, 你好?", "naïve\n\n\ttabs 1234", "🐇 <b>&amp;</b>", "When does it change color?"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert all(len(tokenizer(str(second)).input_ids) == 1 for second in range(100))
    ends = tokenizer.convert_ids_to_tokens(model.config.text_config.eos_token_id)
    assert ends == ["<|endoftext|>", "<|user|>", "<|observation|>", "</answer>"], "as the released config has them"


def test_chat_template(model):
    """Oracle: GLM's format, written out."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "image"}, {"type": "video"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert model.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nOne <|begin_of_image|><|image|><|end_of_image|>"
        "<|begin_of_video|><|video|><|end_of_video|><|assistant|>\ntwo<|user|>\nthree<|assistant|>\n"
    )


@pytest.mark.parametrize("kind", ["place", "motion", "change"])
def test_ids_equal_transformers_generate(model, oracle, kind):
    """Oracle: transformers' whole model on the pixels and the prompt that refvl made."""
    for request in evaluate_tiny.requests_for(kind, 4, first=FIRST):
        trace = model.trace(**request.arguments, max_new_tokens=8)
        assert trace.text == request.question.answer
        [medium] = trace.patches
        picture, video = model.token_ids["image"], model.token_ids["video"]
        types = (trace.full_ids == picture).int() + 2 * (trace.full_ids == video).int()
        ids = torch.where(trace.full_ids == video, picture, trace.full_ids)  # how transformers writes frames
        pixels, grid = ("pixel_values", "image_grid_thw")
        if medium.merged.kind == "video":
            pixels, grid = ("pixel_values_videos", "video_grid_thw")
        inputs = {pixels: medium.pixel_values, grid: torch.tensor([medium.layout])}
        theirs = oracle.generate(
            input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], mm_token_type_ids=types[None],
            max_new_tokens=8, do_sample=False, **inputs,
        )  # fmt: skip
        assert theirs[0, len(ids) :].tolist() == trace.token_ids


# ----------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("sort", ["picture", *FAMILY.clips])
def test_training_sees_the_rows_and_the_prompt_that_the_pipeline_makes(model, sort):
    """Oracle: `refvl.pixels.patches` and a trace of the public path, which are held against transformers."""
    scene = scenes.draw_sort(sort, "test", 1)
    pixels, is_picture = scenes.render(scene), sort == "picture"
    config = patch_configs.Glm4vPatchConfig.from_folder(FOLDER, "image" if is_picture else "video")
    rows, grid = (by_hand.patchify_image if is_picture else by_hand.patchify_video)(pixels, config)
    pixels = torch.from_numpy(pixels[None] if is_picture else pixels)[None]
    assert FAMILY.grid(pixels.shape) == grid
    assert_agree(batch_rows(pixels), rows, 4)

    [question] = scenes.draw_questions(scene, ["color"], np.random.default_rng(0))
    builder = PromptBuilder(FAMILY, FAMILY.train_tokenizer(), FAMILY.config(FAMILY.train_tokenizer()))
    batch = builder.batch(pixels, [[question]], seconds=None if is_picture else [scene.seconds or scenes.SECONDS])
    trace = model.trace(question.text, **evaluate_tiny.media_of(scene), max_new_tokens=1)
    length = len(trace.full_ids)
    assert batch.ids_BL[0, :length].tolist() == trace.full_ids.tolist()
    assert torch.equal(batch.positions_3L[:, :length], trace.full_positions)
    assert batch.spans == trace.spans
    times = FAMILY.time_columns(batch.spans) if not is_picture else []
    expected = [str(int(second)) for second in (scene.seconds or scenes.SECONDS)]
    assert [model.processor.text([i]) for i in trace.full_ids[times]] == (expected if times else [])


def test_questions_in_one_row_are_answered_as_if_asked_alone(model):
    """Oracle: the public path, one question per prompt: the logits of the first answer token."""
    tokenizer = FAMILY.train_tokenizer()
    config = FAMILY.config(tokenizer)
    ours, builder = TinyModel(FAMILY, config), PromptBuilder(FAMILY, tokenizer, config)
    names = dict(ours.named_parameters())
    with torch.no_grad():
        for name, tensor in load_file(WEIGHTS).items():
            name = name.replace("model.visual", "visual").replace("model.language_model", "model")
            names[name].copy_(tensor.reshape(names[name].shape))
    scene = scenes.draw_change("test", 2)
    questions = scenes.draw_questions(scene, ["change", "changer", "becomes"], np.random.default_rng(0))
    batch = builder.batch(scenes.render(scene)[None], [questions], seconds=[scene.seconds])
    with torch.no_grad():
        logits = ours(batch)[0]
    for i, question in enumerate(questions):
        trace = model.trace(question.text, **evaluate_tiny.media_of(scene), max_new_tokens=1)
        alone = model.language_model(
            inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None], logits_to_keep=1
        ).logits[0, 0]
        first = int((batch.question_of_target == i).nonzero()[0])
        assert_agree(logits[first], alone, ours)


def test_seconds_of_unequal_length_are_refused():
    tokenizer = FAMILY.train_tokenizer()
    builder = PromptBuilder(FAMILY, tokenizer, FAMILY.config(tokenizer))
    drawn = [scenes.draw_change("test", index) for index in range(2)]
    questions = [scenes.draw_questions(scene, ["change"], np.random.default_rng(0)) for scene in drawn]
    pixels = np.stack([scenes.render(scene) for scene in drawn])
    with pytest.raises(ValueError, match="seconds: prompts of one batch must be alike"):
        builder.batch(pixels, questions, seconds=[(1, 2, 3, 4), (1, 2, 3, 4000)])


def test_families_are_known_by_name():
    with pytest.raises(ValueError, match="model: expected one of .*'glm4v'.*'qwen2_5_vl'.*, got 'gpt'"):
        find_family("gpt")


# ----------------------------------------------------------------------------------------------- answers


def test_the_second_is_read_from_the_text(model):
    """The same frames, told other seconds: each answer changes to the new second of the same step."""
    requests = [request.arguments for request in evaluate_tiny.requests_for("change", 30, first=FIRST)]
    drawn = [scenes.draw_change("test", FIRST + index) for index in range(30)]
    before = model.chat_batch(requests, max_new_tokens=8)
    for request, scene in zip(requests, drawn, strict=True):
        clip = request["videos"][0]
        assert np.array_equal(clip.frames, scenes.render(scene))
        request["videos"] = [
            evaluate_tiny.sampled_clip(replace(scene, seconds=tuple(s + 1 for s in scene.seconds)), source_fps=30)
        ]
        assert np.array_equal(request["videos"][0].frames, clip.frames)
    after = model.chat_batch(requests, max_new_tokens=8)
    pairs = [(int(a) + 1 == int(b)) for a, b in zip(before, after, strict=True) if a.isdigit() and b.isdigit()]
    assert sum(pairs) >= BAR * len(requests)


def test_the_second_holds_when_half_of_the_clip_is_pruned(model):
    """EVS drops tokens of frames, never the seconds."""
    asked = evaluate_tiny.evaluate(model, "change", 60, q=0.5, first=FIRST)
    assert evaluate_tiny.share(asked) >= BAR


def test_the_command_line_says_when(model, tmp_path, monkeypatch, capsys):
    """A file of one frame per second and one of two: the same frames, other seconds."""
    av = pytest.importorskip("av")
    scene = next(
        s for s in (scenes.draw_change("demo", i) for i in range(99)) if s.things[0].shape == "circle" and s.step
    )
    for rate, second in ((1, 2 * scene.step), (2, scene.step)):
        path = tmp_path / f"{rate}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=rate, options={"crf": "10", "threads": "1"})
            stream.height, stream.width, stream.pix_fmt = 84, 84, "yuv420p"
            for image in scenes.render(scene):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode())
        question = "When does the circle change color?"
        monkeypatch.setattr(
            "sys.argv", ["refvl", "chat", str(FOLDER), question, "--video", str(path), "--device", "cpu"]
        )
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        assert capsys.readouterr().out.split() == [str(second)]
