"""Hostile input ends in a right result or a clear error. `python -m pytest -m fuzz` tries 37 times as many."""

import json
import os
from functools import partial

import pytest
from harness import ENDS, is_clear, outcome_of, run_apart, run_kind
from kinds import KINDS
from measure import FILE, THOROUGH, table

from refvl.paths import DATA

QUICK = 336  # cases, shared equally by the kinds


def check(kind, count: int) -> None:
    report = run_kind(kind, range(count // len(KINDS)))
    assert not report.defects, f"{len(report.defects)} of {count // len(KINDS)}:\n" + "\n".join(report.defects)
    assert report.counts["right"] and report.counts["clear"], f"one-sided: {report.counts}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hostile_input(kind):
    check(kind, QUICK)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_much_hostile_input(kind):
    check(kind, THOROUGH)


def test_the_readme_shows_what_was_measured():
    """The table is made from the committed file: each kind was measured, and each input ended correct or refused."""
    measured = json.loads(FILE.read_text())
    assert table(measured) in (DATA.parent / "docs/quality.md").read_text()
    assert list(measured["cases"]) == [kind.__name__ for kind in KINDS]
    assert not any(
        counts[how] for counts in measured["cases"].values() for how in ENDS if how not in ("right", "clear")
    )
    assert sum(sum(counts.values()) for counts in measured["cases"].values()) >= 12_000


def test_the_harness_tells_defects_from_refusals():
    """Errors that escape from a library, and those that name nothing, are defects; refvl's own refusals are clear."""
    from refvl.checks import check_positive_int

    def too_much():
        return bytearray(2**34)

    def for_ever():
        while True:
            pass

    assert outcome_of(lambda: check_positive_int(0, "n")) == "clear"
    assert outcome_of(lambda: int("x")).startswith("ValueError")
    assert outcome_of(lambda: {}["x"]).startswith("KeyError")
    assert outcome_of(too_much).startswith("MemoryError")
    assert outcome_of(for_ever, seconds=0.5).startswith("took")
    assert outcome_of(lambda: None) == "right"
    assert not is_clear(_raised(ValueError("n: from outside")))


@pytest.mark.thorough
def test_the_harness_counts_crashes():
    """A case that kills its process is one crash, and those after it are tried."""

    def deadly(rng, folder):
        seed = int(rng.bit_generator.seed_seq.entropy[0])
        return "", partial(os.kill, os.getpid(), 9) if seed == 2 else (lambda: None)

    assert run_apart(deadly, range(5)).counts == {"right": 4, "crash": 1}


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught
