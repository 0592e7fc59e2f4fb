"""What Qwen3-VL and Qwen3.5 alone do from folder to text. Oracles: transformers in bfloat16, its frame sampling, its
own wording of a video. That ids equal those of transformers in float32 is in `test_grid_generate.py`.

transformers 5.17 to 5.23 keeps the marks that a chat template writes around a video; 4.57 and vLLM let the frames' own
take their place, as here. Prompts go to transformers as ids, so that only the test of the wording sees a difference.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_factory import make_qwen3_checkpoint
from prompts import PHOTOS, image_part, text_part
from random_models import load
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as HFQwen3VLProcessor

from refvl.paths import DATA
from refvl.pixels.by_hand import smart_resize
from refvl.pixels.patch_configs import Qwen3VLPatchConfig, smart_resize_video
from refvl.processors.qwen3_vl import even_indices

CLIP = DATA / "clips" / "bigbuckbunny.mp4"
MOVING = np.random.default_rng(0).integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
NEW_TOKENS = 12
MEDIA = {
    "a clip": [{"type": "video", "video": str(CLIP)}, text_part("What moves?")],
    "frames in memory and a picture": [
        text_part("See"), {"type": "video", "video": MOVING}, image_part(PHOTOS[1]), text_part("What moves?"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    return make_qwen3_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3_vl")


@pytest.fixture(scope="module")
def dense(dense_folder):
    return load(dense_folder)


def test_without_deeper_features_the_ids_differ(dense):
    """The oracles above could not tell, if nothing came of them."""
    trace = dense.trace("What is it?", images=PHOTOS[:1], max_new_tokens=NEW_TOKENS)
    main, deeper = dense.encoder.split(trace.embeds[0])
    assert deeper.shape == (2, *main.shape)
    rows = torch.cat([main, torch.zeros_like(deeper).transpose(0, 1).flatten(1)], dim=1)
    ids = dense.generate(
        trace.full_ids[None], image_embeds=[rows], image_grid_thw=trace.layouts, max_new_tokens=NEW_TOKENS
    )
    assert ids[0, len(trace.full_ids) :].tolist() != trace.token_ids


# ------------------------------------------------------------------------------------------------- prompts


def theirs_of(processor, folder, video, grid) -> str:
    """A video in transformers' words."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    writer = HFQwen3VLProcessor.__new__(HFQwen3VLProcessor)
    writer.video_processor, writer.tokenizer = sizes, tokenizer
    writer.video_token, writer.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    writer.vision_end_token = "<|vision_end|>"
    metadata = SimpleNamespace(fps=video.source_fps, frames_indices=list(video.indices))
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    return writer.replace_video_token(inputs, 0)


@pytest.mark.parametrize("frames", [MOVING, MOVING[:5], MOVING[:1], CLIP], ids=["six", "odd", "one", "file"])
def test_prompt_ids_equal_transformers_text_then_tokenizer(dense, dense_folder, frames):
    """Oracle: their `replace_video_token`, in place of the template's three tokens."""
    messages = dense.processor.messages("What moves?", [PHOTOS[0]], [frames])
    patches = dense.processor.patchify(dense.processor.decode(messages))
    tokenizer = AutoTokenizer.from_pretrained(dense_folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    video = theirs_of(dense.processor, dense_folder, patches[1].source, patches[1].layout)
    text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", video)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * patches[0].media_tokens.num_tokens)
    assert dense.processor.tokenize(messages, [p.media_tokens for p in patches]) == tokenizer(text)["input_ids"]
    assert len(re.findall(r"<\d+\.\d seconds><\|vision_start\|>", text)) == patches[1].layout[0]


@pytest.mark.parametrize(("total", "fps"), [(132, 25.0), (7, 30.0), (1, 25.0), (3, 2.0), (9000, 29.97), (61, 24.0)])
def test_frames_are_those_of_transformers(total, fps):
    """Oracle: `Qwen3VLVideoProcessor.sample_frames`, called on a stand-in, because its class needs torchvision."""
    source = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl").Qwen3VLVideoProcessor
    stand_in = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    for options in ({}, {"fps": 1.0}, {"num_frames": min(total, 6)}):
        theirs = source.sample_frames(stand_in, metadata, **options).tolist()
        assert even_indices(total, fps, **options) == theirs


# -------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("frames", [1, 2, 5, 8, 31])
def test_sizes_follow_the_budget_of_each_kind(frames):
    """By hand: an image has one budget, a clip one for all of its frames; capped, each frame at most its share."""
    picture, clip = Qwen3VLPatchConfig(max_pixels=200_000), Qwen3VLPatchConfig.for_video(max_pixels=200_000)
    capped = Qwen3VLPatchConfig.for_video(max_pixels=200_000, cap_pixels_per_frame=True, max_video_tokens=4)
    counted, budgets = max(frames, 2), {"factor": 32, "min_pixels": 128 * 32 * 32}
    share = max(min(4 * 32 * 32, 200_000 // counted), int(128 * 32 * 32 * 1.05))
    assert (clip.frame_floor(counted), clip.frame_budget(counted)) == (-(-128 * 32 * 32 // counted), 200_000 // counted)
    for height, width in ((height, width) for height in range(60, 400, 97) for width in range(60, 400, 41)):
        images = {"factor": 32, "min_pixels": 65536, "max_pixels": 200_000}
        assert picture.target_size(height, width) == smart_resize(height, width, **images)
        assert clip.target_size(height, width, frames) == smart_resize_video(
            counted, height, width, max_pixels=200_000, **budgets
        )
        assert capped.target_size(height, width, frames) == smart_resize_video(
            counted, height, width, max_pixels=share * counted, **budgets
        )


# ------------------------------------------------------------------------------------------------- weights


def test_experts_as_they_are_released(tmp_path):
    """In the released files of Qwen3-VL's MoE the experts' matrices lie transposed: (experts, in, out)."""
    folder = make_qwen3_checkpoint(tmp_path, "qwen3_vl_moe")
    expected = load(folder).trace("Hi", max_new_tokens=4).token_ids
    weights = load_file(folder / "model.safetensors")
    turned = {n: w.transpose(1, 2).contiguous() if ".experts." in n else w for n, w in weights.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).trace("Hi", max_new_tokens=4).token_ids == expected
    wrong = {n: w[:, 1:].contiguous() if "experts.down" in n else w for n, w in weights.items()}
    save_file(wrong, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"mismatched \(3\).*experts\.down_proj"):
        load(folder)
