"""Dependence of an output on places of a batch: it shows what a lost mask lets through.

Places (words) of an input are changed one after the other, for all rows alike, and the step is run
again on both sides. A dependence that only one side has is said; nothing else is concluded from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schedlang.passes.verify.observe import Batch

MOST_PLACES, MOST_INPUTS = 32, 3
CLEAR, NONE = 1e-6, 1e-12  # of the largest number: a dependence, and none


@dataclass(frozen=True)
class Changed:
    """A batch in which one place of an input is another."""

    source: str
    place: int
    batch: Batch


def changes(batch: Batch) -> list[list[Changed]]:
    """Change places of each input that has some, by input."""
    inputs = [name for name, value in batch.items() if _has_places(value)]
    return [list(_of_input(batch, name)) for name in inputs[:MOST_INPUTS]]


def _has_places(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] < 2:
        return False
    return value.is_floating_point() or len(torch.unique(value)) > 2  # two: a mask


def _of_input(batch: Batch, name: str) -> Iterator[Changed]:
    given = batch[name]
    count = given.shape[1]
    for place in torch.linspace(0, count - 1, min(count, MOST_PLACES)).round().long().tolist():
        value = given.clone()
        if given.is_floating_point():
            value[:, place] += 1
        else:  # another number of the batch's own
            known = torch.unique(given)
            at = torch.searchsorted(known, given[:, place].contiguous())
            value[:, place] = known[(at + 1) % len(known)]
        yield Changed(name, place, {**batch, name: value})


@dataclass(frozen=True)
class Part:
    """Outputs of a module on a rank, for the batch as it is and each changed; its `rows`."""

    outputs: Sequence[Tensor]
    rows: Tensor


def seen_otherwise(right: Sequence[Tensor], parts: Sequence[Part], made: Sequence[Changed]) -> str:
    """Say which places of an output depend on what they should not, or do not on what they should.

    `right` and each part have the output for the batch as it is, and for each that is changed. The
    output has the places of the input as its second dim.
    """
    whole = _moved(right)
    length = right[0].shape[1]
    more: set[tuple[int, int]] = set()
    less: set[tuple[int, int]] = set()
    for part in parts:
        moved, there = _moved(part.outputs), whole[:, part.rows.reshape(-1)]
        places = part.rows.reshape(-1) % length
        for found, pairs in (
            (more, (moved > CLEAR) & (there == 0)),
            (less, (there > CLEAR) & (moved <= NONE)),
        ):
            for change, row in pairs.nonzero().tolist():
                found.add((int(places[row]), made[change].place))
    source = made[0].source
    if more and less:
        order = _order(whole, [(_moved(p.outputs), p.rows.reshape(-1)) for p in parts], made)
        text = f"{_pairs(more, source, 'depends')} and not on what the original's does"
        return f"{text}: {order or 'words are in another order, or another mask is used'}"
    said = []
    if more:
        text = f"{_pairs(more, source, 'depends')}, where the original's does not"
        said.append(f"{text}: a mask lets through too much")
    if less:
        text = f"{_pairs(less, source, 'does not depend')}, where the original's does"
        said.append(f"{text}: something is masked or missing")
    return "; ".join(said)


def _order(whole: Tensor, parts: Sequence[tuple[Tensor, Tensor]], made: Sequence[Changed]) -> str:
    """Say in which order words are taken, if with it all depends as the original's does."""
    moved = torch.cat([found > CLEAR for found, _ in parts], 1)
    there = torch.cat([whole[:, rows] > CLEAR for _, rows in parts], 1)
    order = []
    for column in there:  # the place of which another depends as on this one
        same = [k for k, one in enumerate(moved) if torch.equal(one, column)]
        if len(same) != 1:
            return ""
        order.append(made[same[0]].place)
    return f"it has the words in the order {order}" if len(set(order)) == len(order) else ""


def _moved(outputs: Sequence[Tensor]) -> Tensor:
    """Tell by change and row how far an output moves, in parts of its largest number."""
    first = outputs[0]
    scale = float(first.abs().max()) or 1.0
    rows = first.shape[0] * first.shape[1]
    gaps = [(one - first).abs().reshape(rows, -1).amax(1) for one in outputs[1:]]
    return torch.stack(gaps) / scale


def _pairs(pairs: set[tuple[int, int]], source: str, verb: str) -> str:
    place, other = min(pairs)
    count = f" ({len(pairs)} such pairs)" if len(pairs) > 1 else ""
    return f"place {place} {verb} on place {other} of `{source}`{count}"
