"""What a text declares, found also where the rest of it does not parse."""

from __future__ import annotations

import re
from dataclasses import dataclass

DECLARATION = re.compile(
    r'^[ \t]*(?:(?P<kind>knob|view|def|pattern)\s+(?P<name>\w+)|use\s+(?P<file>"[^"\n]*")'
    r'(?:\s+as\s+(?P<alias>\w+))?|(?P<step>step)\s+"(?P<title>[^"\n]*)"|(?P<mesh>mesh)\s*\()',
    re.M,
)
AXIS = re.compile(r"(\w+)\s*=")


@dataclass(frozen=True)
class Declared:
    """A name, what it is (knob, view, def, pattern, axis, use, step), its offset and its line."""

    name: str
    kind: str
    offset: int
    line: str


def declared(text: str) -> list[Declared]:
    """Every declaration of a text, in order."""
    found = []
    for one in DECLARATION.finditer(text):
        line = text[one.start() : _line_end(text, one.start())].strip()
        if one["mesh"]:
            until = text.find(")", one.end())
            inside = text[: until if until >= 0 else len(text)]
            for axis in AXIS.finditer(inside, one.end()):
                found.append(Declared(axis[1], "axis", axis.start(1), line))
        elif one["file"]:
            name = one["alias"] or one["file"].strip('"')
            found.append(Declared(name, "use", one.start("file"), line))
        elif one["step"]:
            found.append(Declared(one["title"], "step", one.start("title"), line))
        else:
            found.append(Declared(one["name"], one["kind"], one.start("name"), line))
    return found


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def used_file(text: str, alias: str) -> str | None:
    """The file that `use "file" as alias` names."""
    found = re.search(rf'^[ \t]*use\s+"([^"\n]*)"\s+as\s+{re.escape(alias)}\b', text, re.M)
    return found[1] if found else None
