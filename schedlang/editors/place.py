"""What stands around a cursor in a text that is still being written, and need not parse."""

from __future__ import annotations

import re
from dataclasses import dataclass

from schedlang.editors import words

TOKEN = re.compile(
    "|".join(
        (
            r"(?P<skip>" + "|".join(words.regex(t) for t in ("COMMENT", "STRING", "QUOTED")) + ")",
            rf"(?P<glob>{words.regex('GLOB')})",
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
        """Whether selectors are complete and a verb comes next."""
        heads = rf"{PATH}(\s*,\s*{PATH})*(?<!,)\s+\w*"
        first = self.statement.split(maxsplit=1)[:1]
        keyword = bool(first) and first[0] in words.declarations()
        whole = re.fullmatch(heads, self.statement) is not None
        return not self.call and whole and not keyword and not self.statement.endswith(",")


def place(text: str, offset: int) -> Place:
    """What stands around the character at `offset`."""
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
