"""Every code is produced as its page shows it: code, place, message, notes and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schedlang.diagnostics.codes import CODES, WARNINGS, codes_with_examples, example
from tests.refusals.elsewhere import ELSEWHERE
from tests.refusals.playing import said

# torch itself speaks in it: as 2.13 without CUDA does
QUOTED = {"S765"} if torch.version.cuda or not torch.__version__.startswith("2.13.") else set()


@pytest.mark.parametrize("code", list(codes_with_examples()))
def test_the_page_tells_what_happens(tmp_path: Path, code: str, threads: Any) -> None:
    """The example of a page ends in exactly the message that the page shows."""
    shown = example(code)
    assert shown is not None and f"[{code}]: " in shown.message
    assert ours(code, said(shown, tmp_path, threads)) == ours(code, shown.message)


def ours(code: str, text: str) -> list[str]:
    """The message; without what torch says, where another one does than the page was made with."""
    if code not in QUOTED:
        return [text]
    title, rest = text.split(" on rank 0: ")
    place, helped = rest.index(" -->"), rest.index("  = help")
    return [title, rest[place : rest.index("  = note")], rest[helped:]]


def test_every_code_is_produced() -> None:
    """Each registered code has an example, or names the test that produces it by other means."""
    have = set(codes_with_examples())
    assert have <= {*CODES, *WARNINGS}
    missing = {*CODES, *WARNINGS} - have
    assert missing == set(ELSEWHERE), (sorted(missing - set(ELSEWHERE)), sorted(ELSEWHERE))
    tests = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for code, where in ELSEWHERE.items():
        assert code in tests[where].read_text(), (code, where)
