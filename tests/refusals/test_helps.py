"""Help texts of messages: applied to the schedule, they remove the mistake."""

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
from tests.refusals.apply_helps import AppliedHelp, applied_helps
from tests.refusals.run_examples import command_output, json_output

SCHEDULE_FILE = "x.sched"
ROOT = Path(__file__).parents[2]
FOLDERS = ("schedlang", "primitives", "passes")
# look like rows, but are not
NO_VERBS = {"pattern", "def", "primitive", "forward", "model", "time", "x"}


def _schedule_example(code: str) -> Example | None:
    """Return the example of a code if its command checks, plans or verifies a schedule."""
    code_example = example(code)
    assert code_example is not None
    uses_schedule = code_example.words[:2] in (
        ["check", SCHEDULE_FILE],
        ["plan", SCHEDULE_FILE],
        ["verify", SCHEDULE_FILE],
    )
    return code_example if uses_schedule and SCHEDULE_FILE in code_example.files else None


def _applied_helps(code_example: Example, folder: Path, threads: Any) -> list[AppliedHelp]:
    """Return all applicable helps of the example's messages, applied."""
    document = json.loads(json_output(code_example, folder, threads))
    diagnostics = [
        d for d in document.get("diagnostics", ()) if d["at"]["file"] in (SCHEDULE_FILE, "")
    ]
    return [
        applied
        for d in diagnostics
        for applied in applied_helps(code_example.files[SCHEDULE_FILE], d)
    ]


def _cases() -> Iterator[Any]:
    """Yield codes of checking and planning; codes that only `verify` finds are marked deep."""
    for code in codes_with_examples():
        code_example = _schedule_example(code)
        if code_example is not None and code[0] == "S":
            slow = code_example.words[0] == "verify" or code == "S110"
            yield pytest.param(code, marks=[pytest.mark.deep] * slow, id=code)


@pytest.mark.parametrize("code", _cases())
def test_what_is_offered_helps(tmp_path: Path, code: str, threads: Any) -> None:
    """After each help of an example is applied, no message of this code remains."""
    code_example = _schedule_example(code)
    assert code_example is not None
    for number, applied in enumerate(_applied_helps(code_example, tmp_path, threads)):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = {**code_example.files, SCHEDULE_FILE: applied.text}
        command = " ".join([code_example.command, *applied.options])
        output = command_output(
            replace(code_example, command=command, files=files), folder, threads
        )
        forbidden = {code, "S204"}  # a help must not name an axis that the mesh lacks
        assert not any(f"[{each_code}]" in output for each_code in forbidden), (
            f"{applied.help}\n\n{applied.text}\n{output}"
        )


def test_helps_name_verbs_that_there_are() -> None:
    """Rows that appear in messages or texts of codes use registered verbs."""
    load_all()
    texts = [(code, text) for code, (_, text) in {**CODES, **WARNINGS}.items()]
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        texts += [(path.name, literal) for literal in string_literals(path)]
    used_verbs = {(origin, verb) for origin, text in texts for verb in _row_verbs(text)}
    unknown = {(origin, verb) for origin, verb in used_verbs if verb not in registry()}
    assert len(used_verbs) > 25 and not unknown, sorted(unknown)


def _row_verbs(text: str) -> Iterator[str]:
    """Yield verbs of rows in backquotes: `layers.*  checkpoint()`."""
    for fragment in re.findall(r"`([^`]+)`", text):
        match = re.fullmatch(r"[\w.*{},\[\]:?]+\s+([a-z_]+)\(.*\)", fragment)
        if match and match[1] not in NO_VERBS:
            yield match[1]


def string_literals(path: Path) -> Iterator[str]:
    """Yield all string literals of a file; placeholders of f-strings become "x"."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "`" in text else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values)
