"""What messages offer as text is legal: written into the schedule, the mistake is gone."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedlang.diagnostics.codes import CODES, WARNINGS, Example, codes_with_examples, example
from schedlang.ir.primitive import load_all, registry
from tests.refusals.pasting import Pasted, pasted
from tests.refusals.playing import said, told_as_json

FILE = "x.sched"
ROOT = Path(__file__).parents[2]
FOLDERS = ("schedlang", "primitives", "passes")
# look like rows, and are none
NO_VERBS = {"pattern", "def", "primitive", "forward", "model", "time", "x"}


def _sched(code: str) -> Example | None:
    """The example, if it is about a schedule that is checked or planned."""
    found = example(code)
    assert found is not None
    about = found.words[:2] in (["check", FILE], ["plan", FILE], ["verify", FILE])
    return found if about and FILE in found.files else None


def _helped(shown: Example, folder: Path, threads: Any) -> list[Pasted]:
    """Every help of the example's messages that can be written into it."""
    found = json.loads(told_as_json(shown, folder, threads))
    own = [d for d in found.get("diagnostics", ()) if d["at"]["file"] in (FILE, "")]
    return [one for d in own for one in pasted(shown.files[FILE], d)]


def _cases() -> Iterator[Any]:
    """Codes of checking and planning; those that only `verify` finds take their time."""
    for code in codes_with_examples():
        shown = _sched(code)
        if shown is not None and code[0] == "S":
            slow = shown.words[0] == "verify" or code == "S110"
            yield pytest.param(code, marks=[pytest.mark.deep] * slow, id=code)


@pytest.mark.parametrize("code", _cases())
def test_what_is_offered_helps(tmp_path: Path, code: str, threads: Any) -> None:
    """Each help of an example, done as it says, leaves no message of this code."""
    shown = _sched(code)
    assert shown is not None
    for number, one in enumerate(_helped(shown, tmp_path, threads)):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = {**shown.files, FILE: one.text}
        command = " ".join([shown.command, *one.options])
        after = said(replace(shown, command=command, files=files), folder, threads)
        wrong = {code, "S204"}  # no help names an axis that the mesh lacks, and does not say so
        assert not any(f"[{each}]" in after for each in wrong), f"{one.help}\n\n{one.text}\n{after}"


def test_helps_name_verbs_that_there_are() -> None:
    """What looks like a row in a message, or in a text about a code, is of a registered verb."""
    load_all()
    texts = [(code, text) for code, (_, text) in {**CODES, **WARNINGS}.items()]
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        texts += [(path.name, literal) for literal in literals(path)]
    named = {(where, verb) for where, text in texts for verb in _verbs(text)}
    unknown = {(where, verb) for where, verb in named if verb not in registry()}
    assert len(named) > 25 and not unknown, sorted(unknown)


def _verbs(text: str) -> Iterator[str]:
    """The verbs of what stands in backquotes as a row: `layers.*  checkpoint()`."""
    for fragment in re.findall(r"`([^`]+)`", text):
        found = re.fullmatch(r"[\w.*{},\[\]:?]+\s+([a-z_]+)\(.*\)", fragment)
        if found and found[1] not in NO_VERBS:
            yield found[1]


def literals(path: Path) -> Iterator[str]:
    """Texts of a file with its f-strings' holes filled by a name."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "`" in text else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values)
