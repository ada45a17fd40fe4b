"""What coded modules save where ranks split it: a rank's tensors beside the whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Label, Refusal
from schedlang.passes.cutting.chains import Chains, Counting, alone, run_again, running
from schedlang.passes.laying.kept_parts import (
    SavedParts,
    meeting,
    recomputed,
    refusal,
    saved_parts,
    splitting,
    summed,
)
from schedlang.passes.laying.token_parts import Cut, Parts, Split, TokenParts, WeightsAndTokens
from schedlang.plan import Plan
from schedlang.source import NOWHERE

if TYPE_CHECKING:
    from schedlang.runtime.following.saved import Saved


def kept_by_ranks(counting: Counting, chains: Chains) -> Parts | None:
    """How ranks split what coded modules save, once it is known what runs again, and from what.

    Raises Refusal S857 for single operators that are kept on ranks which split weights: these may
    call others than one process does.
    """
    plan, traced = counting.plan, counting.traced
    again = recomputed(plan, chains)
    if not splitting(plan) or not again:
        return _by_tokens(counting, chains)
    if any(one.chosen for one in again):
        raise _of_ranks(plan, splitting(plan)[0])
    local = _saved(replace(counting, tokens=None), chains)
    whole = _saved(alone(counting), chains, summed(traced))
    traced = replace(traced, saved=saved_parts(plan, whole, local))
    return _by_tokens(replace(counting, traced=traced), chains)


def _of_ranks(plan: Plan, axis: str) -> Refusal:
    row = next(one for one in meeting(plan) if one.primitive.limit is not None)
    return Refusal(
        Diagnostic(
            "S857", "the compressed results would differ from those of a single process",
            Label(row.span or NOWHERE, "saves results of single operators"), (),
            (f"ranks that shard weights over `{axis}` call other operators than a single process",),
            ("save classes of operators instead: `checkpoint(save=[linear])`",
             "or whole regions: `checkpoint(plan=rotor, memory=2GiB)`"),
        )
    )  # fmt: skip


def _by_tokens(counting: Counting, chains: Chains) -> Parts | None:
    """How ranks split it where they split sequences.

    Two forwards of a rank's model on the meta device, of all tokens and of its own, with the
    attention that runs on real devices, are compared.
    Raises Refusal S935 where a rank saves other tensors than parts of those of the model.
    """
    plan, tokens = counting.plan, counting.tokens
    if tokens is None or not plan.kept:
        return counting.traced.saved
    whole = _saved(replace(counting, tokens=None), chains)
    local = _saved(counting, chains)
    layout = tokens.layout(counting.sample)
    cut = Cut(layout.total, layout.counts[0], tokens.ranks)
    found: dict[tuple[str, str], tuple[Split, ...]] = {}
    for fqn, each in whole.items():
        for site in dict.fromkeys(one.site for one in (*each, *local[fqn])):
            ours, mine = ([o.shape for o in some if o.site == site] for some in (each, local[fqn]))
            splits = _aligned(cut, ours, mine)
            if splits is None:
                raise refusal(plan, fqn, plan.context_axes[0], _words(site, ours, mine))
            found[fqn, site] = splits
    by_token, weights = TokenParts(tokens.ranks, tokens.kind, found), counting.traced.saved
    if weights is None:
        return by_token
    assert isinstance(weights, SavedParts), "weights are followed before tokens are"
    return WeightsAndTokens(weights, by_token)


Shapes = Sequence[tuple[int, ...]]


def _aligned(cut: Cut, whole: Shapes, local: Shapes) -> tuple[Split, ...] | None:
    """How each tensor of a rank is split, which keeps nothing of masks of queries and keys."""
    if not whole:
        return None if local else ()
    if len(whole) > len(local) and whole[0][-2:] == (cut.total, cut.total):
        found = _aligned(cut, whole[1:], local)
        if found is not None:
            return found
    split = cut.of(whole[0], local[0]) if local else None
    rest = _aligned(cut, whole[1:], local[1:]) if split is not None else None
    return None if split is None or rest is None else (split, *rest)


def _words(site: str, whole: Shapes, local: Shapes) -> str:
    sizes = [", ".join(str(list(shape)) for shape in some) or "nothing" for some in (local, whole)]
    return f"{sizes[0]} for {sizes[1]}, in `{site}`"


def _saved(
    counting: Counting, chains: Chains, parts: Sequence[str] = ()
) -> Mapping[str, Sequence[Saved]]:
    """What coded modules of the local model save in a forward without values.

    `parts`: modules whose results ranks have as parts of sums, and keep as they are.
    """
    from schedlang.runtime.following.saved import watch_saved
    from schedlang.runtime.following.trace import Stack
    from schedlang.runtime.sharding.leaf import know_coded
    from schedlang.runtime.storage.fewer import put_inside, summing

    found: dict[str, Any] = {}

    def watch(model: Any) -> None:
        stack = Stack()
        know_coded(model)
        put_inside(summing, model, parts)
        run_again(counting.plan, model, chains)
        stack.watch(model, lambda fqn: False)
        found.update(watch_saved(model, [row.fqn for row in counting.plan.kept], stack))

    with running(counting, watch):
        return found
