"""The grammar by which TextMate, VS Code, Sublime and others colour schedules.

`python -m schedlang.editors.textmate` writes it as JSON to standard output.
"""

from __future__ import annotations

import json
from typing import Any

from schedlang.editors.rules import rules

SCOPES = {
    "comment": "comment.line.number-sign",
    "string": "string.quoted.double",
    "module": "entity.name.namespace",
    "quantity": "constant.numeric",
    "number": "constant.numeric",
    "argument": "variable.parameter",
    "class": "entity.name.type.class",
    "operator word": "keyword.operator.logical",
    "constant": "constant.language",
    "keyword": "keyword.control",
    "type": "storage.type",
    "verb": "entity.name.function",
    "name": "variable.other",
    "operator": "keyword.operator",
    "punctuation": "punctuation",
}


def textmate() -> dict[str, Any]:
    """The grammar as plain values."""
    return {
        "name": "schedlang",
        "scopeName": "source.sched",
        "fileTypes": ["sched"],
        "patterns": [
            {"match": pattern, "name": f"{SCOPES[kind]}.sched"} for pattern, kind in rules()
        ],
    }


def text() -> str:
    """The grammar as the text of its file."""
    return json.dumps(textmate(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
