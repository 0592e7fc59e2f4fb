"""What a notebook shows of the package, a model and a run."""

import pytest
from shipped import shipped

import refvl
from refvl.paths import DATA

SCENE = DATA / "pictures" / "scene.png"


def test_what_is_listed_is_there():
    assert all(hasattr(refvl, name) for name in dir(refvl))
    with pytest.raises(AttributeError, match="has no attribute 'chat'"):
        _ = refvl.chat


def test_a_model_says_what_it_is():
    vlm = shipped("tiny-qwen2_5_vl")
    text = repr(vlm)
    for words in (
        "VLM of the family Qwen2.5-VL on cpu, torch.float32", "encoder         Qwen2_5_VisionTransformer, ",
        "language_model  CausalTextModel, 3 layers of ", "graphs          none: the encoder runs eagerly",
    ):  # fmt: skip
        assert words in text
    assert "on meta, torch.bfloat16" in repr(refvl.load(vlm.config, weights="random", device="meta"))


def test_a_trace_says_what_happened():
    trace = shipped("tiny-qwen2_5_vl").trace("What color is the circle?", images=[SCENE], max_new_tokens=4)
    text = repr(trace)
    for stage, shapes, seconds in trace.rows():
        largest = trace.magnitude(stage)
        assert f"{stage:<14}{seconds:9.4f} s  {largest:>9}  {shapes}" in text
    assert text.startswith(f"Trace of {trace.text!r}")
    assert text.count("\n") == len(trace.seconds)
    assert refvl.Trace().positions is None
