"""Cost chains of decoders for the planner, in closed form: no model is built or simulated."""

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

    inner    hidden width of a feed-forward, or of one expert
    kv       heads of keys and values; None: as many as heads
    gated    SwiGLU's three products and norms without a mean (Llama), else GELU's two with dropout
    flash    fused attention, whose scores never reach memory; else they are written and read
    experts  in a layer, of which each token uses `top`; 0: a plain feed-forward
    tied     the head uses the embedding's weight
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocab: int
    length: int
    kv: int | None = None
    gated: bool = False
    flash: bool = True
    experts: int = 0
    top: int = 2
    tied: bool = False

    @property
    def narrow(self) -> int:
        """The width of the keys, and of the values."""
        return self.width // self.heads * (self.kv or self.heads)


def decoder(
    layers: int,
    width: int,
    heads: int,
    inner: int,
    vocab: int,
    length: int,
    kv: int | None = None,
    gated: bool = False,
    flash: bool = True,
    experts: int = 0,
    top: int = 2,
    tied: bool = False,
) -> Callable[[Placement], Chain]:
    """Return the profiles of a decoder: a cached function from a placement to its chain."""
    sizes = Decoder(
        layers, width, heads, inner, vocab, length, kv, gated, flash, experts, top, tied
    )

    @cache
    def profiles(placement: Placement) -> Chain:
        runs = (
            UnitRun(_embedding(sizes, placement), 1),
            UnitRun(_layer(sizes, placement), layers),
            UnitRun(_head(sizes, placement), 1),
        )
        return Chain(placement, runs, ((0, 2),) if tied else ())

    return profiles


def _product(
    rows: float, in_features: float, out_features: float, count: float = 1
) -> OperatorCost:
    moved_bytes = HALF * (rows * in_features + in_features * out_features + rows * out_features)
    return OperatorCost("product", 2 * rows * in_features * out_features, moved_bytes, count)


def _grads(rows: float, ins: float, outs: float, count: float = 1) -> OperatorCost:
    """Return the cost of both gradients of a product: each a product of the same sizes."""
    product = _product(rows, ins, outs)
    return OperatorCost("product", product.flops, product.moved, 2 * count)


def _elementwise(numbers: float, count: float = 1, cause: str = "") -> OperatorCost:
    """Return the cost of an elementwise pass that moves so many 16-bit numbers."""
    return OperatorCost("other", 0.0, HALF * numbers, count, cause)


def _embedding(sizes: Decoder, placement: Placement) -> Unit:
    tokens = placement.rows * sizes.length / placement.cp / placement.slices
    activations, split = tokens * sizes.width, placement.tp if placement.sequence else 1
    op = "reduce_scatter" if placement.sequence else "all_reduce"
    sent = (CollectiveCost(op, "tp", HALF * activations),) if placement.tp > 1 else ()
    backward = (
        (CollectiveCost("all_gather", "tp", HALF * activations),)
        if placement.tp > 1 and placement.sequence
        else ()
    )
    return Unit(
        "embedding",
        sizes.vocab * sizes.width // placement.tp,
        Work((_elementwise(2 * activations),), sent),
        Work((_elementwise(2 * activations),), backward),
        kept=8 * tokens,
        input=8 * tokens,
        peak=HALF * activations,
        output=HALF * activations / split,
    )


def _head(sizes: Decoder, placement: Placement) -> Unit:
    """Return the unit of the last norm, the logits and a 32-bit cross entropy over split logits."""
    tokens = placement.rows * sizes.length / placement.cp / placement.slices
    activations, vocab, split = (
        tokens * sizes.width,
        sizes.vocab / placement.tp,
        placement.tp if placement.sequence else 1,
    )
    loss = OperatorCost("other", 0.0, 4 * tokens * vocab, 3, "loss")
    rows = tuple(CollectiveCost("all_reduce", "tp", 4 * tokens, 3) for _ in "m" if placement.tp > 1)
    gather = (
        (CollectiveCost("all_gather", "tp", HALF * activations),)
        if placement.tp > 1 and placement.sequence
        else ()
    )
    op = "reduce_scatter" if placement.sequence else "all_reduce"
    summed = (CollectiveCost(op, "tp", HALF * activations),) if placement.tp > 1 else ()
    return Unit(
        "head",
        sizes.vocab * sizes.width // placement.tp + sizes.width,
        Work(
            (_elementwise(4 * activations / split), _product(tokens, sizes.width, vocab), loss),
            gather + rows,
        ),
        Work(
            (_elementwise(6 * activations / split), _grads(tokens, sizes.width, vocab), loss),
            summed + gather,
        ),
        kept=HALF * 2 * activations / split + 6 * tokens * vocab,
        input=HALF * activations / split,
        peak=8 * tokens * vocab,
        output=0.0,
    )


def _layer(sizes: Decoder, placement: Placement) -> Unit:
    tokens, split = (
        placement.rows * sizes.length / placement.cp / placement.slices,
        placement.tp if placement.sequence else 1,
    )
    activations = tokens * sizes.width
    attention, score_bytes = _attention(sizes, placement, tokens)
    numels, feed = _feed_forward(sizes, placement, tokens)
    # two norms, and two residual sums
    norms = (
        _elementwise(2 * activations / split, 2, "norm"),
        _elementwise(2 * activations / split, 2),
    )
    weights = sizes.width * (2 * sizes.width + 2 * sizes.narrow) // placement.tp + 2 * sizes.width
    expert_numel, other_numel = numels
    return Unit(
        "layer",
        weights + other_numel + expert_numel,
        Work(norms + attention[0] + feed[0], _collectives(sizes, placement, tokens, False)),
        Work(norms + norms + attention[1] + feed[1], _collectives(sizes, placement, tokens, True)),
        kept=_saved_bytes(sizes, placement, tokens),
        input=HALF * activations / split,
        peak=HALF * (3 * activations + 2 * tokens * sizes.inner / placement.tp) + score_bytes,
        output=HALF * activations / split,
        expert_numel=expert_numel,
    )


WorkPair = tuple[tuple[OperatorCost, ...], tuple[OperatorCost, ...]]  # forward, backward


def _attention(model: Decoder, placement: Placement, tokens: float) -> tuple[WorkPair, float]:
    """Return the work of attention, and the bytes of its scores while they are in use."""
    width, tp = model.width, placement.tp
    sizes = ((tokens, width, (width + 2 * model.narrow) / tp), (tokens, width / tp, width))
    products = tuple(_product(*size) for size in sizes), tuple(_grads(*size) for size in sizes)
    keys = (
        model.length * (placement.slices + 1) / (2 * placement.slices)
    )  # that a token attends to, in the mean
    flops = 4 * tokens * keys * width / tp
    moved_bytes = HALF * tokens * (2 * width + 2 * model.narrow) / tp
    if model.flash:
        forward = OperatorCost("attention", flops, moved_bytes)
        backward = OperatorCost("attention", 2.5 * flops, 2 * moved_bytes)
        return ((*products[0], forward), (*products[1], backward)), 0.0
    scores = tokens * keys * model.heads / tp
    forward = OperatorCost("product", flops / 2, moved_bytes / 2 + HALF * scores, 2, "scores")
    backward = OperatorCost("product", flops / 2, moved_bytes / 2 + HALF * scores, 4, "scores")
    passes = _elementwise(2 * scores, 3, "scores")  # scaled and masked, normalised, dropped
    return ((*products[0], forward, passes), (*products[1], backward, passes)), 4 * scores


def _feed_forward(
    sizes: Decoder, placement: Placement, tokens: float
) -> tuple[tuple[int, int], WorkPair]:
    """Return the elements that `ep` splits, the others, and the work of a feed-forward."""
    into, inner = (2 if sizes.gated else 1), sizes.inner / placement.tp
    expert_numel = (into + 1) * sizes.width * sizes.inner // placement.tp
    uses = sizes.top if sizes.experts else 1
    rows = tokens * uses
    forward = (
        _product(rows, sizes.width, inner, into),
        _product(rows, inner, sizes.width),
        _elementwise(rows * inner * (into + 1), 1, "inner"),
    )
    backward = (
        _grads(rows, sizes.width, inner, into),
        _grads(rows, inner, sizes.width),
        _elementwise(rows * inner * (2 * into + 1), 1, "inner"),
    )
    if not sizes.experts:
        return (0, expert_numel), (forward, backward)
    router = (tokens, sizes.width, sizes.experts)
    works = (*forward, _product(*router)), (*backward, _grads(*router))
    return (expert_numel * sizes.experts // placement.ep, sizes.width * sizes.experts), works


def _collectives(
    sizes: Decoder, placement: Placement, tokens: float, backward: bool
) -> tuple[CollectiveCost, ...]:
    """Return the collectives of a layer: tensor, context and expert parallelism."""
    activation_bytes, collectives = HALF * tokens * sizes.width, list[CollectiveCost]()
    if placement.tp > 1 and placement.sequence:
        collectives = [
            CollectiveCost("all_gather", "tp", activation_bytes, 4 if backward else 2)
        ]  # inputs once more
        collectives += [CollectiveCost("reduce_scatter", "tp", activation_bytes, 2)]
    elif placement.tp > 1:
        collectives = [CollectiveCost("all_reduce", "tp", activation_bytes, 2)]
    if placement.cp > 1:
        ring = HALF * tokens * 2 * sizes.narrow / placement.tp * (2 if backward else 1)
        collectives += [CollectiveCost("send", "cp", ring, placement.cp - 1)]
    if sizes.experts and placement.ep > 1:
        collectives += [CollectiveCost("all_to_all", "ep", activation_bytes * sizes.top, 2)]
    return tuple(collectives)


def _saved_bytes(sizes: Decoder, placement: Placement, tokens: float) -> float:
    """Return the saved bytes of a layer (Korthikanti et al. 2022, table 2; SwiGLU likewise)."""
    tp, width = placement.tp, sizes.width
    split = tp if placement.sequence else 1
    uses = sizes.top if sizes.experts else 1
    scores = 5 * tokens * sizes.length * sizes.heads / tp * (not sizes.flash)
    if sizes.gated:  # inputs of norms and products; q, k, v and the attention's output
        split_bytes = HALF * (2 * width + 2 * sizes.narrow + 3 * sizes.inner * uses)
        return tokens * (4 * HALF * width / split + split_bytes / tp) + scores
    split_bytes = HALF * (2 * width + 2 * sizes.narrow + 2 * sizes.inner * uses)
    return tokens * (10 * width / split + split_bytes / tp) + scores
