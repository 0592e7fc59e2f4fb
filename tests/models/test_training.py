"""What training computes for itself is what the public path computes, for the families whose images are grids.

Oracle: traces of the shipped models, which are held against transformers.
"""

import numpy as np
import pytest
import torch
from closeness import assert_agree
from safetensors.torch import load_file
from shipped import shipped

from data.training import evaluate_tiny, run, scenes
from data.training.tiny_family import find_family
from data.training.tiny_model import PromptBuilder, TinyModel, row_mask

LEVEL = 1 / (255 * 0.5)  # of a pixel, as Qwen3-VL scales it: what two ways to resize an image may differ by


@pytest.fixture(scope="module", params=["qwen2_5_vl", "glm4v", "qwen3_vl"])
def trained(request):
    """(family, shipped model, builder of prompts)."""
    family = find_family(request.param)
    tokenizer = family.train_tokenizer()
    return family, shipped(family.folder.name), PromptBuilder(family, tokenizer, family.config(tokenizer))


@pytest.mark.parametrize("sort", ["picture", "motion", "change"])
def test_training_sees_the_rows_and_the_prompt_that_the_pipeline_makes(trained, sort):
    family, model, builder = trained
    if sort not in ("picture", *family.clips):
        pytest.skip("not asked in this family's training")
    scene = scenes.draw_sort(sort, "test", 1)
    pixels, is_picture = scenes.render(scene), sort == "picture"
    pixels = torch.from_numpy(pixels[None] if is_picture else pixels)[None]
    [question] = scenes.draw_questions(scene, ["color"], np.random.default_rng(0))
    trace = model.trace(question.text, **evaluate_tiny.media_of(scene), max_new_tokens=1)
    rows, layouts = family.patchify(pixels)
    assert layouts == trace.layouts
    if family.name == "qwen3_vl" and is_picture:  # training resizes as the processor resizes videos
        assert float((rows - trace.patches[0].pixel_values).abs().max()) <= 1.01 * LEVEL
    else:
        assert_agree(rows, trace.patches[0].pixel_values, 4)

    seconds = None if is_picture else [scene.seconds or scenes.SECONDS]
    batch, length = builder.batch(pixels, [[question]], seconds=seconds), len(trace.full_ids)
    assert batch.ids_BL[0, :length].tolist() == trace.full_ids.tolist()
    assert torch.equal(batch.positions_3L[:, :length], trace.full_positions)
    assert batch.spans == trace.spans
    times = [] if is_picture else trace.full_ids[family.time_columns(batch.spans)].tolist()
    if family.name == "glm4v":
        assert [model.processor.text([i]) for i in times] == [str(int(s)) for row in seconds or [] for s in row]
    elif family.name == "qwen3_vl":
        assert set(times) <= {model.config.vision_end_token_id}


def test_questions_in_one_row_are_answered_as_if_asked_alone(trained):
    """One question per prompt, with deeper features where there are some: the logits of the first answer token."""
    family, model, builder = trained
    ours = TinyModel(family, builder.config)
    names = dict(ours.named_parameters())
    with torch.no_grad():
        for name, tensor in load_file(family.folder / "model.safetensors").items():
            name = name.replace("model.visual", "visual").replace("model.language_model", "model")
            names[name].copy_(tensor.reshape(names[name].shape))
    sort, *kinds = ("change", "changer", "becomes") if "change" in family.clips else ("motion", "color", "mover")
    scene = scenes.draw_sort(sort, "test", 2)
    questions = scenes.draw_questions(scene, [sort, *kinds], np.random.default_rng(0))
    seconds = scene.seconds or scenes.SECONDS
    with torch.no_grad():
        batch = builder.batch(scenes.render(scene)[None], [questions], seconds=[seconds])
        logits = ours(batch)[0]
    for i, question in enumerate(questions):
        trace = model.trace(question.text, **evaluate_tiny.media_of(scene), max_new_tokens=1)
        deeper = {"deepstack_embeds": trace.deepstack[None]} if trace.deepstack.numel() else {}
        alone = model.language_model(
            inputs_embeds=trace.inputs_embeds[None], position_ids=trace.positions[:, None], logits_to_keep=1, **deeper
        ).logits[0, 0]
        first = int((batch.question_of_target == i).nonzero()[0])
        assert_agree(logits[first], alone, ours)


def test_row_mask():
    """Oracle: the mask written out for two prefix tokens and two tails of two."""
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    expected += [[1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]
    assert row_mask(2, 2, 2).int().tolist() == expected


def test_seconds_of_unequal_length_are_refused():
    family = find_family("glm4v")
    tokenizer = family.train_tokenizer()
    builder = PromptBuilder(family, tokenizer, family.config(tokenizer))
    drawn = [scenes.draw_change("test", index) for index in range(2)]
    questions = [scenes.draw_questions(scene, ["change"], np.random.default_rng(0)) for scene in drawn]
    pixels = np.stack([scenes.render(scene) for scene in drawn])
    with pytest.raises(ValueError, match="seconds: prompts of one batch must be alike"):
        builder.batch(pixels, questions, seconds=[(1, 2, 3, 4), (1, 2, 3, 4000)])


def test_families_are_known_by_name():
    with pytest.raises(ValueError, match="model: expected one of .*'glm4v'.*'qwen2_5_vl'.*, got 'gpt'"):
        find_family("gpt")


def test_muon_is_that_of_torch_without_its_bfloat16(monkeypatch):
    """Three steps of a wide and a tall matrix in float64. Oracle: torch's own, with its bfloat16 left out."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.eye(*shape).double()) for shape in ((6, 9), (9, 4))] for _ in range(2))
    optimizers = (
        run.Muon(ours, lr=0.02, weight_decay=0.01),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn(one.shape, generator=generator).double()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-9) and not torch.allclose(
            one, torch.eye(*one.shape).double(), atol=0.01
        )
