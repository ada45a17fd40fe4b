"""A model cut into stages that all run in this process, compared with the model as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from schedlang.passes.partition import stage_assignment as cuts
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.table import Op, Timeline, timeline_from_rows
from schedlang.runtime.batch import loss_of
from schedlang.runtime.float64 import Float64
from schedlang.runtime.pipeline.executor import Pipeline
from schedlang.runtime.pipeline.stage import Stage, Stub
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.stage_graph import StageSplit, split_graph
from schedlang.runtime.tracing.units import CallSwitch, is_in_trunk, units_of

GATE = 1e-9


class Compared(NamedTuple):
    """Relative error of the loss, the largest of a gradient, and the gradient that has it."""

    loss: float
    worst: float
    at: str

    @property
    def ok(self) -> bool:
        """Both are rounding in float64."""
        return self.loss <= GATE and self.worst <= GATE


def cut_evenly(
    model: nn.Module,
    batch: Mapping[str, Any],
    stages: int,
    trunks: Sequence[str] = (),
    unrolled: Mapping[str, int] | None = None,
    loss: Any = None,
) -> StageSplit:
    """The model in stages of equally many trunk units, from a record on the meta device."""
    unrolled = unrolled or {}
    names = units_of(model, batch, trunks=trunks, unrolled=unrolled)
    graph = record_forward(model, names, batch, loss=loss)
    inside = is_in_trunk(model, names, trunks, unrolled)
    units = [cuts.ChainUnit(n, 0, t) for n, t in zip(graph.labels, inside)]
    return split_graph(graph, cuts.even_stages(units, stages))


def on_one_rank(plan: Timeline) -> Timeline:
    """The same rows on one rank, in an order that all dependencies allow."""
    rows = sorted((op for r in range(plan.ranks) for op in plan.rows(r)), key=_turn)
    return timeline_from_rows([rows], plan.edges)


def _turn(op: Op) -> tuple[int, int, int]:
    back = op.kind.name != "F"
    return (op.microbatch, back, -op.stage if back else op.stage)


def in_stages(
    model: nn.Module, made: StageSplit, batches: Sequence[Mapping[str, Any]], loss: Any = None
) -> list[Any]:
    """Run every stage of a cut, one microbatch after the other; gradients are in the model."""
    switch, stub = CallSwitch(model, made.graph.units), Stub(meta_model(model, {}), made)
    stages = {
        s: Stage(model, made, s, switch=switch, stub=stub, loss=loss) for s in range(made.stages)
    }
    plan = on_one_rank(make_order("GPipe", made.stages, len(batches)))
    try:
        results = Pipeline(stages, plan, dict.fromkeys(stages, 0)).run(batches)
    finally:
        switch.remove()
    return list(results.values())


def compared(
    model: nn.Module, made: StageSplit, batch: Mapping[str, Any], loss: Any = None
) -> Compared:
    """The stages beside the whole: loss, and every gradient, also which parameters have one."""
    with Float64():
        output = model(**batch)
        value = loss_of(output, batch, loss)
        assert value is not None
        value.backward()
        wanted = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        (result,) = in_stages(model, made, [batch], loss)
    largest = max(float(g.norm()) for g in wanted.values() if g is not None)
    worst, at = 0.0, ""
    for name, parameter in model.named_parameters():
        got, grad = parameter.grad, wanted[name]
        if grad is None or got is None:
            gone = grad if grad is not None else got
            error = float("inf") if gone is not None and gone.any() else 0.0
        else:
            floor = 1e-12 * largest
            error = max(0.0, float((got - grad).norm()) - floor) / (float(grad.norm()) + 1e-300)
        if not error <= worst:
            worst, at = error, name
    model.zero_grad()
    off = abs(float(result.loss - value.detach())) / abs(float(value.detach()))
    return Compared(off, worst, at)
