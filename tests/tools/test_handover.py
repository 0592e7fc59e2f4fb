"""What an engine is handed. Oracle: `VLM.encode` of the same media, and what a running vLLM 0.32 took.

That engine gave 160 of 160 pictures and 40 of 40 clips the answers of refvl when it was handed these fields.
"""

import io
import json
import stat
import tarfile

import numpy as np
import pytest
import torch
from checkpoint_factory import make_checkpoint, make_glm_checkpoint
from checkpoint_factory_minicpmv import make_minicpmv_checkpoint
from closeness import assert_agree
from PIL import Image

import refvl
from refvl.paths import DATA
from refvl.serving.export import encode_folder, find_media, read_embeddings
from refvl.serving.handover import vllm_inputs

CLIP = DATA / "clips" / "scene.mp4"
SIZES = {"a.png": (84, 56), "b.jpg": (60, 90), "sub/c.png": (70, 70)}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    return refvl.load(make_checkpoint(tmp_path_factory.mktemp("checkpoint")), device="cpu", progress=False)


@pytest.fixture
def folder(tmp_path):
    """Three pictures and a clip."""
    folder = tmp_path / "media"
    for i, (name, (width, height)) in enumerate(SIZES.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "clip.mp4").write_bytes(CLIP.read_bytes())
    return folder


def test_pictures_and_clips_as_vllm_takes_them(vlm, folder, tmp_path):
    out = tmp_path / "out"
    manifest = encode_folder(vlm, folder, out, progress=False)
    assert {name: tuple(entry["size"]) for name, entry in manifest["images"].items()} == SIZES
    assert list(manifest["videos"]) == ["clip.mp4"] and manifest["unreadable"] == {}
    names = ["sub/c.png", "clip.mp4", "a.png"]
    given = vllm_inputs(out, names)
    images, clips = given["image"], given["video"]
    third, first = vlm.encode(images=[folder / "sub/c.png", folder / "a.png"])
    [clip] = vlm.encode(videos=[CLIP])
    assert_agree(images["image_embeds"], torch.cat([third, first]), vlm.encoder)
    assert_agree(clips["video_embeds"], clip, vlm.encoder)
    trace = vlm.trace("Hm?", images=[folder / "sub/c.png", folder / "a.png"], videos=[CLIP], max_new_tokens=1)
    assert [tuple(grid) for grid in images["image_grid_thw"].tolist()] == trace.layouts[:2]
    assert [tuple(grid) for grid in clips["video_grid_thw"].tolist()] == trace.layouts[2:]
    rate = vlm.config.vision_config.tokens_per_second
    assert clips["second_per_grid_ts"].tolist() == pytest.approx([trace.patches[2].media_tokens.t_factor / rate])
    assert set(images) == {"image_embeds", "image_grid_thw"}
    assert set(clips) == {"video_embeds", "video_grid_thw", "second_per_grid_ts"}
    for shard in out.glob("*.safetensors"):
        assert stat.S_IMODE(shard.stat().st_mode) == stat.S_IMODE((out / "manifest.json").stat().st_mode)
        assert shard.stat().st_mode & stat.S_IROTH, "an engine may run as another user"


def test_minicpmv_needs_the_sizes_of_pictures(folder, tmp_path):
    vlm = refvl.load(make_minicpmv_checkpoint(tmp_path / "model", "4.5"), device="cpu", progress=False)
    encode_folder(vlm, folder, tmp_path / "out", progress=False)
    given = vllm_inputs(tmp_path / "out", ["b.jpg", "a.png"])
    assert list(given) == ["image"] and given["image"]["image_sizes"].tolist() == [[60, 90], [84, 56]]
    assert all(
        map(
            torch.equal,
            given["image"]["image_embeds"],
            [read_embeddings(tmp_path / "out", n) for n in ("b.jpg", "a.png")],
        )
    )
    with pytest.raises(ValueError, match="names: expected images, because vLLM does not pack frames"):
        vllm_inputs(tmp_path / "out", ["clip.mp4"])


def test_what_cannot_be_handed_over(vlm, folder, tmp_path):
    encode_folder(vlm, folder, tmp_path / "out", progress=False)
    for names, error, message in (
        ("a.png", TypeError, "names"),
        ([], TypeError, "names"),
        (["x"], KeyError, "x is not in"),
    ):
        with pytest.raises(error, match=message):
            vllm_inputs(tmp_path / "out", names)
    with pytest.raises(FileNotFoundError, match="folder: .* has no manifest.json"):
        vllm_inputs(tmp_path, ["a.png"])
    glm = make_glm_checkpoint(tmp_path / "model", model_type="glm4v", processor_class="Glm4vProcessor")
    encode_folder(refvl.load(glm, device="cpu", progress=False), folder, tmp_path / "glm", progress=False)
    with pytest.raises(ValueError, match="folder: expected embeddings that vLLM accepts .Qwen2.5-VL, .* got GLM-4.1V"):
        vllm_inputs(tmp_path / "glm", ["a.png"])


def change(out, name, **changes):
    """The manifest of `out`, changed in what it says of an image."""
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["images"][name] |= changes
    (out / "manifest.json").write_text(json.dumps(manifest))


def test_a_manifest_leads_to_its_own_folder(vlm, folder, tmp_path):
    """By a relative path, an absolute one, and a link; other shards there are readable and hold the name."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for where in (out, elsewhere):
        encode_folder(vlm, folder, where, progress=False)
    shard = elsewhere / "embeds-000-00000.safetensors"
    (out / "link.safetensors").symlink_to(shard)
    for path in (f"../elsewhere/{shard.name}", str(shard), "link.safetensors"):
        change(out, "a.png", shard=path)
        for read in (read_embeddings, lambda out, name: vllm_inputs(out, [name])):
            with pytest.raises(ValueError, match=r"^folder: .*manifest.json: expected a.png in a shard inside the"):
                read(out, "a.png")
    for value in (3, None, ["x"]):
        change(out, "a.png", shard=value)
        with pytest.raises((ValueError, KeyError), match="manifest.json"):
            read_embeddings(out, "a.png")


@pytest.mark.parametrize("layout", [[1, 4, 4], [2, 6, 8], [1, 6, 8, 1], [1, -6, -8], "168", None])
def test_grids_fit_the_embeddings(vlm, folder, tmp_path, layout):
    """Oracle: what vLLM does, which splits embeddings by products of grids: other grids would move every later one."""
    encode_folder(vlm, folder, tmp_path, progress=False)
    change(tmp_path, "a.png", layout=layout)
    with pytest.raises(ValueError, match="^folder: 12 embeddings of 4 patches do not fit the grid "):
        vllm_inputs(tmp_path, ["b.jpg", "a.png"])
    change(tmp_path, "a.png", layout=[1, 6, 8], tokens=13)
    with pytest.raises(ValueError, match="^folder: a.png has 12 embeddings, but .* lists 13"):
        vllm_inputs(tmp_path, ["a.png"])


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_tar_shards_and_lists_hold_the_same_pictures(vlm, folder, tmp_path):
    """Oracle: the same pictures in a folder. In WebDataset's layout a label is a file beside its picture."""
    tars = tmp_path / "tars"
    tars.mkdir()
    pictures = {f"{i:06}.{name[-3:]}": (folder / name).read_bytes() for i, name in enumerate(SIZES)}
    write_tar(tars / "0.tar", pictures | {"000000.json": b"{}", "broken.png": b"no picture"})
    manifest = encode_folder(vlm, tars, tmp_path / "out", progress=False)
    names = [f"0.tar/{name}" for name in pictures]
    assert list(manifest["images"]) == names
    broken = "0.tar/broken.png"
    assert manifest["unreadable"] == {broken: f"image: {broken} is not an image that Pillow can read"}
    lines = "\r\n".join([str(folder / "sub/c.png"), "media/b.jpg", "", "media/b.jpg", "gone.png", "gone.tar"])
    (tmp_path / "list.txt").write_text(lines, encoding="utf-8-sig")
    listed = encode_folder(vlm, tmp_path / "list.txt", tmp_path / "listed", progress=False)
    assert list(listed["images"]) == ["media/b.jpg", "media/sub/c.png"]
    assert listed["unreadable"] == dict.fromkeys(
        ("gone.png", "gone.tar"), "expected a regular file, got a broken link, a pipe or a device"
    )
    for name, path in zip(names, SIZES, strict=True):
        [want] = vlm.encode(images=[folder / path])
        assert_agree(read_embeddings(tmp_path / "out", name), want, vlm.encoder)
    one = encode_folder(vlm, tars / "0.tar", tmp_path / "one", progress=False)
    assert list(one["images"]) == names


def test_links_in_tar_files(vlm, folder, tmp_path):
    """A hard link is the picture that it means, under its own name; others are named. Oracle: GNU tar, by hand."""
    tar, content = tmp_path / "0.tar", (folder / "a.png").read_bytes()
    with tarfile.open(tar, "w") as archive:
        for name, kind, link in (
            ("./a.png", tarfile.REGTYPE, ""),
            ("./again.png", tarfile.LNKTYPE, "./a.png"),
            ("./thrice.png", tarfile.LNKTYPE, "./again.png"),
            ("./lost.png", tarfile.LNKTYPE, "./nowhere.png"),
            ("./soft.png", tarfile.SYMTYPE, "/etc/passwd"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, len(content) * (not link)
            archive.addfile(info, io.BytesIO(content) if not link else None)
    manifest = encode_folder(vlm, tar, tmp_path / "out", progress=False)
    assert list(manifest["images"]) == ["0.tar/a.png", "0.tar/again.png", "0.tar/thrice.png"]
    assert list(manifest["unreadable"]) == ["0.tar/lost.png", "0.tar/soft.png"]
    [want] = vlm.encode(images=[folder / "a.png"])
    for name in manifest["images"]:
        assert_agree(read_embeddings(tmp_path / "out", name), want, vlm.encoder)


def test_a_tar_shard_that_grew_is_continued(vlm, folder, tmp_path):
    """Its times change; by their digests the pictures that were encoded are the same."""
    tar, first = tmp_path / "0.tar", (folder / "a.png").read_bytes()
    write_tar(tar, {"a.png": first})
    encode_folder(vlm, tar, tmp_path / "out", progress=False)
    write_tar(tar, {"z.png": (folder / "sub/c.png").read_bytes(), "a.png": first})
    manifest = encode_folder(vlm, tar, tmp_path / "out", progress=False)
    shards = {name: entry["shard"] for name, entry in manifest["images"].items()}
    assert shards == {"0.tar/a.png": "embeds-000-00000.safetensors", "0.tar/z.png": "embeds-000-00001.safetensors"}


def test_sources_that_cannot_be_read(tmp_path):
    (tmp_path / "0.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(ValueError, match=r"folder: .*0.tar cannot be read as an uncompressed tar file"):
        find_media(tmp_path)
    (tmp_path / "list.txt").write_text("nowhere.png\nnowhere.tar\n")
    with pytest.raises(FileNotFoundError, match=r"folder: no file listed in .*list.txt exists; .*nowhere.png$"):
        find_media(tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("list.txt\n")
    with pytest.raises(ValueError, match=r"; expected an image or a video"):
        find_media(tmp_path / "list.txt")
