"""Units and parameters of each stage of a setting, and of the rank of each pipeline place."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from schedlang.ir.placement import slicing_dim
from schedlang.passes.planner.values import Chain, Setting, Shapes

Array = NDArray[np.float64]

# -- units -----------------------------------------------------------------------------------------


def units_by_stage(
    chain: Chain, cuts: tuple[int, ...], again: tuple[int, ...] | NDArray[np.int64] = ()
) -> tuple[Array, Array]:
    """Units of each run at each stage [stages, runs], and the recomputed ones among them.

    `again` may be several choices [..., stages]: then the second result is [..., stages, runs].  A
    unit that would not save less by recomputation is not recomputed.
    """
    ends = np.cumsum([run.count for run in chain.runs])
    begins = ends - [run.count for run in chain.runs]
    last = np.cumsum(cuts)
    if last[-1] != ends[-1]:
        raise ValueError(f"the cuts have {last[-1]} units, and there are {ends[-1]}")
    first = last - cuts

    def within(last_units: NDArray[np.int64]) -> Array:
        overlap = np.minimum(last_units[..., None], ends) - np.maximum(first[:, None], begins)
        counts: Array = np.maximum(overlap, 0).astype(np.float64)
        return counts

    again_counts = np.minimum(again if len(again) else 0, cuts).astype(np.int64)
    spares = np.array([run.unit.input < run.unit.kept for run in chain.runs])
    return within(last), within(first + again_counts) * spares


def split_backward_stages(setting: Setting, again: Array | None = None) -> NDArray[np.bool_]:
    """Find stages whose backward runs in two halves, if the order has halves.

    Stages whose weights are gathered from ZeRO shards do not, nor do stages that recompute units
    (`again`; default: the setting's).
    """
    if again is None:
        again = np.array(setting.again or (0,) * setting.pp * setting.chunks)
    gathered = setting.zero > 0 and setting.dp > 1
    splits: NDArray[np.bool_] = (again == 0) & (not gathered)
    return splits


# -- parameters ------------------------------------------------------------------------------------


def parameters_by_place(
    chain: Chain,
    counts: Array,
    rank: NDArray[np.int64],
    places: int,
    shards: tuple[int, int] = (1, 1),
) -> Array:
    """Parameters of the rank of each place [places, 2]: replicated ones, and those of experts.

    `shards` are numbers of ranks over which ZeRO shards both: the result is padded, so many times
    what the fullest of these ranks has.  A rank holds tied parameters once.
    """
    numels, unit_numels = np.zeros((places, 2)), padded_parameters(chain, shards)
    np.add.at(numels, rank, counts @ unit_numels)
    for first, second in chain.tied:
        shared_places = has_run(counts, rank, first) & has_run(counts, rank, second)
        numels[sorted(shared_places), 0] -= min(unit_numels[[first, second], 0])
    return numels


def padded_parameters(chain: Chain, shards: tuple[int, int]) -> Array:
    """Parameters of a unit of each run [runs, 2], replicated ones and those of experts, padded to
    so many equal shards.

    ZeRO shards each parameter along its `slicing_dim`: of a parameter with fewer rows than there
    are ranks and no dim that they divide, some ranks hold one row, and the others hold nothing.
    """
    return _padded(_sizes(chain), shards)


def crosswise_parameters(chain: Chain, shards: tuple[int, int]) -> Array:
    """Parameters of a unit of each run [runs] that ZeRO shards along another dim than the first."""
    return _crosswise(_sizes(chain), shards)


def _sizes(chain: Chain) -> tuple[tuple[Shapes, int, int], ...]:
    units = (run.unit for run in chain.runs)
    return tuple((unit.shapes, unit.numel, unit.expert_numel) for unit in units)


@lru_cache(4096)
def _padded(sizes: tuple[tuple[Shapes, int, int], ...], shards: tuple[int, int]) -> Array:
    numels = np.zeros((len(sizes), 2))
    for run, (shapes, all_numel, all_experts) in enumerate(sizes):
        even = (math.lcm(*shards),), all_numel, all_experts
        for shape, numel, experts in shapes or (even,):
            cut = [(shape[slicing_dim(shape, ranks)], ranks) for ranks in shards]
            padding = [-(-size // ranks) * ranks / size for size, ranks in cut]
            numels[run] += (numel - experts) * padding[0], experts * padding[1]
    return numels


@lru_cache(4096)
def _crosswise(sizes: tuple[tuple[Shapes, int, int], ...], shards: tuple[int, int]) -> Array:
    numels = np.zeros(len(sizes))
    for run, (shapes, _, _) in enumerate(sizes):
        for shape, numel, experts in shapes:
            crosswise = [slicing_dim(shape, ranks) > 0 for ranks in shards]
            numels[run] += (numel - experts) * crosswise[0] + experts * crosswise[1]
    return numels


def has_run(counts: Array, rank: NDArray[np.int64], run: int) -> set[int]:
    """Places that have units of a run."""
    return set(rank[counts[:, run] > 0].tolist())


def zero_shards(setting: Setting) -> tuple[int, int]:
    """Number of ranks over which ZeRO shards parameters, and that for experts' parameters."""
    return setting.dp, max(1, setting.dp // setting.placement.ep)
