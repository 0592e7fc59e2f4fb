"""Folders of media to embeddings on disk, and what vLLM is given. Oracle: `VLM.encode` of the same
media.

A running vLLM 0.32 gave 160 of 160 images and 40 of 40 videos the answers of refvl when it was
given these fields.
"""

import os
import stat
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from checkpoint_factory import make_checkpoint
from closeness import assert_agree
from forked import exit_codes, torchrun_variables
from PIL import Image
from random_models import random_model
from safetensors.torch import save_file

import refvl
from refvl.paths import DATA
from refvl.pixels.media import load_image
from refvl.serving import export
from refvl.serving.export import encode_folder, read_embeddings, read_header, vllm_inputs
from refvl.tools.cli import main

CLIP = DATA / "clips" / "scene.mp4"
SIZES = {"a.png": (84, 84), "b.jpg": (120, 60), "sub/a.png": (200, 140), "z.PNG": (64, 64)}


@pytest.fixture
def folder(tmp_path):
    """Crops of a photograph, of different sizes, one of them in a subfolder."""
    photo = Image.open(DATA / "pictures" / "coffee.jpg")
    for i, (name, (width, height)) in enumerate(SIZES.items()):
        path = tmp_path / "media" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((40 * i, 30 * i, 40 * i + width, 30 * i + height)).save(path)
    (tmp_path / "media" / "notes.txt").write_text("no image")
    return tmp_path / "media"


def check_equal(vlm, folder, out, names=SIZES):
    """The files in `out` contain exactly these images, with the embeddings and the layouts of the
    model."""
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.*")) == [f"{n}.safetensors" for n in names]
    for name in names:
        header, got = read_header(out / f"{name}.safetensors"), read_embeddings(out, name)
        image = load_image(folder / name)
        assert_agree(got, vlm.encode([image])[0], vlm.encoder)
        assert header["kind"] == "image" and tuple(header["size"]) == image.size
        assert vlm.encoder.check_layouts([header["layout"]]) == [vlm.processor.layout_of(image)]


@pytest.mark.parametrize("family", ["GLM-4.1V", "MiniCPM-V 2.6", "Step3-VL"])
def test_layouts_of_other_families(family, folder, tmp_path):
    """Grids, slices and crops: the encoder accepts the layout in the file."""
    vlm = random_model(family)
    encode_folder(vlm, folder, tmp_path / "out", progress=False)
    check_equal(vlm, folder, tmp_path / "out")


@pytest.mark.parametrize("limit", [40, export.BATCH_PATCHES])
def test_items_are_encoded_together(vlm, folder, tmp_path, monkeypatch, limit):
    """The numbers of images per call of `encode`: within 40 patches, only the first two (36 + 32)
    exceed it alone."""
    calls, encode = [], vlm.encode
    monkeypatch.setattr(export, "BATCH_PATCHES", limit)
    monkeypatch.setattr(vlm, "encode", lambda images, videos, **kw: calls.append(len(images)) or encode(images, **kw))
    result = encode_folder(vlm, folder, tmp_path / "out", progress=False)
    monkeypatch.undo()
    assert result == {"encoded": sorted(SIZES), "skipped": [], "failed": {}}
    assert calls == ([1, 1, 1, 1] if limit == 40 else [4])
    check_equal(vlm, folder, tmp_path / "out")


def test_a_second_run_encodes_only_what_changed(vlm, folder, tmp_path):
    out = tmp_path / "out"
    encode_folder(vlm, folder, out, progress=False)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    Image.new("RGB", (64, 90), "blue").save(folder / "a.png")
    os.utime(folder / "b.jpg", ns=(0, 0))
    Image.new("RGB", (90, 40), "red").save(folder / "new.png")
    result = encode_folder(vlm, folder, out, progress=False)
    assert result == {"encoded": ["a.png", "b.jpg", "new.png"], "skipped": ["sub/a.png", "z.PNG"], "failed": {}}
    assert {path for path, time in before.items() if path.stat().st_mtime_ns == time} == {
        out / "sub/a.png.safetensors", out / "z.PNG.safetensors"
    }  # fmt: skip
    check_equal(vlm, folder, out, sorted([*SIZES, "new.png"]))


class Killed(BaseException):
    """Like a signal: nothing catches it."""


def test_a_killed_run_leaves_only_whole_files(vlm, folder, tmp_path, monkeypatch):
    """It is killed before the second file gets its name; the next run skips the first file."""
    out, replace = tmp_path / "out", os.replace
    with monkeypatch.context() as patch, pytest.raises(Killed):

        def killed_at_the_second(partial, target):
            if target.name == "b.jpg.safetensors":
                raise Killed
            replace(partial, target)

        patch.setattr(os, "replace", killed_at_the_second)
        encode_folder(vlm, folder, out, progress=False)
    assert [path.name for path in out.glob("[!.]*")] == ["a.png.safetensors"]
    assert encode_folder(vlm, folder, out, progress=False)["skipped"] == ["a.png"]
    assert torch.equal(read_embeddings(out, "b.jpg"), vlm.encode([folder / "b.jpg"])[0])


def test_other_settings_and_foreign_files_are_refused(vlm, folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    encode_folder(vlm, folder, out, progress=False)
    other = refvl.load(make_checkpoint(tmp_path / "other", seed=1), device="cpu", progress=False)
    monkeypatch.setattr(other, "encode", None)
    with pytest.raises(ValueError, match=r"^out: .*a.png.safetensors was written with a different model or dtype"):
        encode_folder(other, folder, out, progress=False)
    save_file({"embeds": torch.ones(2)}, out / "z.PNG.safetensors")
    (out / "b.jpg.safetensors").write_bytes(b"cut")
    for name in ("b.jpg", "z.PNG"):
        with pytest.raises(ValueError, match=f"^out: .*{name}.safetensors was not written by `refvl encode`"):
            encode_folder(vlm, folder, out, progress=False)
        (out / f"{name}.safetensors").unlink()


def test_a_list_of_files(vlm, folder, tmp_path):
    result = encode_folder(vlm, [folder / "b.jpg", str(folder / "sub"), "gone.png"], tmp_path / "out", progress=False)
    assert result["encoded"] == ["a.png", "b.jpg"]
    assert list(result["failed"]) == ["gone.png"]
    with pytest.raises(ValueError, match=r"^media: .*a.png and .*sub/a.png have the same name"):
        encode_folder(vlm, [folder, folder / "sub"], tmp_path / "out", progress=False)


def test_a_batch_that_fails_is_encoded_one_by_one(vlm, folder, tmp_path, monkeypatch):
    encode = vlm.encode

    def fails_for_one(images, videos, **options):
        if any(image.size == SIZES["b.jpg"] for image in images):
            raise RuntimeError("out of memory")
        return encode(images, videos, **options)

    monkeypatch.setattr(vlm, "encode", fails_for_one)
    result = encode_folder(vlm, folder, tmp_path / "out", progress=False)
    assert result["failed"] == {"b.jpg": "out of memory"} and len(result["encoded"]) == 3


def test_the_command(shell, vlm, checkpoint, folder, tmp_path, monkeypatch):
    """Two items cannot be read: each is one line, and the exit status is 1. Then two mistakes."""
    (folder / "broken.jpg").write_bytes((DATA / "pictures" / "coffee.jpg").read_bytes()[:3000])
    Image.new("RGB", (900, 4)).save(folder / "thin.png")
    status, out, err = shell("encode", checkpoint, folder, "--out", tmp_path / "out")
    assert (status, out) == (1, f"4 encoded, 0 skipped in {tmp_path / 'out'}\n")
    assert [line.split(":")[1] for line in err.splitlines()] == [" broken.jpg", " thin.png"]
    check_equal(vlm, folder, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    status, _, err = shell("encode", checkpoint, tmp_path / "empty", "--out", tmp_path / "out")
    assert status == 1 and err.startswith("refvl: media: ") and err.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "add --data-parallel" in shell("encode", checkpoint, folder, "--out", tmp_path / "out")[2]


def encode_as_rank(environment, arguments, said):
    """`refvl encode` in one process of several, as torchrun starts them."""
    os.environ |= environment
    torch.set_num_threads(1)
    sys.argv = ["refvl", "encode", *map(str, arguments)]
    with said.open("w") as stream, redirect_stdout(stream), redirect_stderr(stream):
        main()


@pytest.mark.thorough
def test_two_ranks_share_the_work(vlm, checkpoint, folder, tmp_path):
    (folder / "text.png").write_text("no image")
    command = [checkpoint, folder, "--out", tmp_path / "out", "--device", "cpu", "--data-parallel"]
    said = [tmp_path / "rank0", tmp_path / "rank1"]
    codes = exit_codes(encode_as_rank, zip(torchrun_variables(2), [command] * 2, said, strict=True))
    together = "".join(file.read_text() for file in said)
    assert any(codes), together
    assert together.count("4 encoded, 0 skipped") == 1, together
    assert together.count("refvl: text.png: ") == 1
    check_equal(vlm, folder, tmp_path / "out")


# --- for vLLM ---------------------------------------------------------------------------------------------------------


def test_images_and_videos_for_vllm(vlm, folder, tmp_path):
    pytest.importorskip("av")
    out, images = tmp_path / "out", [folder / "sub/a.png", folder / "b.jpg"]
    (folder / "clip.mp4").write_bytes(CLIP.read_bytes())
    encode_folder(vlm, folder, out, progress=False)
    given = vllm_inputs(out, ["sub/a.png", "clip.mp4", "b.jpg"])
    trace = vlm.trace("Hm?", images=images, videos=[CLIP], max_new_tokens=1)
    rate = vlm.config.vision_config.tokens_per_second
    assert list(map(set, given.values())) == [
        {"image_embeds", "image_grid_thw"}, {"video_embeds", "video_grid_thw", "second_per_grid_ts"}
    ]  # fmt: skip
    assert_agree(given["image"]["image_embeds"], torch.cat(trace.embeds[:2]), vlm.encoder)
    assert_agree(given["video"]["video_embeds"], trace.embeds[2], vlm.encoder)
    grids = [*given["image"]["image_grid_thw"].tolist(), *given["video"]["video_grid_thw"].tolist()]
    assert list(map(tuple, grids)) == trace.layouts
    assert given["video"]["second_per_grid_ts"].tolist() == pytest.approx(
        [trace.patches[2].media_tokens.t_factor / rate]
    )
    assert (out / "b.jpg.safetensors").stat().st_mode & stat.S_IROTH, "an engine may run as another user"
    with pytest.raises(TypeError, match="^names: expected a list of names, got 'b.jpg'"):
        vllm_inputs(out, "b.jpg")
    with pytest.raises(FileNotFoundError, match="gone.jpg"):
        vllm_inputs(out, ["gone.jpg"])


def test_minicpmv_needs_the_sizes_of_images(folder, tmp_path):
    pytest.importorskip("av")
    (folder / "clip.mp4").write_bytes(CLIP.read_bytes())
    minicpm, glm = tmp_path / "minicpm", tmp_path / "glm"
    vlm = random_model("MiniCPM-V 2.6")
    encode_folder(vlm, folder, minicpm, progress=False)
    encode_folder(random_model("GLM-4.1V"), folder, glm, progress=False)
    given = vllm_inputs(minicpm, ["b.jpg", "a.png"])
    assert given["image"]["image_sizes"].tolist() == [[120, 60], [84, 84]]
    assert all(map(torch.equal, given["image"]["image_embeds"], vlm.encode([folder / "b.jpg", folder / "a.png"])))
    with pytest.raises(ValueError, match="names: expected images, because vLLM does not pack frames"):
        vllm_inputs(minicpm, ["clip.mp4"])
    with pytest.raises(ValueError, match="^out: expected embeddings that vLLM accepts .Qwen2.5-VL, .* got GLM-4.1V"):
        vllm_inputs(glm, ["a.png"])
