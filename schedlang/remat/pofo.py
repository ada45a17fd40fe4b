"""Choice for each module of a chain: keep, recompute or offload; the fastest that fits.

Beaumont, Eyraud-Dubois and Shilova, Efficient combination of rematerialization and offloading for
training DNNs (2021; POFO), by dynamic programming over the chain, under this count of time, in
operations. The forward of a module works f, its backward 2 f; recomputed, f once more. What a moved
module saved goes to the host while the modules behind it run, up to the end of the next moved one;
it comes back while these run backward, from the moment the backward of that next one begins. What
is not there by then is waited for. Nothing sends for the last moved one before its own backward:
that is waited for whole.

Bytes: a kept module holds what it saves, a recomputed one its input and in its backward also what
it saves, a moved one the storages too small to move; what the moved one before has saved is there
besides, both ways, for as long as that one is the last moved one before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from schedlang.remat import decided
from schedlang.remat.rotor import Cost

Way = Literal["keep", "recompute", "offload"]
WAYS: tuple[Way, ...] = ("keep", "recompute", "offload")
POINTS = 4096  # partial plans that are told apart; of more, bytes are told apart in steps


@dataclass(frozen=True)
class Mixed:
    """The treatment of each module; operations that run again, and the wait for copies."""

    ways: tuple[Way, ...]
    again: float
    waited: float

    @property
    def time(self) -> float:
        """The time of the plan beside a forward and a backward."""
        return self.again + self.waited


@dataclass(frozen=True)
class _Part:
    """A plan of the first modules.

    moved  the place of the last moved one, -1: none; `flight` its bytes, `behind` the work behind
    held   bytes between forward and backward; `done` what it takes, but for what is behind `moved`
    again  of that the work of second runs
    """

    held: int = 0
    done: float = 0.0
    again: float = 0.0
    moved: int = -1
    flight: int = 0
    behind: float = 0.0
    last: Way | None = None
    before: _Part | None = None

    @property
    def order(self) -> tuple[int, float, float]:
        """The sizes in which parts with equal `moved` are compared: a part that is less in none is
        dropped."""
        return self.held, self.done + self.again, self.done

    def with_(self, way: Way, cost: Cost, place: int, ratio: float) -> _Part:
        """This one, and a module more."""
        behind = self.behind + cost.forward
        if way == "offload":
            done = self.done + self.again + self.waits(behind, ratio, last=False)
            return _Part(self.held + cost.small, done, 0.0, place, _moved(cost), 0.0, way, self)
        held = self.held + (cost.saved if way == "keep" else cost.input)
        again = self.again + (cost.forward if way == "recompute" else 0.0)
        return _Part(held, self.done, again, self.moved, self.flight, behind, way, self)

    def waits(self, behind: float, ratio: float, last: bool) -> float:
        """Return how much longer the last moved one's copies take than the work behind it."""
        copied = self.flight * ratio
        back = copied if last else max(0.0, copied - 2 * behind - self.again)
        return max(0.0, copied - behind) + back

    def time(self, ratio: float) -> float:
        """Return the time of the whole chain, where this is all of it."""
        return self.done + self.again + self.waits(self.behind, ratio, last=True)

    @property
    def ways(self) -> tuple[Way, ...]:
        """Return the treatment of each module, in order."""
        return decided(self)


def _moved(cost: Cost) -> int:
    """The bytes of a module that can be moved."""
    return cost.saved - cost.small


def _fits(part: _Part, way: Way, cost: Cost, memory: int) -> bool:
    """Tell whether a module fits behind these, in its forward and in its backward."""
    own = cost.saved + (cost.input if way == "recompute" else 0)
    return part.held + part.flight + own <= memory


def pofo(
    chain: Sequence[Cost], memory: int, ratio: float, among: Sequence[Way] = WAYS
) -> Mixed | None:
    """The plan that takes least time within memory; None: nothing fits.

    `ratio` is the work that is done while a byte is copied. It is the best there is as long as no
    more than POINTS partial plans are worth a look; beyond, at least no slower than what is found
    with second runs alone, or with copies alone.
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
        parts, fewer = _worth(more)
        thinned = thinned or fewer
    found = [_measured(chain, part.ways, ratio) for part in parts]
    if thinned and len(among) == len(WAYS):
        some = (pofo(chain, memory, ratio, ("keep", way)) for way in WAYS[1:])
        found += [one for one in some if one is not None]
    return min(found, key=lambda one: one.time, default=None)


def _measured(chain: Sequence[Cost], ways: Sequence[Way], ratio: float) -> Mixed:
    """Measure a choice for each module."""
    part = _Part()
    for place, (cost, way) in enumerate(zip(chain, ways, strict=True)):
        part = part.with_(way, cost, place, ratio)
    again = sum((c.forward for c, way in zip(chain, ways) if way == "recompute"), 0.0)
    return Mixed(tuple(ways), again, part.time(ratio) - again)


def _worth(parts: Iterable[_Part]) -> tuple[list[_Part], bool]:
    """Keep the unbeaten parts for each place of the last moved module; tell if some are gone."""
    ordered = sorted(parts, key=lambda one: (one.moved, *one.order))
    fronts = [_unbeaten(group) for _, group in groupby(ordered, key=lambda one: one.moved)]
    room = POINTS // max(1, len(fronts))
    found = [_thinned(front, room) for front in fronts]
    return [one for front in found for one in front], sum(map(len, found)) < sum(map(len, fronts))


def _unbeaten(ordered: Iterable[_Part]) -> list[_Part]:
    """Return the parts, in order, that no other beats in every number."""
    found: list[_Part] = []
    totals: list[float] = []  # rising, and with each `dones` falls
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
    """The part that holds least, and the quickest of each step of bytes."""
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


def needed(chain: Sequence[Cost]) -> int:
    """The fewest bytes in which `pofo` finds something."""
    most = sum(one.saved for one in chain)
    return bisect_left(range(most), True, key=lambda memory: _possible(chain, memory))


def _possible(chain: Sequence[Cost], memory: int) -> bool:
    """Tell whether anything fits: for each place of the last moved one the least is enough."""
    parts: list[_Part] = [_Part()]
    for place, cost in enumerate(chain):
        least: dict[int, _Part] = {}
        for part in parts:
            for way in WAYS:
                if _fits(part, way, cost, memory):
                    one = part.with_(way, cost, place, 0.0)
                    old = least.setdefault(one.moved, one)
                    least[one.moved] = min(old, one, key=lambda each: each.held)
        parts = list(least.values())
    return bool(parts)


def words(found: Mixed) -> str:
    """Describe how many modules are kept, recomputed and moved, and the cost."""
    count = Counter(found.ways)
    return (
        f"{count['keep']} kept whole, {count['recompute']} recomputed, {count['offload']} moved to"
        f" the host; {found.again:.3g} operations again, {found.waited:.3g} waited for"
    )
