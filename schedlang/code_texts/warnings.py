"""Codes of warnings: what a schedule says that has no effect, or promises less than usual."""

from __future__ import annotations

from collections.abc import Mapping

WARNINGS: Mapping[str, tuple[str, str]] = {
    "W101": (
        "a knob is never used",
        "Neither a row, nor the mesh, nor a `require` reads it: setting it changes nothing.",
    ),
    "W102": (
        "a definition is never called",
        "Its rows are no part of the schedule.  A file of definitions alone is a library, and is\n"
        "not warned about.",
    ),
    "W701": (
        "a step is never verified",
        "`schedlang verify` compares the whole schedule with the original; a step that ends with\n"
        "`verify(forward, backward)` is compared by itself, so that a failure names the step.",
    ),
}
