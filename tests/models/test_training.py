"""What training computes for itself is what the public path computes, for the families whose images are grids.

Oracle: traces of the shipped models, which are held against transformers.
"""

import itertools

import numpy as np
import pytest
import torch
from closeness import assert_agree
from safetensors.torch import load_file
from shipped import is_read_here, shipped

from data.training import evaluate_tiny, relations, run, scenes, train_tiny
from data.training.tiny_family import family_names, find_family
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


# ------------------------------------------------------------------------------------ tables and other sizes

TABLE = find_family("glm4v_table")


def place_of(token: int, cells: tuple[int, int]) -> int:
    """The place in which the middle of a token lies."""
    row, column = divmod(token, cells[1])
    return int((row + 0.5) * 3 / cells[0]) * 3 + int((column + 0.5) * 3 / cells[1])


CELLS = [(3, 3), (4, 4), (2, 5), (4, 3), (2, 2)]  # rows and columns of tokens


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_exchanged_vectors_tell_the_place_that_is_asked_for(cells):
    """Oracle: the place in which the middle of each patch lies. Of nine tokens, the patches stay together."""
    rng, seen, (h, w) = np.random.default_rng(0), set(), cells
    rows_and_columns = [(2 * r + i, 2 * c + j) for r in range(h) for c in range(w) for i in (0, 1) for j in (0, 1)]
    places = [place_of(row * 2 * w + column, (2 * h, 2 * w)) for row, column in rows_and_columns]
    for _ in range(40):
        table, order = train_tiny.draw_table(cells, rng)
        assert sorted(table) == list(range(4 * h * w))
        assert [places[patch] for patch in table] == [order[place] for place in places]
        if cells == (3, 3):
            tokens = table.reshape(-1, 4) // 4
            assert (tokens == tokens[:, :1]).all()
        seen.add(tuple(table))
    assert len(seen) > 3


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_exchanged_positions_tell_the_place_that_is_asked_for(cells):
    """Oracle: the place in which the middle of each token lies. An axis of two tokens keeps its order."""
    rng, seen = np.random.default_rng(0), set()
    for _ in range(40):
        tokens, order = train_tiny.draw_order(cells, rng)
        assert sorted(tokens) == list(range(cells[0] * cells[1]))
        assert [place_of(t, cells) for t in tokens] == [order[place_of(i, cells)] for i in range(len(tokens))]
        seen.add(tuple(tokens))
    assert len(seen) > {(2, 2): 1, (2, 5): 1}.get(cells, 3)


def test_an_exchange_in_training_is_an_exchange_of_weights():
    """Oracle: the public tower, with rows and columns of its table exchanged."""
    model, config = shipped("tiny-glm4v"), TABLE.config(TABLE.train_tokenizer())
    ours = TinyModel(TABLE, config)
    ours.visual.load_state_dict(model.encoder.state_dict())
    scene = scenes.render(scenes.draw_scene("test", 3))
    table = np.add.outer(4 * scenes.TRANSPOSED, (0, 2, 1, 3)).flatten()
    with torch.no_grad():
        exchanged = ours.encode(torch.from_numpy(scene)[None, None], table=table)[0]
    change = {"position_table": evaluate_tiny.transposed_table}
    [wanted] = model.trace("?", images=[scene], max_new_tokens=1, replace=change).embeds
    assert_agree(exchanged, wanted, ours.visual)


@pytest.mark.parametrize("name", [name for name in family_names() if is_read_here(find_family(name).folder.name)])
@pytest.mark.parametrize(("height", "width"), [(56, 56), (112, 112), (168, 168), (168, 84), (70, 98)])
def test_a_resized_scene_has_the_layout_of_the_pipeline(name, height, width):
    """Oracle: the shipped processor, for images, and for videos of six frames if the family resizes videos."""
    family, scene = find_family(name), torch.zeros(1, 6, 84, 84, 3, dtype=torch.uint8)
    model = shipped(family.folder.name)
    for frames, argument in ((1, "images"), (6, "videos"))[: 1 if family.packing or not family.clips else 2]:
        own = train_tiny.resize(scene[:, :frames], (height, width))
        ready = train_tiny.resize(own, family.target_size(height, width, frames))
        shown = own[0, 0].numpy() if frames == 1 else own[0].numpy()
        trace = model.trace("?", **{argument: [shown]}, max_new_tokens=1)
        assert family.patchify(ready)[1] == trace.layouts
        rows, columns = family.cells(ready.shape)
        if not family.sliced and frames == 1:  # an overview has no place of its own
            assert rows * columns == sum(span.num_tokens for span in trace.spans) - family.reads_canvas


def test_labels_of_the_patches_of_other_numbers_of_tokens():
    """Oracle: the centre of each object, in patches; near a side of a patch the object counts for both."""
    for index, (h, w) in itertools.product(range(5), ((4, 4), (2, 5))):
        scene, wanted = scenes.draw_scene("test", index), np.zeros((2 * h, 2 * w, 3), int)
        for thing, row, column in itertools.product(scene.things, range(2 * h), range(2 * w)):
            x, y = (at * count / 84 for at, count in zip(thing.center, (2 * w, 2 * h), strict=True))
            if all(-scenes.EDGE <= at - patch < 1 + scenes.EDGE for at, patch in ((y, row), (x, column))):
                wanted[row, column, :2] = 1 + scenes.SHAPES.index(thing.shape), 1 + [*scenes.COLORS].index(thing.color)
        blocks = [wanted[2 * r : 2 * r + 2, 2 * c : 2 * c + 2].reshape(4, 3) for r in range(h) for c in range(w)]
        labels = train_tiny.patch_labels([scene], (h, w))
        assert np.array_equal(labels[..., :3], np.stack(blocks))
        places = [[place_of((2 * r + i) * 2 * w + 2 * c + j, (2 * h, 2 * w)) for i in (0, 1) for j in (0, 1)]
                  for r in range(h) for c in range(w)]  # fmt: skip
        assert labels[..., 3].tolist() == places


def test_every_number_of_tokens_is_equally_frequent():
    """Oracle: `cells` of each listed size; 3 x 3 tokens need no list, because all other scenes have them."""
    for family in (find_family("qwen2_5_vl"), find_family("glm4v"), find_family("minicpmv4_7")):
        groups = train_tiny.sizes_of_cells(family, 1)
        cells = [{family.cells((1, 1, *family.target_size(*size, 1), 3)) for size in group} for group in groups]
        assert all(len(of_group) == 1 for of_group in cells) and len(set().union(*cells)) == len(groups) > 4
        assert (3, 3) not in set().union(*cells)


def test_sizes_are_within_their_limits():
    rng = np.random.default_rng(0)
    drawn = np.array([train_tiny.draw_size(rng) for _ in range(500)])
    ratios = drawn[:, 1] / drawn[:, 0]
    assert drawn.min() >= 56 and drawn.max() <= 168 and ratios.min() < 0.6 and ratios.max() > 1.7


def test_another_checkpoint_than_the_recipe_names_is_refused():
    recipe = train_tiny.Recipe(begin_with="0" * 64)
    with pytest.raises(ValueError, match="begin_with: expected the digest of the weights in .*tiny-glm4v"):
        train_tiny.make_trainer("glm4v_table", recipe, 0)


# -------------------------------------------------------------------------------- rotary angles and windows


def test_neighbours_and_windows_are_those_of_the_plan():
    """Oracle: the rows and columns in the changed plan itself, and which tokens its windows contain."""
    plan, rng = shipped("tiny-qwen2_5_vl").encoder.plan([(1, 6, 6)] * 2), np.random.default_rng(0)
    same = relations.AS_IT_IS(plan)
    assert all(getattr(same, x).equal(getattr(plan, x)) for x in ("positions", "window_index", "reverse_index"))
    for _ in range(10):
        seen = relations.Arrangement(rng.permutation(9), rng.permutation(9))
        changed = seen(plan)
        patches = changed.positions.unflatten(0, (-1, 4))[changed.reverse_index].unflatten(0, (2, 9))
        assert patches[0].equal(patches[1]) and (patches // 2 == patches[..., :1, :] // 2).all()
        places, ends = (patches[0, :, 0] // 2).tolist(), (changed.cu_window_seqlens // 4).tolist()
        windows = [set(changed.window_index[first:last].tolist()) for first, last in itertools.pairwise(ends)]
        for cell, (row, column) in enumerate(places):
            for way, (down, right) in relations.WAYS.items():
                there = [row + down, column + right]
                wanted = places.index(there) if there in places else None
                assert seen.neighbour(cell, way) == wanted
            assert [set(seen.others(cell)) | {cell}] == [window for window in windows if cell in window]


@pytest.mark.parametrize("name", ["tiny-qwen3_vl", "tiny-glm4v"])
def test_neighbours_by_the_table_are_those_of_its_vectors(name):
    """Oracle: the vectors themselves, token by token: token i gets those of the token whose place it takes."""
    plan = shipped(name).encoder.plan([(1, 6, 6)] * 2)
    seen = relations.Arrangement(np.random.default_rng(0).permutation(9), np.arange(9))
    changed = seen(plan)
    before, after = (x.position_embeds.unflatten(0, (2, 9, 4)) for x in (plan, changed))
    for cell, other in enumerate(seen.coordinates):
        assert after[:, cell].equal(before[:, other]) and not after[:, cell].equal(before[:, (other + 1) % 9])
    assert changed.positions.equal(plan.positions)


def test_relations_are_asked_and_labelled_alike():
    """Oracle: the label of the probe for the same cell and direction, under exchanged coordinates and windows."""
    rng, asked = np.random.default_rng(0), set()
    for index in range(20):
        scene = scenes.draw_scene("test", index)
        seen = relations.Arrangement(rng.permutation(9), rng.permutation(9))
        names, others = (labels.numpy() for labels in relations.labels_of([scene], seen))
        for question in relations.questions(scene, seen):
            [thing] = [t for t in scene.things if f"the {t.color} {t.shape}?" in question.text]
            if question.kind == "neighbour":
                [i] = [i for i, way in enumerate(relations.WAYS) if f" {way} " in question.text]
                shape, color = names[thing.place, i]
                words = (*scenes.COLORS,)[color - 1], scenes.SHAPES[shape - 1]
                assert question.answer == (f"a {words[0]} {words[1]}" if shape else relations.NOTHING)
            else:
                here = [(*scenes.SHAPES, *scenes.COLORS)[i] for i in np.flatnonzero(others[thing.place])]
                assert all(word in question.answer for word in here) and len(here) in (0, 2)
            asked.add((question.kind, question.answer == relations.NOTHING))
    assert len(asked) == 4
