"""MiniCPM-V 4.6 and 4.7 from folder to text. Oracle: transformers' processor and model on the same folder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from random_models import NEEDS_5_23, random_folder, random_model
from transformers import AutoModelForImageTextToText, AutoTokenizer, ProcessorMixin

from refvl.pixels.media import Video
from refvl.pixels.slices import SliceConfig, plan_slices

pytestmark = NEEDS_5_23
NAMES = ["MiniCPM-V 4.6", "MiniCPM-V 4.6, 4x", "MiniCPM-V 4.7"]
RANDOM = np.random.default_rng(0)
SMALL = Image.fromarray(RANDOM.integers(0, 256, (90, 100, 3), dtype=np.uint8))  # no slices
SQUARE = Image.fromarray(RANDOM.integers(0, 256, (220, 220, 3), dtype=np.uint8))  # 2 x 2
WIDE = Image.fromarray(RANDOM.integers(0, 256, (100, 300, 3), dtype=np.uint8))  # 1 x 3
MOVING = RANDOM.integers(0, 256, (3, 90, 120, 3), dtype=np.uint8)
SLICED_FRAMES = RANDOM.integers(0, 256, (2, 200, 200, 3), dtype=np.uint8)
REQUESTS = {  # what a user's turn holds, in order
    "text": ["What is it?"],
    "no slices": [SMALL, "What is it?"],
    "slices": [SQUARE, "What is it?"],
    "a row of slices": [WIDE, "What is it?"],
    "a line between": [SQUARE, "\n", SMALL, "\n\nWhich?"],
    "side by side": [SMALL, WIDE, SQUARE, "Which?"],
    "between text": ["First", SQUARE, "then", SMALL, "which?"],
    "frames": [MOVING, "What moves?"],
    "frames in slices": [SLICED_FRAMES, "\nWhat moves?"],
    "a clip and an image": [SQUARE, MOVING, "And?"],
}
NEW_TOKENS = 8


class FramesAsPictures:
    """In place of transformers' video processor, which needs torchvision: every frame through its image processor."""

    slice_mode, model_input_names = True, ("pixel_values_videos", "target_sizes_videos")

    def __init__(self, pictures):
        self.pictures, self.downsample_mode = pictures, pictures.downsample_mode

    def __call__(self, videos, **options) -> dict:
        made = self.pictures([Image.fromarray(frame) for video in videos for frame in video], return_tensors="pt")
        return {
            "pixel_values_videos": made["pixel_values"],
            "target_sizes_videos": made["target_sizes"],
            "grids_videos": np.array(made["grids"]),
            "num_frames_per_video": [len(video) for video in videos],
        }


def theirs_of(name: str):
    """transformers' (processor, model) of the folder."""
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
    from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor

    folder, pictures = random_folder(name), MiniCPMV4_6ImageProcessorPil.from_pretrained(random_folder(name))
    parts = {"image_processor": pictures, "video_processor": FramesAsPictures(pictures)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *arguments: None)
        made = MiniCPMV4_7Processor if "4.7" in name else MiniCPMV4_6Processor
        processor = made(**parts, tokenizer=AutoTokenizer.from_pretrained(folder))
    return processor, AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def content(parts: list) -> list[dict]:
    kinds = {str: "text", np.ndarray: "video"}
    return [{"type": (kind := kinds.get(type(part), "image")), kind: part} for part in parts]


def patch_rows(pixels: torch.Tensor) -> torch.Tensor:
    """transformers' strip (1, 3, P, N * P) -> (N, 3*P*P)."""
    return pixels[0].unflatten(-1, (-1, 14)).permute(2, 0, 1, 3).flatten(1)


def inputs_of(processor, vlm, parts: list) -> dict:
    """What transformers' processor makes of the same turn."""
    text = vlm.processor.apply_template(vlm.processor.messages([{"role": "user", "content": content(parts)}]))
    media = {
        "images": [part for part in parts if isinstance(part, Image.Image)] or None,
        "videos": [part for part in parts if isinstance(part, np.ndarray)] or None,
    }
    return dict(processor(text=[text], **media, return_mm_token_type_ids=True, return_tensors="pt"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_prompts_pixels_positions_and_ids_are_transformers(name):
    processor, model = theirs_of(name)
    vlm = random_model(name)
    answers = []
    for parts in REQUESTS.values():
        inputs = inputs_of(processor, vlm, parts)
        trace = vlm.trace([{"role": "user", "content": content(parts)}], max_new_tokens=NEW_TOKENS)
        assert trace.full_ids.tolist() == inputs["input_ids"][0].tolist()
        kinds = [medium.media_tokens.kind for medium in trace.patches]
        for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            rows = [p.pixel_values for p in trace.patches if p.media_tokens.kind == kind]
            if rows:
                torch.testing.assert_close(torch.cat(rows), patch_rows(inputs[key]), rtol=0, atol=1e-6)
        assert ("image" in kinds, "video" in kinds) == ("pixel_values" in inputs, "pixel_values_videos" in inputs)
        if "4.7" in name and kinds:
            types = {key: inputs.get(key) for key in ("mm_token_type_ids", "target_sizes", "target_sizes_videos")}
            positions, delta = model.model.get_rope_index(inputs["input_ids"], **types)
            assert torch.equal(trace.positions, positions[:, 0]) and trace.delta == int(delta)
        if "4.7" not in name:
            del inputs["mm_token_type_ids"]
        ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(trace.full_ids) :]
        assert trace.token_ids == ids.tolist()
        answers.append(tuple(trace.token_ids))
    assert len(set(answers)) > 4, "the oracle must be able to disagree"


def test_slices_are_those_of_transformers():
    """Oracle: the sizes of transformers' image processor, over random pictures, in both modes."""
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    theirs = MiniCPMV4_6ImageProcessorPil()
    for width, height in RANDOM.integers(30, 3000, (300, 2)).tolist():
        for mode, multiple in (("16x", 4), ("4x", 2)):
            plan = plan_slices(width, height, SliceConfig(multiple=multiple))
            grid = theirs.get_sliced_grid((height, width), 9, 448)
            assert plan.grid == (tuple(grid[::-1]) if grid else None)
            rule = {"scale_resolution": 448, "patch_size": 14, "downsample_mode": mode}
            overview = theirs.find_best_resize((height, width), **rule, allow_upscale=grid is None)
            assert plan.tgt_sizes[0] == tuple(side // 14 for side in overview)
            if grid:
                refined = theirs.get_refine_size((height, width), grid, **rule, allow_upscale=True)
                cell = tuple(side // count // 14 for side, count in zip(refined, grid, strict=True))
                assert set(plan.tgt_sizes[1:]) == {cell}


@pytest.mark.parametrize(
    ("total", "fps"), [(40, 10.0), (7, 29.97), (1, 1.0), (4000, 24.0), (5000, 29.97), (1281, 10.0)]
)
def test_frames_are_sampled_as_transformers_does(total, fps):
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    processor = random_model("MiniCPM-V 4.6").processor
    assert list(processor.frame_indices(total, fps)) == MiniCPMV4_6VideoProcessor().sample_frames(metadata)


def test_an_exchanged_slice_changes_the_answer():
    """The oracle above would see two slices exchanged on the canvas."""
    halves = SQUARE.copy()
    halves.paste(SQUARE.crop((0, 0, 110, 220)), (110, 0))
    halves.paste(SQUARE.crop((110, 0, 220, 220)), (0, 0))
    vlm = random_model("MiniCPM-V 4.7")
    asked = {str(vlm.trace("What?", images=[image], max_new_tokens=NEW_TOKENS).token_ids) for image in (SQUARE, halves)}
    assert len(asked) == 2


def test_clips_are_not_pruned():
    clip = Video(MOVING, 2.0, 2.0, (0, 1, 2), 3, 1.5)
    medium = replace(random_model("MiniCPM-V 4.7").processor.extents([clip])[0])
    with pytest.raises(ValueError, match="pruning_rate: must be 0 for MiniCPM-V's videos, got 0.5"):
        medium.check_pruning(0.5)
