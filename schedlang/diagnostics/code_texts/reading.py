"""Codes of the text itself, of declarations, names and arguments."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S000": (
        "the file cannot be read",
        "It is missing, a directory or a pipe, not permitted, not UTF-8, or larger than 1 MiB.",
    ),
    "S001": (
        "an unexpected character",
        "Strings stand in double quotes and end on their line; comments begin with `#`.",
    ),
    "S002": (
        "a bracket is never closed",
        "Newlines inside ( ) and [ ] end nothing, so the mistake shows on a later line; the\n"
        "message points at the bracket that was opened.",
    ),
    "S003": (
        "something else was expected",
        "A row is `selector  primitive(arguments)`, with a space between; a declaration begins\n"
        "with its keyword and stands outside of steps.",
    ),
    "S004": (
        "the form of a row or a number is wrong",
        "Most often a colon or nothing at all stands between a selector and its primitive:\n"
        "write `h.*  checkpoint()`, not `h.*: checkpoint()`.  A colon asks for modules of a type.",
    ),
    "S006": (
        "another edition of the language",
        "This schedlang reads `schedule 1`.  Files of older editions are rewritten by\n"
        "`schedlang fmt --upgrade FILE`; newer ones need a newer schedlang.",
    ),
    "S007": (
        "a word of the language cannot be a name",
        "Knobs, axes, views, definitions and parameters need other names.  Modules may be called\n"
        "anything: put such a name in backquotes.",
    ),
    "S008": (
        "a primitive is incomplete",
        "A subclass of Primitive has a docstring, an example, check, what its features ask for,\n"
        "facets that exist, and a name that no other module uses.",
    ),
    "S009": (
        "an extension cannot be imported",
        "Installed packages add primitives by entry points of the group `schedlang.primitives`;\n"
        "one of them fails when it is imported.",
    ),
    "S101": (
        "declared twice",
        "Knobs, axes, views, definitions and steps have names of their own.",
    ),
    "S102": ("a value of another type", "Knobs are int, float, bool or choice, and stay so."),
    "S103": (
        "a knob its allowed values",
        "`in [1, 2, 4]` and `in 1..8` say which values a knob may have, for you and for a tuner.",
    ),
    "S104": (
        "`require` fails",
        "`require` is checked with the knobs, the mesh and the model before any row; the message\n"
        "lists knob values that would satisfy it.",
    ),
    "S105": ("a knob has no value", "Give it a default or set it: `--knob name=value`."),
    "S106": ("no such knob", "A setting must be of a knob that the schedule declares."),
    "S107": ("division by zero", "`/`, `//` and `%` need a right side that is not zero."),
    "S109": ("a setting cannot be read", "Write `--knob name=value` and `--mesh dp=2,tp=4`."),
    "S110": ("a schedule for another model", "`schedule 1 for Class` names the model's class."),
    "S111": (
        "the mesh does not add up",
        "Axes are named with sizes, slowest first; one may be `_`, the rest of the ranks.",
    ),
    "S112": ("files use each other", "`use` brings in what a file defines; it cannot be circular."),
    "S113": ("not here", "Steps do not nest; declarations and `undo` stand outside of them."),
    "S114": (
        "no such step in a base",
        "`override` and `drop` change steps that a `use` above brings in; a file's own steps are\n"
        "changed where they are written.",
    ),
    "S115": (
        "a base under a name",
        "A file with steps becomes part of this one; only libraries of\ndefinitions take `as`.",
    ),
    "S116": (
        "a schedule that grows too large",
        "Definitions that call others multiply rows: 25 lines can stand for 30 million.\n"
        "A schedule has at most 20,000 rows, blocks and calls stand at most 100 deep, and the\n"
        "files that it uses, each as often as it is used, hold 2 MiB together.",
    ),
    "S201": (
        "a selector matches no module",
        "Every segment must match under every module found so far: 31 of 32 layers is a mistake.\n"
        "End the path in `?` to take what there is.  `schedlang tree` shows all names.",
    ),
    "S202": ("an index out of range", "Indices count children from 0, slices work as in Python."),
    "S203": ("no module of this type", "`:Class` keeps modules of a class or of its subclasses."),
    "S204": ("no such axis", "`over=` names an axis or a view of the mesh."),
    "S205": ("an axis that no row uses", "Every axis of the mesh splits something, or the batch."),
    "S206": (
        "not a plain value of the model",
        "`model.a.b` reads numbers and texts.  A schedule never runs code, so methods, properties\n"
        "and private names cannot be read.",
    ),
    "S207": ("an empty selection", "`where` and `except` must keep some module."),
    "S208": ("no such attribute", "`where` sees a module's data, and params, dtype, fqn, index."),
    "S209": ("no such module or parameter", "Names are those of `model.named_modules()`."),
    "S210": ("an unknown name", "A name in an expression is a knob, an axis or an argument."),
    "S211": (
        "`init` does not know the axis",
        "It reads what an axis is for from its name: `dp`, `data`, `fsdp` split the batch, `pp`\n"
        "and `pipe` the blocks, `tp` and `model` the tensors.",
    ),
    "S212": (
        "`init` found nothing for an axis to do",
        "Every way to split this model over the axis was refused; the notes say why.",
    ),
    "S301": (
        "no such primitive",
        "`schedlang explain` lists them; a definition must stand above its use.",
    ),
    "S302": ("no such argument", "`schedlang explain` shows what a primitive takes."),
    "S303": ("an unknown word", "Where words are expected there is a closed list of them."),
    "S304": ("a value of the wrong type", "The message says which type is needed."),
    "S305": ("an argument is missing", "The message shows an example."),
    "S306": ("this call does not fit its place", "Some primitives act on modules, some on all."),
    "S307": (
        "no such dim",
        "Linear and Conv1D have `in` and `out`, Embedding `vocab` and `hidden`; dims of other\n"
        "classes are counted: `S(0)`.",
    ),
}
