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


def prefix_names(text: str, names: Sequence[str], of: int) -> str:
    """Prefix a sentence with the number and names of the tensors that it is about."""
    return f"{len(names)} of {of} ({quote_names(names, MOST_NAMES)}): {text}"


def diverged_parameters(wrong: Sequence[Row], first: Row) -> list[str]:
    """Return the parameters whose copies differ after the first row's step or an earlier one."""
    steps: dict[int, list[str]] = {}
    for row in wrong:
        if row.kind == "replicas" and row.condition == first.condition and row.step is not None:
            steps.setdefault(row.step, []).append(row.name)
    names = steps.get(min(steps, default=0), [])
    if not names or first.step is None or min(steps) > first.step:
        return []
    if any(name.startswith("gradient of ") for name in names):
        return []
    return [name for name in names if name != "loss" and not name.startswith("buffer ")]


def explain_steps(
    wrong: Sequence[Row],
    first: Row | None,
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    sizes: Mapping[str, int],
) -> Iterator[tuple[str, str]]:
    """Explain how the optimizer's steps differ, if gradients are right until then."""
    if first is None or first.kind != "parameters" or first.step is None:
        return
    found: dict[str, list[str]] = {}
    rows = [row for row in wrong if (row.condition, row.kind, row.step) == _key_of(first)]
    for row in rows:
        key = Key(first.condition, first.kind, first.step, row.name)
        now, want = actual.tensors.get(key), expected.tensors.get(key)
        before = expected.tensors.get(key._replace(step=first.step - 1))
        before = before if first.step else (record.initial or {}).get(row.name)
        if now is None or want is None or before is None or now.shape != before.shape:
            return
        found.setdefault(_explain_step(now - before, want - before, sizes), []).append(row.name)
    if not found.pop("", None):
        for text, names in found.items():
            count = sum(key[:3] == _key_of(first) for key in expected.tensors)
            yield "parameters", f"{prefix_names(text, names, count)}; gradients are right"


def _key_of(row: Row) -> tuple[str, str, int | None]:
    return row.condition, row.kind, row.step


def _explain_step(moved: Tensor, right: Tensor, sizes: Mapping[str, int]) -> str:
    """Explain a parameter's change by the right change; "" if no rule fits."""
    if not moved.any():
        return "not stepped: they are what they were before"
    still = (moved == 0) & (right != 0)
    if still.any() and is_close(moved[~still], right[~still]):
        return f"{int(still.sum())} of {right.numel()} elements are not stepped"
    found = diagnose(moved, right, sizes)
    if not found.explains or "times the right value" not in found.text:
        return ""
    factor = found.text.partition(" times")[0]
    return f"each step is {factor} times the right one: a rate, or a schedule of it, is another"
