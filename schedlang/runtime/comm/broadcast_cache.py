"""A cache of values that all ranks of a group have received, so that no value is sent twice."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_KEPT, _BRIEF = 64, 1 << 16  # cached values of a group, and the largest bytes of a cached value


@dataclass(eq=False)
class BroadcastCache:
    """Values that all ranks of a group have received, by digest.

    All ranks of a group make the same calls in the same order, so all caches are equal.
    """

    _known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bytes, bytes]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def broadcast(
        self, group: dist.ProcessGroup, digest: bytes, local: bytes, source: int | None
    ) -> bytes:
        """Return the value of a digest; `source` broadcasts it unless it is cached.

        mine    the value if this rank has it, else as many bytes
        source  global rank; None: all ranks have the value
        """
        cache = self._known.setdefault(group, {})
        if (data := cache.get(digest)) is None:
            data = local
            if source is not None:
                sent = torch.frombuffer(bytearray(local), dtype=torch.uint8)
                dist.broadcast(sent, source, group)
                data = sent.numpy().tobytes()
            if len(data) <= _BRIEF:
                if len(cache) >= _KEPT:
                    cache.clear()
                cache[digest] = data
        return data
