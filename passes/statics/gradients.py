"""What every parameter's gradient is when the last backward has run, derived from types alone.

One microbatch of the local model on the meta device, forward and backward, with all stages in one
graph, so that a tied weight is one node with several uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.passes.preparing.prepare import Prepared
    from schedlang.runtime.adjoints.adjoint import Gradient
    from schedlang.runtime.adjoints.typed import Fault


@dataclass(frozen=True)
class Gradients:
    """The gradient of each trained parameter that has one, and all calls that do not fit.

    `calls` were typed, `sums` of them wanted a pending sum.
    """

    found: Mapping[str, Gradient]
    faults: tuple[Fault, ...]
    calls: int
    sums: int


def gradients(
    plan: Plan, prepared: Prepared, sample: Mapping[str, Any], loss: Loss | None
) -> Gradients | None:
    """Types through one forward and backward; None where the model returns no loss."""
    import torch

    from schedlang.passes.cutting.staging import local_skeleton
    from schedlang.passes.laying.root import backward_root
    from schedlang.runtime.adjoints.adjoint import Adjoint
    from schedlang.runtime.adjoints.typed import Typed
    from schedlang.runtime.following.trace import Stack
    from schedlang.runtime.recording.constants import OnMeta
    from schedlang.runtime.recording.meta import hollow_batch
    from schedlang.runtime.recording.torch_calls import tensors_in
    from schedlang.runtime.sharding import crossing

    model, stack = local_skeleton(plan, prepared.traced), Stack()
    model.train()
    typed = Typed(stack, plan.mesh.fold)
    parameters = {}
    for name, parameter in model.named_parameters():
        axes = {plain for split in plan.held(name).splits for plain in plan.mesh.fold(split.axis)}
        typed.put(parameter, frozenset(axes))
        parameters[id(parameter)] = (name, frozenset(axes))
    stack.watch(model, lambda fqn: False)
    inputs = hollow_batch(dict(sample))
    data = frozenset(axis for axis in plan.data_axes if plan.mesh.size(axis) > 1)
    for tensor in tensors_in(inputs):
        typed.put(tensor, data)
    with typed.watching():
        with OnMeta(dict(sample), inputs), typed, torch.device("meta"):
            root = backward_root(model, inputs, loss)
        if root is None:
            return None
        axes_ = tuple(name for name, size in plan.mesh.axes if size > 1)
        walk = Adjoint(root, typed, axes_, parameters, _stage_of(prepared.staged))
        root.backward()
    crossing.forget()
    found = walk.run(last=prepared.staged.cut.stages - 1)
    faults = tuple(dict.fromkeys((*typed.faults, *walk.faults)))
    return Gradients(found, faults, typed.calls, typed.sums)


def _stage_of(staged: Staged) -> Any:
    """The stages that call a module; None for code between units."""
    if staged.axis is None:
        return lambda fqn: frozenset([0])
    stages: dict[str, frozenset[int]] = {}
    for name, stage in zip(staged.cut.graph.units, staged.cut.stage_of):
        stages[name] = stages.get(name, frozenset()) | {stage}
    known: dict[str, frozenset[int] | None] = {}

    def stage_of(fqn: str) -> frozenset[int] | None:
        if fqn not in known:
            above, at = fqn, stages.get(fqn)
            while at is None and above:
                above = above.rpartition(".")[0]
                at = stages.get(above) if above else None
            known[fqn] = at
        return known[fqn]

    return stage_of
