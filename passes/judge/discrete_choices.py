"""Discrete choices (top-k and similar) that a rounding may change, in a low dtype.

A model that routes tokens to the best experts is another function where two scores are so close
that a rounding changes the choice; no error bound covers that. So all runs of the original choose
as its float64 run does. Where ranks choose otherwise, and the scores differ by no more than
roundings move them, the original runs again with the ranks' choices. Rows of scores identify
tokens, so nothing is assumed about how ranks divide rows or name modules.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from schedlang.passes.verify.conditioning import IN_DTYPE
from schedlang.report import Row
from schedlang.runtime import scope
from schedlang.runtime.comm import world
from schedlang.runtime.modes import AmbientMode
from schedlang.runtime.moe.discrete_choices import CHOOSING_CALLS, apply_choice, takes_floats

MOST_SCORES = 4096  # scores of one choice; no router has more
Moment = tuple[int, int, bool]  # number of the run, step, whether it evaluates


@dataclass(frozen=True)
class RecordedChoices:
    """Scores, one row for each choice, and the indices that were chosen in each row."""

    scores: Tensor
    chosen: Tensor


class ChoiceRecorder(AmbientMode):
    """Mode that records the choices of discrete operators among floats, and may replace them.

    `hold(moment, number, noted)` receives the moment, the number of the operator in that moment,
    and what the operator would choose; it returns other choices, or None. A new run begins when the
    step number falls.
    """

    def __init__(
        self, hold: Callable[[Moment, int, RecordedChoices], Tensor | None] | None = None
    ) -> None:
        super().__init__()
        self.found: dict[Moment, list[RecordedChoices]] = defaultdict(list)
        self._hold, self._run, self._step = hold, 0, -1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self.run(func, types, args, kwargs)
        if func not in CHOOSING_CALLS or not takes_floats(args, kwargs):
            return out
        noted, dim = _record(CHOOSING_CALLS[func], out, args, kwargs)
        if noted is None:
            return out
        here = self._moment()
        right = self._hold(here, len(self.found[here]), noted) if self._hold else None
        self.found[here].append(noted if right is None else replace(noted, chosen=right))
        if right is None or torch.equal(right, noted.chosen):
            return out
        return apply_choice(
            CHOOSING_CALLS[func], out, _shape_choices(right, out, args, kwargs, dim), args, kwargs
        )

    def _moment(self) -> Moment:
        where = scope.current()
        evaluates = where is None or bool(where.evaluation)
        if where is not None and not evaluates:
            self._run += where.step < self._step
            self._step = where.step
        return self._run, self._step, evaluates

    def gather(self) -> dict[Moment, list[RecordedChoices]]:
        """Gather what all ranks recorded; records of one shape are concatenated."""
        found: dict[Moment, dict[tuple[int, int], list[RecordedChoices]]] = {}
        for one in world.all_gather_object(dict(self.found)):
            for moment, notes in one.items():
                for note in notes:
                    shape = note.scores.shape[-1], note.chosen.shape[-1]
                    found.setdefault(moment, {}).setdefault(shape, []).append(note)
        return {moment: [*map(_concatenate, each.values())] for moment, each in found.items()}


def _concatenate(notes: Sequence[RecordedChoices]) -> RecordedChoices:
    scores = torch.cat([one.scores.double() for one in notes])
    return RecordedChoices(scores, torch.cat([one.chosen for one in notes]))


def _record(
    name: str, out: Any, args: Any, kwargs: Mapping[str, Any]
) -> tuple[RecordedChoices | None, int]:
    """Return scores and chosen indices as rows, and the dim; None if this is not such a choice."""
    given = args[0] if args else kwargs["input"]
    chosen = out if isinstance(out, Tensor) else out[1]
    place = 2 if name in ("topk", "kthvalue") else 1
    whole = None if name in ("argmax", "argmin") else -1
    dim = kwargs.get("dim", args[place] if len(args) > place else whole)
    if isinstance(given, DTensor) or isinstance(chosen, DTensor):
        given, chosen = _local(given), _local(chosen)
    if given is None or chosen is None or not isinstance(dim, int) or not given.dim():
        return None, 0
    if chosen.is_floating_point() or not 0 < given.shape[dim] <= MOST_SCORES:
        return None, 0
    chosen = chosen if chosen.dim() == given.dim() else chosen.unsqueeze(dim)
    rows = (one.detach().movedim(dim, -1) for one in (given, chosen))
    scores, places = (one.reshape(-1, one.shape[-1]).clone() for one in rows)
    return RecordedChoices(scores, places), dim


def _local(value: Tensor) -> Tensor | None:
    """Return a tensor's local part; None for a partial DTensor."""
    if not isinstance(value, DTensor):
        return value
    partial = any(one.is_partial() for one in value.placements)
    return None if partial else value.to_local()


def _shape_choices(
    right: Tensor, out: Any, args: Any, kwargs: Mapping[str, Any], dim: int
) -> Tensor:
    """Return choices in rows in the layout of the operator's result."""
    given = args[0] if args else kwargs["input"]
    chosen = out if isinstance(out, Tensor) else out[1]
    kept = chosen.dim() == given.dim()
    like = (chosen if kept else chosen.unsqueeze(dim)).movedim(dim, -1)
    laid = right.reshape(like.shape).movedim(-1, dim)
    return laid if kept else laid.squeeze(dim)


# ---- Choices of the original's runs.

ERROR_MARGIN = 1.5  # margin over the largest score error of a few runs
ChoiceSite = tuple[Moment, int]  # a choosing operator: its number in a moment


@dataclass
class ChoiceReplay:
    """Choices of all runs of the original, which follow those of its float64 run.

    ranks    the program's choices by moment, with their scores
    `score_errors`    how far roundings move the scores of each row; if given, the float64 run
                      chooses as
             ranks did wherever its scores are no further apart than roundings move two of them
    `held_count`   number of choices that follow the ranks' against the original's own
    `alternatives`  alternative choices where roundings decide and ranks do not show one choice
    """

    ranks: Mapping[Moment, Sequence[RecordedChoices]]
    score_errors: Mapping[ChoiceSite, Tensor] = field(default_factory=dict)
    exact: ChoiceRecorder = field(init=False)
    draws: list[ChoiceRecorder] = field(init=False, default_factory=list)
    held_count: int = 0
    alternatives: dict[ChoiceSite, dict[int, Tensor]] = field(default_factory=dict)

    def mode(self, draw: int | None) -> ChoiceRecorder:
        """Return the mode for a run: `draw` None is the float64 run, which must be first."""
        if draw is None:
            self.exact = ChoiceRecorder(self._as_ranks if self.score_errors else None)
            return self.exact
        self.draws.append(ChoiceRecorder(self._as_exact))
        return self.draws[-1]

    def with_rank_choices(self) -> ChoiceReplay | None:
        """Return routes with these runs' score errors; None: no choice depends on roundings."""
        places = [(m, k) for m, notes in self.exact.found.items() for k in range(len(notes))]
        far = {place: self._score_error(*place) for place in places}
        tips = (bool(_tipped_rows(self.exact.found[m][k], far[m, k]).any()) for m, k in places)
        return ChoiceReplay(self.ranks, far) if any(tips) else None

    def alternative_mode(self, draw: int | None) -> ChoiceRecorder:
        """Return the mode of a run that takes all alternatives."""

        def hold(moment: Moment, number: int, noted: RecordedChoices) -> Tensor | None:
            right = self._as_exact(moment, number, noted)
            for row, chosen in self.alternatives.get((moment, number), {}).items():
                right = noted.chosen.clone() if right is None else right.clone()
                right[row] = chosen
            return right

        return ChoiceRecorder(hold)

    def facts(self) -> list[tuple[str, str]]:
        """Return the report's fact about how many choices follow the ranks'."""
        many = sum(len(note.chosen) for notes in self.exact.found.values() for note in notes)
        said = f"{self.held_count} of {many} as ranks made them: roundings tip these"
        return [("choices", said)] if self.held_count else []

    def _score_error(self, moment: Moment, number: int) -> Tensor:
        noted, most = self.exact.found[moment][number], torch.zeros(())
        for draw in self.draws:
            notes = draw.found.get(moment, [])
            if number < len(notes) and notes[number].scores.shape == noted.scores.shape:
                error = (notes[number].scores.double() - noted.scores.double()).abs().amax(-1)
                most = torch.maximum(most, ERROR_MARGIN * error.nan_to_num(0.0, 0.0, 0.0))
        return most.expand(len(noted.scores))

    def _as_exact(self, moment: Moment, number: int, noted: RecordedChoices) -> Tensor | None:
        found = self.exact.found.get(moment, [])
        same = number < len(found) and found[number].chosen.shape == noted.chosen.shape
        return found[number].chosen if same else None

    def _as_ranks(self, moment: Moment, number: int, noted: RecordedChoices) -> Tensor | None:
        """Return the ranks' choices for rows whose scores are equal but for roundings."""
        far, seen = self.score_errors.get((moment, number)), self.ranks.get(moment, ())
        if far is None or far.shape != noted.scores.shape[:1]:
            return None
        if moment[-1] and not seen:
            return None  # ranks recorded no evaluation
        seen = [one for one in seen if one.scores.shape[-1] == noted.scores.shape[-1]]
        right, scores = noted.chosen.clone(), noted.scores.double()
        for row in _tipped_rows(noted, far).nonzero().flatten().tolist():
            most = float(far[row])
            choices = _rank_choices(scores[row], right[row], seen, most)
            if len(choices) > 1 or not seen:
                left = choices[1] if choices else _swap_nearest(scores[row], right[row], most)
                self.alternatives.setdefault((moment, number), {})[row] = left
            if choices:
                self.held_count += not torch.equal(choices[0], right[row])
                right[row] = choices[0]
        return right


def _tipped_rows(noted: RecordedChoices, far: Tensor) -> Tensor:
    """Return the rows in which a chosen score is within a rounding's reach of another score."""
    values, order = noted.scores.double().sort(-1)
    mine = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, noted.chosen, True)
    mine = mine.gather(-1, order)
    near = values.diff(dim=-1) <= 2 * far.unsqueeze(-1)
    return (near & (mine[:, 1:] | mine[:, :-1])).any(-1)


def _rank_choices(
    scores: Tensor, chosen: Tensor, seen: Sequence[RecordedChoices], far: float
) -> list[Tensor]:
    """Return what ranks chose for scores equal to these but for roundings, the nearest first.

    Two choices are returned if an equally near row chose otherwise. Rows with other scores, and
    choices that no rounding explains, are skipped.
    """
    near = []
    for one in seen:
        apart = (one.scores - scores).abs().amax(-1)
        near += [(float(apart[k]), one.chosen[k]) for k in (apart <= far).nonzero().flatten()]
    near.sort(key=lambda pair: pair[0])
    found: list[Tensor] = []
    for gap, theirs in near:
        if found and gap > 2 * near[0][0]:
            break
        if theirs.shape != chosen.shape or any(torch.equal(theirs, one) for one in found):
            continue
        if bool(((scores[theirs] - scores[chosen]).abs() <= 2 * far).all()):
            found.append(theirs)
    return found


def _swap_nearest(scores: Tensor, chosen: Tensor, far: float) -> Tensor:
    """Replace a chosen score by the nearest score that is not chosen, if roundings reach it."""
    left = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, chosen, False)
    gaps = (scores[chosen].unsqueeze(-1) - scores).abs().masked_fill(~left, math.inf)
    place, other = divmod(int(gaps.argmin()), len(scores))
    swapped = chosen.clone()
    if float(gaps[place, other]) <= 2 * far:
        swapped[place] = other
    return swapped


def drop_ambiguous_rows(rows: Sequence[Row], other: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Drop rows that fail by no more than alternative choices explain; return the rest and a note.

    `other` are the rows of the original itself with the alternative choices, for the same
    bounds.
    """
    moved = {(row.condition, row.kind, row.name, row.step): row.error for row in other}
    out = []
    for row in rows:
        error = moved.get((row.condition, row.kind, row.name, row.step), 0.0)
        if not row.ok and row.kind.endswith(IN_DTYPE) and not row.error > 1.0 + 2.0 * error:
            out.append(row)
    if not out:
        return list(rows), []
    why = "choices that roundings tip are made at no known place on ranks"
    said = f"{len(out)} rows in the working dtype, the first {out[0].place}: {why}"
    return [row for row in rows if row not in out], [said]
