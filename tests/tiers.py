"""Two tiers of tests: `--tier quick`, for `make test`, and `--tier rest`, everything else. No test
is in both.

The quick tier takes from each test its first case, and its first case of every kind of family. It
leaves out what is marked `thorough`: tests that start processes, compile, or take seconds.
Hypothesis tries a few examples only. Of the notebooks, it runs 00 to 05.

Siblings of another family are `slow`; so are, of the tests in `MATRIX`, which are costly, all cases
but the first of every kind.
"""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings

FEW_EXAMPLES = 5
SIBLINGS = (  # families whose code is that of another, but for numbers or a text model of transformers
    "GLM-4.5V", "GLM-4.6V", "glm46v", "glmga", "qwen3_vl_moe", "qwen3_5_moe", "MiniCPM-V 2.5", "MiniCPM-V 4.0",
    "MiniCPM-V 4.6, 4x",
)  # fmt: skip
MATRIX = (  # their names begin with "test_"
    "every_weight_is_needed_and_none_is_unknown", "an_adapter_of_transformers_and_peft", "held_out_questions",
    "every_caller_gets_its_own_embeddings", "training_starts_and_writes_a_folder_that_loads",
    "a_release_is_as_reported_and_as_transformers_has_it", "a_wrong_count_stops_a_benchmark",
    "the_demo_files_are_answered", "a_trace_keeps_what_the_rule_keeps", "forward_reads_nothing_back",
    "processor_and_encoder_count_the_same_tokens", "any_batch_equals_the_eager_encoder",
    "graphs_follow_the_weights", "packed_prompts_give_the_losses_and_gradients_of_separate_ones",
    "a_spoiled_item_spoils_itself_alone_in_a_replay", "mrope_sections_fill_what_rotates",
    "blocks_of_all_sizes_share_one_graph_without_a_break", "every_key_of_the_table_counts_where_it_says",
    "a_replay_copies_rows_and_plan_and_waits_for_nothing", "pruned_prompts_are_those_without_graphs",
    "a_planted_fault_is_found", "ids_logits_and_positions_equal_the_whole_prefill",
    "the_model_notices_a_mistake_or_the_reason_is_given",
)  # fmt: skip
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
    return item.name > "06" if is_notebook else bool(item.get_closest_marker("thorough"))


def mark_repeats(items: Sequence[pytest.Item]) -> None:
    """Cases of siblings become `slow`, and the others of a test in `MATRIX`; first cases never do."""
    first = set(first_cases(items))
    for item in items:
        test = item.name.partition("[")[0].removeprefix("test_")
        if item not in first and (test in MATRIX or any(name in item.nodeid for name in SIBLINGS)):
            item.add_marker("slow")


def with_few_examples(item: pytest.Item) -> None:
    """A property test keeps its settings, but for how many examples it tries."""
    function = getattr(item, "obj", None)  # a notebook has none
    function = getattr(function, "__func__", function)
    if getattr(function, "is_hypothesis_test", False):
        given = function._hypothesis_internal_use_settings
        few = min(FEW_EXAMPLES, given.max_examples)
        function._hypothesis_internal_use_settings = settings(given, max_examples=few)
