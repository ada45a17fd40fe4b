"""Examples of error codes produce exactly the documented message: place, notes and helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schedlang.diagnostics.codes import CODES, WARNINGS, codes_with_examples, example
from tests.refusals.codes_tested_elsewhere import ELSEWHERE
from tests.refusals.run_examples import command_output

# quotes a message of torch 2.13 without CUDA
QUOTES_TORCH = (
    {"S765"} if torch.version.cuda or not torch.__version__.startswith("2.13.") else set()
)


@pytest.mark.parametrize("code", list(codes_with_examples()))
def test_the_page_tells_what_happens(tmp_path: Path, code: str, threads: Any) -> None:
    """The example of each page produces exactly the message on the page."""
    code_example = example(code)
    assert code_example is not None and f"[{code}]: " in code_example.message
    assert comparable_parts(
        code, command_output(code_example, tmp_path, threads)
    ) == comparable_parts(code, code_example.message)


def comparable_parts(code: str, text: str) -> list[str]:
    """Return the message in parts, without torch's words if another torch wrote the page."""
    if code not in QUOTES_TORCH:
        return [text]
    title, rest = text.split(" on rank 0: ")
    source_start, help_start = rest.index(" -->"), rest.index("  = help")
    return [title, rest[source_start : rest.index("  = note")], rest[help_start:]]


def test_every_code_is_produced() -> None:
    """Each code has an example, or a listed test that produces it by other means."""
    with_examples = set(codes_with_examples())
    assert with_examples <= {*CODES, *WARNINGS}
    missing = {*CODES, *WARNINGS} - with_examples
    assert missing == set(ELSEWHERE), (sorted(missing - set(ELSEWHERE)), sorted(ELSEWHERE))
    tests = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for code, test_file in ELSEWHERE.items():
        assert code in tests[test_file].read_text(), (code, test_file)
