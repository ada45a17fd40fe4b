"""Buffers where each data-parallel replica has statistics of its own: `relax(batch_stats)`.

State dicts, checkpoints and exports have those of the first replica, as PyTorch's DDP has. So all
replicas evaluate with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.agreement import checksum
from schedlang.runtime.comm.collectives import Group, broadcast


class ReplicaBuffers:
    """The replicas of this rank's stage, and the buffers in which they differ.

    names   of buffers that differ between ranks; `step`: the step after which they were compared
    """

    def __init__(self, replicas: Group) -> None:
        self.replicas = replicas
        self.names: frozenset[str] = frozenset()
        self.step: int | None = None

    @contextmanager
    def of_first_replica(self, buffers: Mapping[str, Tensor], step: int) -> Iterator[None]:
        """Context in which buffers have the values of the first replica; all ranks together."""
        if step != self.step:
            self.step, self.names = step, _differing(buffers)
        own = {name: buffers[name].clone() for name in sorted(self.names & buffers.keys())}
        with torch.no_grad():
            for name in own:
                buffers[name].copy_(broadcast(buffers[name], 0, self.replicas))
            try:
                yield
            finally:
                for name, value in own.items() if self.replicas.rank else ():
                    buffers[name].copy_(value)


def _differing(buffers: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the buffers whose values are not the same on all ranks."""
    sums = comm.distinct_objects({name: checksum(buffer) for name, buffer in buffers.items()})
    names = dict.fromkeys(name for of_rank in sums for name in of_rank)
    return frozenset(n for n in names if len({of_rank.get(n) for of_rank in sums}) > 1)
