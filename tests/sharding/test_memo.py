"""Shapes that were worked out before: the same results, and nothing that shares memory."""

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
from tests.proofs import planned

ATEN = torch.ops.aten
CUT = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
ROWS = f"transformer.h.*  checkpoint()\n{CUT}"


def meta(*shape: int, dtype: Any = torch.float32) -> Tensor:
    """A tensor without values."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def ran(memo: ResultCache, func: Any, *args: Any) -> tuple[Any, int]:
    """What the memo gives for a call, and how often the operator really ran for it."""
    times, call = 0, OpOverload.__call__

    def counted(self: OpOverload, /, *given: Any, **more: Any) -> Any:
        nonlocal times
        times += self is func
        return call(self, *given, **more)

    with mock.patch.object(OpOverload, "__call__", counted):
        return memo.run(func, args, {}), times


def test_equal_tensors_are_worked_out_once() -> None:
    """A second call runs nothing, and gives new memory of the same shape, strides and dtype."""
    memo, turned = ResultCache(), meta(4, 6).t()
    first, once = ran(memo, ATEN.add.Tensor, turned, turned)
    second, again = ran(memo, ATEN.add.Tensor, meta(4, 6).t(), turned)
    assert (once, again) == (1, 0)
    assert (second.shape, second.stride(), second.dtype) == (first.shape, (1, 6), torch.float32)
    assert second.untyped_storage()._cdata != first.untyped_storage()._cdata
    norm = ran(memo, ATEN.native_layer_norm.default, meta(4, 6), [6], None, None, 1e-5)
    more = ran(memo, ATEN.native_layer_norm.default, meta(4, 6), [6], None, None, 1e-5)
    assert (
        norm[1] == 1 and more[1] == 0 and [t.shape for t in more[0]] == [t.shape for t in norm[0]]
    )


@pytest.mark.parametrize(
    "func, args",
    [
        (ATEN.view.default, lambda: (meta(4, 6), [24])),
        (ATEN._unsafe_view.default, lambda: (meta(4, 6), [24])),
        (ATEN.add_.Tensor, lambda: (meta(4), meta(4))),
        (ATEN.bernoulli.default, lambda: (meta(4),)),
        (ATEN.add.Tensor, lambda: (meta(4), torch.ones(()))),
    ],
)
def test_what_shares_memory_writes_or_draws_runs_each_time(func: Any, args: Any) -> None:
    """Views (also one that does not say so), writes, draws and real values are not remembered."""
    memo = ResultCache()
    assert [ran(memo, func, *args())[1] for _ in range(2)] == [1, 1]


def test_numbers_of_other_types_are_other_arguments() -> None:
    """1, 1.0 and True are equal in Python, and promote to different dtypes."""
    memo, ints = ResultCache(), meta(4, dtype=torch.int64)
    found = [ran(memo, ATEN.mul.Scalar, ints, one)[0].dtype for one in (1, 1.0, True)]
    assert found == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_is_an_argument() -> None:
    """Integers are promoted to it: one memo serves a run in float32 and one in float64."""
    memo, ints, found = ResultCache(), meta(4, dtype=torch.int64), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(ran(memo, ATEN.div.Tensor, ints, ints)[0].dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]


def test_a_memo_holds_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is emptied when it is full, and gives what it gave."""
    monkeypatch.setattr("schedlang.runtime.tracing.meta_runs.MAX_RESULTS", 3)
    memo = ResultCache()
    for size in (1, 2, 3, 4, 1):
        found, times = ran(memo, ATEN.neg.default, meta(size))
        assert (tuple(found.shape), times) == ((size,), 1) and len(memo._known) <= 3
    assert ran(memo, ATEN.neg.default, meta(4))[1] == 0


def test_an_operator_of_a_user_is_remembered_within_a_run() -> None:
    """Told another shape, it has that shape in the next run."""

    @torch.library.custom_op("schedlang_memo::grown", mutates_args=())
    def grown(x: Tensor) -> Tensor:
        return x.clone()

    found = []
    for extra in (0, 1):
        grown.register_fake(lambda x, extra=extra: x.new_empty(x.shape[0] + extra))
        with on_meta((), ()):
            found.append(tuple(grown(meta(4)).shape))
    assert found == [(4,), (5,)]


def _plan() -> Plan:
    model: nn.Module = models.gpt2(4)
    return planned(model, ROWS, "pp=2")


@pytest.mark.deep
def test_a_plan_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure, with the curve of memory, is that of a run without it."""
    told = account(_plan(), models.tokens(rows=4), memory=True).to_json()
    assert told["memory"], told["notes"]
    run = lambda self, func, args, kwargs: func(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(ResultCache, "run", run)
    assert account(_plan(), models.tokens(rows=4), memory=True).to_json() == told


def test_a_mode_below_sees_operators() -> None:
    """Where two record values, both know those that the operators give, and never bare memory."""
    with on_meta((), ()) as below, on_meta((), ()) as above:
        for _ in range(3):
            made = torch.arange(8, device="meta") + 5
            for one in (above, below):
                known = one.constants.values_of(made)
                assert known is not None and known.tolist() == list(range(5, 13))
