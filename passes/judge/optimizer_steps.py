"""Explain wrong optimizer steps behind right gradients: skipped, scaled, or not on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.localize.diagnosis import diagnose, is_close
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Row

MOST_NAMES = 4


def prefix_names(text: str, names: Sequence[str], total: int) -> str:
    """Prefix a sentence with the number and names of the tensors that it is about."""
    return f"{len(names)} of {total} ({quote_names(names, MOST_NAMES)}): {text}"


def diverged_parameters(failing: Sequence[Row], first_row: Row) -> list[str]:
    """Return the parameters whose copies differ after the first row's step or an earlier one."""
    steps: dict[int, list[str]] = {}
    for row in failing:
        if row.kind == "replicas" and row.condition == first_row.condition and row.step is not None:
            steps.setdefault(row.step, []).append(row.name)
    names = steps.get(min(steps, default=0), [])
    if not names or first_row.step is None or min(steps) > first_row.step:
        return []
    if any(name.startswith("gradient of ") for name in names):
        return []
    return [name for name in names if name != "loss" and not name.startswith("buffer ")]


def explain_steps(
    failing: Sequence[Row],
    first_row: Row | None,
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    sizes: Mapping[str, int],
) -> Iterator[tuple[str, str]]:
    """Explain how the optimizer's steps differ, if gradients are right until then."""
    if first_row is None or first_row.kind != "parameters" or first_row.step is None:
        return
    groups: dict[str, list[str]] = {}
    rows = [row for row in failing if (row.condition, row.kind, row.step) == _key_of(first_row)]
    for row in rows:
        key = Key(first_row.condition, first_row.kind, first_row.step, row.name)
        current, target = actual.tensors.get(key), expected.tensors.get(key)
        before = expected.tensors.get(key._replace(step=first_row.step - 1))
        before = before if first_row.step else (record.initial or {}).get(row.name)
        if current is None or target is None or before is None or current.shape != before.shape:
            return
        text = _explain_step(current - before, target - before, before, sizes)
        groups.setdefault(text, []).append(row.name)
    if not groups.pop("", None):
        for text, names in groups.items():
            count = sum(key[:3] == _key_of(first_row) for key in expected.tensors)
            yield "parameters", f"{prefix_names(text, names, count)}; gradients are right"


def _key_of(row: Row) -> tuple[str, str, int | None]:
    return row.condition, row.kind, row.step


def _explain_step(
    change: Tensor, right_change: Tensor, before: Tensor, sizes: Mapping[str, int]
) -> str:
    """Explain a parameter's change by the right change, and by its value before the step.

    "" if no rule fits.
    """
    if not change.any():
        return "not stepped: they are what they were before"
    unstepped = (change == 0) & (right_change != 0)
    if unstepped.any() and is_close(change[~unstepped], right_change[~unstepped]):
        return f"{int(unstepped.sum())} of {right_change.numel()} elements are not stepped"
    extra, weight = change.double() - right_change.double(), before.double()
    share = float((extra * weight).sum() / weight.square().sum()) if weight.any() else 0.0
    if share and weight.numel() > 1 and is_close(extra, share * weight):
        amount = "much" if share < 0 else "little"
        return f"{abs(share):.4g} of each weight too {amount} is taken off: another weight decay"
    diagnosis = diagnose(change, right_change, sizes)
    if not diagnosis.explains or "times the right value" not in diagnosis.text:
        return ""
    factor = diagnosis.text.partition(" times")[0]
    return f"each step is {factor} times the right one: a rate, or a schedule of it, is another"
