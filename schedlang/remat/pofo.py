"""Choice for each module of a chain: keep, recompute or offload; the fastest that fits.

POFO (Beaumont, Eyraud-Dubois and Shilova, Efficient combination of rematerialization and
offloading for training DNNs, 2021), by dynamic programming over the chain, with this model of time,
in operations.  The forward of a module takes f, its backward 2 f; with recomputation f more.  An
offloaded module's activations are copied to the host while the modules behind it run, until the end
of the next offloaded module.  They are copied back while these modules run backward, from the
beginning of the backward of that next one.  If a copy takes longer, ranks wait for the rest.  No
module hides the copy back of the last offloaded one: its full time is waited for.

Bytes: a kept module holds what it saves; a recomputed one its input, and in its backward also what
it saves; an offloaded one the storages that are too small to move.  The activations of the last
offloaded module are there besides, in both directions, until another one is offloaded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from schedlang.remat import decisions_of
from schedlang.remat.rotor import ModuleCost

Treatment = Literal["keep", "recompute", "offload"]
TREATMENTS: tuple[Treatment, ...] = ("keep", "recompute", "offload")
MAX_PLANS = 4096  # maximal partial plans; of more, the best for each of as many steps of bytes


@dataclass(frozen=True)
class MixedPlan:
    """The treatment of each module; repeated operations, and the wait for copies."""

    treatments: tuple[Treatment, ...]
    again: float
    waited: float

    @property
    def time(self) -> float:
        """Time of the plan in addition to one forward and backward."""
        return self.again + self.waited


@dataclass(frozen=True)
class _Part:
    """A plan of the first modules.

    moved  index of the last offloaded module, -1: none; `flight` its bytes, `behind` the work since
    held   bytes between forward and backward; `done` its time, without that since `moved`
    again  repeated work since `moved`
    """

    held: int = 0
    done: float = 0.0
    again: float = 0.0
    moved: int = -1
    flight: int = 0
    behind: float = 0.0
    last: Treatment | None = None
    before: _Part | None = None

    @property
    def order(self) -> tuple[int, float, float]:
        """Sizes by which plans with equal `moved` are compared: a plan that is smaller in none is
        dropped."""
        return self.held, self.done + self.again, self.done

    def with_(self, treatment: Treatment, cost: ModuleCost, index: int, ratio: float) -> _Part:
        """Return this plan with one module more."""
        behind = self.behind + cost.forward
        if treatment == "offload":
            done = self.done + self.again + self.waits(behind, ratio, last=False)
            return _Part(
                self.held + cost.small, done, 0.0, index, _moved(cost), 0.0, treatment, self
            )
        held = self.held + (cost.saved if treatment == "keep" else cost.input)
        again = self.again + (cost.forward if treatment == "recompute" else 0.0)
        return _Part(held, self.done, again, self.moved, self.flight, behind, treatment, self)

    def waits(self, behind: float, ratio: float, last: bool) -> float:
        """Return how much longer the copies of the last offloaded module take than the work behind
        it."""
        copied = self.flight * ratio
        return_wait = copied if last else max(0.0, copied - 2 * behind - self.again)
        return max(0.0, copied - behind) + return_wait

    def time(self, ratio: float) -> float:
        """Return the time of the full chain, if this is the full plan."""
        return self.done + self.again + self.waits(self.behind, ratio, last=True)

    @property
    def ways(self) -> tuple[Treatment, ...]:
        """The treatment of each module, in order."""
        return decisions_of(self)


def _moved(cost: ModuleCost) -> int:
    """Return the bytes of a module that can be offloaded."""
    return cost.saved - cost.small


def _fits(part: _Part, treatment: Treatment, cost: ModuleCost, memory: int) -> bool:
    """Return whether a module fits behind this plan, in its forward and in its backward."""
    needed = cost.saved + (cost.input if treatment == "recompute" else 0)
    return part.held + part.flight + needed <= memory


def pofo(
    chain: Sequence[ModuleCost], memory: int, ratio: float, among: Sequence[Treatment] = TREATMENTS
) -> MixedPlan | None:
    """Find the fastest plan within `memory`; None: nothing fits.

    `ratio` is the work that is done while one byte is copied.  The plan is optimal as long as at
    most POINTS partial plans are needed; beyond, it is no slower than the best plan with
    recomputation alone, or with offloading alone.
    """
    parts: list[_Part] = [_Part()]
    thinned = False
    for index, cost in enumerate(chain):
        extended = [
            part.with_(treatment, cost, index, ratio)
            for part in parts
            for treatment in among
            if _fits(part, treatment, cost, memory)
        ]
        parts, was_thinned = _pruned(extended)
        thinned = thinned or was_thinned
    plans = [_measured(chain, part.ways, ratio) for part in parts]
    if thinned and len(among) == len(TREATMENTS):
        simpler = (pofo(chain, memory, ratio, ("keep", treatment)) for treatment in TREATMENTS[1:])
        plans += [plan for plan in simpler if plan is not None]
    return min(plans, key=lambda plan: plan.time, default=None)


def _measured(chain: Sequence[ModuleCost], ways: Sequence[Treatment], ratio: float) -> MixedPlan:
    """Return the times of a choice for each module."""
    part = _Part()
    for index, (cost, treatment) in enumerate(zip(chain, ways, strict=True)):
        part = part.with_(treatment, cost, index, ratio)
    again = sum((c.forward for c, treatment in zip(chain, ways) if treatment == "recompute"), 0.0)
    return MixedPlan(tuple(ways), again, part.time(ratio) - again)


def _pruned(parts: Iterable[_Part]) -> tuple[list[_Part], bool]:
    """Keep the undominated plans for each `moved`; also return whether some of them were
    dropped."""
    ordered = sorted(parts, key=lambda part: (part.moved, *part.order))
    fronts = [_unbeaten(group) for _, group in groupby(ordered, key=lambda part: part.moved)]
    room = MAX_PLANS // max(1, len(fronts))
    pruned = [_thinned(front, room) for front in fronts]
    return [part for front in pruned for part in front], sum(map(len, pruned)) < sum(
        map(len, fronts)
    )


def _unbeaten(ordered: Iterable[_Part]) -> list[_Part]:
    """Return the plans, in order, that no other dominates."""
    front: list[_Part] = []
    totals: list[float] = []  # rising, while `dones` falls
    dones: list[float] = []
    for part in ordered:
        _, total, done = part.order
        index = bisect_right(totals, total)
        if index and dones[index - 1] <= done:
            continue
        front.append(part)
        end = index
        while end < len(dones) and dones[end] >= done:
            end += 1
        totals[index:end], dones[index:end] = [total], [done]
    return front


def _thinned(front: list[_Part], room: int) -> list[_Part]:
    """Return the plan that holds least, and the fastest of each step of bytes."""
    if len(front) <= room:
        return front
    low, high = front[0].held, front[-1].held
    step = max(1, -(-(high - low) // max(1, room - 1)))
    steps: dict[int, _Part] = {}
    for part in front:
        key = (part.held - low) // step
        if key not in steps or part.order[1:] < steps[key].order[1:]:
            steps[key] = part
    return list({id(part): part for part in (front[0], *steps.values())}.values())


def min_memory(chain: Sequence[ModuleCost]) -> int:
    """Return the fewest bytes in which `pofo` finds a plan."""
    total = sum(cost.saved for cost in chain)
    return bisect_left(range(total), True, key=lambda memory: _possible(chain, memory))


def _possible(chain: Sequence[ModuleCost], memory: int) -> bool:
    """Return whether any plan fits: for each `moved` the plan with the fewest bytes is enough."""
    parts: list[_Part] = [_Part()]
    for index, cost in enumerate(chain):
        lightest: dict[int, _Part] = {}
        for part in parts:
            for treatment in TREATMENTS:
                if _fits(part, treatment, cost, memory):
                    extended = part.with_(treatment, cost, index, 0.0)
                    old = lightest.setdefault(extended.moved, extended)
                    lightest[extended.moved] = min(
                        old, extended, key=lambda candidate: candidate.held
                    )
        parts = list(lightest.values())
    return bool(parts)


def describe_plan(plan: MixedPlan) -> str:
    """Describe how many modules are kept, recomputed and offloaded, and the cost."""
    count = Counter(plan.treatments)
    return (
        f"{count['keep']} kept whole, {count['recompute']} recomputed, {count['offload']} moved to"
        f" the host; {plan.again:.3g} operations again, {plan.waited:.3g} waited for"
    )
