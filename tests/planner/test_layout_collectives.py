"""Collectives of layouts: what the solver counts is what the rows that it writes send."""

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
from tests.planner.test_operators import SlowCompute, schedule_text, t5, trial_of
from tests.proofs import make_plan

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SCALARS = ("loss and gradient norm", "experts")  # a few numbers, in every layout of its kind


@dataclass(frozen=True)
class OneCollective:
    """A cost model that counts one collective: its bytes, or its calls if `often`."""

    op: str
    often: bool

    def operator_seconds(self, kind: Kind, flops: float, moved: float) -> float:
        return 0.0

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int) -> float:
        return (op == self.op) * (1.0 if self.often else size)


def solver_collectives(layout: AxisLayout) -> dict[str, tuple[float, float]]:
    """Return the solver's collectives of one step: calls and bytes of each."""
    collectives = {}
    for op in OPS:
        costs = (
            replace(layout.placed.asked, costs=OneCollective(op, counts_calls))
            for counts_calls in (True, False)
        )
        problems = (AxisPlacement(layout.placed.graph, request).problem for request in costs)
        counts_calls, size = (problem.cost(layout.solution.choice)[0] for problem in problems)
        if size:
            collectives[op] = counts_calls, size
    return collectives


def plan_collectives(model: Any, rows: str) -> tuple[dict[str, tuple[int, int]], Counter[str]]:
    """Return calls and bytes of the plan's collectives, without those of scalars."""
    times: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for collective in account(make_plan(model, rows, "tp=2"), models.tokens(8)).collectives or ():
        if collective.what not in SCALARS:
            op = collective.kind.replace("-", "_")
            times[op] += collective.count
            size[op] += collective.total
    return times, size


TENSORS = {"tokens": False}
CASES = [
    (models.llama, TENSORS),
    (models.llama, {"costs": SlowCompute(8.0)}),  # so slow that sequences are split
    (models.llama, {"mode": "rows", "zero": 3}),
    (models.gpt2, {"mode": "rows"}),
    (lambda: small_models.mixtral(2), {"mode": "rows", "zero": 1}),
    pytest.param(models.gpt2, TENSORS, marks=pytest.mark.deep),
    pytest.param(t5, TENSORS, marks=pytest.mark.deep),
]


@pytest.mark.parametrize("make, asked", CASES)
def test_the_solver_counts_what_its_rows_send(make: Any, asked: dict[str, Any]) -> None:
    """Bytes agree up to padding; calls agree where parameters are not sent one by one."""
    model, asked = make(), dict(asked)
    trial = trial_of(model, models.tokens(8))
    layout = find_axis_layout(
        trial,
        build_graph(trial),
        "tp",
        LayoutRequest(2, asked.pop("costs", SlowCompute()), **asked),
    )
    assert layout is not None
    expected, (times, size) = (
        solver_collectives(layout),
        plan_collectives(model, schedule_text(trial, layout)),
    )
    assert set(expected) == set(size)
    for op, (calls, total) in expected.items():
        assert total == pytest.approx(size[op], rel=0.01), op
        assert calls == pytest.approx(times[op], abs=2), op
