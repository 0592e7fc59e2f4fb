"""The API reference of the site. Oracle: signatures, docstrings and files, read by `inspect` and `ast`."""

import inspect
import re

import pytest

pytest.importorskip("nbconvert")

import reference

ENTRIES = reference.entries()
OBJECTS = {(module, name): value for module, name, value in reference.public()}
SHAPE = re.compile(r"\([^()]*\b[A-Z0-9]\w*\b[^()]*\)|\(\w+,[^()]*\)|\bshape|scalar|As |as of|Arguments as|same")


def test_every_name_has_a_signature_a_sentence_and_links():
    for entry in ENTRIES:
        assert entry.signature.startswith(entry.name) and len(entry.doc.split()) > 3, entry.anchor
        assert not entry.doc.startswith(f"{entry.name}("), f"{entry.anchor}: the docstring is a dataclass's own"
        assert (reference.ROOT / entry.source).is_file() and (reference.ROOT / entry.test).is_file(), entry.anchor
        assert (reference.ROOT / f"notebooks/{entry.notebook}.ipynb").is_file(), entry.anchor


def functions():
    return [(key, value) for key, value in OBJECTS.items() if inspect.isfunction(value)]


def test_functions_that_raise_say_what():
    silent = [".".join(key) for key, value in functions() if reference.raises(value)
              and not re.search(r"[Rr]aises? |is refused|Error\b", inspect.getdoc(value) or "")]  # fmt: skip
    assert silent == []


def test_functions_of_tensors_say_their_shapes():
    silent = [".".join(key) for key, value in functions() if "Tensor" in str(inspect.signature(value))
              and not SHAPE.search(inspect.getdoc(value) or "")]  # fmt: skip
    assert silent == []


def test_the_names_of_the_third_edition_are_there():
    names = {entry.anchor for entry in ENTRIES}
    assert {"refvl.load", "refvl.VLM", "refvl.compare", "refvl.positions.pack", "refvl.viz.live"} <= names
    assert {"refvl.boxes.parse", "refvl.encoders.StepVLEncoder", "refvl.serving.handover.vllm_inputs"} <= names
    assert "refvl.parallel.run_dp_sharded_vision_model" in names and len(names) == len(ENTRIES)


def test_places_are_those_of_files():
    """Each file of `HOME` is there, with its test; a definition that has moved is named."""
    assert [home for home in reference.HOME if not (reference.ROOT / "refvl" / home).is_file()] == []
    assert [test for test, _ in reference.HOME.values() if not (reference.ROOT / "tests" / test).is_file()] == []


def test_the_page_searches_without_a_request():
    page = reference.body()
    assert all(f'id="{entry.anchor}"' in page for entry in ENTRIES)
    assert "fetch(" not in page and 'type="search"' in page and "src=" not in page
