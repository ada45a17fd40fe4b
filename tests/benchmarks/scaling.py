"""Published tables of scaling against the planner's price: python -m tests.benchmarks.scaling

One constant is fitted for all rows: how much longer computing takes than the cluster model says.
Messages take what the cluster model says.  If a paper does not give the rows of a microbatch or
the stages of a rank, the cheapest choice is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from schedlang.passes.planner.price import (
    collective_seconds,
    sending_axes,
    step_seconds_by_cause,
    unit_seconds_by_cause,
)
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting, Unit, UnitRun, Work
from schedlang.passes.simulate.machine import CLUSTERS
from tests.benchmarks.cost_weights import Timed, fit_weights, weighted_time
from tests.planner.decoders import decoder

A100 = CLUSTERS["a100"]
PEAK = 312e12
SENDS = ("tp", "cp", "ep", "pp", "dp")
SUMMED = Recipe(gradient=4)  # Megatron-LM adds gradients up in 32 bits


@dataclass(frozen=True)
class Row:
    """A published figure, and what predicts it.

    seconds  of a step, by cause
    figure   converts seconds to the published unit
    overlap  hidden share of the shorter of computing and sending
    """

    name: str
    published: float
    seconds: Mapping[str, float]
    figure: Callable[[float], float]
    overlap: float = 0.0

    def told(self, longer: float, sending: float = 1.0) -> float:
        """Return the figure with computing and sending times scaled by the given factors."""
        send_seconds = [value for name, value in self.seconds.items() if name.split()[0] in SENDS]
        computing, send_time = (
            longer * (sum(self.seconds.values()) - sum(send_seconds)),
            sending * sum(send_seconds),
        )
        return self.figure(computing + send_time - self.overlap * min(computing, send_time))


# -- GPT-3 like models -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpt:
    """Sizes of a GPT with sequences of 2,048 tokens and 51,200 words."""

    heads: int
    width: int
    layers: int

    @property
    def chain(self) -> Callable[[Placement], Chain]:
        return _gpt(self.heads, self.width, self.layers)

    def flops(self, rows: int, again: bool = True) -> float:
        """Return the FLOPs of a step as the papers count them, with recomputation."""
        ends = 1 + 2048 / (6 * self.width) + 51200 / (16 * self.layers * self.width)
        return (96 if again else 72) * rows * 2048 * self.layers * self.width**2 * ends


@cache
def _gpt(heads: int, width: int, layers: int) -> Callable[[Placement], Chain]:
    return decoder(layers, width, heads, 4 * width, 51200, 2048, flash=False)


def selective(chain: Chain) -> Chain:
    """Return the chain with selective recomputation of attention scores in backward."""
    first, layers, last = chain.runs
    unit = layers.unit
    scores = tuple(op for op in unit.forward.operators if op.cause == "scores")
    backward = Work(unit.backward.operators + scores, unit.backward.collectives)
    return replace(
        chain, runs=(first, UnitRun(replace(unit, backward=backward), layers.count), last)
    )


def even_cuts(layers: int, stages: int, again: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return units and recomputed units of stages with equal numbers of layers."""
    per_stage = layers // stages
    cuts = [per_stage] * stages
    cuts[0] += 1
    cuts[-1] += 1
    if not again:
        return tuple(cuts), ()
    return tuple(cuts), (*cuts[:-1], cuts[-1] - 1)


def ptd_step(gpt: Gpt, ranks: int, tp: int, pp: int, batch: int, rows: Sequence[int] = (1, 2, 4, 8),
        again: bool = True, sequence: bool = False, chunks: int | None = None,
        part: Callable[[Chain], Chain] = lambda chain: chain) -> dict[str, float]:  # fmt: skip
    """Return seconds by cause of the quickest step over microbatch sizes and stages per rank.

    Pipeline is the outermost axis, interleaved if that is quicker (Narayanan et al. 2021).
    """
    dp, candidates = ranks // (tp * pp), list[dict[str, float]]()
    for row_count in rows:
        micro = batch // (dp * row_count)
        if micro < 1 or batch % (dp * row_count):
            continue
        for v in [chunks] if chunks else range(1, gpt.layers // pp + 1):
            if gpt.layers % (pp * v) or (v > 1 and (micro % pp or pp == 1)):
                continue
            cuts, recomputed = even_cuts(gpt.layers, pp * v, again)
            placement = Placement(row_count, tp, sequence and tp > 1)
            order = "Interleaved1F1B" if v > 1 else "1F1B"
            axes = ("pp", "dp", "cp", "tp")
            setting = Setting(placement, dp, pp, micro, order, v, 0, cuts, recomputed, axes)
            candidates.append(
                step_seconds_by_cause(
                    scatter_output(part(gpt.chain(placement))), setting, A100, SUMMED
                )
            )
    return min(candidates, key=lambda causes: sum(causes.values()))


def scatter_output(chain: Chain) -> Chain:
    """Return the chain with scattered stage outputs over tp (Narayanan et al. 2021, 4.1)."""
    placement = chain.placement
    share = 1 if placement.sequence else placement.tp
    runs = [replace(r, unit=replace(r.unit, output=r.unit.output / share)) for r in chain.runs]
    return replace(chain, runs=tuple(runs))


# -- tables ----------------------------------------------------------------------------------------


def weak_scaling() -> Iterator[Row]:
    """TFLOP/s of a GPU (Narayanan et al. 2021, table 1)."""
    for name, heads, width, layers, tp, pp, ranks, batch, published in [
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    ]:
        gpt = Gpt(heads, width, layers)
        yield Row(
            name, published, ptd_step(gpt, ranks, tp, pp, batch), tflops_of(gpt, batch, ranks)
        )


def tflops_of(gpt: Gpt, batch: int, ranks: int) -> Callable[[float], float]:
    """Return the function from seconds to TFLOP/s of a rank."""
    return lambda seconds: gpt.flops(batch) / seconds / ranks / 1e12


B175, B530 = Gpt(96, 12288, 96), Gpt(128, 20480, 105)
ZERO = [
    ("174.6B", B175, 384, 4, 1536, 144),
    ("174.6B", B175, 768, 2, 1536, 88),
    ("174.6B", B175, 1536, 1, 1536, 44),
    ("529.6B", B530, 640, 4, 2560, 138),
    ("529.6B", B530, 1120, 2, 2240, 98),
    ("529.6B", B530, 2240, 1, 2240, 48),
]


def more_ranks() -> Iterator[Row]:
    """TFLOP/s of a GPU for a fixed batch on more GPUs (the same, table 2, second half).

    A rank has one stage: with two or more, whose pipelines drain faster, throughput would fall half
    as much as published.
    """
    for name, gpt, pp, batch, rows in [
        ("174.6B", B175, 12, 1536, ((384, 153), (768, 149), (1536, 141))),
        ("529.6B", B530, 35, 2240, ((560, 171), (1120, 167), (2240, 159))),
    ]:
        for ranks, published in rows:
            step_causes = ptd_step(gpt, ranks, 8, pp, batch, (1,), chunks=1)
            yield Row(f"{name} on {ranks}", published, step_causes, tflops_of(gpt, batch, ranks))


def zero_3(overlap: float = 0.5) -> Iterator[Row]:
    """TFLOP/s of a GPU with ZeRO-3 alone (the same, table 2, first half).

    For each unit: all-gathers for forward, recomputation and backward, and a reduce-scatter. Half
    of the shorter of messages and computing is assumed to be hidden.
    """
    for name, gpt, ranks, rows, batch, published in ZERO:
        chain, micro = gpt.chain(Placement(rows)), batch // (ranks * rows)
        setting = Setting(chain.placement, pp=1, micro=micro)
        cuts, recomputed = even_cuts(gpt.layers, 1, True)
        causes = step_seconds_by_cause(chain, replace(setting, cuts=cuts, again=recomputed), A100)
        gather_time = sum(
            4
            * micro
            * run.count
            * collective_seconds(A100, "all_gather", 2.0 * run.unit.numel, ranks, 1)
            for run in chain.runs
        )
        figure = tflops_of(gpt, batch, ranks)
        yield Row(f"{name} on {ranks}", published, {**causes, "dp": gather_time}, figure, overlap)


def recomputation() -> Iterator[Row]:
    """Seconds of a step (Korthikanti et al. 2022, table 5)."""
    for name, gpt, pp, ranks, batch, rows, full, part in [
        ("22B", Gpt(64, 6144, 48), 1, 8, 4, 4, 1.42, 1.10),
        ("530B", B530, 35, 280, 280, 1, 49.05, 37.83),
    ]:
        chunks = 3 if pp > 1 else 1
        full_causes = ptd_step(gpt, ranks, 8, pp, batch, (rows,), chunks=chunks)
        selective_causes = ptd_step(
            gpt, ranks, 8, pp, batch, (rows,), False, True, chunks, selective
        )
        yield Row(f"{name} all again", full, full_causes, lambda seconds: seconds)
        yield Row(f"{name} scores again", part, selective_causes, lambda seconds: seconds)


def layers() -> Iterator[Row]:
    """Milliseconds of a layer of the 22B, forward and backward (the same, table 4)."""
    for name, sequence, recomputed, published in [
        ("baseline", False, "", (7.7, 11.9)),
        ("sequence", True, "", (7.2, 11.8)),
        ("all again", False, "all", (7.7, 19.5)),
        ("scores again", False, "scores", (7.7, 13.2)),
        ("scores again, sequence", True, "scores", (7.2, 13.1)),
    ]:
        setting = Setting(Placement(4, 8, sequence))
        chain = Gpt(64, 6144, 48).chain(setting.placement)
        unit = (selective(chain) if recomputed == "scores" else chain).runs[1].unit
        forward, backward, *_ = unit_seconds_by_cause(unit, sending_axes(setting), A100)
        if recomputed == "all":
            backward = {c: backward.get(c, 0) + forward.get(c, 0) for c in {**forward, **backward}}
        for direction, causes, milliseconds in zip("FB", (forward, backward), published):
            yield Row(f"{name} {direction}", milliseconds, causes, lambda seconds: 1e3 * seconds)


def zero_bubble() -> Iterator[Row]:
    """Milliseconds of a stage's forward and of both halves of its backward (Qi et al. 2024).

    Tables 3 and 9, 8 and 16 stages.  Orders with these times are exact and tested elsewhere.
    """
    for name, layers, heads, width, stages, rows, published in [
        ("1.5B", 22, 24, 2304, 8, 6, (18.522, 18.086, 9.337)),
        ("14.6B", 46, 40, 5120, 16, 1, (11.347, 11.248, 8.132)),
    ]:
        chain_at = decoder(layers, width, heads, 4 * width, 51200, 1024, flash=False)
        unit = chain_at(Placement(rows)).runs[1].unit
        stage_layers = (layers + 2) // stages
        for kind, causes, milliseconds in zip(
            "FIW", halves(unit, Setting(Placement(rows))), published
        ):
            causes = {cause: stage_layers * value for cause, value in causes.items()}
            yield Row(f"{name} {kind}", milliseconds, causes, lambda seconds: 1e3 * seconds)


def halves(unit: Unit, setting: Setting) -> tuple[dict[str, float], ...]:
    """Return seconds of a forward, of input gradients, and of weight gradients."""
    forward, backward, weights, *_ = unit_seconds_by_cause(unit, sending_axes(setting), A100)
    inputs = {cause: value - weights.get(cause, 0.0) for cause, value in backward.items()}
    return dict(forward), inputs, dict(weights)


# -- MegaScale: one step, and the gain of each change ----------------------------------------------


def ablation() -> Iterator[Row]:
    """Utilisation in % (Jiang et al. 2024, table 3): 175B, 256 GPUs, batch 256.

    Changes that overlap messages are assumed to hide all of them; gains of new operators are not
    predicted, and taken from the published rows.
    """
    gpt = Gpt(96, 12288, 96)
    utilisation = utilisation_of(gpt, 256, 256)

    def without(causes: dict[str, float], *axes: str) -> dict[str, float]:
        return {name: value for name, value in causes.items() if name.split()[0] not in axes}

    def parallel(chain: Chain) -> Chain:
        """Return the chain with parallel attention and feed-forward: half of the collectives."""
        first, run, last = selective(chain).runs
        half = [
            replace(
                work_item,
                collectives=tuple(
                    replace(collective, count=collective.count / 2)
                    for collective in work_item.collectives
                ),
            )
            for work_item in (run.unit.forward, run.unit.backward)
        ]
        unit = replace(run.unit, forward=half[0], backward=half[1])
        return replace(chain, runs=(first, UnitRun(unit, run.count), last))

    options = (gpt, 256, 8, 8, 256, (1,), False, True, 6)
    base, parallel_causes = ptd_step(*options, selective), ptd_step(*options, parallel)
    larger = ptd_step(gpt, 256, 8, 8, 768, (1,), False, True, 6, parallel)
    yield Row("baseline", 47.7, base, utilisation)
    yield Row("parallel block", 52.3, parallel_causes, utilisation)
    for name, published, axes in [
        ("and tp hidden", 55.5 * 52.3 / 53.3, ("tp",)),
        ("and pp hidden", 58.0 * 52.3 / 53.3, ("tp", "pp")),
        ("and dp hidden", 59.5 * 52.3 / 53.3, ("tp", "pp", "dp")),
    ]:
        yield Row(name, published, without(parallel_causes, *axes), utilisation)
    hidden = without(larger, "tp", "pp", "dp")
    scale = 59.5 * 52.3 / 53.3 / 62.3  # operators and small things, as published
    yield Row("and batch x 3", 65.3 * scale, hidden, utilisation_of(gpt, 768, 256))


def strong_scaling() -> Iterator[Row]:
    """Utilisation in % of Megatron-LM on more GPUs (the same, table 2), not used in the fit.

    A fixed batch of 768 rows, then of 6,144: eight stages of six chunks, one row of a microbatch.
    """
    gpt = Gpt(128, 12288, 96)
    for ranks, batch, published in [
        (256, 768, 53.0),
        (512, 768, 49.9),
        (768, 768, 46.7),
        (1024, 768, 44.7),
        (3072, 6144, 48.7),
        (6144, 6144, 47.8),
        (8192, 6144, 43.3),
        (12288, 6144, 41.2),
    ]:
        causes = ptd_step(gpt, ranks, 8, 8, batch, (1,), False, True, 6, selective)
        yield Row(f"on {ranks}", published, causes, utilisation_of(gpt, batch, ranks))


def utilisation_of(gpt: Gpt, batch: int, ranks: int) -> Callable[[float], float]:
    """Return the function from seconds to utilisation in %, without recomputation."""
    return lambda seconds: 100 * gpt.flops(batch, again=False) / (seconds * ranks * PEAK)


# -- sequences from 4,096 tokens to a million ------------------------------------------------------


def long_sequences() -> Iterator[tuple[int, float, float]]:
    """Yield thousands of tokens, seconds by a fit to the other runs, and published seconds.

    Llama 2 of 7 B on H100 in 8 bits, its context split over up to 32 ranks (NVIDIA NeMo 24.03,
    performance summary: tokens a second of a GPU, 4 M tokens a step).
    """
    fp8_cluster = replace(CLUSTERS["h100"], speed=1979e12)
    runs, names = list[Timed](), list[int]()
    for thousands, ranks, tp, cp, published in [
        (4, 4, 1, 1, 16671),
        (16, 16, 2, 1, 10082),
        (64, 64, 4, 2, 4021),
        (256, 256, 4, 8, 1214),
        (1024, 1024, 8, 32, 318),
    ]:
        length, batch, dp = 1024 * thousands, 4096 // thousands, ranks // tp // cp
        chain_at = decoder(32, 4096, 32, 11008, 32000, length, gated=True)
        placement = Placement(1, tp, tp > 1, cp)
        setting = Setting(placement, dp, micro=batch // dp, axes=("dp", "pp", "cp", "tp"))
        step_causes = step_seconds_by_cause(chain_at(placement), setting, fp8_cluster, SUMMED)
        runs.append((step_causes, batch * length / ranks / published))
        names.append(thousands)
    for k, (name, (causes, measured_time)) in enumerate(zip(names, runs)):
        yield name, weighted_time(causes, fit_weights([*runs[:k], *runs[k + 1 :]])), measured_time


# -- what is printed -------------------------------------------------------------------------------


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "weak scaling": weak_scaling,
    "more ranks": more_ranks,
    "ZeRO-3": zero_3,
    "recomputation": recomputation,
    "layers": layers,
    "Zero Bubble": zero_bubble,
    "MegaScale": ablation,
    "strong scaling": strong_scaling,
}
NOT_FITTED = ("ZeRO-3", "strong scaling")  # tables that the constant is not fitted to


def fit_computing(rows: Sequence[Row], sending: float = 1.0) -> float:
    """Return the factor of computing time with the least mean error."""
    tried = np.geomspace(0.5, 4, 200)
    return float(min(tried, key=lambda longer: mean_error(rows, float(longer), sending)))


def fit_sending(rows: Sequence[Row], longer: float) -> float:
    """Return the factor of sending time with the least mean error."""
    return float(min(np.geomspace(0.5, 40, 200), key=lambda k: mean_error(rows, longer, float(k))))


def mean_error(rows: Sequence[Row], longer: float, sending: float = 1.0) -> float:
    """Return the mean relative error of rows."""
    return float(np.mean([abs(row.told(longer, sending) / row.published - 1) for row in rows]))


def main() -> int:
    """Print predicted and published figures."""
    tables = {name: list(table()) for name, table in TABLES.items()}
    longer = fit_computing(
        [row for name, rows in tables.items() if name not in NOT_FITTED for row in rows]
    )
    print(f"computing takes {longer:.2f} times as long as the cluster says, in all tables")
    for name, rows in tables.items():
        sending = fit_sending(rows, longer) if name == "ZeRO-3" else 1.0
        print(f"\n{name}: mean error {100 * mean_error(rows, longer, sending):.1f} %", end="")
        print(f", sending {sending:.1f} times as long" if sending != 1 else "")
        for row in rows:
            predicted = row.told(longer, sending)
            gap = 100 * (predicted / row.published - 1)
            print(f"  {row.name:28} {predicted:8.2f} published {row.published:8.2f}  {gap:+6.1f} %")
    print("\nlong sequences: each row by weights that are fitted to the others")
    for thousands, seconds, measured_time in long_sequences():
        gap = 100 * (seconds / measured_time - 1)
        print(f"  {thousands:4} K {seconds:27.2f} published {measured_time:8.2f}  {gap:+6.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
