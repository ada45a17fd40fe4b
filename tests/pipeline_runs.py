"""Pipelines without a plan: cut a model evenly, run any timeline, compare with the full model."""

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
from tests.models import batch_weight, split_batch

GATE = 1e-12


def cut_model(model: nn.Module, batch: Any, stages: int) -> StageSplit:
    """Cut a model into equal stages; record it on the meta device."""
    names = units_of(model, batch)
    graph = record_forward(model, names, batch)
    units = [cuts.ChainUnit(n, 0, t) for n, t in zip(names, is_in_trunk(model, names))]
    return split_graph(graph, cuts.even_stages(units, stages))


def keep_only(model: nn.Module, stage_split: StageSplit, stages: list[int]) -> None:
    """Move all parameters and buffers outside of these stages to the meta device."""
    params = set().union(*(stage_split.parameters(s) for s in stages))
    buffers = set().union(*(stage_split.buffers(s) for s in stages))
    kept_ids = {id(p) for n, p in model.named_parameters() if n in params}
    kept_ids |= {id(b) for n, b in model.named_buffers() if n in buffers}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in kept_ids:
                    meta_tensor = tensor.detach().to("meta")
                    table[name] = (
                        nn.Parameter(meta_tensor) if table is module._parameters else meta_tensor
                    )


def make_pipeline(
    model: nn.Module, batch: Any, plan: Timeline, rank: int, **options: Any
) -> Pipeline:
    """This rank's part of a pipeline, with the tensors of its own stages only."""
    stage_split = cut_model(model, batch, plan.stages)
    local_stages = np.flatnonzero((plan.replica_ranks == rank).any(0)).tolist()
    stub = Stub(meta_model(model, {}), stage_split)
    keep_only(model, stage_split, local_stages)
    switch = CallSwitch(model, stage_split.graph.units)
    stages = {s: Stage(model, stage_split, s, switch=switch, stub=stub) for s in local_stages}
    return Pipeline(stages, plan, range(plan.ranks), rank, **options)


def train_rank(
    rank: int, make: Any, batch: Any, plan: Timeline, shift: bool, **options: Any
) -> Any:
    """One step on one rank: results and gradients by parameter name."""
    model, parts = make(), split_batch(batch, plan.microbatches)
    with Float64():
        pipe = make_pipeline(model, batch, plan, rank, **options)
        total = sum(batch_weight(p, shift) for p in parts)
        results = pipe.run(parts, [batch_weight(p, shift) / total for p in parts])
    return results, gradients(model)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters() if not p.is_meta}


def run_full_model(make: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and gradients of the uncut model on the full batch."""
    model = make()
    with Float64():
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
    return loss.detach(), gradients(model)


def assert_same(make: Any, batch: Any, answers: Any, shift: bool = True, count: int = 4) -> None:
    """Assert that weighted losses and gradients, summed over ranks, equal the full model's."""
    loss, expected = run_full_model(make, batch)
    parts = split_batch(batch, count)
    weights = [batch_weight(part, shift) for part in parts]
    results = {k: r for local_results, _ in answers for k, r in local_results.items()}
    value = sum(w * results[k].loss for k, w in enumerate(weights)) / sum(weights)
    assert abs(float(value - loss)) <= GATE * abs(float(loss))
    names = {name for _, grads in answers for name in grads}
    assert names == set(expected)
    largest = max(float(g.norm()) for g in expected.values() if g is not None)
    for name, grad in expected.items():
        local_grads = [g[name] for _, g in answers if g.get(name) is not None]
        assert bool(local_grads) == (grad is not None), name
        if local_grads:
            error = float((sum(local_grads) - grad).norm())
            assert error <= GATE * float(grad.norm()) + 1e-15 * largest, (name, error)


def split_backward(plan: Timeline) -> Timeline:
    """The same order with each B split into I, and W one operation later."""
    rows = []
    for rank in range(plan.ranks):
        row: list[Op] = []
        delayed: list[Op] = []
        for op in plan.rows(rank):
            row += [op._replace(kind=Kind.I)] if op.kind is Kind.B else [op]
            row += delayed
            delayed = [op._replace(kind=Kind.W)] if op.kind is Kind.B else []
        rows.append(row + delayed)
    return timeline_from_rows(rows, plan.edges)
