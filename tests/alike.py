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
}
