"""Find the module that is wrong in a failed proof, by giving each module the original's inputs.

Ranks run twice on one batch. The first run is undisturbed and finds the first activation that
differs. In the second run every module gets the right inputs and output gradients
(`runtime/isolated`), so a module that only receives wrong values is not blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.ir.features import Slicing
from schedlang.ir.model import is_inside
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.elaborate.rows import plan_of_rows
from schedlang.passes.verify.observe import Batch, Condition, Observation
from schedlang.passes.verify.probe import Probe
from schedlang.passes.verify.proof_case import (
    Case,
    build_program,
    copy_original,
    prepare_case,
    proof_modes,
)
from schedlang.report import Row
from schedlang.runtime.batch import BatchPart, run_model
from schedlang.runtime.float64 import Float64
from schedlang.runtime.grad_reduction.gradient import local_gradient
from schedlang.runtime.isolated_modules import (
    CallFrame,
    CallRecorder,
    Finding,
    IsolatedComparison,
    OriginalCalls,
    OutputComparison,
    RankView,
    describe_frame,
    worst_findings,
)
from schedlang.runtime.launch.pool import Pool, temporary_folder
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program
from schedlang.runtime.scope import Scope, enter_scope, named_sites
from schedlang.runtime.zero_weight_loss import zero_unlabelled_loss

# returns all rows of a comparison, with saved state and the working dtype
CompareAll = Callable[[Case, "Case | None", Sequence[Condition], Observation], list[Row]]


@dataclass(frozen=True)
class Failure:
    """A proof that failed: its cases in float64 and in the working dtype, and the observations."""

    case: Case
    working: Case | None
    conditions: Sequence[Condition]
    expected: Observation
    actual: Observation
    compare_all: CompareAll


FrameErrors = dict[tuple[int, "CallFrame"], tuple[float, bool]]


@dataclass(frozen=True)
class Location:
    """The place where a difference arose.

    first           the first module, in order of returns, whose output differs in a run
    before          the last module before it whose output agrees
    guilty          modules that are wrong with right inputs, and what they make wrong
    values          what the first guilty module makes, and the right value
    modules_tried   number of modules tried separately
    unknown         modules of unknown layout
    rank_gradients  each rank's gradient of one parameter after a step
    """

    first: str = ""
    before: str = ""
    error: float = 0.0
    guilty: tuple[tuple[str, str], ...] = ()
    values: tuple[Tensor, Tensor] | None = None
    modules_tried: int = 0
    unknown: tuple[str, ...] = ()
    rank_gradients: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class _RankFindings:
    """Findings of one rank: in the undisturbed run, and of each module by itself."""

    seen: FrameErrors
    findings: tuple[Finding, ...]
    judged: frozenset[str]
    unknown: frozenset[str]
    local: Tensor | None


def find_module(case: Case, batch: Batch, pool: Pool, parameter: str = "") -> Location:
    """Find the module that is wrong on a batch, under the initial parameters.

    Also records each rank's gradient of `parameter`.
    """
    module_case = prepare_case(replace(case, plan=_module_rows_only(case.plan)))

    with temporary_folder() as folder:
        order = _record(case, batch, folder)
        ranks = pool.run(
            _run_rank, case.plan.mesh.world, case, module_case, batch, folder, order, parameter
        )
    return _join_findings(order, ranks)


def _module_rows_only(plan: Plan) -> Plan:
    """Return the plan without recomputation, offloading and sliced state: no module changes."""
    rows = (a for a in plan.actions if not a.changes(Facet.RECOMPUTE, Facet.RESIDENCE))
    return plan_of_rows(
        plan,
        [
            replace(a, primitive=a.primitive.unsliced()) if isinstance(a.primitive, Slicing) else a
            for a in rows
        ],
    )


def _opaque_modules(plan: Plan) -> tuple[str, ...]:
    """Return modules whose inside is not the original's."""
    return tuple(site for a in plan.rows_changing(Facet.STRUCTURE) for site in a.sites)


# -- the original ------------------------------------------------------------------------------


def _record(case: Case, batch: Batch, folder: str) -> tuple[CallFrame, ...]:
    """Write every call of the original for every part to files; return the calls as they return."""
    modes, _ = proof_modes(case)
    order: tuple[CallFrame, ...] = ()
    for replica, share in enumerate(Probe(case, batch).shares):
        for micro, part in enumerate(share):
            module = copy_original(case).train()
            named_sites(module)
            recorder = CallRecorder(module, _opaque_modules(case.plan))
            with (
                enter_modes(*modes),
                enter_scope(Scope(0, micro, part.rows)),
                zero_unlabelled_loss(0.0),
            ):
                run_model(module, part.inputs)
            torch.save(recorder.calls, f"{folder}/{replica}-{micro}")
            order = order or tuple(recorder.calls)
    return order


# -- the ranks ---------------------------------------------------------------------------------


def _run_rank(
    case: Case,
    module_case: Case,
    batch: Batch,
    folder: str,
    order: Sequence[CallFrame],
    parameter: str,
) -> _RankFindings:
    """Run both runs on one rank."""
    with enter_modes(Float64()):
        program = build_program(case)
        view = _make_view(case, program, order)
        mesh = case.plan.mesh
        parts = Probe(case, batch).shares[mesh.index(view.rank, case.plan.data_axes)]
        replica = mesh.index(view.rank, case.plan.data_axes)
        calls: list[OriginalCalls] = [
            torch.load(f"{folder}/{replica}-{k}", weights_only=False, mmap=True)
            for k in range(len(parts))
        ]
        comparison = OutputComparison(view, calls)
        comparison.add_hooks(program.assembly.module, _opaque_modules(case.plan))
        _watch_stages(program, comparison, grad=False)
        program.train_step(batch)
        parameter_held = program.assembly.parameters.get(parameter)
        local = None if parameter_held is None else local_gradient(parameter_held)
        program = build_program(module_case)
        view = _make_view(module_case, program, order)
        isolated = IsolatedComparison(
            program.assembly.module, view, calls, _opaque_modules(case.plan)
        )
        _watch_stages(program, isolated, grad=True)
        _forward(program, parts)
    findings = tuple(worst_findings(isolated.findings))
    return _RankFindings(
        comparison.errors, findings, frozenset(isolated.judged), frozenset(isolated.unknown), local
    )


def _watch_stages(program: Program, watcher: Any, *, grad: bool) -> None:
    """Set `watcher.stage` to the running stage; record gradients also in runs without backward."""
    for number, stage in program.assembly.pipeline.stages.items():

        def forward(
            *args: Any, _module_rows_only: Any = stage.forward, _number: int = number
        ) -> Any:
            watcher.stage = _number
            with torch.set_grad_enabled(grad or torch.is_grad_enabled()):
                return _module_rows_only(*args)

        vars(stage)["forward"] = forward


def _forward(program: Program, parts: Sequence[BatchPart]) -> None:
    """Run one forward in training mode; only the modules themselves may run backward."""
    a = program.assembly
    a.module.train()
    with (
        a.dropout.enter_step(0) if a.dropout is not None else nullcontext(),
        zero_unlabelled_loss(0.0),
        torch.no_grad(),
    ):
        a.pipeline.run(
            [part.inputs for part in parts],
            train=False,
            around=lambda op: enter_scope(Scope(0, op.microbatch, parts[op.microbatch].rows)),
        )


def _make_view(case: Case, program: Program, order: Sequence[CallFrame]) -> RankView:
    plan, ready = case.plan, case.prepared
    assert ready is not None
    stages, spanning = _stages_of_calls(ready, order)
    ranks = program.assembly.ranks
    names = {
        (site.fqn, attribute): plan.model.parameters[parameter_facts.name].name
        for site in plan.model.sites.values()
        for attribute, parameter_facts in site.parameters.items()
    }
    return RankView(
        plan.mesh,
        ranks.rank,
        {axis: ranks.group(axis) for axis in plan.mesh.names},
        ready.traced.layouts,
        ready.holdings,
        ready.traced.partial,
        stages,
        spanning,
        names,
    )


def _stages_of_calls(
    ready: Prepared, order: Sequence[CallFrame]
) -> tuple[dict[CallFrame, int], frozenset[CallFrame]]:
    """Return the stage of every call, and the calls that are not inside one unit of a stage."""
    staged = ready.staged
    if staged.axis is None:
        return {}, frozenset()
    units: dict[str, int] = {}
    for name, stage in zip(staged.cut.graph.units, staged.cut.stage_of):
        # no stage counts all calls of a module that several stages call
        units[name] = stage if units.get(name, stage) == stage else -1
    stages: dict[CallFrame, int] = {}
    spanning, stage_now = set(), 0
    for frame in order:
        unit_stage = next((s for u, s in units.items() if is_inside(frame[0], u)), None)
        stage_now = stage_now if unit_stage is None else unit_stage
        stages[frame] = stage_now
        if unit_stage is None:
            spanning.add(frame)
    for name in {name for name, index in stages if index}:  # calls are not counted across stages
        frames = [frame for frame in stages if frame[0] == name]
        if len({stages[frame] for frame in frames}) > 1:
            stages |= dict.fromkeys(frames, -1)
    return stages, frozenset(spanning)


# -- the location ------------------------------------------------------------------------------


def _join_findings(order: Sequence[CallFrame], ranks: Sequence[_RankFindings]) -> Location:
    worst: dict[CallFrame, tuple[float, bool]] = {}
    for rank in ranks:
        for (_, frame), (error, ok) in rank.seen.items():
            worst_so_far = worst.get(frame, (0.0, True))
            worst[frame] = max(worst_so_far[0], error), worst_so_far[1] and ok
    first_wrong = next((frame for frame in order if not worst.get(frame, (0.0, True))[1]), None)
    good_before = (
        [f for f in order[: order.index(first_wrong)] if f in worst]
        if first_wrong is not None
        else []
    )
    findings = _order_findings([finding for rank in ranks for finding in rank.findings], order)
    values = next(
        ((f.got, f.want) for f in findings if f.got is not None and f.want is not None), None
    )
    return Location(
        "" if first_wrong is None else describe_frame(first_wrong),
        describe_frame(good_before[-1]) if good_before else "",
        0.0 if first_wrong is None else worst[first_wrong][0],
        _guilty_modules(findings),
        values,
        len({name for rank in ranks for name in rank.judged}),
        tuple(sorted({name for rank in ranks for name in rank.unknown})),
        tuple(rank.local for rank in ranks),
    )


def _order_findings(findings: Sequence[Finding], order: Sequence[CallFrame]) -> list[Finding]:
    """Return findings in forward, else those in backward, in the order in which modules return."""
    positions = {frame: k for k, frame in enumerate(order)}
    relevant = [finding for finding in findings if not finding.in_backward] or list(findings)
    return sorted(relevant, key=lambda finding: positions.get(finding.frame, -1))


def _guilty_modules(findings: Sequence[Finding]) -> tuple[tuple[str, str], ...]:
    """Return each guilty module once, with the first value that it makes wrong."""
    modules: dict[str, str] = {}
    for finding in findings:
        size = "" if finding.error == float("inf") else f" is off by {finding.error:.1e}"
        modules.setdefault(finding.frame[0], f"{finding.what}{size}")
    return tuple(modules.items())
