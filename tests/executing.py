"""Pipelines without a plan: a model cut evenly, run by the rows of any timeline, compared whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from schedlang.passes.partition import stage_assignment as cuts
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, timeline_from_rows
from schedlang.runtime.float64 import Float64
from schedlang.runtime.pipeline.executor import Pipeline
from schedlang.runtime.pipeline.stage import Stage, Stub
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.stage_graph import StageSplit, split_graph
from schedlang.runtime.tracing.units import CallSwitch, is_in_trunk, units_of
from tests.models import split, weight

GATE = 1e-12


def cut_model(model: nn.Module, batch: Any, stages: int) -> StageSplit:
    """The model cut evenly, from a record on the meta device."""
    names = units_of(model, batch)
    graph = record_forward(model, names, batch)
    units = [cuts.ChainUnit(n, 0, t) for n, t in zip(names, is_in_trunk(model, names))]
    return split_graph(graph, cuts.even_stages(units, stages))


def keep_only(model: nn.Module, made: StageSplit, stages: list[int]) -> None:
    """Put every parameter and buffer that these stages do not hold on the meta device."""
    params = set().union(*(made.parameters(s) for s in stages))
    buffers = set().union(*(made.buffers(s) for s in stages))
    kept = {id(p) for n, p in model.named_parameters() if n in params}
    kept |= {id(b) for n, b in model.named_buffers() if n in buffers}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in kept:
                    bare = tensor.detach().to("meta")
                    table[name] = nn.Parameter(bare) if table is module._parameters else bare


def pipeline(model: nn.Module, batch: Any, plan: Timeline, rank: int, **options: Any) -> Pipeline:
    """This rank's part of a pipeline, with nothing but its own stages' tensors."""
    made = cut_model(model, batch, plan.stages)
    mine = np.flatnonzero((plan.replica_ranks == rank).any(0)).tolist()
    stub = Stub(meta_model(model, {}), made)
    keep_only(model, made, mine)
    switch = CallSwitch(model, made.graph.units)
    stages = {s: Stage(model, made, s, switch=switch, stub=stub) for s in mine}
    return Pipeline(stages, plan, range(plan.ranks), rank, **options)


def train(rank: int, make: Any, batch: Any, plan: Timeline, shift: bool, **options: Any) -> Any:
    """One step on one rank: results and gradients by parameter name."""
    model, parts = make(), split(batch, plan.microbatches)
    with Float64():
        pipe = pipeline(model, batch, plan, rank, **options)
        total = sum(weight(p, shift) for p in parts)
        results = pipe.run(parts, [weight(p, shift) / total for p in parts])
    return results, gradients(model)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters() if not p.is_meta}


def whole(make: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and gradients of the model as it is, on the whole batch."""
    model = make()
    with Float64():
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
    return loss.detach(), gradients(model)


def assert_same(make: Any, batch: Any, answers: Any, shift: bool = True, count: int = 4) -> None:
    """The weighed losses and the gradients, summed over ranks, are those of the whole model."""
    loss, wanted = whole(make, batch)
    parts = split(batch, count)
    weights = [weight(part, shift) for part in parts]
    results = {k: r for own, _ in answers for k, r in own.items()}
    value = sum(w * results[k].loss for k, w in enumerate(weights)) / sum(weights)
    assert abs(float(value - loss)) <= GATE * abs(float(loss))
    held = {name for _, grads in answers for name in grads}
    assert held == set(wanted)
    largest = max(float(g.norm()) for g in wanted.values() if g is not None)
    for name, grad in wanted.items():
        found = [g[name] for _, g in answers if g.get(name) is not None]
        assert bool(found) == (grad is not None), name
        if found:
            error = float((sum(found) - grad).norm())
            assert error <= GATE * float(grad.norm()) + 1e-15 * largest, (name, error)


def split_backward(plan: Timeline) -> Timeline:
    """The same order with I in place of B and every W one operation later."""
    rows = []
    for rank in range(plan.ranks):
        row: list[Op] = []
        late: list[Op] = []
        for op in plan.rows(rank):
            row += [op._replace(kind=Kind.I)] if op.kind is Kind.B else [op]
            row += late
            late = [op._replace(kind=Kind.W)] if op.kind is Kind.B else []
        rows.append(row + late)
    return timeline_from_rows(rows, plan.edges)
