"""The cache of meta results: equal results without another run, and no shared memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from schedlang.ir.plan import Plan
from schedlang.passes.simulate.account import account
from schedlang.runtime.tracing.meta_runs import ResultCache, on_meta
from tests import models
from tests.proofs import make_plan

ATEN = torch.ops.aten
CUT = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
ROWS = f"transformer.h.*  checkpoint()\n{CUT}"


def meta_tensor(*shape: int, dtype: Any = torch.float32) -> Tensor:
    """A tensor without values."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def run_counted(cache: ResultCache, func: Any, *args: Any) -> tuple[Any, int]:
    """The cached result of a call, and how often the operator ran for it."""
    times, call = 0, OpOverload.__call__

    def counted(self: OpOverload, /, *call_args: Any, **call_kwargs: Any) -> Any:
        nonlocal times
        times += self is func
        return call(self, *call_args, **call_kwargs)

    with mock.patch.object(OpOverload, "__call__", counted):
        return cache.run(func, args, {}), times


def test_equal_tensors_are_worked_out_once() -> None:
    """A second call runs nothing, and returns a new tensor of equal shape, strides and dtype."""
    cache, turned = ResultCache(), meta_tensor(4, 6).t()
    first_result, first_runs = run_counted(cache, ATEN.add.Tensor, turned, turned)
    second_result, second_runs = run_counted(cache, ATEN.add.Tensor, meta_tensor(4, 6).t(), turned)
    assert (first_runs, second_runs) == (1, 0)
    assert (second_result.shape, second_result.stride(), second_result.dtype) == (
        first_result.shape,
        (1, 6),
        torch.float32,
    )
    assert second_result.untyped_storage()._cdata != first_result.untyped_storage()._cdata
    first_norm = run_counted(
        cache, ATEN.native_layer_norm.default, meta_tensor(4, 6), [6], None, None, 1e-5
    )
    second_norm = run_counted(
        cache, ATEN.native_layer_norm.default, meta_tensor(4, 6), [6], None, None, 1e-5
    )
    assert (
        first_norm[1] == 1
        and second_norm[1] == 0
        and [t.shape for t in second_norm[0]] == [t.shape for t in first_norm[0]]
    )


@pytest.mark.parametrize(
    "func, args",
    [
        (ATEN.view.default, lambda: (meta_tensor(4, 6), [24])),
        (ATEN._unsafe_view.default, lambda: (meta_tensor(4, 6), [24])),
        (ATEN.add_.Tensor, lambda: (meta_tensor(4), meta_tensor(4))),
        (ATEN.bernoulli.default, lambda: (meta_tensor(4),)),
        (ATEN.add.Tensor, lambda: (meta_tensor(4), torch.ones(()))),
    ],
)
def test_what_shares_memory_writes_or_draws_runs_each_time(func: Any, args: Any) -> None:
    """Views (also undeclared ones), writes, random results and real values are not cached."""
    cache = ResultCache()
    assert [run_counted(cache, func, *args())[1] for _ in range(2)] == [1, 1]


def test_numbers_of_other_types_are_other_arguments() -> None:
    """1, 1.0 and True are equal in Python, and promote to different dtypes."""
    cache, ints = ResultCache(), meta_tensor(4, dtype=torch.int64)
    dtypes = [
        run_counted(cache, ATEN.mul.Scalar, ints, number)[0].dtype for number in (1, 1.0, True)
    ]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_is_an_argument() -> None:
    """Integers are promoted to it: one cache serves runs in float32 and float64."""
    cache, ints, dtypes = ResultCache(), meta_tensor(4, dtype=torch.int64), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            dtypes.append(run_counted(cache, ATEN.div.Tensor, ints, ints)[0].dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert dtypes == [torch.float32, torch.float64]


def test_a_memo_holds_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full cache is emptied; results do not change."""
    monkeypatch.setattr("schedlang.runtime.tracing.meta_runs.MAX_RESULTS", 3)
    cache = ResultCache()
    for size in (1, 2, 3, 4, 1):
        result, times = run_counted(cache, ATEN.neg.default, meta_tensor(size))
        assert (tuple(result.shape), times) == ((size,), 1) and len(cache._known) <= 3
    assert run_counted(cache, ATEN.neg.default, meta_tensor(4))[1] == 0


def test_an_operator_of_a_user_is_remembered_within_a_run() -> None:
    """A custom operator with a new fake has the new shape in the next run."""

    @torch.library.custom_op("schedlang_memo::grown", mutates_args=())
    def grown(x: Tensor) -> Tensor:
        return x.clone()

    shapes = []
    for extra in (0, 1):
        grown.register_fake(lambda x, extra=extra: x.new_empty(x.shape[0] + extra))
        with on_meta((), ()):
            shapes.append(tuple(grown(meta_tensor(4)).shape))
    assert shapes == [(4,), (5,)]


def _plan() -> Plan:
    model: nn.Module = models.gpt2(4)
    return make_plan(model, ROWS, "pp=2")


@pytest.mark.deep
def test_a_plan_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures of a plan, with its memory curve, equal those without the cache."""
    expected = account(_plan(), models.tokens(rows=4), memory=True).to_json()
    assert expected["memory"], expected["notes"]
    run_uncached = lambda self, func, args, kwargs: func(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(ResultCache, "run", run_uncached)
    assert account(_plan(), models.tokens(rows=4), memory=True).to_json() == expected


def test_a_mode_below_sees_operators() -> None:
    """In nested modes that record values both know the values of results."""
    with on_meta((), ()) as outer, on_meta((), ()) as inner:
        for _ in range(3):
            tensor = torch.arange(8, device="meta") + 5
            for mode in (inner, outer):
                recorded = mode.constants.values_of(tensor)
                assert recorded is not None and recorded.tolist() == list(range(5, 13))
