"""The contract of explorers: every one of the gallery passes, by one line in `explorer_oracles.ORACLES`.

Oracle of the tables: refvl's functions, called again for a sample of states. What a browser makes
of them is tested in `tests/browser/`.
"""

import base64
import html
import importlib
import io
import itertools
import json
import random
import re
import sys
import zlib
from functools import cache

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("anywidget")

import traitlets
from explorer_oracles import ORACLES, assert_agree
from shipped import shipped

import refvl
from refvl import viz
from refvl.paths import DATA
from refvl.pixels.patches import PatchConfig
from refvl.viz.attention import project_colors
from refvl.viz.explorers import Control, Explorer, module, page
from refvl.viz.explorers.gallery import GALLERY

SCENE = DATA / "pictures" / "scene.png"
MAX_PAGE, MAX_PICTURE = 180_000, 120_000  # bytes
make = cache(lambda name: GALLERY[name]())
each_explorer = pytest.mark.parametrize("name", GALLERY)
each_picture = pytest.mark.parametrize(  # drawing takes a second each
    "name", [pytest.param(name, marks=pytest.mark.slow if number % 4 else ()) for number, name in enumerate(GALLERY)]
)


def plain(value):
    """Nested numbers as JSON has them, floats with 32 bits."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "dtype") and np.ndim(value):
        value = np.asarray(value)
        return value.astype(np.float32).tolist() if value.dtype.kind == "f" else value.astype(int).tolist()
    return value.item() if hasattr(value, "item") else value


def sample(explorer, count: int = 6) -> list[int]:
    """Numbers of states: the first, the last, the one shown, and some between."""
    states = range(len(explorer.states))
    return sorted({0, states[-1], explorer.index, *random.Random(0).choices(states, k=count)})


def unpacked(explorer, value):
    """The table as the browser reads it; the loop is that of `unpack` in shared.js."""
    data, arrays, offset = zlib.decompress(explorer.table["data"]), [], 0
    for entry in explorer.table["arrays"]:
        array = np.frombuffer(data, "<" + entry["dtype"], int(np.prod(entry["shape"])), offset)
        arrays.append(array.reshape(entry["shape"]))
        offset += -(-array.nbytes // 4) * 4

    def revive(item):
        if isinstance(item, dict):
            return arrays[item["array"]] if "array" in item else {key: revive(part) for key, part in item.items()}
        return [revive(part) for part in item] if isinstance(item, list) else item

    return revive(value)


@each_explorer
def test_rows_are_what_the_functions_return(name):
    """Packed for the browser, they are the same numbers."""
    explorer = make(name)
    assert_agree(unpacked(explorer, explorer.table["shared"]), explorer.shared)
    for index in sample(explorer):
        wanted = ORACLES[name](explorer, explorer.states[index])
        assert_agree(explorer.row(index), wanted)
        if explorer.table["rows"]:
            assert_agree(unpacked(explorer, explorer.table["rows"][index]), wanted)


@each_explorer
def test_a_control_offers_only_states_that_differ(name):
    """Of every two neighbours along a control, all others as they were, the rows differ; of many, a sample."""
    explorer = make(name)
    states, every = explorer.states, {state: i for i, state in enumerate(explorer.states)}
    assert len(every) == len(states)
    row = cache(lambda state: json.dumps(plain(explorer.row(every[state]))))
    for number, control in enumerate(explorer.controls):
        assert len(control["options"]) >= 2 and len(set(control["options"])) == len(control["options"])
        groups: dict = {}
        for state in states:
            groups.setdefault(state[:number] + state[number + 1 :], []).append(state)
        pairs = [pair for group in groups.values() for pair in itertools.pairwise(group)]
        if len(pairs) > 300:
            pairs = random.Random(0).sample(pairs, 300)
        assert [pair for pair in pairs if row(pair[0]) == row(pair[1])] == []


@each_picture
def test_where_it_cannot_run_there_is_a_picture_and_a_sentence(name):
    """The sentence follows the state."""
    explorer = make(name)
    data, metadata = explorer._repr_mimebundle_()
    picture = base64.b64decode(data["image/png"])
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
    assert len(picture) <= MAX_PICTURE and pixels.shape[1] >= 300 and pixels.std() > 10  # something is drawn
    assert metadata["image/png"]["alt"] == data["text/plain"] == explorer.describe()
    assert "application/vnd.jupyter.widget-view+json" in data
    start, states, sentences = explorer.index, sample(explorer), set[str]()
    for explorer.index in states:
        sentences.add(explorer.describe())
    explorer.index = start
    assert len(sentences) > len(states) / 2


@each_explorer
def test_page_is_light_and_asks_for_nothing(name):
    explorer = make(name)
    text = page(explorer)
    assert len(text.encode()) <= MAX_PAGE
    assert all(sentence in html.unescape(text) for sentence in (explorer.asks, explorer.action, explorer.takeaway))
    assert re.findall(r"(?:https?:)?//\w+[.]\w+", re.sub(r'"data":"[^"]*"|data:image/[^"]*"', "", text)) == []
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    assert text.count("</script>") == 2 and "default-src 'none'" in text
    found = re.findall(r"^(?:import|export)\b.*$", explorer._esm, flags=re.M)
    assert found == ["export default explorer(view => {"]


def test_colours_are_principal_components():
    """Oracle: numpy's singular value decomposition; a colour may round the other way."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 20, 12, generator=generator) * torch.arange(12, 0, -1)
    together = states.flatten(0, 1).double().numpy()
    centred = together - together.mean(0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:3].T
    values = centred @ (directions * np.sign(directions[np.abs(directions).argmax(0), range(3)]))
    low, high = np.quantile(values, [0.02, 0.98], axis=0)
    want = np.clip((values - low) / (high - low), 0, 1) * 255
    [got] = project_colors([states])
    assert np.abs(got.reshape(-1, 3) - want).max() <= 1


def test_an_explorer_asks_again():
    """Another image and question in the same view; the answer is the model's."""
    model, clip = shipped("tiny-qwen2_5_vl"), DATA / "clips" / "scene.mp4"
    explorer = viz.explore_attention(model, {"first": ("What color is the circle?", SCENE)})
    explorer.ask({"rocket": ("What is in the picture?", DATA / "pictures" / "rocket.jpg")})
    assert "a rocket" in explorer.describe() and explorer.selected >= 0
    explorer = viz.explore_evs(model, {"way": ("Which way does the circle move?", clip)})
    assert '"up"' in explorer.describe()
    explorer.ask({"color": ("What color is the circle?", clip)})
    assert '"blue"' in explorer.describe()


def test_explorers_refuse_what_they_cannot_draw(monkeypatch):
    monkeypatch.setattr("refvl.viz.explorers.watched.MAX_PATCHES", 30)
    model, other = shipped("tiny-qwen2_5_vl"), shipped("tiny-minicpmv-4_5")
    with pytest.raises(ValueError, match=r"questions\['large'\]: expected an image of at most 30 patches, got 36"):
        viz.explore_attention(model, {"large": ("Why?", SCENE)})
    with pytest.raises(ValueError, match="model: expected a family with grids of patches, got MiniCPM-V 4.5"):
        viz.explore_attention(other, {"one": ("Why?", SCENE)})


class Squares(Explorer):
    """The smallest explorer there is."""

    _esm = module("windows")

    def figure(self):
        return matplotlib.figure.Figure()


SQUARES = [Control("n", "number", [1, 2, 3]), Control("unit", "unit", ["m", "cm"], kind="menu")]


def rows(count: int = 6) -> list[dict]:
    return [{"square": i * i} for i in range(count)]


def test_states_are_all_combinations_unless_given():
    assert Squares(SQUARES, rows()).states == [(1, "m"), (1, "cm"), (2, "m"), (2, "cm"), (3, "m"), (3, "cm")]
    some = Squares(SQUARES, rows(2), states=[(1, "m"), (3, "cm")], start=(3, "cm"))
    assert some.states == [(1, "m"), (3, "cm")] and some.options == {"n": 3, "unit": "cm"}
    assert some.table["states"] == [[0, 0], [2, 1]] and some.index == 1
    some.selected = 4
    some.fill(SQUARES[:1], rows(3), start=(1,))
    assert (some.index, some.selected, some.row(2)) == (0, -1, {"square": 4})


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rows: expected one row for each of 6 states, got 5"):
        Squares(SQUARES, rows(5))
    with pytest.raises(traitlets.TraitError, match="index: expected 0 to 5, got 6"):
        Squares(SQUARES, rows()).index = 6
    with pytest.raises(ValueError, match="expected 32-bit integers, got 0 to 4294967296"):
        Squares(SQUARES, rows(), shared={"large": np.array([0, 2**32])})


def test_equal_arrays_are_kept_once():
    table = Squares(SQUARES, [{"same": np.arange(9), "number": i} for i in range(6)]).table
    assert len(table["arrays"]) == 1 and len({str(row["same"]) for row in table["rows"]}) == 1


def test_text_of_a_table_cannot_end_its_script():
    explorer = Squares(SQUARES, rows(), shared={"text": "</script><script>alert(1)</script><!-- <b>"})
    text = page(explorer)
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<!--" not in text and "alert(1)" in text


def test_viz_needs_no_anywidget_and_says_where_explorers_do(monkeypatch):
    """All of viz is imported anew, and the import of anywidget fails."""
    for name in [name for name in sys.modules if name.startswith("refvl.viz")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.setattr(refvl, "viz", viz)  # put back after the import
    anew = importlib.import_module("refvl.viz")
    with pytest.raises(ModuleNotFoundError, match=r"^explorers need anywidget: pip install 'refvl\[notebooks\]'$"):
        anew.explore_windows(Image.new("RGB", (280, 196)), PatchConfig())
