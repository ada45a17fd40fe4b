"""Activations that are moved between forward and backward: to another rank, or to host memory.

EVICT sends the saved activations of a forward to a partner, which receives (HOLD) and sends them
back (GIVE); LOAD receives them again (Kim et al., BPipe, 2023). OFFLOAD and RELOAD copy to host
memory and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from schedlang.pipeline.timeline.table import Op
from schedlang.runtime.comm import world
from schedlang.runtime.device import HOST, is_meta
from schedlang.runtime.pipeline.in_flight import SavedStorages, WorkItem, work_of
from schedlang.runtime.pipeline.p2p import PeerChannel
from schedlang.runtime.pipeline.step import PipelineStep
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.tiers import PEER

Pairs = Iterable[tuple[int, int]]
Groups = Sequence[world.ProcessGroup | None]


class PartnerEviction:
    """The two channels between partners, out and home, separate from the messages between stages.

    `groups`: two for out (to higher ranks, to lower), two for home, and one between the hosts,
    which exchange the numbers of bytes, so that nobody waits for a device to know them.
    """

    def __init__(self, groups: Groups, device: torch.device, pairs: Pairs = ()) -> None:
        padded = (*groups, None, None, None, None, None)
        self.out = PeerChannel(padded[0], padded[1], device, pairs, PEER)
        self.home = PeerChannel(padded[2], padded[3], device, pairs)
        self.hosts = padded[4]
        self._sizes: list[tuple[Any, torch.Tensor]] = []  # sends in flight
        self.sent: dict[int, int] = {}  # stage -> bytes evicted per microbatch, at most
        self._held: set[WorkItem] = set()
        self._last: WorkItem | None = None

    def finish(self) -> None:
        """Wait until all sends have arrived."""
        self.out.finish()
        self.home.finish()
        for message, _ in self._sizes:
            message.wait()
        self._sizes.clear()
        self._last = None
        assert not self._held, "activations of other ranks were not given back"

    def evict(self, step: PipelineStep, op: Op) -> None:
        """Send the saved activations of a forward; wait first for those that were sent before."""
        work, partner = work_of(op), step.pipe.ranks[op.peer]
        self._free()
        bag, self._last = bag_of(step, work), work
        sizes = bag.sizes()
        self.sent[work.stage] = max(self.sent.get(work.stage, 0), sum(sizes))
        if not is_meta(self.out.device):
            self._send_sizes(partner, sizes)
        self.out.send(partner, work, bag.pack(), header=False)
        if is_meta(self.out.device):
            self._free()  # a dry run sends nothing

    def _send_sizes(self, partner: int, sizes: Sequence[int]) -> None:
        """Send to the host of a partner the number of pieces, and the bytes of each."""
        with torch._C.DisableTorchFunction():
            for numbers in ([len(sizes)], sizes):
                message = torch.tensor(numbers, dtype=torch.int64, device=HOST)
                self._sizes.append((world.isend(message, partner, self.hosts), message))

    def make_room(self) -> None:
        """Free activations that have arrived elsewhere, before memory is needed.

        HOLD stands right behind EVICT in the order of all rows, so it does not wait for later
        operations of this rank. A backend that reports arrivals is queried, not waited for.
        """
        if self.out.reports_arrival:
            self.out.sweep()
        else:
            self._free()

    def _free(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self.out.free(last)

    def hold(self, step: PipelineStep, op: Op) -> None:
        """Receive the activations of a partner."""
        work, source = work_of(op), step.pipe.ranks[op.peer]
        sizes = self.receive_sizes(source)
        layout = tuple((torch.uint8, (int(size),)) for size in sizes)
        self.out.post(source, work, len(sizes), lambda: layout)
        self._held.add(work)

    def receive_sizes(self, source: int) -> Sequence[int]:
        """Receive the bytes of each piece that a partner is about to send."""
        (count,) = self._receive_numbers(source, 1)
        return self._receive_numbers(source, count)

    def _receive_numbers(self, source: int, count: int) -> list[int]:
        with torch._C.DisableTorchFunction():
            message = torch.empty(count, dtype=torch.int64, device=HOST)
            world.irecv(message, source, self.hosts).wait()
            return message.tolist()

    def give(self, step: PipelineStep, op: Op) -> None:
        """Send the activations of a partner back."""
        work = work_of(op)
        self._held.remove(work)
        self.home.send(step.pipe.ranks[op.peer], work, self.out.take(work), header=False)
        if not self.out.reports_arrival:  # LOAD stands before GIVE in the order of all rows
            self.home.free(work)

    def load(self, step: PipelineStep, op: Op) -> None:
        """Post the receive of evicted activations; the backward waits for them."""
        self.make_room()
        work = work_of(op)
        bag = bag_of(step, work)
        layout = tuple((torch.uint8, (size,)) for size in bag.sizes())
        self.home.post(step.pipe.ranks[op.peer], work, len(layout), lambda: layout)
        bag.set_loader(lambda: self.home.take(work))


def offload(step: PipelineStep, op: Op) -> None:
    """Copy the saved activations of a forward to host memory."""
    bag = bag_of(step, work_of(op))
    step.host_copies[work_of(op)] = [(copies.to_host(part), part.device) for part in bag.pack()]


def reload(step: PipelineStep, op: Op) -> None:
    """Start the copy back from host memory."""
    hosts = step.host_copies.pop(work_of(op))
    reloads = [copies.to_device(host, device) for host, device in hosts]
    bag_of(step, work_of(op)).set_loader(lambda: [copies.wait_copy(*pair) for pair in reloads])


def bag_of(step: PipelineStep, work: WorkItem) -> SavedStorages:
    """Return the bag of the activations that the forward of some work has saved."""
    bag = step.flights[work].bag
    assert bag is not None, "the forward of what is parked keeps no bag"
    return bag
