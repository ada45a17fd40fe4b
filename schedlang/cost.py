"""What the operations of a pipeline cost: time, transfers, and activations kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | float | int


@dataclass(frozen=True)
class Cost:
    """Costs of one microbatch on one rank's whole share of the model; a chunk takes 1/v of them.

    f, i, w    forward, input gradient, weight gradient; a whole backward takes i + w
    comm       a transfer between two ranks
    kept       share of a microbatch's activations that is still held between I and W
    shares     relative weight of every stage (None: all equal); its mean is one
    Times are in any one unit. Fractions stay exact.
    """

    f: Number = 1
    i: Number = 1
    w: Number = 1
    comm: Number = 0
    kept: Number = 1
    shares: Sequence[Number] | None = None


UNIT_COST = Cost()
