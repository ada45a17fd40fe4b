"""Codes of warnings: what a schedule says that has no effect, or promises less than usual."""

from __future__ import annotations

from collections.abc import Mapping

WARNINGS: Mapping[str, tuple[str, str]] = {
    "W101": (
        "a knob is never used",
        "No row, mesh or `require` reads the knob. Setting it changes nothing.",
    ),
    "W102": (
        "a definition is never called",
        "The rows of the definition are not part of the schedule. A file of definitions alone is\n"
        "a library; for a library there is no warning.",
    ),
    "W103": ("a pattern is never used", "No `fuse` or other row names the pattern."),
    "W104": ("a view is never used", "No row and no expression uses the name of this view."),
    "W105": (
        "a condition is never true",
        "This `when` is false for all allowed values of the knobs, so its rows are never part of\n"
        "the plan. Look for a misspelt value, or for a value that the knob does not allow.",
    ),
    "W201": (
        "a row selects nothing",
        "The selector, or one around it, ends in `?`, so it may select nothing. Here it selects\n"
        "nothing. Without the `?` this is an error (S201).",
    ),
    "W401": (
        "a row over one rank",
        "A knob sets the size of the axis. Its default is 1 and it was not set. Rows over this\n"
        "axis then do nothing, so `verify` does not check what runs on several ranks.",
    ),
    "W701": (
        "a step is never verified",
        "`schedlang verify` compares the whole schedule with the original. If a step ends with\n"
        "`verify(forward, backward)`, it is also compared alone, and a failure names the step.",
    ),
    "W702": (
        "a loose tolerance",
        "`rtol` replaces the tolerance that follows from the rounding error of the working dtype.\n"
        "Usual values are about those of `torch.testing`: 1.3e-6 in float32, 1e-3 in float16,\n"
        "2e-2 in bfloat16. The tolerance of the float64 comparison does not change.",
    ),
    "W703": (
        "a kernel leaves calls to the model",
        "The kernel does not support every call of its module. Examples are other shapes, some\n"
        "arguments, rows that are too long, and a norm that has hooks or that another row of the\n"
        "schedule names. For such a call the module's own forward runs: correct, but\n"
        "not faster. `plan`, `verify` and `run` report where and why; from Python it is a warning.",
    ),
    "W704": (
        "a loss that may be no mean over the rows of the batch",
        "In a recorded forward the loss depends on a tensor of rows by rows, such as the\n"
        "similarities of a contrastive loss, or on a norm or an extreme of all rows. Each rank\n"
        "would take its own rows only. A model that is quick to run is tried, and refused (S703);\n"
        "of a large one only what it sums is known.",
    ),
}
