"""Build plans from schedule text, prove them, and train them on ranks: helpers for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def make_plan(model: nn.Module, rows: str, mesh: str = "", relax: str = "") -> Plan:
    """The plan of schedule rows without a header, on a mesh (`dp=2, tp=2`)."""
    head = f"mesh({mesh})\n\n" if mesh else ""
    relaxed = f"relax({relax}) " if relax else ""
    text = f'schedule 1\n\n{head}step "all" {relaxed}{{\n{rows}\n}}\n'
    return Schedule(model, parse(Source("rows.sched", text)), Settings()).plan()


def refusal_text(model: nn.Module, rows: str, mesh: str = "", batch: Batch | None = None) -> str:
    """The message with which rows are refused when planned or, with a batch, when traced."""
    from schedlang.passes.propagate.propagate import propagate

    try:
        plan = make_plan(model, rows, mesh)
        if batch is not None:
            propagate(plan, batch)
    except Refusal as refusal:
        return refusal.render()
    raise AssertionError(f"not refused: {rows}")


def assert_proven(
    pool: Pool,
    plan: Plan,
    batches: Sequence[Batch],
    *,
    loss: Any = None,
    weight: Any = None,
    seed: int = 0,
) -> Report:
    """Assert that the proof of a plan holds, or show its failing rows; return the report."""
    report = prove(Case(plan, tuple(batches), loss, weight, seed, "none"), pool=pool)
    failures = [
        (r.condition, r.kind, r.step, r.name, r.error, r.note) for r in report.rows if not r.ok
    ]
    assert not failures, (failures[:6], report.blamed, report.diagnosis)
    return report


def static_holds(plan: Plan, batch: Batch) -> None:
    """Assert that static proofs, which need no ranks, exist and hold."""
    from schedlang.passes.static_checks.static import static

    proofs = static(plan, batch)
    failures = [
        (claim.name, claim.description, claim.problems)
        for claim in proofs.claims
        if not claim.holds
    ]
    assert proofs.claims and not failures and not proofs.problems, (failures, proofs.problems)


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD with momentum, and weight decay on matrices only."""
    pairs = list(parameters)
    # by name: groups by shape would differ between layouts
    groups = [
        {"params": [p for n, p in pairs if ("bias" in n) == is_bias], "weight_decay": decay}
        for is_bias, decay in ((True, 0.0), (False, 0.1))
    ]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([p for _, p in parameters], lr=0.01, eps=1e-5)


Observed = dict[str, Tensor]


def train_steps(
    plan: Plan,
    batches: Sequence[Batch],
    optimizer: Any,
    clip: float | None,
    options: dict[str, Any],
) -> Observed:
    """On this rank: train one step for each batch; return losses, norms, gradients and state.

    On several ranks dropout masks do not depend on the layout.
    """
    observed: Observed = {}
    if plan.mesh.world > 1:
        options = {"dropout": "logical"} | options
    with enter_modes(Float64()):
        program = build(plan, batches[0], optimizer=optimizer, clip=clip, **options)
        for step, batch in enumerate(batches):
            observed[f"loss {step}"] = program.train_step(batch).clone()
            observed[f"norm {step}"] = torch.tensor(program.grad_norm)
            for name, grad in program.gradients().items():
                observed[f"grad {step} {name}"] = grad.clone()
    for name, value in program.state_dict().items():
        observed[f"state {name}"] = value.clone()
    for name, slots in program.optimizer_state().items():
        for slot, value in slots.items():
            observed[f"optimizer {slot} {name}"] = torch.as_tensor(value).clone()
    return observed


def prepare_plan(
    plan: Plan, batches: Sequence[Batch], loss: Any = None, weight: Any = None
) -> tuple[Plan, Prepared]:
    """Complete a plan and prepare it in float64, as a rank does."""
    with enter_modes(Float64()):
        case = prepare_case(Case(plan, tuple(batches), loss, weight))
    assert case.prepared is not None
    return case.plan, case.prepared


def run_prepared(
    pool: Pool | Threads, fn: Callable[..., Any], plan: Plan, batch: Batch, *args: Any
) -> list[Any]:
    """Call `fn(plan, prepared, *args)` on the ranks of a plan, which is prepared once for all."""
    plan, prepared = prepare_plan(plan, [batch])
    return pool.run(fn, plan.mesh.world, plan, prepared, *args)


def train_on_ranks(
    pool: Pool | Threads,
    plan: Plan,
    batches: Sequence[Batch],
    optimizer: Any = sgd,
    *,
    clip: float | None = None,
    **options: Any,
) -> Observed:
    """Train one step for each batch; return what rank 0 observes. Options are those of `build`.

    The plan is prepared once for all ranks, as by `verify`. With `prepared=None`, and with local
    batches, each rank prepares it by itself, as in a job.
    """
    if "prepared" not in options and not options.get("local"):
        plan, options["prepared"] = prepare_plan(
            plan, batches, options.get("loss"), options.get("weight")
        )
    observed: Observed = pool.run(
        train_steps, plan.mesh.world, plan, tuple(batches), optimizer, clip, options
    )[0]
    return observed


def train_sequential(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: Any = sgd,
    *,
    clip: float | None = None,
    loss: Any = None,
    seed: int | None = None,
) -> Observed:
    """The same observations of a plain training loop on a copy; `seed`: dropout as in a program."""
    trainer = Sequential(copy.deepcopy(model), optimizer, loss=loss, clip=clip)
    masks = () if seed is None else (LogicalDropout(seed),)
    observed: Observed = {}
    with enter_modes(Float64(), *masks):
        for step, batch in enumerate(batches):
            observed[f"loss {step}"] = trainer.train_step(batch).clone()
            observed[f"norm {step}"] = torch.tensor(float(trainer.grad_norm or 0.0))
            for name, grad in trainer.gradients().items():
                if grad is not None:
                    observed[f"grad {step} {name}"] = grad.clone()
    for name, value in trainer.state_dict().items():
        observed[f"state {name}"] = value.clone()
    for name, slots in trainer.optimizer_state().items():
        for slot, value in slots.items():
            observed[f"optimizer {slot} {name}"] = torch.as_tensor(value).clone()
    return observed


def assert_same(a: Observed, b: Observed) -> None:
    """Assert equal names and bitwise equal tensors."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:8]
    differ = [name for name in a if not torch.equal(a[name], b[name])]
    assert not differ, differ[:8]


def assert_near(a: Observed, b: Observed, rtol: float = 1e-9) -> None:
    """Assert equal names and tensors, except for rounding relative to each tensor's norm."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:8]
    largest: dict[str, float] = {}
    for name, value in b.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), float(value.double().norm()))
    differences = {}
    for name, value in a.items():
        error = float((value.double() - b[name].double()).norm())
        if error > rtol * float(b[name].double().norm()) + 1e-12 * largest[name.split()[0]]:
            differences[name] = error
    assert not differences, dict(list(differences.items())[:8])
