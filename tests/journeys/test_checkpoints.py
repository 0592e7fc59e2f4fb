"""Oracle: the same weights under the original naming; every damage to a folder is one clear error."""

import json

import pytest
import torch
from checkpoint_factory import change_json, change_weights, make_checkpoint
from random_models import load
from safetensors.torch import load_file, save_file

import refvl
from refvl.checkpoints import find_checkpoint
from refvl.paths import DATA

PHOTO = DATA / "pictures" / "coffee.jpg"


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "model")


def after_4_52(name):
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def as_vllm(name):
    return name if name.startswith("visual.") else f"language_model.{name}"


@pytest.mark.parametrize("name", sorted(path.name for path in (DATA / "checkpoints").iterdir()))
def test_a_shipped_model_is_found_by_its_name(name, tmp_path, monkeypatch):
    """From any folder; a folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(name) == DATA / "checkpoints" / name
    make_checkpoint(tmp_path / name)
    assert find_checkpoint(name).resolve() == tmp_path / name


def test_an_unknown_name_is_answered_with_those_that_are_shipped():
    with pytest.raises(
        FileNotFoundError, match=r"path_or_id: expected an existing folder, .* \(.*tiny-glm4v, .*\), got tiny-qwen"
    ):
        find_checkpoint("tiny-qwen")


NAMINGS = {
    "after 4.52": lambda weights: {after_4_52(name): tensor for name, tensor in weights.items()},
    "vLLM": lambda weights: {as_vllm(name): tensor for name, tensor in weights.items()},
}


@pytest.mark.parametrize("rename", NAMINGS.values(), ids=NAMINGS.keys())
def test_every_naming_loads_to_the_same_model(folder, rename):
    question = {"prompt": "What is it?", "images": [PHOTO], "max_new_tokens": 6}
    expected = load(folder).trace(**question)
    before = load_file(folder / "model.safetensors").keys()
    trace = load(change_weights(folder, rename)).trace(**question)
    assert load_file(folder / "model.safetensors").keys() != before
    assert trace.token_ids == expected.token_ids
    assert torch.equal(trace.embeds[0], expected.embeds[0])


def test_shards_with_an_index(folder):
    expected = load(folder).encode(images=[PHOTO])[0]
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(weights), {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(load(folder).encode(images=[PHOTO])[0], expected)
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match="shards that do not exist.*00002-of-00002"):
        load(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(folder, dtype):
    vlm = load(folder, dtype=dtype)
    assert load(folder).encoder.dtype == torch.float32, "the default on a CPU"
    assert {p.dtype for m in (vlm.encoder, vlm.language_model) for p in m.parameters()} == {getattr(torch, dtype)}
    assert vlm.chat("Hi", images=[PHOTO], max_new_tokens=2) is not None


def test_no_remote_code_runs(folder):
    """A config that points to code beside it: the code is not imported, the family is refused."""
    (folder / "evil.py").write_text("raise SystemExit('this code must never run')")
    evil = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    change_json(folder / "config.json", lambda config: config | evil)
    with pytest.raises(ValueError, match="model_type: 'evil' is not supported; supported: .*qwen2_5_vl"):
        load(folder)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="path_or_id: expected an existing folder, .*, got .*/nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="contains no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load(tmp_path)


REFUSED = {
    "weights: expected 'checkpoint' or 'random'": {"weights": "none"},
    "device: Expected one of cpu, cuda": {"device": "nowhere"},
    "attention: expected one of": {"attention": "fast"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_load_refuses(folder, message):
    with pytest.raises(ValueError, match=message):
        refvl.load(folder, **{"device": "cpu", "progress": False} | REFUSED[message]).chat("Hi", images=[PHOTO])


def test_random_weights_from_a_config_alone(folder):
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="weights: a config alone contains no weights"):
        refvl.load(config)
    first, second = (refvl.load(config, weights="random", device="cpu") for _ in range(2))
    rows = torch.randn(16, 1176)
    assert torch.equal(first.encoder(rows, [(1, 4, 4)]), second.encoder(rows, [(1, 4, 4)]))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(first.generate(ids, max_new_tokens=3), second.generate(ids, max_new_tokens=3))


def test_tied_embeddings(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    change_weights(folder, lambda weights: {name: t for name, t in weights.items() if name != "lm_head.weight"})
    model = load(folder).language_model
    assert model.lm_head.weight is model.get_input_embeddings().weight
