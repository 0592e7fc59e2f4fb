"""What training computes for itself is what the public path computes, and training starts for every
shipped model.

Oracle: traces of the shipped models, which are held against transformers.
"""

import numpy as np
import pytest
import torch
from closeness import assert_agree
from shipped import is_read_here, shipped

import refvl
from data.training import evaluate_step3, evaluate_tiny, pages, relations, run, scenes, train_step3, train_tiny
from data.training.tiny_family import FAMILIES, STEP3, TinyStep3, family_names, find_family
from data.training.tiny_model import PromptBuilder, TinyModel, row_mask

NAMES = [name for name in (*FAMILIES, "step3") if is_read_here(FAMILIES.get(name, STEP3).folder.name)]
SORTS = [(name, sort) for name in family_names() if name in NAMES for sort in ("picture", *FAMILIES[name].clips)]
LEVEL = 1 / (255 * 0.5)  # of a pixel, as Qwen3-VL scales it: what two ways to resize an image may differ by


def in_training(family) -> tuple[TinyModel, PromptBuilder]:
    """The shipped weights in the form for training."""
    model = TinyModel(family)
    model.take_over(refvl.load(family.folder, device="cpu", dtype="float32", progress=False))
    return model.eval(), PromptBuilder(family)


def check_alone(vlm, trace, question, of_question, logits, batch) -> None:
    """One question of a batch against its own prompt: the ids up to the answer, and the logits of
    its every token."""
    answer = batch.targets[of_question]
    embeds = torch.cat([trace.inputs_embeds, vlm.language_model.get_input_embeddings()(answer[:-1])])
    deeper = torch.nn.functional.pad(trace.deepstack, (0, 0, 0, len(answer) - 1))
    more = torch.arange(1, len(answer)) + trace.positions.amax()
    positions = torch.cat([trace.positions, more.expand(len(trace.positions), -1)], 1)
    given = {"deepstack_embeds": deeper[None]} if trace.deepstack.numel() else {}
    with torch.inference_mode():
        alone = vlm.language_model(inputs_embeds=embeds[None], position_ids=positions[:, None], **given)
    assert_agree(logits[of_question], alone.logits[0, -len(answer) :], vlm.language_model)
    assert vlm.processor.text(answer) == question.answer


ASKED = {"picture": ["color", "place"], "motion": ["motion", "color"], "change": ["change", "becomes"]}


@pytest.mark.parametrize(("name", "sort"), SORTS)
@torch.no_grad()
def test_questions_in_one_row_are_answered_as_if_asked_alone(name, sort):
    """Rows of pixels, layouts, prompt ids, positions and spans are the pipeline's; then the logits
    of every answer."""
    family, vlm = FAMILIES[name], shipped(FAMILIES[name].folder.name)
    model, builder = in_training(family)
    scene = scenes.draw_sort(sort, "test", 2)
    questions = scenes.draw_questions(scene, ASKED[sort], np.random.default_rng(0))
    is_picture = sort == "picture"
    pixels = torch.from_numpy(scenes.render(scene))[None]
    if is_picture:
        pixels = pixels[None]
    seconds = None if is_picture else [scene.seconds or scenes.SECONDS]
    batch = builder.batch(pixels, [questions], seconds=seconds)
    logits, rows = model(batch)[0], family.patchify(pixels)
    for i, question in enumerate(questions):
        trace = vlm.trace(question.text, **evaluate_tiny.media_of(scene), max_new_tokens=1)
        assert rows[1] == trace.layouts
        assert [span.offset for span in batch.spans] == [span.offset for span in trace.spans]
        if name == "qwen3_vl" and is_picture:  # training resizes as the processor resizes videos
            assert float((rows[0] - trace.patches[0].pixel_values).abs().max()) <= 1.01 * LEVEL
            continue
        assert_agree(rows[0], trace.patches[0].pixel_values, 4)
        if i == 0:
            length = len(trace.full_ids)
            assert batch.ids_BL[0, :length].tolist() == trace.full_ids.tolist()
            assert torch.equal(batch.positions_3L[-len(trace.positions) :, :length], trace.full_positions)
        check_alone(vlm, trace, question, batch.question_of_target == i, logits, batch)


@pytest.mark.parametrize("crops", [True, False])
@torch.no_grad()
def test_questions_about_pages_are_answered_as_if_asked_alone(crops):
    """Step3, with crops and without."""
    vlm = refvl.load(STEP3.folder, device="cpu", progress=False)
    evaluate_step3.set_crops(vlm, crops)
    model, builder = in_training(TinyStep3(enable_crops=crops))
    page = pages.draw_page("select", 0)
    questions = pages.draw_questions(page, ["letter", "place", "color"], np.random.default_rng(0))
    batch = builder.batch(pages.render(page)[None, None], [questions])
    logits = model(batch)[0]
    for i, question in enumerate(questions):
        trace = vlm.trace(question.text, images=[pages.render(page)], max_new_tokens=1)
        assert_agree(model.family.patchify(batch.pixels)[0], trace.patches[0].pixel_values, 4)
        check_alone(vlm, trace, question, batch.question_of_target == i, logits, batch)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_training_starts_and_writes_a_folder_that_loads(name, tmp_path):
    """Four steps: the tower alone, then with the language model, asides and photographs; every
    weight learns."""
    few = {"steps": 4, "see": 1, "warmup": 1, "measure_every": 100, "measure_on": 2}
    small = few | {"pictures": 4, "clips": 2, "photos": 2, "picture_pool": 8, "clip_pool": 4, "picture_batches": 2}
    if name == "step3":
        trainer = train_step3.Trainer(train_step3.Recipe(**few), 0)
    else:
        trainer = train_tiny.make_trainer(name, train_tiny.Recipe(**small), 0)
    before = {key: weight.clone() for key, weight in trainer.learner.vlm.named_parameters()}
    losses = torch.stack([trainer.train_step() for _ in range(4)])
    assert losses.isfinite().all() and losses.any(0).sum() >= 3
    after = dict(trainer.learner.vlm.named_parameters())
    assert [key for key, weight in before.items() if weight.equal(after[key])] == []
    assert set(trainer.measure().values()) <= {i / 2 for i in range(3)}
    trainer.write(tmp_path)
    vlm = refvl.load(tmp_path, device="cpu", progress=False)
    ours = trainer.learner.vlm.visual.state_dict()
    assert all(ours[key].bfloat16().equal(weight) for key, weight in vlm.encoder.state_dict().items())
    names = {file.name for file in trainer.family.folder.iterdir()} - {"training_log.jsonl"}
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.slow
def test_two_processes_average_their_gradients(tmp_path):
    """Oracle: the log, and the digest of what is written.

    A trainer alone keeps its own gradients.
    """
    small = {"pictures": 2, "clips": 2, "photos": 2, "picture_pool": 8, "clip_pool": 4, "measure_on": 2}
    recipe = train_tiny.Recipe(steps=2, see=1, warmup=1, measure_every=1, **small)
    run.train(train_tiny.make_trainer, ("qwen2_5_vl", recipe), tmp_path)
    lines = (tmp_path / "training_log.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert run.digest(tmp_path) in lines[-1]
    assert run.digest(tmp_path) not in lines[1]
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    before, losses = layer.weight.grad.clone(), torch.ones(2)
    assert run.average_gradients(layer, losses).equal(losses)
    assert layer.weight.grad.equal(before)


def test_row_mask():
    """Oracle: the mask written out for two prefix tokens and two tails of two."""
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    expected += [[1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]
    assert row_mask(2, 2, 2).int().tolist() == expected


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="model: expected one of .*'glm4v'.*, got 'gpt'"):
        find_family("gpt")
    with pytest.raises(ValueError, match="begin_with: expected the digest of the weights in .*tiny-glm4v"):
        train_tiny.make_trainer("glm4v_table", train_tiny.Recipe(begin_with="0" * 64), 0)


def test_muon_is_that_of_torch_without_its_bfloat16(monkeypatch):
    """Three steps of a wide and a tall matrix in float64.

    Oracle: torch's own, with its bfloat16 left out.
    """
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
        assert torch.allclose(one, other, rtol=1e-9)


# ------------------------------------------------------------------------------------ tables and other sizes

CELLS = [(3, 3), (4, 4), (2, 5), (4, 3), (2, 2)]  # rows and columns of tokens


def place_of(token: int, cells: tuple[int, int]) -> int:
    """The place in which the middle of a token lies."""
    row, column = divmod(token, cells[1])
    return int((row + 0.5) * 3 / cells[0]) * 3 + int((column + 0.5) * 3 / cells[1])


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_exchanges_tell_the_place_that_is_asked_for(cells):
    """Of vectors, and of positions.

    Oracle: the place in which the middle of each patch, or token, lies.
    """
    rng, (h, w) = np.random.default_rng(0), cells
    rows_and_columns = [(2 * r + i, 2 * c + j) for r in range(h) for c in range(w) for i in (0, 1) for j in (0, 1)]
    places = [place_of(row * 2 * w + column, (2 * h, 2 * w)) for row, column in rows_and_columns]
    for _ in range(40):
        table, order = train_tiny.draw_table(cells, rng)
        assert sorted(table) == list(range(4 * h * w))
        assert [places[patch] for patch in table] == [order[place] for place in places]
        tokens, order = train_tiny.draw_order(cells, rng)
        assert sorted(tokens) == list(range(h * w))
        assert [place_of(t, cells) for t in tokens] == [order[place_of(i, cells)] for i in range(len(tokens))]


def test_an_exchange_in_training_is_an_exchange_of_weights():
    """Oracle: the public tower, with rows and columns of its table exchanged."""
    ours, _ = in_training(find_family("glm4v"))
    scene = scenes.render(scenes.draw_scene("test", 3))
    table = np.add.outer(4 * scenes.TRANSPOSED, (0, 2, 1, 3)).flatten()
    with torch.no_grad():
        exchanged = ours.encode(torch.from_numpy(scene)[None, None], table=table)[0]
    change = {"position_table": evaluate_tiny.transposed_table}
    [wanted] = shipped("tiny-glm4v").trace("?", images=[scene], max_new_tokens=1, replace=change).embeds
    assert_agree(exchanged, wanted, ours.visual)


# -------------------------------------------------------------------------------- rotary angles and windows


def test_neighbours_and_windows_are_those_of_the_plan():
    """Oracle: the rows and columns in the changed plan itself, and which tokens its windows
    contain."""
    plan = shipped("tiny-qwen2_5_vl").encoder.plan([(1, 6, 6)] * 2)
    rng, same = np.random.default_rng(0), relations.AS_IT_IS(plan)
    for field in ("positions", "window_index", "reverse_index"):
        assert getattr(same, field).equal(getattr(plan, field))
    for _ in range(10):
        seen = relations.Arrangement(rng.permutation(9), rng.permutation(9))
        changed = seen(plan)
        patches = changed.positions.unflatten(0, (-1, 4))[changed.reverse_index].unflatten(0, (2, 9))
        assert patches[0].equal(patches[1])
        assert (patches // 2 == patches[..., :1, :] // 2).all()
        places = (patches[0, :, 0] // 2).tolist()
        sizes = (changed.cu_window_seqlens // 4).diff().tolist()
        windows = [set(window.tolist()) for window in changed.window_index.split(sizes)]
        for cell, (row, column) in enumerate(places):
            for way, (down, right) in relations.WAYS.items():
                there = [row + down, column + right]
                wanted = places.index(there) if there in places else None
                assert seen.neighbour(cell, way) == wanted
            assert [set(seen.others(cell)) | {cell}] == [window for window in windows if cell in window]
