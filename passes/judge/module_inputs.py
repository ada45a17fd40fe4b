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
    original = batch[name]
    count = original.shape[1]
    for position in torch.linspace(0, count - 1, min(count, MOST_PLACES)).round().long().tolist():
        value = original.clone()
        if original.is_floating_point():
            value[:, position] += 1
        else:  # another value that the batch contains
            distinct = torch.unique(original)
            indices = torch.searchsorted(distinct, original[:, position].contiguous())
            value[:, position] = distinct[(indices + 1) % len(distinct)]
        yield ChangedBatch(name, position, {**batch, name: value})


@dataclass(frozen=True)
class RankOutputs:
    """Outputs of a module on a rank, for the given batch and each changed one.

    `rows` are the flat indices of the outputs' rows (of the first two dims) in the original's.
    """

    outputs: Sequence[Tensor]
    rows: Tensor


def explain_dependence(
    expected: Sequence[Tensor], parts: Sequence[RankOutputs], batches: Sequence[ChangedBatch]
) -> str:
    """Explain outputs that depend on wrong positions of an input, or do not depend on right ones.

    `expected` and each part hold the output for the given batch, then for each changed batch. The
    second dim of the output is the position.
    """
    full = _relative_changes(expected)
    length = expected[0].shape[1]
    extra: set[tuple[int, int]] = set()
    lacking: set[tuple[int, int]] = set()
    for part in parts:
        changed, required = _relative_changes(part.outputs), full[:, part.rows.reshape(-1)]
        places = part.rows.reshape(-1) % length
        for collected, pairs in (
            (extra, (changed > DEPENDENT) & (required == 0)),
            (lacking, (required > DEPENDENT) & (changed <= INDEPENDENT)),
        ):
            for change, row in pairs.nonzero().tolist():
                collected.add((int(places[row]), batches[change].place))
    source = batches[0].source
    if extra and lacking:
        order = _find_order(
            full, [(_relative_changes(p.outputs), p.rows.reshape(-1)) for p in parts], batches
        )
        text = f"{_describe_pairs(extra, source, 'depends')} and not on what the original's does"
        return f"{text}: {order or 'words are in another order, or another mask is used'}"
    texts = []
    if extra:
        text = f"{_describe_pairs(extra, source, 'depends')}, where the original's does not"
        texts.append(f"{text}: a mask lets through too much")
    if lacking:
        text = f"{_describe_pairs(lacking, source, 'does not depend')}, where the original's does"
        texts.append(f"{text}: something is masked or missing")
    return "; ".join(texts)


def _find_order(
    full: Tensor, parts: Sequence[tuple[Tensor, Tensor]], batches: Sequence[ChangedBatch]
) -> str:
    """Return the order of positions that explains all dependences; "" if there is none."""
    depends = torch.cat([changes > DEPENDENT for changes, _ in parts], 1)
    required = torch.cat([full[:, rows] > DEPENDENT for _, rows in parts], 1)
    order = []
    for column in required:  # find the place with the same dependences
        matches = [k for k, candidate in enumerate(depends) if torch.equal(candidate, column)]
        if len(matches) != 1:
            return ""
        order.append(batches[matches[0]].place)
    return f"it has the words in the order {order}" if len(set(order)) == len(order) else ""


def _relative_changes(outputs: Sequence[Tensor]) -> Tensor:
    """Return by change and row how far an output moves, relative to its largest element."""
    original = outputs[0]
    scale = float(original.abs().max()) or 1.0
    rows = original.shape[0] * original.shape[1]
    gaps = [(output - original).abs().reshape(rows, -1).amax(1) for output in outputs[1:]]
    return torch.stack(gaps) / scale


def _describe_pairs(pairs: set[tuple[int, int]], source: str, verb: str) -> str:
    position, source_position = min(pairs)
    count = f" ({len(pairs)} such pairs)" if len(pairs) > 1 else ""
    return f"place {position} {verb} on place {source_position} of `{source}`{count}"


MOST_LISTED = 12  # places in a sentence


@dataclass(frozen=True, eq=False)
class RankCall:
    """A rank's call that matches one of the original: its inputs and its output."""

    rank: int
    inputs: Sequence[Tensor]
    output: Tensor


def explain_inputs(
    expected: Sequence[Tensor], ranks: Sequence[RankCall], run: Callable[[Tensor], Tensor | None]
) -> str:
    """Explain inputs of ranks in another order, or of other rows; "" if all are right.

    `run` returns the original module's output for another input; None if that is unknown.
    """
    alike = [call for call in ranks if len(call.inputs) == len(expected)]
    for k, original in enumerate(expected):
        full = FullTensor(original)
        located = [(call, call.inputs[k], find_elements(call.inputs[k], full)) for call in alike]
        groups: dict[str, list[int]] = {}
        for call, value, places in located:
            if text := _describe_order(value, places, full, partial(_reproduces, run, call.output)):
                groups.setdefault(text, []).append(call.rank)
        if groups:
            texts = (f"{text} (rank {', '.join(map(str, on))})" for text, on in groups.items())
            return f"what it takes {'; '.join(texts)}"
        places_by_call = {call: places for call, _, places in located if places is not None}
        if text := _explain_other_rows(places_by_call, original.shape):
            return text
    return ""


def _reproduces(run: Callable[[Tensor], Tensor | None], output: Tensor, value: Tensor) -> bool:
    result = run(value)
    return result is not None and result.shape == output.shape and is_close(output, result)


def _describe_order(
    value: Tensor, found_places: Tensor | None, full: FullTensor, makes: Callable[[Tensor], bool]
) -> str:
    """Describe the order of a rank's input, if that is not the original's.

    Features (the last dim) may have any order, as weights have: `makes` must show that it is wrong.
    """
    if found_places is None:
        mixed = value.numel() > 1 and _occurs_in(value, full.values)
        text = "has the right numbers at other places: a reshape mixes dims, or parts are misplaced"
        return text if mixed else ""
    for dim, size in enumerate(found_places.shape):
        line = found_places.movedim(dim, 0).reshape(size, -1)[:, 0]
        if size < 2 or bool((line.diff() > 0).all()):
            continue
        if dim == found_places.dim() - 1 and not makes(value):
            continue
        places = _varying_indices(line, full.values.shape)
        return f"holds along dim {dim} the places {_format_places(places)} of what is right"
    return ""


def _occurs_in(value: Tensor, full: Tensor) -> bool:
    """Return whether all values occur in `full`, and `full` has many distinct values (no ids)."""
    distinct = torch.unique(full)
    if 2 * len(distinct) < full.numel() or bool((distinct == distinct.round()).all()):
        return False
    tolerance = 1e-9 * float(distinct.abs().max())
    index = torch.searchsorted(distinct, value.reshape(-1) - tolerance).clamp(max=len(distinct) - 1)
    return bool(((distinct[index] - value.reshape(-1)).abs() <= 2 * tolerance).all())


def _varying_indices(line: Tensor, shape: torch.Size) -> list[int]:
    """Return the indices of a line of places along the dim in which they differ."""
    return next(
        (axis.tolist() for axis in torch.unravel_index(line, shape) if len(torch.unique(axis)) > 1),
        line.tolist(),
    )


def _format_places(places: Sequence[int]) -> str:
    ellipsis = ", ..." if len(places) > MOST_LISTED else ""
    return f"[{', '.join(map(str, places[:MOST_LISTED]))}{ellipsis}]"


def _explain_other_rows(ranks: Mapping[RankCall, Tensor], shape: torch.Size) -> str:
    """Report ranks that compute the same output from different rows or positions."""
    for reference in ranks:
        group = [call for call in ranks if call.output.shape == reference.output.shape]
        group = [call for call in group if is_close(call.output, reference.output)]
        for dim, noun in ((0, "rows"), (1, "words")):
            if dim >= len(shape) or len(group) < 2:
                continue
            parts = {call: _distinct_indices(ranks[call], shape, dim) for call in group}
            if len(set(parts.values())) > 1 and all(len(i) < shape[dim] for i in parts.values()):
                holders = " and ".join(
                    f"rank {call.rank} {_format_places(i)}" for call, i in parts.items()
                )
                return (
                    f"ranks compute it together, and have other {noun} there ({holders}): "
                    "those that share one copy of the model must read the same batch"
                )
    return ""


def _distinct_indices(places: Tensor, shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(torch.unique(torch.unravel_index(places.reshape(-1), shape)[dim]).tolist())
