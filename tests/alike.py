"""Cases that execute no line or arc of the program beyond those of other cases of their list.

So it was seen on ranks and in the process of the tests, by tracing both. They run with `-m deep`;
of what they differ in, a size or a name or a library, the others of the list have an example.
"""

from __future__ import annotations

ALIKE: dict[str, tuple[str, ...]] = {
    "test_judged.py::test_a_right_program_passes": (
        *("fsdp1", "fsdp2", "fsdp2, tied and frozen", "tp", "plain parts"),
        *("pipeline by hand", "pipeline with a tie"),
    ),
    "test_judged.py::test_a_wrong_program_fails_with_the_kind_of_mistake": (
        *("ddp_twice----", "tp_summed----", "tp_fsdp_once----", "untied----"),
    ),
    "test_adapt.py::test_it_trains_as_one_written_by_hand": (
        *("sgd---adapters1", "sgd-rows1-tp=2-adapters1"),
        *("sgd-rows3-pp=2, tp=2-adapters0", "sgd-rows3-pp=2, tp=2-adapters1"),
        *("adamw---adapters0", "adamw---adapters1", "adamw-rows1-tp=2-adapters0"),
        *("adamw-rows2-dp=2, tp=2-adapters0", "adamw-rows2-dp=2, tp=2-adapters1"),
        "adamw-rows3-pp=2, tp=2-adapters0",
    ),
    "test_lent.py::test_slices_of_what_is_read_elsewhere": (
        *("1-Replaced", "1-Forwarded", "1-Following", "1-Penalised"),
        *("3-ByHand", "3-Generated", "3-Normed"),
    ),
    "test_evaluated.py::test_a_model_that_draws_in_evaluation_is_proven": (
        *("a sample around a mean-tp", "a sample around a mean-pp"),
        *("a distribution-dp", "a distribution-tp"),
        *("dropout that stays on-dp", "dropout that stays on-pp"),
        *("another count of calls-dp", "another count of calls-pp"),
        *("numbers by row-dp", "numbers by row-tp"),
    ),
}
