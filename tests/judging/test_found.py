"""What the page of findings says of torch is what the torch that is installed does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "found.md"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is about 2.13")
def test_a_group_of_one_divides_twice() -> None:
    """The page's program prints what stands below it: 1/4 in float32, 1/16 in float64."""
    text = PAGE.read_text()
    code, said = (re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("python", "text"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == said
