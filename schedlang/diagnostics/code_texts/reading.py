"""Codes of the text itself, of declarations, names and arguments."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, tuple[str, str]] = {
    "S000": (
        "the file cannot be read",
        "The file is missing, is a directory or a pipe, may not be read by you, is not UTF-8, or\n"
        "is larger than 1 MiB.",
    ),
    "S001": (
        "an unexpected character",
        "Write strings in double quotes, on one line. Comments begin with `#`.",
    ),
    "S002": (
        "a bracket is never closed",
        "A newline inside ( ) or [ ] does not end a row, so the parser notices the mistake on a\n"
        "later line. The message points at the opening bracket.",
    ),
    "S003": (
        "something else was expected",
        "A row is `selector  primitive(arguments)`, with a space between the two. A declaration\n"
        "begins with its keyword and stands outside of steps.",
    ),
    "S004": (
        "the form of a row or a number is wrong",
        "In most cases there is a colon, or nothing, between a selector and its primitive. Write\n"
        "`h.*  checkpoint()`, not `h.*: checkpoint()`. A colon selects modules by type.",
    ),
    "S006": (
        "another edition of the language",
        "This schedlang reads `schedule 1`. `schedlang fmt --upgrade FILE` rewrites files of\n"
        "older editions. Files of newer editions need a newer schedlang.",
    ),
    "S007": (
        "a keyword cannot be a name",
        "Choose another name for the knob, axis, view, definition or parameter. A module may have\n"
        "any name: write it in backquotes.",
    ),
    "S008": (
        "a primitive is incomplete",
        "A subclass of Primitive needs a docstring, an example, `check`, the methods that its\n"
        "features require, existing facets, and a name that no other module uses.",
    ),
    "S009": (
        "an extension cannot be imported",
        "Installed packages add primitives through the entry-point group `schedlang.primitives`.\n"
        "One of these entry points raises when it is imported.",
    ),
    "S101": ("declared twice", "Each knob, axis, view, definition and step needs its own name."),
    "S102": (
        "a value of another type",
        "A knob is int, float, bool or choice. Its values must have this type.",
    ),
    "S103": (
        "a value that the knob does not allow",
        "`in [1, 2, 4]` and `in 1..8` list the values that a knob may have. They hold for your\n"
        "settings and for `tune`.",
    ),
    "S104": (
        "`require` fails",
        "`require` is checked before any row, with the knobs, the mesh and the model. The message\n"
        "lists knob values that satisfy the condition.",
    ),
    "S105": ("a knob has no value", "Give the knob a default, or set it: `--knob name=value`."),
    "S106": ("no such knob", "You can set only knobs that the schedule declares."),
    "S107": ("division by zero", "The right side of `/`, `//` and `%` must not be zero."),
    "S109": ("a setting cannot be read", "Write `--knob name=value` and `--mesh dp=2,tp=4`."),
    "S110": (
        "a schedule for another model",
        "`schedule 1 for Class` names the class of the model. This model has another class.",
    ),
    "S111": (
        "the sizes of the mesh do not fit",
        "Each axis has a name and a size, the slowest axis first. One size may be `_`: this axis\n"
        "gets the remaining ranks.",
    ),
    "S112": (
        "files use each other",
        "`use` includes the definitions of another file. Files must not include each other in a\n"
        "circle.",
    ),
    "S113": (
        "not allowed at this place",
        "Steps do not nest. Declarations and `undo` stand outside of steps.",
    ),
    "S114": (
        "no such step in a base",
        "`override` and `drop` change steps of a file that a `use` above includes. Change the\n"
        "steps of your own file where they are written.",
    ),
    "S115": (
        "a base under a name",
        "The steps of the used file become part of this schedule. Only a library (a file of\n"
        "definitions alone) takes `as`.",
    ),
    "S116": (
        "a schedule that grows too large",
        "Definitions that call other definitions multiply rows: 25 lines can make 30 million. The\n"
        "limits: 20,000 rows; 100 nested blocks and calls; 2 MiB for all used files, where each\n"
        "use of a file counts.",
    ),
    "S201": (
        "a selector matches no module",
        "Each segment must match under every module found so far: a match in only 31 of 32 layers\n"
        "is an error. End the path in `?` if it may match nothing. `schedlang tree` shows all\n"
        "names.",
    ),
    "S202": (
        "an index out of range",
        "Indices count the children from 0. Slices work as in Python.",
    ),
    "S203": (
        "no module of this type",
        "`:Class` selects modules of this class and of its subclasses.",
    ),
    "S204": ("no such axis", "`over=` needs an axis or a view of the mesh."),
    "S205": (
        "an axis that no row uses",
        "Each axis of the mesh must split the batch, the sequences, the weights or the model.",
    ),
    "S206": (
        "not a plain value of the model",
        "`model.a.b` reads numbers and strings. A schedule never runs code, so it cannot read\n"
        "methods, properties and private names.",
    ),
    "S207": ("an empty selection", "`where` and `except` must leave at least one module."),
    "S208": (
        "no such attribute",
        "`where` can read data attributes of the module, and `params`, `dtype`, `fqn`, `index`.",
    ),
    "S209": (
        "no such module or parameter",
        "Use the names of `model.named_modules()` and `model.named_parameters()`.",
    ),
    "S210": (
        "an unknown name",
        "A name in an expression must be a knob, an axis or an argument of the definition.",
    ),
    "S211": (
        "`init` does not know the axis",
        "`init` reads the purpose of an axis from its name: `dp`, `data` and `fsdp` split the\n"
        "batch, `ep` the experts, `cp` the sequences, `pp` and `pipe` the blocks, `tp` and\n"
        "`model` the tensors.",
    ),
    "S212": (
        "`init` cannot use an axis",
        "`init` tried every way to split this model over the axis, and each was refused. The\n"
        "notes give the reasons.",
    ),
    "S301": (
        "no such primitive",
        "`schedlang explain` lists all primitives. A definition must stand above its first use.",
    ),
    "S302": ("no such argument", "`schedlang explain NAME` shows the arguments of a primitive."),
    "S303": (
        "an unknown word",
        "This argument takes one word of a fixed list. The message lists the words.",
    ),
    "S304": ("a value of the wrong type", "The message gives the type that the argument needs."),
    "S305": ("an argument is missing", "The message shows an example."),
    "S306": (
        "this call does not fit its place",
        "Some primitives need a selector and some take none. Some arguments exclude each other.\n"
        "The message gives the rule.",
    ),
    "S307": (
        "no such dim",
        "Linear and Conv1D have `in` and `out`, Embedding has `vocab` and `hidden`. For other\n"
        "classes give the number of the dim: `S(0)`.",
    ),
}
