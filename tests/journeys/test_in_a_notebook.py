"""What a notebook shows of the package, a model and a run. Oracles: IPython's own completer, jedi, pydoc."""

import json
import subprocess
import sys

import pytest

import refvl
from refvl.paths import DATA

SCENE = DATA / "pictures" / "scene.png"


@pytest.fixture(scope="module")
def vlm():
    return refvl.load(DATA / "checkpoints" / "tiny-qwen2_5_vl", device="cpu", progress=False)


FRESH_KERNEL = """if True:
    import json, pydoc, sys
    from IPython.core.completer import provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell
    shell, told = InteractiveShell.instance(), {}
    shell.run_cell("import refvl")
    told["torch"] = "torch" in sys.modules
    for jedi in (True, False):
        shell.Completer.use_jedi = jedi
        with provisionalcompleter():
            offers = shell.Completer.completions("refvl.", 6)
            told[f"Tab, jedi {jedi}"] = [offer.text.split(".")[-1] for offer in offers]
    import refvl.positions, refvl.viz
    told["transformers"] = "transformers" in sys.modules
    told["help"] = pydoc.plain(pydoc.render_doc(refvl))
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def kernel() -> dict:
    """What a fresh kernel offers after `import refvl`, and what it has imported by then."""
    pytest.importorskip("IPython")
    done = subprocess.run([sys.executable, "-c", FRESH_KERNEL], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_tab_offers_what_there_is(kernel):
    """With and without jedi, before anything was imported but refvl itself."""
    for jedi in (True, False):
        offered = set(kernel[f"Tab, jedi {jedi}"])
        assert {"load", "VLM", "Trace", "positions", "encoders", "graphs", "viz"} <= offered, jedi


@pytest.mark.thorough
def test_a_package_does_not_import_transformers(kernel):
    """And refvl alone not even torch."""
    assert not kernel["torch"] and not kernel["transformers"]


@pytest.mark.thorough
def test_help_is_readable(kernel):
    assert all(words in kernel["help"] for words in ("refvl.load", "load(path_or_id", "class VLM"))


@pytest.mark.thorough
def test_an_editor_knows_what_load_gives():
    jedi = pytest.importorskip("jedi")
    code = "import refvl\nmodel = refvl.load('folder')\nmodel."
    names = {completion.name for completion in jedi.Script(code).complete(3, 6)}
    assert {"chat", "trace", "generate", "encoder", "processor", "language_model"} <= names


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
