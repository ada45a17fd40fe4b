"""Decoders as chains of a planner in closed form: no model is made, no step is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from schedlang.passes.planner.values import (
    Chain,
    CollectiveCost,
    OperatorCost,
    Placement,
    Unit,
    UnitRun,
    Work,
)

HALF = 2  # bytes of a number in 16 bits


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder.

    inner    width between the two products of a feed-forward, or of one expert
    kv       heads of keys and values; None: as many as heads
    gated    SwiGLU's three products and norms without a mean (Llama), else GELU's two with dropout
    flash    attention whose scores never reach memory; else they are written and read
    experts  of a layer, of which `top` see a token; 0: a plain feed-forward
    tied     the head multiplies with the embedding's table
    """

    layers: int
    width: int
    heads: int
    inner: int
    words: int
    length: int
    kv: int | None = None
    gated: bool = False
    flash: bool = True
    experts: int = 0
    top: int = 2
    tied: bool = False

    @property
    def narrow(self) -> int:
        """Width of the keys, and of the values."""
        return self.width // self.heads * (self.kv or self.heads)


def decoder(
    layers: int,
    width: int,
    heads: int,
    inner: int,
    words: int,
    length: int,
    kv: int | None = None,
    gated: bool = False,
    flash: bool = True,
    experts: int = 0,
    top: int = 2,
    tied: bool = False,
) -> Callable[[Placement], Chain]:
    """Make the profiles of a decoder: its chain under any placement, the same one each time."""
    one = Decoder(layers, width, heads, inner, words, length, kv, gated, flash, experts, top, tied)

    @cache
    def profiles(at: Placement) -> Chain:
        runs = (
            UnitRun(_embedding(one, at), 1),
            UnitRun(_layer(one, at), layers),
            UnitRun(_head(one, at), 1),
        )
        return Chain(at, runs, ((0, 2),) if tied else ())

    return profiles


def _product(rows: float, ins: float, outs: float, count: float = 1) -> OperatorCost:
    moved = HALF * (rows * ins + ins * outs + rows * outs)
    return OperatorCost("product", 2 * rows * ins * outs, moved, count)


def _back(rows: float, ins: float, outs: float, count: float = 1) -> OperatorCost:
    """Both gradients of a product: each another product of the same three sizes."""
    one = _product(rows, ins, outs)
    return OperatorCost("product", one.flops, one.moved, 2 * count)


def _pass(numbers: float, count: float = 1, cause: str = "") -> OperatorCost:
    """One pass that reads and writes so many numbers in 16 bits."""
    return OperatorCost("other", 0.0, HALF * numbers, count, cause)


def _embedding(one: Decoder, at: Placement) -> Unit:
    tokens = at.rows * one.length / at.cp / at.slices
    wide, split = tokens * one.width, at.tp if at.sequence else 1
    op = "reduce_scatter" if at.sequence else "all_reduce"
    sent = (CollectiveCost(op, "tp", HALF * wide),) if at.tp > 1 else ()
    back = (CollectiveCost("all_gather", "tp", HALF * wide),) if at.tp > 1 and at.sequence else ()
    return Unit(
        "embedding",
        one.words * one.width // at.tp,
        Work((_pass(2 * wide),), sent),
        Work((_pass(2 * wide),), back),
        kept=8 * tokens,
        input=8 * tokens,
        peak=HALF * wide,
        output=HALF * wide / split,
    )


def _head(one: Decoder, at: Placement) -> Unit:
    """The last norm, logits and a cross entropy in 32 bits over split logits."""
    tokens = at.rows * one.length / at.cp / at.slices
    wide, words, split = tokens * one.width, one.words / at.tp, at.tp if at.sequence else 1
    loss = OperatorCost("other", 0.0, 4 * tokens * words, 3, "loss")
    rows = tuple(CollectiveCost("all_reduce", "tp", 4 * tokens, 3) for _ in "m" if at.tp > 1)
    gather = (CollectiveCost("all_gather", "tp", HALF * wide),) if at.tp > 1 and at.sequence else ()
    op = "reduce_scatter" if at.sequence else "all_reduce"
    summed = (CollectiveCost(op, "tp", HALF * wide),) if at.tp > 1 else ()
    return Unit(
        "head",
        one.words * one.width // at.tp + one.width,
        Work((_pass(4 * wide / split), _product(tokens, one.width, words), loss), gather + rows),
        Work((_pass(6 * wide / split), _back(tokens, one.width, words), loss), summed + gather),
        kept=HALF * 2 * wide / split + 6 * tokens * words,
        input=HALF * wide / split,
        peak=8 * tokens * words,
        output=0.0,
    )


def _layer(one: Decoder, at: Placement) -> Unit:
    tokens, split = at.rows * one.length / at.cp / at.slices, at.tp if at.sequence else 1
    wide = tokens * one.width
    attention, attended = _attention(one, at, tokens)
    fed, feed = _feed(one, at, tokens)
    # two norms, and two sums with what goes around what they begin
    norms = (_pass(2 * wide / split, 2, "norm"), _pass(2 * wide / split, 2))
    weights = one.width * (2 * one.width + 2 * one.narrow) // at.tp + 2 * one.width
    spread, numbers = fed
    return Unit(
        "layer",
        weights + numbers + spread,
        Work(norms + attention[0] + feed[0], _sent(one, at, tokens, False)),
        Work(norms + norms + attention[1] + feed[1], _sent(one, at, tokens, True)),
        kept=_kept(one, at, tokens),
        input=HALF * wide / split,
        peak=HALF * (3 * wide + 2 * tokens * one.inner / at.tp) + attended,
        output=HALF * wide / split,
        expert_numel=spread,
    )


Works = tuple[tuple[OperatorCost, ...], tuple[OperatorCost, ...]]  # forward, backward


def _attention(one: Decoder, at: Placement, tokens: float) -> tuple[Works, float]:
    """Work of attention, and the bytes of its scores while they are worked on."""
    width, tp = one.width, at.tp
    sizes = ((tokens, width, (width + 2 * one.narrow) / tp), (tokens, width / tp, width))
    products = tuple(_product(*size) for size in sizes), tuple(_back(*size) for size in sizes)
    keys = one.length * (at.slices + 1) / (2 * at.slices)  # that a token meets, in the mean
    flops = 4 * tokens * keys * width / tp
    moved = HALF * tokens * (2 * width + 2 * one.narrow) / tp
    if one.flash:
        ahead = OperatorCost("attention", flops, moved)
        back = OperatorCost("attention", 2.5 * flops, 2 * moved)
        return ((*products[0], ahead), (*products[1], back)), 0.0
    scores = tokens * keys * one.heads / tp
    ahead = OperatorCost("product", flops / 2, moved / 2 + HALF * scores, 2, "scores")
    back = OperatorCost("product", flops / 2, moved / 2 + HALF * scores, 4, "scores")
    passes = _pass(2 * scores, 3, "scores")  # scaled and masked, normalised, dropped
    return ((*products[0], ahead, passes), (*products[1], back, passes)), 4 * scores


def _feed(one: Decoder, at: Placement, tokens: float) -> tuple[tuple[int, int], Works]:
    """Numbers that `ep` has split, others, and the work of a feed-forward."""
    into, inner = (2 if one.gated else 1), one.inner / at.tp
    each = (into + 1) * one.width * one.inner // at.tp
    often = one.top if one.experts else 1
    rows = tokens * often
    ahead = (
        _product(rows, one.width, inner, into),
        _product(rows, inner, one.width),
        _pass(rows * inner * (into + 1), 1, "inner"),
    )
    back = (
        _back(rows, one.width, inner, into),
        _back(rows, inner, one.width),
        _pass(rows * inner * (2 * into + 1), 1, "inner"),
    )
    if not one.experts:
        return (0, each), (ahead, back)
    router = (tokens, one.width, one.experts)
    works = (*ahead, _product(*router)), (*back, _back(*router))
    return (each * one.experts // at.ep, one.width * one.experts), works


def _sent(one: Decoder, at: Placement, tokens: float, backward: bool) -> tuple[CollectiveCost, ...]:
    """Messages of a layer: Megatron's two sums, or gathers and scatters; a ring; experts."""
    wide, found = HALF * tokens * one.width, list[CollectiveCost]()
    if at.tp > 1 and at.sequence:
        found = [CollectiveCost("all_gather", "tp", wide, 4 if backward else 2)]  # inputs once more
        found += [CollectiveCost("reduce_scatter", "tp", wide, 2)]
    elif at.tp > 1:
        found = [CollectiveCost("all_reduce", "tp", wide, 2)]
    if at.cp > 1:
        ring = HALF * tokens * 2 * one.narrow / at.tp * (2 if backward else 1)
        found += [CollectiveCost("send", "cp", ring, at.cp - 1)]
    if one.experts and at.ep > 1:
        found += [CollectiveCost("all_to_all", "ep", wide * one.top, 2)]
    return tuple(found)


def _kept(one: Decoder, at: Placement, tokens: float) -> float:
    """Bytes of a layer's activations (Korthikanti et al. 2022, table 2; SwiGLU counted alike)."""
    tp, width = at.tp, one.width
    split = tp if at.sequence else 1
    often = one.top if one.experts else 1
    scores = 5 * tokens * one.length * one.heads / tp * (not one.flash)
    if one.gated:  # inputs of two norms and of the products after them; q, k, v and their sum
        inside = HALF * (2 * width + 2 * one.narrow + 3 * one.inner * often)
        return tokens * (4 * HALF * width / split + inside / tp) + scores
    inside = HALF * (2 * width + 2 * one.narrow + 2 * one.inner * often)
    return tokens * (10 * width / split + inside / tp) + scores
