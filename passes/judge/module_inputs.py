"""Explain a module's wrong output by its inputs: another order, other rows, or a wrong mask.

The module itself may be right. Each rank's inputs are looked up by value in the original's inputs;
a sentence is given only if their places are wrong. To find what a mask lets through, batches are
changed at single positions, and the outputs that change are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from schedlang.passes.judge.tensor_search import FullTensor, find_elements
from schedlang.passes.localize.diagnosis import is_close
from schedlang.passes.verify.observe import Batch

MOST_PLACES, MOST_INPUTS = 32, 3
DEPENDENT, INDEPENDENT = 1e-6, 1e-12  # of the largest element


@dataclass(frozen=True)
class ChangedBatch:
    """A batch with a changed value at one position of one input."""

    source: str
    place: int
    batch: Batch


def change_batches(batch: Batch) -> list[list[ChangedBatch]]:
    """Return batches with single changed positions, in a list for each suitable input."""
    inputs = [name for name, value in batch.items() if _has_places(value)]
    return [list(_change_input(batch, name)) for name in inputs[:MOST_INPUTS]]


def _has_places(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] < 2:
        return False
    return value.is_floating_point() or len(torch.unique(value)) > 2  # two values: a mask


def _change_input(batch: Batch, name: str) -> Iterator[ChangedBatch]:
    given = batch[name]
    count = given.shape[1]
    for place in torch.linspace(0, count - 1, min(count, MOST_PLACES)).round().long().tolist():
        value = given.clone()
        if given.is_floating_point():
            value[:, place] += 1
        else:  # another value that the batch contains
            known = torch.unique(given)
            at = torch.searchsorted(known, given[:, place].contiguous())
            value[:, place] = known[(at + 1) % len(known)]
        yield ChangedBatch(name, place, {**batch, name: value})


@dataclass(frozen=True)
class RankOutputs:
    """Outputs of a module on a rank, for the given batch and each changed one.

    `rows` are the flat indices of the outputs' rows (of the first two dims) in the original's.
    """

    outputs: Sequence[Tensor]
    rows: Tensor


def explain_dependence(
    right: Sequence[Tensor], parts: Sequence[RankOutputs], made: Sequence[ChangedBatch]
) -> str:
    """Explain outputs that depend on wrong positions of an input, or do not depend on right ones.

    `right` and each part hold the output for the given batch, then for each changed batch. The
    second dim of the output is the position.
    """
    full = _relative_changes(right)
    length = right[0].shape[1]
    more: set[tuple[int, int]] = set()
    less: set[tuple[int, int]] = set()
    for part in parts:
        moved, there = _relative_changes(part.outputs), full[:, part.rows.reshape(-1)]
        places = part.rows.reshape(-1) % length
        for found, pairs in (
            (more, (moved > DEPENDENT) & (there == 0)),
            (less, (there > DEPENDENT) & (moved <= INDEPENDENT)),
        ):
            for change, row in pairs.nonzero().tolist():
                found.add((int(places[row]), made[change].place))
    source = made[0].source
    if more and less:
        order = _find_order(
            full, [(_relative_changes(p.outputs), p.rows.reshape(-1)) for p in parts], made
        )
        text = f"{_describe_pairs(more, source, 'depends')} and not on what the original's does"
        return f"{text}: {order or 'words are in another order, or another mask is used'}"
    said = []
    if more:
        text = f"{_describe_pairs(more, source, 'depends')}, where the original's does not"
        said.append(f"{text}: a mask lets through too much")
    if less:
        text = f"{_describe_pairs(less, source, 'does not depend')}, where the original's does"
        said.append(f"{text}: something is masked or missing")
    return "; ".join(said)


def _find_order(
    full: Tensor, parts: Sequence[tuple[Tensor, Tensor]], made: Sequence[ChangedBatch]
) -> str:
    """Return the order of positions that explains all dependences; "" if there is none."""
    moved = torch.cat([found > DEPENDENT for found, _ in parts], 1)
    there = torch.cat([full[:, rows] > DEPENDENT for _, rows in parts], 1)
    order = []
    for column in there:  # find the place with the same dependences
        same = [k for k, one in enumerate(moved) if torch.equal(one, column)]
        if len(same) != 1:
            return ""
        order.append(made[same[0]].place)
    return f"it has the words in the order {order}" if len(set(order)) == len(order) else ""


def _relative_changes(outputs: Sequence[Tensor]) -> Tensor:
    """Return by change and row how far an output moves, relative to its largest element."""
    first = outputs[0]
    scale = float(first.abs().max()) or 1.0
    rows = first.shape[0] * first.shape[1]
    gaps = [(one - first).abs().reshape(rows, -1).amax(1) for one in outputs[1:]]
    return torch.stack(gaps) / scale


def _describe_pairs(pairs: set[tuple[int, int]], source: str, verb: str) -> str:
    place, other = min(pairs)
    count = f" ({len(pairs)} such pairs)" if len(pairs) > 1 else ""
    return f"place {place} {verb} on place {other} of `{source}`{count}"


MOST_LISTED = 12  # places in a sentence


@dataclass(frozen=True, eq=False)
class RankCall:
    """A rank's call that matches one of the original: its inputs and its output."""

    rank: int
    inputs: Sequence[Tensor]
    output: Tensor


def explain_inputs(
    right: Sequence[Tensor],
    ranks: Sequence[RankCall],
    again: Callable[[Tensor], Tensor | None],
) -> str:
    """Explain inputs of ranks in another order, or of other rows; "" if all are right.

    `again` returns the original module's output for another input; None if that is unknown.
    """
    same = [one for one in ranks if len(one.inputs) == len(right)]
    for place, want in enumerate(right):
        full = FullTensor(want)
        found = [(one, one.inputs[place], find_elements(one.inputs[place], full)) for one in same]
        said: dict[str, list[int]] = {}
        for one, value, there in found:
            if text := _describe_order(value, there, full, partial(_reproduces, again, one.output)):
                said.setdefault(text, []).append(one.rank)
        if said:
            each = (f"{text} (rank {', '.join(map(str, on))})" for text, on in said.items())
            return f"what it takes {'; '.join(each)}"
        known = {one: there for one, _, there in found if there is not None}
        if text := _explain_other_rows(known, want.shape):
            return text
    return ""


def _reproduces(again: Callable[[Tensor], Tensor | None], output: Tensor, value: Tensor) -> bool:
    made = again(value)
    return made is not None and made.shape == output.shape and is_close(output, made)


def _describe_order(
    value: Tensor, there: Tensor | None, full: FullTensor, makes: Callable[[Tensor], bool]
) -> str:
    """Describe the order of a rank's input, if that is not the original's.

    Features (the last dim) may have any order, as weights have: `makes` must show that it is wrong.
    """
    if there is None:
        mixed = value.numel() > 1 and _occurs_in(value, full.values)
        said = "has the right numbers at other places: a reshape mixes dims, or parts are misplaced"
        return said if mixed else ""
    for dim, size in enumerate(there.shape):
        line = there.movedim(dim, 0).reshape(size, -1)[:, 0]
        if size < 2 or bool((line.diff() > 0).all()):
            continue
        if dim == there.dim() - 1 and not makes(value):
            continue
        places = _varying_indices(line, full.values.shape)
        return f"holds along dim {dim} the places {_format_places(places)} of what is right"
    return ""


def _occurs_in(value: Tensor, full: Tensor) -> bool:
    """Return whether all values occur in `full`, and `full` has many distinct values (no ids)."""
    known = torch.unique(full)
    if 2 * len(known) < full.numel() or bool((known == known.round()).all()):
        return False
    near = 1e-9 * float(known.abs().max())
    at = torch.searchsorted(known, value.reshape(-1) - near).clamp(max=len(known) - 1)
    return bool(((known[at] - value.reshape(-1)).abs() <= 2 * near).all())


def _varying_indices(line: Tensor, shape: torch.Size) -> list[int]:
    """Return the indices of a line of places along the dim in which they differ."""
    return next(
        (one.tolist() for one in torch.unravel_index(line, shape) if len(torch.unique(one)) > 1),
        line.tolist(),
    )


def _format_places(places: Sequence[int]) -> str:
    more = ", ..." if len(places) > MOST_LISTED else ""
    return f"[{', '.join(map(str, places[:MOST_LISTED]))}{more}]"


def _explain_other_rows(ranks: Mapping[RankCall, Tensor], shape: torch.Size) -> str:
    """Report ranks that compute the same output from different rows or positions."""
    for first in ranks:
        group = [one for one in ranks if one.output.shape == first.output.shape]
        group = [one for one in group if is_close(one.output, first.output)]
        for dim, word in ((0, "rows"), (1, "words")):
            if dim >= len(shape) or len(group) < 2:
                continue
            mine = {one: _distinct_indices(ranks[one], shape, dim) for one in group}
            if len(set(mine.values())) > 1 and all(len(i) < shape[dim] for i in mine.values()):
                who = " and ".join(
                    f"rank {one.rank} {_format_places(i)}" for one, i in mine.items()
                )
                return (
                    f"ranks compute it together, and have other {word} there ({who}): "
                    "those that share one copy of the model must read the same batch"
                )
    return ""


def _distinct_indices(there: Tensor, shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(torch.unique(torch.unravel_index(there.reshape(-1), shape)[dim]).tolist())
