"""Two tiers of tests: `--tier quick`, for `make test`, and `--tier rest`, everything else. No test is in both.

The quick tier takes from each test its first case, and its first case of every kind of family. It leaves out what is
marked `thorough`: tests that start processes, compile, or take seconds. Hypothesis tries a few examples only.
"""

import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import settings

COLLECTED = pytest.StashKey[list[pytest.Item]]()  # the tests of both tiers
FEW_EXAMPLES = 5
KINDS = ("qwen2_5", "qwen3", "glm_ocr", "glm", "minicpm", "step3")  # as they stand in the names of cases


def kind_of(case: str) -> str | None:
    """The kind of family that a case is about. case: as "tiny-qwen3_vl-2" or "MiniCPM-V 2.6"."""
    word = case.lower().replace(".", "_").replace("-", "_")
    return next((kind for kind in KINDS if kind in word), None)


def quick_tier(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items of the quick tier, in their order."""
    seen, quick = set(), []
    for item in items:
        if item.get_closest_marker("thorough"):
            continue
        test, _, case = item.nodeid.partition("[")
        first_of_test, first_of_kind = (test, ""), (test, kind_of(case))
        if first_of_test not in seen or first_of_kind not in seen:
            quick.append(item)
        seen |= {first_of_test, first_of_kind}
    return quick


def with_few_examples(item: pytest.Item) -> None:
    """A property test keeps its settings, but for how many examples it tries."""
    function = getattr(item.obj, "__func__", item.obj)
    if getattr(function, "is_hypothesis_test", False):
        given = function._hypothesis_internal_use_settings
        few = min(FEW_EXAMPLES, given.max_examples)
        function._hypothesis_internal_use_settings = settings(given, max_examples=few)


class StartsAProcess(PermissionError):
    """A test of the quick tier tried to start a process."""


@contextmanager
def no_processes() -> Iterator[None]:
    """While it lasts, whatever would start a process raises `StartsAProcess`."""

    def refuse(*args, **kwargs):
        raise StartsAProcess("a test of the quick tier starts a process; mark it with @pytest.mark.thorough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        patch.setattr(os, "fork", refuse)
        yield
