"""Prove that a plan computes what the model computes: run the ranks, run the original, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.blame import blame
from schedlang.passes.observe import Batch, Condition, Loss, Observation, conditions, observe
from schedlang.plan import Action, Plan
from schedlang.report import Report, Row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.launch import Pool
    from schedlang.runtime.program import Program

MOST_RANKS = 8
DTYPES = ("float32", "bfloat16", "float16", "none")
Weight = Callable[[Batch], float]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """What is to be proven, all that a rank needs to run it.

    `batches` one for each step.  `dtype` is the working dtype that is checked beside float64: that
    of the model if None, not checked if "none".
    """

    plan: Plan
    batches: tuple[Batch, ...]
    loss: Loss | None = None
    weight: Weight | None = None
    seed: int = 0
    dtype: str | None = None

    def with_model(self, module: nn.Module) -> Case:
        """The same for another module of the same names and shapes."""
        from schedlang.model import ModelFacts

        return replace(self, plan=replace(self.plan, model=ModelFacts(module)))


def prove(
    case: Case, *, pool: Pool | None = None, title: str = "", command: str = "",
    progress: Progress = lambda stage: None,
) -> Report:  # fmt: skip
    """Compare a plan with its original in float64; on failure name the rows to blame.

    Raises Refusal for a plan or batch that cannot be run, RankDied or Hang for a run that failed.
    """
    from schedlang.passes.compare import compare
    from schedlang.runtime import launch

    start = time.perf_counter()
    check_world(case.plan)
    pool = pool or launch.shared()
    working, case = as_worked(case), widened(case)
    progress("the original")
    told = _conditions(case)
    check_parts(case)
    expected, drawn = _original(case, told)
    progress(f"{case.plan.mesh.world} ranks")
    actual, rounded, archive = _ranks(case, working, told, pool)
    exact = not case.plan.gives_up
    rows = [*compare(expected, actual, exact=exact), *_archive_rows(case, archive, actual)]
    if working is not None:
        rows += _working_rows(working, told, expected, rounded)
    report = Report(
        tuple(rows), title=title, facts=_facts(case), equivalence="exact" if exact else "algebraic",
        gaps=_gaps(case, actual, drawn), command=command,
    )  # fmt: skip
    if not report.ok and any(not row.ok for row in rows):
        progress("the row to blame")
        report = replace(report, blamed=tuple(_blamed(case, pool)), diagnosis=_diagnosis(case, report, expected, actual))
    return replace(report, seconds=time.perf_counter() - start)


def widened(case: Case) -> Case:
    """The case on a float64 copy of the model with other parameters, and float64 batches."""
    from schedlang.passes.original import randomised
    from schedlang.runtime.float64 import as_float64
    from schedlang.runtime.float64 import widened as wide

    module = as_float64(randomised(_typed(case), case.seed))
    return replace(case.with_model(module), batches=tuple(wide(dict(b)) for b in case.batches))


def as_worked(case: Case) -> Case | None:
    """The case in the working dtype, from the very weights that the float64 run starts from."""
    import torch

    from schedlang.passes.original import randomised

    module = case.plan.model.model
    if case.dtype == "none":
        return None
    if case.dtype is not None:
        if case.dtype not in DTYPES:
            raise Refusal(
                Diagnostic("S704", f"`{case.dtype}` is no working dtype",
                           helps=(f"choose one of {', '.join(DTYPES)}",))
            )  # fmt: skip
        module = _typed(case)
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if kinds == {torch.float64}:
        return None
    return case.with_model(randomised(module, case.seed))


def _typed(case: Case) -> nn.Module:
    """The model in the dtype asked for."""
    import copy

    import torch

    module = case.plan.model.model
    if case.dtype in (None, "none"):
        return module
    return copy.deepcopy(module).to(getattr(torch, str(case.dtype)))


def _working_rows(
    working: Case, told: Sequence[Condition], exact: Observation, program: Observation
) -> list[Row]:
    """The program in the working dtype, no further from float64 than the original's own rounding."""
    from schedlang.passes.original import Sequential
    from schedlang.passes.rounding import within_rounding
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.random import LogicalDropout

    def make(condition: Condition) -> Sequential:
        return Sequential(_twin(working), condition.optimizer, loss=working.loss, clip=condition.clip)

    first = [replace(condition, batches=working.batches) for condition in told[:1]]
    with ambient(LogicalDropout(working.seed)):
        original = observe(make, first)
    names = {condition.name for condition in first}
    wanted = replace(exact, tensors={k: v for k, v in exact.tensors.items() if k.condition in names})
    return list(within_rounding(wanted, original, program))


def check_world(plan: Plan) -> None:
    """Refuse more ranks than a laptop runs, naming a mesh that keeps every row."""
    if plan.mesh.world <= MOST_RANKS:
        return
    sizes = dict(plan.mesh.axes)
    for axis in sizes:  # two ranks along an axis show what more of them would
        sizes[axis] = min(sizes[axis], 2)
    for axis in list(sizes):
        if _product(sizes.values()) > MOST_RANKS:
            sizes[axis] = 1
    small = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise Refusal(
        Diagnostic(
            "S702", f"{plan.mesh.world} ranks are more than `verify` starts on one machine",
            notes=(f"the mesh is {plan.mesh}; at most {MOST_RANKS} ranks run",),
            helps=(f"verify the same rows on a smaller mesh: `--mesh {small}`",),
        )
    )  # fmt: skip


def _product(values: Iterable[int]) -> int:
    out = 1
    for value in values:
        out *= value
    return out


# -- the two sides -----------------------------------------------------------------------------------


def _modes(seed: int) -> Any:
    """The modes that both sides run under, and the dropout among them."""
    from schedlang.runtime.float64 import Float64
    from schedlang.runtime.random import LogicalDropout

    dropout = LogicalDropout(seed)
    return (Float64(), dropout), dropout


def _conditions(case: Case) -> tuple[Condition, ...]:
    """The training runs; clipping is set by the gradient norm of the original."""
    from schedlang.passes.original import Sequential
    from schedlang.runtime.modes import ambient

    modes, _ = _modes(case.seed)
    with ambient(*modes):
        norm = Sequential(_twin(case), loss=case.loss).norm(case.batches[0])
    return conditions(case.batches, norm)


def _twin(case: Case) -> nn.Module:
    import copy

    return copy.deepcopy(case.plan.model.model)


def check_parts(case: Case) -> None:
    """Refuse a model whose loss over the parts, weighed, is not the loss of the whole."""
    from schedlang.passes.build import part_weight
    from schedlang.passes.compare import parts_agree
    from schedlang.passes.original import Sequential
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.parts import split

    plan = case.plan
    micro = plan.order.micro if plan.order is not None else 1
    batch = case.batches[0]
    parts = [p for share in split(batch, plan.mesh.size(plan.data_axes), micro) for p in share]
    if len(parts) == 1:
        return
    weigh = part_weight(plan, parts[0].inputs, case.loss, case.weight, len(parts))
    modes, _ = _modes(case.seed)
    with ambient(*modes):
        rows = parts_agree(
            Sequential(_twin(case), loss=case.loss), batch,
            [(part.inputs, part.rows) for part in parts], [weigh(part.inputs) for part in parts],
        )  # fmt: skip
    bad = next((row for row in rows if not row.ok), None)
    relaxed = {name for _, names in plan.relaxed for name in names}
    if bad is None or "batch_stats" in relaxed:
        return
    raise Refusal(
        Diagnostic(
            "S703", "the loss of this model is not the weighed mean of the losses of parts",
            notes=(f"on the original, cut into {len(parts)} parts, {bad.place} differs by {bad.error:.1e}",
                   "statistics over the batch (batch norm, router losses) would differ by rank"),
            helps=("say what a part weighs: `weight(batch)` in the model file",
                   "or allow it: `step \"...\" relax(batch_stats) {`"),
        )
    )  # fmt: skip


def _original(case: Case, told: Sequence[Condition]) -> tuple[Observation, int]:
    from schedlang.passes.original import Sequential
    from schedlang.runtime.modes import ambient

    modes, dropout = _modes(case.seed)

    def make(condition: Condition) -> Sequential:
        return Sequential(_twin(case), condition.optimizer, loss=case.loss, clip=condition.clip)

    with ambient(*modes):
        return observe(make, told), dropout.drawn


class Distributed:
    """A program as a subject of observation; all ranks call alike."""

    def __init__(self, program: Program) -> None:
        self.program = program
        program.follow_inputs = True

    @property
    def grad_norm(self) -> float | None:
        """Of the last step, before clipping."""
        return self.program.grad_norm

    def train_step(self, batch: Batch) -> Tensor:
        """One step of the program."""
        return self.program.train_step(batch)

    def eval_step(self, batch: Batch) -> Any:
        """The output, without what the last stage cannot give."""
        return self.program.eval_step(batch)

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Whole gradients; one that no rank has is None."""
        found = self.program.gradients()
        return {name: found.get(name) for name in self.program.trained()}

    def input_gradients(self) -> Mapping[str, Tensor | None]:
        """Of the batch's float tensors."""
        return self.program.input_gradients()

    def state_dict(self) -> Mapping[str, Tensor]:
        """Whole state under original names."""
        return self.program.state_dict()

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Whole optimizer state by name."""
        return self.program.optimizer_state()

    def trainable(self) -> list[str]:
        """Names of updated parameters."""
        return self.program.trained()

    def replicas(self) -> Mapping[str, float]:
        """Differences between copies."""
        return self.program.replica_errors()


def _ranks(
    case: Case, working: Case | None, told: Sequence[Condition], pool: Pool
) -> tuple[Observation, Observation, dict[str, Any]]:
    """What the ranks saw in float64 and in the working dtype, and the state that they saved, loaded."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="schedlang-") as folder:
        world = case.plan.mesh.world
        seen, rounded = pool.run(_rank, world, case, working, tuple(told), folder)[0]
        import os; return seen, rounded, _loaded(case, told, folder) if os.path.exists(folder+'/state') else None


def _rank(
    case: Case, working: Case | None, told: Sequence[Condition], folder: str
) -> tuple[Observation, Observation]:
    """One rank's part of the proof; only rank 0 keeps what it saw."""
    from schedlang.runtime.float64 import Float64
    from schedlang.runtime.modes import ambient

    made: list[Program] = []
    with ambient(Float64()):
        seen = _observed(case, told, made)
        if hasattr(made[-1],'save'): made[-1].save(f"{folder}/state")
    if working is None:
        return seen, Observation()
    first = [replace(condition, batches=working.batches) for condition in told[:1]]
    return seen, _observed(working, first, [])


def _observed(case: Case, told: Sequence[Condition], made: list[Program]) -> Observation:
    """One rank's observation of programs, which are noted in `made`."""
    import torch.distributed as dist

    from schedlang.passes.build import build

    def make(condition: Condition) -> Distributed:
        program = build(
            case.plan, case.batches[0], loss=case.loss, optimizer=condition.optimizer,
            clip=condition.clip, weight=case.weight, seed=case.seed,
        )  # fmt: skip
        made.append(program)
        return Distributed(program)

    rank = dist.get_rank() if dist.is_initialized() else 0
    return observe(make, told, keep=rank == 0)


def _loaded(case: Case, told: Sequence[Condition], folder: str) -> dict[str, Any]:
    """The saved state, loaded by a program of one rank with no rows."""
    from schedlang.mesh import Mesh
    from schedlang.passes.build import build
    from schedlang.runtime.float64 import Float64
    from schedlang.runtime.modes import ambient

    plain = Plan.empty(case.plan.model, Mesh())
    with ambient(Float64()):
        program = build(plain, case.batches[0], loss=case.loss, optimizer=told[-1].optimizer)
        program.load(f"{folder}/state")
        return {"state": program.state_dict(), "optimizer": program.optimizer_state()}


def _archive_rows(case: Case, archive: Mapping[str, Any], actual: Observation) -> list[Row]:
    """Saved under this layout and loaded by one rank: equal to the last bit."""
    import torch

    if archive is None: return []
    last = max(key.step for key in actual.tensors if key.kind == "parameters")
    condition = list(actual.tensors)[-1].condition
    rows = []
    for key, value in actual.tensors.items():
        if key.condition != condition or key.step != last or value is None:
            continue
        if key.kind in ("parameters", "other state"):
            got = archive["state"].get(key.name)
        elif key.kind.startswith("optimizer "):
            got = archive["optimizer"].get(key.name, {}).get(key.kind.removeprefix("optimizer "))
        else:
            continue
        same = got is not None and torch.equal(torch.as_tensor(got).to(value.dtype), value)
        note = "" if same else "lost" if got is None else "not what was saved"
        shape = tuple(value.shape)
        rows.append(Row(condition, "saved state", key.name, 0.0 if same else 1.0, 0.0, same, last, note, shape))
    return rows


# -- what is said about it ---------------------------------------------------------------------------


def _facts(case: Case) -> tuple[tuple[str, str], ...]:
    import torch

    mesh = case.plan.mesh
    return (
        ("mesh", f"{mesh} ({mesh.world} ranks)" if mesh.axes else "one rank"),
        ("seed", str(case.seed)),
        ("dtype", "float64"),
        ("torch", torch.__version__),
    )


def _gaps(case: Case, actual: Observation, drawn: int) -> tuple[Any, ...]:
    from schedlang.passes.coverage import gaps, unoffered

    plan = case.plan
    micro = plan.order.micro if plan.order is not None else 1
    names = {name: fact.numel for name, fact in plan.model.unique.items()}
    found = gaps(
        case.batches, sizes=dict(plan.mesh.axes), parts=plan.mesh.size(plan.data_axes) * micro,
        drawn=drawn, parameters=names,
    )  # fmt: skip
    return (*found, *unoffered(actual))


def _diagnosis(case: Case, report: Report, expected: Observation, actual: Observation) -> str:
    from schedlang.passes.diagnose import explain

    bad = next(row for row in report.rows if not row.ok)
    return explain(bad, expected, actual, dict(case.plan.mesh.axes))


def _blamed(case: Case, pool: Pool) -> list[str]:
    """The rows that fail together, as lines of the schedule."""
    rows = [action for action in case.plan.actions if action.name != "verify"]
    quick = replace(case, batches=case.batches[:1])

    def fails(subset: tuple[Action, ...]) -> bool:
        from schedlang.passes.compare import compare

        try:
            plan = only(case.plan, subset)
            told = _conditions(quick)[:1]
            small = replace(quick, plan=plan)
            expected, _ = _original(small, told)
            actual = pool.run(_tried, plan.mesh.world, small, told)[0]
        except Refusal:
            return False
        return any(not row.ok for row in compare(expected, actual))

    found = blame(rows, fails)
    return [shown(action) for action in found.rows]


def _tried(case: Case, told: Sequence[Condition]) -> Observation:
    """One rank's observation while looking for the row to blame."""
    from schedlang.runtime.float64 import Float64
    from schedlang.runtime.modes import ambient

    with ambient(Float64()):
        return _observed(case, told, [])


def only(plan: Plan, rows: Sequence[Action]) -> Plan:
    """A plan of some of the rows, on a mesh in which axes that none of them uses have size 1.

    Raises Refusal where these rows alone are not legal.
    """
    made = replace(Plan.empty(plan.model, plan.mesh), decisions=plan.decisions, relaxed=plan.relaxed)
    for action in rows:
        made = made.add(action.primitive, action.sites, step=action.step, span=action.span)
    used = made.used_axes
    axes = tuple((name, size if name in used else 1) for name, size in plan.mesh.axes)
    smaller = replace(plan.mesh, axes=axes)
    again = replace(Plan.empty(plan.model, smaller), decisions=plan.decisions, relaxed=plan.relaxed)
    for action in rows:
        again = again.add(action.primitive, action.sites, step=action.step, span=action.span)
    return again


def shown(action: Action) -> str:
    """A row as text: its place and what it does."""
    span = action.span
    where = f"{span.source.name}:{span.line}: " if span is not None and span.line else ""
    sites = action.sites[0] if len(action.sites) == 1 else f"{action.sites[0]} and {len(action.sites) - 1} more"
    return f"{where}{sites}  {action.primitive}".rstrip()


def only_lines(plan: Plan, lines: str) -> Plan:
    """The plan of the rows that stand on the given lines, as "11,14-17" (S705)."""
    wanted: set[int] = set()
    for part in lines.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise Refusal(
                Diagnostic("S705", f"`--only {lines}` names no lines", helps=("write `--only 11,14-17`",))
            )  # fmt: skip
        wanted |= set(range(int(first), int(last or first) + 1))
    rows = [action for action in plan.actions if action.span is not None and action.span.line in wanted]
    if not rows:
        raise Refusal(
            Diagnostic("S705", f"no row stands on the lines {lines}",
                       helps=("lines are those of the schedule file",))
        )  # fmt: skip
    return only(plan, rows)


def repeated(file: object, plan: Plan, seed: int, model: str | None, lines: str | None) -> str:
    """The command that repeats a verification."""
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.axes)
    parts = ["schedlang verify", str(file), f"--seed {seed}"]
    parts += [f"--mesh {mesh}"] if mesh else []
    parts += [f"--model {model}"] if model else []
    parts += [f"--only {lines}"] if lines else []
    return " ".join(parts)
