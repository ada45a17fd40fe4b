"""Trial of a plan's casts: one forward on the meta device finds operators that torch rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.ir.annotations import Cast
from schedlang.ir.model import is_inside, quote_module
from schedlang.ir.plan import Plan
from schedlang.passes.elaborate.rows import describe_group, shape_of
from schedlang.passes.propagate.casts import cast_loss, cast_modules

if TYPE_CHECKING:
    from torch import nn

Loss = Callable[..., Any]
Run = Callable[[Sequence[Cast]], "ForwardFailure | None"]  # runs a forward under these casts


@dataclass(frozen=True)
class ForwardFailure:
    """An error of a forward, and the innermost running module; None: the loss was running."""

    error: Exception
    site: str | None


def check_casts(plan: Plan, sample: Mapping[str, Any], loss: Loss | None) -> None:
    """Refuse (S895) a model that torch does not run under the casts of a plan."""
    casts = tuple(plan.casts)
    key = ("casts", casts)
    if not casts or key in plan.model.cache:
        return
    check_forward(plan, lambda tried: _failure(plan, tried, sample, loss))
    plan.model.cache[key] = True


def check_forward(plan: Plan, run: Run) -> None:
    """Refuse (S895) a plan whose forward fails under its casts; name casts that run.

    `run` runs a forward under given casts and returns its failure, or None.
    """
    failure = run(tuple(plan.casts))
    if failure is not None:
        raise _refusal(plan, failure, tuple(_find_remedies(plan, failure, run))) from failure.error


def _refusal(plan: Plan, failure: ForwardFailure, remedies: tuple[str, ...]) -> Refusal:
    """Return the refusal of a failure, at the row of the innermost cast around the module."""
    from schedlang.runtime.tracing.model_lines import line_of

    error, site = failure.error, failure.site
    cast = _innermost_cast(tuple(plan.casts), site or "")
    row = plan.origin(cast)
    line, message = line_of(error), f"{type(error).__name__}: {error}".split("\n")[0]
    target = "the loss" if site is None else quote_module(site)
    label = Label(row.span) if row is not None else Label()
    return Refusal.of(
        "S895",
        f"torch does not run {target} under `{_cast_text(cast)}`",
        label,
        notes=(f"it raises `{message}`{line and f', at {line}'}",),
        helps=(*remedies, "or " * bool(remedies) + "select other modules for this row"),
    )


def _failure(
    plan: Plan, casts: Sequence[Cast], sample: Mapping[str, Any], loss: Loss | None
) -> ForwardFailure | None:
    """Run a forward of the full model, with the loss, under some casts; return its failure."""
    from schedlang.runtime.batch import run_forward
    from schedlang.runtime.tracing.meta_runs import meta_model, without_values

    cast_plan, model = replace(plan, casts=tuple(casts)), meta_model(plan.model.model, {})
    cast_modules(cast_plan, model)

    def run() -> None:
        with without_values(sample) as (inputs, _):
            run_forward(model.train(), inputs, cast_loss(cast_plan, loss))

    return try_forward(model, run)


def try_forward(model: nn.Module, forward: Callable[[], None]) -> ForwardFailure | None:
    """Run a forward of a copy of the model; return its error and module, or None.

    Refusals are raised.
    """
    running: list[str] = []  # the modules that run, outermost first

    def leave(*call: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, args, name=name: running.append(name))
        module.register_forward_hook(leave)
    try:
        forward()
    except Refusal:
        raise
    except Exception as error:
        return ForwardFailure(error, running[-1] if running else None)
    return None


def _find_remedies(plan: Plan, failure: ForwardFailure, run: Run) -> Iterator[str]:
    """Yield changes of rows, as text, under which the forward was run successfully."""
    casts, current = tuple(plan.casts), failure
    islands = list(casts)
    while (island := _float32_casts(plan, islands, current.site)) is not None:
        islands += island
        remaining = run(islands)
        if remaining is None:
            rows = ", ".join(_rows_of(plan, islands[len(casts) :]))
            yield f"compute it in float32, below this row: {rows}"
            return
        current = remaining
    cast = _innermost_cast(casts, failure.site or "")
    flipped_cast = replace(cast, params=not cast.params)
    row = plan.origin(cast)
    sites = row.sites if row is not None else (cast.fqn,)
    flipped = [
        replace(cast_row, params=flipped_cast.params) if cast_row.fqn in sites else cast_row
        for cast_row in casts
    ]
    if cast.dtype != "fp32" and run(flipped) is None:
        scope = "parameters too" if flipped_cast.params else "operations by torch's lists"
        yield f"cast {scope}: `{_cast_text(flipped_cast)}`"


def _float32_casts(plan: Plan, casts: Sequence[Cast], site: str | None) -> list[Cast] | None:
    """Return casts to float32 for a failing module and the same module of other layers.

    Returns None where such a cast exists, or where the module's own cast fails.
    """
    if site is None:
        return None
    cast, sites = _innermost_cast(casts, site), plan.model.sites
    if cast.dtype == "fp32" or cast.fqn == site:
        return None
    alike = [
        s for s in sites if shape_of(s) == shape_of(site) and sites[s].kind == sites[site].kind
    ]
    below = [s for s in alike if replace(_innermost_cast(casts, s), fqn=cast.fqn) == cast]
    return [Cast(s, "fp32", False, cast.scale, cast.growth) for s in below]


def _rows_of(plan: Plan, casts: Sequence[Cast]) -> Iterator[str]:
    """Yield `cast(fp32)` rows: one for the same module of all layers."""
    groups: dict[str, list[str]] = {}
    for cast in casts:
        groups.setdefault(shape_of(cast.fqn), []).append(cast.fqn)
    for group in groups.values():
        yield f"`{describe_group(group, plan.model.sites)}  cast(fp32)`"


def _innermost_cast(casts: Sequence[Cast], site: str) -> Cast:
    """Return the innermost cast around a module, or the first cast if there is none."""
    enclosing = [cast for cast in casts if is_inside(site, cast.fqn)]
    return max(enclosing, key=lambda cast: len(cast.fqn), default=casts[0])


def _cast_text(cast: Cast) -> str:
    return f"cast({cast.dtype}{', params=true' * cast.params})"
