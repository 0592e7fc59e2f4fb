"""Nothing unasked shapes an answer: the files of a model are known, and what is not asked for is not read.

Oracles: the files that Python and the loaders open, transformers' own loader of hub code, and PEFT.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_factory import make_checkpoint
from PIL import Image
from random_models import RANDOM, make
from transformers.integrations import hub_kernels
from typer.testing import CliRunner

import refvl
from refvl.serving import adapters
from refvl.serving.export import encode_folder
from refvl.serving.provenance import digests_of_media
from refvl.serving.requests import answer_file
from refvl.tools.cli import app

PICTURE = Image.linear_gradient("L").resize((84, 56)).convert("RGB")
COMMON = {"max_new_tokens": 2, "pruning_rate": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


def load(folder, **options):
    return refvl.load(folder, device="cpu", progress=False, **options)


def change_json(file: Path, **changes) -> None:
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(values | changes))


def ids(vlm) -> list[int]:
    return vlm.trace("What is it?", images=[PICTURE], max_new_tokens=8).token_ids


# --- what was not asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "text_config", "vision_config"])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_asks_for_no_code_from_the_hub(folder, monkeypatch, place, key):
    """Oracle: transformers' `get_kernel`, which fetches it."""
    asked: list[str] = []

    def get_kernel(repo_id, *args, **kwargs):
        asked.append(repo_id)
        raise ValueError("code from the hub")

    wanted = ids(load(folder))
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    values = json.loads((folder / "config.json").read_text())
    (values[place] if place else values)[key] = "someone/kernel"
    (folder / "config.json").write_text(json.dumps(values))
    assert ids(load(folder)) == wanted and not asked


@pytest.fixture
def beside(folder, tmp_path):
    """A checkpoint with an adapter of its text model beside the weights, the plain ids, and those that it makes."""
    peft = pytest.importorskip("peft")
    vlm = load(folder)
    plain = ids(vlm)
    made = adapters.attach(vlm, peft.LoraConfig(r=4, target_modules=adapters.layers(vlm), init_lora_weights=False))
    adapted = ids(vlm)
    made.save_pretrained(tmp_path / "adapter")
    for name in (adapters.CONFIG, adapters.WEIGHTS):
        shutil.copy(tmp_path / "adapter" / name, folder / name)
    assert plain != adapted
    return plain, adapted


def test_an_adapter_beside_the_weights_is_not_attached_unasked(folder, beside, tmp_path):
    """Oracle: the model before the adapter came, and the adapter attached by hand."""
    plain, adapted = beside
    refused = r"^adapters: .*model contains an adapter next to its weights \(adapter_config.json\); "
    with pytest.raises(ValueError, match=refused):
        load(folder)
    result = CliRunner().invoke(app, ["chat", str(folder), "What is it?"])
    assert result.exit_code == 1 and "adapter_config.json" in result.stderr
    vlm = load(folder, adapters=[])
    assert ids(vlm) == plain and vlm.adapters is None
    assert not [name for name, _ in vlm.language_model.named_parameters() if "lora" in name]
    for where in (folder, tmp_path / "adapter"):
        vlm = load(folder, adapters=[where])
        assert ids(vlm) == adapted and vlm.adapters is not None
    for given in (folder, str(folder), 3, True):
        with pytest.raises(TypeError, match=r"^adapters: expected a list of folders or hub ids, got "):
            load(folder, adapters=given)


# --- which files there are --------------------------------------------------------------------------------------------

OPENED: list[str] = []


def _note(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and OPENED:
        OPENED.append(os.path.realpath(args[0]))


@pytest.mark.parametrize("family", RANDOM)
def test_every_file_that_is_read_is_known(family, tmp_path):
    """Oracle: Python's audit of files that are opened. The loaders of weights and tokenizers open theirs elsewhere."""
    folder = make(family, tmp_path / "model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("about")
    sys.addaudithook(_note)  # for good: there is no way to take one away
    OPENED[:] = [""]
    vlm = load(folder)
    opened, OPENED[:] = {Path(file) for file in OPENED if file.startswith(str(folder.resolve()))}, []
    known = {source.path.resolve() for source in vlm.provenance}
    assert opened <= known and folder / "README.md" not in known
    assert {folder / "model.safetensors", folder / "tokenizer.json", folder / "config.json"} <= known
    assert known == {file for file in folder.rglob("*") if file.is_file()} - {folder / "README.md"}


def test_a_digest_is_of_the_bytes_that_were_loaded(folder, tmp_path):
    """Any file, and any byte of the weights; but not the place of the folder."""
    vlm = load(folder)
    copied = load(shutil.copytree(folder, tmp_path / "elsewhere"))
    digests = [{source.path.name: source.digest() for source in model.provenance} for model in (vlm, copied)]
    assert digests[0] == digests[1] and len(set(digests[0].values())) == len(digests[0])
    weights = next(source for source in vlm.provenance if source.role == "weights")
    stamp, content = os.stat(weights.path), bytearray(weights.path.read_bytes())
    content[-1] ^= 1
    weights.path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^provenance: .*model.safetensors has changed since the model was loaded"):
        weights.digest()
    os.utime(weights.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    again = next(source for source in load(folder).provenance if source.role == "weights")
    assert again.digest() != digests[0]["model.safetensors"]


def test_info_prints_the_files(folder):
    """Oracle: sha256 of the files."""
    result = CliRunner().invoke(app, ["info", str(folder), "--files"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for source in load(folder).provenance:
        assert [
            line for line in result.stdout.splitlines() if source.path.name in line and source.digest()[:16] in line
        ]
    plain = CliRunner().invoke(app, ["info", str(folder)], env={"COLUMNS": "200"}).stdout
    assert "tokenizer.json" in plain and "model.safetensors" in plain


# --- a file of answers that is continued ------------------------------------------------------------------------------


def half_answered(folder, tmp_path, **options) -> tuple[Path, Path]:
    """Requests and the answers to the first of them, as a stopped run leaves them."""
    PICTURE.save(tmp_path / "a.png")
    picture = str(tmp_path / "a.png")
    parts = [{"type": "image", "path": picture}, {"type": "text", "text": "Why?"}]
    lines = [
        {"prompt": "What is it?", "images": [picture]},
        {"prompt": [{"role": "user", "content": parts}]},
        {"prompt": "Hm?"},
    ]
    file, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    answer_file(load(folder, **options), file, out, common=COMMON, progress=False)
    out.write_text("\n".join(out.read_text().splitlines()[:2]) + "\n")
    return file, out


def edit_generation(folder, tmp_path):
    change_json(folder / "generation_config.json", repetition_penalty=1.3)


def edit_template(folder, tmp_path):
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + "Now.")


def edit_tokenizer(folder, tmp_path):
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["merges"] = values["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(values))


def edit_one_weight(folder, tmp_path):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def edit_picture(folder, tmp_path):
    PICTURE.rotate(180).save(tmp_path / "a.png")


EDITS = [edit_generation, edit_template, edit_tokenizer, edit_one_weight, edit_picture]


@pytest.mark.parametrize("edit", EDITS)
def test_answers_are_not_continued_after_a_change(folder, tmp_path, edit):
    """The line of the request is the same. Oracle: the file of answers, to the byte."""
    file, out = half_answered(folder, tmp_path)
    before = out.read_bytes()
    edit(folder, tmp_path)
    what = "its media have changed" if edit is edit_picture else "by a different model or with different settings"
    with pytest.raises(ValueError, match=rf"^out: .*line 1: .*{what}; move the file away$"):
        answer_file(load(folder), file, out, common=COMMON, progress=False)
    assert out.read_bytes() == before


def test_answers_are_continued_without_a_change(folder, tmp_path):
    """Also from a copy of the checkpoint, and of the picture, in place."""
    file, out = half_answered(folder, tmp_path)
    before = out.read_bytes()
    shutil.copytree(folder, tmp_path / "elsewhere")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").unlink()
    (tmp_path / "a.png").write_bytes(content)
    answer_file(load(tmp_path / "elsewhere"), file, out, common=COMMON, progress=False)
    assert out.read_bytes().startswith(before) and len(out.read_text().splitlines()) == 3


def test_how_strongly_an_adapter_acts_counts(folder, beside, tmp_path):
    """Its alpha is no weight. In its file, and where a program changes it; for answers and for embeddings."""
    from refvl.serving.export import describe_model

    file, out = half_answered(folder, tmp_path, adapters=[tmp_path / "adapter"])
    vlm = load(folder, adapters=[tmp_path / "adapter"])
    described = describe_model(vlm)
    for layer in vlm.adapters.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale(next(iter(vlm.adapters.peft_config)), 0.5)
    assert describe_model(vlm) != described
    change_json(tmp_path / "adapter" / adapters.CONFIG, lora_alpha=3)
    for model in (vlm, load(folder, adapters=[tmp_path / "adapter"]), load(folder, adapters=[])):
        with pytest.raises(ValueError, match="a different model or with different settings|has changed since"):
            answer_file(model, file, out, common=COMMON, progress=False)


def test_settings_that_a_program_changes_count(folder, tmp_path):
    """After the model was loaded: generation, template, weights."""
    file, out = half_answered(folder, tmp_path)

    def penalise(vlm):
        vlm.language_model.generation_config.repetition_penalty = 1.3

    def reword(vlm):
        vlm.processor.tokenizer.chat_template += "Now."

    def train(vlm):
        with torch.no_grad():
            vlm.language_model.lm_head.weight += 1e-3

    for change in (penalise, reword, train):
        vlm = load(folder)
        change(vlm)
        with pytest.raises(ValueError, match="answered by a different model or with different settings"):
            answer_file(vlm, file, out, common=COMMON, progress=False)


# --- one digest of the inputs ----------------------------------------------------------------------------------------


def three_digests(folder, picture: Path, place: Path, **options) -> list[str]:
    """What the answers of a file, the embeddings of a folder and a saved run say of one image and one model."""
    place.mkdir()
    (place / "in").mkdir()
    shutil.copy(picture, place / "in")
    (place / "requests.jsonl").write_text(json.dumps({"prompt": "Hm?", "images": [str(picture)]}))
    vlm = load(folder, **options)
    answer_file(vlm, place / "requests.jsonl", place / "answers.jsonl", common=COMMON, progress=False)
    [entry] = encode_folder(vlm, place / "in", place / "out", progress=False)["images"].values()
    run = vlm.trace("Hm?", images=[picture], max_new_tokens=1)
    run.save(place / "run", provenance=vlm.provenance, media=[picture])
    answer, saved = (json.loads((place / name).read_text()) for name in ("answers.jsonl", "run/manifest.json"))
    return [answer["inputs"], entry["inputs"], saved["inputs"]]


def test_one_digest_serves_answers_embeddings_and_runs(folder, made, beside, tmp_path):
    """It follows the content of files: not their names, but the image, the adapter and the template."""
    pictures = [tmp_path / f"{name}.png" for name in ("a", "b", "c")]
    for picture in pictures:
        PICTURE.rotate(180 * (picture.stem == "c")).save(picture)
    adapter, worded = {"adapters": [tmp_path / "adapter"]}, shutil.copytree(made, tmp_path / "worded")
    edit_template(worded, tmp_path)
    a, b = (three_digests(made, picture, tmp_path / f"by {picture.stem}") for picture in pictures[:2])
    assert len(set(a)) == 1 and a == b
    others = [
        three_digests(made, pictures[2], tmp_path / "other image"),
        three_digests(made, pictures[0], tmp_path / "with adapter", **adapter),
        three_digests(worded, pictures[0], tmp_path / "other template"),
    ]
    assert all(len(set(found)) == 1 for found in others)
    assert len({found[0] for found in (a, *others)}) == 4
    same, other = (refvl.compare(tmp_path / "by a/run", tmp_path / name / "run") for name in ("by b", "other image"))
    assert same.files == [] and other.files == ["media"]


def test_a_run_saved_by_the_command_line_has_the_digest(made, tmp_path):
    """Oracle: `Trace.save` with the same image."""
    PICTURE.save(tmp_path / "a.png")
    expected = three_digests(made, tmp_path / "a.png", tmp_path / "by hand")
    words = ["trace", str(made), "Hm?", "--image", str(tmp_path / "a.png"), "--max-new-tokens", "1", "--device", "cpu"]
    assert CliRunner().invoke(app, [*words, "--save", str(tmp_path / "run")]).exit_code == 0
    assert json.loads((tmp_path / "run/manifest.json").read_text())["inputs"] == expected[0]


def test_media_in_memory_are_known_by_their_values():
    """Oracle: equal arrays; a list of frames counts as its frames."""
    same, other = np.zeros((2, 4, 3), np.uint8), np.ones((2, 4, 3), np.uint8)
    known = [list(digests_of_media([medium])) for medium in (same, same.copy(), Image.fromarray(same), other)]
    assert known[0] == known[1] == known[2] != known[3]
    assert list(digests_of_media([[same, other]])) == known[0] + known[3]
    assert known[0] != list(digests_of_media([same.reshape(4, 2, 3)]))


# --- two runs ---------------------------------------------------------------------------------------------------------


def test_compare_names_the_files_that_differ(folder, tmp_path):
    """Also where no stage differs yet: a setting that acts on other prompts. Oracle: what was edited."""
    for name in ("a", "b", "c"):
        vlm = load(folder)
        vlm.trace("Hm?", max_new_tokens=1).save(tmp_path / name, provenance=vlm.provenance)
        if name == "b":
            edit_generation(folder, tmp_path)
    same, other = (refvl.compare(tmp_path / "a", tmp_path / name) for name in "bc")
    assert same.files == [] and other.files == ["generation: generation_config.json"] and other.first is None
    assert "files that differ" in repr(other) and "files that differ" not in repr(same)
