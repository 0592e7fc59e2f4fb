"""Two tiers of tests: `--tier quick`, for `make test`, and `--tier rest`, everything else. No test
is in both.

The quick tier takes from each test its first case, and its first case of every kind of family. It
leaves out what is marked `thorough`: tests that start processes, compile, or take seconds.
Hypothesis tries a few examples only. Of the notebooks, it runs those in `NOTEBOOKS`.

Siblings of another family are `slow`; so are all other cases of a test that is marked `matrix`,
which takes a second per case.
"""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings

FEW_EXAMPLES = 5
SIBLINGS = (  # families whose code is that of another, but for numbers or a text model of transformers
    "GLM-4.5V", "GLM-4.6V", "glm46v", "glmga", "qwen3_vl_moe", "qwen3_5_moe", "MiniCPM-V 2.5", "MiniCPM-V 4.0",
    "MiniCPM-V 4.6, 4x",
)  # fmt: skip
NOTEBOOKS = ("00", "01", "02", "03", "04", "05")
KINDS = ("qwen2_5", "qwen3", "glm_ocr", "glm", "minicpm", "step3")  # as they stand in the names of cases


def kind_of(case: str) -> str | None:
    """The kind of family that a case is about. case: as "tiny-qwen3_vl-2" or "MiniCPM-V 2.6"."""
    word = case.lower().replace(".", "_").replace("-", "_")
    return next((kind for kind in KINDS if kind in word), None)


def first_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first case of every test, and its first case of every kind, in their order."""
    seen, first = set(), []
    for item in items:
        test, _, case = item.nodeid.partition("[")
        keys = {(test, ""), (test, kind_of(case))}
        if not keys <= seen:
            first.append(item)
        seen |= keys
    return first


def quick_tier(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items of the quick tier, in their order."""
    return first_cases(item for item in items if not is_left_out(item))


def is_left_out(item: pytest.Item) -> bool:
    """Whether the quick tier leaves out all cases of a test, or a notebook."""
    is_notebook = item.path.suffix == ".ipynb"
    return item.name[:2] not in NOTEBOOKS if is_notebook else bool(item.get_closest_marker("thorough"))


def mark_repeats(items: Sequence[pytest.Item]) -> None:
    """Cases of siblings become `slow`, and the others of a test that is marked `matrix`; first cases
    never do."""
    first = set(first_cases(items))
    for item in items:
        is_repeat = item.get_closest_marker("matrix") or any(name in item.nodeid for name in SIBLINGS)
        if is_repeat and item not in first:
            item.add_marker("slow")


def with_few_examples(item: pytest.Item) -> None:
    """A property test keeps its settings, but for how many examples it tries."""
    function = getattr(item, "obj", None)  # a notebook has none
    function = getattr(function, "__func__", function)
    if getattr(function, "is_hypothesis_test", False):
        given = function._hypothesis_internal_use_settings
        few = min(FEW_EXAMPLES, given.max_examples)
        function._hypothesis_internal_use_settings = settings(given, max_examples=few)
