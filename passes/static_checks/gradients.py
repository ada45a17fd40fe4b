"""Prove without ranks that every gradient is summed over exactly the axes on which it is partial.

* `infer_gradients` infers from types alone what each parameter's gradient is after the last
  backward: one microbatch of the local model on the meta device, forward and backward, with all
  stages in one graph, so that a tied weight is one node with several uses.
* `check_types` checks that only linear calls precede a sum of partial tensors.
* `check_reductions` compares the inferred gradients with the sums that a simulated step does. The
  two derivations share only the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.mesh import run_axis
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.axis_rows import axis_row
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.static_checks.claims import Claim, join_problems, row_label
from schedlang.passes.static_checks.rank_steps import GradientSum, SumsByStage

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.runtime.gradient_proof import ParameterGradient, TypeFault


@dataclass(frozen=True)
class Gradients:
    """The gradient of each trained parameter that has one, and all calls with a fault.

    `calls` is the number of typed calls, `pending_sums` the number of calls that need a pending
    sum.
    """

    found: Mapping[str, ParameterGradient]
    faults: tuple[TypeFault, ...]
    calls: int
    pending_sums: int


def infer_gradients(
    plan: Plan, prepared: Prepared, sample: Mapping[str, Any], loss: Loss | None
) -> Gradients | None:
    """Infer gradients through one forward and backward; None if the model returns no loss."""
    from schedlang.passes.partition.staging import local_skeleton
    from schedlang.passes.propagate.propagate import backward_root
    from schedlang.runtime.gradient_proof import BackwardWalk, VaryingTypes
    from schedlang.runtime.propagation.trace import ModuleStack, Trace
    from schedlang.runtime.tracing.meta_runs import tensors_in, without_values

    model, stack = local_skeleton(plan, prepared.traced), ModuleStack()
    model.train()
    typed = VaryingTypes(stack, plan.mesh.fold)
    parameters = {}
    for name, parameter in model.named_parameters():
        axes = {
            plain
            for split in plan.effective_layout(name).splits
            for plain in plan.mesh.fold(split.axis)
        }
        typed.record_type(parameter, frozenset(axes))
        parameters[id(parameter)] = (name, frozenset(axes))
    stack.watch(model)
    data = frozenset(axis for axis in plan.data_axes if plan.mesh.size(axis) > 1)
    with typed.observe():
        with without_values(sample) as (inputs, _):
            for tensor in tensors_in(inputs):
                typed.record_type(tensor, data)
            with Trace(stack, typed, asked=True):
                root = backward_root(model, inputs, loss)
        if root is None:
            return None
        axes_ = tuple(name for name, size in plan.mesh.axes if size > 1)
        walk = BackwardWalk(root, typed, axes_, parameters, _stage_of(prepared.staged))
        root.backward()
    found = walk.run(last=prepared.staged.cut.stages - 1)
    faults = tuple(dict.fromkeys((*typed.faults, *walk.faults)))
    return Gradients(found, faults, typed.calls, typed.sums)


def _stage_of(staged: Staged) -> Any:
    """Return a function from a module to the stages that call it; None for code between units."""
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


CODES = {"type": "S713", "missing": "S711", "often": "S712"}  # by kind of fault


def check_types(plan: Plan, gradients: Gradients) -> Claim:
    """Check the types of all calls of a forward on each axis (S713)."""
    problems = [(f.fqn, _diagnose(plan, f)) for f in gradients.faults if f.kind == "type"]
    said = f"{gradients.calls} calls, {gradients.pending_sums} pending sums"
    return Claim("placement types", said, join_problems(problems))


def check_reductions(
    plan: Plan, prepared: Prepared, gradients: Gradients, book: SumsByStage
) -> Claim:
    """Compare gradients with sums: S711 for a missing sum, S712 for one too many.

    `book` are the sums at each stage of the pipeline.
    """
    problems: list[tuple[str, Diagnostic]] = []
    kinds: Counter[tuple[object, ...]] = Counter()
    for name, gradient in gradients.found.items():
        places = sorted(prepared.holdings[name].stages or book)
        mine = {p: [one for one in book[p] if name in one.names] for p in places}
        kinds[_kind(gradient)] += 1
        for axis in gradient.shares:
            if axis in _pipeline_axes(plan):
                continue
            problems += ((name, d) for d in _check_axis(plan, name, gradient, axis, mine))
        problems += ((name, d) for d in _check_copies(plan, name, gradient, mine))
        problems += ((name, d) for d in _check_divisors(plan, name, mine))
        problems += ((name, d) for d in _check_stages(plan, prepared, name, gradient, mine))
    problems += ((f.fqn, _diagnose(plan, f)) for f in gradients.faults if f.kind != "type")
    still = len(plan.model.unique_parameters) - len(gradients.found)
    more = f", {still} without a gradient" if still else ""
    said = f"{len(gradients.found)} parameters, {len(kinds)} kind{'s' * (len(kinds) != 1)}{more}"
    return Claim("reductions", said, join_problems(problems))


def _pipeline_axes(plan: Plan) -> tuple[str, ...]:
    return tuple(axis for cut in plan.cuts for axis in plan.mesh.fold(cut.axis))


def _kind(gradient: ParameterGradient) -> tuple[object, ...]:
    """Return what is compared of a gradient, to count different kinds."""
    shares = tuple((axis, share.kind) for axis, share in gradient.shares.items())
    return (*shares, len(gradient.stages) > 1)


def _diagnose(plan: Plan, fault: TypeFault) -> Diagnostic:
    return Diagnostic(
        CODES[fault.kind], fault.reason, row_label(axis_row(plan, fault.fqn, fault.axis))
    )


def _check_axis(
    plan: Plan, name: str, gradient: ParameterGradient, axis: str, mine: SumsByStage
) -> Iterator[Diagnostic]:
    """Yield problems of one parameter along one axis, at each stage that holds the parameter."""
    share = gradient.shares[axis]
    due = int(share.kind == "part")
    label = row_label(axis_row(plan, _module_of(plan, name, gradient), axis))
    for sums in mine.values():
        done = sum(axis in one.axes for one in sums)
        over = done - due + share.extra_sums
        if done < due:
            said = f"gradients are partial over `{axis}`, and nothing sums them over it"
            yield Diagnostic("S711", said, label)
            return
        if over > 0:
            times = f"{plan.mesh.size(axis)}" + (f"**{over}" if over > 1 else "")
            said = f"gradients are summed too often over `{axis}`: {times} times too large"
            yield Diagnostic("S712", said, label)
            return


def _check_copies(
    plan: Plan, name: str, gradient: ParameterGradient, mine: SumsByStage
) -> Iterator[Diagnostic]:
    """Yield problems of a shard that several ranks hold: its gradient is summed over them once."""
    for split in plan.effective_layout(name).splits:
        over = {run_axis(split.axis, split.uneven.repeat)}
        if split.uneven.repeat == plan.mesh.size(split.axis):
            over.add(split.axis)
        for sums in mine.values() if split.uneven.repeat > 1 else ():
            done = sum(not over.isdisjoint(one.axes) for one in sums)
            if done != 1:
                said = f"{split.uneven.repeat} ranks of `{split.axis}` hold each part, and its"
                said += f" gradient is summed over them {done} times"
                label = row_label(axis_row(plan, _module_of(plan, name, gradient), split.axis))
                yield Diagnostic("S712" if done else "S711", said, label)
                return


def _check_divisors(plan: Plan, name: str, mine: SumsByStage) -> Iterator[Diagnostic]:
    """Yield sums that divide: the loss already contains the weight of each part of the batch."""
    for one in (one for sums in mine.values() for one in sums if one.divisor != 1.0):
        over = f" over `{', '.join(one.axes)}`" if one.axes else ""
        said = f"the sum of gradients{over} is divided by {one.divisor:g}"
        note = "the loss of each rank is already weighted by its share of the batch"
        summed = next((s.axes for s in (one, *_reversed_sums(mine)) if s.axes), ())
        row = axis_row(plan, name, summed[0]) if summed else None
        yield Diagnostic("S712", said, row_label(row), notes=(note,))


def _reversed_sums(mine: SumsByStage) -> list[GradientSum]:
    """Return all sums at all stages, the last one first."""
    return [one for sums in mine.values() for one in reversed(sums)]


def _module_of(plan: Plan, name: str, gradient: ParameterGradient) -> str:
    owner = plan.model.owner(name).fqn
    return owner or next(iter(gradient.sites), "")


def _check_stages(
    plan: Plan, prepared: Prepared, name: str, gradient: ParameterGradient, mine: SumsByStage
) -> Iterator[Diagnostic]:
    """Yield problems of a parameter of several stages: each holds it, and one sum joins them."""
    staged = prepared.staged
    if staged.axis is None:
        return
    used = staged.places(*gradient.stages)
    label = row_label(axis_row(plan, name, staged.axis))
    lacking = used - (prepared.holdings[name].stages or frozenset())
    if lacking:
        said = f"stages at {sorted(lacking)} of `{staged.axis}` use parameters that they lack"
        yield Diagnostic("S711", said, label)
    for place in sorted(used - lacking):  # a stage without a gradient still takes part in the sum
        axes = set(plan.mesh.fold(staged.axis))
        along = [one for one in mine[place] if axes & set(one.axes)]
        if len(mine) > 1 and not any(mine.keys() <= one.places for one in along):
            said = f"{len(mine)} stages hold a copy, and nothing sums its gradients over them"
            yield Diagnostic("S711", said, label)
            return
        if len(along) > 1:
            said = f"gradients are summed {len(along)} times over the stages that hold them"
            yield Diagnostic("S712", said, label)
            return
