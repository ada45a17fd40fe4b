"""Programs with dropout in a low dtype: ranks apply the original's masks there too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge.tensor_search import find_nearest_window
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging import net, wrapped
from tests.judging.test_dropout import (
    VARIANTS,
    SmallInputs,
    dropout_rows,
    feed_forward,
    no_dropout,
    other_rate,
    same_loss,
    strided_rows,
    unknown_places,
    unscaled,
)

LOW = ["float32", "bfloat16", "float16"]


def judge_program(
    pool: Pool,
    program: Any,
    dtype: str,
    model: nn.Module | None = None,
    sides: Any = SmallInputs,
    seed: int = 0,
) -> Report:
    """Judge a program on two ranks in a low dtype, and return the report."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"model": model or feed_forward(), "batch": sides.batch, "seed": seed}
    return verify_program(program, loss=sides.loss, ranks=2, dtype=dtype, pool=pool, **options)


RIGHT, WRONG = (strided_rows,), (no_dropout, other_rate, unscaled)


@pytest.mark.parametrize("dtype", LOW)
def test_rows_drop_as_the_original_does(pool: Pool, dtype: str) -> None:
    """DDP of a decoder with dropout passes."""
    report = judge_program(pool, wrapped.ddp, dtype, net.Net(depth=1), net)
    assert report.ok, str(report)
    assert dropout_rows(report) == {"blocks.0.drop": True} and not unknown_places(report)


@pytest.mark.parametrize("way", ["words before rows", "every second row"])
@pytest.mark.parametrize("dtype", LOW)
def test_parts_are_found_in_few_bits(pool: Pool, way: str, dtype: str) -> None:
    """Parts are found for several ways to split a batch."""
    program, model, names = VARIANTS[way]
    torch.manual_seed(0)
    report = judge_program(pool, program, dtype, model())
    assert report.ok, str(report)
    assert dropout_rows(report) == dict.fromkeys(names, True) and not unknown_places(report)


@pytest.mark.parametrize("program", WRONG)
@pytest.mark.parametrize("dtype", LOW)
def test_dropout_that_is_wrong(pool: Pool, program: Any, dtype: str) -> None:
    """A wrong rate, a wrong scale and a missing dropout fail."""
    report = judge_program(pool, program, dtype)
    assert report.exit_code == 1, str(report)
    assert dropout_rows(report) == {"inner.2": program is not no_dropout}


def test_a_place_that_is_not_known_drops_on_neither_side(pool: Pool) -> None:
    """A part that is not known is named."""

    def moved(model: Any) -> TrainingProgram:
        up, act, drop, down = model.inner
        return same_loss(
            model, lambda ids: model.head(down(drop(act(up(model.embed(ids))) * 2) / 2))
        )

    report = judge_program(pool, moved, "bfloat16")
    assert report.ok and not dropout_rows(report) and len(unknown_places(report)) == 1, str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_window_is_found_by_being_nearest(dtype: torch.dtype) -> None:
    """Blocks and strides are found despite rounding; ambiguous or foreign values are not."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    numbers = torch.arange(x.numel()).reshape(x.shape)
    for cut in (
        lambda t: t,
        lambda t: t[2:4, :, 1:2],
        lambda t: t[1::2, 2:],
        lambda t: t[1:6],  # of an uneven split
    ):
        window = find_nearest_window((cut(x) * (1 + 1e-3)).to(dtype), x.to(dtype))
        if dtype == torch.float32:  # where a thousandth is no rounding
            assert window is None
            window = find_nearest_window(cut(x).to(dtype), x.to(dtype))
        assert window is not None
        assert torch.equal(numbers[torch.meshgrid(*window, indexing="ij")], cut(numbers))
    repeated = torch.cat([x[:3], x[:3]]).to(dtype)
    assert find_nearest_window(repeated[:3], repeated) is None
    assert find_nearest_window((x[:3] + 1).to(dtype), x.to(dtype)) is None
