"""Every kernel compiled for an H200 without one: what its machine code uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MADE = {"rms_norm": 20, "layer_norm": 10, "gated": 20, "cross_entropy": 8, "rowwise": 48}


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
        assert row["stack"] == row["spills"] == 0, row
        assert row["registers"] * 32 * row["warps"] <= 65536, row
        assert row["shared"] <= 232448, row
        # numbers of a row are loaded one by one
        assert row["wide_loads"] >= row["loads"] - LONE[kernel], row


LONE = {"rms_norm": 2, "layer_norm": 4, "gated": 0, "cross_entropy": 6, "rowwise": 2}
