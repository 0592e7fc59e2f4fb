"""The API reference of the site. Oracle: signatures, docstrings and files, read by `inspect` and `ast`."""

import inspect

import pytest

pytest.importorskip("nbconvert")

import reference


def test_every_name_has_a_signature_a_sentence_and_links():
    for entry in reference.entries():
        assert entry.signature.startswith(entry.name) and len(entry.doc.split()) > 3, entry.anchor
        assert not entry.doc.startswith(f"{entry.name}("), f"{entry.anchor}: the docstring is a dataclass's own"
        assert (reference.ROOT / entry.source).is_file() and (reference.ROOT / entry.test).is_file(), entry.anchor
        assert (reference.ROOT / f"notebooks/{entry.notebook}.ipynb").is_file(), entry.anchor


def functions():
    """Every public function, and every public method of the public classes, with the docstrings that describe it."""
    for module, key, value in reference.public():
        if inspect.isfunction(value):
            yield f"{module}.{key}", value, inspect.getdoc(value) or ""
        for name, method in reference.methods(value):
            yield f"{module}.{key}.{name}", method, f"{inspect.getdoc(method) or ''}\n{inspect.getdoc(value)}"


def test_methods_have_docstrings():
    assert [name for name, value, _ in functions() if not inspect.getdoc(value)] == []


def test_places_are_those_of_files():
    """Each file of `HOME` is there, with its test; a definition that has moved is named."""
    assert [home for home in reference.HOME if not (reference.ROOT / "refvl" / home).is_file()] == []
    assert [test for test, _ in reference.HOME.values() if not (reference.ROOT / "tests" / test).is_file()] == []
