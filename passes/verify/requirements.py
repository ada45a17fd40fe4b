"""Requirements of a proof: rows that need equal bits, and what `verify(...)` rows request."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.features import Slicing
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import FACETS, Facet
from schedlang.passes.elaborate.rows import plan_of_rows
from schedlang.passes.elaborate.state import arguments_text
from schedlang.passes.propagate.saved_splits import recomputing_rows
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Row

# ---- Bitwise equality: with the original, or with the plan without its exact rows.


_LOCAL_FACETS = FACETS - {Facet.SHAPE, Facet.PLACEMENT, Facet.STAGE, Facet.STATE, Facet.ORDER}
# other rows depend on rows with these facets
_FACETS_OTHERS_NEED = FACETS - {Facet.RECOMPUTE, Facet.RESIDENCE}
IN_ORACLE = frozenset({"updates", "model"})  # the original follows the same rule, bitwise
_KINDS = (
    *("outputs", "training outputs", "loss", "gradients", "input gradients", "parameters"),
    *("other state", "hidden buffers"),
)
EXACT_ROWS = "exact rows"
_AT_STAGE_0 = "at stage 0"
_BACKWARD = ("gradients", "input gradients", "parameters")
_REORDER_RTOL = 8 * 2.0**-52  # of the norm: some float64 additions in another order


def inexact_rules(plan: Plan) -> frozenset[str]:
    """Return the rules by which results may differ from the original, without `IN_ORACLE`.

    Nothing is given up on axes of size 1 with one microbatch.
    """
    is_single = plan.mesh.world == 1 and (plan.order is None or plan.order.micro == 1)
    return frozenset(
        name
        for action in plan.actions
        if not (is_single and not action.changes(*_LOCAL_FACETS))
        for name in action.primitive.gives_up - IN_ORACLE
    )


def is_exact_row(action: Action) -> bool:
    """Return whether a row changes no bit and can be left out: recomputation, offloading."""
    return (
        action.has_effect
        and not action.changes(*_FACETS_OTHERS_NEED)
        and not action.primitive.gives_up
    )


def _is_exact(plan: Plan, action: Action) -> bool:
    """Return whether a row of this plan is exact; not if it recomputes from rounded inputs."""
    return is_exact_row(action) and action not in (row for row, _ in recomputing_rows(plan))


def without_exact_rows(plan: Plan, copies: int = 1) -> tuple[Plan, str] | None:
    """Return the plan without its exact rows and with unsliced state, and a description; or None.

    State is unsliced only where the same sums are made: gradients of two replicas, reduced once a
    step. With more replicas, or with `copies` of a pipeline's stages, the order of sums differs;
    with a reduction for each microbatch their grouping differs. Sliced state is then equal up to
    roundings.
    """
    exact_rows = [action for action in plan.actions if _is_exact(plan, action)]
    dropped = sorted({action.name for action in exact_rows})
    two_copies = plan.mesh.size(plan.data_axes) * copies == 2
    changes = [f"without {' and '.join(dropped)}"] if dropped else []
    rows: list[Action] = []
    for action in plan.actions:
        if action in exact_rows or not action.has_effect:
            continue
        row = action.primitive
        sliced = row if isinstance(row, Slicing) and row.slices else None
        if sliced and two_copies and (plan.micro == 1 or not sliced.each_microbatch):
            changes.append(f"{action.name} {_AT_STAGE_0}")
            action = replace(action, primitive=sliced.unsliced())
        rows.append(action)
    return (plan_of_rows(plan, rows), ", ".join(changes)) if changes else None


def compare_exact(
    baseline: Observation, program: Observation, label: str, summed: Container[str] = ()
) -> Iterator[Row]:
    """Compare the first step of a program with that of its baseline, bit by bit.

    With sliced state, a few roundings are allowed in gradients that may be added in another order.
    Parameters in `summed` are also summed over other axes, one sum before the other.
    """

    def first(observation: Observation) -> Observation:
        kept_tensors = {k: v for k, v in observation.tensors.items() if k in first_keys}
        return Observation(kept_tensors, order=observation.order, left_out=observation.left_out)

    first_keys = {k for k in baseline.tensors if k.step == 0 and k.kind in _KINDS}
    rows = compare(first(baseline), first(program), exact=True)
    for row in (
        _accept_reordered_sums(rows, baseline, program, summed) if _AT_STAGE_0 in label else rows
    ):
        yield replace(row, kind=EXACT_ROWS, name=f"{row.kind}: {row.name}", note=row.note or label)


def _accept_reordered_sums(
    rows: Iterable[Row], expected_run: Observation, program: Observation, summed: Container[str]
) -> Iterator[Row]:
    """Accept gradient differences that come from another order of addition.

    Units of sliced state are separate nodes of the graph: a tensor that a unit reads several times,
    and others read as well, gets (a + b) + c instead of (c + b) + a. So do tensors before it, and
    nothing else. Therefore forwards must be equal bit by bit, and so must the first gradient in
    backward that is not summed over ranks of one replica.
    """
    rows = list(rows)
    gradient_rows = {row.name: row for row in rows if row.kind == "gradients"}
    order = (name for name in program.order if name in gradient_rows and name not in summed)
    first_grad = next((gradient_rows[name] for name in order), None)
    start = (
        expected_run.tensors[_key(first_grad)] if first_grad is not None and first_grad.ok else None
    )
    equal_start = start is not None and bool(start.any())
    tied = {name for names in program.ties for name in names}  # tied names of updated parameters
    equal_start = equal_start and all(
        row.ok or row.kind in _BACKWARD or row.name in tied for row in rows
    )
    for row in rows:
        if row.ok or not equal_start:
            yield row
            continue
        expected, actual = expected_run.tensors[_key(row)], program.tensors[_key(row)]
        error = math.inf
        if expected is not None and actual is not None:
            error = float((actual - expected).norm() / expected.norm())
        if error <= _REORDER_RTOL:
            note = "added in another order"
            row = replace(row, error=error, gate=_REORDER_RTOL, ok=True, note=note)
        yield row


def _key(row: Row) -> Key:
    return Key(row.condition, row.kind, row.step or 0, row.name)


# ---- Requests of `verify(...)` rows beyond the checks of every proof.


STEPS = 3  # training steps of every proof
_SCOPES = {
    "forward": ("outputs", "training outputs", "loss"),
    "backward": ("gradients", "input gradients", "gradient norm"),
    "train": ("parameters",),
    "loss": ("loss",),
}


@dataclass(frozen=True)
class Curve:
    """A loss curve in the working dtype that must stay near the original's (`within`, relative)."""

    within: float
    steps: int
    place: str


@dataclass(frozen=True)
class Requirements:
    """Requests of all `verify` rows.

    `rtol` by kind replaces the error bound in the working dtype; float64 is never wider.
    """

    steps: int = STEPS
    rtol: Mapping[str, float] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    evaluate: bool = False
    exact: tuple[str, ...] = ()  # places of rows that request equal bits


def requirements_of(plan: Plan) -> Requirements:
    """Join all `verify` rows; refuse (S709) equal bits of rows that round."""
    required = Requirements()
    rtol: dict[str, float] = {}
    for row in plan.checks:
        action = plan.origin(row)
        if action is None:
            continue
        scopes = [what for what in row.what if what in _SCOPES] or ["forward", "backward", "train"]
        for kind in (kind for scope in scopes for kind in _SCOPES[scope]):
            if row.rtol is not None:
                rtol[kind] = min(row.rtol, rtol.get(kind, row.rtol))
        curves, steps, exact = required.curves, required.steps, required.exact
        if row.within is not None:
            curves = (*curves, Curve(row.within, row.steps or STEPS, _place(action)))
        elif row.steps is not None:
            steps = max(steps, row.steps)
        if "exact" in row.what:
            _check_exact(plan, action)
            exact = (*exact, _place(action))
        required = Requirements(steps, rtol, curves, required.evaluate or row.evaluate, exact)
    return required


def steps_of(plan: Plan) -> int:
    """Return the number of batches that a proof of this plan needs."""
    return requirements_of(plan).steps


def _check_exact(plan: Plan, action: Action) -> None:
    """Refuse a request for equal bits in a step whose rows round."""
    allowed = inexact_rules(plan)
    inexact = [a for a in plan.actions if a.step == action.step and a.primitive.gives_up & allowed]
    if inexact:
        refusal = Refusal.of(
            "S709",
            f"`{inexact[0].name}` cannot be bitwise equal",
            notes=(
                f"it changes {', '.join(sorted(inexact[0].primitive.gives_up))}, and is"
                f" in the step that `verify({arguments_text(action.primitive)})` checks",
            ),
            helps=(
                "leave `exact` out: float64 is compared to 1e-9",
                "or move the rows that are exact (`checkpoint`, `offload`) into another step",
            ),
        )
        raise refusal.at(action.span)


def _place(action: Action) -> str:
    span = action.span
    return f"{span.source.name}:{span.line}" if span is not None and span.line else "verify"
