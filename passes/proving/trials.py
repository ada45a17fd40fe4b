"""Trials: kernels and compiled regions, run by themselves beside the proof in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from schedlang.plan import Action, Plan
from schedlang.primitive import Primitive
from schedlang.report import Row

if TYPE_CHECKING:
    from torch import nn


def trials(plan: Plan, batch: Mapping[str, Any]) -> tuple[list[Row], list[str]]:
    """The rows of all trials, and what could not be run; one trial for each kind of module.

    `batch` is a real batch of the model's own dtype: its forward gives each module its arguments.
    """
    wanted: dict[Any, tuple[Action, str]] = {}
    for action in plan.actions:
        if type(action.primitive).trial is Primitive.trial:
            continue
        for fqn in action.sites:
            wanted.setdefault((action.primitive, plan.model.sites[fqn].kind), (action, fqn))
    if not wanted:
        return [], []
    calls = _calls(plan.model.model, batch, {fqn for _, fqn in wanted.values()})
    rows, unchecked = [], []
    for action, fqn in wanted.values():
        for trial in action.primitive.trial(plan.model.sites[fqn], plan, calls[fqn]):
            kind = f"{action.name} itself"
            rows.append(Row("kernels", kind, trial.name, trial.error, trial.allowed, trial.ok))
            if not trial.ran:
                unchecked.append(f"{action.primitive} at `{fqn}` was not run: {trial.name}")
    return rows, unchecked


def _calls(model: nn.Module, batch: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """The arguments of one call of each module."""
    import torch

    from schedlang.runtime.given import called

    calls: dict[str, Any] = {}

    def noting(fqn: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(fqn, (args, kwargs))

        return note

    handles = [
        model.get_submodule(fqn).register_forward_pre_hook(noting(fqn), with_kwargs=True)
        for fqn in sorted(wanted)
    ]
    flags = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            called(model.eval(), batch)
    finally:
        for module, flag in flags:
            module.training = flag
        for handle in handles:
            handle.remove()
    return calls
