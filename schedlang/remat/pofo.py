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

    def with_(self, way: Treatment, cost: ModuleCost, place: int, ratio: float) -> _Part:
        """Return this plan with one module more."""
        behind = self.behind + cost.forward
        if way == "offload":
            done = self.done + self.again + self.waits(behind, ratio, last=False)
            return _Part(self.held + cost.small, done, 0.0, place, _moved(cost), 0.0, way, self)
        held = self.held + (cost.saved if way == "keep" else cost.input)
        again = self.again + (cost.forward if way == "recompute" else 0.0)
        return _Part(held, self.done, again, self.moved, self.flight, behind, way, self)

    def waits(self, behind: float, ratio: float, last: bool) -> float:
        """Return how much longer the copies of the last offloaded module take than the work behind
        it."""
        copied = self.flight * ratio
        back = copied if last else max(0.0, copied - 2 * behind - self.again)
        return max(0.0, copied - behind) + back

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


def _fits(part: _Part, way: Treatment, cost: ModuleCost, memory: int) -> bool:
    """Return whether a module fits behind this plan, in its forward and in its backward."""
    own = cost.saved + (cost.input if way == "recompute" else 0)
    return part.held + part.flight + own <= memory


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
    for place, cost in enumerate(chain):
        more = [
            part.with_(way, cost, place, ratio)
            for part in parts
            for way in among
            if _fits(part, way, cost, memory)
        ]
        parts, fewer = _pruned(more)
        thinned = thinned or fewer
    found = [_measured(chain, part.ways, ratio) for part in parts]
    if thinned and len(among) == len(TREATMENTS):
        simpler = (pofo(chain, memory, ratio, ("keep", way)) for way in TREATMENTS[1:])
        found += [one for one in simpler if one is not None]
    return min(found, key=lambda one: one.time, default=None)


def _measured(chain: Sequence[ModuleCost], ways: Sequence[Treatment], ratio: float) -> MixedPlan:
    """Return the times of a choice for each module."""
    part = _Part()
    for place, (cost, way) in enumerate(zip(chain, ways, strict=True)):
        part = part.with_(way, cost, place, ratio)
    again = sum((c.forward for c, way in zip(chain, ways) if way == "recompute"), 0.0)
    return MixedPlan(tuple(ways), again, part.time(ratio) - again)


def _pruned(parts: Iterable[_Part]) -> tuple[list[_Part], bool]:
    """Keep the undominated plans for each `moved`; also return whether some of them were
    dropped."""
    ordered = sorted(parts, key=lambda one: (one.moved, *one.order))
    fronts = [_unbeaten(group) for _, group in groupby(ordered, key=lambda one: one.moved)]
    room = MAX_PLANS // max(1, len(fronts))
    found = [_thinned(front, room) for front in fronts]
    return [one for front in found for one in front], sum(map(len, found)) < sum(map(len, fronts))


def _unbeaten(ordered: Iterable[_Part]) -> list[_Part]:
    """Return the plans, in order, that no other dominates."""
    found: list[_Part] = []
    totals: list[float] = []  # rising, while `dones` falls
    dones: list[float] = []
    for one in ordered:
        _, total, done = one.order
        at = bisect_right(totals, total)
        if at and dones[at - 1] <= done:
            continue
        found.append(one)
        end = at
        while end < len(dones) and dones[end] >= done:
            end += 1
        totals[at:end], dones[at:end] = [total], [done]
    return found


def _thinned(front: list[_Part], room: int) -> list[_Part]:
    """Return the plan that holds least, and the fastest of each step of bytes."""
    if len(front) <= room:
        return front
    low, high = front[0].held, front[-1].held
    step = max(1, -(-(high - low) // max(1, room - 1)))
    steps: dict[int, _Part] = {}
    for one in front:
        key = (one.held - low) // step
        if key not in steps or one.order[1:] < steps[key].order[1:]:
            steps[key] = one
    return list({id(one): one for one in (front[0], *steps.values())}.values())


def min_memory(chain: Sequence[ModuleCost]) -> int:
    """Return the fewest bytes in which `pofo` finds a plan."""
    most = sum(one.saved for one in chain)
    return bisect_left(range(most), True, key=lambda memory: _possible(chain, memory))


def _possible(chain: Sequence[ModuleCost], memory: int) -> bool:
    """Return whether any plan fits: for each `moved` the plan with the fewest bytes is enough."""
    parts: list[_Part] = [_Part()]
    for place, cost in enumerate(chain):
        least: dict[int, _Part] = {}
        for part in parts:
            for way in TREATMENTS:
                if _fits(part, way, cost, memory):
                    one = part.with_(way, cost, place, 0.0)
                    old = least.setdefault(one.moved, one)
                    least[one.moved] = min(old, one, key=lambda each: each.held)
        parts = list(least.values())
    return bool(parts)


def describe_plan(found: MixedPlan) -> str:
    """Describe how many modules are kept, recomputed and offloaded, and the cost."""
    count = Counter(found.treatments)
    return (
        f"{count['keep']} kept whole, {count['recompute']} recomputed, {count['offload']} moved to"
        f" the host; {found.again:.3g} operations again, {found.waited:.3g} waited for"
    )
