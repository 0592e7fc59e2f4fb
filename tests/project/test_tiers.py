"""The two tiers of tests. Oracles: what pytest collected, the files on disk, the operating system's own refusals."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import COLLECTED, FEW_EXAMPLES, StartsAProcess, kind_of, no_processes, quick_tier, with_few_examples

TESTS = Path(__file__).resolve().parents[1]
EQUATIONS = ("positions", "pixels", "processors", "encoders", "language", "graphs", "contracts", "journeys")


@pytest.mark.thorough  # a part of the tests says nothing about all of them
def test_every_file_of_equations_has_quick_tests_and_no_test_is_lost(request):
    """Whatever part of the suite is run, it is looked at as collected, before a tier was chosen."""
    items = request.config.stash[COLLECTED]
    quick = quick_tier(items)
    rest = [item for item in items if item not in set(quick)]
    assert quick and rest and len(quick) + len(rest) == len(items)
    assert {item.get_closest_marker("thorough") for item in quick} == {None}
    tested, quickly = ({item.path for item in chosen} for chosen in (items, quick))
    of_equations = {path for path in tested if path.relative_to(TESTS).parts[0] in EQUATIONS}
    slow_by_nature = {path for path in of_equations if "pytestmark = pytest.mark.thorough" in path.read_text()}
    assert of_equations - quickly == slow_by_nature
    assert {path.name for path in slow_by_nature} <= WITHOUT_QUICK_TESTS


WITHOUT_QUICK_TESTS = {"test_compiled_blocks.py", "test_larger_than_one_device.py", "test_imports.py",
                       "test_planted_faults.py"}  # fmt: skip


class Item:
    """A collected test, as far as the tiers look at it."""

    def __init__(self, nodeid: str, *markers: str):
        self.nodeid, self.markers = nodeid, markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def test_of_each_test_the_first_case_and_the_first_of_each_kind_are_quick():
    first, again, glm = Item("a::t[qwen2_5_vl-1]"), Item("a::t[qwen2_5_vl-2]"), Item("a::t[tiny-glm4v-1]")
    plain, slow, other = Item("a::u"), Item("a::v", "thorough"), Item("a::w[3]")
    assert quick_tier([first, again, glm, plain, slow, other, Item("a::w[4]")]) == [first, glm, plain, other]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("MiniCPM-V 2.6", "minicpm"), ("tiny-qwen3_vl-2", "qwen3"), ("Qwen3.5", "qwen3"), ("Qwen2.5-VL", "qwen2_5"),
        ("GLM-OCR", "glm_ocr"), ("4-glm4v_moe", "glm"), ("Step3-VL", "step3"), ("6 x 4", None),
    ],
)  # fmt: skip
def test_names_of_cases_tell_the_kind_of_family(case, kind):
    assert kind_of(case) == kind


def test_in_the_quick_tier_property_tests_try_a_few_examples():
    tried = []

    @settings(max_examples=50, database=None)
    @given(st.integers())
    def holds(number):
        tried.append(number)

    item = type("Item", (), {"obj": staticmethod(holds)})
    with_few_examples(item)
    holds()
    assert 0 < len(tried) <= FEW_EXAMPLES


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "--version"]),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: os.fork() or os._exit(0),
    ],
    ids=["a program", "a worker", "a fork"],
)
def test_in_the_quick_tier_nothing_starts_a_process(start):
    with no_processes(), pytest.raises(StartsAProcess, match=r"mark it with @pytest.mark.thorough"):
        start()
