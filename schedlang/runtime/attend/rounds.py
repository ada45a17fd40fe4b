"""In which order the keys and values of all ranks pass by, and how their gradients get home.

Gathered  all at once (Llama 3, 2024); gradients come back in one reduce-scatter
Ring      one block after the other around the ring, the next on its way while one is computed (Liu
          et al.: Ring Attention, 2023); with two groups a ring of rings, the inner one inside a
          node, with one transfer between nodes for each inner round (Sun et al.: BurstAttention,
          2024; Gu et al.: LoongTrain, 2024)

Both keep nothing but a rank's own keys and values for the backward, which moves them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from schedlang.runtime.attend.layout import Layout, place_at
from schedlang.runtime.attend.reach import Reach, wanted
from schedlang.runtime.attend.travel import Moving, Packet, gathered, scattered, shift
from schedlang.runtime.collectives.collective import Group

Contribute = Callable[[int, Packet], Packet]
Offsets = tuple[int, ...]


class Rounds(Protocol):
    """How packets of keys and values come to this rank."""

    @property
    def layout(self) -> Layout:
        """Which tokens each place has."""

    def forward(self, own: Packet) -> Iterator[tuple[int, Packet]]:
        """Every place that may be seen from somewhere, with its packet; this rank's own first."""

    def backward(self, own: Packet, contribute: Contribute) -> Packet:
        """The sum over ranks of `contribute(place, packet)` for this rank's own packet."""


@dataclass(frozen=True)
class Gathered:
    """All packets at once."""

    group: Group
    layout: Layout

    def forward(self, own: Packet) -> Iterator[tuple[int, Packet]]:
        """As `Rounds`."""
        yield from enumerate(gathered(own, self.layout.counts, self.group))

    def backward(self, own: Packet, contribute: Contribute) -> Packet:
        """As `Rounds`."""
        packets = gathered(own, self.layout.counts, self.group)
        grads = [contribute(place, packet) for place, packet in enumerate(packets)]
        return scattered(grads, self.layout.counts, self.group)


@dataclass(frozen=True)
class Ring:
    """Rings in rings, the outermost group first; none: one rank by itself."""

    groups: tuple[Group, ...]
    layout: Layout
    reach: Reach

    @property
    def here(self) -> tuple[int, ...]:
        """This rank's number in each group."""
        return tuple(group.rank for group in self.groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each group has."""
        return tuple(group.size for group in self.groups)

    def origin(self, offsets: Offsets) -> int:
        """Whose packet is here after so many steps of each ring."""
        steps = (*offsets, *[0] * (len(self.groups) - len(offsets)))
        return place_at([rank - step for rank, step in zip(self.here, steps)], self.sizes)

    def last(self, prefix: Offsets) -> int:
        """The last step of the next ring that anybody needs, after the steps of the outer ones."""
        depth = len(prefix)
        steps = wanted(self.reach, self.layout, self.sizes)
        return max((o[depth] for o in steps if o[:depth] == prefix), default=0)

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, own: Packet) -> Iterator[tuple[int, Packet]]:
        """As `Rounds`."""
        return self._around((), own)

    def _around(self, prefix: Offsets, packet: Packet) -> Iterator[tuple[int, Packet]]:
        if len(prefix) == len(self.groups):
            yield self.origin(prefix), packet
            return
        last = self.last(prefix)
        for step in range(last + 1):
            coming = self._next((*prefix, step), packet) if step < last else None
            yield from self._around((*prefix, step), packet)
            packet = coming.wait() if coming is not None else packet

    def _next(self, steps: Offsets, packet: Packet) -> Moving:
        """The packet that follows on the innermost of these rings."""
        depth = len(steps) - 1
        tokens = self.layout.counts[self.origin((*steps[:depth], steps[depth] + 1))]
        return shift(packet, tokens, self.groups[depth])

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, own: Packet, contribute: Contribute) -> Packet:
        """As `Rounds`: gradients follow their packet around, one step behind it."""
        return self._back((), own, contribute)

    def _back(self, prefix: Offsets, packet: Packet, contribute: Contribute) -> Packet:
        depth = len(prefix)
        if depth == len(self.groups):
            return contribute(self.origin(prefix), packet)
        group, last = self.groups[depth], self.last(prefix)
        home: Packet | None = None  # what this rank itself has for the packet it began with
        arriving: Moving | None = None
        for step in range(last + 1):
            coming = self._next((*prefix, step), packet) if step < last else None
            part = self._back((*prefix, step), packet, contribute)
            if step == 0:
                home = part
            else:
                total = part if arriving is None else added(arriving.wait(), part)
                # the last one to see a packet sends its gradient straight home
                by = 1 if step < last else group.size - last
                next_ = self.origin((*prefix, step + 1 if step < last else 0))
                arriving = shift(total, self.layout.counts[next_], group, by)
            packet = coming.wait() if coming is not None else packet
        assert home is not None
        return home if arriving is None else added(arriving.wait(), home)


def added(arrived: Packet, part: Packet) -> Packet:
    """The sum of two packets, in the memory of the first."""
    for into, more in zip(arrived.flats, part.flats):
        into.add_(more)
    return arrived
