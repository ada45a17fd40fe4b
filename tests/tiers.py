"""Choose the cases of long lists that ordinary tests run; the others run with `-m deep`."""

from __future__ import annotations

import zlib
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.redundant_cases import REDUNDANT

# Long lists of which every n-th case is ordinary; the others run with `-m deep`.  All cases of a
# list run the same kind of proof, so that ordinary cases show what a change breaks.
EACH = {
    "test_the_row_is_named": 4,
    "test_a_bug_is_found": 9,
    "test_no_false_alarm": 3,
    "test_a_dozen_models": 6,
    "test_a_mistake_of_the_verifier_would_be_noticed": 3,
    "test_the_diagonal": 3,
    "test_a_diagonal": 3,
    "test_what_is_offered_helps": 3,
    "test_both_orders": 3,
    "test_plans_are_proven_on_threads": 5,
    "test_as_ranks_really_do": 4,
    "test_trained": 3,
    "test_peak_is_that_of_real_storages": 6,
    "test_a_changed_model_is_a_readable_difference": 3,
    "test_it_trains_as_alone": 2,
    "test_same_bits_on_ranks": 3,
    "test_beside_other_rows": 2,
    "test_key_value_heads_below_the_ranks": 2,
    "test_on_ranks_it_equals_the_original": 3,
    "test_axes_of_size_one_are_the_identity": 2,
    "test_any_table_of_versions": 2,
    "test_same_bits_as_at_home": 3,
    "test_regions_train_as_the_original": 6,
    "test_what_is_kept_is_what_was_estimated": 2,
    "test_equal_to_one_process_that_rounds_alike": 5,
    "test_it_trains_as_the_original": 2,
    "test_the_rest_trains_as_the_original_does": 4,
    "test_heads_over_ranks": 4,
    "test_packed_heads": 4,
    "test_equal_to_one_process_that_runs_again_alike": 4,
    "test_equal_to_one_process_that_rounds_tokens_alike": 5,
    "test_it_trains_as_the_model_did": 4,
    "test_every_way_equals_the_original": 2,
    "test_what_nobody_uses_in_a_later_stage": 4,
    "test_equal_to_one_process_with_the_same_table": 6,
    "test_what_is_wrong_is_told": 2,
    "test_sides_need_not_be_equal": 2,
    "test_the_sum_over_steps_is_followed": 2,
    "test_nothing_is_left_behind": 3,
    "test_the_proof_holds": 2,
    "test_three_axes_at_once": 2,
    "test_same_gradients_bit_by_bit": 2,
    "test_it_trains_as_the_original_so_changed": 3,
    "test_as_near_as_one_process_under_the_same_casts": 2,
    "test_proven": 2,
    "test_what_shows_late_is_repeated_as_it_showed": 2,
    "test_the_same_layout_goes_on": 2,
    "test_equal_to_one_process_that_keeps_alike": 3,
    "test_models_over_ranks": 2,
    "test_a_table_has_one_mask": 3,
    "test_a_mistake_is_named": 3,
    "test_a_right_one_passes": 3,
    "test_what_the_model_refuses_is_refused": 3,
    "test_the_first_module_is_named_beyond_roundings": 2,
    "test_a_wrong_program_fails": 3,
    "test_a_right_program_passes": 3,
    "test_a_rank_never_has_the_whole_model": 2,
    "test_a_drawn_schedule_holds": 2,
    "test_what_is_written_is_proven": 2,
    "test_it_is_proven": 2,
    "test_it_is_split_with_its_projection": 3,
    "test_wrong_experts_are_no_rounding": 3,
    "test_between_programs": 3,
    "test_opcheck": 2,
    "test_what_one_takes_all_take": 2,
    "test_a_stage_is_one_graph": 2,
    "test_the_mended_program_passes": 3,
    "test_what_differs_is_named": 2,
    "test_batches_are_compared": 2,
    "test_dropout_that_is_wrong": 2,
    "test_the_kind_of_mistake_is_told_within_roundings": 2,
    "test_no_more_is_read_than_is_held": 2,
    "test_a_mistake_of_ours_is_ours": 2,
    "test_attentions_without_rows_are_named": 2,
    "test_what_a_mask_of_the_batch_selects": 2,
    "test_it_trains_as_one_written_by_hand": 2,
    "test_tokens_are_those_of_the_original": 2,
    "test_a_step_costs_what_it_does_by_hand": 2,
}


def mark_deep(items: Iterable[pytest.Item], whole: bool = False) -> None:
    """Mark the cases of EACH and of REDUNDANT that are not ordinary as deep.

    items  tests in the order of each function, which EACH counts
    whole  the tests are of full files: then an unknown case in REDUNDANT is a UsageError
    """
    case_counts: Counter[str] = Counter()
    cases_by_function: dict[str, set[str]] = {}
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        function = f"{item.path.name}::{name}"
        redundant = REDUNDANT.get(function, ())
        if redundant:
            case = item.name.removeprefix(name)[1:-1]
            cases_by_function.setdefault(function, set()).add(case)
            if case in redundant:
                item.add_marker(pytest.mark.deep)
        if name not in EACH or item.get_closest_marker("deep"):
            continue
        if case_counts[f"{item.path}::{name}"] % EACH[name]:
            item.add_marker(pytest.mark.deep)
        case_counts[f"{item.path}::{name}"] += 1
    missing = {
        f: {*REDUNDANT[f]} - cases
        for f, cases in cases_by_function.items()
        if {*REDUNDANT[f]} - cases
    }
    if whole and missing:
        raise pytest.UsageError(
            f"tests/redundant_cases.py names cases that are not there: {missing}"
        )


def parse_part(text: str) -> tuple[int, int]:
    """Parse `K/N`: the K-th of N parts, counted from 1."""
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        raise ArgumentTypeError(f"`{text}` is not K/N, as in 3/8") from None
    if not 1 <= number <= count:
        raise ArgumentTypeError(f"there is no part {number} of {count}: 1/{count} is the first")
    return number, count


def in_part(name: str, number: int, count: int) -> bool:
    """Whether a test belongs to a part, by its name alone, so that parts never overlap."""
    return zlib.crc32(name.encode()) % count == number - 1


def thin_out(cases: Iterable[Any], keep: int = 2) -> list[Any]:
    """Mark all cases as deep except every `keep`-th."""
    result = []
    for index, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        result.append(case if index % keep == 0 else pytest.param(*values, marks=pytest.mark.deep))
    return result
