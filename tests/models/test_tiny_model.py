"""The scenes, and the small model that answers questions about them.

The model is measured here on scenes 100,000 and following of the split "test": they are neither among those it was
trained on, nor among those that chose the recipe, nor among those of `data/measurements`.
"""

import numpy as np
import pytest
import torch
from closeness import assert_agree
from safetensors.torch import load_file

import refvl
from data.training import demo_scenes, evaluate_tiny, scenes
from data.training.tiny_family import batch_rows
from data.training.tiny_model import PromptBuilder, TinyModel, row_mask
from data.training.tiny_qwen2_5_vl import FAMILY
from refvl.pixels import by_hand, patches
from refvl.positions import MediaSpan, get_mrope_input_positions
from refvl.study.watch import media_attention

FOLDER, WEIGHTS = FAMILY.folder, FAMILY.folder / "model.safetensors"
FIRST = 100_000
BAR = 0.95


# ------------------------------------------------------------------------------------------------- scenes


@pytest.mark.parametrize("clip", [False, True])
def test_a_scene_is_a_function_of_split_and_index(clip):
    """Oracle: drawing again."""
    first, again = (scenes.draw_scene("test", 5, clip=clip) for _ in range(2))
    assert first == again
    assert np.array_equal(scenes.render(first), scenes.render(again))
    assert scenes.render(first).shape == ((6, 84, 84, 3) if clip else (84, 84, 3))


def test_every_name_fits_exactly_one_object():
    """Oracle: the words of the name against each object's own."""

    def fits(name, thing):
        words = set(name.split()) - {"object"}
        return words <= {thing.shape, thing.color}

    for index in range(300):
        things = scenes.draw_scene("test", index).things
        for thing in things:
            for hide in (None, "color", "shape"):
                for name in scenes.names_of(thing, things, hide=hide):
                    assert [fits(name, other) for other in things].count(True) == 1
                    assert fits(name, thing)
                    assert hide is None or getattr(thing, hide) not in name


def test_place_and_direction_are_what_is_drawn():
    """Oracle: where pixels differ from the background, for scenes of one object."""
    for index in range(40):
        scene = scenes.draw_scene("test", index, objects=(1, 1))
        y, x = _center_of_ink(scenes.render(scene))
        assert scenes.PLACES[int(y // 28) * 3 + int(x // 28)] == scenes.all_questions(scene)["place"][0].answer
        clip = scenes.draw_scene("test", index, clip=True, objects=(1, 1))
        (y0, x0), (y1, x1), (y5, x5) = (_center_of_ink(frame) for frame in scenes.render(clip)[[0, 1, 5]])
        assert abs(y1 - y0) + abs(x1 - x0) < 0.5, "it waits during the first temporal patch"
        dx, dy = scenes.DIRECTIONS[scenes.all_questions(clip)["motion"][0].answer]
        assert (x5 - x0) * dx + (y5 - y0) * dy > 20
        assert abs((x5 - x0) * dy) + abs((y5 - y0) * dx) < 2


def _center_of_ink(picture: np.ndarray) -> tuple[float, float]:
    ink = abs(picture.astype(float) - np.median(picture, axis=(0, 1))).max(-1) > 70
    y, x = np.nonzero(ink)
    return y.mean(), x.mean()


def test_nobody_stands_in_the_movers_way():
    for index in range(300):
        scene = scenes.draw_scene("test", index, clip=True, objects=(4, 4))
        centers = np.array(scenes.mover_centers(scene))
        assert (centers > 8).all() and (centers < 84 - 8).all()
        for other in scene.things[1:]:
            assert np.hypot(*(centers - other.center).T).min() > 20


def test_scenes_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="split: expected one of .*'train'.* got 'tset'"):
        scenes.draw_scene("tset", 0)
    with pytest.raises(ValueError, match="shape: expected one of .*'circle'.* got 'oval'"):
        scenes.signed_distance("oval", np.zeros(1), np.zeros(1), 9)


# ----------------------------------------------------------------------------------------- the checkpoint


@pytest.fixture(scope="module")
def model():
    return refvl.load(FOLDER, device="cpu", progress=False)


def test_checkpoint_is_small_in_bfloat16_under_the_released_names():
    """Oracle: the naming of the released checkpoints, before transformers 4.52."""
    weights = load_file(WEIGHTS)
    assert WEIGHTS.stat().st_size < 8e6
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {name.split(".")[0] for name in weights} == {"visual", "model", "lm_head"}
    assert {"visual.blocks.0.attn.qkv.weight", "model.layers.0.self_attn.q_proj.weight"} <= weights.keys()
    assert weights["visual.patch_embed.proj.weight"].shape == (96, 3, 2, 14, 14)


def test_transformers_loads_it_and_nothing_is_missing():
    from transformers import Qwen2_5_VLForConditionalGeneration

    loaded, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    assert not torch.equal(loaded.lm_head.weight, loaded.get_input_embeddings().weight)
    vision = loaded.config.vision_config
    assert (vision.depth, vision.fullatt_block_indexes, vision.window_size) == (4, [1, 3], 56)


def test_any_text_has_tokens_and_words_of_questions_have_one(model):
    tokenizer = model.processor.tokenizer
    for text in ("Ça va, 你好?", "naïve\n\n\ttabs 1234", "🐇 <b>&amp;</b>", "What color is the circle?"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("What color is the circle?").input_ids) == 6
    assert tokenizer.convert_ids_to_tokens(model.config.image_token_id) == "<|image_pad|>"
    assert tokenizer.convert_ids_to_tokens(model.config.video_token_id) == "<|video_pad|>"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_chat_template(model):
    """Oracle: what the template of the released checkpoints gives for the same messages, written out."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "image"}, {"type": "video"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    text = model.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = (
        "<|im_start|>user\nOne <|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + turns
    system = [{"role": "system", "content": "Be brief."}]
    own = model.processor.tokenizer.apply_chat_template(system + messages, tokenize=False, add_generation_prompt=True)
    assert own == "<|im_start|>system\nBe brief.<|im_end|>\n" + turns


# ----------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("clip", [False, True])
def test_training_sees_the_rows_that_patchify_makes(clip):
    """Oracle: refvl.pixels.patches, which is held against transformers."""
    pixels = scenes.render(scenes.draw_scene("test", 1, clip=clip))
    config = patches.PatchConfig.from_folder(FOLDER, "video" if clip else "image")
    rows, grid = (by_hand.patchify_video if clip else by_hand.patchify_image)(pixels, config)
    assert grid == ((3, 6, 6) if clip else (1, 6, 6))
    ours = batch_rows(torch.from_numpy(pixels if clip else pixels[None])[None])
    assert_agree(ours, rows, 4)


def test_row_mask():
    """Oracle: the mask written out for two prefix tokens and two tails of two."""
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    expected += [[1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]
    assert row_mask(2, 2, 2).int().tolist() == expected


@pytest.mark.parametrize("clip", [False, True])
def test_questions_in_one_row_are_answered_as_if_asked_alone(clip):
    """Oracle: transformers' whole model, one question per sequence, with the positions of `refvl.positions`."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = FAMILY.train_tokenizer()
    config = FAMILY.config(tokenizer)
    model, builder = TinyModel(FAMILY, config), PromptBuilder(FAMILY, tokenizer, config)
    _load(model)
    scene = scenes.draw_scene("test", 2, clip=clip)
    kinds = ["motion", "color", "mover"] if clip else ["place", "shape", "thing_at"]
    questions = scenes.draw_questions(scene, kinds, np.random.default_rng(0))
    pixels = scenes.render(scene) if clip else scenes.render(scene)[None]
    batch = builder.batch(pixels[None], [questions], seconds=[scenes.SECONDS] if clip else None)
    with torch.no_grad():
        logits = model(batch)[0]
    for i, question in enumerate(questions):
        ours = logits[batch.question_of_target == i]
        alone = _ask_alone(reference, builder, question, batch, "video" if clip else "image")
        assert_agree(ours, alone[-len(ours) - 1 : -1], model)


def _load(model: TinyModel) -> None:
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in load_file(WEIGHTS).items():
            names[name].copy_(tensor.reshape(names[name].shape))


def _ask_alone(reference, builder, question, batch, media: str) -> torch.Tensor:
    prefix, tail = builder.split(question.text, question.answer, media)
    token, (t, h, w) = builder.config[f"{media}_token_id"], batch.grid
    start, span = (
        prefix.index(token),
        MediaSpan(prefix.index(token), t, h // 2, w // 2, 2.0 if media == "video" else 1.0),
    )
    ids = torch.tensor([[*prefix[:start], *[token] * span.num_tokens, *prefix[start + 1 :], *tail]])
    positions, _ = get_mrope_input_positions(ids.shape[1], [span])
    pixels = "pixel_values_videos" if media == "video" else "pixel_values"
    inputs = {pixels: batch_rows(batch.pixels), f"{media}_grid_thw": torch.tensor([batch.grid])}
    types = (ids == token).int() * (2 if media == "video" else 1)
    with torch.no_grad():
        return reference(input_ids=ids, position_ids=positions[:, None], mm_token_type_ids=types, **inputs).logits[0]


# ----------------------------------------------------------------------------------------------- answers


def test_blind_it_cannot_answer(model):
    """The bar means something: with another scene's picture it is missed by far."""
    todo = evaluate_tiny.requests_for("place", 60, first=FIRST)
    pictures = [request.arguments["images"] for request in todo]
    swapped = [
        request.arguments | {"images": picture}
        for request, picture in zip(todo, pictures[1:] + pictures[:1], strict=True)
    ]
    answers = model.chat_batch(swapped, max_new_tokens=8)
    right = [said == request.question.answer for said, request in zip(answers, todo, strict=True)]
    assert sum(right) / len(right) < 0.5


@pytest.mark.parametrize("clip", [False, True])
def test_the_demo_files_are_the_demo_scenes_and_are_answered(model, clip):
    """Oracle: the scene they were rendered from; the clip went through H.264."""
    scene = demo_scenes.demo_clip() if clip else demo_scenes.demo_picture()
    media = {"videos": [demo_scenes.CLIP]} if clip else {"images": [demo_scenes.PICTURE]}
    decoded = model.trace("What?", **media, max_new_tokens=1).media[0]
    pixels = decoded.frames if clip else np.asarray(decoded)
    assert abs(pixels.astype(int) - scenes.render(scene)).mean() < (6 if clip else 2)
    for kind in ("motion", "color") if clip else ("color", "shape", "place"):
        for question in scenes.all_questions(scene)[kind]:
            assert model.chat(question.text, **media, max_new_tokens=8) == question.answer


def test_the_answer_looks_at_the_place_asked_about(model):
    """Asked for the colour at a place, the last layer takes most from that place's token; chance is one in nine."""
    found = shares = 0
    for place, picture, question in _colors_at_places(40):
        trace = model.trace(question.text, images=[picture], max_new_tokens=2, attentions=True)
        looked = media_attention(trace)[-1].mean(0)  # heads averaged
        found, shares = found + (int(looked.argmax()) == place), shares + float(looked[place])
    assert found >= BAR * 40 and shares > 0.5 * 40


def _colors_at_places(count: int):
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
