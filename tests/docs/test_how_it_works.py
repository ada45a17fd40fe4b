"""docs/how_it_works.md: its code blocks are one small program that runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_it_works.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)


def test_the_small_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The program proves its schedule, refuses three mistakes, and detects a fourth."""
    dtype, names = torch.get_default_dtype(), {"__name__": "small"}
    try:
        exec(compile("\n".join(BLOCKS), "how_it_works.md", "exec", dont_inherit=True), names)
    finally:
        torch.set_default_dtype(dtype)
    output = capsys.readouterr().out
    assert "gradient" in output and "without the sum: blocks" in output


def test_it_is_small() -> None:
    """It has less than 200 lines, without the model, its schedule text and the final checks."""
    assert sum(bool(line.strip()) for block in BLOCKS[1:-1] for line in block.split("\n")) < 200


def test_the_real_ones_are_there() -> None:
    """Each part names the existing file that does the same in the library."""
    paths = re.findall(r"`((?:schedlang|passes|primitives|tests)/[\w/.]*)`", PAGE)
    assert len(paths) >= 10
    assert all((ROOT / name).exists() for name in paths), paths


def test_without_a_part_it_is_another() -> None:
    """The page's last check fails if its planted error is removed."""
    names: dict[str, Any] = {"__name__": "small"}
    broken = BLOCKS[-1].replace("(grad, None, None)", "right(ctx, grad)")
    assert broken != BLOCKS[-1]
    dtype = torch.get_default_dtype()
    try:
        with pytest.raises(AssertionError):
            exec(
                compile(
                    "\n".join([*BLOCKS[:-1], broken]), "how_it_works.md", "exec", dont_inherit=True
                ),
                names,
            )
    finally:
        torch.set_default_dtype(dtype)
