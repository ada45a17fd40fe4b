"""Run all stages of a pipeline in this process, and compare with the uncut model."""

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


class Comparison(NamedTuple):
    """Relative error of the loss, the largest of a gradient, and the gradient that has it."""

    loss: float
    worst: float
    at: str

    @property
    def ok(self) -> bool:
        """Whether both errors are rounding in float64."""
        return self.loss <= GATE and self.worst <= GATE


def cut_evenly(
    model: nn.Module,
    batch: Mapping[str, Any],
    stages: int,
    trunks: Sequence[str] = (),
    unrolled: Mapping[str, int] | None = None,
    loss: Any = None,
) -> StageSplit:
    """Cut a model into stages with equal numbers of trunk units; record it on the meta device."""
    unrolled = unrolled or {}
    names = units_of(model, batch, trunks=trunks, unrolled=unrolled)
    graph = record_forward(model, names, batch, loss=loss)
    inside = is_in_trunk(model, names, trunks, unrolled)
    units = [cuts.ChainUnit(n, 0, t) for n, t in zip(graph.labels, inside)]
    return split_graph(graph, cuts.even_stages(units, stages))


def merge_ranks(plan: Timeline) -> Timeline:
    """The same rows on one rank, in an order that satisfies all dependencies."""
    rows = sorted((op for r in range(plan.ranks) for op in plan.rows(r)), key=_sort_key)
    return timeline_from_rows([rows], plan.edges)


def _sort_key(op: Op) -> tuple[int, int, int]:
    is_backward = op.kind.name != "F"
    return (op.microbatch, is_backward, -op.stage if is_backward else op.stage)


def run_stages(
    model: nn.Module,
    stage_split: StageSplit,
    batches: Sequence[Mapping[str, Any]],
    loss: Any = None,
) -> list[Any]:
    """Run all stages, one microbatch after the other; gradients accumulate in the model."""
    switch, stub = (
        CallSwitch(model, stage_split.graph.units),
        Stub(meta_model(model, {}), stage_split),
    )
    stages = {
        s: Stage(model, stage_split, s, switch=switch, stub=stub, loss=loss)
        for s in range(stage_split.stages)
    }
    plan = merge_ranks(make_order("GPipe", stage_split.stages, len(batches)))
    try:
        results = Pipeline(stages, plan, dict.fromkeys(stages, 0)).run(batches)
    finally:
        switch.remove()
    return list(results.values())


def compare_stages(
    model: nn.Module, stage_split: StageSplit, batch: Mapping[str, Any], loss: Any = None
) -> Comparison:
    """Compare stages and full model: loss, every gradient, and which parameters have one."""
    with Float64():
        output = model(**batch)
        value = loss_of(output, batch, loss)
        assert value is not None
        value.backward()
        expected = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        (result,) = run_stages(model, stage_split, [batch], loss)
    largest = max(float(g.norm()) for g in expected.values() if g is not None)
    worst, worst_name = 0.0, ""
    for name, parameter in model.named_parameters():
        stage_grad, grad = parameter.grad, expected[name]
        if grad is None or stage_grad is None:
            present = grad if grad is not None else stage_grad
            error = float("inf") if present is not None and present.any() else 0.0
        else:
            floor = 1e-12 * largest
            error = max(0.0, float((stage_grad - grad).norm()) - floor) / (
                float(grad.norm()) + 1e-300
            )
        if not error <= worst:
            worst, worst_name = error, name
    model.zero_grad()
    loss_error = abs(float(result.loss - value.detach())) / abs(float(value.detach()))
    return Comparison(loss_error, worst, worst_name)
