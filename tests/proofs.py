"""Schedules as text to plans, proofs and runs, in few words, for tests of whole programs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.syntax import parse
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.report import Report
from schedlang.runtime.float64 import Float64
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.schedule import Schedule
from tests.engine import Threads

Batch = Mapping[str, Any]


def planned(model: nn.Module, rows: str, mesh: str = "", relax: str = "") -> Plan:
    """The plan of some rows, written without a header, on a mesh (`dp=2, tp=2`)."""
    head = f"mesh({mesh})\n\n" if mesh else ""
    word = f"relax({relax}) " if relax else ""
    text = f'schedule 1\n\n{head}step "all" {word}{{\n{rows}\n}}\n'
    return Schedule(model, parse(Source("rows.sched", text)), Settings()).plan()


def refused(model: nn.Module, rows: str, mesh: str = "", batch: Batch | None = None) -> str:
    """The message of the refusal that rows end in, when planned or, with a batch, when traced."""
    from schedlang.passes.propagate.propagate import propagate

    try:
        plan = planned(model, rows, mesh)
        if batch is not None:
            propagate(plan, batch)
    except Refusal as refusal:
        return refusal.render()
    raise AssertionError(f"not refused: {rows}")


def proven(
    pool: Pool,
    plan: Plan,
    batches: Sequence[Batch],
    *,
    loss: Any = None,
    weight: Any = None,
    seed: int = 0,
) -> Report:
    """The report of a proof that must hold; the failing rows are shown if it does not."""
    report = prove(Case(plan, tuple(batches), loss, weight, seed, "none"), pool=pool)
    bad = [(r.condition, r.kind, r.step, r.name, r.error, r.note) for r in report.rows if not r.ok]
    assert not bad, (bad[:6], report.blamed, report.diagnosis)
    return report


def static_holds(plan: Plan, batch: Batch) -> None:
    """Assert that the proofs that need no ranks were made, and that each of them holds."""
    from schedlang.passes.static_checks.static import static

    found = static(plan, batch)
    bad = [
        (claim.name, claim.description, claim.problems) for claim in found.claims if not claim.holds
    ]
    assert found.claims and not bad and not found.problems, (bad, found.problems)


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD with momentum, and weight decay on matrices only."""
    held = list(named)
    # by name, not by dims: FSDP leaves dims, but a rule of shapes would be another one per layout
    groups = [
        {"params": [p for n, p in held if ("bias" in n) == plain], "weight_decay": decay}
        for plain, decay in ((True, 0.0), (False, 0.1))
    ]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.05, momentum=0.9)


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([p for _, p in named], lr=0.01, eps=1e-5)


Seen = dict[str, Tensor]


def steps(
    plan: Plan,
    batches: Sequence[Batch],
    optimizer: Any,
    clip: float | None,
    options: dict[str, Any],
) -> Seen:
    """On this rank: some steps, and what they left: losses, first gradients, state, norms.

    Several ranks draw masks that do not depend on the layout.
    """
    seen: Seen = {}
    if plan.mesh.world > 1:
        options = {"dropout": "logical"} | options
    with enter_modes(Float64()):
        program = build(plan, batches[0], optimizer=optimizer, clip=clip, **options)
        for step, batch in enumerate(batches):
            seen[f"loss {step}"] = program.train_step(batch).clone()
            seen[f"norm {step}"] = torch.tensor(program.grad_norm)
            for name, grad in program.gradients().items():
                seen[f"grad {step} {name}"] = grad.clone()
    for name, value in program.state_dict().items():
        seen[f"state {name}"] = value.clone()
    for name, slots in program.optimizer_state().items():
        for slot, value in slots.items():
            seen[f"optimizer {slot} {name}"] = torch.as_tensor(value).clone()
    return seen


def made(
    plan: Plan, batches: Sequence[Batch], loss: Any = None, weight: Any = None
) -> tuple[Plan, Prepared]:
    """A plan that is complete, and what `prepare` finds for it, as in float64 on a rank."""
    with enter_modes(Float64()):
        case = prepare_case(Case(plan, tuple(batches), loss, weight))
    assert case.prepared is not None
    return case.plan, case.prepared


def trained(
    pool: Pool | Threads,
    plan: Plan,
    batches: Sequence[Batch],
    optimizer: Any = sgd,
    *,
    clip: float | None = None,
    **options: Any,
) -> Seen:
    """What rank 0 sees after a step for each batch; options are those of `build`.

    Ranks get the plan prepared, once, as `verify` sends it; with `prepared=None`, and where their
    batches are local, they prepare it each by itself, as those of a job do.
    """
    if "prepared" not in options and not options.get("local"):
        plan, options["prepared"] = made(plan, batches, options.get("loss"), options.get("weight"))
    seen: Seen = pool.run(steps, plan.mesh.world, plan, tuple(batches), optimizer, clip, options)[0]
    return seen


def sequential(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: Any = sgd,
    *,
    clip: float | None = None,
    loss: Any = None,
    seed: int | None = None,
) -> Seen:
    """The same of a plain loop around a copy; dropout as a program's with this seed."""
    subject = Sequential(copy.deepcopy(model), optimizer, loss=loss, clip=clip)
    drawn = () if seed is None else (LogicalDropout(seed),)
    seen: Seen = {}
    with enter_modes(Float64(), *drawn):
        for step, batch in enumerate(batches):
            seen[f"loss {step}"] = subject.train_step(batch).clone()
            seen[f"norm {step}"] = torch.tensor(float(subject.grad_norm or 0.0))
            for name, grad in subject.gradients().items():
                if grad is not None:
                    seen[f"grad {step} {name}"] = grad.clone()
    for name, value in subject.state_dict().items():
        seen[f"state {name}"] = value.clone()
    for name, slots in subject.optimizer_state().items():
        for slot, value in slots.items():
            seen[f"optimizer {slot} {name}"] = torch.as_tensor(value).clone()
    return seen


def assert_same(a: Seen, b: Seen) -> None:
    """Equal to the last bit, under the same names."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:8]
    differ = [name for name in a if not torch.equal(a[name], b[name])]
    assert not differ, differ[:8]


def assert_near(a: Seen, b: Seen, rtol: float = 1e-9) -> None:
    """Equal but for rounding, each tensor by its norm."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:8]
    largest: dict[str, float] = {}
    for name, value in b.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), float(value.double().norm()))
    far = {}
    for name, value in a.items():
        gap = float((value.double() - b[name].double()).norm())
        if gap > rtol * float(b[name].double().norm()) + 1e-12 * largest[name.split()[0]]:
            far[name] = gap
    assert not far, dict(list(far.items())[:8])
