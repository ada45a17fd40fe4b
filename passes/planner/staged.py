"""Planners of the literature that split a chain into stages, as settings of one dynamic programme.

Each names its objective (the seconds of a step in its model), the options of a stage (sizes,
degrees, choices, replicas), and what its model leaves out.  None has code of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from schedlang.passes.partition.programme import (
    PEAK,
    PHASES,
    PIVOT,
    SLOWEST,
    SUM,
    SUM_AND_SYNC,
    Cut,
    Objective,
    Problem,
    ceilings,
    cut,
)
from schedlang.passes.planner.menus import (
    Choice,
    Devices,
    Layer,
    LayerMenu,
    Replicas,
    again,
    each_batch,
    each_step,
    keep,
    peer,
    shared_out,
    swap,
)

Sizes = Callable[[int], Sequence[int]]  # number of devices -> numbers that a stage may use


def one(count: int) -> tuple[int, ...]:
    """Allow one device for each stage."""
    return (1,)


def every(count: int) -> tuple[int, ...]:
    """Allow any number of devices."""
    return tuple(range(1, count + 1))


def powers(count: int) -> tuple[int, ...]:
    """Allow powers of two."""
    return tuple(1 << k for k in range(count.bit_length()) if 1 << k <= count)


@dataclass(frozen=True)
class Staged:
    """A planner that splits a chain of layers into stages.

    paper     authors and venue
    leaves    what this implementation leaves out
    alike     all stages have equally many devices, split in the same way; every such grid is tried
    links     messages between stages take time
    arranged  unequal devices may be in any order
    unlike    the paper has devices of unequal speed; else the planner takes all devices to be equal
    """

    paper: str
    leaves: str
    objective: Objective
    sizes: Sizes = one
    degrees: Sizes = one
    choices: tuple[Choice, ...] = (keep,)
    replicas: Replicas = lambda way, weights, copies, link, micro: way
    solver: Callable[[Problem, Objective], Cut | None] = cut
    alike: bool = False
    links: bool = True
    arranged: bool = False
    unlike: bool = False

    def problem(
        self,
        layers: Sequence[Layer],
        devices: Devices,
        micro: int,
        stages: int | None = None,
        flight: Callable[[int], float] | None = None,
    ) -> Problem:
        """Build the problem of these layers for the programme."""
        menu = LayerMenu(layers, devices, micro, self.choices, self.degrees, self.replicas, flight)

        def send(unit: int, device: int) -> float:
            if not self.links:
                return 0.0
            return layers[unit - 1].handed / devices.between(range(device - 1, device + 1))

        return Problem(
            len(layers),
            menu,
            micro,
            devices.count,
            self.sizes(devices.count),
            stages,
            send,
            devices.memory,
            flight,
        )

    def plan(
        self, layers: Sequence[Layer], devices: Devices, micro: int, stages: int | None = None
    ) -> Cut | None:
        """Find stages, first to last; None where none fit in memory.

        layers   with seconds of one microbatch on one device
        stages   how many (None: as many as the planner's model prefers)
        """
        found = [
            planner.solved(layers, order, micro, count)
            for order in self._orders(devices)
            for planner, count in self._grids(layers, devices, stages)
        ]
        fits = [each for each in found if each is not None]
        return min(fits, key=lambda each: each.value, default=None)

    def solved(
        self,
        layers: Sequence[Layer],
        devices: Devices,
        micro: int,
        stages: int | None = None,
        flight: Callable[[int], float] | None = None,
    ) -> Cut | None:
        """Find stages on devices in the given order; None where none fit in memory.

        flight  stages behind a stage -> microbatches that it saves (None: as in 1F1B)
        The first choice is quicker than the others: if its best stages fit, no others are better.
        """
        if len(self.choices) > 1 and not devices.rooms:
            first = replace(self, choices=self.choices[:1])
            free = first.problem(layers, replace(devices, memory=math.inf), micro, stages, flight)
            found = self.solver(free, self.objective)
            if found is not None and _fits(found, devices.memory, free):
                return found
        return self.solver(self.problem(layers, devices, micro, stages, flight), self.objective)

    def _orders(self, devices: Devices) -> Iterator[Devices]:
        if not (self.arranged and devices.speeds):
            yield devices
            return
        rooms = devices.rooms or (devices.memory,) * devices.count
        for order in sorted(set(permutations(zip(devices.speeds, rooms)))):
            speeds, room = zip(*order)
            yield replace(devices, speeds=speeds, rooms=room if devices.rooms else ())

    def _grids(
        self, layers: Sequence[Layer], devices: Devices, stages: int | None
    ) -> Iterator[tuple[Staged, int | None]]:
        """Yield the planner itself, or one planner for each grid of equal stages."""
        if not self.alike:
            yield self, stages
            return
        for count in range(1, min(len(layers), devices.count) + 1):
            size, rest = divmod(devices.count, count)
            if rest == 0 and stages in (None, count):
                for degree in self.degrees(size):
                    yield replace(self, sizes=_only(size), degrees=_only(degree)), count


def _fits(found: Cut, memory: float, problem: Problem) -> bool:
    stages = len(found.ways)
    flights = (problem.flying(stages - 1 - at) for at in range(stages))
    return all(way.held + n * way.kept <= memory for way, n in zip(found.ways, flights))


def _only(number: int) -> Sizes:
    return lambda count: (number,)


STAGED = {
    "pipedream": Staged(
        "PipeDream (Narayanan et al., SOSP 2019)",
        "the pipeline's beginning and end, since it never stops; memory of stashed weights",
        SLOWEST,
        every,
        replicas=each_batch,
    ),
    "dapple": Staged(
        "DAPPLE (Fan et al., PPoPP 2021)",
        "its three policies of placing devices, which lie in one row here",
        PIVOT,
        every,
        replicas=each_step,
    ),
    "piper": Staged(
        "Piper (Tarnawski et al., NeurIPS 2021)",
        "the pipeline's beginning and end; branches of a graph, which is a chain here",
        SLOWEST,
        every,
        powers,
        (keep, again),
        shared_out,
    ),
    "alpa": Staged(
        "Alpa (Zheng et al., OSDI 2022), its stages",
        "messages between stages, what overlaps, sums of gradients; operators of a stage are split"
        " alike, where Alpa solves a programme for each",
        SUM,
        powers,
        powers,
        solver=lambda problem, objective: ceilings(problem),
        links=False,
    ),
    "amp": Staged(
        "AMP (Li et al., NeurIPS 2022)",
        "memory of activations that other microbatches keep; where devices stand is given, not"
        " searched",
        SUM_AND_SYNC,
        degrees=powers,
        replicas=each_step,
        alike=True,
        unlike=True,
    ),
    "adapipe": Staged(
        "AdaPipe (Sun et al., ASPLOS 2024)",
        "messages of the steady phase; layers are computed again whole, not operator by operator",
        PHASES,
        choices=(keep, again),
    ),
    "whale": Staged(
        "Whale (Jia et al., USENIX ATC 2022), its stages",
        "the pipeline's beginning and end; devices that share a stage are alike",
        SLOWEST,
        unlike=True,
    ),
    "hetpipe": Staged(
        "HetPipe (Park et al., USENIX ATC 2020), stages of a virtual worker",
        "waves of several workers, and the server that they share: all sum once a step, and are cut"
        " alike; links depend on places alone",
        SLOWEST,
        arranged=True,
        unlike=True,
    ),
    "mcap": Staged(
        "mCAP (Dreuning et al., Euro-Par 2022)",
        "time altogether: the fullest device decides",
        PEAK,
        links=False,
    ),
    "mpress": Staged(
        "MPress (Zhou et al., HPCA 2023)",
        "who takes what leaves over the peer link, and copies of two layers that meet on a link",
        PIVOT,
        choices=(keep, peer, swap, again),
    ),
    "swapadvisor": Staged(
        "SwapAdvisor (Huang et al., ASPLOS 2020)",
        "when memory is allotted, and to whom; the search by a genetic algorithm, which is exact"
        " here",
        SLOWEST,
        choices=(keep, swap),
    ),
}
