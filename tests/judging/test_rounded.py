"""Programs that are judged in a low dtype: right ones pass, mistakes fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import Pool
from tests.judging import by_hand, net, wrapped


def only_low(model: nn.Module) -> TrainingProgram:
    """Right, but no program for float64: its library has kernels for others alone."""
    if next(model.parameters()).dtype == torch.float64:
        raise ValueError("no kernel for float64")
    return wrapped.ddp(model)


def scaled(model: nn.Module) -> TrainingProgram:
    """Wrong: gradients are a tenth too large."""
    made = wrapped.ddp(model)

    def step(batch: Any) -> Any:
        found = made.step(batch)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1.1)
        return found

    return TrainingProgram(made.module, step)


def judged(pool: Pool, program: Any, dtype: str, ranks: int = 2, **model: Any) -> Any:
    """The report on a program of the small decoder."""
    torch.manual_seed(0)
    original: nn.Module = net.Net(**model)
    return verify_program(
        program,
        model=original,
        batch=net.batch,
        loss=net.loss,
        ranks=ranks,
        dtype=dtype,
        pool=pool,
    )


RIGHT = [
    (only_low, 2, "bfloat16", {}),
    (only_low, 2, "float32", {}),
    (only_low, 2, "float16", {}),
    (only_low, 2, "bfloat16", {"tied": True}),
    (wrapped.fsdp2, 4, "bfloat16", {}),
    (wrapped.tp, 2, "bfloat16", {}),
    (wrapped.zero1, 2, "float32", {}),
]
WRONG = [
    (wrapped.ddp_unsynced, 2, "bfloat16", {}),
    (by_hand.unreduced, 2, "float32", {}),
    (wrapped.ddp_twice, 2, "bfloat16", {}),
    (wrapped.ddp_mean, 2, "float32", {}),
    (scaled, 2, "bfloat16", {}),
    (scaled, 2, "float32", {}),
    (wrapped.ddp_other_start, 2, "bfloat16", {}),
]


def _named(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("program, ranks, dtype, model", RIGHT, ids=_named)
def test_a_right_program_passes(
    pool: Pool, program: Any, ranks: int, dtype: str, model: Any
) -> None:
    """Loss, outputs, gradients and parameters are as near as roundings of the original."""
    report = judged(pool, program, dtype, ranks, **model)
    assert report.ok, str(report)
    assert dict(report.facts)["dtype"] == dtype
    kinds = {row.kind for row in report.rows}
    assert kinds >= {f"{k} in working dtype" for k in ("loss", "gradients", "parameters")}, kinds


@pytest.mark.parametrize("program, ranks, dtype, model", WRONG, ids=_named)
def test_a_wrong_program_fails(
    pool: Pool, program: Any, ranks: int, dtype: str, model: Any
) -> None:
    """What no rounding explains is found."""
    report = judged(pool, program, dtype, ranks, **model)
    assert report.exit_code == 1, str(report)


def test_a_dtype_that_is_none(pool: Pool) -> None:
    """It is refused, with those that there are."""
    with pytest.raises(Refusal, match="S704"):
        judged(pool, wrapped.ddp, "float7")
