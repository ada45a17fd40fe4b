"""Inputs of a module whose output is wrong: parts in another order, or rows of several batches.

The module itself may be right. What each rank gives it is looked up by its numbers in what the
original gives it; a sentence says where that lies, and is said only where it is not as it should.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from schedlang.passes.judge.places import Whole, placed
from schedlang.passes.localize.diagnose import fits

MOST = 12  # places that are listed


@dataclass(frozen=True, eq=False)
class Taken:
    """A rank's call beside the original's: its inputs, and its output."""

    rank: int
    values: Sequence[Tensor]
    output: Tensor


def misgiven(
    right: Sequence[Tensor],
    ranks: Sequence[Taken],
    again: Callable[[Tensor], Tensor | None],
) -> str:
    """Say which of what ranks take is in another order, or of other rows; "" if nothing is.

    again  what the original's module makes of another tensor; None where that cannot be told
    """
    same = [one for one in ranks if len(one.values) == len(right)]
    for place, want in enumerate(right):
        whole = Whole(want)
        found = [(one, one.values[place], placed(one.values[place], whole)) for one in same]
        said: dict[str, list[int]] = {}
        for one, value, there in found:
            if text := _order(value, there, whole, partial(_makes, again, one.output)):
                said.setdefault(text, []).append(one.rank)
        if said:
            each = (f"{text} (rank {', '.join(map(str, on))})" for text, on in said.items())
            return f"what it takes {'; '.join(each)}"
        known = {one: there for one, _, there in found if there is not None}
        if text := _other_rows(known, want.shape):
            return text
    return ""


def _makes(again: Callable[[Tensor], Tensor | None], output: Tensor, value: Tensor) -> bool:
    made = again(value)
    return made is not None and made.shape == output.shape and fits(output, made)


def _order(
    value: Tensor, there: Tensor | None, whole: Whole, makes: Callable[[Tensor], bool]
) -> str:
    """Say in which order a rank has what it takes, if that is not the original's.

    Features (the last dim) may lie in any order, as weights do: there the module must show it.
    """
    if there is None:
        mixed = value.numel() > 1 and _among(value, whole.values)
        said = "has the right numbers at other places: a reshape mixes dims, or parts are misplaced"
        return said if mixed else ""
    for dim, size in enumerate(there.shape):
        line = there.movedim(dim, 0).reshape(size, -1)[:, 0]
        if size < 2 or bool((line.diff() > 0).all()):
            continue
        if dim == there.dim() - 1 and not makes(value):
            continue
        places = _varying(line, whole.values.shape)
        return f"holds along dim {dim} the places {_listed(places)} of what is right"
    return ""


def _among(value: Tensor, whole: Tensor) -> bool:
    """Whether all numbers are some of the whole's, and many of these are different ones: no ids."""
    known = torch.unique(whole)
    if 2 * len(known) < whole.numel() or bool((known == known.round()).all()):
        return False
    near = 1e-9 * float(known.abs().max())
    at = torch.searchsorted(known, value.reshape(-1) - near).clamp(max=len(known) - 1)
    return bool(((known[at] - value.reshape(-1)).abs() <= 2 * near).all())


def _varying(line: Tensor, shape: torch.Size) -> list[int]:
    """The places of a line along the dim in which they differ."""
    return next(
        (one.tolist() for one in torch.unravel_index(line, shape) if len(torch.unique(one)) > 1),
        line.tolist(),
    )


def _listed(places: Sequence[int]) -> str:
    more = ", ..." if len(places) > MOST else ""
    return f"[{', '.join(map(str, places[:MOST]))}{more}]"


def _other_rows(ranks: Mapping[Taken, Tensor], shape: torch.Size) -> str:
    """Say that ranks give one thing together, and take other rows, or other words, for it."""
    for first in ranks:
        group = [one for one in ranks if one.output.shape == first.output.shape]
        group = [one for one in group if fits(one.output, first.output)]
        for dim, word in ((0, "rows"), (1, "words")):
            if dim >= len(shape) or len(group) < 2:
                continue
            mine = {one: _indices(ranks[one], shape, dim) for one in group}
            if len(set(mine.values())) > 1 and all(len(i) < shape[dim] for i in mine.values()):
                who = " and ".join(f"rank {one.rank} {_listed(i)}" for one, i in mine.items())
                return (
                    f"ranks compute it together, and have other {word} there ({who}): "
                    "those that share one copy of the model must read the same batch"
                )
    return ""


def _indices(there: Tensor, shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(torch.unique(torch.unravel_index(there.reshape(-1), shape)[dim]).tolist())
