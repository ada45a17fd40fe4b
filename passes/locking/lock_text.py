"""A lock as the text of its file, and back: TOML, one fact a line, sorted, equal on any machine."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any, NoReturn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.locking.lock import SECTIONS, Lock, Section
from schedlang.passes.shrinking.ranges import gathered, spread

VERSION = 1
HEAD = """\
# What the model and its schedule were when somebody last looked: `schedlang plan FILE --lock`
# writes this file, `schedlang plan FILE --locked` compares.  h.0..3 stands for h.0 to h.3.
"""


def to_text(lock: Lock) -> str:
    """The text of the file; equal locks have equal texts."""
    lines = [HEAD, f"lock = {VERSION}", f"structure = {_quoted(lock.structure)}"]
    lines += ["", "[made]  # not compared", *(f"{n} = {_quoted(v)}" for n, v in lock.made)]
    if lock.settings:
        pairs = [f"  {_quoted(f'{option} {value}')}," for option, value in lock.settings]
        lines += ["", "[settings]", "given = [", *pairs, "]"]
    for name, about in SECTIONS.items():
        if lock.sections.get(name):
            lines += ["", f"[{name}]  # {about}", *_section(lock.sections[name])]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> Iterator[str]:
    """The lines of a section, names of equal entries gathered."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, said in section.items():
        alike.setdefault(said, []).append(name)
    lines = [(name, said) for said, names in alike.items() for name in gathered(names)]
    for name, said in sorted(lines, key=lambda line: _in_order(line[0])):
        if len(said) == 1:
            yield f"{_quoted(name)} = {_quoted(said[0])}"
        else:
            yield f"{_quoted(name)} = ["
            yield from (f"  {_quoted(text)}," for text in said)
            yield "]"


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """Numbers by size: h.2 stands before h.10."""
    parts = name.split(".")
    return [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]


def _quoted(text: str) -> str:
    """A basic string of TOML, which is one of JSON but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_lock(text: str, name: str) -> Lock:
    """The lock that a file holds; Refusal S721 if it is none, or was edited."""
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers without end, tables in tables
        _refuse(name, f"it is not TOML: {error}")
    if found.get("lock") != VERSION:
        _refuse(name, f"it is not of version {VERSION}")
    sections = {key: _entries(found.get(key, {}), name) for key in SECTIONS}
    made = found.get("made", {})
    settings = found.get("settings", {})
    given = settings.get("given", []) if isinstance(settings, dict) else None
    if not isinstance(made, dict) or not isinstance(given, list):
        _refuse(name, "a section is missing")
    if not all(isinstance(text, str) for text in given):
        _refuse(name, "`given` has a value that is not a string")
    made_pairs = tuple((str(key), str(value)) for key, value in made.items())
    pairs = [str(text).partition(" ") for text in given]
    lock = Lock(sections, tuple((option, value) for option, _, value in pairs), made_pairs)
    if found.get("structure") != lock.structure:
        _refuse(name, "its lines and its hash of the model do not match")
    return lock


def _entries(section: Any, name: str) -> Section:
    if not isinstance(section, dict):
        _refuse(name, "a section is missing")
    found: dict[str, tuple[str, ...]] = {}
    for key, said in section.items():
        texts = tuple(said) if isinstance(said, list) else (said,)
        if not all(isinstance(text, str) for text in texts):
            _refuse(name, f"`{key}` has a value that is not a string")
        try:
            found |= dict.fromkeys(spread(key), texts)
        except ValueError as error:
            _refuse(name, f"`{key[:60]}` {error}")
    return found


def _refuse(name: str, why: str) -> NoReturn:
    title = f"`{name}` is not a readable lock"
    helps = ("write it again: `schedlang plan FILE --lock`",)
    raise Refusal(Diagnostic("S721", title, notes=(why,), helps=helps))
