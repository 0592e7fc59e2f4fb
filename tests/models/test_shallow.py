"""Random checkpoints of a released shape at reduced depth.

Oracle: the config, and transformers, which loads them.
"""

import json

import pytest
from transformers import AutoModelForImageTextToText

import refvl
from refvl.paths import DATA
from refvl.study.shallow import write_shallow

FAMILIES = {"tiny-qwen2_5_vl": 1, "tiny-qwen3_vl": 2, "tiny-glm4v": 1}  # and the least depth


@pytest.fixture
def wide(tmp_path):
    """The config of a shipped model with another width, vocabulary and depth, as a release of its
    own."""

    def make(name: str):
        config = json.loads((DATA / "checkpoints" / name / "config.json").read_text())
        config["text_config"] |= {"intermediate_size": 352, "vocab_size": 5000, "num_hidden_layers": 9}
        config["vision_config"] |= {"depth": 9}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        return path

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_widths_are_the_release_s_and_words_the_small_checkpoint_s(name, wide, tmp_path):
    like = DATA / "checkpoints" / name
    folder = write_shallow(wide(name), tmp_path / "shallow", like=like, depth=FAMILIES[name])
    model = refvl.load(folder, device="cpu", progress=False)
    small = refvl.load(like, device="meta", weights="random")
    text = model.language_model.config
    assert model.encoder.config.depth == text.num_hidden_layers == FAMILIES[name]
    assert text.intermediate_size == 352
    assert text.vocab_size == small.language_model.config.vocab_size
    assert model.token_ids == small.token_ids
    theirs = AutoModelForImageTextToText.from_pretrained(folder)
    ours = [*model.encoder.parameters(), *model.language_model.parameters()]
    assert sum(p.numel() for p in ours) == sum(p.numel() for p in theirs.parameters())
    trace = model.trace("Where?", images=[DATA / "pictures/scene.png"], max_new_tokens=2)
    assert len(trace.token_ids) == 2


def test_what_cannot_be_cut_is_refused(wide, tmp_path):
    qwen, glm = (DATA / "checkpoints" / f"tiny-{name}" for name in ("qwen3_vl", "glm4v"))
    with pytest.raises(ValueError, match="like: expected a checkpoint of glm4v, got a checkpoint of qwen3_vl"):
        write_shallow(wide("tiny-glm4v"), tmp_path / "x", like=qwen)
    with pytest.raises(ValueError, match="depth: expected at least 2 layers for qwen3_vl, got 1"):
        write_shallow(wide("tiny-qwen3_vl"), tmp_path / "x", like=qwen, depth=1)
    with pytest.raises(ValueError, match="folder: expected a new or empty folder"):
        write_shallow(wide("tiny-glm4v"), tmp_path, like=glm)
