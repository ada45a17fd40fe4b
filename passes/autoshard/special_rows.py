"""The rows that spread experts, sequences, tables of tokens and output layers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from schedlang.passes.complete.proposal_text import Row
from schedlang.passes.complete.tensor_rows import Finder, flows, outputs_of
from schedlang.passes.reduce_model.blocks import PROJECTIONS, Blocks, leaf_kind

# ---- The rows that spread experts, and that split sequences between attention modules.


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
        parent
        for flow in flows(fed.uses, blocks)
        if flow.mixed
        for parent in [_parent((*flow.sources, *flow.sinks))]
        if parent in blocks.named
    ]
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


# ---- The rows that split a model's tables of tokens and its output layers over one axis.


PADDED, LARGE = 128, 4096  # rows are padded to what kernels like where there are many


def vocabulary_rows(finder: Finder) -> None:
    """Add rows for tables and output layers; note those that stay whole."""
    tables, heads = _found(finder)
    if not tables:
        return
    over = f"over={finder.axis}"
    facts = finder.trial.blocks.facts
    tied = {name for names in facts.ties for name in names}
    table = [Row((n,), f"shard(vocab, {over})", "split by rows") for n in tables]
    split = [Row((n,), f"shard(vocab, {over})", _loss(f"{n}.weight" in tied)) for n in heads]
    gathered = [Row((n,), f"shard(col, output=R, {over})", "logits are gathered") for n in heads]
    pads, why = _pads(finder, (*tables, *heads)), ""
    for tried, left in (
        ([*table, *split], ()),
        ([*table, *gathered], ()),
        (table, heads),
        (gathered, tables),
    ):
        made = finder.mended([*_needed(pads, tried, finder), *tried])
        if isinstance(made, list):
            finder.rows += made
            if left:
                finder.whole(left, why)
            elif tried[-1:] == gathered[-1:] and why:
                finder.notes.append(f"gathered: {', '.join(heads)}: {why}")
            return
        why = why or made
    finder.whole((*tables, *heads), why)


def bag_rows(finder: Finder) -> None:
    """Add rows for bags of embeddings, each by its rows, else by its columns; note the others."""
    sites = finder.trial.blocks.facts.sites
    bags = [fqn for fqn in finder.trial.fed.uses if leaf_kind(sites[fqn]) == "EmbeddingBag"]
    order, known = list(sites), len(finder.rows)
    for name in sorted(bags, key=order.index):
        why = ""
        for how, said in (("vocab", "split by rows"), ("col, output=R", "split by columns")):
            row = Row((name,), f"shard({how}, over={finder.axis})", said)
            pads = _pads(finder, [name]) if how == "vocab" else []
            made = finder.mended([*pads, row])
            if isinstance(made, list):
                finder.rows += made
                break
            why = why or made
        else:
            finder.whole([name], why)
    added = finder.rows[known:]
    finder.rows[known:] = sorted(added, key=lambda row: not row.call.startswith("pad("))


def _loss(tied: bool) -> str:
    return "the same weight; logits stay split" if tied else "logits stay split"


def _found(finder: Finder) -> tuple[list[str], list[str]]:
    """The embeddings with the most rows outside of blocks, and layers of as many outputs."""
    blocks = finder.trial.blocks
    sites = blocks.facts.sites
    outside = [fqn for fqn in finder.trial.fed.uses if not blocks.inside(fqn)]
    rows = {
        fqn: sites[fqn].parameters["weight"].shape[0]
        for fqn in outside
        if leaf_kind(sites[fqn]) == "Embedding"
    }
    most = max(rows.values(), default=0)
    heads = [
        fqn
        for fqn in outside
        if leaf_kind(sites[fqn]) in PROJECTIONS and outputs_of(sites[fqn]) == most
    ]
    return [fqn for fqn, count in rows.items() if count == most], heads


def _pads(finder: Finder, names: Sequence[str]) -> list[Row]:
    """A row for each weight whose rows do not divide; tied ones once."""
    facts, ranks = finder.trial.blocks.facts, finder.ranks
    out: list[Row] = []
    seen: set[str] = set()
    for name in names:
        site = facts.sites[name]
        weight = site.parameters["weight"]
        dim = "vocab" if "vocab" in site.dims["weight"] else "out"
        size = weight.shape[site.dims["weight"].index(dim)]
        if size % ranks and weight.name not in seen:
            seen.add(weight.name)
            multiple = PADDED if PADDED % ranks == 0 and size > LARGE else ranks
            said = f"{size} rows do not divide by {ranks}"
            out.append(Row((name,), f"pad({dim}, multiple={multiple})", said))
    return out


def _needed(pads: Sequence[Row], rows: Sequence[Row], finder: Finder) -> list[Row]:
    """The padding of weights that some of these rows split."""
    facts = finder.trial.blocks.facts

    def weights(of: Sequence[Row]) -> set[str]:
        return {facts.sites[row.names[0]].parameters["weight"].name for row in of}

    return [pad for pad in pads if weights([pad]) <= weights(rows)]
