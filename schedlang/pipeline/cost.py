"""Costs of a pipeline's operations: time, transfers, and saved activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | float | int


@dataclass(frozen=True)
class Cost:
    """Costs of one microbatch on one rank's full share of the model; a chunk has 1/v of them.

    f, i, w    forward, input gradient, weight gradient; a full backward takes i + w
    comm       a transfer between two ranks
    kept       share of a microbatch's activations that is still held between I and W
    shares     relative weight of every stage (None: all equal), in time and in activations
    held       relative activations of every stage, where they differ from `shares`
    slices     relative weight of every slice of a microbatch (None: all equal)
    between    transfers of some edges (from stage, to stage), where they differ from `comm`
    recompute  a recomputed forward (None: as f)
    inputs     share of a microbatch's activations that stays saved with recomputation
    evict, load, offload, reload, unshard, reshard, reduce, step
               as their operations; all but `step` run on a copy stream, overlapped with computing
    barrier    of a barrier itself, on every rank
    Times are in any one unit. Fractions and whole numbers stay exact.
    """

    f: Number = 1
    i: Number = 1
    w: Number = 1
    comm: Number = 0
    kept: Number = 1
    shares: Sequence[Number] | None = None
    held: Sequence[Number] | None = None
    slices: Sequence[Number] | None = None
    between: Mapping[tuple[int, int], Number] | None = None
    recompute: Number | None = None
    inputs: Number = 0
    evict: Number = 0
    load: Number = 0
    offload: Number = 0
    reload: Number = 0
    unshard: Number = 0
    reshard: Number = 0
    reduce: Number = 0
    step: Number = 0
    barrier: Number = 0


DEFAULT_COST = Cost()
