"""Whether a model may run on some tokens of its sequences, tried on a small stand-in before.

Whole and by parts, on one process, the losses and every gradient must be equal. A model for which
no way is found is refused, with the first module that gives something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from schedlang.diagnostic import Refusal
from schedlang.own_error import OwnError
from schedlang.runtime import nests as pytree
from schedlang.runtime.context.faults import fault
from schedlang.runtime.context.plainly import depends_on_tokens
from schedlang.runtime.context.products import Lines
from schedlang.runtime.context.tokens import Tokens
from schedlang.runtime.context.trial import parted
from schedlang.runtime.parts import dotted
from schedlang.runtime.slicing.slice_probe import (
    compare,
    dims_of,
    head_of,
    lines_of,
    places_of,
    shift_of,
    spread,
)
from schedlang.runtime.slicing.slice_trial import Seen, Trial, forward, watched


def probe(trial: Trial, kind: str, ranks: int, sites: Sequence[str]) -> Tokens:
    """How the model of a trial runs by tokens on ranks; raises Refusal S659 where it cannot."""
    whole = watched(trial)
    output, _ = forward(trial, trial.model, trial.batch)
    first: tuple[Tokens, Exception] | None = None
    for tokens in candidates(trial, kind, ranks):
        try:
            tagged = _tagged(trial, tokens, whole, sites)
            parts = parted(trial, tagged, sites)
            compare(whole, parts)
        except Exception as error:  # the model's own code, on what it has not been given before
            first = first or (tokens, error)
            continue
        return replace(tagged, outputs=_outputs(output, parts.outputs, trial))
    assert first is not None, "there is always a candidate"
    found = fault(trial, *first, sites)
    if found.diagnostic.code == "S659":
        _of_the_model(trial, found, first[1])
    raise found


def _of_the_model(trial: Trial, found: Refusal, error: Exception) -> None:
    """Raise an error of our own where the model alone does not show what our runs of it show."""
    if not depends_on_tokens(trial):
        raise OwnError(
            "the module alone computes some tokens as in the full sequence, but not in the program",
            *found.diagnostic.notes,
            f"{type(error).__name__}: {error}".splitlines()[0],
            f"`{type(trial.model).__name__}` on {list(trial.lengths)} tokens",
        ) from error


def guess(trial: Trial, kind: str, ranks: int) -> Tokens:
    """How a model without values would run, untried: it can be shown, not trained."""
    style = shift_of(trial)
    given = style == "padded" and _given(trial)
    source = trial.rule.source if trial.rule else ""
    return Tokens(
        kind, ranks, source, "given" if given else "none" if style == "none" else "head",
        along=trial.along, positions=_takes(trial, "position_ids"),
        products=lines_of(trial, Lines),
    )  # fmt: skip


def candidates(trial: Trial, kind: str, ranks: int) -> Iterator[Tokens]:
    """Ways that a model of this kind may be run in, the likeliest first."""
    style = shift_of(trial)
    source = trial.rule.source if trial.rule else ""
    ignore = trial.rule.ignore_index if trial.rule else -100
    products = lines_of(trial, Lines)
    base = Tokens(kind, ranks, source, "none", ignore, along=trial.along, products=products)
    head = replace(base, shift="head", head=head_of(trial)) if style != "none" else base
    ways = [replace(base, shift="given")] if style == "padded" and _given(trial) else []
    takes = _takes(trial, "position_ids")
    places = places_of(trial)
    for way in (*ways, head):
        if takes:
            if "position_ids" in trial.batch and "attention_mask" not in trial.batch:
                yield replace(way, positions=True, documents=True)
            yield replace(way, positions=True)
        yield replace(way, places=places)
        if takes:
            yield replace(way, positions=True, places=places, follow=True)
        yield replace(way, places=places, follow=True)


def _given(trial: Trial) -> bool:
    """Whether labels may come moved already."""
    return trial.loss is None and (_takes(trial, "shift_labels") or _takes(trial, "**"))


def _takes(trial: Trial, name: str) -> bool:
    known = inspect.signature(trial.model.forward).parameters
    if name == "**":
        return any(one.kind is one.VAR_KEYWORD for one in known.values())
    return name in known


def _tagged(trial: Trial, tokens: Tokens, whole: Seen, sites: Sequence[str]) -> Tokens:
    """With the dims of random draws along the sequence, from the shapes of a first pass."""
    if not trial.random or not whole.draws:
        return tokens
    parts, total = parted(trial, tokens, sites).draws, sum(trial.lengths)
    tags = {}
    for (_, site, call), shape in whole.draws.items():
        drawn = [parts.get((k, site, call)) for k in range(len(trial.lengths))]
        stops = [total] * len(trial.lengths)
        tags[(site, call)] = dims_of(site, shape, drawn, trial.lengths, stops)
    return replace(tokens, draws=spread(tags, trial.alike))


def _outputs(whole: Any, parts: Sequence[Any], trial: Trial) -> dict[str, int]:
    """Leaves of the output that run along the sequence: by path, their dim of tokens."""
    total, found = sum(trial.lengths), {}
    leaves = [dict(_leaves(output)) for output in parts]
    for name, value in _leaves(whole):
        there = [part[name] for part in leaves if name in part]
        if len(there) < len(parts) or any(one.dim() != value.dim() for one in there):
            continue
        for dim, size in enumerate(value.shape):
            sizes = [int(one.shape[dim]) for one in there]
            near = all(n <= got <= n + 1 for n, got in zip(trial.lengths, sizes))
            if size == total and near:
                found[name] = dim
                break
    return found


def _leaves(output: Any) -> list[tuple[str, Tensor]]:
    leaves, _ = pytree.tree_flatten_with_path(output)
    return [(dotted(path), value) for path, value in leaves if isinstance(value, Tensor)]
