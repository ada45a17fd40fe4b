"""Keys, values, and what is known of their tokens, as one packet that travels."""

from __future__ import annotations

from torch import Tensor

from schedlang.runtime.attend.blocks import Tokens
from schedlang.runtime.attend.layout import Runs
from schedlang.runtime.attend.mask import Tags
from schedlang.runtime.attend.travel import Packet


def packed(k: Tensor, v: Tensor, tags: Tags) -> Packet:
    """What other ranks need of this one's tokens."""
    sides = [t for t in tags if t is not None]
    return Packet.of([k, v, *sides], [2, 2, *[1] * len(sides)])


def unpacked(packet: Packet, tags: Tags, runs: Runs) -> tuple[Tensor, Tensor, Tokens]:
    """The other way; `tags` are this rank's own, as all ranks have the same ones."""
    k, v, *sides = packet.tensors
    rest = iter(sides)
    return k, v, Tokens(runs, Tags(*(None if t is None else next(rest) for t in tags)))
