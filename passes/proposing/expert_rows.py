"""The rows that spread experts, and that split sequences between attention modules."""

from __future__ import annotations

import os
from collections.abc import Sequence

from schedlang.passes.completing.flows import flows
from schedlang.passes.completing.proposal_text import Row
from schedlang.passes.completing.tensor_rows import Finder
from schedlang.passes.shrinking.blocks import Blocks

METHODS = ("ring", "gather")  # the first that is legal


def expert_rows(finder: Finder, *beside: Row) -> None:
    """Add a row for each kind of module with experts; note those that stay whole.

    `beside` are rows that must stand with it, such as the one that splits the batch.
    """
    for name in _experts(finder.trial.blocks):
        row = Row((name,), f"expert_parallel(over={finder.axis})", "each rank has some experts")
        made = finder.mended([row, *beside])
        if isinstance(made, str):
            finder.whole((name,), made)
        else:
            finder.rows.append(row)


def _experts(blocks: Blocks) -> list[str]:
    """Common names of modules with two or more weights per expert, all of as many experts."""
    found = []
    for name, group in blocks.named.items():
        shapes = [fact.shape for fact in blocks.facts.sites[group[0]].parameters.values()]
        deep = [shape for shape in shapes if len(shape) == 3]
        counts = {shape[:1] for shape in shapes}  # () of one number, a temperature
        if "*" in name and len(deep) > 1 and len(counts) == 1 and counts.pop() > (1,):
            found.append(name)
    return found


def context_rows(finder: Finder) -> None:
    """Add a row for each kind of attention, in the first way of exchanging keys that is legal."""
    fed, blocks = finder.trial.fed, finder.trial.blocks
    names = [
        parent for flow in flows(fed.uses, blocks) if flow.mixed
        for parent in [_parent((*flow.sources, *flow.sinks))] if parent in blocks.named
    ]  # fmt: skip
    for method in METHODS:
        call = f"context_parallel({method}, over={finder.axis})"
        made = finder.mended([Row((name,), call, "each rank has some tokens") for name in names])
        if names and isinstance(made, list):
            refused = finder.trial.by_tokens(made, finder.axis, finder.ranks)
            if refused is None:
                finder.rows += made
            else:  # another way to exchange keys would not help: the model counts by itself
                told = refused.diagnostic
                finder.notes += [f"not sharded along the sequence: {told.title}", *told.notes]
            return
        if names and method == METHODS[-1]:
            finder.notes.append(f"not sharded along the sequence: {made}")


def _parent(names: Sequence[str]) -> str:
    """The module that holds all of these."""
    return ".".join(os.path.commonprefix([name.split(".")[:-1] for name in names]))
