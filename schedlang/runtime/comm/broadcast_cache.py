"""Values that all ranks of a group have been told: each keeps the same, so that none goes twice."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_KEPT, _BRIEF = 64, 1 << 16  # values that are kept for a group, and the bytes of one


@dataclass(eq=False)
class BroadcastCache:
    """Values that groups of a world have told all their ranks, by digest.

    Its ranks ask alike, one after the other, so that each of them knows what all of them know.
    """

    _known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bytes, bytes]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def once(
        self, group: dist.ProcessGroup, digest: bytes, mine: bytes, source: int | None
    ) -> bytes:
        """The value of a digest, which `source` tells the others unless they have all had it.

        mine    the value where this rank has it, else as many bytes
        source  global rank; None: all have it
        """
        known = self._known.setdefault(group, {})
        if (found := known.get(digest)) is None:
            found = mine
            if source is not None:
                sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
                dist.broadcast(sent, source, group)
                found = sent.numpy().tobytes()
            if len(found) <= _BRIEF:
                if len(known) >= _KEPT:
                    known.clear()
                known[digest] = found
        return found
