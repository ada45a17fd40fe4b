"""Codes of warnings: what a schedule says that has no effect, or promises less than usual."""

from __future__ import annotations

from collections.abc import Mapping

WARNINGS: Mapping[str, tuple[str, str]] = {
    "W101": (
        "a knob is never used",
        "No row, mesh or `require` reads it: setting it changes nothing.",
    ),
    "W102": (
        "a definition is never called",
        "Its rows are no part of the schedule.  A file of definitions alone is a library, and is\n"
        "not warned about.",
    ),
    "W103": ("a pattern is never used", "Neither `fuse` nor another row names it."),
    "W104": ("a view is never used", "No row, and no other expression, names these axes by it."),
    "W105": (
        "a condition is never true",
        "This `when` is false for all values that the knobs may have: its rows are never\n"
        "part of the plan.  A value may be misspelt, or missing in the domain of a knob.",
    ),
    "W201": (
        "a row selects nothing",
        "Its selector, or one around it, ends in `?`, which may select nothing: here it does.\n"
        "Without the `?` it would be refused (S201).",
    ),
    "W401": (
        "a row over one rank",
        "The axis is sized by a knob whose default is one, and nothing has set it: every row over\n"
        "the axis is the identity, and what is verified is not what runs on several ranks.",
    ),
    "W701": (
        "a step is never verified",
        "`schedlang verify` compares the whole schedule with the original; a step that ends with\n"
        "`verify(forward, backward)` is compared by itself, so that a failure names the step.",
    ),
    "W702": (
        "a loose tolerance",
        "`rtol` replaces the rule of rounding in the working dtype.  Usual is about\n"
        "what `torch.testing` allows: 1.3e-6 in float32, 1e-3 in float16, 2e-2 in bfloat16.  The\n"
        "comparison in float64 keeps its bound either way.",
    ),
    "W703": (
        "a kernel leaves calls to the model",
        "A kernel computes what a module does, but it does not support every call of it:\n"
        "tensors of other shapes, another argument, rows that are too long, a norm that has hooks\n"
        "or a unit of its own.  The module then computes by itself: nothing is wrong, and nothing\n"
        "is faster.  `plan`, `verify` and `run` say where and why; from Python it is a warning.",
    ),
}
