"""Snippets on docs/kernels.md print what their comments say."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path


def test_the_snippets_print_what_they_say():
    """Each `print` has its output in the comment behind it."""
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M))
    expected = re.findall(r"print\(.*\)  # (.*)$", code, re.M)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert expected and printed.getvalue().splitlines() == expected
