"""The contract of explorers: every one of the gallery passes, by one line in `explorer_oracles.ORACLES`.

Oracle of the tables: refvl's functions, called again for a sample of states. What a browser makes of them is tested in
`tests/browser/`.
"""

import base64
import html
import io
import itertools
import json
import random
import re
import zlib
from functools import cache

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("anywidget")

import traitlets
from explorer_oracles import ORACLES, assert_agree

from benchmarks.explorers import RECORD, explorer_rows
from refvl import viz
from refvl.paths import DATA
from refvl.positions.timestamps import sample_video_frames
from refvl.viz.explorers import Control, Explorer, module, page, photo
from refvl.viz.explorers.gallery import GALLERY
from refvl.viz.explorers.timeline import WORDS

PAGE = DATA.parent / "docs/explorers.md"
MAX_PAGE, MAX_PICTURE = 150_000, 120_000  # bytes
make = cache(lambda name: GALLERY[name]())
each_explorer = pytest.mark.parametrize("name", GALLERY)


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


def test_every_explorer_has_an_oracle():
    assert set(ORACLES) == set(GALLERY)


@each_explorer
def test_rows_are_what_the_functions_return(name):
    explorer = make(name)
    for index in sample(explorer):
        wanted = ORACLES[name](explorer, explorer.states[index])
        assert_agree(explorer.row(index), wanted)
        if explorer.table["rows"]:  # drawn from: the same numbers after packing
            assert_agree(unpacked(explorer, explorer.table["rows"][index]), wanted)


@each_explorer
def test_shared_numbers_survive_packing(name):
    explorer = make(name)
    assert_agree(unpacked(explorer, explorer.table["shared"]), explorer.shared)


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


@each_explorer
def test_starts_in_the_middle_of_its_story(name):
    """Every slider with three options or more can go both ways."""
    explorer = make(name)
    state = explorer.states[explorer.index]
    for number, control in enumerate(explorer.controls):
        offered = sorted({control["options"].index(s[number]) for s in explorer.states if s[:number] == state[:number]})
        if control["kind"] != "menu" and len(offered) > 2:
            assert offered[0] < control["options"].index(state[number]) < offered[-1], control["name"]


@each_explorer
def test_where_it_cannot_run_there_is_a_picture_and_a_sentence(name):
    data, metadata = make(name)._repr_mimebundle_()
    picture = base64.b64decode(data["image/png"])
    assert len(picture) <= MAX_PICTURE
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
    assert pixels.shape[1] >= 300 and pixels.std() > 10  # something is drawn
    sentence = data["text/plain"]
    assert sentence.endswith(".") and " at 0x" not in sentence and "(" not in sentence.split()[0]
    assert metadata["image/png"]["alt"] == sentence == make(name).describe()
    assert "application/vnd.jupyter.widget-view+json" in data


@each_explorer
def test_the_sentence_follows_the_state(name):
    explorer, sentences = make(name), set()
    start, states = explorer.index, sample(explorer)
    for explorer.index in states:
        sentences.add(explorer.describe())
    explorer.index = start
    assert len(sentences) > len(states) / 2


@each_explorer
def test_a_page_asks_and_tells(name):
    """Its question, its terms, what to try and to remember: sentences of at most 25 words, each explorer's own."""
    explorer, text = make(name), html.unescape(page(make(name)))
    terms = re.split(r"(?<=[.]) (?=[A-Z])", explorer.terms)
    said = [explorer.asks, explorer.action, explorer.takeaway]
    assert explorer.asks.endswith("?") and all(words.endswith(".") for words in (*said[1:], *terms))
    assert all(sentence in text and len(sentence.split()) <= 25 for sentence in said + terms)
    others = [other for other in map(make, GALLERY) if other is not explorer]
    assert not any(sentence in (other.asks, other.terms, other.takeaway) for other in others for sentence in said)


@each_explorer
def test_page_is_light_and_asks_for_nothing(name):
    text = page(make(name))
    assert len(text.encode()) <= MAX_PAGE
    assert re.findall(r"(?:https?:)?//\w+[.]\w+", re.sub(r'"data":"[^"]*"|data:image/[^"]*"', "", text)) == []
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    assert text.count("</script>") == 2 and "default-src 'none'" in text


@each_explorer
def test_the_readme_has_its_numbers(name):
    """States exactly; kilobytes within a tenth, as compression differs between versions of its libraries."""
    explorer = make(name)
    [(states, size)] = re.findall(rf"^\| {explorer.title} \|.*?\| (\d+) \| (\d+) \|", PAGE.read_text(), flags=re.M)
    assert int(states) == len(explorer.states)
    assert float(size) == pytest.approx(len(page(explorer).encode()) / 1000, rel=0.1)


def test_the_table_of_the_record_has_them_all():
    """By functions that viz offers; numbers are the record's. Once one is kept, docs/explorers.md shows its table."""
    row = {"states": 7, "bytes": 40_400, "page_ms": 12.4, "lab_ms": 99.6}
    lines = list(explorer_rows({"explorers": {name: row | {"title": f"<{name}>"} for name in GALLERY}}))[2:]
    assert {re.findall(r"<(\w+)>", line)[0] for line in lines} == set(GALLERY)
    assert all("| 7 | 40 | 12 | 100 |" in line for line in lines)
    assert [name for line in lines for name in re.findall(r"`(\w+)`", line) if not hasattr(viz, name)] == []
    shown = explorer_rows(json.loads(RECORD.read_text())) if RECORD.is_file() else []
    assert [line for line in shown if line not in PAGE.read_text()] == []


@each_explorer
def test_module_is_one_file_without_imports(name):
    source = make(name)._esm
    found = re.findall(r"^(?:import|export)\b.*$", source, flags=re.M)
    assert found == ["export default explorer(view => {"]


def test_the_tower_brings_patches_closer_to_their_token():
    """What the page says: most patches gain, and how many. Oracle: the same sums, pair by pair."""
    explorer = make("tower")
    for watched, shown in zip(explorer.watched.values(), explorer.shared["pictures"], strict=True):
        states, block = watched.trace.tower_hidden_states, watched.merge**2
        leads = []
        for state in (states[0].double().numpy(), states[-1].double().numpy()):
            own = state - state.mean(0)
            own /= np.linalg.norm(own, axis=1, keepdims=True)
            alike, token = own @ own.T, np.arange(len(own)) // block
            mates = (token[:, None] == token) & ~np.eye(len(own), dtype=bool)
            rest = token[:, None] != token
            leads.append((alike * mates).sum(1) / mates.sum(1) - (alike * rest).sum(1) / rest.sum(1))
        assert shown["closer"] == (leads[1] > leads[0]).sum() > len(token) / 2
    assert explorer.first_patch - explorer.first.looked_at_most in range(explorer.first.merge**2)


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


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rows: expected one for each of 6 states, got 5"):
        Squares(SQUARES, rows(5))
    with pytest.raises(ValueError, match=r"start: expected one of the states .* got \(4, 'm'\)"):
        Squares(SQUARES, rows(), start=(4, "m"))
    with pytest.raises(traitlets.TraitError, match="index: expected 0 to 5, got 6"):
        Squares(SQUARES, rows()).index = 6
    with pytest.raises(ValueError, match="expected 32-bit integers, got 0 to 4294967296"):
        Squares(SQUARES, rows(), shared={"large": np.array([0, 2**32])})


def test_a_table_can_be_filled_again():
    explorer = Squares(SQUARES, rows(), start=(3, "cm"))
    explorer.selected = 4
    explorer.fill(SQUARES[:1], rows(3), start=(1,))
    assert (explorer.index, explorer.selected, explorer.row(2)) == (0, -1, {"square": 4})
    assert [control["name"] for control in explorer.controls] == ["n"]


def test_equal_arrays_are_kept_once():
    table = Squares(SQUARES, [{"same": np.arange(9), "number": i} for i in range(6)]).table
    assert len(table["arrays"]) == 1 and len({str(row["same"]) for row in table["rows"]}) == 1


def test_text_of_a_table_cannot_end_its_script():
    explorer = Squares(SQUARES, rows(), shared={"text": "</script><script>alert(1)</script><!-- <b>"})
    text = page(explorer)
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<!--" not in text and "alert(1)" in text


def test_photos_are_small_and_inside():
    address = photo(Image.new("RGB", (900, 300), "teal"), side=200)
    kind, data = address.split(",")
    assert kind == "data:image/webp;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (200, 67)


@pytest.mark.thorough
def test_the_explorer_of_deepstack_takes_a_list_of_frames_for_a_video():
    """As `feature_map` and `chat` do. Oracle: the same frames as one array."""
    from refvl.pixels.media import load_video
    from refvl.viz.explorers.deepstack import ask
    from refvl.viz.explorers.gallery import CLIP, small_model

    model, frames = small_model("tiny-qwen3_vl"), load_video(CLIP).frames[:4]
    array, listed = (ask(model, "Which way does the circle move?", medium) for medium in (frames, list(frames)))
    assert listed.trace.token_ids == array.trace.token_ids and listed.trace.spans == array.trace.spans
    assert len(listed.frames) == len(array.frames) == 2


@pytest.mark.thorough
def test_viz_needs_no_anywidget_and_says_where_explorers_do():
    """In a process whose import of anywidget fails."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['anywidget'] = None\n"
        "from PIL import Image; from refvl import viz; from refvl.pixels.patches import PatchConfig\n"
        "try: viz.explore_windows(Image.new('RGB', (280, 196)), PatchConfig())\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "explorers need anywidget: pip install 'refvl[notebooks]'", ran.stderr


def test_the_words_of_a_timeline_are_its_rules():
    """Frames of 25 per second, counted by hand from the words: the rates by length, and at most so many in all."""
    counted = {"glm4v": (24, 200, 600), "glm46v": (72, 200, 400), "glmga": (24, 200, 640)}
    for name, words in WORDS.items():
        for seconds, count in zip((12, 100, 400), counted[name], strict=True):
            sample = sample_video_frames(name, fps=25, total_num_frames=25 * seconds, duration=seconds)
            assert len(sample.indices) == count, words
