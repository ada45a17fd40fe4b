"""Options, arguments, codes and pages that messages mention: all of them exist."""

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
from tests.refusals.test_helps import FOLDERS, ROOT, string_literals

FOREIGN_OPTIONS = {  # options of other programs that messages name
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
def _all_texts() -> list[tuple[str, str]]:
    """Return all string literals of the sources and texts of codes, each with its origin."""
    texts = [(code, text) for code, (_, text) in {**CODES, **WARNINGS}.items()]
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        texts += [(path.name, literal) for literal in string_literals(path)]
    return texts


@cache
def _verb_options() -> dict[str, set[str]]:
    """Return the options of each command; options before the command are under ""."""
    group: Any = typer.main.get_command(app)
    return {
        name: {
            option
            for parameter in verb.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, verb in (("", group), *group.commands.items())
    }


def _shown_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield verb and options of each `schedlang verb FILE --option value`."""
    for command in re.findall(r"`schedlang ([^`]+)`", text):
        verb, *rest = command.split()
        yield verb, [word.partition("=")[0] for word in rest if word.startswith("--")]


def test_options_that_there_are() -> None:
    """Commands in texts use existing verbs and options; a lone option belongs to some verb."""
    verbs = _verb_options()
    all_options = {option for options in verbs.values() for option in options} | FOREIGN_OPTIONS
    plugin = (ROOT / "schedlang" / "pytest_plugin.py").read_text()
    all_options |= {"--schedlang", *re.findall(r'\badd\(\s*"(--[\w-]+)"', plugin)}
    gpu_main = (ROOT / "schedlang" / "testing" / "gpu" / "__main__.py").read_text()
    all_options |= set(re.findall(r'\badd_argument\(\s*"(--[\w-]+)"', gpu_main))
    used_verbs, mistakes = set(), []
    for origin, text in _all_texts():
        for verb, options in _shown_commands(text):
            used_verbs.add(verb)
            verb_options = verbs.get(verb, set())
            unknown = [used_option for used_option in options if used_option not in verb_options]
            mistakes += [(origin, verb, unknown)] if unknown or verb not in verbs else []
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
            mistakes += [(origin, option)] if option not in all_options else []
    assert len(used_verbs) > 5 and not mistakes, mistakes


def test_arguments_that_there_are() -> None:
    """Each `verb(argument=...)` in a text names an argument that the verb takes."""
    load_all()
    count, mistakes = 0, []
    for origin, text in _all_texts():
        for quoted in re.findall(r"`([^`]+)`", text):
            for verb, arguments in CALL.findall(quoted):
                kind = registry().get(verb)
                if kind is None or signature_of(kind).rest is not None:
                    continue
                keywords = re.findall(r"(?:^|,)\s*([a-z_]+)=", arguments)
                count += len(keywords)
                mistakes += [
                    (origin, verb, n) for n in keywords if n not in signature_of(kind).keywords
                ]
    assert count > 40 and not mistakes, mistakes


def test_codes_and_pages_that_there_are() -> None:
    """Codes and documentation pages that texts mention exist."""
    mistakes = [
        (origin, code)
        for origin, text in _all_texts()
        for code in CODE.findall(text)
        if code not in CODES and code not in WARNINGS
    ]
    pages = {
        (origin, p) for origin, text in _all_texts() for p in re.findall(r"docs/[\w/]+\.md", text)
    }
    mistakes += [(origin, page) for origin, page in pages if not (ROOT / page).is_file()]
    assert len(pages) > 2 and not mistakes, mistakes


def test_every_text_is_raised() -> None:
    """Every documented code is raised somewhere in the sources."""
    raised: set[str] = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if "code_texts" not in path.parts:
            raised |= set(re.findall(r'"([SW]\d{3})"', path.read_text()))
    assert not {*CODES, *WARNINGS} - raised, sorted({*CODES, *WARNINGS} - raised)
