"""The model's output for the whole batch, on every rank, from those of parts, replicas, stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import nests as pytree
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.attend import Layout
from schedlang.runtime.collectives import comm
from schedlang.runtime.context.rejoin import across_tokens
from schedlang.runtime.logits.vocab import ShardedLogits
from schedlang.runtime.parts import Absent, stack

_EARLIER = "an earlier stage of the pipeline has it"
_LIST = re.compile(r"\[\d+\]")  # a place in a list, as pytree writes it

Weighed = tuple[Any, int, float]  # an output, its rows, and what it weighs in a mean


def whole_output(
    a: Assembly, parts: Mapping[int, Weighed], layout: Layout | None = None
) -> tuple[Any, dict[str, str]]:
    """The whole output, and by path what is left out of it (None stands there), and why.

    `layout` says which tokens each rank had, where ranks split sequences.

    `parts` are those of the microbatches whose last stage is on this rank; every rank calls this.
    """
    output = None
    with torch.no_grad():
        own = {k: (_gathered(_own(a, out)), *rest) for k, (out, *rest) in parts.items()}
    if made := _of_all_copies(a, own):
        mine = (stack(*zip(*made)), *map(sum, list(zip(*made))[1:]))
        if layout is not None:
            mine = across_tokens(a, mine, layout)
        output = _across_replicas(a, mine)
    return cleaned(_from_last(a, output))


def _of_all_copies(a: Assembly, own: Mapping[int, Any]) -> list[Any]:
    """All microbatches in order, on the ranks of the last stage's first copy; nothing elsewhere."""
    pipe = a.pipeline
    last = pipe.timeline.stages - 1
    places = {pipe.home(last, replica) for replica in range(pipe.timeline.replicas)}
    if a.stage_axis is not None and len(places) > 1:
        line = a.ranks.group(a.stage_axis)
        assert line.pg is not None
        everyone = comm.handed(own, line.pg, a.ranks.device)
        own = {k: one for part in everyone for k, one in part.items()}
    return [own[k] for k in sorted(own)] if pipe.place == pipe.home(last) else []


def cleaned(output: Any) -> tuple[Any, dict[str, str]]:
    """An output with None for what is Absent, and what that is, by path."""
    leaves, spec = pytree.tree_flatten_with_path(output)
    left = {
        leaf.place or dotted(path): leaf.reason for path, leaf in leaves if isinstance(leaf, Absent)
    }
    there = [None if isinstance(leaf, Absent) else leaf for _, leaf in leaves]
    return pytree.tree_unflatten(there, spec), left


def dotted(path: Sequence[Any]) -> str:
    """A place in a nest as `name.0.name`."""
    steps = [
        next(str(getattr(key, kind)) for kind in ("key", "idx", "name") if hasattr(key, kind))
        for key in path
    ]
    return ".".join(steps) or "output"


def _own(a: Assembly, output: Any) -> Any:
    """A part's output without what the last stage does not have: values inside earlier stages."""
    if a.stage_axis is None:
        return output
    plain = (Tensor, ShardedLogits, bool, int, float, str, type(None))
    shorter = tuple(name for m in a.outputs_missing if (name := _LIST.split(m)[0]) != m and name)

    def kept(path: Any, leaf: Any) -> Any:
        place = pytree.keystr(path)
        if place.startswith(shorter):  # a list that earlier stages have put into is another one
            upto = next(k for k, key in enumerate(path) if isinstance(key, pytree.SequenceKey))
            return Absent(_EARLIER, dotted(path[:upto]))
        if place in a.outputs_missing or not isinstance(leaf, plain):
            return Absent(_EARLIER)
        return leaf

    split = lambda leaf: isinstance(leaf, ShardedLogits)  # noqa: E731
    return pytree.tree_map_with_path(kept, output, is_leaf=split)


def _gathered(output: Any) -> Any:
    """The output with split logits made whole; all ranks of their group do this together."""
    made = lambda v: v.gathered() if isinstance(v, ShardedLogits) else v  # noqa: E731
    is_split = lambda value: isinstance(value, ShardedLogits)  # noqa: E731
    return pytree.tree_map(made, output, is_leaf=is_split)


def _across_replicas(a: Assembly, mine: Weighed) -> Any:
    group = a.ranks.group(a.row_axes)
    if group.pg is None:
        return mine[0]
    return stack(*zip(*comm.handed(mine, group.pg, a.ranks.device)))


def _from_last(a: Assembly, output: Any) -> Any:
    if a.stage_axis is None:
        return output
    return comm.handed_by(a.last_rank, output, a.ranks.device)
