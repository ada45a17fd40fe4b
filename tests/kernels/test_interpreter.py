"""Triton's interpreter, once patched: its bfloat16 equals torch's, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = '''
"""Kernels over bfloat16 in the interpreter, compared with torch."""
import sys
import torch, triton
import triton.language as tl

if sys.argv[1] == "patched":
    from schedlang.kernels.interpreter import patch_interpreter
    patch_interpreter()
    patch_interpreter()

@triton.jit
def arithmetic(a, b, out, size: tl.constexpr):
    i = tl.arange(0, size)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x * y)
    tl.store(out + size + i, x + y)
    tl.store(out + 2 * size + i, x - y)
    tl.store(out + 3 * size + i, tl.where(x > y, x, -y))
    tl.store(out + 4 * size + i, (x.to(tl.float32) * y.to(tl.float32) + 0.1).to(tl.bfloat16))
    tl.store(out + 5 * size + i, tl.abs(x))
    tl.store(out + 6 * size + i, tl.maximum(x, y))

@triton.jit
def product(a, b, out, n: tl.constexpr):
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def reduce(a, out, n: tl.constexpr):
    x = tl.load(a + tl.arange(0, n))
    tl.store(out, tl.sum(x, 0))
    tl.store(out + 1, tl.max(x, 0))

@triton.jit
def count(out, times):
    for place in range(times):
        tl.store(out + place, place)

numbers = torch.full((4,), -1)
count[(1,)](numbers, 3)
assert numbers.tolist() == [0, 1, 2, -1], numbers
torch.manual_seed(0)
n = 64
a, b = torch.randn(2, n).bfloat16()
a[0], a[1], b[2] = float("inf"), float("nan"), 3e38
out = torch.zeros(7, n, dtype=torch.bfloat16)
arithmetic[(1,)](a, b, out, n)
mixed = (a.float() * b.float() + 0.1).bfloat16()
want = torch.stack([a * b, a + b, a - b, torch.where(a > b, a, -b), mixed, a.abs(), out[6]])
want[6] = torch.where(a.isnan(), out[6], torch.maximum(a, b))
same = (out == want) | (out.isnan() & want.isnan())
assert same.all(), [(i, int((~row).sum())) for i, row in enumerate(same)]
m, k = torch.randn(2, 16, 16).bfloat16()
got = torch.zeros(16, 16)
product[(1,)](m, k, got, 16)
torch.testing.assert_close(got, m.float() @ k.float(), rtol=1e-5, atol=1e-5)
v = -torch.rand(n).bfloat16() - 1
r = torch.zeros(2, dtype=torch.bfloat16)
reduce[(1,)](v, r, n)
torch.testing.assert_close(r, torch.stack([v.float().sum().bfloat16(), v.max()]), rtol=0, atol=0)
print("equal")
'''


def run(tmp_path, mode: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    environment = dict(os.environ, PYTHONPATH=root, TRITON_INTERPRET="1")
    command = [sys.executable, str(file), mode]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_patched_interpreter_computes_bfloat16(tmp_path):
    """Arithmetic, casts, comparison, products and reductions equal torch's; a loop's length may be
    an argument."""
    result = run(tmp_path, "patched")
    assert result.stdout == "equal\n", result.stderr


def test_plain_interpreter_does_not(tmp_path):
    """Without the patch the same program fails: once it passes, the patch can go."""
    assert run(tmp_path, "plain").returncode != 0


def test_rounding_is_torch_s():
    """Every kind of float32 rounds to torch's bfloat16; widening is exact."""
    from schedlang.kernels.interpreter import bfloat16_to_float32, float32_to_bfloat16

    bits = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(0))
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, 3.4e38, 1e-45]
    values = torch.cat([bits.int().view(torch.float32), torch.tensor(special)])
    actual = torch.from_numpy(bfloat16_to_float32(float32_to_bfloat16(values.numpy())))
    expected = values.bfloat16().float()
    assert ((actual == expected) | (actual.isnan() & expected.isnan())).all()
