"""The tiny Step3: its pages, its training, its checkpoint. Oracles: the public path for what training computes by
itself, pixels for what pages say of themselves, and the measurement for what crops are worth.
"""

import json

import numpy as np
import pytest
import torch
from closeness import assert_agree
from transformers import AutoTokenizer

import refvl
from data.training import pages
from data.training.demo_page import PICTURE, demo_page
from data.training.evaluate_step3 import evaluate, set_crops
from data.training.tiny_model import PromptBuilder, TinyModel
from data.training.tiny_step3 import FAMILY, TinyStep3
from refvl.pixels.crops import CropConfig, patchify_crops
from refvl.pixels.media import load_image

FOLDER = FAMILY.folder
MEASURED = json.loads(FAMILY.measurements.read_text())
SAMPLE = 24


@pytest.fixture(scope="module")
def vlm():
    return refvl.load(FOLDER, device="cpu", progress=False)


def drawn(count: int, split: str = "select", **how) -> list[pages.Page]:
    return [pages.draw_page(split, i, **how) for i in range(count)]


# -------------------------------------------------------------------------------------------------- pages


def test_all_letters_have_nine_pixels_and_no_two_are_the_same():
    drawings = {name: "".join(rows) for name, rows in pages.LETTERS.items()}
    assert {drawing.count("#") for drawing in drawings.values()} == {9}
    assert len(set(drawings.values())) == len(drawings)
    assert all(len(row) == 5 for rows in pages.LETTERS.values() for row in rows)


def test_pages_are_a_function_of_split_and_number():
    page = pages.draw_page("test", 3)
    assert page == pages.draw_page("test", 3)
    assert page not in (pages.draw_page("train", 3), pages.draw_page("test", 4))
    assert np.array_equal(pages.render(page), pages.render(page))
    with pytest.raises(ValueError, match="split: expected one of"):
        pages.draw_page("exam", 0)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_box_stands_inside_one_patch_in_its_colour(crowded):
    """Oracle: the pixels. Around a box, its patch is background."""
    for page in drawn(20, crowded=crowded):
        pixels, background = pages.render(page).astype(float), np.array(page.background)
        for box in page.boxes:
            x, y = box.corner
            assert x % 14 <= 5 and y % 14 <= 5
            square = pixels[y : y + 9, x : x + 9]
            ink, filled = square.min(-1) >= 250, np.abs(square - np.array(box.rgb)).max(-1) <= 1
            assert (ink ^ filled).all() and filled.sum() == 72
            assert ["".join(".#"[p] for p in row) for row in ink[2:7, 2:7].astype(int)] == list(
                pages.LETTERS[box.letter]
            )
            patch = pixels[y // 14 * 14 :, x // 14 * 14 :][:14, :14]
            assert (np.abs(patch - background).max(-1) > 60).sum() == 72
            nearest = min(pages.COLORS, key=lambda c: np.abs(np.array(pages.COLORS[c]) - box.rgb).sum())
            assert nearest == box.color


def test_labels_and_answers_agree_with_the_boxes():
    names, colors = list(pages.LETTERS), list(pages.COLORS)
    for page in drawn(30):
        crops, quarters = pages.crop_labels(page), pages.quarter_labels(page)
        assert (crops[:, 0] > 0).sum() == (quarters[:, 0] > 0).sum() == len(page.boxes)
        questions = pages.all_questions(page)
        for box in page.boxes:
            x, y = box.corner
            expected = [1 + names.index(box.letter), 1 + colors.index(box.color)]
            assert crops[y // 56 * 4 + x // 56].tolist() == expected
            assert quarters[y // 112 * 2 + x // 112].tolist() == expected
            place = ("top", "bottom")[y // 112] + " " + ("left", "right")[x // 112]
            for kind, text, answer in (
                ("letter", f"Which letter is in the {box.color} box?", box.letter),
                ("place", f"Where is the {box.color} box?", place),
                ("color", f"What color is the box in the {place}?", box.color),
            ):
                assert pages.Question(kind, text, answer) in questions[kind]
        assert len(questions["place"]) == len({q.text for q in questions["place"]}), "no two boxes share a colour"


# ----------------------------------------------------------------------------------------------- training


def training_model(vlm, crops: bool) -> tuple[TinyModel, PromptBuilder]:
    """The committed weights in the model that is trained."""
    family = TinyStep3(enable_crops=crops)
    tokenizer = family.train_tokenizer()
    config = family.config(tokenizer)
    model = TinyModel(family, config)
    weights = {f"visual.{name}": tensor for name, tensor in vlm.encoder.state_dict().items()}
    model.load_state_dict(weights | vlm.language_model.state_dict())
    return model.eval(), PromptBuilder(family, tokenizer, config)


@pytest.mark.parametrize("crops", [True, False])
def test_training_sees_the_rows_that_patchify_makes(crops):
    """Oracle: refvl.pixels.crops, which is held against vLLM's crops."""
    config = CropConfig(image_size=84, crop_size=56, max_side=336, enable_crops=crops)
    pixels = [pages.render(page) for page in drawn(3)]
    rows, layouts = TinyStep3(enable_crops=crops).patchify(torch.from_numpy(np.stack(pixels))[:, None])
    expected = [patchify_crops(load_image(page), config) for page in pixels]
    assert layouts == [layout for _, layout in expected]
    assert_agree(rows, torch.cat([rows for rows, _ in expected]), 4)


@pytest.mark.parametrize("crops", [True, False])
@torch.no_grad()
def test_questions_in_one_row_are_answered_as_if_asked_alone(vlm, crops):
    """Oracle: the public path, one question per prompt: the same ids, and the same logits of every answer token."""
    model, builder = training_model(vlm, crops)
    chosen = drawn(2)
    questions = [pages.draw_questions(page, ["letter", "place", "color"], np.random.default_rng(0)) for page in chosen]
    pixels = [pages.render(page) for page in chosen]
    batch = builder.batch(np.stack(pixels)[:, None], questions)
    logits, *_ = model(batch)
    set_crops(vlm, crops)
    for number, (i, question) in enumerate((i, question) for i, row in enumerate(questions) for question in row):
        trace = vlm.trace(question.text, images=[pixels[i]], max_new_tokens=1)
        of_question = batch.question_of_target == number
        answer = batch.targets[of_question]
        embeds = torch.cat([trace.inputs_embeds, vlm.language_model.get_input_embeddings()(answer[:-1])])
        alone = vlm.language_model(inputs_embeds=embeds[None]).logits[0, -len(answer) :]
        assert_agree(logits[of_question], alone, model)
        assert vlm.processor.text(answer) == question.answer


def test_position_table_learns_through_both_sizes(vlm):
    """Gradients reach it from crops, where it is resized, and from overviews."""
    for crops in (True, False):
        model, _ = training_model(vlm, crops)
        pixels = torch.from_numpy(pages.render(drawn(1)[0]))[None, None]
        media_BMD = model.encode(pixels)
        (media_BMD[:, :-4] if crops else media_BMD).square().sum().backward()
        gradient = model.visual.vision_model.embeddings.position_embedding.weight.grad
        assert (gradient[1:].abs().sum(-1) > 0).all()


# --------------------------------------------------------------------------------------------- checkpoint


def test_the_architecture_is_step3s(vlm):
    text = vlm.config.text_config
    assert [layer.use_moe for layer in vlm.language_model.model.layers] == [False, True, True]
    assert (text.num_key_value_heads, text.moe_top_k) == (1, 3) and text.share_q_dim < 4 * text.head_dim
    assert vlm.encoder.config.crop_size < vlm.encoder.config.image_size


@pytest.mark.parametrize("kind", pages.PHRASES)
def test_crops_tell_the_letter_and_the_overview_does_not(vlm, kind):
    """A sample of what is measured below, on other pages."""
    shares = {}
    for crops in (True, False):
        set_crops(vlm, crops)
        right = evaluate(vlm, kind, SAMPLE, split="select")
        shares[crops] = sum(right) / len(right)
    assert shares[True] >= 0.9
    assert shares[False] <= 0.4 if kind == "letter" else shares[False] >= 0.85


def test_the_demo_page_is_read(vlm):
    """All of its questions, from the file."""
    page = demo_page()
    assert np.array_equal(np.asarray(load_image(PICTURE)), pages.render(page))
    set_crops(vlm, True)
    for question in (q for questions in pages.all_questions(page).values() for q in questions):
        assert vlm.chat(question.text, images=[PICTURE], max_new_tokens=16) == question.answer


def test_graphs_and_batches_answer_the_same(vlm):
    set_crops(vlm, True)
    requests = [
        {"prompt": "Which letter is in the red box?", "images": [pages.render(page)]} for page in drawn(4, "demo")
    ]
    expected = [vlm.chat(**request, max_new_tokens=6) for request in requests]
    graphed = refvl.load(FOLDER, device="cpu", progress=False, graphs={"max_budget": 64})
    assert graphed.chat_batch(requests, max_new_tokens=6) == expected
    assert graphed.graphs.path_stats()["local"].hits and graphed.graphs.path_stats()["global"].hits


def test_words_have_one_token_and_marks_are_special(vlm):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for word in (*pages.LETTERS, *pages.COLORS, "Which", " letter"):
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1
    assert tokenizer.convert_ids_to_tokens(vlm.config.image_token_id) == "<im_patch>"
    marks = "<patch_start><patch_end><patch_newline><im_start><im_end>"
    assert tokenizer.decode(tokenizer(marks)["input_ids"], skip_special_tokens=True) == ""
