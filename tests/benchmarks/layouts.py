"""Layouts of published runs as settings of the planner, and its price of them by cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.planner.critical_path import stage_ranks
from schedlang.passes.planner.price import activation_bytes, state_bytes, step_seconds_by_cause
from schedlang.passes.planner.values import (
    Chain,
    OperatorCost,
    Placement,
    Recipe,
    Setting,
    Unit,
    UnitRun,
    Work,
)
from schedlang.passes.simulate.machine import Cluster
from tests.benchmarks.weights import fitted, fitted_memory, told
from tests.planner.decoders import Decoder, decoder

Array = NDArray[np.float64]
KERNELS: Final = ("torch", "fused", "flash1", "flash2")
HALF = 2  # bytes of a number in 16 bits
RECIPE = Recipe()


@dataclass(frozen=True)
class Layout:
    """One way to train `shape`: `rows` sequences a step, `micro` of them in a microbatch.

    flushes   how often the pipeline runs empty in a step, which adds up gradients in between
    reduced   gradients are reduced over replicas, and weights gathered, once a step
    Preconditions: tp * pp divides ranks, and micro times what is left divides rows.
    """

    shape: Decoder
    rows: int
    ranks: int
    micro: int
    tp: int
    pp: int
    kernel: str
    recompute: bool = False
    fused_norm: bool = False
    sequence_parallel: bool = False
    flushes: int = 1
    reduced: bool = True

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.ranks // (self.tp * self.pp)

    @property
    def count(self) -> int:
        """Microbatches of a step."""
        return self.rows // (self.dp * self.micro)

    @property
    def setting(self) -> Setting:
        """The same for the planner, but for its cuts."""
        place = Placement(self.micro, self.tp, self.sequence_parallel)
        return Setting(place, self.dp, self.pp, self.count, axes=("pp", "dp", "cp", "tp"))


@lru_cache(64)
def _profiles(shape: Decoder) -> Callable[[Placement], Chain]:
    return decoder(**vars(shape))


@lru_cache(4096)
def chain_of(shape: Decoder, at: Placement, kernel: str, fused_norm: bool) -> Chain:
    """A decoder whose attention is weighed by its kernel; a fused norm costs but its bytes."""
    names = {"attention": f"attention {kernel}", "norm": "other" if fused_norm else "norm"}

    def renamed(work: Work) -> Work:
        found = (replace(op, cause=names.get(_cause(op), _cause(op))) for op in work.operators)
        return replace(work, operators=tuple(found))

    def same(unit: Unit) -> Unit:
        return replace(unit, forward=renamed(unit.forward), backward=renamed(unit.backward))

    chain = _profiles(shape)(at)
    return replace(chain, runs=tuple(UnitRun(same(run.unit), run.count) for run in chain.runs))


def _cause(op: OperatorCost) -> str:
    return op.cause or op.kind


# -- time ------------------------------------------------------------------------------------------


# what each cause takes where nothing is measured, as a multiple of what the machine says: attention
# without such kernels, or the first of them; passes of norms in fp32 over their rows, of a cross
# entropy in fp32; without fusion operators start several kernels each; replicas send in the 32 bits
# of their sums, and in many small parts
TIME: Final[Mapping[str, float]] = {
    "attention torch": 5.0,
    "attention fused": 2.5,
    "attention flash1": 1.3,
    "attention flash2": 0.5,  # causal: half of the operations
    "product": 1.2,
    "loss": 2.0,
    "norm": 6.0,
    "other": 2.0,
    "inner": 2.0,
    "tp": 1.2,
    "pp": 1.4,
    "start": 4.0,
    "dp": 4.0,
    "dp start": 10.0,
}
ONCE = ("dp", "dp start", "optimizer")  # however often a pipeline runs empty


def cuts_of(shape: Decoder, stages: int) -> tuple[int, ...]:
    """Units of each stage: as few layers at the last one as balance its head best.

    The head counts by its weights.  How the runs were cut is not published.
    """
    layers, width = shape.layers, shape.width
    if stages == 1:
        return (layers + 2,)
    head = shape.words / (4 * width + 3 * shape.inner)

    def slowest(end: int) -> tuple[float, int]:
        return max(math.ceil((layers - end) / (stages - 1)), end + head), end

    end = min(map(slowest, range(math.ceil(layers / stages) + 1)))[1]
    whole, more = divmod(layers - end, stages - 1)
    sizes = [whole + (stage < more) for stage in range(stages - 1)]
    return (sizes[0] + 1, *sizes[1:], end + 1)


@lru_cache(65536)
def _settled(one: Layout) -> tuple[Chain, Setting]:
    """Chain and setting of a layout with its cuts; of recomputed layers."""
    at = one.setting
    chain = chain_of(one.shape, at.placement, one.kernel, one.fused_norm)
    cuts = cuts_of(one.shape, one.pp)
    again = (*cuts[:-1], cuts[-1] - 1) if one.recompute else ()
    return chain, replace(at, cuts=cuts, again=again)


@lru_cache(65536)
def _steps(one: Layout, machine: Cluster) -> dict[str, float]:
    """Seconds by cause of a step that runs empty once for each flush."""
    chain, at = _settled(replace(one, flushes=1, reduced=True))
    count = max(1, at.micro // one.flushes)
    found = step_seconds_by_cause(chain, replace(at, micro=count), machine, RECIPE, TIME)
    often = at.micro / count
    return {name: took * (1 if name in ONCE else often) for name, took in found.items()}


def time_terms(one: Layout, machine: Cluster) -> dict[str, float]:
    """Seconds of a step by cause at the data sheet's rate, to be weighted."""
    found = _steps(replace(one, reduced=True), machine)
    return {name: took * (one.reduced or name not in ONCE) for name, took in found.items()}


def fitted_time(
    layouts: Sequence[Layout], seconds: Sequence[float], machine: Cluster
) -> dict[str, float]:
    """Weights of causes given runs, about TIME."""
    terms = [time_terms(one, machine) for one in layouts]
    return fitted(list(zip(terms, seconds, strict=True)), TIME)


def seconds_of(one: Layout, machine: Cluster, weights: Mapping[str, float]) -> float:
    """Predict the time of a step."""
    return told(time_terms(one, machine), {**TIME, **weights})


# -- memory ----------------------------------------------------------------------------------------

# where the search for the weights starts: activations of a layer as multiples of what Korthikanti
# et al. 2022 count (parts that tp splits; inputs of matrices, which it does not; those of a layer
# that is computed again), bytes of a layer's input for a norm in fp32, of a score that is kept and
# of one in work, of a layer's input for what the first flash attention copies, of a logit (16 bits,
# fp32, and their gradients), of one that tp has gathered, of what a stage is handed, and the share
# of the memory that the context, buffers and gaps take
MEMORY: Final[Mapping[str, float]] = {
    "split": 1.1,
    "inputs": 4.0,
    "again": 2.0,
    "norm": 4.0,
    "scores": 5.0,
    "scores_now": 8.0,
    "flash1": 2.0,
    "logits": 14.0,
    "gathered": 4.0,
    "handed": 4.0,
    "fixed": 0.03,
}


@lru_cache(65536)
def memory_terms(one: Layout, machine: Cluster) -> tuple[Array, Array]:
    """State [places], and bytes to be weighted [places, MEMORY], of the first and the last place.

    Logits are whole on every rank of tp.
    """
    chain, at = _settled(replace(one, flushes=1, reduced=True))
    made = np.tile([0.0, one.shape.layers / one.pp, 0.0], (one.pp, 1))
    made[0, 0] = made[-1, 2] = 1  # how runs were cut is not published: layers evenly
    tokens, shape, tp = one.shape.length * one.micro, one.shape, one.tp
    split = tp if one.sequence_parallel else 1
    wide = tokens * shape.width * HALF / split
    inner = tokens * 8 * (shape.width + shape.inner) / tp
    scores = shape.length * tokens * shape.heads / tp * (one.kernel in ("torch", "fused"))
    logits = tokens * shape.words
    unfused, flash1 = wide * (not one.fused_norm), one.kernel == "flash1"
    copied = tokens * shape.width * HALF / tp * flash1

    kept, once = float(not one.recompute), float(one.recompute)

    # of a layer, of the head: kept, and at the fullest moment
    layer = {
        "split": (inner * kept, 0.0),
        "inputs": (wide * kept, 0.0),
        "norm": (unfused * kept, unfused * once),
        "scores": (scores * kept, 0.0),
        "flash1": (copied * kept, copied * once),
        "scores_now": (0.0, scores),
        "again": (0.0, (2 * wide + inner) * once),
    }
    head = {"logits": (0.0, logits), "gathered": (0.0, logits * (tp > 1))}
    places = [0, one.pp - 1]

    none = np.zeros(3)

    def filled(kept: Array, most: Array) -> Array:
        each = np.array([kept, kept, most, *[none] * 4])
        return activation_bytes(at, made, made * 0, each, made * 0)[places]

    found = []
    for name in MEMORY:
        if name == "fixed":
            found.append(np.full(2, float(machine.memory)))
        elif name == "handed":
            found.append(wide * np.array([min(one.pp, one.count), 1.0]) * (one.pp > 1))
        else:
            columns = np.zeros((3, 2))
            columns[1], columns[2] = layer.get(name, 0.0), head.get(name, 0.0)
            found.append(filled(*columns.T))
    state = state_bytes(chain, at, RECIPE, made, stage_ranks(at.order, at.pp, at.chunks))[places]
    state = state + filled(np.array([0.0, wide * once, 0.0]), np.zeros(3))
    return state, np.array(found).T


def bytes_of(one: Layout, machine: Cluster, weights: Mapping[str, float]) -> float:
    """Predict the peak of the fullest rank."""
    state, parts = memory_terms(one, machine)
    return float((state + parts @ np.array([weights[name] for name in MEMORY])).max())


def memory_of_runs(
    layouts: Sequence[Layout], ran: Sequence[bool], machine: Cluster
) -> dict[str, float]:
    """Weights of what fills a rank given what ran and what did not fit, about MEMORY."""
    terms = [memory_terms(one, machine) for one in layouts]
    state, parts = (np.array([term[at] for term in terms]) for at in (0, 1))
    return fitted_memory(state, parts, ran, machine.memory, MEMORY)
