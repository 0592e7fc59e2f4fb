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
    """Every public function, and every public method of the public classes, with the docstrings that describe it."""
    for key, value in OBJECTS.items():
        if inspect.isfunction(value):
            yield ".".join(key), value, inspect.getdoc(value) or ""
        for name, method in reference.methods(value):
            yield ".".join((*key, name)), method, f"{inspect.getdoc(method) or ''}\n{inspect.getdoc(value)}"


def test_methods_have_docstrings():
    assert [name for name, value, _ in functions() if not inspect.getdoc(value)] == []


def test_functions_that_raise_say_what():
    """In a method, only its own `raise` counts: checks of its arguments are those of the class."""
    silent = [name for name, value, doc in functions()
              if (reference.raises(value) if inspect.isfunction(OBJECTS.get(tuple(name.rsplit(".", 1)))) else
                  "raise " in re.sub(r"raise NotImplemented\w*", "", inspect.getsource(value)))
              and not re.search(r"[Rr]aises? |is refused|Error\b|errors as in", doc)]  # fmt: skip
    assert silent == []


def test_functions_of_tensors_say_their_shapes():
    """A shape is a tuple in parentheses, a suffix of an argument (`keep_L`), or a reference to another name."""
    for name, value, doc in functions():
        signature = inspect.signature(value)
        tensors = [p.name for p in signature.parameters.values() if re.search(r"\bTensor\b|ndarray", str(p.annotation))]
        returns = "Tensor" in str(signature.return_annotation)
        suffixed = bool(tensors) and not returns and all(re.search(r"_[A-Z][A-Z0-9]*$", name) for name in tensors)
        assert suffixed or not (tensors or returns) or SHAPE.search(doc), f"{name}: state the shapes of its tensors"


def test_numbers_have_units():
    """Every numeric argument of a public name has an entry in `UNITS`, and the page shows it."""
    lacking = [f"{name}.{argument}" for (_, name), value in OBJECTS.items()
               for argument, unit in reference.units(value, name).items() if not unit]  # fmt: skip
    assert lacking == []
    counted = [argument for arguments in reference.UNITS.values() for argument in arguments.split()]
    assert len(counted) == len(set(counted)), "each argument has one unit"
    assert "Units: duration: seconds; fps: frames per second" in reference.body()


def test_a_name_that_no_notebook_uses_is_explained_in_one():
    """Such a name has a line in `HOME`, whose notebook explains its file."""
    for entry in ENTRIES:
        home = reference.HOME.get(entry.source.removeprefix("refvl/"))
        assert entry.is_shown or entry.notebook.startswith(home[1]), entry.anchor


def test_the_names_of_the_third_edition_are_there():
    names = {entry.anchor for entry in ENTRIES}
    assert {"refvl.load", "refvl.VLM", "refvl.compare", "refvl.positions.pack", "refvl.viz.live"} <= names
    assert {"refvl.boxes.parse", "refvl.encoders.StepVLEncoder", "refvl.serving.export.vllm_inputs"} <= names
    assert "refvl.parallel.run_dp_sharded_vision_model" in names and len(names) == len(ENTRIES)


def test_places_are_those_of_files():
    """Each file of `HOME` is there, with its test; a definition that has moved is named."""
    assert [home for home in reference.HOME if not (reference.ROOT / "refvl" / home).is_file()] == []
    assert [test for test, _ in reference.HOME.values() if not (reference.ROOT / "tests" / test).is_file()] == []


def test_the_page_searches_without_a_request():
    page = reference.body()
    assert all(f'id="{entry.anchor}"' in page for entry in ENTRIES)
    assert "fetch(" not in page and 'type="search"' in page and "src=" not in page
