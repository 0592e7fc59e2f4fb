"""The vision tower without its language model, and images as grids of features.

Oracles: the same folder with its language model; transformers' towers with the same weights, their
blocks overheard; patches put into reading order by loops; Step3's encoder on one square; an image
whose colours say where they are.
"""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch
from closeness import assert_agree, roundings
from PIL import Image
from random_models import MAKERS, WITHOUT_VIDEOS, random_folder, random_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import refvl
from refvl.loading import NoText
from refvl.paths import DATA
from refvl.pixels.media import is_video

RANDOM = np.random.default_rng(0)
PICTURE = Image.fromarray(RANDOM.integers(0, 256, (112, 168, 3), dtype=np.uint8))
CLIP = tuple(RANDOM.integers(0, 256, (6, 60, 90, 3), dtype=np.uint8))
SIDE_FILES = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json")
ON_GRIDS = [name for name in MAKERS if name.startswith(("Qwen", "qwen", "GLM"))]
FOLDED = [name for name in MAKERS if name.startswith(("MiniCPM-V 4.6", "MiniCPM-V 4.7"))]  # they merge on the way
CUT = [name for name in MAKERS if name not in (*ON_GRIDS, *FOLDED)]
each_family = pytest.mark.parametrize("name", MAKERS)


def load(folder, **options):
    return refvl.load(folder, text=False, device="cpu", progress=False, **options)


def tower_folder(name: str, folder):
    """A folder with the tower's files alone: configs and its weights; no tokenizer, no chat
    template."""
    folder.mkdir()
    for file in SIDE_FILES:
        if (random_folder(name) / file).is_file():
            shutil.copy(random_folder(name) / file, folder)
    prefix, weights = random_model(name).family.vision_prefix, load_file(random_folder(name) / "model.safetensors")
    save_file({key: x for key, x in weights.items() if re.search(prefix, key)}, folder / "model.safetensors")
    return folder


def media_of(name: str) -> dict:
    return {"images": [PICTURE]} | ({} if name in WITHOUT_VIDEOS else {"videos": [CLIP]})


@each_family
def test_it_encodes_what_the_whole_model_encodes(name, tmp_path):
    want = random_model(name).encode(**media_of(name))
    for folder in (random_folder(name), tower_folder(name, tmp_path / "tower")):
        torch.testing.assert_close(load(folder).encode(**media_of(name)), want, rtol=0, atol=0)


@pytest.mark.parametrize("sharded", [True, False])
def test_of_a_hub_id_the_shards_of_the_tower_are_downloaded(tmp_path, monkeypatch, sharded):
    """Those of the text model need not be there.

    Oracle: a stand-in for `snapshot_download`, which records the call.
    """
    folder, asked = tower_folder("Qwen2.5-VL", tmp_path / "tower"), list[list[str]]()
    file = folder / "model.safetensors"
    if sharded:
        weight_map = dict.fromkeys(load_file(file), "a.safetensors") | {"model.norm.weight": "b.safetensors"}
        file.rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def snapshot_download(repo_id, *, allow_patterns, **kwargs):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    tower = load("Qwen/Qwen2.5-VL-72B-Instruct")
    assert torch.equal(tower.encode([PICTURE])[0], random_model("Qwen2.5-VL").encode([PICTURE])[0])
    assert asked == [["*.json", "*.txt", "*.jinja"], ["a.safetensors" if sharded else "model.safetensors"]]


def test_what_needs_the_language_model_names_the_argument():
    whole = random_model("Qwen2.5-VL")
    model = refvl.VLM(whole.config, whole.processor, whole.encoder, NoText())
    assert "none: loaded with text=False" in repr(model)
    message = "^text: the model was loaded without its language model; load it with text=True"
    with pytest.raises(ValueError, match=message):
        model.chat("What?")
    with pytest.raises(ValueError, match=message):
        model.generate(torch.ones(1, 2, dtype=torch.long))


def test_arguments_of_the_language_model_are_refused():
    with pytest.raises(TypeError, match="device_map: belongs to the language model, which text=False omits"):
        load(random_folder("Qwen2.5-VL"), device_map="auto")


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["frozen", "full", "LoRA"])
def test_it_trains_as_the_docs_say(way, tmp_path, monkeypatch):
    """Oracles: the gradients of transformers' tower under the same head; the adapter, loaded by the whole model."""
    monkeypatch.chdir(DATA.parent)
    section = (DATA.parent / "docs/train.md").read_text()
    source, step, _ = re.search(r"```python\n(.*?)```", section, re.S)[1].partition("optimizer.step()")
    exec(source.replace('way = "LoRA"', f"way = {way!r}"), names := {})
    model, head, patches = (names[name] for name in ("tower", "head", "patches"))
    found = {name: w.grad.flatten() for name, w in model.encoder.named_parameters() if w.grad is not None}
    assert head.weight.grad.any() and all("lora_" in name for name in found) == (way != "full")
    if way == "full":
        folder = DATA / "checkpoints/tiny-qwen2_5_vl"
        theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model.visual
        rows = theirs(patches.pixel_values, torch.tensor([patches.layout])).pooler_output
        head(rows).square().mean().backward()
        for name, weight in theirs.named_parameters():
            assert (found.pop(name) - weight.grad.flatten()).norm() <= 1e-4 * weight.grad.norm(), name
    exec(step, names)
    if way == "LoRA":
        model.adapters.eval().save_pretrained(tmp_path)
        whole = refvl.load("tiny-qwen2_5_vl", device="cpu", progress=False, adapters=[tmp_path])
        assert torch.equal(whole.encode([PICTURE])[0], model.encode([PICTURE])[0])
    assert not (found if way == "full" else way == "LoRA" and not found)


# ------------------------------------------------------------------------------------------------------ feature maps


def in_reading_order(x: torch.Tensor, grid: tuple, m: int) -> torch.Tensor:
    """(t, h, w, E), patch by patch in the order in which rows lie."""
    (t, h, w), rows = grid, iter(x)
    out = x.new_empty(t, h, w, x.shape[1])
    for k, y, x0 in itertools.product(range(t), range(0, h, m), range(0, w, m)):
        for dy, dx in itertools.product(range(m), range(m)):
            out[k, y + dy, x0 + dx] = next(rows)
    return out


@pytest.mark.parametrize("medium", [PICTURE, CLIP], ids=["image", "video"])
@pytest.mark.parametrize("name", ON_GRIDS)
@torch.no_grad()
def test_states_of_blocks_are_those_of_transformers(name, medium):
    """Qwen2.5-VL's blocks work in window order: which patch is where is read off what they are
    given first."""
    model = random_model(name)
    theirs = AutoModelForImageTextToText.from_pretrained(random_folder(name), dtype=torch.float32).eval().model.visual
    kept = list[torch.Tensor]()
    theirs.blocks[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    for block in theirs.blocks:
        block.register_forward_hook(lambda _, args, out: kept.append(out[0] if isinstance(out, tuple) else out))
    kind = "images" if medium is PICTURE else "videos"
    [patches] = model.processor.patchify(model.processor.decode(model.processor.messages("", **{kind: [medium]})))
    t, h, w = patches.layout
    theirs(patches.pixel_values, torch.tensor([(1, h, w)] * t))
    order = torch.arange(t * h * w)
    if name == "Qwen2.5-VL":
        order = torch.cdist(theirs.patch_embed(patches.pixel_values), kept[0]).argmin(1)
    assert sorted(order.tolist()) == list(range(t * h * w))
    blocks = list(range(len(theirs.blocks)))
    states = model.feature_map(medium, blocks=[*blocks, -1])
    assert torch.equal(states[-1], states[-2])
    for ours, state in zip(states, kept[1:], strict=False):
        assert_agree(ours, in_reading_order(state[order], (t, h, w), 2), roundings(theirs))
    embeds = model.feature_map(medium)
    assert embeds.shape[:3] == (t, h // 2, w // 2)
    [rows] = model.encode(**{kind: [medium]})
    assert torch.equal(embeds.flatten(0, 2), rows[:, : embeds.shape[-1]])
    assert embeds.shape[-1] == model.language_model.config.hidden_size


@pytest.mark.parametrize("name", [*CUT, *FOLDED])
def test_slices_and_crops_are_grids_of_their_own(name):
    """Of all cuts together: the rows of `encode`, and the states that a watched run keeps."""
    model = random_model(name)
    [want] = model.encode([PICTURE])
    maps = model.feature_map(PICTURE)
    assert len(maps) > 1
    assert torch.equal(torch.cat([x.flatten(0, 2) for _, x in maps]), want)
    if name in FOLDED:
        assert maps[0][0] == (0, 0, *PICTURE.size)
        return
    trace = model.trace("What?", images=[PICTURE], max_new_tokens=1, hidden_states=True)
    [last] = model.feature_map(PICTURE, blocks=[-1])
    assert torch.equal(torch.cat([x.flatten(0, 2) for _, x in last]), trace.tower_hidden_states[-1])
    assert [box for box, _ in last] == [box for box, _ in maps]


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("size", [(168, 112), (300, 150), (75, 260)])
def test_boxes_are_where_the_pixels_come_from(name, size):
    """Red grows from left to right, green from top to bottom: their means in a cut are the centre
    of its box."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    image = Image.fromarray(np.stack([x, y, 0 * x], -1).round().astype(np.uint8))
    model = random_model(name)
    [patches] = model.processor.patchify([image])
    boxes = [box for box, _ in model.feature_map(image)]
    config = model.processor.image_config
    mean, std = np.array(config.image_mean)[:2], np.array(config.image_std)[:2]
    sizes = [x.shape[:3].numel() for _, x in model.feature_map(image, blocks=[0])[0]]
    for rows, box in zip(patches.pixel_values.split(sizes), boxes, strict=True):
        seen = rows.unflatten(1, (3, -1))[:, :2].mean((0, 2)).numpy() * std + mean
        left, top, right, bottom = np.array(box) / [width, height, width, height]
        inside = 1.0 if max(right, bottom) <= 1.01 else None  # what lies beyond the image is black
        if inside:
            assert seen == pytest.approx([(left + right) / 2, (top + bottom) / 2], abs=0.03)


def test_frames_of_minicpmv_keep_their_packs():
    model = random_model("MiniCPM-V 4.5")
    [rows], maps = model.encode(videos=[CLIP]), model.feature_map(CLIP)
    assert torch.equal(torch.cat([x.flatten(0, 2) for _, x in maps]), rows)
    [states] = model.feature_map(CLIP, blocks=[0])
    assert sum(len(x) for _, x in states) == len(CLIP)
    assert {box for box, _ in maps} == {(0, 0, 90, 60)}


def test_a_list_of_items_is_a_list_of_maps():
    """Two images of one size are no video. Oracle: each item alone."""
    model, items = random_model("Qwen2.5-VL"), [PICTURE, PICTURE.rotate(180), CLIP]
    for ours, item in zip(model.feature_map(items), items, strict=True):
        assert torch.equal(ours, model.feature_map(item))


@pytest.mark.parametrize("blocks", [[99], [-99], [0.5]])
def test_blocks_that_are_not_there_are_refused(blocks):
    with pytest.raises(ValueError, match=r"blocks: expected indices of the tower's \d blocks, got "):
        random_model("Qwen2.5-VL").feature_map(PICTURE, blocks=blocks)


IS_VIDEO = [
    (PICTURE, False),
    (CLIP, True),
    ("a/film.WebM", True),
    (torch.zeros(3, 8, 8), False),
    (torch.zeros(2, 8, 8, 3), True),
]


@pytest.mark.parametrize(("item", "expected"), IS_VIDEO, ids=["image", "list", "suffix", "tensor", "frames"])
def test_one_function_tells_videos_from_images(item, expected):
    """`feature_map`, `encode_folder` and the explorer of DeepStack ask it.

    Oracle: what `load_video` accepts.
    """
    assert is_video(item) is expected
