"""Redundant test cases: they execute no line or branch that other cases of their list do not.

This was measured by tracing the ranks and the process of the tests. These cases run with
`-m deep`: they differ from others in a size, a name or a library of which the list has an example.
"""

from __future__ import annotations

REDUNDANT: dict[str, tuple[str, ...]] = {
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
    "test_parameters_read_elsewhere.py::test_slices_of_what_is_read_elsewhere": (
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
    "test_features_run.py::test_as_the_model_alone": (
        *("zero 2", "activations on the host", "activations on disk", "ulysses"),
        *("Interleaved1F1B", "Chimera", "DualPipe"),
    ),
    "test_features_run.py::test_nothing_waits": (
        "a ring around ulysses",
        "parked on a peer",
        "Chimera",
    ),
    "test_initial.py::test_the_program_of_the_model": (
        *("tp-index", "tp-dcp nested", "tp-torchtitan"),
        *("pp-files", "pp-checkpoint", "pp-dcp", "pp-dcp nested"),
        *("zero3-files", "zero3-meta", "zero3-checkpoint"),
    ),
    "test_commands_agree.py::test_what_one_takes_all_take": (
        *("a dataclass, stages", "a named tuple, stages"),
        *("a named tuple, dp and tp", "a mapping, dp and tp"),
        *("a mapping of its own class, dp and tp", "a graph, dp", "a key for nobody, dp"),
        *("a list of samples, dp", "a sum as a loss, dp", "batch norm, whole"),
        *("calls counted, microbatches", "draws of an order, dp", "graphs in an object"),
        *("objects in a list, and labels", "the spread as a loss, dp"),
    ),
}
