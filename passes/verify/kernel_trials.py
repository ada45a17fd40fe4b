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
    trials: dict[Any, tuple[Action, Tried, str]] = {}
    for action, row in plan.rows_with(Tried):
        for fqn in action.sites:
            trials.setdefault((row, module_kind(plan.model, fqn)), (action, row, fqn))
    if not trials:
        return [], []
    trial_sites = {fqn for _, _, fqn in trials.values()}
    calls = _collect_calls(plan.model.model, list(_trial_batches(working, conditions)), trial_sites)
    rows, unchecked = [], []
    for action, row, fqn in trials.values():
        for trial in row.trial(plan.model.sites[fqn], plan, calls[fqn]):
            kind = f"{action.name} itself"
            rows.append(Row("kernels", kind, trial.name, trial.error, trial.allowed, trial.ok))
            if not trial.ran:
                unchecked.append(f"{row} at `{fqn}` was not run: {trial.name}")
    return rows, unchecked


def _trial_batches(working: Case, conditions: Sequence[Condition]) -> Iterator[Batch]:
    """Yield the given batches and their variants in the working dtype; of text a shorter one."""
    first_batch = working.batches[0]

    def as_given(name: str, value: Any) -> Any:
        example = first_batch.get(name)
        if isinstance(value, torch.Tensor) and isinstance(example, torch.Tensor):
            return value.to(example.dtype)
        return value

    yield from working.batches
    other_batches = [batch for condition in conditions[1:2] for batch in condition.batches]
    derived = [{name: as_given(name, v) for name, v in batch.items()} for batch in other_batches]
    last = derived[-1] if derived else first_batch
    if TEXT.issuperset(last):
        yield {k: v[:, :-1] if v.dim() == 2 and v.shape[1] > 2 else v for k, v in last.items()}
    yield from derived


def _collect_calls(
    model: nn.Module, batches: Sequence[Batch], sites: set[str]
) -> dict[str, dict[str, CallArguments]]:
    """Return each module's first call, one with other values, and one with other shapes."""
    calls: dict[str, dict[str, CallArguments]] = {}
    model = copy_module(model).eval()
    for index, batch in enumerate(batches):
        try:
            first_calls = _first_calls(model, batch, sites)
        except Exception:  # any error of the model for a derived batch
            if not index:
                raise
            continue
        for fqn, call in first_calls.items():
            module_calls = calls.setdefault(fqn, {"": call})
            same_shapes = _call_shapes(call) == _call_shapes(module_calls[""])
            if not same_shapes or not _equal_calls(call, module_calls[""]):
                module_calls.setdefault(OTHER_VALUES if same_shapes else OTHER_SHAPE, call)
        if all(len(module_calls) == 3 for module_calls in calls.values()):
            break
    for module_calls in calls.values():
        module_calls.setdefault(OTHER_VALUES, _roll_rows(module_calls[""]))
    return {
        fqn: {k: module_calls[k] for k in ("", OTHER_VALUES, OTHER_SHAPE) if k in module_calls}
        for fqn, module_calls in calls.items()
    }


def _first_calls(model: nn.Module, batch: Batch, sites: set[str]) -> dict[str, CallArguments]:
    """Return the arguments of each module's first call in a forward."""
    with torch.no_grad(), record_first_calls(model, sites) as calls:
        run_model(model, batch)
    return calls


def _call_shapes(call: CallArguments) -> list[Any]:
    return [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in tree_leaves(call)]


def _equal_calls(call: CallArguments, other_call: CallArguments) -> bool:
    pairs = zip(tree_leaves(call), tree_leaves(other_call))
    return all(equal(a, b) if isinstance(a, Tensor) else a is b or a == b for a, b in pairs)


def _roll_rows(call: CallArguments) -> CallArguments:
    """Return the call with the rows of its float tensors rolled by one."""

    def turned(x: Any) -> Any:
        numbers = isinstance(x, Tensor) and x.is_floating_point() and x.dim()
        return x.roll(1, 0) if numbers else x

    rolled: CallArguments = tree_map(turned, call)
    return rolled
