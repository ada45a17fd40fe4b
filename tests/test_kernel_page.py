"""The snippet on the page about kernels prints what its comments say."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path


def test_the_snippet_prints_what_it_says():
    """Each line that prints has the printed text behind it."""
    page = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    said = re.findall(r"print\(.*\)  # (.*)$", code, re.M)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert said and printed.getvalue().splitlines() == said
