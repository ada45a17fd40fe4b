"""Asked before ranks train: whether the parts of a batch make the whole, as `verify` asks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.verify.runs import check_parts
from schedlang.passes.verify.sides import Case, prepared, widened

if TYPE_CHECKING:
    from schedlang.passes.analyze.prepare import Prepared

CHEAP = 10**9  # parameters times numbers of a batch: about a second of one core, both sides in all


def sound(case: Case) -> Case:
    """The case with its plan traced once; refuses whatever `verify` refuses before it has ranks.

    A model that lies on the meta device has no loss to ask for.
    """
    made = prepared(case)
    if not _hollow(made.plan):
        check_parts(widened(made))
    return made


def cheaply(
    plan: Plan, batch: Mapping[str, Any], found: Prepared, *, loss: Any = None, weight: Any = None
) -> None:
    """Refuse as `verify` does where parts do not make the whole (S703, S708), if soon found out.

    For `build`, on each rank alike: it runs the model on the whole batch, which for a large one
    takes as long as steps do, and memory that its ranks may not have.  There `verify` says it.
    """
    from schedlang.runtime.batch import named_tensors

    numbers = max((t.numel() for t in named_tensors(batch).values()), default=0)
    size = sum(fact.numel for fact in plan.model.unique.values())
    apart = plan.shares * plan.micro > 1 and found.traced.lossless is None
    if not apart or size * numbers > CHEAP or _hollow(plan) or not _has_float64(plan):
        return
    case = Case(plan, (dict(batch),), loss, weight, dtype="none", prepared=found)
    try:
        check_parts(widened(case))
    except Refusal as refusal:
        if refusal.diagnostic.code in ("S707", "S710"):  # of parts they say nothing
            return
        raise
    except Exception:  # a model that cannot be copied, or run in float64, trains all the same
        return


def _hollow(plan: Plan) -> bool:
    return any(tensor.is_meta for tensor in plan.model.model.parameters())


def _has_float64(plan: Plan) -> bool:
    """Whether the device where the model lies computes in float64."""
    from schedlang.runtime.device import has_float64

    return all(has_float64(tensor.device) for tensor in plan.model.model.parameters())
