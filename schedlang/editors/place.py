"""The syntax around a cursor in a text that need not parse, and the names that the text
declares."""

from __future__ import annotations

import re
from dataclasses import dataclass

from schedlang.editors.rules import declarations, regex

# -- the context of a cursor, in a text that need not parse ----------------------------------------


TOKEN = re.compile(
    "|".join(
        (
            r"(?P<skip>" + "|".join(regex(t) for t in ("COMMENT", "STRING", "QUOTED")) + ")",
            rf"(?P<glob>{regex('GLOB')})",
            r"(?P<open>[({\[])",
            r"(?P<close>[)}\]])",
            r"(?P<end>\n)",
            r"(?P<word>[A-Za-z_][\w.]*)",
        )
    )
)
PATH = r"[\w.*{},`\[\]:?-]*"


@dataclass(frozen=True)
class Open:
    """A bracket that the cursor is inside of, with what stands before it, from `start` on."""

    bracket: str
    before: str
    start: int


@dataclass(frozen=True)
class Place:
    """The brackets around a cursor, outermost first, and the unfinished statement before it."""

    around: tuple[Open, ...]
    statement: str

    @property
    def scopes(self) -> tuple[str, ...]:
        """The heads of the blocks around it: `step "x"`, `at h.*`."""
        return tuple(one.before for one in self.around if one.bracket == "{")

    @property
    def call(self) -> str:
        """The name of the call whose arguments are being written; empty outside of one."""
        inner = next((one for one in reversed(self.around) if one.bracket != "["), None)
        found = re.search(r"([A-Za-z_][\w.]*)$", inner.before) if inner else None
        return found[1] if found and inner and inner.bracket == "(" else ""

    @property
    def argument(self) -> str:
        """The keyword whose value is being written; empty where there is none."""
        found = re.search(r"(\w+)\s*=\s*\[?[\w.,\s]*$", self.statement)
        return found[1] if found and self.call else ""

    @property
    def path(self) -> str | None:
        """The selector that is being written; None where none may stand."""
        if self.call:
            return None
        heads = rf"(?:(?:at|except)\s+|.*\b(?:except)\s+)?(?:{PATH}\s*,\s*)*({PATH})"
        found = re.fullmatch(heads, self.statement)
        return found[1] if found else None

    @property
    def selected(self) -> bool:
        """True where selectors are complete and a verb comes next."""
        heads = rf"{PATH}(\s*,\s*{PATH})*(?<!,)\s+\w*"
        first = self.statement.split(maxsplit=1)[:1]
        keyword = bool(first) and first[0] in declarations()
        whole = re.fullmatch(heads, self.statement) is not None
        return not self.call and whole and not keyword and not self.statement.endswith(",")


def place(text: str, offset: int) -> Place:
    """Return the context of the character at `offset`."""
    around: list[Open] = []
    start = 0
    for token in TOKEN.finditer(text, 0, offset):
        kind, at = token.lastgroup, token.start()
        if kind == "open":
            around.append(Open(token[0], text[start:at].strip(), token.end()))
        elif kind == "close" and around:
            around.pop()
        block = not around or around[-1].bracket == "{"
        braces = token[0] in "{}" and kind in ("open", "close")
        if braces or (kind == "end" and block):
            start = token.end()
    return Place(tuple(around), text[start:offset].lstrip())


# -- declarations, in a text that need not parse ---------------------------------------------------


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
