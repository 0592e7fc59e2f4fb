"""Folders of pictures to embeddings on disk. Oracle: `VLM.encode` of the same pictures, and the files themselves."""

import json
import subprocess
import sys

import pytest
from checkpoint_factory import make_checkpoint, make_glm_checkpoint, make_step3_checkpoint
from checkpoint_factory_minicpmv import make_minicpmv_checkpoint
from closeness import assert_agree
from encode_processes import start
from forked import torchrun_variables
from PIL import Image
from safetensors import safe_open

import refvl
from refvl.paths import DATA
from refvl.pixels.media import load_image
from refvl.serving import export
from refvl.serving.export import encode_folder, find_media, read_embeddings
from refvl.serving.shards import UNFINISHED

SIZES = {"a.png": (84, 84), "b.jpg": (120, 60), "c.webp": (30, 90), "sub/a.png": (200, 140), "z.PNG": (64, 64)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def vlm(checkpoint):
    return refvl.load(checkpoint, progress=False)


@pytest.fixture
def folder(tmp_path):
    """Cuts of a photograph, of different sizes, one of them deeper."""
    photo = Image.open(DATA / "pictures" / "coffee.jpg")
    for i, (name, (width, height)) in enumerate(SIZES.items()):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((40 * i, 30 * i, 40 * i + width, 30 * i + height)).save(path)
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    return tmp_path / "pictures"


def shards(out):
    return sorted(path.name for path in out.iterdir() if path.name != "manifest.json")


def check_equal(vlm, folder, out, names=SIZES):
    """Everything that `names` say is in the manifest, and what the shards hold equals VLM.encode."""
    manifest = json.loads((out / "manifest.json").read_text())
    assert list(manifest["images"]) == sorted(names)
    for name in names:
        entry, got = manifest["images"][name], read_embeddings(out, name)
        [want] = vlm.encode(images=[folder / name])
        assert_agree(got, want, vlm.encoder)
        assert entry["tokens"] == len(want) and entry["bytes"] == (folder / name).stat().st_size
        [layout] = vlm.encoder.check_layouts([entry["layout"]])
        assert layout == vlm.processor.layout_of(load_image(folder / name))
        assert f"torch.{manifest['dtype']}" == str(got.dtype)
    return manifest


def test_every_picture_is_encoded(vlm, folder, tmp_path):
    manifest = encode_folder(vlm, folder, tmp_path / "out", progress=False)
    assert check_equal(vlm, folder, tmp_path / "out") == json.loads(json.dumps(manifest))
    assert shards(tmp_path / "out") == ["embeds-000-00000.safetensors"] and manifest["unreadable"] == {}


def test_shards_hold_as_many_as_asked(vlm, folder, tmp_path):
    encode_folder(vlm, folder, tmp_path / "out", shard_size=2, progress=False)
    check_equal(vlm, folder, tmp_path / "out")
    counts = []
    for name in shards(tmp_path / "out"):
        with safe_open(tmp_path / "out" / name, framework="pt") as shard:
            counts.append(len(list(shard.keys())))
    assert counts == [2, 2, 1]


def test_small_batches_change_nothing(vlm, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "BATCH_PATCHES", 40)
    encode_folder(vlm, folder, tmp_path / "out", shard_size=3, progress=False)
    check_equal(vlm, folder, tmp_path / "out")


@pytest.mark.parametrize("family", ["GLM", "MiniCPM-V 2.6", "Step3-VL"])
def test_other_families(family, folder, tmp_path):
    """Grids, slices and crops: whatever a picture's layout is, the manifest says it so that the encoder reads it."""
    if family == "GLM":
        make_glm_checkpoint(tmp_path / "model", "glm4v", "Glm4vProcessor")
    elif family == "Step3-VL":
        make_step3_checkpoint(tmp_path / "model")
    else:
        make_minicpmv_checkpoint(tmp_path / "model", "2.6")
    vlm = refvl.load(tmp_path / "model", progress=False)
    encode_folder(vlm, folder, tmp_path / "out", progress=False)
    check_equal(vlm, folder, tmp_path / "out")


def test_graphs_encode_as_well(vlm, checkpoint, folder, tmp_path):
    graphs = {"budgets": [16, 64], "max_items": 4}
    encode_folder(refvl.load(checkpoint, graphs=graphs, progress=False), folder, tmp_path / "out", progress=False)
    check_equal(vlm, folder, tmp_path / "out")


# --- killed and continued ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Like a signal: nothing catches it on the way."""


def killed_after(encode, calls):
    def encode_or_die(*args, **kwargs):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise Killed
        return encode(*args, **kwargs)

    return encode_or_die


def test_a_killed_run_is_continued(vlm, folder, tmp_path, monkeypatch):
    """After the kill two shards stand, whole, and no manifest; the next run encodes the rest and touches neither."""
    out = tmp_path / "out"
    monkeypatch.setattr(export, "BATCH_PATCHES", 1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(vlm, "encode", killed_after(vlm.encode, 2))
        encode_folder(vlm, folder, out, shard_size=1, progress=False)
    before = {name: (out / name).stat().st_mtime_ns for name in shards(out)}
    assert len(before) == 2 and not (out / "manifest.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(vlm, "encode", killed_after(vlm.encode, 3))  # the other three, not one more
        encode_folder(vlm, folder, out, shard_size=1, progress=False)
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before and len(shards(out)) == 5
    check_equal(vlm, folder, out)


def test_killed_while_writing_leaves_nothing_half(vlm, folder, tmp_path):
    """A kill leaves files that were being written, in a folder where no reader looks and the next run cleans up."""
    out = tmp_path / "out"
    (out / UNFINISHED).mkdir(parents=True)
    for name in ("embeds-000-00000.safetensors", ".tmpV2CODy"):
        (out / UNFINISHED / name).write_bytes(b"half")
    encode_folder(vlm, folder, out, progress=False)
    assert shards(out) == ["embeds-000-00000.safetensors"]
    check_equal(vlm, folder, out)


def test_a_finished_folder_is_not_encoded_again(vlm, folder, tmp_path, monkeypatch):
    first = encode_folder(vlm, folder, tmp_path / "out", progress=False)
    monkeypatch.setattr(vlm, "encode", killed_after(vlm.encode, 0))
    assert encode_folder(vlm, folder, tmp_path / "out", progress=False) == first


def test_new_changed_and_removed_pictures(vlm, folder, tmp_path):
    """The manifest says what the folder holds now."""
    out = tmp_path / "out"
    encode_folder(vlm, folder, out, progress=False)
    Image.new("RGB", (90, 40), "red").save(folder / "new.png")
    Image.new("RGB", (64, 90), "blue").save(folder / "a.png")
    (folder / "b.jpg").unlink()
    manifest = encode_folder(vlm, folder, out, progress=False)
    check_equal(vlm, folder, out, sorted({*SIZES, "new.png"} - {"b.jpg"}))
    new = {name for name, entry in manifest["images"].items() if entry["shard"] == "embeds-000-00001.safetensors"}
    assert new == {"new.png", "a.png"}


def test_another_model_is_refused(vlm, folder, tmp_path):
    encode_folder(vlm, folder, tmp_path / "out", progress=False)
    other = refvl.load(make_checkpoint(tmp_path / "other", seed=1), progress=False)
    with pytest.raises(
        ValueError, match=r"out: .*embeds-000-00000.safetensors contains embeddings of a different model"
    ):
        encode_folder(other, folder, tmp_path / "out", progress=False)


def test_a_damaged_shard_is_named(vlm, folder, tmp_path):
    encode_folder(vlm, folder, tmp_path / "out", progress=False)
    shard = tmp_path / "out" / "embeds-000-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match="embeds-000-00000.safetensors is damaged .* remove it"):
        encode_folder(vlm, folder, tmp_path / "out", progress=False)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_encodes(shell, vlm, checkpoint, folder, tmp_path):
    status, out, err = shell("encode", checkpoint, folder, "--out", tmp_path / "out")
    assert (status, out, err) == (0, f"5 images in {tmp_path / 'out'}\n", "")
    check_equal(vlm, folder, tmp_path / "out")


def test_data_parallel_without_torchrun_is_one_rank(shell, vlm, checkpoint, folder, tmp_path):
    assert shell("encode", checkpoint, folder, "--out", tmp_path / "out", "--data-parallel")[0] == 0
    check_equal(vlm, folder, tmp_path / "out")


def test_unreadable_pictures_are_named_and_the_others_encoded(shell, vlm, checkpoint, folder, tmp_path):
    """One line each, and exit status 1."""
    (folder / "broken.jpg").write_bytes((DATA / "pictures" / "coffee.jpg").read_bytes()[:3000])
    (folder / "text.png").write_text("no picture")
    Image.new("RGB", (900, 4)).save(folder / "thin.png")
    status, _, err = shell("encode", checkpoint, folder, "--out", tmp_path / "out")
    lines = err.splitlines()
    assert status == 1 and len(lines) == 3
    assert "broken.jpg" in lines[0] and "text.png" in lines[1] and "200" in lines[2]
    manifest = check_equal(vlm, folder, tmp_path / "out")
    assert sorted(manifest["unreadable"]) == ["broken.jpg", "text.png", "thin.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOWHERE"], "folder: expected a folder, a .tar file or a list (.txt, .lst), got NOWHERE"),
        (["EMPTY"], "contains no image that Pillow can read"),
        (["EMPTY", "--shard-size", "0"], "shard_size: must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line(shell, checkpoint, tmp_path, arguments, message):
    (tmp_path / "EMPTY").mkdir()
    arguments = [tmp_path / "EMPTY" if a == "EMPTY" else a for a in arguments]
    status, out, err = shell("encode", checkpoint, *arguments, "--out", tmp_path / "out")
    assert (status, out, err.count("\n")) == (1, "", 1) and err.startswith("refvl: ") and message in err


def test_several_processes_must_share(shell, monkeypatch, checkpoint, folder, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = shell("encode", checkpoint, folder, "--out", tmp_path / "out")
    assert status == 1 and "add --data-parallel" in err and not (tmp_path / "out").exists()


def by_torchrun(arguments, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "refvl"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


def as_torchrun_does(arguments, folder):
    """The same two processes with the same variables, without its ten seconds of imports."""
    out, err = folder / "stdout", folder / "stderr"
    processes = [start(arguments, out, errors=err, environment=variables) for variables in torchrun_variables(2)]
    for process in processes:
        process.join(600)
    return max(process.exitcode for process in processes), out.read_text(), err.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("launch", [as_torchrun_does, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_two_processes_share_the_work(vlm, checkpoint, folder, tmp_path, launch):
    """The two ranks write a shard each, and nobody waits for ever on a broken picture; when a shard is lost, a
    single process makes that one again."""
    out = tmp_path / "out"
    (folder / "text.png").write_text("no picture")
    status, said, errors = launch(["encode", checkpoint, folder, "--out", out, "--data-parallel"], tmp_path)
    assert status != 0 and said.count("5 images in") == 1, errors
    assert errors.count("refvl: text.png: ") == 1 and "text.png" in errors
    assert shards(out) == ["embeds-000-00000.safetensors", "embeds-001-00000.safetensors"]
    check_equal(vlm, folder, out)
    (out / "embeds-001-00000.safetensors").unlink()
    (folder / "text.png").unlink()
    encode_folder(vlm, folder, out, progress=False)
    assert shards(out) == ["embeds-000-00000.safetensors", "embeds-000-00001.safetensors"]
    assert check_equal(vlm, folder, out)["unreadable"] == {}


def test_find_media_sorts_by_name(folder):
    assert [image.name for image in find_media(folder)] == sorted(SIZES)
