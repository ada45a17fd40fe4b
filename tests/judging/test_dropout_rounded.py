"""Programs with dropout in a low dtype: ranks drop by the original's masks there too."""

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
    WAYS,
    Sides,
    another_rate,
    drops,
    every_second_row,
    feed_forward,
    forgotten,
    told,
    unknown,
    unscaled,
)

LOW = ["float32", "bfloat16", "float16"]


def judged(
    pool: Pool,
    program: Any,
    dtype: str,
    model: nn.Module | None = None,
    sides: Any = Sides,
    seed: int = 0,
) -> Report:
    """The report on a program of two ranks in a low dtype."""
    torch.manual_seed(seed)
    given: dict[str, Any] = {"model": model or feed_forward(), "batch": sides.batch, "seed": seed}
    return verify_program(program, loss=sides.loss, ranks=2, dtype=dtype, pool=pool, **given)


RIGHT, WRONG = (every_second_row,), (forgotten, another_rate, unscaled)


@pytest.mark.parametrize("dtype", LOW)
def test_rows_drop_as_the_original_does(pool: Pool, dtype: str) -> None:
    """A decoder's dropout, of which each rank has its rows."""
    report = judged(pool, wrapped.ddp, dtype, net.Net(depth=1), net)
    assert report.ok, str(report)
    assert drops(report) == {"blocks.0.drop": True} and not unknown(report)


@pytest.mark.parametrize("way", ["words before rows", "every second row"])
@pytest.mark.parametrize("dtype", LOW)
def test_parts_are_found_in_few_bits(pool: Pool, way: str, dtype: str) -> None:
    """However a batch is laid and cut."""
    program, model, names = WAYS[way]
    torch.manual_seed(0)
    report = judged(pool, program, dtype, model())
    assert report.ok, str(report)
    assert drops(report) == dict.fromkeys(names, True) and not unknown(report)


@pytest.mark.parametrize("program", WRONG)
@pytest.mark.parametrize("dtype", LOW)
def test_dropout_that_is_wrong(pool: Pool, program: Any, dtype: str) -> None:
    """A rate, a scale, a dropout that is missing: each fails."""
    report = judged(pool, program, dtype)
    assert report.exit_code == 1, str(report)
    assert drops(report) == {"inner.2": program is not forgotten}


def test_a_place_that_is_not_known_drops_on_neither_side(pool: Pool) -> None:
    """And is named."""

    def moved(model: Any) -> TrainingProgram:
        up, act, drop, down = model.inner
        return told(model, lambda ids: model.head(down(drop(act(up(model.embed(ids))) * 2) / 2)))

    report = judged(pool, moved, "bfloat16")
    assert report.ok and not drops(report) and len(unknown(report)) == 1, str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_window_is_found_by_being_nearest(dtype: torch.dtype) -> None:
    """Blocks and strides are found but for roundings; what is there twice, or nowhere, is not."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    numbers = torch.arange(x.numel()).reshape(x.shape)
    for cut in (
        lambda t: t,
        lambda t: t[2:4, :, 1:2],
        lambda t: t[1::2, 2:],
        lambda t: t[1:6],  # of an uneven split
    ):
        found = find_nearest_window((cut(x) * (1 + 1e-3)).to(dtype), x.to(dtype))
        if dtype == torch.float32:  # where a thousandth is no rounding
            assert found is None
            found = find_nearest_window(cut(x).to(dtype), x.to(dtype))
        assert found is not None
        assert torch.equal(numbers[torch.meshgrid(*found, indexing="ij")], cut(numbers))
    twice = torch.cat([x[:3], x[:3]]).to(dtype)
    assert find_nearest_window(twice[:3], twice) is None
    assert find_nearest_window((x[:3] + 1).to(dtype), x.to(dtype)) is None
