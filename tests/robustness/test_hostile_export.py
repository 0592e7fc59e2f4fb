"""`refvl encode` under hostile conditions: odd files, kills, full disks, two runs at once.

Oracle: `VLM.encode` of the same images. What must hold each time: the folder is accounted for, nothing stale is served,
and the same command continues.
"""

import errno
import itertools
import json
import os
import re
import signal
import stat
import struct
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
import torch
from checkpoint_factory import make_checkpoint
from closeness import assert_agree
from encode_processes import start, wait_for
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file

import refvl
from refvl.serving import export, lock, shards
from refvl.serving.export import describe_model, encode_folder, find_media, read_embeddings
from refvl.serving.images import media_name
from refvl.serving.lock import LOCK, folder_lock
from refvl.serving.shards import UNFINISHED

NAMES = [f"{i}.bmp" for i in range(5)]  # uncompressed: files of equal size


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def vlm(checkpoint):
    return refvl.load(checkpoint, progress=False)


def draw(folder: Path, names, seed: int = 0) -> Path:
    """Random images of 56 x 56 px, each another."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        pixels = torch.randint(0, 256, (56, 56, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(os.path.join(folder, name))
    return folder


@pytest.fixture
def folder(tmp_path):
    return draw(tmp_path / "images", NAMES)


def run(vlm, folder, out, **options):
    return encode_folder(vlm, folder, out, progress=False, **options)


def check_right(vlm, folder, out, names, unreadable=()) -> dict:
    """The manifest holds exactly these names, and what it leads to are the embeddings of the files as they are now."""
    manifest = json.loads((out / "manifest.json").read_text())
    assert (list(manifest["images"]), list(manifest["unreadable"])) == (sorted(names), sorted(unreadable))
    for name in names:
        [want] = vlm.encode(images=[folder / name])
        assert_agree(read_embeddings(out, name), want, vlm.encoder)
    assert sorted(p.name for p in out.iterdir() if not p.name.startswith("embeds-")) == ["manifest.json"]
    return manifest


def counted(vlm, monkeypatch) -> list[int]:
    """How many images each call of `encode` gets, from here on."""
    counts, encode = [], vlm.encode

    def count_and_encode(images, **options):
        counts.append(len(images))
        return encode(images, **options)

    monkeypatch.setattr(vlm, "encode", count_and_encode)
    return counts


# --- one file, or one batch, that fails -------------------------------------------------------------------------------

ERRORS = [SyntaxError("not a TIFF"), struct.error("short"), MemoryError(), KeyError("Exif"), RecursionError("deep")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_whatever_a_decoder_raises_the_others_go_on(vlm, folder, tmp_path, monkeypatch, error):
    load_image = export.load_image

    def load(path, **options):
        if path.name == "1.bmp":
            raise error
        return load_image(path, **options)

    monkeypatch.setattr(export, "load_image", load)
    run(vlm, folder, tmp_path / "out", shard_size=2)
    manifest = check_right(vlm, folder, tmp_path / "out", set(NAMES) - {"1.bmp"}, ["1.bmp"])
    assert type(error).__name__ in manifest["unreadable"]["1.bmp"]


def test_a_batch_that_fails_is_tried_image_by_image(vlm, folder, tmp_path, monkeypatch):
    """Out of memory with several at once, and with one image always: that one is listed, the others are encoded."""
    encode, [bad] = vlm.encode, vlm.processor.decode(vlm.processor.messages("", [folder / "3.bmp"]))

    def limited(images, **options):
        if len(images) > 1 or images[0].tobytes() == bad.tobytes():
            raise RuntimeError("out of memory")
        return encode(images, **options)

    with monkeypatch.context() as patch:
        patch.setattr(vlm, "encode", limited)
        run(vlm, folder, tmp_path / "out")
    manifest = check_right(vlm, folder, tmp_path / "out", set(NAMES) - {"3.bmp"}, ["3.bmp"])
    assert manifest["unreadable"]["3.bmp"] == "RuntimeError: out of memory"
    run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", NAMES)


def test_pipes_dangling_links_and_other_formats(vlm, folder, tmp_path):
    """A pipe is not waited for, a link that leads nowhere is listed; formats that Pillow only writes are no images."""
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to(tmp_path / "nowhere.png")
    for name in ("paper.pdf", "figure.eps", "table.h5", "film.mpg", "weather.grib", "drawing.wmf"):
        (folder / name).write_bytes(b"%PDF")
    run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", NAMES, ["pipe.png", "link.png", "film.mpg"])  # which may be a clip


# --- names ------------------------------------------------------------------------------------------------------------

LATIN = os.fsdecode(b"caf\xe9.bmp")


def test_a_name_that_is_not_utf8_is_encoded_under_another(vlm, folder, tmp_path):
    """Also beside a file that is called what the other becomes."""
    draw(folder, [LATIN, "caf%E9.bmp", "line\nbreak.bmp"], seed=1)
    assert run(vlm, folder, tmp_path / "out") == run(vlm, folder, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert sorted(manifest["images"]) == sorted([*NAMES, "./caf%E9.bmp", "caf%E9.bmp", "line\nbreak.bmp"])
    for name in (LATIN, "caf%E9.bmp"):
        [want] = vlm.encode(images=[folder / name])
        got = read_embeddings(tmp_path / "out", media_name(Path(name)))
        assert_agree(got, want, vlm.encoder)


def test_such_names_are_printable(checkpoint, folder, tmp_path, monkeypatch, capsys):
    (folder / LATIN).write_bytes(b"no image")
    (folder / "line\nbreak.bmp").write_bytes(b"no image")
    monkeypatch.setattr("sys.argv", ["refvl", "encode", str(checkpoint), str(folder), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        from refvl.tools.cli import main

        main()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["./caf%E9.bmp", "line break.bmp"]


# --- what has changed -------------------------------------------------------------------------------------------------


def test_an_overwritten_file_of_equal_size_and_time_is_encoded_again(vlm, folder, tmp_path):
    run(vlm, folder, tmp_path / "out")
    before = (folder / "0.bmp").stat()
    draw(folder, ["0.bmp"], seed=7)
    os.utime(folder / "0.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "0.bmp").stat().st_size == before.st_size
    run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", NAMES)


def test_files_renamed_into_each_other_are_encoded_again(vlm, folder, tmp_path, monkeypatch):
    """Equal sizes, and equal times as from an archive."""
    for name in NAMES:
        os.utime(folder / name, ns=(0, 0))
    run(vlm, folder, tmp_path / "out")
    (folder / "1.bmp").rename(folder / "x")
    (folder / "2.bmp").rename(folder / "1.bmp")
    (folder / "x").rename(folder / "2.bmp")
    with monkeypatch.context() as patch:
        counts = counted(vlm, patch)
        run(vlm, folder, tmp_path / "out")
    assert sum(counts) == 2
    check_right(vlm, folder, tmp_path / "out", NAMES)


def test_a_touched_file_is_not_encoded_again(vlm, folder, tmp_path, monkeypatch):
    run(vlm, folder, tmp_path / "out")
    for name in NAMES:
        os.utime(folder / name)
    counts = counted(vlm, monkeypatch)
    run(vlm, folder, tmp_path / "out")
    assert counts == []


def test_images_that_come_or_change_during_the_run_are_missed_aloud(vlm, folder, tmp_path, monkeypatch):
    """No manifest that claims the folder; the same command makes it."""
    encode = vlm.encode

    def encode_and_meddle(images, **options):
        draw(folder, ["new.bmp", "0.bmp"], seed=3)
        return encode(images, **options)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"folder: 2 of 6 images .*: 0.bmp, new.bmp"):
        patch.setattr(vlm, "encode", encode_and_meddle)
        run(vlm, folder, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists() and not (tmp_path / "out" / LOCK).exists()
    run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", [*NAMES, "new.bmp"])


def test_a_file_that_changes_while_it_is_read_is_listed(vlm, folder, tmp_path, monkeypatch):
    """Its digest and its pixels could be of two files."""
    load_image = export.load_image

    def load_and_meddle(path, **options):
        image = load_image(path, **options)
        if path.name == "4.bmp":
            draw(folder, ["4.bmp"], seed=9)
        return image

    with monkeypatch.context() as patch:
        patch.setattr(export, "load_image", load_and_meddle)
        run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", NAMES[:4], ["4.bmp"])
    run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", NAMES)


# --- the model's identity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_value_of_any_weight_is_another_model(checkpoint, dtype):
    vlm = refvl.load(checkpoint, dtype=dtype, progress=False)
    was = describe_model(vlm)
    assert describe_model(refvl.load(checkpoint, dtype=dtype, attention="masked", progress=False)) == was
    for parameter in list(vlm.encoder.parameters())[::7]:
        with torch.no_grad():
            parameter.flatten()[-1].neg_()
        now, was = describe_model(vlm), was
        assert now["weights"] != was["weights"]
        was = now


def test_another_config_of_the_same_weights_is_another_model(checkpoint, tmp_path):
    """Windows change what comes out and no weight."""
    other = make_checkpoint(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["vision_config"]["fullatt_block_indexes"] = [0]
    (other / "config.json").write_text(json.dumps(config))
    vlms = [refvl.load(folder, progress=False) for folder in (checkpoint, other)]
    assert vlms[0].encoder.config != vlms[1].encoder.config
    assert describe_model(vlms[0]) != describe_model(vlms[1])


# --- shards -----------------------------------------------------------------------------------------------------------


def test_a_shard_is_written_as_soon_as_it_is_full(vlm, folder, tmp_path, monkeypatch):
    """An image that cannot be read makes none larger or later. The bar moves with batches, to the true total."""
    (folder / "1.bmp").write_bytes((folder / "1.bmp").read_bytes()[:200])
    seen, bars, encode = [], [], vlm.encode

    class Bar(AbstractContextManager):
        def __init__(self, total, **options):
            self.total, self.steps = total, []
            bars.append(self)

        def update(self, step):
            self.steps.append(step)

        def __exit__(self, *error):
            pass

    def encode_and_look(images, **options):
        seen.append(len(list((tmp_path / "out").glob("embeds-*"))))
        return encode(images, **options)

    with monkeypatch.context() as patch:
        patch.setattr(vlm, "encode", encode_and_look)
        patch.setattr(export, "tqdm", Bar)
        run(vlm, folder, tmp_path / "out", shard_size=2)
    assert seen == [0, 0, 1], "0.bmp (1.bmp fails), 2.bmp: a shard; 3.bmp, 4.bmp: another"
    assert (bars[0].total, sum(bars[0].steps), len(bars[0].steps)) == (5, 5, 3)
    check_right(vlm, folder, tmp_path / "out", set(NAMES) - {"1.bmp"}, ["1.bmp"])


def test_rows_are_written_as_wide_as_they_come(vlm, folder, tmp_path, monkeypatch):
    """Encoders that return features of several layers make rows of (1 + k) D; columns of a wider tensor, even."""
    encode = vlm.encode

    def wide(images, **options):
        return [torch.cat([x, 2 * x, 3 * x, x], 1)[:, : 3 * x.shape[1]] for x in encode(images, **options)]

    monkeypatch.setattr(vlm, "encode", wide)
    manifest = run(vlm, folder, tmp_path / "out")
    [want] = wide([folder / "2.bmp"], progress=False)
    got = read_embeddings(tmp_path / "out", "2.bmp")
    assert_agree(got, want, vlm.encoder)
    assert got.shape == (manifest["images"]["2.bmp"]["tokens"], 3 * encode([folder / "2.bmp"])[0].shape[1])


def test_others_may_read_shards_and_manifest_and_their_names_are_on_disk(vlm, folder, tmp_path, monkeypatch):
    """The mode is what the umask leaves of 0666; the folder is synced after each name is given."""
    events, fsync, replace = [], os.fsync, Path.replace

    def note_sync(file):
        events.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "contents")
        fsync(file)

    def note_name(*paths):
        events.append("name")
        return replace(*paths)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_name)
    umask = os.umask(0o027)
    try:
        run(vlm, folder, tmp_path / "out", shard_size=3)
    finally:
        os.umask(umask)
    assert events == ["contents", "name", "folder"] * 3, "two shards and a manifest"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


@pytest.mark.parametrize(
    "header",
    [None, {"format": "pt"}, {"images": "{}"}, {"images": "{", "model": "{}"}, {"images": "[1]", "model": "{}"}],
)
def test_a_foreign_shard_is_named(vlm, folder, tmp_path, header):
    (tmp_path / "out").mkdir()
    save_file({"a": torch.zeros(3)}, tmp_path / "out" / "embeds-000-00000.safetensors", header)
    with pytest.raises(ValueError, match=r"out: .*embeds-000-00000.safetensors was not written by `refvl encode`"):
        run(vlm, folder, tmp_path / "out")


# --- the disk ---------------------------------------------------------------------------------------------------------

FULL = [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]


@pytest.mark.parametrize("error", FULL, ids=repr)
def test_a_full_disk_is_one_line_and_the_same_command_continues(vlm, folder, tmp_path, monkeypatch, error):
    def full(tensors, path, header):
        path.write_bytes(b"half")
        raise error

    run(vlm, draw(tmp_path / "images", []), tmp_path / "out", shard_size=2)
    draw(folder, ["new.bmp"])
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"^out: .* cannot be written \(.*No space left"):
        patch.setattr(shards, "save_file", full)
        run(vlm, folder, tmp_path / "out")
    assert not (tmp_path / "out" / LOCK).exists() and not (tmp_path / "out" / UNFINISHED).exists()
    run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", [*NAMES, "new.bmp"])


def test_out_that_is_no_folder(vlm, folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"^out: .*file is a file, not a folder$"):
        run(vlm, folder, tmp_path / "file")
    with pytest.raises(OSError, match=r"^out: .*below cannot be written \(Not a directory\)$"):
        run(vlm, folder, tmp_path / "file" / "below")
    with pytest.raises(OSError, match=r"^out: .*cannot be written"):
        run(vlm, folder, Path("/proc/nowhere"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_listed(vlm, folder, tmp_path, monkeypatch):
    """Skipping it in silence would lose what it holds."""
    (folder / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(OSError, match=r"^folder: .*closed cannot be listed \(Permission denied\)$"):
        run(vlm, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what is not ours -------------------------------------------------------------------------------------------------


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years")


def link_to(target: str):
    """A link to a file, or to a folder, of somebody's."""
    return lambda path: path.symlink_to(path.parent.parent / target)


FOREIGN = {  # name in `out`: what stands there
    "a folder called as ours": (UNFINISHED, put_folder),
    "a file called as ours": (UNFINISHED, lambda path: path.write_text("years")),
    "a link to a folder": (UNFINISHED, link_to("home")),
    "a lock that links": (LOCK, link_to("home/thesis.txt")),
    "a lock that links nowhere": (LOCK, link_to("nowhere")),
    "a lock of another program": (LOCK, lambda path: path.write_text("4711")),
    "a manifest of another program": ("manifest.json", lambda path: path.write_text('{"version": 1}')),
    "a manifest that is no JSON": ("manifest.json", lambda path: path.write_text("years")),
    "a manifest that links": ("manifest.json", link_to("home/thesis.txt")),
}


def contents(folder: Path) -> dict[str, bytes | str]:
    """All below a folder: the bytes of files, where links lead."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in paths}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_not_ours_is_refused_and_left_alone(vlm, folder, tmp_path, case):
    """Oracle: the bytes of everything before. With force what is in the way gets another name, and is left as it is."""
    name, put = FOREIGN[case]
    out = tmp_path / "out"
    put_folder(tmp_path / "home")
    out.mkdir()
    put(out / name)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=rf"^out: .*{re.escape(name)} was not written by refvl; move it away, or"):
        run(vlm, folder, out)
    assert contents(tmp_path) == before
    run(vlm, folder, out, force=True)
    after = contents(tmp_path)
    for file, kept in before.items():
        assert kept in (after.get(file), after.get(file.replace(name, f"{name}.before", 1)))
    assert json.loads((out / "manifest.json").read_text())["images"].keys() == set(NAMES)


def test_folders_of_common_names_are_not_ours(vlm, folder, tmp_path):
    """What a person may well call something, and a file that comes into our folder during a run."""
    out = tmp_path / "out"
    put_folder(tmp_path / "home")
    out.mkdir()
    put_folder(out / "unfinished")
    (out / "encode.lock").symlink_to(tmp_path / "home" / "thesis.txt")
    (out / "embeds-000-00000.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="embeds-000-00000.safetensors is damaged"):
        run(vlm, folder, out)
    (out / "embeds-000-00000.safetensors").unlink()
    before = contents(tmp_path)
    run(vlm, folder, out)
    assert {file: kept for file, kept in contents(tmp_path).items() if file in before} == before
    with shards.held_folder(out):
        (out / UNFINISHED / "thesis.txt").write_text("years")
    assert (out / UNFINISHED / "thesis.txt").read_text() == "years"


# --- one process per folder -------------------------------------------------------------------------------------------


def test_a_held_folder_is_refused_in_one_line(vlm, folder, tmp_path):
    (tmp_path / "out").mkdir()
    with folder_lock(tmp_path / "out"):
        with pytest.raises(BlockingIOError, match=rf"^out: .* is being written by process {os.getpid()} on .* since"):
            run(vlm, folder, tmp_path / "out")
        assert (tmp_path / "out" / LOCK).exists(), "the refused one does not take the other's lock away"
    run(vlm, folder, tmp_path / "out")
    check_right(vlm, folder, tmp_path / "out", NAMES)


def test_locks_left_behind_are_taken_over(tmp_path):
    """By whomever: an owner of this machine that has ended, one whose number is used again, a file cut short."""
    host = lock.socket.gethostname()
    owners = [json.dumps({"host": host, "pid": pid}) for pid in (2**22 + 1, os.getpid())]
    for left in (*owners, "", "{"):
        (tmp_path / LOCK).write_text(left)
        with folder_lock(tmp_path):
            owner = json.loads((tmp_path / LOCK).read_text())
            assert (owner["host"], owner["pid"]) == (host, os.getpid()) and owner["since"]
        assert not (tmp_path / LOCK).exists()


def test_another_machines_lock_is_refused_with_a_way_out(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "noon"}))
    message = r"^out: .*\.refvl-lock names process 1 on elsewhere since noon.* remove the file$"
    with pytest.raises(BlockingIOError, match=message), folder_lock(tmp_path):
        pass
    assert "elsewhere" in (tmp_path / LOCK).read_text()


def test_without_kernel_locks_a_file_is_taken_at_its_word(tmp_path, monkeypatch):
    def unsupported(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with folder_lock(tmp_path), pytest.raises(BlockingIOError, match="remove the file"), folder_lock(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_a_lock_that_goes_while_it_is_taken_is_none(tmp_path, monkeypatch):
    """Its owner removes it between our opening and locking it: what we hold then has no name, and excludes nobody."""
    (tmp_path / LOCK).touch()
    flock = lock.fcntl.flock
    turns: list[int] = []

    def remove_and_lock(file, how):
        if not turns:
            (tmp_path / LOCK).unlink()
        turns.append(file)
        flock(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", remove_and_lock)
    with folder_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid() and len(turns) == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_lock_goes_with_every_error(tmp_path, error):
    with pytest.raises(error), folder_lock(tmp_path):
        raise error
    assert not (tmp_path / LOCK).exists()


def test_many_at_once_and_crashes_between(tmp_path, monkeypatch):
    """Eight threads take and leave one lock, some without cleaning up, as a killed process does: never two hold it."""
    inside, most, held, guard = 0, 0, 0, threading.Lock()
    unlink, turns = Path.unlink, itertools.count()

    def unlink_mostly(path, missing_ok=False):
        if next(turns) % 3:
            unlink(path, missing_ok)

    def work():
        nonlocal inside, most, held
        for _ in range(60):
            with suppress(BlockingIOError), folder_lock(tmp_path):
                with guard:
                    inside, most, held = inside + 1, max(most, inside + 1), held + 1
                with guard:
                    inside -= 1

    monkeypatch.setattr(Path, "unlink", unlink_mostly)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and held > 8


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("many"), [f"{i:02}.png" for i in range(24)])


def command(checkpoint, folder, out, *options):
    return ["encode", checkpoint, folder, "--out", out, "--device", "cpu", "--shard-size", 4, *options]


def shards_in(out: Path) -> int:
    return len(list(out.glob("embeds-*.safetensors")))


def finish(checkpoint, many, out, log, process=None) -> None:
    """The same command, in a process that is not disturbed, ends well, and the manifest holds all images."""
    process = process or start(command(checkpoint, many, out), log)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["images"]) == 24 and not manifest["unreadable"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (signal.SIGTERM, 143, "refvl: stopped; the same command continues\n"),
        (signal.SIGINT, 130, "refvl: stopped; the same command continues\n"),
    ],
)
def test_a_stopped_run_loses_one_shard_at_most_and_is_continued(checkpoint, many, vlm, tmp_path, number, status, line):
    """Stopped in its third batch: two shards stand, and stay as they are; the other four are made."""
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(command(checkpoint, many, out), log, gate=tmp_path / "never")
    wait_for(lambda: shards_in(out) == 2, process)
    os.kill(process.pid, number)
    process.join(300)
    assert (process.exitcode, log.read_text()) == (status, line)
    assert shards_in(out) == 2 and not (out / "manifest.json").exists()
    assert (out / LOCK).exists() == (number == signal.SIGKILL), "only a kill leaves the lock"
    before = {path: path.stat().st_mtime_ns for path in out.glob("embeds-*")}
    finish(checkpoint, many, out, log)
    assert {path: path.stat().st_mtime_ns for path in before} == before and shards_in(out) == 6
    check_right(vlm, many, out, [f"{i:02}.png" for i in range(24)])


@pytest.mark.thorough
def test_of_two_processes_one_writes(checkpoint, many, vlm, tmp_path):
    """The second, started while the first runs, is refused in one line; the first is not disturbed."""
    out, logs = tmp_path / "out", [tmp_path / "log0", tmp_path / "log1"]
    first = start(command(checkpoint, many, out), logs[0], gate=tmp_path / "gate")
    wait_for(lambda: shards_in(out) == 2, first)
    second = start(command(checkpoint, many, out), logs[1])
    second.join(300)
    assert second.exitcode == 1 and logs[1].read_text().count("\n") == 1
    assert f"is being written by process {first.pid} on" in logs[1].read_text()
    (tmp_path / "gate").touch()
    finish(checkpoint, many, out, logs[0], first)
    check_right(vlm, many, out, [f"{i:02}.png" for i in range(24)])
    assert shards_in(out) == 6


@pytest.mark.thorough
def test_a_file_size_limit_is_one_line(checkpoint, many, tmp_path):
    """The kernel's own refusal, from inside safetensors."""
    log = tmp_path / "log"
    process = start(command(checkpoint, many, tmp_path / "out"), log, file_limit=2000)
    process.join(300)
    assert process.exitcode == 1 and log.read_text().count("\n") == 1
    assert log.read_text().startswith(f"refvl: out: {tmp_path / 'out'} cannot be written (")
    finish(checkpoint, many, tmp_path / "out", log)


@pytest.mark.thorough
def test_a_reader_who_has_gone_is_no_error(checkpoint, tmp_path):
    """`refvl ... | head`: nothing on stderr, and the status of a program that a closed pipe ended."""
    scenes, out = draw(tmp_path / "scenes", ["0.png"]), tmp_path / "out"
    chat = ["chat", checkpoint, "Hi", "--image", scenes / "0.png", "--max-new-tokens", 3]
    for arguments in (["info", checkpoint], chat, ["encode", checkpoint, scenes, "--out", out]):
        process = start(arguments, tmp_path / "log", reader=False)
        process.join(300)
        assert process.exitcode == 128 + signal.SIGPIPE
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.thorough
def test_a_path_that_is_no_utf8_does_not_break_the_output(checkpoint, tmp_path):
    """A real standard output, which refuses what it cannot encode."""
    (tmp_path / LATIN).symlink_to(checkpoint)
    process = start(["info", tmp_path / LATIN], tmp_path / "log")
    process.join(300)
    assert process.exitcode == 0 and "caf\\udce9" in "".join((tmp_path / "log").read_text().split())


@pytest.mark.slow
def test_many_runs_at_once_and_killed_at_any_time(checkpoint, many, vlm, tmp_path):
    """Three processes at a time on one folder, killed after random moments; in the end the folder is whole."""
    out, log = tmp_path / "out", tmp_path / "log"
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        processes = [start(command(checkpoint, many, out), log) for _ in range(3)]
        for process in processes:
            process.join(float(torch.rand((), generator=generator)))
            process.kill()
            process.join()
    finish(checkpoint, many, out, log)
    check_right(vlm, many, out, [f"{i:02}.png" for i in range(24)])


def test_find_media_knows_each_file_once(folder):
    (folder / "again").symlink_to(folder, target_is_directory=True)
    assert [image.name for image in find_media(folder)] == NAMES
