"""Sharding rules of our operators for DTensor: placements of arguments and of results.

Rows of a norm, a gate or a loss are independent: any dim of them may be sharded, and gradients of
weights are then partial. Without a rule DTensor refuses our operators; with these rules it never
gathers a sequence to normalise it.

DTensor caches the placements of results by the tensors of a call and by the arguments from the
first integer on. So the first argument of an operator that its rule or its results' shapes and
dtypes depend on is declared as an integer, although it may be a flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from schedlang.kernels import gated, grouped, linear_cross_entropy, norm, rope

# one strategy: placements of the results, and of the arguments (None: no tensor)
ShardingStrategy = tuple[list[Placement], list[Placement | None]]
ShardingRule = Callable[..., list[ShardingStrategy]]
# modules that define the operators; held_backward writes into an argument, which DTensor cannot
# shard
MODULES = (gated, grouped, linear_cross_entropy, norm, rope)


def _rows(results: Sequence[str], arguments: str, last: int | None = None) -> ShardingRule:
    """Return a rule for operators on rows: shard along any dim of the first argument but its last.

    Letters describe each result and argument: "x" rows, sharded; "w" the same for all rows; "p" a
    sum over rows; "-" no tensor; a number: rows if the argument of that number is a tensor, else
    empty. The last dim may be sharded as well if argument number `last` is a tensor.
    """

    def rule(first: Any, *others: Any) -> list[ShardingStrategy]:
        args = [first, *others]
        none = [not hasattr(value, "ndim") for value in args]

        def placements(letters: Sequence[str], along: Placement | None) -> list[Placement]:
            summed = Partial() if along else Replicate()
            kinds: dict[str, Placement] = {"x": along or Replicate(), "w": Replicate(), "p": summed}
            kinds |= {str(n): kinds["w" if no else "x"] for n, no in enumerate(none)}
            return [kinds[letter] for letter in letters]

        strategies: list[ShardingStrategy] = []
        for along in (None, *map(Shard, range(first.ndim - (last is None or none[last])))):
            inputs: list[Placement | None] = [*placements(arguments.replace("-", "w"), along)]
            for index, missing in enumerate(none):
                inputs[index] = None if missing else inputs[index]
            strategies.append((placements(results, along), inputs))
        return strategies

    return rule


def _grouped(x: Any, weight: Any, ends: Any, across: bool) -> list[ShardingStrategy]:
    """Return strategies that shard columns of the matrices, or the dim of their sums; rows are
    grouped, and stay replicated."""
    into, out = (2, 1) if across else (1, 2)
    replicated = Replicate()
    return [
        ([replicated], [replicated, replicated, replicated, None]),
        ([Shard(1)], [replicated, Shard(out), replicated, None]),
        ([Partial()], [Shard(1), Shard(into), replicated, None]),
    ]


def _grouped_backward(
    dy: Any, x: Any, weight: Any, ends: Any, across: bool, *_: Any
) -> list[ShardingStrategy]:
    into, out = (2, 1) if across else (1, 2)
    replicated, rest = Replicate(), (None, None, None)
    return [
        ([replicated, replicated], [replicated, replicated, replicated, replicated, *rest]),
        ([Partial(), Shard(out)], [Shard(1), replicated, Shard(out), replicated, *rest]),
        ([Shard(1), Shard(into)], [replicated, Shard(1), Shard(into), replicated, *rest]),
    ]


def _rope(q: Any, k: Any, cos: Any, sin: Any, *form: Any) -> list[ShardingStrategy]:
    """Return strategies for rows, tokens with their angles, and heads, the same for queries and
    keys."""
    heads = form[4]
    replicated = Replicate()

    def way(lines: Placement, angles: Placement) -> ShardingStrategy:
        key_placement = lines if hasattr(k, "ndim") else None
        inputs: list[Placement | None] = [lines, key_placement, angles, angles, *[None] * len(form)]
        return [lines, key_placement or replicated], inputs

    by_row = Shard(0) if cos.shape[0] > 1 else replicated
    places = [
        (replicated, replicated),
        (Shard(0), by_row),
        (Shard(heads), replicated),
        (Shard(3 - heads), Shard(1)),
    ]
    return [way(*placements) for placements in places]


RULES: dict[str, ShardingRule] = {
    "norm_forward": _rows("1xxx", "xxxww-------"),
    "norm_backward": _rows("xpp3", "xxxxwxx------"),
    "rope_turn": _rope,
    "gated_forward": _rows("x", "xx--", last=1),
    "gated_backward": _rows("x2", "xxx--", last=2),
    "linear_statistics_forward": _rows("xxx", "xwwx---"),
    "linear_statistics_backward": _rows("xpp", "xwwxxxxx-----"),
    "linear_weighed": _rows("pxpp", "xwwxx------"),
    "grouped_forward": _grouped,
    "grouped_backward": _grouped_backward,
}


@functools.cache
def register_rules() -> None:
    """Register all rules with DTensor, once."""
    for name, rule in RULES.items():
        register_sharding(getattr(torch.ops.schedlang, name).default)(rule)
