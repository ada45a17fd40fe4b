"""Closed-form time and memory of a transformer's layout, with constants fitted to measured runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.simulate.step_time import Cluster

Array = NDArray[np.float64]
KERNELS: Final = ("torch", "fused", "flash1", "flash2")
HALF = 2  # bytes of a number in 16 bits


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward: layers, width, heads, inner width, words it knows."""

    layers: int
    width: int
    heads: int
    inner: int
    words: int


@dataclass(frozen=True)
class Layout:
    """One way to train `shape`: `rows` sequences a step, `micro` of them in a microbatch.

    flushes   how often the pipeline runs empty in a step, which adds up gradients in between
    reduced   gradients are reduced over replicas, and weights gathered, once a step
    Preconditions: tp * pp divides ranks, and micro times what is left divides rows.
    """

    shape: Shape
    length: int
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


# -- time ------------------------------------------------------------------------------------------


# what each term costs where nothing is measured, as a multiple of the data sheet's bound: products
# at 70 % of the peak, causal attention (half of them) at 60 % or as slow as before such kernels,
# passes of fp32 norms over their rows (two norms, forward and backward), of SwiGLU, of a cross
# entropy in fp32, collectives at 70 % of a link, microseconds of calls
TIME: Final[Mapping[str, float]] = {
    "attention_torch": 8.0,
    "attention_fused": 4.0,
    "attention_flash1": 2.0,
    "attention_flash2": 0.8,
    "matmul": 1.4,
    "loss": 12.0,
    "norm": 90.0,
    "elementwise": 20.0,
    "inner": 12.0,
    "tp_bytes": 1.5,
    "tp_calls": 20.0,
    "launches": 100.0,
    "p2p": 1.5,
    "dp_bytes": 2.0,
    "dp_calls": 1.0,
}
PRIOR = 0.5  # standard deviation of the logarithm of a constant about the above
NOISE = 0.03  # and of a run about the model
FAR = 1.5  # in those of NOISE, from where on a run weighs less (Huber 1964)


def stage_layers(shape: Shape, pp: int) -> float:
    """Layers' worth of work at the slowest of pp stages, the head counted by its weights.

    The last stage gets as few whole layers as balance its head best.
    """
    head = shape.words * shape.width / _layer(shape)
    if pp == 1:
        return shape.layers + head
    ends = range(math.ceil(shape.layers / pp) + 1)
    return min(max(math.ceil((shape.layers - end) / (pp - 1)), end + head) for end in ends)


def time_terms(one: Layout, machine: Cluster) -> dict[str, float]:
    """Seconds of each cause at the data sheet's rate, to be weighted by constants.

    1F1B takes count slots of the slowest stage, and pp - 1 of a mean one each time it runs empty;
    tensor parallelism reduces four times a layer, six with recomputation (Narayanan et al. 2021);
    ZeRO-1 reduces gradients and gathers weights once (Rajbhandari et al. 2020).
    """
    shape, tokens, tp, pp = one.shape, one.length * one.micro, one.tp, one.pp
    weights = _layer(shape)
    whole = shape.layers + shape.words * shape.width / weights  # layers with the head
    fill = min(one.flushes, one.count) * (pp - 1)  # slots in which a stage waits
    steps = (one.count * stage_layers(shape, pp) + fill * whole / pp) / whole
    slots = steps * shape.layers  # layers that a rank waits for in a step
    again = 4 / 3 if one.recompute else 1.0
    spread = tp if one.sequence_parallel else 1
    wide = tokens * shape.width * HALF  # bytes of what layers hand on
    calls = (6 if one.recompute else 4) * (tp > 1)
    flops = slots * again * tokens / tp / machine.speed
    held = (shape.layers * weights / pp + (2 if pp == 1 else 1) * shape.words * shape.width) / tp
    lanes = min(machine.node, one.dp * tp) / tp  # adapters that a ring of replicas uses in a node
    inside = machine.link if tp <= machine.node else machine.network
    scores = 12 * one.length * shape.width * flops
    terms = {f"attention_{kind}": scores * (kind == one.kernel) for kind in KERNELS}
    passes = slots * again * wide / spread / machine.stream
    return terms | {
        "matmul": 6 * weights * flops
        + 6 * shape.words * shape.width * steps * tokens / tp / machine.speed,
        "loss": steps * tokens * shape.words * 4 / machine.stream,
        "norm": passes * (not one.fused_norm),
        "elementwise": passes,
        "inner": slots * again * tokens * shape.inner * HALF / tp / machine.stream,
        "tp_bytes": slots * calls * wide * 2 * (tp - 1) / tp / inside,
        "tp_calls": slots * calls * 1e-6,
        "launches": slots * again * 1e-6,
        "p2p": (one.count + fill) * 2 * wide / spread / machine.network * (pp > 1),
        "dp_bytes": one.reduced
        * (held * 2 * HALF * (one.dp - 1) / one.dp / (machine.network * lanes)),
        # buckets, each once round the ring
        "dp_calls": one.reduced * held * one.dp * 1e-12 * (one.dp > 1),
    }


def _layer(shape: Shape) -> int:
    return 4 * shape.width**2 + 3 * shape.width * shape.inner


def fitted_time(
    layouts: Sequence[Layout], seconds: Sequence[float], machine: Cluster
) -> dict[str, float]:
    """Most likely constants given runs: of relative errors, about TIME, runs far off weighing less.

    Levenberg and Marquardt's steps in logarithms, so that constants stay above 0; one that no run
    tells of stays as TIME has it.  Preconditions: at least one run, all of more than 0 seconds.
    """
    matrix = _shares(layouts, seconds, machine)
    start = np.log(list(TIME.values()))

    found, damping = start, 1e-2
    least = _unlike(matrix, found)
    while damping < 1e9:
        told = matrix @ np.exp(found)
        off = np.log(told) / NOISE
        weight = np.minimum(1, FAR / np.maximum(abs(off), 1e-9))
        slope = matrix * np.exp(found) / told[:, None] / NOISE
        down = slope.T @ (weight * off) + (found - start) / PRIOR**2
        curve = slope.T @ (weight[:, None] * slope) + np.eye(len(start)) / PRIOR**2
        step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -down)
        tried = found + np.clip(step, -1, 1)
        now = _unlike(matrix, tried)
        if now > least - 1e-6:
            damping *= 4
            continue
        found, least, damping = tried, now, damping / 4
    return dict(zip(TIME, map(float, np.exp(found)), strict=True))


def unlikelihood(
    layouts: Sequence[Layout],
    seconds: Sequence[float],
    machine: Cluster,
    constants: Mapping[str, float],
) -> float:
    """Negative logarithm of how likely runs are under constants, but for a number."""
    matrix = _shares(layouts, seconds, machine)
    return _unlike(matrix, np.log([constants[name] for name in TIME]))


def _shares(layouts: Sequence[Layout], seconds: Sequence[float], machine: Cluster) -> Array:
    """Terms of each run, over what it took."""
    terms = [time_terms(one, machine) for one in layouts]
    costs: Array = np.array([[row[name] for name in TIME] for row in terms])
    took: Array = np.array(seconds)
    return costs / took[:, None]


def _unlike(matrix: Array, found: Array) -> float:
    """Huber's loss of the logarithms of told over taken, and what the constants are off TIME."""
    off = abs(np.log(matrix @ np.exp(found))) / NOISE
    far = np.where(off < FAR, off**2 / 2, FAR * off - FAR**2 / 2)
    prior = (found - np.log(list(TIME.values()))) / PRIOR
    return float(far.sum() + (prior**2).sum() / 2)


def seconds_of(one: Layout, machine: Cluster, constants: Mapping[str, float]) -> float:
    """Predict the time of a step."""
    return sum(constants[name] * took for name, took in time_terms(one, machine).items())


# -- memory ----------------------------------------------------------------------------------------

# where the search for the constants starts: activations of a layer as multiples of what Korthikanti
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
MEMORY_PRIOR = 0.7  # standard deviation of the logarithm of a constant about the above
EDGE = 0.03  # scale of a logistic law: how near the limit a run may end either way
OUTLIER = 15.0  # at most so many of these count against the constants, that one odd run may be


def memory_terms(one: Layout, machine: Cluster) -> list[dict[str, float]]:
    """Bytes at the first stage and at the last, to be weighted by constants; `state` by one.

    Of 1F1B the first stage holds pp microbatches; weights and gradients are 2 bytes each, ZeRO-1
    keeps 12 for each weight over replicas.  Logits are whole on every rank of tp.
    """
    shape, tokens, tp, pp = one.shape, one.length * one.micro, one.tp, one.pp
    wide = tokens * shape.width * HALF / (tp if one.sequence_parallel else 1)
    split = tokens * 8 * (shape.width + shape.inner) / tp
    scores = one.length * tokens * shape.heads / tp * (one.kernel in ("torch", "fused"))
    kept, now = not one.recompute, one.recompute
    ends = 2 if pp == 1 else 1  # the embedding, the head, or both
    weights = (shape.layers * _layer(shape) / pp + ends * shape.words * shape.width) / tp
    found = []
    for last in (False, True):
        held = 1 if last else min(pp, one.count)  # microbatches in flight
        layers = shape.layers / pp * held
        logits = tokens * shape.words * (last or pp == 1)
        times = 1.0 if one.recompute else layers
        found.append(
            {
                "state": weights * (4 + 12 / one.dp) + wide * layers * now,
                "split": split * layers * kept,
                "inputs": wide * layers * kept,
                "again": (2 * wide + split) * now,
                "norm": wide * times * (not one.fused_norm),
                "scores": scores * layers * kept,
                "scores_now": scores,
                "flash1": tokens * shape.width * HALF / tp * times * (one.kernel == "flash1"),
                "logits": logits,
                "gathered": logits * (tp > 1),
                "handed": wide * held * (pp > 1),
                "fixed": machine.memory,
            }
        )
    return found


def bytes_of(one: Layout, machine: Cluster, constants: Mapping[str, float]) -> float:
    """Predict the peak of the fullest rank."""
    weights = {"state": 1.0} | dict(constants)
    terms = memory_terms(one, machine)
    return max(sum(weights[name] * size for name, size in at.items()) for at in terms)


def fitted_memory(
    layouts: Sequence[Layout], ran: Sequence[bool], machine: Cluster
) -> dict[str, float]:
    """Most likely constants given what ran and what did not fit, about MEMORY.

    A run's chance to fit is a logistic function of the logarithm of limit over need.  Coordinates
    are searched in turn, in logarithms, so that constants stay above 0.
    """
    names = list(MEMORY)
    terms = [memory_terms(one, machine) for one in layouts]
    parts = np.array([[[at[name] for name in names] for at in both] for both in terms])
    state = np.array([[at["state"] for at in both] for both in terms])
    side = np.where(np.array(ran), 1, -1) / EDGE
    start = np.log(list(MEMORY.values()))

    def loss(found: Array) -> float:
        room = side * np.log(machine.memory / (state + parts @ np.exp(found)).max(1))
        unlike = np.logaddexp(0, -np.maximum(room, -OUTLIER)).sum()
        return float(unlike + (((found - start) / MEMORY_PRIOR) ** 2).sum() / 2)

    found, step = start.copy(), 0.5
    least = loss(found)
    while step > 0.005:
        moved = False
        for index in range(len(names)):
            for way in (step, -step):
                tried = found.copy()
                tried[index] += way
                if (now := loss(tried)) < least - 1e-6:
                    found, least, moved = tried, now, True
        step = step if moved else step / 2
    return dict(zip(names, map(float, np.exp(found)), strict=True))
