"""Figures of attention and states, and what the explorers of the model at work are made of."""

import numpy as np
import pytest
import torch
from shipped import shipped

from refvl import viz
from refvl.paths import DATA
from refvl.study.watch import media_attention, probabilities

PICTURE = np.zeros((40, 60, 3), dtype=np.uint8)
SCENE = DATA / "pictures" / "scene.png"


@pytest.fixture(scope="module")
def model():
    return shipped("tiny-qwen2_5_vl")


def test_a_cell_is_as_dark_as_it_is_ignored():
    """Oracle: the shares themselves; the largest cell keeps its colours, and each share is written into its cell."""
    weights = torch.tensor([[0.5, 0.25, 0.0], [0.125, 0.125, 0.0]])
    ax = viz.plot_attention(PICTURE, weights, patch=(0, 2), segments_HW=[[0, 0, 1], [0, 0, 1]], title="a title")
    veil = ax.images[1].get_array()
    assert np.allclose(veil[..., 3] / veil[..., 3].max(), 1 - weights / 0.5) and not veil[..., :3].any()
    assert [text.get_text() for text in ax.texts] == ["50%", "25%", "0%", "12%", "12%", "0%"]
    assert ax.get_title() == "a title" and ax.patches[0].get_xy() == (2, 0)
    assert len(ax.collections[0].get_segments()) == 2
    with pytest.raises(ValueError, match="weights_HW"):
        viz.plot_attention(PICTURE, weights.flatten())


def test_colours_are_principal_components():
    """Oracle: numpy's singular value decomposition; a colour may round the other way."""
    pytest.importorskip("anywidget")
    from refvl.viz.explorers.tower import project_colors

    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(3, n, 12, generator=generator) * torch.arange(12, 0, -1) for n in (20, 30)]
    together = torch.cat([s.flatten(0, 1) for s in states]).double().numpy()
    centred = together - together.mean(0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:3].T
    directions *= np.sign(directions[np.abs(directions).argmax(0), range(3)])
    values = centred @ directions
    low, high = np.quantile(values, [0.02, 0.98], axis=0)
    want = np.clip((values - low) / (high - low), 0, 1) * 255
    got = np.concatenate([c.reshape(-1, 3) for c in project_colors(states)])
    assert np.abs(got - want).max() <= 1
    assert [c.shape for c in project_colors(states)] == [(3, 20, 3), (3, 30, 3)]


def test_what_an_answer_takes_from_its_media(model):
    """Oracle: the rows of the attention, token by token; of a pruned clip those that stay, and zeros elsewhere."""
    clip = DATA / "clips" / "scene.mp4"
    trace = model.trace("Which way does the circle move?", images=[SCENE], videos=[clip], pruning_rate=0.5,
                        attentions=True, hidden_states=True)  # fmt: skip
    kept = trace.keep.nonzero().flatten().tolist()
    for medium, span in enumerate(trace.spans):
        for token in range(len(trace.token_ids)):
            got = media_attention(trace, medium, token)
            for i in range(span.num_tokens):
                place = span.offset + i
                row = len(trace.input_ids) - 1 + token
                want = [a[:, row, kept.index(place)] if place in kept else torch.zeros(4) for a in trace.attentions]
                assert torch.equal(got[:, :, i], torch.stack(want))
    chances = probabilities(model.language_model, trace)
    assert chances.argmax(1).tolist() == trace.token_ids
    for wrong, message in (
        ({"medium": 2}, "medium: expected an index in"),
        ({"token": -1}, "token: expected an index in"),
    ):
        with pytest.raises(ValueError, match=message):
            media_attention(trace, **wrong)
    plain = model.trace("What color is the circle?", images=[SCENE])
    with pytest.raises(ValueError, match="trace: expected attentions"):
        media_attention(plain)
    with pytest.raises(ValueError, match="trace: expected hidden states"):
        probabilities(model.language_model, plain)


def test_an_explorer_asks_again(model):
    """Another picture and question in the same view; the answer is the model's."""
    pytest.importorskip("anywidget")
    for explore in (viz.explore_attention, viz.explore_tower):
        explorer = explore(model, {"first": ("What color is the circle?", SCENE)})
        explorer.ask({"rocket": ("What is in the picture?", DATA / "pictures" / "rocket.jpg")})
        assert "a rocket" in explorer.describe() and explorer.selected >= 0
    explorer = viz.explore_evs(model, {"way": ("Which way does the circle move?", DATA / "clips" / "scene.mp4")})
    assert '"up"' in explorer.describe()
    explorer.ask({"color": ("What color is the circle?", DATA / "clips" / "scene.mp4")})
    assert '"blue"' in explorer.describe()


def test_explorers_refuse_what_they_cannot_draw(model, monkeypatch):
    pytest.importorskip("anywidget")
    monkeypatch.setattr("refvl.viz.explorers.watched.MAX_PATCHES", 30)
    with pytest.raises(ValueError, match="questions: expected at least one"):
        viz.explore_attention(model, {})
    with pytest.raises(ValueError, match=r"questions\['large'\]: expected an image of at most 30 patches, got 36"):
        viz.explore_tower(model, {"large": ("Why?", SCENE)})
    other = shipped("tiny-minicpmv-4_5")
    with pytest.raises(ValueError, match="model: expected a family with grids of patches, got MiniCPM-V 4.5"):
        viz.explore_attention(other, {"one": ("Why?", SCENE)})
