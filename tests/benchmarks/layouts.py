"""Layouts of published runs as planner settings, and their predicted time and memory by cause."""

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
from tests.benchmarks.cost_weights import fit_memory, fit_weights, weighted_time
from tests.planner.decoders import Decoder, decoder

Array = NDArray[np.float64]
KERNELS: Final = ("torch", "fused", "flash1", "flash2")
HALF = 2  # bytes of a number in 16 bits
RECIPE = Recipe()


@dataclass(frozen=True)
class Layout:
    """A way to train `shape`: `rows` sequences a step, `micro` of them in a microbatch.

    flushes   pipeline flushes in a step, with gradients accumulated in between
    reduced   gradients are reduced over replicas, and weights gathered, in the timed step
    Preconditions: tp * pp divides ranks, and micro * dp divides rows.
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
        """The planner's setting, without cuts."""
        placement = Placement(self.micro, self.tp, self.sequence_parallel)
        return Setting(placement, self.dp, self.pp, self.count, axes=("pp", "dp", "cp", "tp"))


@lru_cache(64)
def _profiles(shape: Decoder) -> Callable[[Placement], Chain]:
    return decoder(**vars(shape))


@lru_cache(4096)
def chain_of(shape: Decoder, placement: Placement, kernel: str, fused_norm: bool) -> Chain:
    """Return the chain of a decoder with causes named by attention kernel and norm."""
    names = {"attention": f"attention {kernel}", "norm": "other" if fused_norm else "norm"}

    def renamed(work: Work) -> Work:
        operators = (replace(op, cause=names.get(_cause(op), _cause(op))) for op in work.operators)
        return replace(work, operators=tuple(operators))

    def same(unit: Unit) -> Unit:
        return replace(unit, forward=renamed(unit.forward), backward=renamed(unit.backward))

    chain = _profiles(shape)(placement)
    return replace(chain, runs=tuple(UnitRun(same(run.unit), run.count) for run in chain.runs))


def _cause(op: OperatorCost) -> str:
    return op.cause or op.kind


# -- time ------------------------------------------------------------------------------------------


# default weight of each cause, as a multiple of the machine's prediction: attention without fused
# kernels, or with early ones; norms and cross entropy in fp32; unfused operators start several
# kernels each; replicas send 32-bit gradients in many small parts
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
ONCE = ("dp", "dp start", "optimizer")  # once a step, however often a pipeline is flushed


def cuts_of(shape: Decoder, stages: int) -> tuple[int, ...]:
    """Return the units of each stage, with fewer layers at the last one to balance its head.

    The head counts by its weights.  The cuts of the runs are not published.
    """
    layers, width = shape.layers, shape.width
    if stages == 1:
        return (layers + 2,)
    head = shape.vocab / (4 * width + 3 * shape.inner)

    def slowest(end: int) -> tuple[float, int]:
        return max(math.ceil((layers - end) / (stages - 1)), end + head), end

    end = min(map(slowest, range(math.ceil(layers / stages) + 1)))[1]
    per_stage, remainder = divmod(layers - end, stages - 1)
    sizes = [per_stage + (stage < remainder) for stage in range(stages - 1)]
    return (sizes[0] + 1, *sizes[1:], end + 1)


@lru_cache(65536)
def _chain_setting(layout: Layout) -> tuple[Chain, Setting]:
    """Return the chain and the setting of a layout, with cuts and recomputation."""
    setting = layout.setting
    chain = chain_of(layout.shape, setting.placement, layout.kernel, layout.fused_norm)
    cuts = cuts_of(layout.shape, layout.pp)
    recomputed = (*cuts[:-1], cuts[-1] - 1) if layout.recompute else ()
    return chain, replace(setting, cuts=cuts, again=recomputed)


@lru_cache(65536)
def _step_seconds(layout: Layout, machine: Cluster) -> dict[str, float]:
    """Return seconds by cause of a step with its pipeline flushes."""
    chain, setting = _chain_setting(replace(layout, flushes=1, reduced=True))
    count = max(1, setting.micro // layout.flushes)
    seconds = step_seconds_by_cause(chain, replace(setting, micro=count), machine, RECIPE, TIME)
    repeats = setting.micro / count
    return {name: value * (1 if name in ONCE else repeats) for name, value in seconds.items()}


def time_terms(layout: Layout, machine: Cluster) -> dict[str, float]:
    """Return unweighted seconds of a step by cause."""
    seconds = _step_seconds(replace(layout, reduced=True), machine)
    return {name: value * (layout.reduced or name not in ONCE) for name, value in seconds.items()}


def fitted_time(
    layouts: Sequence[Layout], seconds: Sequence[float], machine: Cluster
) -> dict[str, float]:
    """Fit weights of causes to runs, with TIME as prior."""
    terms = [time_terms(layout, machine) for layout in layouts]
    return fit_weights(list(zip(terms, seconds, strict=True)), TIME)


def predict_time(layout: Layout, machine: Cluster, weights: Mapping[str, float]) -> float:
    """Predict the time of a step."""
    return weighted_time(time_terms(layout, machine), {**TIME, **weights})


# -- memory ----------------------------------------------------------------------------------------

# start of the search for the weights: activations of a layer as multiples of what Korthikanti
# et al. 2022 count (parts that tp splits; inputs of matrices, which it does not; those of a layer
# that is computed again), bytes of a layer's input for a norm in fp32, of a score that is kept and
# of one in work, of a layer's input for what the first flash attention copies, of a logit (16 bits,
# fp32, and their gradients), of one that tp has gathered, of what a stage is handed, the share of a
# pipeline's activations that gaps take (blocks of one microbatch lie between those of others), and
# the share of the memory that the context and buffers take
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
    "gaps": 0.2,
    "fixed": 0.03,
}


@lru_cache(65536)
def memory_terms(layout: Layout, machine: Cluster) -> tuple[Array, Array]:
    """Return state bytes [2] and unweighted bytes [2, MEMORY] of the first and the last stage.

    Logits are whole on every rank of tp.
    """
    chain, setting = _chain_setting(replace(layout, flushes=1, reduced=True))
    unit_counts = np.tile([0.0, layout.shape.layers / layout.pp, 0.0], (layout.pp, 1))
    unit_counts[0, 0] = unit_counts[-1, 2] = 1  # how runs were cut is not published: layers evenly
    tokens, shape, tp = layout.shape.length * layout.micro, layout.shape, layout.tp
    split = tp if layout.sequence_parallel else 1
    activations = tokens * shape.width * HALF / split
    inner = tokens * 8 * (shape.width + shape.inner) / tp
    scores = shape.length * tokens * shape.heads / tp * (layout.kernel in ("torch", "fused"))
    logits = tokens * shape.vocab
    unfused, flash1 = activations * (not layout.fused_norm), layout.kernel == "flash1"
    copied = tokens * shape.width * HALF / tp * flash1

    stored, once = float(not layout.recompute), float(layout.recompute)

    # of a layer, of the head: kept, and at the fullest moment
    layer = {
        "split": (inner * stored, 0.0),
        "inputs": (activations * stored, 0.0),
        "gaps": ((1.1 * inner + 4 * activations) * stored * (layout.pp > 1), 0.0),
        "norm": (unfused * stored, unfused * once),
        "scores": (scores * stored, 0.0),
        "flash1": (copied * stored, copied * once),
        "scores_now": (0.0, scores),
        "again": (0.0, (2 * activations + inner) * once),
    }
    head = {"logits": (0.0, logits), "gathered": (0.0, logits * (tp > 1))}
    stage_rows = [0, layout.pp - 1]

    none = np.zeros(3)

    def filled(stored: Array, peak: Array) -> Array:
        per_unit = np.array([stored, stored, peak, *[none] * 4])
        return activation_bytes(setting, unit_counts, unit_counts * 0, per_unit, unit_counts * 0)[
            stage_rows
        ]

    columns_of = []
    for name in MEMORY:
        if name == "fixed":
            columns_of.append(np.full(2, float(machine.memory)))
        elif name == "handed":
            columns_of.append(
                activations * np.array([min(layout.pp, layout.count), 1.0]) * (layout.pp > 1)
            )
        else:
            columns = np.zeros((3, 2))
            columns[1], columns[2] = layer.get(name, 0.0), head.get(name, 0.0)
            columns_of.append(filled(*columns.T))
    state = state_bytes(
        chain, setting, RECIPE, unit_counts, stage_ranks(setting.order, setting.pp, setting.chunks)
    )[stage_rows]
    state = state + filled(np.array([0.0, activations * once, 0.0]), np.zeros(3))
    return state, np.array(columns_of).T


def peak_bytes(layout: Layout, machine: Cluster, weights: Mapping[str, float]) -> float:
    """Predict the peak bytes of the fullest rank."""
    state, parts = memory_terms(layout, machine)
    return float((state + parts @ np.array([weights[name] for name in MEMORY])).max())


def fitted_fill(
    layouts: Sequence[Layout], did_run: Sequence[bool], machine: Cluster
) -> dict[str, float]:
    """Fit weights of memory to runs that fitted or not, with MEMORY as prior."""
    terms = [memory_terms(layout, machine) for layout in layouts]
    state, parts = (np.array([term[k] for term in terms]) for k in (0, 1))
    return fit_memory(state, parts, did_run, machine.memory, MEMORY)
