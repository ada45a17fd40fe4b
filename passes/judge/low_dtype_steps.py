"""Wrong steps of the program's own optimizer in a low dtype, smaller than the roundings of weights.

One step moves a weight of a low dtype by a few roundings, so its bound hides much. Therefore the
optimizer steps full parameters once more, from the gradients that the program computed: a right
program has these weights, but for few elements. Three mistakes are reported:

* one that the optimizer can repeat (a step of shards, weights made anew), if it then gives the
  program's weights, and gives other weights without it;
* another step of weights in a dtype that is wider than the program's, where a step is far more than
  a rounding;
* differences that nearly all make the weights smaller, or nearly all larger: another weight decay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.judge.optimizer_steps import BY_SHARD, step_shards
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.trial import Trial
from schedlang.passes.verify.observe import Condition, Key, Observation
from schedlang.report import Row
from schedlang.runtime.modes import enter_modes

OWN_STEP = "optimizer's step"
LEAST_SHARE, LEAST_COUNT = 0.05, 8  # elements that differ without the mistake
MOST_SHARE = 0.1  # of these, that may differ with it
WIDE_STEP = 1e-3  # of a step, which weights of a wide dtype may differ by
LEAST_SIGNS, MOST_OTHER_SIGNS = 32, 0.03  # differing elements, and their share of the other sign
ANOTHER_STEP = (
    "the step is not that of this optimizer for full parameters with the same gradients: its "
    "rates, groups or state are others on ranks"
)
RENEWED = (
    "each step begins from the rounded weights: the float32 weights that this optimizer keeps are "
    "made anew, so that what a rounding takes away is lost"
)
Values = Mapping[str, Tensor]


def compare_own_steps(
    trial: Trial, conditions: Sequence[Condition], actual: Observation, record: RunRecord
) -> Iterator[Row]:
    """Yield a failing row for each parameter that the program's optimizer steps wrongly."""
    if record.optimizer is None or record.holdings is None or record.initial is None:
        return
    for condition in conditions:
        steps = [_values(actual, condition, "gradients", k) for k in range(len(condition.batches))]
        last = len(steps) - 1
        if "clipped" in condition.name or not all(steps):
            continue  # gradients are those before clipping
        right = _step_full(trial, condition, record, steps)
        if right is None:
            continue
        first = _values(actual, condition, "parameters", 0)
        alone = _step_shards_alone(trial, condition, record, steps[0])
        names = _explained(first, right[0], alone)
        note, step, expected = BY_SHARD, 0, right[0]
        if not names and last:
            renewed = _step_full(trial, condition, record, steps, renew=True)
            step, expected, note = last, right[last], RENEWED
            names = _explained(
                _values(actual, condition, "parameters", last), expected, (renewed or right)[last]
            )
        notes = dict.fromkeys(names, note)
        if not notes:
            dtype = next(iter(trial.case.plan.model.model.parameters())).dtype
            step, notes = _find_other_steps(condition, record, actual, right, dtype)
            expected = right[step]
        for name, text in notes.items():
            value = actual.tensors[Key(condition.name, "parameters", step, name)]
            assert value is not None
            change = float((expected[name].double() - record.initial[name].double()).norm())
            error = float((value.double() - expected[name].double()).norm()) / (change or 1.0)
            yield Row(condition.name, OWN_STEP, name, error, 0.0, False, step, text)


def _find_other_steps(
    condition: Condition,
    record: RunRecord,
    actual: Observation,
    right: Sequence[Values],
    dtype: torch.dtype,
) -> tuple[int, dict[str, str]]:
    """Return the first wrong step, and a sentence for each parameter that it steps wrongly."""
    assert record.holdings is not None and record.initial is not None
    eps = torch.finfo(dtype).eps
    for step, expected in enumerate(right):
        got, notes = _values(actual, condition, "parameters", step), dict[str, str]()
        gaps: dict[str, tuple[Tensor, Tensor]] = {}
        for name, value in expected.items():
            if name not in got or got[name].shape != value.shape:
                continue
            before, after = record.initial[name].double().reshape(-1), value.double().reshape(-1)
            gap, weight = got[name].double().reshape(-1) - after, after
            own_eps = torch.finfo(record.holdings.dtypes[name]).eps
            bound = WIDE_STEP * float((after - before).norm()) + 4 * own_eps * float(after.norm())
            if own_eps < eps and float(gap.norm()) > bound:
                share = _decay_share(gap, weight)
                notes[name] = _describe_decay(share) if share else ANOTHER_STEP
            elif own_eps >= eps and bool(gap.any()):
                gaps[name] = gap, weight
        if not notes and step == len(right) - 1 and gaps:
            gap, weight = (torch.cat(values) for values in zip(*gaps.values()))
            outward = (gap * weight)[gap != 0] > 0
            fewer = min(int(outward.sum()), int((~outward).sum()))
            if len(outward) >= LEAST_SIGNS and fewer <= MOST_OTHER_SIGNS * len(outward):
                share = float((gap * weight).sum() / weight.square().sum()) / len(right)
                notes = dict.fromkeys(gaps, _describe_decay(share))
        if notes:
            return step, notes
    return 0, {}


def _decay_share(gap: Tensor, weight: Tensor) -> float:
    """Return by which share of each weight values differ; 0 if they differ otherwise."""
    share = float((gap * weight).sum() / weight.square().sum())
    rest = float((gap - share * weight).norm())
    return share if len(gap) > 1 and rest < 0.1 * float(gap.norm()) else 0.0


def _describe_decay(share: float) -> str:
    amount = "much" if share < 0 else "little"
    return f"{abs(share):.1g} of each weight too {amount} is taken off: another weight decay"


def _values(actual: Observation, condition: Condition, kind: str, step: int) -> dict[str, Tensor]:
    return {
        key.name: value
        for key, value in actual.tensors.items()
        if key[:3] == (condition.name, kind, step) and value is not None
    }


def _explained(got: Values, right: Values, mistaken: Values) -> list[str]:
    """Return the parameters that have the values of a mistake, if all elements together show it."""
    names = [n for n in mistaken if n in got and n in right and got[n].shape == right[n].shape]
    off = {n: _count_unequal(got[n], right[n]) for n in names}
    total = sum(got[n].numel() for n in names if off[n])
    wrong, rest = sum(off.values()), sum(_count_unequal(got[n], mistaken[n]) for n in names)
    if wrong < max(LEAST_COUNT, LEAST_SHARE * total) or rest > MOST_SHARE * wrong:
        return []
    return [n for n in names if off[n] > _count_unequal(got[n], mistaken[n])]


def _count_unequal(a: Tensor, b: Tensor) -> int:
    return int((a.double() != b.double()).sum())


def _step_shards_alone(
    trial: Trial, condition: Condition, record: RunRecord, gradients: Values
) -> dict[str, Tensor]:
    """Return the parameters that ranks have divided, after each stepped its shards alone."""
    assert record.holdings is not None and record.initial is not None
    values: dict[str, Tensor] = {}
    for tensors in record.holdings.ranks:
        for tensor, flat in step_shards(tensors, condition, record.initial, gradients, trial):
            for name, (local, region) in tensor.pieces.items():
                shape = record.initial[name].shape
                if tensor.shape != tuple(shape) and tensor.requires_grad:
                    full = values.setdefault(name, record.initial[name].to(tensor.dtype).clone())
                    region.write(full.reshape(-1), local.read(flat))
    return values


@dataclass(frozen=True)
class _FullStep:
    """An optimizer over full parameters, in the dtypes in which ranks store them."""

    named: Sequence[tuple[str, nn.Parameter]]
    optimizer: Any

    def step(self, gradients: Values, renew: bool) -> dict[str, Tensor]:
        """Step once, and return the parameters; `renew` float32 weights from them afterwards."""
        for name, p in self.named:
            p.grad = gradients[name].to(p.dtype).clone() if name in gradients else None
        self.optimizer.step()
        if renew:
            for kept, weight in self._kept_weights():
                kept.copy_(weight.detach())
        return {name: p.detach().clone() for name, p in self.named}

    def _kept_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tensors of the optimizer that round to parameters, and these parameters.

        A tensor has the shape of one parameter, or holds all of them flat, with padding at its end.
        """
        weights = [p.detach() for _, p in self.named]
        flat = torch.cat([weight.reshape(-1) for weight in weights])
        for tensor in _tensors_within((self.optimizer.state, vars(self.optimizer)), set()):
            for weight in (*weights, flat):
                kept = tensor.detach()
                if weight is flat and kept.dim() == 1:
                    kept = kept[: len(flat)]
                wider = kept.dtype != weight.dtype and kept.is_floating_point()
                alike = wider and kept.shape == weight.shape
                if alike and torch.equal(kept.to(weight.dtype), weight):
                    yield kept, weight


def _tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, Mapping | list | tuple) else ():
        yield from _tensors_within(item, seen)


def _step_full(
    trial: Trial,
    condition: Condition,
    record: RunRecord,
    gradients: Sequence[Values],
    renew: bool = False,
) -> list[dict[str, Tensor]] | None:
    """Step full parameters by the program's gradients; None if the optimizer raises."""
    assert record.holdings is not None and record.initial is not None
    stored, initial = record.holdings.dtypes, record.initial
    named = [
        (name, nn.Parameter(initial[name].to(stored[name], copy=True)))
        for name, p in trial.case.plan.model.model.named_parameters()
        if p.requires_grad and name in stored and name in initial
    ]
    try:
        with enter_modes(*trial.modes):
            full = _FullStep(named, condition.optimizer(named))
            return [full.step(values, renew) for values in gradients]
    except Exception:  # any error of a user's optimizer
        return None
