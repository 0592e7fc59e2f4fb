"""`refvl info` and `refvl.study.costs`: the limits that count, and what they make of media.

Oracles: transformers' image processors and refvl's own runs on the same files, sums written out by
hand.
"""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from checkpoint_factory import change_json
from PIL import Image
from random_models import NEEDS_5_23, random_model
from torch.utils._pytree import tree_leaves
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import refvl
from refvl.paths import DATA
from refvl.study.costs import (
    costs,
    describe,
    kv_cache_bytes_per_prompt,
    kv_cache_bytes_per_token,
    plan_media,
    set_pixel_limits,
)

CONFIGS = DATA / "configs"
TINY = DATA / "checkpoints"
CLIP = DATA / "clips" / "bigbuckbunny.mp4"
UPSTREAM = {
    "Qwen2.5-VL": Qwen2VLImageProcessorPil,
    "Qwen3-VL": Qwen2VLImageProcessorPil,
    "Qwen3.5, Qwen3.6, Qwen3.8": Qwen2VLImageProcessorPil,
    "GLM": Glm4vImageProcessorPil,
}
FOLDERS = {
    "Qwen2.5-VL": "tiny-qwen2_5_vl",
    "Qwen3-VL": "tiny-qwen3_vl",
    "GLM": "tiny-glm4v",
    "MiniCPM-V": "tiny-minicpmv-4_5",
    "Step3-VL": "tiny-step3",
}


def planner(source):
    return refvl.load(source, weights="random", device="meta")


@pytest.fixture
def info(monkeypatch, shell):
    """Run `refvl info ARGUMENTS` on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "400")
    return partial(shell, "info")


# --- limits of the releases -------------------------------------------------------------------------------------------


def test_the_steps_are_printed(info, tmp_path):
    """By hand: 4000 / 28 rounds to 143, 3000 / 28 to 107; 143 * 107 tokens of 56 KiB in 28 layers
    of 4 heads of 128."""
    Image.new("RGB", (4000, 3000)).save(tmp_path / "large.png")
    status, out, _ = info(CONFIGS / "Qwen2.5-VL-7B-Instruct.json", "--image", tmp_path / "large.png")
    assert status == 0
    steps = "4000 x 3000 px -> at most 12,845,056 px -> 4004 x 2996 px -> 286 x 214 patches -> 15,301 tokens; "
    assert f"{steps}key-value cache {143 * 107 * 28 * 2 * 4 * 128 * 2 / 2**20:.1f} MiB" in out
    assert "at most 12,845,056 px -> 3584 x 3584 px -> 256 x 256 patches -> 16,384 tokens" in out
    assert "a server reserves" in out and "assumed" not in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "folder",
    {p.read_bytes(): p.parent for p in sorted(CONFIGS.glob("*/preprocessor_config.json"))}.values(),
    ids=lambda p: p.name,
)
def test_released_files_give_what_transformers_makes_of_them(folder):
    """Oracle: the family's image processor of transformers, reading the same file; grids and so
    token counts agree.

    A folder of each content: sizes of a family differ in their text model alone. How pixels are
    resized and scaled changes no grid, so the oracle does it in the cheapest way.
    """
    vlm = planner(CONFIGS / f"{folder.name}.json")
    upstream = UPSTREAM[vlm.family.name[:3] if vlm.family.name.startswith("GLM") else vlm.family.name]
    assert not vlm.processor.assumed
    cheap = {"resample": Image.Resampling.NEAREST, "do_rescale": False, "do_normalize": False}
    for size in [(1000, 760), (31, 639), (4200, 4200)]:
        image = Image.new("RGB", size)
        theirs = upstream.from_pretrained(folder)(images=[image], return_tensors="pt", **cheap)
        [grid] = theirs["image_grid_thw"].tolist()
        plan = plan_media(vlm, image)
        assert plan.layout == tuple(grid) and plan.tokens == grid[1] * grid[2] // 4


@pytest.mark.parametrize("name", sorted(FOLDERS.values()))
def test_a_folder_and_its_own_config_agree(name, scene=DATA / "pictures" / "rocket.jpg"):
    rows = []
    for source in (TINY / name, TINY / name / "config.json"):
        vlm = planner(source)
        rows.append(describe(vlm, vlm.processor.decode(vlm.processor.messages("", [scene]))))
    assert rows[0] == rows[1]
    assert "assumed" not in str(rows)


# --- options ----------------------------------------------------------------------------------------------------------

PHOTO = DATA / "pictures" / "coffee.jpg"


@pytest.mark.parametrize(
    "name, rule, q", [("tiny-qwen2_5_vl", "evs", 0.5), ("tiny-glm4v", "evs", 0.9), ("tiny-glm4v", "vidcom2", 0.9)]
)
def test_options_change_the_plan_as_they_change_a_run(info, clip, name, rule, q):
    """Oracle: what a model with the same limits encodes of the same files, and how many tokens its
    prompt keeps.

    At 0.9 EVS keeps the first frame whole and VidCom2 fewer tokens than that.
    """
    pruned = {"pruning_rate": q, "pruning": rule}
    options = ["--max-pixels", 60_000, "--min-pixels", 20_000, "--fps", 1, "--pruning-rate", q, "--pruning", rule]
    status, out, _ = info(TINY / name, "-i", PHOTO, "-i", DATA / "pictures/scene.png", "-v", clip, *options, "--json")
    numbers = json.loads(out)
    vlm = refvl.load(TINY / name, device="cpu", progress=False)
    set_pixel_limits(vlm.processor, max_pixels=60_000, min_pixels=20_000)
    video = {"type": "video", "video": clip, "fps": 1.0}
    pictures = [{"type": "image", "image": file} for file in (PHOTO, DATA / "pictures/scene.png")]
    content = [*pictures, video, {"type": "text", "text": "What?"}]
    trace = vlm.trace([{"role": "user", "content": content}], **pruned, max_new_tokens=1)
    assert status == 0
    assert [medium["tokens"] for medium in numbers["media"]] == [len(e) for e in trace.embeds]
    assert [m["kept"] for m in numbers["media"]][2] == int(trace.keep_masks[2].sum()) < numbers["media"][2]["tokens"]
    assert numbers == json.loads(json.dumps(costs(cli_model(name), trace.media, **pruned)))


def cli_model(name: str):
    """The model that the command line plans with: in bfloat16, with the limits of the options."""
    vlm = refvl.load(TINY / name, weights="random", device="meta", dtype="bfloat16")
    set_pixel_limits(vlm.processor, max_pixels=60_000, min_pixels=20_000)
    return vlm


def test_a_family_without_videos_may_have_limits_on_pixels():
    """Its `video_config` is None."""
    processor = planner(TINY / "tiny-qwen2_5_vl").processor
    processor.video_config = None
    set_pixel_limits(processor, max_pixels=60_000)
    assert (processor.image_config.max_pixels, processor.video_config) == (60_000, None)


def test_a_small_picture_is_enlarged_and_the_step_says_so():
    """By hand: 84 x 84 px grow to 5 x 5 tokens, the least above 20,000 px, and GLM counts each
    frame twice."""
    for name, least, tokens in (("tiny-qwen2_5_vl", 20_000, 36), ("tiny-glm4v", 10_000, 16)):
        row = describe(cli_model(name), [Image.new("RGB", (84, 84))])["image 1"]
        assert row.startswith(f"84 x 84 px -> at least {least:,} px -> "), row
        assert f" -> {tokens} tokens;" in row, row


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiny-step3", ["--max-pixels", "9"], "max_pixels: not supported by this family"),
        ("tiny-qwen2_5_vl", ["--max-pixels", "9"], "min_pixels: must not exceed max_pixels=9"),
        ("tiny-minicpmv-4_5", ["--image", PHOTO, "--pruning-rate", "0.5"], "pruning_rate: not supported by MiniCPM-V"),
    ],
)
def test_a_wrong_option_is_one_line(info, name, options, message):
    status, out, err = info(TINY / name, *options)
    assert (status, out, err.count("\n")) == (1, "", 1) and message in err, err


# --- which key counts where -------------------------------------------------------------------------------------------

# Rows of the table in docs/questions.md: family, kind of medium, file, key; dots separate the levels of a key
ROWS = re.findall(r"^\| .* \| (?:image|video) \| .*\.json \|.*$", (DATA.parent / "docs/questions.md").read_text(), re.M)
LIMIT_KEYS = [row.replace("`", "").strip("| ").split(" | ")[:4] for row in ROWS]
assert len(LIMIT_KEYS) > 24, "the table is not found"
CHANGED = {  # a value that changes the number of tokens of the photo or the clip
    "max_pixels": 8_000, "min_pixels": 700_000, "size.longest_edge": 20_000, "size.shortest_edge": 700_000, "fps": 0.5,
    "max_frames": 2, "max_slice_nums": 2, "scale_resolution": 448, "slice_config.max_slice_nums": 2,
    "vision_config.image_size": 168,
}  # fmt: skip
RAISED = {"min_pixels": "max_pixels", "size.shortest_edge": "size.longest_edge"}  # a minimum needs room above it
GOES_FIRST = {"min_pixels": None, "max_pixels": None}  # it would count instead of the `size`


def with_key(values: dict, key: str, value) -> dict:
    """A config with another value; None stands for none."""
    first, _, rest = key.partition(".")
    return values | {first: with_key(values.get(first) or {}, rest, value) if rest else value}


@pytest.mark.parametrize(("family", "kind", "file", "key"), LIMIT_KEYS)
def test_every_key_of_the_table_counts_where_it_says(family, kind, file, key, tmp_path):
    """Oracle: the plan with the key changed, and transformers' image processor, where it reads the
    same file."""
    weights = shutil.ignore_patterns("*.safetensors", "*.jsonl")
    folder = shutil.copytree(TINY / FOLDERS[family], tmp_path / "checkpoint", ignore=weights)
    if file == "config.json" and family == "MiniCPM-V":
        change_json(folder / "preprocessor_config.json", lambda values: values | {"max_slice_nums": None})
    medium = {"image": {"images": [PHOTO]}, "video": {"videos": [CLIP]}}[kind]

    def tokens() -> int:
        vlm = planner(folder)
        return plan_media(vlm, vlm.processor.decode(vlm.processor.messages("", **medium))[0]).tokens

    def prepared(values: dict) -> dict:
        values |= GOES_FIRST if key.startswith("size.") else {}
        return with_key(values, RAISED[key], 2_000_000) if key in RAISED else values

    change_json(folder / file, prepared)
    before = tokens()
    change_json(folder / file, lambda values: with_key(values, key, CHANGED[key]))
    after = tokens()
    assert after != before, "the key does not count"
    if kind == "image" and family in UPSTREAM:
        theirs = UPSTREAM[family].from_pretrained(folder)(images=[Image.open(PHOTO)], return_tensors="pt")
        assert theirs["image_grid_thw"].prod() // 4 == after


def test_layers_of_linear_attention_keep_no_keys():
    """By hand: 8 of the 32 layers of Qwen3.5-9B have keys and values, 4 heads of 256 in bfloat16
    each."""
    vlm = refvl.load(CONFIGS / "Qwen3.5-9B.json", weights="random", device="meta", dtype="bfloat16")
    found = costs(vlm)
    assert found["kv_cache_bytes_per_token"] == 8 * 2 * 4 * 256 * 2
    assert found["kv_cache_bytes_per_prompt"] == 24 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 4 * 2)
    assert describe(vlm)["kv cache"] == "32.0 KiB a token and 49.5 MiB a prompt"


@pytest.mark.parametrize(
    ("name", "length"), [("qwen3_5", 10), pytest.param("Step-3.7", 200, marks=NEEDS_5_23)], ids=["linear", "sliding"]
)
@torch.inference_mode()
def test_a_hybrid_cache_is_as_large_as_it_says(name, length):
    """Oracle: the tensors of a cache that a prompt has filled."""
    model = random_model(name).language_model
    embeds = torch.randn(1, length, model.config.hidden_size)
    positions = torch.arange(length).expand(3, 1, -1)
    cache = model(inputs_embeds=embeds, position_ids=positions, use_cache=True).past_key_values
    stored = [x for layer in cache.layers for x in tree_leaves(vars(layer)) if isinstance(x, torch.Tensor) and x.ndim]
    state = kv_cache_bytes_per_prompt(model.config, torch.float32)
    assert sum(x.nbytes for x in stored) == length * kv_cache_bytes_per_token(model.config, torch.float32) + state
    assert state > 0
