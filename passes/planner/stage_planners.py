"""Planners of the literature that split a chain into stages, as settings of one dynamic programme.

Each names its objective (the seconds of a step in its model), the options of a stage (sizes,
degrees, choices, replicas), and what its model leaves out.  None has code of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from schedlang.passes.partition.stage_partition import (
    PEAK,
    PHASES,
    PIVOT,
    SLOWEST,
    SUM,
    SUM_AND_SYNC,
    Objective,
    PartitionProblem,
    StagePartition,
    find_by_ceilings,
    find_partition,
)
from schedlang.passes.planner.stage_options import (
    Choice,
    Devices,
    Layer,
    Replicas,
    StageOptions,
    keep_activations,
    offload_to_host,
    offload_to_peer,
    recompute_forward,
    reduce_each_microbatch,
    reduce_each_step,
    spread_reduction,
)

Sizes = Callable[[int], Sequence[int]]  # number of devices -> numbers that a stage may use


def one_device(count: int) -> tuple[int, ...]:
    """Allow one device for each stage."""
    return (1,)


def any_number(count: int) -> tuple[int, ...]:
    """Allow any number of devices."""
    return tuple(range(1, count + 1))


def powers_of_two(count: int) -> tuple[int, ...]:
    """Allow powers of two."""
    return tuple(1 << k for k in range(count.bit_length()) if 1 << k <= count)


@dataclass(frozen=True)
class StagePlanner:
    """A planner that splits a chain of layers into stages.

    paper             authors and venue
    omits             what this implementation leaves out
    equal_stages      all stages have equally many devices, split in the same way; every such grid
                      is tried
    links             messages between stages take time
    arranges_devices  unequal devices may be in any order
    heterogeneous     the paper has devices of unequal speed; else the planner takes all devices to
                      be equal
    """

    paper: str
    omits: str
    objective: Objective
    sizes: Sizes = one_device
    degrees: Sizes = one_device
    choices: tuple[Choice, ...] = (keep_activations,)
    replicas: Replicas = lambda way, weights, copies, link, micro: way
    solver: Callable[[PartitionProblem, Objective], StagePartition | None] = find_partition
    equal_stages: bool = False
    links: bool = True
    arranges_devices: bool = False
    heterogeneous: bool = False

    def problem(
        self,
        layers: Sequence[Layer],
        devices: Devices,
        micro: int,
        stages: int | None = None,
        flight: Callable[[int], float] | None = None,
    ) -> PartitionProblem:
        """Build the problem of these layers for the programme."""
        menu = StageOptions(
            layers, devices, micro, self.choices, self.degrees, self.replicas, flight
        )

        def send(unit: int, device: int) -> float:
            if not self.links:
                return 0.0
            return layers[unit - 1].output / devices.bandwidth(range(device - 1, device + 1))

        return PartitionProblem(
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
    ) -> StagePartition | None:
        """Find stages, first to last; None where none fit in memory.

        layers   with seconds of one microbatch on one device
        stages   how many (None: as many as the planner's model prefers)
        """
        partitions = [
            planner.solve(layers, order, micro, count)
            for order in self._orders(devices)
            for planner, count in self._grids(layers, devices, stages)
        ]
        fits = [partition for partition in partitions if partition is not None]
        return min(fits, key=lambda partition: partition.value, default=None)

    def solve(
        self,
        layers: Sequence[Layer],
        devices: Devices,
        micro: int,
        stages: int | None = None,
        flight: Callable[[int], float] | None = None,
    ) -> StagePartition | None:
        """Find stages on devices in the given order; None where none fit in memory.

        flight  stages behind a stage -> microbatches that it saves (None: as in 1F1B)
        The first choice is quicker than the others: if its best stages fit, no others are better.
        """
        if len(self.choices) > 1 and not devices.memories:
            planner = replace(self, choices=self.choices[:1])
            free = planner.problem(layers, replace(devices, memory=math.inf), micro, stages, flight)
            partition = self.solver(free, self.objective)
            if partition is not None and _fits(partition, devices.memory, free):
                return partition
        return self.solver(self.problem(layers, devices, micro, stages, flight), self.objective)

    def _orders(self, devices: Devices) -> Iterator[Devices]:
        if not (self.arranges_devices and devices.speeds):
            yield devices
            return
        rooms = devices.memories or (devices.memory,) * devices.count
        for order in sorted(set(permutations(zip(devices.speeds, rooms)))):
            speeds, room = zip(*order)
            yield replace(devices, speeds=speeds, memories=room if devices.memories else ())

    def _grids(
        self, layers: Sequence[Layer], devices: Devices, stages: int | None
    ) -> Iterator[tuple[StagePlanner, int | None]]:
        """Yield the planner itself, or one planner for each grid of equal stages."""
        if not self.equal_stages:
            yield self, stages
            return
        for count in range(1, min(len(layers), devices.count) + 1):
            size, remainder = divmod(devices.count, count)
            if remainder == 0 and stages in (None, count):
                for degree in self.degrees(size):
                    yield replace(self, sizes=_only(size), degrees=_only(degree)), count


def _fits(partition: StagePartition, memory: float, problem: PartitionProblem) -> bool:
    stages = len(partition.options)
    counts = (problem.in_flight_at(stages - 1 - k) for k in range(stages))
    return all(stage.held + n * stage.kept <= memory for stage, n in zip(partition.options, counts))


def _only(number: int) -> Sizes:
    return lambda count: (number,)


STAGE_PLANNERS = {
    "pipedream": StagePlanner(
        "PipeDream (Narayanan et al., SOSP 2019)",
        "the pipeline's beginning and end, since it never stops; memory of stashed weights",
        SLOWEST,
        any_number,
        replicas=reduce_each_microbatch,
    ),
    "dapple": StagePlanner(
        "DAPPLE (Fan et al., PPoPP 2021)",
        "its three policies of placing devices, which lie in one row here",
        PIVOT,
        any_number,
        replicas=reduce_each_step,
    ),
    "piper": StagePlanner(
        "Piper (Tarnawski et al., NeurIPS 2021)",
        "the pipeline's beginning and end; branches of a graph, which is a chain here",
        SLOWEST,
        any_number,
        powers_of_two,
        (keep_activations, recompute_forward),
        spread_reduction,
    ),
    "alpa": StagePlanner(
        "Alpa (Zheng et al., OSDI 2022), its stages",
        "messages between stages, what overlaps, sums of gradients; operators of a stage are split"
        " alike, where Alpa solves a programme for each",
        SUM,
        powers_of_two,
        powers_of_two,
        solver=lambda problem, objective: find_by_ceilings(problem),
        links=False,
    ),
    "amp": StagePlanner(
        "AMP (Li et al., NeurIPS 2022)",
        "memory of activations that other microbatches keep; where devices stand is given, not"
        " searched",
        SUM_AND_SYNC,
        degrees=powers_of_two,
        replicas=reduce_each_step,
        equal_stages=True,
        heterogeneous=True,
    ),
    "adapipe": StagePlanner(
        "AdaPipe (Sun et al., ASPLOS 2024)",
        "messages of the steady phase; layers are computed again whole, not operator by operator",
        PHASES,
        choices=(keep_activations, recompute_forward),
    ),
    "whale": StagePlanner(
        "Whale (Jia et al., USENIX ATC 2022), its stages",
        "the pipeline's beginning and end; devices that share a stage are alike",
        SLOWEST,
        heterogeneous=True,
    ),
    "hetpipe": StagePlanner(
        "HetPipe (Park et al., USENIX ATC 2020), stages of a virtual worker",
        "waves of several workers, and the server that they share: all sum once a step, and are cut"
        " alike; links depend on places alone",
        SLOWEST,
        arranges_devices=True,
        heterogeneous=True,
    ),
    "mcap": StagePlanner(
        "mCAP (Dreuning et al., Euro-Par 2022)",
        "time altogether: the fullest device decides",
        PEAK,
        links=False,
    ),
    "mpress": StagePlanner(
        "MPress (Zhou et al., HPCA 2023)",
        "who takes what leaves over the peer link, and copies of two layers that meet on a link",
        PIVOT,
        choices=(keep_activations, offload_to_peer, offload_to_host, recompute_forward),
    ),
    "swapadvisor": StagePlanner(
        "SwapAdvisor (Huang et al., ASPLOS 2020)",
        "when memory is allotted, and to whom; the search by a genetic algorithm, which is exact"
        " here",
        SLOWEST,
        choices=(keep_activations, offload_to_host),
    ),
}
