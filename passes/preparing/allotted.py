"""Bits for saved tensors under a budget, so that the variance of the gradient is least.

Before anything trains, the untouched model runs in this process with the first microbatch: each
tensor that is to be coded is rounded by itself, and the gradient's change is its sensitivity. The
result is a table of the plan, the same for all ranks, for all steps, and for the original that they
are compared with. Only whole powers of sqrt(2) of a sensitivity count, so that digits do not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.facets import Kept
from schedlang.passes.cutting.chains import Chains, run_again
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.runtime.keeping.sensitive import Place, Seen

CHOICES = (2, 4, 8)
_LOWEST = -2000  # of an exponent: what changes nothing


@dataclass(frozen=True)
class Allotted:
    """One saved tensor of each call of a module: where, how large, how sensitive, in how many bits.

    `exponent` is that of sqrt(2) in the change of the gradient, None where there are no values.
    """

    number: int
    site: str
    elements: int
    exponent: int | None
    bits: int = 0


Bits = Mapping[str, tuple[Allotted, ...]]  # by coded modules


def numbers(bits: Bits, fqn: str) -> dict[int, int]:
    """The bits of each saved tensor of a module, by its number among the floats of a call."""
    return {one.number: one.bits for one in bits.get(fqn, ())}


def allotted(
    plan: Plan, sample: Mapping[str, Any], loss: Loss | None, chains: Chains | None = None
) -> Bits:
    """The table of a plan; empty where no row asks for one. Each row has a budget of its own.

    `chains`: what rows with a limit of memory chose to run again.
    """
    rows = [row for row in plan.kept if row.budget is not None]
    if not rows:
        return {}
    seen = _seen(plan, rows, sample, loss, chains or {})
    found: dict[str, tuple[Allotted, ...]] = {}
    for action in plan.actions:
        mine = [row for row in rows if action.name == "compress" and row.fqn in action.sites]
        if mine and mine[0].budget is not None:
            found |= _of_row([row.fqn for row in mine], seen, mine[0].budget)
    return found


def _of_row(names: Sequence[str], seen: Mapping[Place, Seen], budget: float) -> dict[str, Any]:
    places = [(place, one) for place, one in seen.items() if place.module in names]
    if any(one.change is None for _, one in places):  # alike: no module has its fill before others
        places.sort(key=lambda each: each[0].number)
    known = [_described(place, one) for place, one in places]
    given = allot([one.elements for one in known], _sizes(known), budget)
    out: dict[str, tuple[Allotted, ...]] = {}
    for (place, _), one, bits in zip(places, known, given):
        out[place.module] = (*out.get(place.module, ()), replace(one, bits=bits))
    return out


def _described(place: Place, one: Seen) -> Allotted:
    return Allotted(place.number, one.site, one.elements, _exponent(one.change))


def _exponent(change: float | None) -> int | None:
    """The nearest power of sqrt(2); what is not finite is most sensitive."""
    if change is None:
        return None
    if not math.isfinite(change):
        return -_LOWEST
    return round(2 * math.log2(change)) if change > 0 else _LOWEST


def _sizes(known: Sequence[Allotted]) -> list[float]:
    """Sensitivities of tensors relative to the largest; without values those of their elements."""
    most = max((one.exponent for one in known if one.exponent is not None), default=0)
    return [
        float(one.elements) if one.exponent is None else 2.0 ** max(-900, (one.exponent - most) / 2)
        for one in known
    ]


def allot(elements: Sequence[int], changes: Sequence[float], budget: float) -> list[int]:
    """Bits of tensors, `budget` for each element in the mean, at most.

    The sum of `change / (2**bits - 1)**2` is made small: all begin with the fewest bits, and what
    lessens the sum most for a bit of memory gets more, as long as it fits (the greedy rule of ActNN
    and GACT; the sum is convex in the bits, so no more than the last step is lost).  Never worse
    than the same bits for all.
    """
    left = budget * sum(elements) - CHOICES[0] * sum(elements)
    bits = [CHOICES[0]] * len(elements)
    heap = [_step(k, 0, elements[k], changes[k]) for k in range(len(elements))]
    heapq.heapify(heap)
    while heap:
        _, k, level = heapq.heappop(heap)
        more = (CHOICES[level + 1] - CHOICES[level]) * elements[k]
        if more > left:
            continue
        left -= more
        bits[k] = CHOICES[level + 1]
        if level + 2 < len(CHOICES):
            heapq.heappush(heap, _step(k, level + 1, elements[k], changes[k]))
    alike = [max(c for c in CHOICES if c <= budget)] * len(elements)
    return min(bits, alike, key=lambda some: variance(changes, some))


def _step(k: int, level: int, elements: int, change: float) -> tuple[float, int, int]:
    less = _left(CHOICES[level]) - _left(CHOICES[level + 1])
    more = (CHOICES[level + 1] - CHOICES[level]) * elements
    return -change * less / more, k, level


def _left(bits: int) -> float:
    return 1.0 / float(2**bits - 1) ** 2


def variance(changes: Sequence[float], bits: Sequence[int]) -> float:
    """What rounding adds to the gradient's variance, in units of the sensitivities."""
    return sum(change * _left(some) for change, some in zip(changes, bits))


def _seen(
    plan: Plan, rows: Sequence[Kept], sample: Mapping[str, Any], loss: Loss | None, chains: Chains
) -> dict[Place, Seen]:
    """What the model saves, and how sensitive its gradient is; without values only what."""
    import copy

    from schedlang.passes.laying.root import backward_root, root_of
    from schedlang.passes.laying.tried import hollow
    from schedlang.runtime.given import called
    from schedlang.runtime.keeping.sensitive import places_of
    from schedlang.runtime.recording.constants import OnMeta
    from schedlang.runtime.recording.meta import hollow_batch, hollow_model

    blocks = {row.fqn: row.block for row in rows}
    empty = hollow(plan.model.model)
    module: Any = plan.model.compared
    module = hollow_model(module, {}) if empty else copy.deepcopy(module)
    module.train()
    run_again(plan, module, chains)
    if empty:
        inputs = hollow_batch(dict(sample))
        with OnMeta(dict(sample), inputs):
            return places_of(module, blocks, lambda: backward_root(module, inputs, loss))

    def run() -> Any:
        output = called(module, sample)
        return root_of(output, loss(output, sample) if loss is not None else None)

    return places_of(module, blocks, run)


def told(plan: Plan, bits: Bits) -> Iterator[str]:
    """The table in words: modules whose tensors have the same bits in one line."""
    lines: dict[str, list[str]] = {}
    for fqn, some in bits.items():
        words = []
        for level in reversed(CHOICES):
            sites = [one.site.removeprefix(f"{fqn}.") for one in some if one.bits == level]
            words += [f"{level} bits for {', '.join(sites)}"] if sites else []
        lines.setdefault("; ".join(words).replace(fqn, "itself"), []).append(fqn)
    for said, names in lines.items():
        yield f"`compress` of {', '.join(f'`{name}`' for name in names)}: {said}"
    if bits:
        held = [one for some in bits.values() for one in some]
        mean = sum(one.bits * one.elements for one in held) / sum(one.elements for one in held)
        why = " (as if all were alike, in each module: there are no values)"
        why = why if held[0].exponent is None else ""
        yield f"`compress` in {mean:.3g} bits for an element in the mean{why}"
