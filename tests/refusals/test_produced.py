"""Every code is produced as its page shows it: code, place, message, notes and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schedlang.diagnostics.codes import CODES, WARNINGS, example, exemplified
from tests.refusals.elsewhere import ELSEWHERE
from tests.refusals.playing import said


@pytest.mark.parametrize("code", list(exemplified()))
def test_the_page_tells_what_happens(tmp_path: Path, code: str, threads: Any) -> None:
    """The example of a page ends in exactly the message that the page shows."""
    shown = example(code)
    assert shown is not None and f"[{code}]: " in shown.says
    assert said(shown, tmp_path, threads) == shown.says


def test_every_code_is_produced() -> None:
    """Each registered code has an example, or names the test that produces it by other means."""
    have = set(exemplified())
    assert have <= {*CODES, *WARNINGS}
    missing = {*CODES, *WARNINGS} - have
    assert missing == set(ELSEWHERE), (sorted(missing - set(ELSEWHERE)), sorted(ELSEWHERE))
    tests = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for code, where in ELSEWHERE.items():
        assert code in tests[where].read_text(), (code, where)
