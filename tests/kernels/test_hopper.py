"""Every kernel compiled for an H200 without a GPU: registers, spills, loads, addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIANTS = {
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
@pytest.mark.parametrize("kernel", VARIANTS)
def test_compiles_for_hopper(kernel):
    """On sm_90: no stack, no spills, registers and shared memory that fit, 128-bit loads."""
    pytest.importorskip("triton")
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    environment.pop("TRITON_INTERPRET", None)
    script = [sys.executable, str(ROOT / "tests" / "sm90.py"), kernel]
    result = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert len(rows) == VARIANTS[kernel]
    for row in rows:
        assert row["narrow"] == 0, row  # no 32-bit product reaches an address
        assert row["stack"] == row["spills"] == 0, row
        assert row["registers"] * 32 * row["warps"] <= 65536, row
        assert row["shared"] <= 232448, row
        # numbers of a row are loaded one by one
        assert row["wide_loads"] >= row["loads"] - SCALAR_LOADS[kernel], row


# the angles of a token are loaded by all threads, a few at a time
SCALAR_LOADS = {
    "rms_norm": 2,
    "layer_norm": 4,
    "gated": 0,
    "cross_entropy": 6,
    "add_norm": 4,
    "rope": 16,
    "rowwise": 2,
    "gated_norm": 2,
}
NAIVE_ADDRESSES = """
    %row = tt.get_program_id x : i32 loc(#loc1)
    %start = arith.muli %row, %stride : i32 loc(#loc2)
    %wider = arith.extsi %start : i32 to i64 loc(#loc3)
    %place = tt.addptr %x, %wider : !tt.ptr<f32>, i64 loc(#loc4)
"""


def test_the_lint_of_addresses():
    """A 32-bit product in an address is found, even if widened later; a 64-bit one passes."""
    pytest.importorskip("triton")
    from tests.sm90 import narrow_products

    assert len(narrow_products(NAIVE_ADDRESSES)) == 1
    widened_first = NAIVE_ADDRESSES.replace("muli %row, %stride : i32", "muli %far, %stride : i64")
    widened_first = widened_first.replace(
        "%start = ", "%far = arith.extsi %row : i32 to i64\n    %start = ", 1
    )
    assert narrow_products(widened_first) == []
