"""Trials of kernels and compiled regions, run separately from the float64 proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, equal, nn
from torch.utils._pytree import tree_leaves, tree_map

from schedlang.ir.features import Tried
from schedlang.ir.module_attributes import module_kind
from schedlang.ir.module_copies import copy_module
from schedlang.ir.plan import Action
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.proof_case import Case
from schedlang.passes.verify.training_runs import TEXT
from schedlang.report import Row
from schedlang.runtime.batch import run_model
from schedlang.runtime.submodules import CallArguments, record_first_calls

OTHER_VALUES, OTHER_SHAPE = "again, with other values", "in another shape"


def run_trials(working: Case, conditions: Sequence[Condition]) -> tuple[list[Row], list[str]]:
    """Return rows of all trials and what could not be run; one trial for each kind of module.

    `working` is in the model's own dtype: forwards of its batches give each module its arguments.
    """
    plan = working.plan
    wanted: dict[Any, tuple[Action, Tried, str]] = {}
    for action, row in plan.rows_with(Tried):
        for fqn in action.sites:
            wanted.setdefault((row, module_kind(plan.model, fqn)), (action, row, fqn))
    if not wanted:
        return [], []
    named = {fqn for _, _, fqn in wanted.values()}
    calls = _collect_calls(plan.model.model, list(_trial_batches(working, conditions)), named)
    rows, unchecked = [], []
    for action, row, fqn in wanted.values():
        for trial in row.trial(plan.model.sites[fqn], plan, calls[fqn]):
            kind = f"{action.name} itself"
            rows.append(Row("kernels", kind, trial.name, trial.error, trial.allowed, trial.ok))
            if not trial.ran:
                unchecked.append(f"{row} at `{fqn}` was not run: {trial.name}")
    return rows, unchecked


def _trial_batches(working: Case, conditions: Sequence[Condition]) -> Iterator[Batch]:
    """Yield the given batches and their variants in the working dtype; of text a shorter one."""
    first = working.batches[0]

    def as_given(name: str, value: Any) -> Any:
        like = first.get(name)
        if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor):
            return value.to(like.dtype)
        return value

    yield from working.batches
    others = [batch for condition in conditions[1:2] for batch in condition.batches]
    made = [{name: as_given(name, v) for name, v in batch.items()} for batch in others]
    last = made[-1] if made else first
    if TEXT.issuperset(last):
        yield {k: v[:, :-1] if v.dim() == 2 and v.shape[1] > 2 else v for k, v in last.items()}
    yield from made


def _collect_calls(
    model: nn.Module, batches: Sequence[Batch], wanted: set[str]
) -> dict[str, dict[str, CallArguments]]:
    """Return each module's first call, one with other values, and one with other shapes."""
    calls: dict[str, dict[str, CallArguments]] = {}
    model = copy_module(model).eval()
    for place, batch in enumerate(batches):
        try:
            found = _first_calls(model, batch, wanted)
        except Exception:  # any error of the model for a derived batch
            if not place:
                raise
            continue
        for fqn, call in found.items():
            known = calls.setdefault(fqn, {"": call})
            alike = _call_shapes(call) == _call_shapes(known[""])
            if not alike or not _equal_calls(call, known[""]):
                known.setdefault(OTHER_VALUES if alike else OTHER_SHAPE, call)
        if all(len(known) == 3 for known in calls.values()):
            break
    for known in calls.values():
        known.setdefault(OTHER_VALUES, _roll_rows(known[""]))
    return {
        fqn: {k: known[k] for k in ("", OTHER_VALUES, OTHER_SHAPE) if k in known}
        for fqn, known in calls.items()
    }


def _first_calls(model: nn.Module, batch: Batch, wanted: set[str]) -> dict[str, CallArguments]:
    """Return the arguments of each module's first call in a forward."""
    with torch.no_grad(), record_first_calls(model, wanted) as calls:
        run_model(model, batch)
    return calls


def _call_shapes(call: CallArguments) -> list[Any]:
    return [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in tree_leaves(call)]


def _equal_calls(one: CallArguments, other: CallArguments) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other))
    return all(equal(a, b) if isinstance(a, Tensor) else a is b or a == b for a, b in pairs)


def _roll_rows(call: CallArguments) -> CallArguments:
    """Return the call with the rows of its float tensors rolled by one."""

    def turned(x: Any) -> Any:
        numbers = isinstance(x, Tensor) and x.is_floating_point() and x.dim()
        return x.roll(1, 0) if numbers else x

    found: CallArguments = tree_map(turned, call)
    return found
