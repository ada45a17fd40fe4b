"""Every kernel compiled for an H200 without one: what its machine code uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {
    "rms_norm": 20,
    "layer_norm": 10,
    "gated": 24,
    "cross_entropy": 8,
    "add_norm": 24,
    "rope": 12,
    "rowwise": 48,
    "gated_norm": 20,
}


@pytest.mark.deep
@pytest.mark.parametrize("kernel", MADE)
def test_compiles_for_hopper(kernel):
    """On sm_90: no stack, no spills, registers and shared memory that fit, 128-bit loads."""
    pytest.importorskip("triton")
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    environment.pop("TRITON_INTERPRET", None)
    script = [sys.executable, str(ROOT / "tests" / "sm90.py"), kernel]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == MADE[kernel]
    for row in rows:
        assert row["narrow"] == 0, row  # no product in 32 bits reaches an address
        assert row["stack"] == row["spills"] == 0, row
        assert row["registers"] * 32 * row["warps"] <= 65536, row
        assert row["shared"] <= 232448, row
        # numbers of a row are loaded one by one
        assert row["wide_loads"] >= row["loads"] - LONE[kernel], row


# the angles of a token are loaded by all threads, few at a time
LONE = {
    "rms_norm": 2,
    "layer_norm": 4,
    "gated": 0,
    "cross_entropy": 6,
    "add_norm": 4,
    "rope": 16,
    "rowwise": 2,
    "gated_norm": 2,
}
NAIVE = """
    %row = tt.get_program_id x : i32 loc(#loc1)
    %start = arith.muli %row, %stride : i32 loc(#loc2)
    %wider = arith.extsi %start : i32 to i64 loc(#loc3)
    %place = tt.addptr %x, %wider : !tt.ptr<f32>, i64 loc(#loc4)
"""


def test_the_lint_of_addresses():
    """A product in 32 bits is found, also where it is made wider too late; in 64 bits it is not."""
    pytest.importorskip("triton")
    from tests.sm90 import narrow

    assert len(narrow(NAIVE)) == 1
    first = NAIVE.replace("muli %row, %stride : i32", "muli %far, %stride : i64")
    first = first.replace("%start = ", "%far = arith.extsi %row : i32 to i64\n    %start = ", 1)
    assert narrow(first) == []
