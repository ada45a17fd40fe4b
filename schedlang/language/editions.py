"""Editions of the language: the one that is read here, and how a text of an older one becomes it.

`schedule 1` names the edition that a file is written in.  What a later edition changes is a list of
rewritings of text, from each edition to the next; `schedlang fmt --upgrade` applies them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from schedlang.diagnostics.diagnostic import Diagnostic, Label
from schedlang.diagnostics.source import Source, Span

EDITION = 1  # what this schedlang reads
FIRST = 1  # the oldest that there ever was
HEADER = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*schedule[ \t]+(\d+)")


@dataclass(frozen=True)
class Change:
    """One thing that the next edition says otherwise: in a sentence, and as a function of texts."""

    says: str
    rewrite: Callable[[str], str]


# edition -> what is rewritten for the one after it, in this order; there is one edition so far
CHANGES: Mapping[int, Sequence[Change]] = {}


@dataclass(frozen=True)
class Upgraded:
    """A text of the edition that is read here, and what was changed in it."""

    source: Source
    changes: tuple[Change, ...] = ()


def upgraded(source: Source) -> Upgraded:
    """The text in the edition that is read here; one that is no older stays as it is."""
    found = HEADER.match(source.text)
    edition = int(found[1][:9]) if found else EDITION
    text, made = source.text, []
    if found is None or not FIRST <= edition < EDITION:
        return Upgraded(source)
    for number in range(edition, EDITION):
        for change in CHANGES.get(number, ()):
            before, text = text, change.rewrite(text)
            made += [change] * (before != text)
    header = HEADER.match(text)
    assert header is not None, "no change takes a file's header away"
    text = f"{text[: header.start(1)]}{EDITION}{text[header.end(1) :]}"
    return Upgraded(Source(source.name, text), tuple(made))


def misfit(version: str, span: Span) -> Iterator[Diagnostic]:
    """What is wrong with the edition that a header names, and what to do (S006)."""
    number = int(version[:9])
    if version == str(EDITION):
        return
    title = f"the file is in edition {version} of the language; this schedlang reads {EDITION}"
    help_ = "install a newer schedlang"
    if number < FIRST:
        title = f"edition {version} of the language does not exist"
        help_ = f"the first is {FIRST}: `schedule {FIRST}`"
    elif number < EDITION:
        help_ = f"rewrite it: `schedlang fmt --upgrade {span.source.name}`"
    yield Diagnostic("S006", title, Label(span), helps=(help_,))
