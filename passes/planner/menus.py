"""Menus of stages: what each layer may choose, added up to what a stage of them may.

* Layers and devices as planners of the literature see them.
* What one layer may do for memory, and what that takes.
* The choices of all layers of a stage, those alone that no other beats (a knapsack).
* What replicas of a stage add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from schedlang.passes.partition.programme import Way

SAME = 1 - 1e-12  # sums in another order differ by rounding, which is no better choice


@dataclass(frozen=True)
class Layer:
    """One layer on one device of speed 1: seconds of a microbatch, and bytes.

    weights  that replicas add up; `state` of them with all that the optimizer has
    kept     activations of a microbatch; `input` of them where it is computed again
    handed   to the next layer
    meets    bytes of the activations that ranks of a split layer send each other, each way
    """

    forward: float
    backward: float
    weights: float = 0.0
    state: float = 0.0
    kept: float = 0.0
    input: float = 0.0
    handed: float = 0.0
    meets: float = 0.0


@dataclass(frozen=True)
class Devices:
    """Devices in a row; the next `node` of them share the faster link.  Bytes, bytes per second.

    speeds  of each device (none: all 1); `host` and `peer` the links over which activations leave
    rooms   bytes of each, `memory` at most (none: all of it)
    """

    count: int
    memory: float = math.inf
    node: int = 1
    link: float = math.inf
    network: float = math.inf
    host: float = math.inf
    peer: float = math.inf
    speeds: tuple[float, ...] = ()
    rooms: tuple[float, ...] = ()

    def speed(self, some: range) -> float:
        """The speed of the slowest of them."""
        return min(self.speeds[some.start : some.stop]) if self.speeds else 1.0

    def fills(self, some: range) -> float:
        """Share of the smallest of them that a byte fills, by that of the largest of all."""
        if not self.rooms or math.isinf(self.memory):
            return 1.0
        return self.memory / max(1e-9, min(self.rooms[some.start : some.stop]))

    def between(self, some: range) -> float:
        """Bytes per second of a ring through them: of its slowest link."""
        inside = some.start // self.node == (some.stop - 1) // self.node
        return self.link if inside else self.network


# -- one layer -------------------------------------------------------------------------------------


def keep(layer: Layer, devices: Devices) -> Way:
    """Activations stay where they are."""
    return Way(layer.forward, layer.backward, 0.0, layer.state, layer.kept, ("keep",))


def again(layer: Layer, devices: Devices) -> Way:
    """The input alone stays, and the forward is computed once more."""
    took = layer.forward + layer.backward
    return Way(layer.forward, took, 0.0, layer.state, layer.input, ("again",))


def swap(layer: Layer, devices: Devices) -> Way:
    """Activations go to the host and come back, each beside the layer's own computing."""
    return _away(layer, devices.host, "swap")


def peer(layer: Layer, devices: Devices) -> Way:
    """Activations go to a device that has room, and come back."""
    return _away(layer, devices.peer, "peer")


def _away(layer: Layer, link: float, name: str) -> Way:
    copy = layer.kept / link
    sides = max(layer.forward, copy), max(layer.backward, copy)
    return Way(*sides, 0.0, layer.state, 0.0, (name,))


# -- a stage of them -------------------------------------------------------------------------------


Choice = Callable[[Layer, Devices], Way]
# what replicas add: (way, bytes of weights, replicas, bytes per second, microbatches) -> way
Replicas = Callable[[Way, float, int, float, int], Way]


@dataclass(frozen=True)
class LayerMenu:
    """Ways of a stage of layers, each of which has the same choices.

    degrees   how many ranks may split each layer, of so many devices; the others are replicas
    replicas  what these add
    """

    layers: Sequence[Layer]
    devices: Devices
    micro: int
    choices: Sequence[Choice] = (keep,)
    degrees: Callable[[int], Iterable[int]] = lambda size: (1,)
    replicas: Replicas = lambda way, weights, copies, link, micro: way
    flight: Callable[[int], float] | None = None
    _fronts: dict[object, list[Way]] = field(default_factory=dict)
    _stages: dict[object, list[Way]] = field(default_factory=dict)

    def __call__(self, first: int, last: int, devices: range, after: int) -> list[Way]:
        """The ways of layers `first` to before `last`, with `after` stages behind them."""
        flight = self.flight(after) if self.flight else min(after + 1, self.micro)
        if math.isinf(self.devices.memory):
            flight = 1.0  # of no matter
        link, speed = self.devices.between(devices), self.devices.speed(devices)
        start, fills = devices.start % self.devices.node, self.devices.fills(devices)
        key = first, last, len(devices), start, link, speed, fills, flight
        if key not in self._stages:
            self._stages[key] = list(self._ways(first, last, devices, flight))
        return self._stages[key]

    def _ways(self, first: int, last: int, devices: range, flight: float) -> Iterator[Way]:
        weights = sum(layer.weights for layer in self.layers[first:last])
        link, speed = self.devices.between(devices), self.devices.speed(devices)
        fills = self.devices.fills(devices)
        for degree in self.degrees(len(devices)):
            copies, rest = divmod(len(devices), degree)
            if rest:
                continue
            groups = (range(at, at + degree) for at in range(devices.start, devices.stop, degree))
            meet = min(map(self.devices.between, groups))
            for way in self._front(first, last, flight / copies, degree, meet):
                shared = _scaled(way, 1 / speed / copies, fills, fills / copies)
                yield self.replicas(shared, weights / degree, copies, link, self.micro)

    def _front(self, first: int, last: int, flight: float, ranks: int, link: float) -> list[Way]:
        """Ways of all choices, less those that take and hold no less than another one."""
        if first == last:
            return [Way(0.0, 0.0, name=())]
        key = first, last, flight, ranks, link
        if key not in self._fronts:
            more = self._front(first + 1, last, flight, ranks, link)
            one = [self._split(self.layers[first], choice, ranks, link) for choice in self.choices]
            joined = [added(mine, rest) for mine in one for rest in more]
            room = self.devices.memory
            fits = [way for way in joined if _bytes(way, flight) <= room]
            self._fronts[key] = _unbeaten(fits, 0.0 if math.isinf(room) else flight)
        return self._fronts[key]

    def _split(self, layer: Layer, choice: Choice, ranks: int, link: float) -> Way:
        """One layer over ranks that meet in a ring, once each way and once more where it runs
        again."""
        way = choice(layer, self.devices)
        meet = 2 * (ranks - 1) / ranks * layer.meets / link
        twice = 2 if way.name == ("again",) else 1
        return replace(
            way,
            forward=way.forward / ranks + meet,
            backward=way.backward / ranks + twice * meet,
            held=way.held / ranks,
            kept=way.kept / ranks,
        )


def _scaled(way: Way, time: float, held: float, kept: float) -> Way:
    return replace(
        way,
        forward=way.forward * time,
        backward=way.backward * time,
        held=way.held * held,
        kept=way.kept * kept,
    )


def added(one: Way, other: Way) -> Way:
    """Both, one after the other on the same device."""
    return Way(
        one.forward + other.forward,
        one.backward + other.backward,
        one.sync + other.sync,
        one.held + other.held,
        one.kept + other.kept,
        one.name + other.name,
    )


def _bytes(way: Way, flight: float) -> float:
    return way.held + flight * way.kept


def _unbeaten(ways: list[Way], flight: float) -> list[Way]:
    """Ways that no other beats in time and bytes; bytes do not count where nothing is in flight."""

    def costs(way: Way) -> tuple[float, ...]:
        size = _bytes(way, flight) if flight else 0.0
        return way.forward, way.backward, way.sync, size

    front: list[Way] = []
    for way in sorted(ways, key=costs):
        mine = costs(way)
        if not any(all(a * SAME <= b for a, b in zip(costs(f), mine, strict=True)) for f in front):
            front.append(way)
    return front


# -- replicas --------------------------------------------------------------------------------------


def _ring(weights: float, copies: int, link: float) -> float:
    return 2 * (copies - 1) / copies * weights / link


def each_step(way: Way, weights: float, copies: int, link: float, micro: int) -> Way:
    """Replicas share each microbatch, and add their gradients up once a step."""
    return replace(way, sync=_ring(weights, copies, link))


def shared_out(way: Way, weights: float, copies: int, link: float, micro: int) -> Way:
    """Replicas take turns; a step's sum of gradients is dealt out to its microbatches (Piper)."""
    return replace(way, backward=way.backward + _ring(weights, copies, link) / micro)


def each_batch(way: Way, weights: float, copies: int, link: float, micro: int) -> Way:
    """Replicas take turns, and each adds its gradients up after each of its microbatches.

    PipeDream counts twice a ring, for gradients and weights of a server, beside the computing.
    """
    return replace(way, backward=way.backward + 2 * _ring(weights, copies, link) / copies)
