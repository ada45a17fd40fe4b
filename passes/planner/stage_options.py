"""Options of stages for planners of the literature: what each layer may choose, combined per stage.

Has layers and devices as these planners model them, memory options of one layer, the Pareto front
of a stage's options (a knapsack), and what replicas of a stage add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from schedlang.passes.partition.stage_partition import StageOption

TIE_RATIO = 1 - 1e-12  # sums in another order differ by rounding, which must not break ties


@dataclass(frozen=True)
class Layer:
    """One layer on one device of speed 1: seconds of a microbatch, and bytes.

    weights    that replicas all-reduce; `state` with all that the optimizer has
    kept       saved activations of a microbatch; `input` what is saved with recomputation
    output     sent to the next layer
    exchanged  activations that ranks of a split layer send each other, in each direction
    """

    forward: float
    backward: float
    weights: float = 0.0
    state: float = 0.0
    kept: float = 0.0
    input: float = 0.0
    output: float = 0.0
    exchanged: float = 0.0


@dataclass(frozen=True)
class Devices:
    """Devices in a row; each `node` of them share the faster link.  Bytes, bytes per second.

    speeds    of each device (none: all 1); `host` and `offload_to_peer` the links for offloading
              activations
    memories  memory of each device, `memory` at most (none: all have `memory`)
    """

    count: int
    memory: float = math.inf
    node: int = 1
    link: float = math.inf
    network: float = math.inf
    host: float = math.inf
    peer: float = math.inf
    speeds: tuple[float, ...] = ()
    memories: tuple[float, ...] = ()

    def speed(self, span: range) -> float:
        """Return the speed of the slowest device of a range."""
        return min(self.speeds[span.start : span.stop]) if self.speeds else 1.0

    def memory_scale(self, span: range) -> float:
        """Return the factor by which bytes count more on the smallest device of a range."""
        if not self.memories or math.isinf(self.memory):
            return 1.0
        return self.memory / max(1e-9, min(self.memories[span.start : span.stop]))

    def bandwidth(self, span: range) -> float:
        """Return the bandwidth of a ring through a range: that of its slowest link."""
        inside = span.start // self.node == (span.stop - 1) // self.node
        return self.link if inside else self.network


# -- one layer -------------------------------------------------------------------------------------


def keep_activations(layer: Layer, devices: Devices) -> StageOption:
    """Keep activations on the device."""
    return StageOption(layer.forward, layer.backward, 0.0, layer.state, layer.kept, ("keep",))


def recompute_forward(layer: Layer, devices: Devices) -> StageOption:
    """Save only the input, and recompute the forward."""
    backward = layer.forward + layer.backward
    return StageOption(layer.forward, backward, 0.0, layer.state, layer.input, ("again",))


def offload_to_host(layer: Layer, devices: Devices) -> StageOption:
    """Offload activations to the host and reload them, while the layer computes."""
    return _offload(layer, devices.host, "swap")


def offload_to_peer(layer: Layer, devices: Devices) -> StageOption:
    """Offload activations to a device with free memory, and reload them."""
    return _offload(layer, devices.peer, "peer")


def _offload(layer: Layer, link: float, name: str) -> StageOption:
    copy = layer.kept / link
    seconds = max(layer.forward, copy), max(layer.backward, copy)
    return StageOption(*seconds, 0.0, layer.state, 0.0, (name,))


# -- a stage of them -------------------------------------------------------------------------------


Choice = Callable[[Layer, Devices], StageOption]
# cost of replicas: (way, bytes of weights, replicas, bytes per second, microbatches) -> way
Replicas = Callable[[StageOption, float, int, float, int], StageOption]


@dataclass(frozen=True)
class StageOptions:
    """Options of a stage of layers; each layer has the same choices.

    degrees   number of devices -> how many of them may split each layer; the others are replicas
    replicas  adds the cost of replicas
    """

    layers: Sequence[Layer]
    devices: Devices
    micro: int
    choices: Sequence[Choice] = (keep_activations,)
    degrees: Callable[[int], Iterable[int]] = lambda size: (1,)
    replicas: Replicas = lambda way, weights, copies, link, micro: way
    flight: Callable[[int], float] | None = None
    _fronts: dict[object, list[StageOption]] = field(default_factory=dict)
    _stages: dict[object, list[StageOption]] = field(default_factory=dict)

    def __call__(self, first: int, last: int, devices: range, after: int) -> list[StageOption]:
        """List the options of layers `first` to before `last`, with `after` stages behind them."""
        flight = self.flight(after) if self.flight else min(after + 1, self.micro)
        if math.isinf(self.devices.memory):
            flight = 1.0  # irrelevant
        link, speed = self.devices.bandwidth(devices), self.devices.speed(devices)
        start, memory_scale = devices.start % self.devices.node, self.devices.memory_scale(devices)
        key = first, last, len(devices), start, link, speed, memory_scale, flight
        if key not in self._stages:
            self._stages[key] = list(self._ways(first, last, devices, flight))
        return self._stages[key]

    def _ways(self, first: int, last: int, devices: range, flight: float) -> Iterator[StageOption]:
        weights = sum(layer.weights for layer in self.layers[first:last])
        link, speed = self.devices.bandwidth(devices), self.devices.speed(devices)
        memory_scale = self.devices.memory_scale(devices)
        for degree in self.degrees(len(devices)):
            copies, remainder = divmod(len(devices), degree)
            if remainder:
                continue
            groups = (range(i, i + degree) for i in range(devices.start, devices.stop, degree))
            bandwidth = min(map(self.devices.bandwidth, groups))
            for option in self._front(first, last, flight / copies, degree, bandwidth):
                shared = _scaled(option, 1 / speed / copies, memory_scale, memory_scale / copies)
                yield self.replicas(shared, weights / degree, copies, link, self.micro)

    def _front(
        self, first: int, last: int, flight: float, ranks: int, link: float
    ) -> list[StageOption]:
        """Combine the choices of all layers, without combinations that another one beats in time
        and bytes."""
        if first == last:
            return [StageOption(0.0, 0.0, name=())]
        key = first, last, flight, ranks, link
        if key not in self._fronts:
            tails = self._front(first + 1, last, flight, ranks, link)
            opts = [self._split(self.layers[first], choice, ranks, link) for choice in self.choices]
            joined = [add_options(head, tail) for head in opts for tail in tails]
            room = self.devices.memory
            fits = [option for option in joined if _bytes(option, flight) <= room]
            self._fronts[key] = _pareto_front(fits, 0.0 if math.isinf(room) else flight)
        return self._fronts[key]

    def _split(self, layer: Layer, choice: Choice, ranks: int, link: float) -> StageOption:
        """Split one layer over ranks that all-reduce in a ring: once in each direction, and once
        more where the layer is recomputed."""
        option = choice(layer, self.devices)
        exchange = 2 * (ranks - 1) / ranks * layer.exchanged / link
        factor = 2 if option.name == ("again",) else 1
        return replace(
            option,
            forward=option.forward / ranks + exchange,
            backward=option.backward / ranks + factor * exchange,
            held=option.held / ranks,
            kept=option.kept / ranks,
        )


def _scaled(option: StageOption, time: float, held: float, kept: float) -> StageOption:
    return replace(
        option,
        forward=option.forward * time,
        backward=option.backward * time,
        held=option.held * held,
        kept=option.kept * kept,
    )


def add_options(first: StageOption, second: StageOption) -> StageOption:
    """Combine the options of two layers that run one after the other on the same device."""
    return StageOption(
        first.forward + second.forward,
        first.backward + second.backward,
        first.sync + second.sync,
        first.held + second.held,
        first.kept + second.kept,
        first.name + second.name,
    )


def _bytes(option: StageOption, flight: float) -> float:
    return option.held + flight * option.kept


def _pareto_front(options: list[StageOption], flight: float) -> list[StageOption]:
    """Pareto front in time and bytes; bytes do not count where nothing is in flight."""

    def costs(option: StageOption) -> tuple[float, ...]:
        size = _bytes(option, flight) if flight else 0.0
        return option.forward, option.backward, option.sync, size

    front: list[StageOption] = []
    for option in sorted(options, key=costs):
        cost = costs(option)
        if not any(
            all(a * TIE_RATIO <= b for a, b in zip(costs(f), cost, strict=True)) for f in front
        ):
            front.append(option)
    return front


# -- replicas --------------------------------------------------------------------------------------


def _ring(weights: float, copies: int, link: float) -> float:
    return 2 * (copies - 1) / copies * weights / link


def reduce_each_step(
    option: StageOption, weights: float, copies: int, link: float, micro: int
) -> StageOption:
    """Replicas share each microbatch, and all-reduce gradients once a step."""
    return replace(option, sync=_ring(weights, copies, link))


def spread_reduction(
    option: StageOption, weights: float, copies: int, link: float, micro: int
) -> StageOption:
    """Replicas take turns; a step's all-reduce of gradients is spread over its microbatches
    (Piper)."""
    return replace(option, backward=option.backward + _ring(weights, copies, link) / micro)


def reduce_each_microbatch(
    option: StageOption, weights: float, copies: int, link: float, micro: int
) -> StageOption:
    """Replicas take turns, and each all-reduces gradients after each of its microbatches.

    PipeDream counts a ring twice, for gradients and for weights of a server, overlapped with
    computing.
    """
    return replace(option, backward=option.backward + 2 * _ring(weights, copies, link) / copies)
