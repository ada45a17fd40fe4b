"""Published tables of scaling against the planner's price: python -m tests.benchmarks.scaling

One constant is fitted for all of a table's rows: how much longer computing takes than the cluster
says.  What is sent takes what the cluster says.  Where a paper does not say how many rows a
microbatch has, or how many stages a rank, the price chooses.
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
from tests.benchmarks.weights import Timed, fitted, told
from tests.planner.decoders import decoder

A100 = CLUSTERS["a100"]
PEAK = 312e12
SENDS = ("tp", "cp", "ep", "pp", "dp")
SUMMED = Recipe(gradient=4)  # Megatron-LM adds gradients up in 32 bits


@dataclass(frozen=True)
class Row:
    """A published figure, and what tells it.

    seconds  of a step, by cause
    figure   from seconds
    overlap  of computing and sending, the share of the shorter that is hidden
    """

    name: str
    published: float
    seconds: Mapping[str, float]
    figure: Callable[[float], float]
    overlap: float = 0.0

    def told(self, longer: float, sending: float = 1.0) -> float:
        """The figure where computing takes so many times as long, and sending."""
        sends = [took for name, took in self.seconds.items() if name.split()[0] in SENDS]
        computing, sent = longer * (sum(self.seconds.values()) - sum(sends)), sending * sum(sends)
        return self.figure(computing + sent - self.overlap * min(computing, sent))


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
        """Operations of a step as the papers count them, those computed again included."""
        ends = 1 + 2048 / (6 * self.width) + 51200 / (16 * self.layers * self.width)
        return (96 if again else 72) * rows * 2048 * self.layers * self.width**2 * ends


@cache
def _gpt(heads: int, width: int, layers: int) -> Callable[[Placement], Chain]:
    return decoder(layers, width, heads, 4 * width, 51200, 2048, flash=False)


def selective(chain: Chain) -> Chain:
    """The scores of attention are computed again: a little work more in every backward."""
    first, layers, last = chain.runs
    unit = layers.unit
    scores = tuple(op for op in unit.forward.operators if op.cause == "scores")
    more = Work(unit.backward.operators + scores, unit.backward.collectives)
    return replace(chain, runs=(first, UnitRun(replace(unit, backward=more), layers.count), last))


def evenly(layers: int, stages: int, again: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Units and recomputed units of stages with as many layers each."""
    each = layers // stages
    cuts = [each] * stages
    cuts[0] += 1
    cuts[-1] += 1
    if not again:
        return tuple(cuts), ()
    return tuple(cuts), (*cuts[:-1], cuts[-1] - 1)


def ptd(one: Gpt, ranks: int, tp: int, pp: int, batch: int, rows: Sequence[int] = (1, 2, 4, 8),
        again: bool = True, sequence: bool = False, chunks: int | None = None,
        part: Callable[[Chain], Chain] = lambda chain: chain) -> dict[str, float]:  # fmt: skip
    """Seconds by cause of the quickest step over rows of a microbatch and stages of a rank.

    Stages lie farthest apart, interleaved where that is quicker (Narayanan et al. 2021).
    """
    dp, found = ranks // (tp * pp), list[dict[str, float]]()
    for each in rows:
        micro = batch // (dp * each)
        if micro < 1 or batch % (dp * each):
            continue
        for v in [chunks] if chunks else range(1, one.layers // pp + 1):
            if one.layers % (pp * v) or (v > 1 and (micro % pp or pp == 1)):
                continue
            cuts, more = evenly(one.layers, pp * v, again)
            at = Placement(each, tp, sequence and tp > 1)
            order = "Interleaved1F1B" if v > 1 else "1F1B"
            axes = ("pp", "dp", "cp", "tp")
            setting = Setting(at, dp, pp, micro, order, v, 0, cuts, more, axes)
            found.append(
                step_seconds_by_cause(scattered(part(one.chain(at))), setting, A100, SUMMED)
            )
    return min(found, key=lambda by: sum(by.values()))


def scattered(chain: Chain) -> Chain:
    """Each rank of tp hands on its part of what stages send (Narayanan et al. 2021, 4.1)."""
    at = chain.placement
    share = 1 if at.sequence else at.tp
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
        one = Gpt(heads, width, layers)
        yield Row(name, published, ptd(one, ranks, tp, pp, batch), rate(one, batch, ranks))


def rate(one: Gpt, batch: int, ranks: int) -> Callable[[float], float]:
    """TFLOP/s of a rank from seconds."""
    return lambda seconds: one.flops(batch) / seconds / ranks / 1e12


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
    """TFLOP/s of a GPU, the batch as large on more of them (the same, table 2, second half)."""
    for name, one, pp, batch, rows in [
        ("174.6B", B175, 12, 1536, ((384, 153), (768, 149), (1536, 141))),
        ("529.6B", B530, 35, 2240, ((560, 171), (1120, 167), (2240, 159))),
    ]:
        for ranks, published in rows:
            found = ptd(one, ranks, 8, pp, batch, (1,))
            yield Row(f"{name} on {ranks}", published, found, rate(one, batch, ranks))


def zero_3(overlap: float = 0.5) -> Iterator[Row]:
    """TFLOP/s of a GPU with ZeRO-3 alone (the same, table 2, first half).

    Unit by unit: a gather for the forward, for computing again and for the backward, and a scatter.
    Half of the messages, or of the computing where that is shorter, is taken to be hidden.
    """
    for name, one, ranks, rows, batch, published in ZERO:
        chain, micro = one.chain(Placement(rows)), batch // (ranks * rows)
        setting = Setting(chain.placement, pp=1, micro=micro)
        cuts, more = evenly(one.layers, 1, True)
        by = step_seconds_by_cause(chain, replace(setting, cuts=cuts, again=more), A100)
        sent = sum(
            4
            * micro
            * run.count
            * collective_seconds(A100, "all_gather", 2.0 * run.unit.numel, ranks, 1)
            for run in chain.runs
        )
        figure = rate(one, batch, ranks)
        yield Row(f"{name} on {ranks}", published, {**by, "dp": sent}, figure, overlap)


def recomputation() -> Iterator[Row]:
    """Seconds of a step (Korthikanti et al. 2022, table 5)."""
    for name, one, pp, ranks, batch, rows, full, part in [
        ("22B", Gpt(64, 6144, 48), 1, 8, 4, 4, 1.42, 1.10),
        ("530B", B530, 35, 280, 280, 1, 49.05, 37.83),
    ]:
        chunks = 3 if pp > 1 else 1
        all_ = ptd(one, ranks, 8, pp, batch, (rows,), chunks=chunks)
        some = ptd(one, ranks, 8, pp, batch, (rows,), False, True, chunks, selective)
        yield Row(f"{name} all again", full, all_, lambda seconds: seconds)
        yield Row(f"{name} scores again", part, some, lambda seconds: seconds)


def layers() -> Iterator[Row]:
    """Milliseconds of a layer of the 22B, forward and backward (the same, table 4)."""
    for name, sequence, again, published in [
        ("baseline", False, "", (7.7, 11.9)),
        ("sequence", True, "", (7.2, 11.8)),
        ("all again", False, "all", (7.7, 19.5)),
        ("scores again", False, "scores", (7.7, 13.2)),
        ("scores again, sequence", True, "scores", (7.2, 13.1)),
    ]:
        setting = Setting(Placement(4, 8, sequence))
        chain = Gpt(64, 6144, 48).chain(setting.placement)
        unit = (selective(chain) if again == "scores" else chain).runs[1].unit
        forward, backward, *_ = unit_seconds_by_cause(unit, sending_axes(setting), A100)
        if again == "all":
            backward = {c: backward.get(c, 0) + forward.get(c, 0) for c in {**forward, **backward}}
        for which, by, took in zip("FB", (forward, backward), published):
            yield Row(f"{name} {which}", took, by, lambda seconds: 1e3 * seconds)


def zero_bubble() -> Iterator[Row]:
    """Milliseconds of a stage's forward and of both halves of its backward (Qi et al. 2024).

    Tables 3 and 9, 8 and 16 stages.  What orders make of these times is exact and tested elsewhere.
    """
    for name, layers, heads, width, stages, rows, published in [
        ("1.5B", 22, 24, 2304, 8, 6, (18.522, 18.086, 9.337)),
        ("14.6B", 46, 40, 5120, 16, 1, (11.347, 11.248, 8.132)),
    ]:
        made = decoder(layers, width, heads, 4 * width, 51200, 1024, flash=False)
        unit = made(Placement(rows)).runs[1].unit
        each = (layers + 2) // stages
        for which, by, whole in zip("FIW", halves(unit, Setting(Placement(rows))), published):
            by = {cause: each * one for cause, one in by.items()}
            yield Row(f"{name} {which}", whole, by, lambda seconds: 1e3 * seconds)


def halves(unit: Unit, setting: Setting) -> tuple[dict[str, float], ...]:
    """Seconds of a forward, of gradients of inputs, and of weights."""
    forward, backward, weights, *_ = unit_seconds_by_cause(unit, sending_axes(setting), A100)
    inputs = {cause: took - weights.get(cause, 0.0) for cause, took in backward.items()}
    return dict(forward), inputs, dict(weights)


# -- MegaScale: one step, and what each of its changes takes away ----------------------------------


def ablation() -> Iterator[Row]:
    """Utilisation in % (Jiang et al. 2024, table 3): 175B, 256 GPUs, batch 256.

    Of what hides messages all of them are taken to be hidden; what new operators gain is none of a
    price's business, and taken from the row before.
    """
    one = Gpt(96, 12288, 96)
    utilisation = used(one, 256, 256)

    def without(by: dict[str, float], *axes: str) -> dict[str, float]:
        return {name: took for name, took in by.items() if name.split()[0] not in axes}

    def parallel(chain: Chain) -> Chain:
        """Attention and feed-forward side by side: one gather and one scatter of two are saved."""
        first, run, last = selective(chain).runs
        half = [
            replace(
                work,
                collectives=tuple(replace(sent, count=sent.count / 2) for sent in work.collectives),
            )
            for work in (run.unit.forward, run.unit.backward)
        ]
        unit = replace(run.unit, forward=half[0], backward=half[1])
        return replace(chain, runs=(first, UnitRun(unit, run.count), last))

    given = (one, 256, 8, 8, 256, (1,), False, True, 6)
    base, side = ptd(*given, selective), ptd(*given, parallel)
    larger = ptd(one, 256, 8, 8, 768, (1,), False, True, 6, parallel)
    yield Row("baseline", 47.7, base, utilisation)
    yield Row("parallel block", 52.3, side, utilisation)
    for name, published, axes in [
        ("and tp hidden", 55.5 * 52.3 / 53.3, ("tp",)),
        ("and pp hidden", 58.0 * 52.3 / 53.3, ("tp", "pp")),
        ("and dp hidden", 59.5 * 52.3 / 53.3, ("tp", "pp", "dp")),
    ]:
        yield Row(name, published, without(side, *axes), utilisation)
    hidden = without(larger, "tp", "pp", "dp")
    scale = 59.5 * 52.3 / 53.3 / 62.3  # operators and small things, as published
    yield Row("and batch x 3", 65.3 * scale, hidden, used(one, 768, 256))


def strong_scaling() -> Iterator[Row]:
    """Utilisation in % of Megatron-LM on more GPUs (the same, table 2), unseen by the constant.

    A fixed batch of 768 rows, then of 6,144: eight stages of six chunks, one row of a microbatch.
    """
    one = Gpt(128, 12288, 96)
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
        by = ptd(one, ranks, 8, 8, batch, (1,), False, True, 6, selective)
        yield Row(f"on {ranks}", published, by, used(one, batch, ranks))


def used(one: Gpt, batch: int, ranks: int) -> Callable[[float], float]:
    """Utilisation in % from seconds; what is computed again does not count."""
    return lambda seconds: 100 * one.flops(batch, again=False) / (seconds * ranks * PEAK)


# -- sequences from 4,096 tokens to a million ------------------------------------------------------


def long_sequences() -> Iterator[tuple[int, float, float]]:
    """Thousands of tokens, seconds by weights that are fitted to the other runs, and published.

    Llama 2 of 7 B on H100 in 8 bits, its context split over up to 32 ranks (NVIDIA NeMo 24.03,
    performance summary: tokens a second of a GPU, 4 M tokens a step).
    """
    twice = replace(CLUSTERS["h100"], speed=1979e12)
    runs, names = list[Timed](), list[int]()
    for thousands, ranks, tp, cp, published in [
        (4, 4, 1, 1, 16671),
        (16, 16, 2, 1, 10082),
        (64, 64, 4, 2, 4021),
        (256, 256, 4, 8, 1214),
        (1024, 1024, 8, 32, 318),
    ]:
        length, batch, dp = 1024 * thousands, 4096 // thousands, ranks // tp // cp
        made = decoder(32, 4096, 32, 11008, 32000, length, gated=True)
        at = Placement(1, tp, tp > 1, cp)
        setting = Setting(at, dp, micro=batch // dp, axes=("dp", "pp", "cp", "tp"))
        found = step_seconds_by_cause(made(at), setting, twice, SUMMED)
        runs.append((found, batch * length / ranks / published))
        names.append(thousands)
    for left, (name, (by, took)) in enumerate(zip(names, runs)):
        yield name, told(by, fitted([*runs[:left], *runs[left + 1 :]])), took


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
TOLD = ("ZeRO-3", "strong scaling")  # what the constant of a cluster is not fitted to


def constant(rows: Sequence[Row], sending: float = 1.0) -> float:
    """How much longer computing takes: the one that leaves the least mean error."""
    tried = np.geomspace(0.5, 4, 200)
    return float(min(tried, key=lambda longer: error(rows, float(longer), sending)))


def slower(rows: Sequence[Row], longer: float) -> float:
    """How much longer sending takes, likewise."""
    return float(min(np.geomspace(0.5, 40, 200), key=lambda k: error(rows, longer, float(k))))


def error(rows: Sequence[Row], longer: float, sending: float = 1.0) -> float:
    """Mean of the errors of rows."""
    return float(np.mean([abs(row.told(longer, sending) / row.published - 1) for row in rows]))


def main() -> int:
    """Print what is told and what was published."""
    made = {name: list(table()) for name, table in TABLES.items()}
    longer = constant([row for name, rows in made.items() if name not in TOLD for row in rows])
    print(f"computing takes {longer:.2f} times as long as the cluster says, in all tables")
    for name, rows in made.items():
        sending = slower(rows, longer) if name == "ZeRO-3" else 1.0
        print(f"\n{name}: mean error {100 * error(rows, longer, sending):.1f} %", end="")
        print(f", sending {sending:.1f} times as long" if sending != 1 else "")
        for row in rows:
            found = row.told(longer, sending)
            off = 100 * (found / row.published - 1)
            print(f"  {row.name:28} {found:8.2f} published {row.published:8.2f}  {off:+6.1f} %")
    print("\nlong sequences: each row by weights that are fitted to the others")
    for thousands, seconds, took in long_sequences():
        off = 100 * (seconds / took - 1)
        print(f"  {thousands:4} K {seconds:27.2f} published {took:8.2f}  {off:+6.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
