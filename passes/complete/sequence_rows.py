"""Rows of sequence parallelism, over the axis of tensor parallelism.

Activations between blocks are split along the sequence: norms run on a shard of the tokens,
all-reduces become reduce-scatters, and projections gather their inputs. Korthikanti et al.,
Reducing activation recomputation in large transformer models (2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.placement import R, S
from schedlang.passes.complete.proposed_rows import ProposedRow, RowTrial, make_call
from schedlang.passes.reduce_model.blocks import Blocks

SEQUENCE = S("seq")


def sequence_rows(
    trial: RowTrial, rows: Sequence[ProposedRow], axis: str, ranks: int
) -> list[ProposedRow]:
    """Return the rows of tensor parallelism, extended by those of sequence parallelism.

    Raises Refusal S212 where no form of these rows is legal.
    """
    reason = "no block has a projection whose output is all-reduced"
    summing = [row for row in rows if row.style == "row" and trial.blocks.is_inside(row.names[0])]
    for norms in _norms(trial.blocks, rows) if summing else ():
        new_rows = _with_norms(trial.blocks, rows, norms, axis)
        refused = trial.find_refusal(new_rows, axis, ranks)
        if refused is None:
            return new_rows
        reason = refused[0].diagnostic.title
    title = f"activations between blocks cannot be split along the sequence over `{axis}`"
    raise Refusal.of("S212", title, notes=(reason,), helps=("split tensors alone",))


def _norms(blocks: Blocks, rows: Sequence[ProposedRow]) -> Iterator[list[str]]:
    """Yield common names of modules inside blocks whose parameters are all vectors.

    Yields first those that are not siblings of split projections, then all.
    """
    split_names = {name for row in rows for name in row.names}
    parents = {name.rpartition(".")[0] for name in split_names}
    norms = []
    for name, group in blocks.modules_by_name.items():
        shapes = [len(param.shape) for param in blocks.facts.sites[group[0]].parameters.values()]
        if blocks.is_inside(name) and name not in split_names and shapes and max(shapes) == 1:
            norms.append(name)
    outer_norms = [name for name in norms if name.rpartition(".")[0] not in parents]
    yield outer_norms
    if outer_norms != norms:
        yield norms


def _with_norms(
    blocks: Blocks, rows: Sequence[ProposedRow], norms: Sequence[str], axis: str
) -> list[ProposedRow]:
    split = make_call("shard", input=SEQUENCE, output=SEQUENCE, over=axis)
    enter_call = make_call("shard", input=SEQUENCE, over=axis)
    leave_call = make_call("shard", input=SEQUENCE, output=R, over=axis)
    new_rows = [
        row.with_argument("output", SEQUENCE)
        if row.style == "row" and blocks.is_inside(row.names[0])
        else row
        for row in rows
    ]
    upper = [row for row in new_rows if not blocks.is_inside(row.names[0])]
    inner = [row for row in new_rows if blocks.is_inside(row.names[0])]
    for trunk, module_after in _list_ends(blocks):
        block = blocks.facts.children(trunk)[0]
        upper.append(
            ProposedRow(
                (f"{trunk}.{block}",), enter_call, "masks and positions are made of the whole"
            )
        )
        if module_after:
            upper.append(ProposedRow((module_after,), leave_call))
    return [*upper, *(ProposedRow((name,), split, "some tokens") for name in norms), *inner]


def _list_ends(blocks: Blocks) -> Iterator[tuple[str, str]]:
    """Yield each outermost list of blocks, and the first norm after the list ("" without one)."""
    sites = list(blocks.facts.sites)
    for trunk in sorted(blocks.lists, key=lambda name: sites.index(name) if name in sites else 0):
        if "*" in trunk.split("."):
            continue
        later = [name for name in sites[sites.index(trunk) :] if not name.startswith(f"{trunk}")]
        vectors = (
            name
            for name in later
            if (parameters := blocks.facts.sites[name].parameters)
            and max(len(param.shape) for param in parameters.values()) == 1
        )
        yield trunk, next(vectors, "")
