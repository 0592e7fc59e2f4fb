"""Frames of a clip and their seconds: against vLLM's golden data, transformers' samplers, and what any sample obeys."""

import __future__

import ast
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refvl.positions import FrameSample, sample_video_frames
from refvl.positions.timestamps import VARIANTS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "glm_video.json").read_text())
COLUMNS = {"glm4v": {}, "glm46v": {}, "glm46v_t1": {"temporal_patch_size": 1}, "glmga": {}}


def clip_of(case, variant):
    """The golden metadata as our arguments; what is missing there is what upstream falls back to."""
    clip = {"fps": 2, "total_num_frames": case["total_frames"]} | case["metadata"]  # fps: the processor's, glm4v only
    return sample_video_frames(variant.split("_")[0], **clip, **COLUMNS[variant])


# --- oracles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", COLUMNS)
def test_golden_timestamps(variant):
    """Oracle: vLLM 0.33.0 `_get_video_second_idx_*`, which finds no frame in clips of under half a second.

    It truncates seconds in all variants, where the releases of "glm46v" and "glmga" write tenths.
    """
    computed = [case for case in GOLDEN["timestamps"] if not isinstance(case[variant], str)]
    for case in computed:
        sample, fps = clip_of(case, variant), case["metadata"].get("fps", 2)
        assert [int(index / fps) for index in sample.indices[::2]] == (case[variant] or [0]), case["metadata"]
    assert len(computed) == (35 if variant == "glm4v" else 34)
    assert sum(case[variant] == [] for case in computed) == (2 if "46" in variant else 3)


def upstream_sampler(variant):
    """transformers' own `sample_frames`, cut out of its file: the module wants torchvision, this method does not."""
    folder = Path(transformers.__file__).parent / "models" / variant
    tree = ast.parse((folder / f"video_processing_{variant}.py").read_text())
    [method] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "sample_frames"]
    code = compile(ast.Module([method], []), folder.name, "exec", flags=__future__.annotations.compiler_flag)
    exec(code, names := {"math": math, "np": np})
    settings = SimpleNamespace(fps=2, max_duration=300, max_frames=640, temporal_patch_size=2)
    return lambda **clip: names["sample_frames"](settings, SimpleNamespace(**clip)).tolist()


fps_of_cameras = st.one_of(st.sampled_from([1, 2, 10, 23.976, 24, 25, 29.97, 30, 59.94, 60]), st.floats(1, 60))
durations = st.one_of(st.floats(0.1, 40), st.floats(0.1, 4000), st.sampled_from([0.5, 30, 30.1, 300, 300.3, 2400]))


@st.composite
def clips(draw):
    """1 to 60 frames per second, 0.1 to 4000 s; the number of frames agrees with that or does not."""
    fps, duration = draw(fps_of_cameras), draw(durations)
    frames = draw(st.one_of(st.just(max(1, round(fps * duration))), st.integers(1, 2000)))
    return {"fps": fps, "duration": draw(st.sampled_from([duration, duration, None])), "total_num_frames": frames}


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=60)
@given(clips())
@example({"fps": 60, "duration": 4000, "total_num_frames": 240_000})
@example({"fps": 30, "duration": 0.1, "total_num_frames": 3})
def test_equals_transformers(variant, clip):
    """Oracle: `sample_frames` of the three video processors; where it finds no frame, ours is the first."""
    assert sample_video_frames(variant, **clip).indices == (upstream_sampler(variant)(**clip) or [0, 0])


# --- properties -------------------------------------------------------------------------------------------------------


def test_settings_of_a_processor():
    """Oracle: by hand, on ten seconds of ten frames per second."""
    clip = {"fps": 10, "duration": 10, "total_num_frames": 100}
    assert sample_video_frames("glm4v", **clip, target_fps=1).indices == list(range(0, 100, 10))
    assert sample_video_frames("glm4v", **clip, max_duration=2).indices == [0, 34, 67, 99]
    assert sample_video_frames("glmga", **clip, max_frames=4).indices == [0, 33, 66, 99]
    assert sample_video_frames("glm46v", **clip, max_frames=3).indices == [0, 49, 99, 99]
    assert sample_video_frames("glmga", **clip, target_fps=0.5).timestamps == [0, 3, 6]
    assert sample_video_frames("glm46v", **clip).timestamps[:4] == [0.0, 0.4, 0.7, 1.0]


# --- frames sampled elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_frames_sampled_elsewhere_are_kept(variant):
    """Duplicates dropped in order, an odd count made even; the variant matters only for how seconds are written."""
    clip = {"fps": 5, "total_num_frames": 30, "do_sample_frames": False}
    seconds = [0, 5] if variant == "glm4v" else [0.6, 5.8]
    repeated = sample_video_frames(variant, **clip, frames_indices=np.array([3, 3, 11, 29]))
    assert repeated == FrameSample([3, 11, 29, 29], seconds)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"variant": "qwen"}, ValueError, "variant: expected one of .*'glm46v'.* got 'qwen'"),
        ({"fps": 0}, ValueError, "fps: must be a finite number above 0, got 0"),
        ({"duration": -1.0}, ValueError, "duration: must be a finite number above 0, got -1.0"),
        ({"total_num_frames": 0}, ValueError, "total_num_frames: must be at least 1, got 0"),
        ({"target_fps": 0}, ValueError, "target_fps: must be a finite number above 0, got 0"),
        ({"frames_indices": [], "do_sample_frames": False}, ValueError, "frames_indices: expected at least one index"),
        ({"frames_indices": [90], "do_sample_frames": False}, ValueError, r"frames_indices: .* 0 to 89.* got \[90\]"),
        ({"frames_indices": [-1], "do_sample_frames": False}, ValueError, "frames_indices: must be at least 0, got -1"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    clip = {"variant": "glm4v", "fps": 30, "total_num_frames": 90} | changes
    with pytest.raises(error, match=message):
        sample_video_frames(**clip)
