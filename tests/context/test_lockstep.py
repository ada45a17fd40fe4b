"""Lockstep: functions that run in turns each have their own default dtype."""

from __future__ import annotations

import torch

from schedlang.runtime.context_parallel.probe import Lockstep
from schedlang.runtime.float64 import Float64


def test_the_default_dtype_is_each_functions_own() -> None:
    """A function in float64 and a plain one in turns each see their own default dtype."""
    together = Lockstep(2)

    def wide() -> list[torch.dtype]:
        with Float64():
            together.rendezvous(0, None)
            return [torch.ones(1).dtype]

    def plain() -> list[torch.dtype]:
        dtypes = [torch.ones(1).dtype]
        together.rendezvous(1, None)
        return [*dtypes, torch.ones(1).dtype]

    assert together.run([wide, plain]) == [[torch.float64], [torch.float32] * 2]
    assert torch.get_default_dtype() == torch.float32


def test_two_in_float64_leave_nothing() -> None:
    """Both enter before either leaves."""
    together = Lockstep(2)

    def wide(index: int) -> torch.dtype:
        with Float64():
            together.rendezvous(index, None)
            return torch.ones(1).dtype

    dtypes = together.run([lambda: wide(0), lambda: wide(1)])
    assert dtypes == [torch.float64] * 2 and torch.get_default_dtype() == torch.float32
