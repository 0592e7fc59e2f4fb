"""Folders of weights, and arguments of `refvl.load`: every damage is one sentence that names it.

Oracles: the same weights under the original naming, transformers' choice of files, and the same
folder undamaged.
"""

import json
import re
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
from checkpoint_factory import change_json, change_weights, make_checkpoint
from random_models import random_folder
from safetensors.torch import load_file, save_file

import refvl
from refvl import checkpoints
from refvl.checkpoints import find_checkpoint
from refvl.paths import DATA

PHOTO = DATA / "pictures" / "coffee.jpg"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(random_folder("Qwen2.5-VL"), tmp_path / "model"))


def load(folder, **options):
    return refvl.load(folder, **{"device": "cpu", "progress": False} | options)


def refuses(folder, message, error: type[Exception] | tuple = (ValueError, FileNotFoundError), **options):
    with pytest.raises(error, match=re.escape(message)):
        load(folder, **options)


def write_index(folder, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_nothing_there(tmp_path):
    refuses(tmp_path / "nowhere", "path_or_id: expected an existing folder,")
    refuses(tmp_path, "contains no config.json")


@pytest.mark.parametrize("name", sorted(path.name for path in (DATA / "checkpoints").iterdir()))
def test_a_shipped_model_is_found_by_its_name(name, tmp_path, monkeypatch):
    """From any folder; a folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(name) == DATA / "checkpoints" / name
    make_checkpoint(tmp_path / name)
    assert find_checkpoint(name).resolve() == tmp_path / name


def test_an_unknown_name_is_answered_with_those_that_are_shipped():
    known = r"path_or_id: expected an existing folder, .* \(.*tiny-glm4v, .*\)"
    with pytest.raises(FileNotFoundError, match=rf"{known}, got tiny-qwen2\.5-vl; did you mean 'tiny-qwen2_5_vl'\?"):
        find_checkpoint("tiny-qwen2.5-vl")


NAMINGS = {  # prefixes in the first releases, and elsewhere
    "after 4.52": {"visual.": "model.visual.", "model.": "model.language_model."},
    "vLLM": {"visual.": "visual.", "": "language_model."},
}


@pytest.mark.parametrize("prefixes", NAMINGS.values(), ids=NAMINGS)
def test_every_naming_loads_to_the_same_model(folder, prefixes):
    def renamed(name: str) -> str:
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return name if old is None else prefixes[old] + name.removeprefix(old)

    question = {"prompt": "What is it?", "images": [PHOTO], "max_new_tokens": 6}
    expected = load(folder).trace(**question)
    before = load_file(folder / "model.safetensors").keys()
    change_weights(folder, lambda weights: {renamed(name): weight for name, weight in weights.items()})
    trace = load(folder).trace(**question)
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
    write_index(folder, weight_map)
    assert torch.equal(load(folder).encode(images=[PHOTO])[0], expected)
    (folder / file).unlink()
    refuses(folder, "shards that do not exist: ['model-00002-of-00002.safetensors']")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_by_name(folder, dtype):
    assert load(folder).encoder.dtype == torch.float32, "the default on a CPU"
    for name in (str(dtype), str(dtype).removeprefix("torch.")):
        vlm = load(folder, dtype=name)
        assert {p.dtype for m in (vlm.encoder, vlm.language_model) for p in m.parameters()} == {dtype}
    assert vlm.chat("Hi", images=[PHOTO], max_new_tokens=2) is not None
    refuses(folder, "dtype: expected 'auto' or one of ['float32', 'bfloat16', 'float16'], got 'float'", dtype="float")


def test_no_remote_code_runs(folder):
    """A config that points to code beside it: the code is not imported, the family is refused."""
    (folder / "evil.py").write_text("raise SystemExit('this code must never run')")
    evil = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    change_json(folder / "config.json", lambda config: config | evil)
    refuses(folder, "model_type: 'evil' is not supported; supported: qwen2_5_vl")


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


# --- which files ------------------------------------------------------------------------------------------------------


def test_one_file_wins_over_an_index_in_both_halves(folder):
    """Beside the trained file an index of zeros: transformers reads the file, and so must the
    tower."""
    want = load(folder).trace("What is it?", images=[PHOTO], max_new_tokens=6)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(zeros, folder / "shard.safetensors")
    write_index(folder, dict.fromkeys(zeros, "shard.safetensors"))
    trace = load(folder).trace("What is it?", images=[PHOTO], max_new_tokens=6)
    assert torch.equal(trace.embeds[0], want.embeds[0])
    assert trace.token_ids == want.token_ids
    (folder / "model.safetensors").unlink()
    assert not load(folder).encode(images=[PHOTO])[0].any()


@pytest.mark.parametrize("place", ["../outside.safetensors", "/tmp/x.safetensors"])
def test_an_index_names_files_inside_the_folder(folder, place):
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder.parent / "outside.safetensors")
    (folder / "model.safetensors").unlink()
    write_index(folder, dict.fromkeys(weights, place))
    refuses(folder, "expected a .safetensors file beside it for")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight', "model.safetensors.index.json is not valid JSON"),
        ("{}", "model.safetensors.index.json: expected weights and their files under 'weight_map', got None"),
        ('{"metadata": {}, "weight_map": {"a": 3}}', "expected a .safetensors file beside it for 'a', got 3"),
    ],
)  # fmt: skip
def test_a_malformed_index_is_named(folder, content, message):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    refuses(folder, message)


def test_a_missing_tokenizer_is_named(folder):
    """A tower without its language model needs none."""
    (folder / "tokenizer.json").unlink()
    refuses(folder, "tokenizer.json is missing")
    assert load(folder, text=False).processor.tokenizer is None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[]", b"", b"\xff\xfe"])
def test_malformed_json_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    refuses(folder, name)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "x"}, {"text_config": []}, {"text_config": {"hidden_size": "wide"}}, {"text_config": 3},
        {"text_config": {"rope_parameters": 7}},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_another_kind_in_a_config_are_named(folder, change):
    change_json(folder / "config.json", lambda values: values | change)
    refuses(folder, "config.json")


# --- what the weights are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_text_weights_that_are_no_floats_are_named(folder, dtype):
    name = "model.embed_tokens.weight"
    change_weights(folder, lambda weights: weights | {name: weights[name].to(dtype)})
    refuses(folder, "not plain floats (1): model.embed_tokens.weight is ")


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("nonsense", ValueError, "not plain floats (1): lm_head.weight is I8"),
        ("vptq", ImportError, "vptq"),  # transformers' own message: it knows how, but not here
    ],
)
def test_a_quantisation_config_is_left_to_transformers_where_it_knows_it(folder, method, error, message):
    change_weights(folder, lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"].to(torch.int8)})
    change_json(folder / "config.json", lambda values: values | {"quantization_config": {"quant_method": method}})
    with pytest.raises(error, match=f"(?i){re.escape(message)}"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_text_weights_that_are_no_numbers_are_named(folder, value):
    name = "model.layers.1.mlp.up_proj.weight"

    def spoiled(weights: dict) -> dict:
        weights[name][3, 5] = value
        return weights

    change_weights(folder, spoiled)
    refuses(folder, f"nan or inf (1): {name}")


SIZES = {
    "a billion layers": lambda v: v["text_config"].update(num_hidden_layers=10**9),
    "no text_config": lambda v: v.pop("text_config"),
}


@pytest.mark.parametrize("change", SIZES.values(), ids=SIZES.keys())
def test_sizes_are_checked_before_memory_is_taken(folder, change):
    """The sizes asked for would take gigabytes to terabytes, or for ever: neither may happen."""
    change_json(folder / "config.json", lambda values: (change(values), values)[1])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "kilobytes: less than a gigabyte"
    assert time.process_time() - start < 60


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graph": True}, "graph: load accepts no such argument; did you mean 'graphs'?"),
        ({"nonsense": 1}, "nonsense: load accepts no such argument"),
        ({"trust_remote_code": True}, "trust_remote_code: refvl runs no code from a checkpoint"),
        ({"graphs": "yes"}, "graphs: expected True, False or a dict of options, got 'yes'"),
        ({"graphs": {"budget": [16]}}, "budget: graphs accepts no such argument; did you mean 'budgets'?"),
        ({"weights": "random", "device_map": "auto"}, "device_map: applies to a checkpoint's weights"),
    ],
)
def test_arguments_that_nobody_reads(folder, arguments, message):
    refuses(folder, message, TypeError, **arguments)


def test_the_hub_is_asked_for_what_was_named(folder, monkeypatch):
    """Oracle: a stand-in for `snapshot_download` that records what it is given."""
    asked = {}

    def snapshot_download(repo_id, **kwargs):
        asked.update(kwargs, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    hub = {"revision": "abc123", "cache_dir": "cache", "token": "secret", "local_files_only": True}
    load("owner/name", **hub)
    assert asked == hub | {
        "repo_id": "owner/name",
        "allow_patterns": checkpoints.CONFIG_FILES + checkpoints.WEIGHT_FILES,
    }
    refuses(folder, "is a local folder; only hub ids have revisions", revision="abc123")
