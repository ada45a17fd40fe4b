"""Modules that would not compute the same when they are recomputed: refused before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.ir.plan import Action, Plan

if TYPE_CHECKING:
    from schedlang.runtime.activation_memory.second_run import Difference


Loss = Callable[..., Any]
_SHOWN = 60


def check_repeats(
    plan: Plan, rows: Sequence[Action], sample: Mapping[str, Any], loss: Loss | None
) -> None:
    """Refuse (S843) a row that recomputes what draws from elsewhere than torch's generators.

    One module of each kind is run on the meta device, once for each row and plan.  A module that
    is called with other weights is refused, too: a recomputation would take its own.
    """
    from schedlang.passes.propagate.propagate import backward_root
    from schedlang.runtime.activation_memory.second_run import Repeats
    from schedlang.runtime.tracing.meta import meta_model, without_values

    kinds = {site: _kind(plan, site) for action in rows for site in action.sites}
    key = ("repeats", tuple(sorted(kinds)))
    if key in plan.model.cache:
        return
    model: Any = meta_model(plan.model.model, {})
    model.train()
    given: list[str] = []
    for site in kinds:
        model.get_submodule(site).register_forward_pre_hook(partial(_note_given, given, site))
    with without_values(sample) as (inputs, _):
        found = Repeats(model, kinds).run(lambda: backward_root(model, inputs, loss))
    if given:
        raise Refusal(_with_others(given[0], _label(rows, given[0])))
    if found:
        raise Refusal(_told(plan, found[0], _label(rows, found[0].module)))
    plan.model.cache[key] = True


def _label(rows: Sequence[Action], site: str) -> Label:
    row = next(action for action in rows if site in action.sites)
    return Label(row.span) if row.span else Label()


def _note_given(found: list[str], site: str, module: Any, *_: object) -> None:
    """Note a module that is called with other tensors in the place of its parameters."""
    from torch.nn import Parameter

    held = (value for one in module.modules() for value in one._parameters.values())
    if any(value is not None and not isinstance(value, Parameter) for value in held):
        found.append(site)


def _with_others(name: str, label: Label) -> Diagnostic:
    return Diagnostic(
        "S843",
        f"recomputing `{name}` would take its own weights, not those that it is called with",
        label,
        notes=("`torch.func.functional_call` puts others in their place, for the call alone",),
        helps=("checkpoint a module around the one that makes these weights",),
    )


def _kind(plan: Plan, site: str) -> object:
    """Equal for modules that are alike, with all that they hold."""
    prefix = f"{site}." if site else ""
    sites = plan.model.sites
    inside = (n for n in sites if n == site or n.startswith(prefix))
    return tuple((name.removeprefix(site), sites[name].kind) for name in inside)


def _told(plan: Plan, found: Difference, label: Label) -> Diagnostic:
    runs = [
        f"with {text[:_SHOWN]}" if text else "not at all, or as a different call"
        for text in (found.first, found.second)
    ]
    name = plan.model.sites[found.module].class_name
    return Diagnostic(
        "S843",
        f"recomputing `{found.module}` gives another result: `{found.function}` differs",
        label,
        notes=(
            f"`{name}` calls it {runs[0]}, then {runs[1]}",
            f"at {found.place}",
            "recomputation repeats the random numbers of torch's generators, and no others",
        ),
        helps=(
            "draw with torch: `torch.rand(())` instead of `random.random()`",
            "or checkpoint other modules",
        ),
    )
