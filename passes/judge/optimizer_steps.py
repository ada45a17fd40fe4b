"""Explain wrong optimizer steps behind right gradients: skipped, scaled, or not on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.layouts import RankTensor
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.trial import Trial
from schedlang.passes.localize.diagnosis import diagnose, is_close
from schedlang.passes.verify.observe import Condition, Key, Observation
from schedlang.report import Row
from schedlang.runtime.modes import enter_modes

MOST_NAMES = 4
LEAST_MOVED = 8  # elements at other places, so that it is no coincidence
BY_SHARD = (
    "each rank computes the optimizer's step from its own shard: this optimizer reads full tensors "
    "(norms, rows and columns, matrix products): gather the gradient, or sum what it measures"
)

_OTHER_PLACES = (
    "they hold new values of other places: shards are gathered or sent in another order, or copied "
    "from another offset"
)


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
    trial: Trial | None = None,
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
    unexplained = groups.pop("", [])
    if (
        trial
        and unexplained
        and steps_by_shard(unexplained, first_row, expected, actual, record, trial)
    ):
        groups[BY_SHARD] = unexplained
    elif unexplained and _are_of_other_places(unexplained, first_row, expected, actual):
        groups[_OTHER_PLACES] = unexplained
    elif unexplained:
        return
    for text, names in groups.items():
        count = sum(key[:3] == _key_of(first_row) for key in expected.tensors)
        yield "parameters", f"{prefix_names(text, names, count)}; gradients are right"


def steps_by_shard(
    names: Sequence[str],
    row: Row,
    expected: Observation,
    actual: Observation,
    record: RunRecord,
    trial: Trial,
) -> bool:
    """Return whether the optimizer gives the ranks' values if it steps each rank's shards alone.

    Only a first step is examined: its optimizer has no state yet. A flat tensor is a shard.
    """
    if row.step != 0 or record.holdings is None or record.initial is None:
        return False
    condition = next(c for c in trial.conditions if c.name == row.condition)
    key = Key(row.condition, "gradients", 0, "")
    gradients = {k.name: v for k, v in expected.tensors.items() if k[:3] == key[:3]}
    divided = False
    for tensors in record.holdings.ranks:
        stepped = step_shards(tensors, condition, record.initial, gradients, trial)
        for tensor, flat in stepped:
            for name in set(names).intersection(tensor.pieces):
                local, region = tensor.pieces[name]
                value = actual.tensors[key._replace(kind="parameters", name=name)]
                assert value is not None
                divided |= tensor.shape != value.shape
                target = region.read(value.reshape(-1)).reshape(-1).double()
                if not is_close(local.read(flat).reshape(-1).double(), target):
                    return False
    return divided


def step_shards(
    tensors: Sequence[RankTensor],
    condition: Condition,
    initial: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    trial: Trial,
) -> list[tuple[RankTensor, Tensor]]:
    """Step a rank's shards by a new optimizer, without other ranks; return them flat.

    Empty if the optimizer raises.
    """
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    named = []
    for tensor in trained:
        dtype = torch.float64 if trial.float64 else tensor.dtype
        p = nn.Parameter(torch.zeros(tensor.shape, dtype=dtype))
        for name, (local, region) in tensor.pieces.items():
            local.write(p.detach().reshape(-1), region.read(initial[name].reshape(-1)))
            if (gradient := gradients.get(name)) is not None:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                local.write(p.grad.reshape(-1), region.read(gradient.reshape(-1)))
        named.append((next(iter(tensor.pieces), tensor.name), p))
    try:
        with enter_modes(*trial.modes):
            condition.optimizer(named).step()
    except Exception:  # any error of a user's optimizer
        return []
    return [(tensor, p.detach().reshape(-1)) for tensor, (_, p) in zip(trained, named)]


def _are_of_other_places(
    names: Sequence[str], row: Row, expected: Observation, actual: Observation
) -> bool:
    """Return whether every wrong value is right for some other element of a parameter."""
    moment = Key(row.condition, row.kind, row.step or 0, "")
    rights = [v for k, v in expected.tensors.items() if k[:3] == moment[:3] and v is not None]
    right = torch.cat([v.reshape(-1).double() for v in rights]).sort().values
    count = 0
    for name in names:
        key = moment._replace(name=name)
        value, target = actual.tensors[key], expected.tensors[key]
        assert value is not None and target is not None
        wrong = value.reshape(-1).double()[~_alike(value, target).reshape(-1)]
        above = torch.searchsorted(right, wrong).clamp(max=len(right) - 1)
        near = _alike(wrong, right[above]) | _alike(wrong, right[(above - 1).clamp(min=0)])
        if not bool(near.all()):
            return False
        count += len(wrong)
    return count > LEAST_MOVED


def _alike(a: Tensor, b: Tensor) -> Tensor:
    return torch.isclose(a.double(), b.double(), rtol=1e-9, atol=0.0)


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
