"""What a notebook shows of the package, a model and a run."""

import pytest

import refvl
from refvl.paths import DATA

SCENE = DATA / "pictures" / "scene.png"


@pytest.fixture(scope="module")
def vlm():
    return refvl.load(DATA / "checkpoints" / "tiny-qwen2_5_vl", device="cpu", progress=False)


def test_what_is_listed_is_there():
    assert all(hasattr(refvl, name) for name in dir(refvl))
    with pytest.raises(AttributeError, match="has no attribute 'chat'"):
        _ = refvl.chat


def test_a_model_says_what_it_is(vlm):
    text = repr(vlm)
    for words in (
        "VLM of the family Qwen2.5-VL on cpu, torch.float32", "encoder         Qwen2_5_VisionTransformer, ",
        "language_model  CausalTextModel, 3 layers of ", "graphs          none: the encoder runs eagerly",
    ):  # fmt: skip
        assert words in text
    graphed = refvl.load(DATA / "checkpoints" / "tiny-step3", device="cpu", progress=False, graphs=True)
    assert "graphs          EncoderGraphManager" in repr(graphed)
    assert "on meta, torch.bfloat16" in repr(refvl.load(vlm.config, weights="random", device="meta"))


def test_a_trace_says_what_happened(vlm):
    trace = vlm.trace("What color is the circle?", images=[SCENE], max_new_tokens=4)
    text, table = repr(trace), trace._repr_html_()
    for stage, shapes, seconds in trace.rows():
        largest = trace.magnitude(stage)
        assert f"{stage:<14}{seconds:9.4f} s  {largest:>9}  {shapes}" in text
        assert f"<tr><td>{stage}</td><td>{shapes}</td><td>{largest}</td><td>{seconds:.4f}</td></tr>" in table
    assert text.startswith(f"Trace of {trace.text!r}") and table.count("<tr>") == len(trace.seconds) + 1


def test_a_table_is_text():
    trace = refvl.Trace(text="<b>red</b> & <script>", seconds={"<i>": 0.5})
    assert "&lt;b&gt;red&lt;/b&gt; &amp; &lt;script&gt;" in trace._repr_html_() and "<i>" not in trace._repr_html_()
    assert trace.positions is None
