"""Messages of layouts: what the solver has counted is what the rows that it writes send."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from schedlang.passes.planner.operators.layout_requests import LayoutRequest
from schedlang.passes.planner.operators.layout_rows import AxisLayout, find_axis_layout
from schedlang.passes.planner.operators.operator_graph import build_graph
from schedlang.passes.planner.operators.placements import AxisPlacement
from schedlang.passes.planner.values import Kind
from schedlang.passes.simulate.account import account
from tests import models, small_models
from tests.planner.test_operators import Slow, schedule, t5, trial_of
from tests.proofs import planned

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SCALARS = ("loss and gradient norm", "experts")  # a few numbers, in every layout of its kind


@dataclass(frozen=True)
class Only:
    """Costs that are bytes of one collective, or how often it is sent."""

    op: str
    often: bool

    def operator_seconds(self, kind: Kind, flops: float, moved: float) -> float:
        return 0.0

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int) -> float:
        return (op == self.op) * (1.0 if self.often else size)


def counted(one: AxisLayout) -> dict[str, tuple[float, float]]:
    """The solver's collectives of one step: how often, and bytes."""
    found = {}
    for op in OPS:
        costs = (replace(one.placed.asked, costs=Only(op, often)) for often in (True, False))
        problems = (AxisPlacement(one.placed.graph, asked).problem for asked in costs)
        often, size = (problem.cost(one.solution.choice)[0] for problem in problems)
        if size:
            found[op] = often, size
    return found


def sent(model: Any, rows: str) -> tuple[dict[str, tuple[int, int]], Counter[str]]:
    """The collectives of the plan of these rows but those of single numbers."""
    times: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for one in account(planned(model, rows, "tp=2"), models.tokens(8)).collectives or ():
        if one.what not in SCALARS:
            op = one.kind.replace("-", "_")
            times[op] += one.count
            size[op] += one.total
    return times, size


TENSORS = {"tokens": False}
CASES = [
    (models.llama, TENSORS),
    (models.llama, {"costs": Slow(8.0)}),  # sequences are split
    (models.llama, {"mode": "rows", "zero": 3}),
    (models.gpt2, {"mode": "rows"}),
    (lambda: small_models.mixtral(2), {"mode": "rows", "zero": 1}),
    pytest.param(models.gpt2, TENSORS, marks=pytest.mark.deep),
    pytest.param(t5, TENSORS, marks=pytest.mark.deep),
]


@pytest.mark.parametrize("make, asked", CASES)
def test_the_solver_counts_what_its_rows_send(make: Any, asked: dict[str, Any]) -> None:
    """Bytes but for padding; and how often, where single parameters are not sent for themselves."""
    model, asked = make(), dict(asked)
    trial = trial_of(model, models.tokens(8))
    one = find_axis_layout(
        trial, build_graph(trial), "tp", LayoutRequest(2, asked.pop("costs", Slow()), **asked)
    )
    assert one is not None
    told, (times, size) = counted(one), sent(model, schedule(trial, one))
    assert set(told) == set(size)
    for op, (often, total) in told.items():
        assert total == pytest.approx(size[op], rel=0.01), op
        assert often == pytest.approx(times[op], abs=2), op
