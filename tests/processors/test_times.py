"""The seconds of a clip whose rate varies, in each family's prompt. Oracle: the times it was written with."""

from dataclasses import replace

import numpy as np
import pytest

import refvl
from refvl.paths import DATA
from refvl.pixels.media import load_video

SECONDS = (0.0, 0.1, 2.0, 2.1, 4.0, 9.0, 9.1, 9.3)


@pytest.fixture(scope="module")
def jumping():
    """Eight frames in 9.4 seconds; counted at their average rate they would stand 1.2 seconds apart."""
    video = load_video(np.zeros((8, 84, 84, 3), np.uint8), source_fps=8 / 9.4, num_frames=8)
    return replace(video, seconds=SECONDS)


@pytest.mark.parametrize("name", ["tiny-glm4v", "tiny-minicpmv-4_5", "tiny-qwen2_5_vl"])
def test_prompts_tell_true_seconds(jumping, name):
    """GLM writes the second of every other frame, MiniCPM-V tenths of a second; Qwen scales its axis by the mean."""
    processor = refvl.load(DATA / "checkpoints" / name, device="cpu", progress=False).processor
    (patches,) = processor.patchify([jumping])
    if name == "tiny-glm4v":
        assert patches.media_tokens.timestamps == (0, 2, 4, 9)
    elif name == "tiny-minicpmv-4_5":
        assert [i for group in patches.layout for i in group.temporal_ids] == [0, 1, 20, 21, 40, 90, 91, 93]
    else:
        per_second = processor.config.vision_config.tokens_per_second
        assert patches.media_tokens.t_factor == pytest.approx(2 * 9.4 / 8 * per_second)


def test_second_per_grid_reaches_the_positions(vlm, clip):
    trace = vlm.trace("go", videos=[clip], max_new_tokens=1)
    (video,), (span,) = trace.media, trace.spans
    assert span.t_factor == pytest.approx(2 / video.fps * vlm.config.vision_config.tokens_per_second)
    first_of_last_frame = span.offset + (span.t - 1) * span.h * span.w
    assert trace.positions[0, first_of_last_frame] == span.offset + int((span.t - 1) * span.t_factor)
