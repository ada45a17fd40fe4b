"""docs/how_it_works.md: its blocks are one program, which is as small as it says, and runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_it_works.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)


def test_the_small_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """From top to bottom: it proves its schedule, refuses three mistakes, and finds a fourth."""
    before, names = torch.get_default_dtype(), {"__name__": "small"}
    try:
        exec(compile("\n".join(BLOCKS), "how_it_works.md", "exec", dont_inherit=True), names)
    finally:
        torch.set_default_dtype(before)
    said = capsys.readouterr().out
    assert "gradient" in said and "without the sum: blocks" in said


def test_it_is_small() -> None:
    """Less than 200 lines, apart from the text and the model, and from what they are put to."""
    assert sum(bool(line.strip()) for block in BLOCKS[1:-1] for line in block.split("\n")) < 200


def test_the_real_ones_are_there() -> None:
    """Each part names the file that does it in earnest."""
    named = re.findall(r"`((?:schedlang|passes|primitives|tests)/[\w/.]*)`", PAGE)
    assert len(named) >= 10
    assert all((ROOT / name).exists() for name in named), named


def test_without_a_part_it_is_another() -> None:
    """The last check of the page fails where the error is not found."""
    names: dict[str, Any] = {"__name__": "small"}
    silent = BLOCKS[-1].replace("(grad, None, None)", "right(ctx, grad)")
    assert silent != BLOCKS[-1]
    before = torch.get_default_dtype()
    try:
        with pytest.raises(AssertionError):
            exec(
                compile(
                    "\n".join([*BLOCKS[:-1], silent]), "how_it_works.md", "exec", dont_inherit=True
                ),
                names,
            )
    finally:
        torch.set_default_dtype(before)
