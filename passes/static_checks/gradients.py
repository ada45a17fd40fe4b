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
from schedlang.passes.verify.linear_backward import autograd_nodes

if TYPE_CHECKING:
    from schedlang.passes.partition.staging import Staged
    from schedlang.passes.propagate.sharded_run import Loss
    from schedlang.runtime.gradient_proof import ParameterGradient, TypeFault


@dataclass(frozen=True)
class Gradients:
    """The gradient of each trained parameter that has one, and all calls with a fault.

    `calls` is the number of typed calls, `pending_sums` the number of calls that need a pending
    sum, `assumed` the model's own autograd functions, whose backward is assumed to be linear.
    """

    found: Mapping[str, ParameterGradient]
    faults: tuple[TypeFault, ...]
    calls: int
    pending_sums: int
    assumed: tuple[str, ...] = ()


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
            folded_axis
            for split in plan.effective_layout(name).splits
            for folded_axis in plan.mesh.fold(split.axis)
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
        assumed = tuple(dict.fromkeys(_own_functions(root.grad_fn)))
        root.backward()
    gradients = walk.run(prepared.staged.cut.stages - 1, data)
    faults = tuple(dict.fromkeys((*typed.faults, *walk.faults)))
    return Gradients(gradients, faults, typed.calls, typed.sums, assumed)


def _own_functions(root: Any) -> Iterator[str]:
    """Yield the names of autograd functions below a node that are neither torch's nor ours."""
    for node in autograd_nodes(root):
        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__.split(".")[0] not in ("torch", "schedlang"):
            yield function.__name__


def _stage_of(staged: Staged) -> Any:
    """Return a function from a module to the stages that call it; None for code between units."""
    if staged.axis is None:
        return lambda fqn: frozenset([0])
    stages: dict[str, frozenset[int]] = {}
    for name, stage in zip(staged.cut.graph.units, staged.cut.stage_of):
        stages[name] = stages.get(name, frozenset()) | {stage}
    cached: dict[str, frozenset[int] | None] = {}

    def stage_of(fqn: str) -> frozenset[int] | None:
        if fqn not in cached:
            ancestor, stages_found = fqn, stages.get(fqn)
            while stages_found is None and ancestor:
                ancestor = ancestor.rpartition(".")[0]
                stages_found = stages.get(ancestor) if ancestor else None
            cached[fqn] = stages_found
        return cached[fqn]

    return stage_of


CODES = {"type": "S713", "missing": "S711", "often": "S712"}  # by kind of fault


def check_types(plan: Plan, gradients: Gradients) -> Claim:
    """Check the types of all calls of a forward on each axis (S713)."""
    problems = [(f.fqn, _diagnose(plan, f)) for f in gradients.faults if f.kind == "type"]
    summary = f"{gradients.calls} calls, {gradients.pending_sums} pending sums"
    return Claim("placement types", summary, join_problems(problems))


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
        sums_of = {p: [grad_sum for grad_sum in book[p] if name in grad_sum.names] for p in places}
        kinds[_kind(gradient)] += 1
        for axis in gradient.shares:
            if axis in _pipeline_axes(plan):
                continue
            problems += ((name, d) for d in _check_axis(plan, name, gradient, axis, sums_of))
        problems += ((name, d) for d in _check_copies(plan, name, gradient, sums_of))
        problems += ((name, d) for d in _check_divisors(plan, name, sums_of))
        problems += ((name, d) for d in _check_stages(plan, prepared, name, gradient, sums_of))
    problems += ((f.fqn, _diagnose(plan, f)) for f in gradients.faults if f.kind != "type")
    without_gradient = len(plan.model.unique_parameters) - len(gradients.found)
    missing = f", {without_gradient} without a gradient" if without_gradient else ""
    summary = (
        f"{len(gradients.found)} parameters, {len(kinds)} kind{'s' * (len(kinds) != 1)}{missing}"
    )
    unseen = [f"the backward of `{name}`: assumed to be linear" for name in gradients.assumed]
    return Claim("reductions", summary, join_problems(problems), unseen=tuple(unseen))


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
    plan: Plan, name: str, gradient: ParameterGradient, axis: str, sums_of: SumsByStage
) -> Iterator[Diagnostic]:
    """Yield problems of one parameter along one axis, at each stage that holds the parameter."""
    share = gradient.shares[axis]
    expected = int(share.kind == "part")
    label = row_label(axis_row(plan, _module_of(plan, name, gradient), axis))
    for sums in sums_of.values():
        sum_count = sum(axis in grad_sum.axes for grad_sum in sums)
        excess = sum_count - expected + share.extra_sums
        if sum_count < expected:
            message = f"gradients are partial over `{axis}`, and nothing sums them over it"
            yield Diagnostic("S711", message, label)
            return
        if excess > 0:
            times = f"{plan.mesh.size(axis)}" + (f"**{excess}" if excess > 1 else "")
            message = f"gradients are summed too often over `{axis}`: {times} times too large"
            yield Diagnostic("S712", message, label)
            return


def _check_copies(
    plan: Plan, name: str, gradient: ParameterGradient, sums_of: SumsByStage
) -> Iterator[Diagnostic]:
    """Yield problems of a shard that several ranks hold: its gradient is summed over them once."""
    for split in plan.effective_layout(name).splits:
        axes = {run_axis(split.axis, split.uneven.repeat)}
        if split.uneven.repeat == plan.mesh.size(split.axis):
            axes.add(split.axis)
        for sums in sums_of.values() if split.uneven.repeat > 1 else ():
            sum_count = sum(not axes.isdisjoint(grad_sum.axes) for grad_sum in sums)
            if sum_count != 1:
                message = f"{split.uneven.repeat} ranks of `{split.axis}` hold each part, and its"
                message += f" gradient is summed over them {sum_count} times"
                label = row_label(axis_row(plan, _module_of(plan, name, gradient), split.axis))
                yield Diagnostic("S712" if sum_count else "S711", message, label)
                return


def _check_divisors(plan: Plan, name: str, sums_of: SumsByStage) -> Iterator[Diagnostic]:
    """Yield sums that divide: the loss already contains the weight of each part of the batch."""
    for grad_sum in (
        grad_sum for sums in sums_of.values() for grad_sum in sums if grad_sum.divisor != 1.0
    ):
        axes_text = f" over `{', '.join(grad_sum.axes)}`" if grad_sum.axes else ""
        message = f"the sum of gradients{axes_text} is divided by {grad_sum.divisor:g}"
        note = "the loss of each rank is already weighted by its share of the batch"
        summed = next((s.axes for s in (grad_sum, *_reversed_sums(sums_of)) if s.axes), ())
        row = axis_row(plan, name, summed[0]) if summed else None
        yield Diagnostic("S712", message, row_label(row), notes=(note,))


def _reversed_sums(sums_of: SumsByStage) -> list[GradientSum]:
    """Return all sums at all stages, the last one first."""
    return [grad_sum for sums in sums_of.values() for grad_sum in reversed(sums)]


def _module_of(plan: Plan, name: str, gradient: ParameterGradient) -> str:
    owner = plan.model.owner(name).fqn
    return owner or next(iter(gradient.sites), "")


def _check_stages(
    plan: Plan, prepared: Prepared, name: str, gradient: ParameterGradient, sums_of: SumsByStage
) -> Iterator[Diagnostic]:
    """Yield problems of a parameter of several stages: each holds it, and one sum joins them."""
    staged = prepared.staged
    if staged.axis is None:
        return
    used = staged.places(*gradient.stages)
    label = row_label(axis_row(plan, name, staged.axis))
    lacking = used - (prepared.holdings[name].stages or frozenset())
    if lacking:
        message = f"stages at {sorted(lacking)} of `{staged.axis}` use parameters that they lack"
        yield Diagnostic("S711", message, label)
    # a stage without a gradient still takes part in the sum
    for position in sorted(used - lacking):
        axes = set(plan.mesh.fold(staged.axis))
        relevant = [grad_sum for grad_sum in sums_of[position] if axes & set(grad_sum.axes)]
        if len(sums_of) > 1 and not any(sums_of.keys() <= grad_sum.places for grad_sum in relevant):
            message = f"{len(sums_of)} stages hold a copy, and nothing sums its gradients over them"
            yield Diagnostic("S711", message, label)
            return
        if len(relevant) > 1:
            message = f"gradients are summed {len(relevant)} times over the stages that hold them"
            yield Diagnostic("S712", message, label)
            return
