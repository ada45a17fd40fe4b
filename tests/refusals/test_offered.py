"""What messages and texts of codes name is there: options, arguments, codes, pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from schedlang.cli import app
from schedlang.diagnostics.codes import CODES, WARNINGS
from schedlang.ir.primitive import load_all, registry
from schedlang.language.kinds import signature_of
from tests.refusals.test_helps import FOLDERS, ROOT, literals

OTHERS = {  # options of other programs that messages name
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--standalone",
    "--rdzv-endpoint",
    "--rdzv-backend",
    "--rdzv-conf",
    "--max-restarts",
    "--kill-on-bad-exit",
    "--rdzv-id",
    "--no-build-isolation",
    "--help",
    "--query-gpu",
    "--format",
}
CODE = re.compile(r"\b[SW]\d{3}\b")
CALL = re.compile(r"(?<![\w.])([a-z_]+)\(([^()]*)\)")


@cache
def _texts() -> list[tuple[str, str]]:
    """Every literal of the sources, and the text of every code, with where it stands."""
    found = [(code, text) for code, (_, text) in {**CODES, **WARNINGS}.items()]
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        found += [(path.name, literal) for literal in literals(path)]
    return found


@cache
def _options() -> dict[str, set[str]]:
    """Of each verb of the command line, its options; those that stand before a verb under ""."""
    group: Any = typer.main.get_command(app)
    return {
        name: {option for one in verb.params for option in (*one.opts, *one.secondary_opts)}
        for name, verb in (("", group), *group.commands.items())
    }


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Verbs and their options in `schedlang verb FILE --option value`."""
    for command in re.findall(r"`schedlang ([^`]+)`", text):
        verb, *rest = command.split()
        yield verb, [word.partition("=")[0] for word in rest if word.startswith("--")]


def test_options_that_there_are() -> None:
    """A command that a text shows has its verb and its options; an option alone is of some verb."""
    verbs = _options()
    every = {option for options in verbs.values() for option in options} | OTHERS
    plugin = (ROOT / "schedlang" / "pytest_plugin.py").read_text()
    every |= {"--schedlang", *re.findall(r'\badd\(\s*"(--[\w-]+)"', plugin)}
    other = (ROOT / "schedlang" / "testing" / "gpu" / "__main__.py").read_text()
    every |= set(re.findall(r'\badd_argument\(\s*"(--[\w-]+)"', other))
    shown, wrong = set(), []
    for where, text in _texts():
        for verb, options in _commands(text):
            shown.add(verb)
            known = verbs.get(verb, set())
            bad = [one for one in options if one not in known]
            wrong += [(where, verb, bad)] if bad or verb not in verbs else []
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
            wrong += [(where, option)] if option not in every else []
    assert len(shown) > 5 and not wrong, wrong


def test_arguments_that_there_are() -> None:
    """Where a text shows `verb(argument=...)`, the verb takes an argument of this name."""
    load_all()
    shown, wrong = 0, []
    for where, text in _texts():
        for quoted in re.findall(r"`([^`]+)`", text):
            for verb, given in CALL.findall(quoted):
                kind = registry().get(verb)
                if kind is None or signature_of(kind).rest is not None:
                    continue
                named = re.findall(r"(?:^|,)\s*([a-z_]+)=", given)
                shown += len(named)
                wrong += [(where, verb, n) for n in named if n not in signature_of(kind).keywords]
    assert shown > 40 and not wrong, wrong


def test_codes_and_pages_that_there_are() -> None:
    """Codes that texts name have a page, and pages of the book that texts name are there."""
    wrong = [
        (where, code)
        for where, text in _texts()
        for code in CODE.findall(text)
        if code not in CODES and code not in WARNINGS
    ]
    pages = {(where, p) for where, text in _texts() for p in re.findall(r"docs/[\w/]+\.md", text)}
    wrong += [(where, page) for where, page in pages if not (ROOT / page).is_file()]
    assert len(pages) > 2 and not wrong, wrong


def test_every_text_is_raised() -> None:
    """A code whose page nobody can come to is a page too many."""
    raised: set[str] = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if "code_texts" not in path.parts:
            raised |= set(re.findall(r'"([SW]\d{3})"', path.read_text()))
    assert not {*CODES, *WARNINGS} - raised, sorted({*CODES, *WARNINGS} - raised)
