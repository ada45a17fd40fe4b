"""Sharding rules of our operators for DTensor: placements taken, and placements of the results.

Rows of a norm, a gate or a loss are independent of each other: any dim of them may be split, and
the gradients of weights are then parts of a sum.  Without a rule DTensor refuses an operator of
ours; with one of these it never gathers a sequence to normalise it.

DTensor remembers how the results of a call lie by its tensors and by what comes from its first
integer on.  So an operator's first argument that its rule or its results' shapes and types depend
on is declared an integer, although it may be a flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from schedlang.kernels import (
    gated,
    grouped,
    linear_cross_entropy,
    norm,
    rope,
)

# one way to split: how the results lie, and how each argument does (None: it is no tensor)
Way = tuple[list[Placement], list[Placement | None]]
Rule = Callable[..., list[Way]]
# who define the operators; held_backward writes into an argument, which DTensor cannot split
MODULES = (gated, grouped, linear_cross_entropy, norm, rope)


def _rows(results: Sequence[str], arguments: str, last: int | None = None) -> Rule:
    """A rule for operators on rows: split along any dim of the first argument but its last.

    Letters say what each result and argument is: "x" rows, split along; "w" the same for all rows,
    "p" a sum over rows, "-" no tensor; a number rows where that argument is a tensor, else empty.
    The last dim may be split as well where argument number `last` is a tensor.
    """

    def rule(first: Any, *others: Any) -> list[Way]:
        given = [first, *others]
        none = [not hasattr(value, "ndim") for value in given]

        def lie(letters: Sequence[str], along: Placement | None) -> list[Placement]:
            summed = Partial() if along else Replicate()
            kinds: dict[str, Placement] = {"x": along or Replicate(), "w": Replicate(), "p": summed}
            kinds |= {str(n): kinds["w" if no else "x"] for n, no in enumerate(none)}
            return [kinds[letter] for letter in letters]

        ways: list[Way] = []
        for along in (None, *map(Shard, range(first.ndim - (last is None or none[last])))):
            inputs: list[Placement | None] = [*lie(arguments.replace("-", "w"), along)]
            for place, missing in enumerate(none):
                inputs[place] = None if missing else inputs[place]
            ways.append((lie(results, along), inputs))
        return ways

    return rule


def _grouped(x: Any, weight: Any, ends: Any, across: bool) -> list[Way]:
    """Columns of the matrices, or what they sum over; rows lie by group and stay whole."""
    into, out = (2, 1) if across else (1, 2)
    whole = Replicate()
    return [
        ([whole], [whole, whole, whole, None]),
        ([Shard(1)], [whole, Shard(out), whole, None]),
        ([Partial()], [Shard(1), Shard(into), whole, None]),
    ]


def _grouped_backward(dy: Any, x: Any, weight: Any, ends: Any, across: bool, *_: Any) -> list[Way]:
    into, out = (2, 1) if across else (1, 2)
    whole, more = Replicate(), (None, None, None)
    return [
        ([whole, whole], [whole, whole, whole, whole, *more]),
        ([Partial(), Shard(out)], [Shard(1), whole, Shard(out), whole, *more]),
        ([Shard(1), Shard(into)], [whole, Shard(1), Shard(into), whole, *more]),
    ]


def _turned(q: Any, k: Any, cos: Any, sin: Any, *form: Any) -> list[Way]:
    """Rows, tokens with their angles, and heads, of queries and keys alike."""
    heads = form[4]
    whole = Replicate()

    def way(lines: Placement, angles: Placement) -> Way:
        other = lines if hasattr(k, "ndim") else None
        inputs: list[Placement | None] = [lines, other, angles, angles, *[None] * len(form)]
        return [lines, other or whole], inputs

    by_row = Shard(0) if cos.shape[0] > 1 else whole
    places = [
        (whole, whole),
        (Shard(0), by_row),
        (Shard(heads), whole),
        (Shard(3 - heads), Shard(1)),
    ]
    return [way(*place) for place in places]


RULES: dict[str, Rule] = {
    "norm_forward": _rows("1xxx", "xxxww-------"),
    "norm_backward": _rows("xpp3", "xxxxwxx------"),
    "rope_turn": _turned,
    "gated_forward": _rows("x", "xx--", last=1),
    "gated_backward": _rows("x2", "xxx--", last=2),
    "linear_statistics_forward": _rows("xxx", "xwwx---"),
    "linear_statistics_backward": _rows("xpp", "xwwxxxxx-----"),
    "linear_weighed": _rows("pxpp", "xwwxx------"),
    "grouped_forward": _grouped,
    "grouped_backward": _grouped_backward,
}


@functools.cache
def install() -> None:
    """Tell DTensor of every operator, once."""
    for name, rule in RULES.items():
        register_sharding(getattr(torch.ops.schedlang, name).default)(rule)
