"""What GLM is planned for before anything is loaded. Oracles: vLLM's golden numbers, transformers'
GLM-GA processors.

The golden file holds two versions of the frame counts: the seed page's, which refvl has, and the
released one's.
"""

import json
from pathlib import Path

import pytest
from checkpoint_factory import glm_config
from transformers.models.glmga.image_processing_pil_glmga import GlmgaImageProcessorPil

import refvl
from refvl.paths import DATA
from refvl.pixels.by_hand import count_tokens, patchify_image
from refvl.pixels.media import load_image
from refvl.pixels.patch_configs import Glm4vPatchConfig, GlmgaPatchConfig
from refvl.pixels.patch_configs import smart_resize_video as smart_resize
from refvl.study.costs import describe, image_size_with_most_features

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "glm_video.json").read_text())["most_features"]
SEED = [case for case in GOLDEN if case["variant"] == "seed"]


def image_config(case) -> Glm4vPatchConfig:
    return Glm4vPatchConfig(max_pixels=case["image_max_pixels"])


class AsVllm(Glm4vPatchConfig):
    """vLLM sizes a clip of an odd number of frames before it is padded, so that its last step
    outgrows the budget."""

    def target_size(self, height, width, num_frames=1):
        budgets = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return smart_resize(max(num_frames, 2), height, width, **budgets)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['variant']} {c['image_max_pixels']}")
def test_the_largest_picture_is_golden(case):
    config = image_config(case)
    height, width = image_size_with_most_features(config)
    assert [width, height] == case["image_size"]
    assert count_tokens(height, width, config) == case["max_image_tokens"] <= config.max_image_tokens
    for width, height, tokens in case["num_image_tokens"]:
        assert count_tokens(height, width, config) == tokens


@pytest.mark.parametrize("case", SEED, ids=lambda c: c["image_max_pixels"])
def test_the_longest_clip_within_a_number_of_tokens_is_golden(case):
    """Upstream: `_get_max_video_frames` (vLLM)."""
    size = image_size_with_most_features(image_config(case))
    clip = AsVllm.for_video()
    assert clip.max_pixels == case["video_max_pixels"]
    for tokens, frames in case["max_video_frames"]:
        too_many = [count_tokens(*size, clip, count) > tokens for count in range(1, 1201)]
        assert [*too_many, True].index(True) == min(frames, 1200)


@pytest.mark.usefixtures("width_first")
@pytest.mark.parametrize("photo", ["coffee", "rocket"])
@pytest.mark.parametrize("size", [{}, {"size": {"shortest_edge": 112**2, "longest_edge": 2 * 200**2}}])
def test_pictures_of_glm_ga_equal_its_pillow_processor(photo, size):
    image = load_image(DATA / "pictures" / f"{photo}.jpg")
    theirs = GlmgaImageProcessorPil(**size)(images=[image], return_tensors="pt")
    rows, grid = patchify_image(image, GlmgaPatchConfig.from_dict(size))
    assert theirs["image_grid_thw"].tolist() == [list(grid)]
    assert rows.equal(theirs["pixel_values"])


def test_sides_of_glm_ga_are_multiples_of_what_its_files_ask():
    """Oracle: GLM's smart_resize with the larger factor, as GLM-GA's processors on tensors call it."""
    config = GlmgaPatchConfig.from_dict({"patch_expand_factor": 2}, "video")
    assert config.max_pixels == 28 * 28 * 2 * 55790
    for size in [(480, 640), (90, 700), (2000, 3000)]:
        budgets = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
        height, width = config.target_size(*size, 40)
        assert (height, width) == smart_resize(40, *size, factor=56, **budgets)
        assert count_tokens(*size, config, 40) == 20 * (height // 28) * (width // 28)
    with pytest.raises(ValueError, match="patch_expand_factor: must be at least 1, got 0"):
        GlmgaPatchConfig(patch_expand_factor=0)


WORDS = {
    "glm4v": "2 frames per second up to 300 s, spread evenly beyond (assumed: without processor files",
    "glm46v": "6, 2 or 1 frames per second, fewer for longer videos, 640 at most",
    "glmga": "2 frames per second, 640 at most",
}


@pytest.mark.parametrize("model_type", WORDS)
def test_info_says_how_clips_are_sampled_and_when_it_assumes(model_type):
    rows = describe(refvl.load(glm_config(model_type), weights="random", device="meta"))
    words = f"{model_type}: {WORDS[model_type]}"
    assert rows["video sampling"].startswith(words)
    assert ("assumed" in words) == ("assumed" in rows["video sampling"])
    tokens = "2408 x 2408 px -> 172 x 172 patches -> 7,396 tokens"  # 86 * 86 of at most 15000 / 2
    assert tokens in rows["largest square image"]
