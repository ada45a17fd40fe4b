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
        recorded, dim = _record(CHOOSING_CALLS[func], out, args, kwargs)
        if recorded is None:
            return out
        moment = self._moment()
        choice = self._hold(moment, len(self.found[moment]), recorded) if self._hold else None
        self.found[moment].append(recorded if choice is None else replace(recorded, chosen=choice))
        if choice is None or torch.equal(choice, recorded.chosen):
            return out
        return apply_choice(
            CHOOSING_CALLS[func], out, _shape_choices(choice, out, args, kwargs, dim), args, kwargs
        )

    def _moment(self) -> Moment:
        current = scope.current()
        evaluates = current is None or bool(current.evaluation)
        if current is not None and not evaluates:
            self._run += current.step < self._step
            self._step = current.step
        return self._run, self._step, evaluates

    def gather(self) -> dict[Moment, list[RecordedChoices]]:
        """Gather what all ranks recorded; records of one shape are concatenated."""
        moments: dict[Moment, dict[tuple[int, int], list[RecordedChoices]]] = {}
        for rank_notes in world.all_gather_object(dict(self.found)):
            for moment, notes in rank_notes.items():
                for note in notes:
                    shape = note.scores.shape[-1], note.chosen.shape[-1]
                    moments.setdefault(moment, {}).setdefault(shape, []).append(note)
        return {moment: [*map(_concatenate, shapes.values())] for moment, shapes in moments.items()}


def _concatenate(notes: Sequence[RecordedChoices]) -> RecordedChoices:
    scores = torch.cat([note.scores.double() for note in notes])
    return RecordedChoices(scores, torch.cat([note.chosen for note in notes]))


def _record(
    name: str, out: Any, args: Any, kwargs: Mapping[str, Any]
) -> tuple[RecordedChoices | None, int]:
    """Return scores and chosen indices as rows, and the dim; None if this is not such a choice."""
    inputs = args[0] if args else kwargs["input"]
    chosen = out if isinstance(out, Tensor) else out[1]
    dim_index = 2 if name in ("topk", "kthvalue") else 1
    default_dim = None if name in ("argmax", "argmin") else -1
    dim = kwargs.get("dim", args[dim_index] if len(args) > dim_index else default_dim)
    if isinstance(inputs, DTensor) or isinstance(chosen, DTensor):
        inputs, chosen = _local(inputs), _local(chosen)
    if inputs is None or chosen is None or not isinstance(dim, int) or not inputs.dim():
        return None, 0
    if chosen.is_floating_point() or not 0 < inputs.shape[dim] <= MOST_SCORES:
        return None, 0
    chosen = chosen if chosen.dim() == inputs.dim() else chosen.unsqueeze(dim)
    rows = (tensor.detach().movedim(dim, -1) for tensor in (inputs, chosen))
    scores, places = (tensor.reshape(-1, tensor.shape[-1]).clone() for tensor in rows)
    return RecordedChoices(scores, places), dim


def _local(value: Tensor) -> Tensor | None:
    """Return a tensor's local part; None for a partial DTensor."""
    if not isinstance(value, DTensor):
        return value
    partial = any(placement.is_partial() for placement in value.placements)
    return None if partial else value.to_local()


def _shape_choices(
    choices: Tensor, out: Any, args: Any, kwargs: Mapping[str, Any], dim: int
) -> Tensor:
    """Return choices in rows in the layout of the operator's result."""
    inputs = args[0] if args else kwargs["input"]
    chosen = out if isinstance(out, Tensor) else out[1]
    keeps_dim = chosen.dim() == inputs.dim()
    template = (chosen if keeps_dim else chosen.unsqueeze(dim)).movedim(dim, -1)
    shaped = choices.reshape(template.shape).movedim(-1, dim)
    return shaped if keeps_dim else shaped.squeeze(dim)


# ---- Choices of the original's runs.

ERROR_MARGIN = 1.5  # margin over the largest score error of a few runs
ChoiceSite = tuple[Moment, int]  # a choosing operator: its number in a moment


@dataclass
class ChoiceReplay:
    """Choices of all runs of the original, which follow those of its float64 run.

    ranks         the program's choices by moment, with their scores
    score_errors  how far roundings move the scores of each row; if given, the float64 run chooses
                  as ranks did wherever its scores are no further apart than roundings move two of
                  them
    held_count    number of choices that follow the ranks' against the original's own
    alternatives  alternative choices where roundings decide and ranks do not show one choice
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
        sites = [(m, k) for m, notes in self.exact.found.items() for k in range(len(notes))]
        errors = {site: self._score_error(*site) for site in sites}
        tipped = (bool(_tipped_rows(self.exact.found[m][k], errors[m, k]).any()) for m, k in sites)
        return ChoiceReplay(self.ranks, errors) if any(tipped) else None

    def alternative_mode(self, draw: int | None) -> ChoiceRecorder:
        """Return the mode of a run that takes all alternatives."""

        def hold(moment: Moment, number: int, recorded: RecordedChoices) -> Tensor | None:
            choices = self._as_exact(moment, number, recorded)
            for row, chosen in self.alternatives.get((moment, number), {}).items():
                choices = recorded.chosen.clone() if choices is None else choices.clone()
                choices[row] = chosen
            return choices

        return ChoiceRecorder(hold)

    def facts(self) -> list[tuple[str, str]]:
        """Return the report's fact about how many choices follow the ranks'."""
        count = sum(len(note.chosen) for notes in self.exact.found.values() for note in notes)
        text = f"{self.held_count} of {count} as ranks made them: roundings tip these"
        return [("choices", text)] if self.held_count else []

    def _score_error(self, moment: Moment, number: int) -> Tensor:
        recorded, largest = self.exact.found[moment][number], torch.zeros(())
        for draw in self.draws:
            notes = draw.found.get(moment, [])
            if number < len(notes) and notes[number].scores.shape == recorded.scores.shape:
                error = (notes[number].scores.double() - recorded.scores.double()).abs().amax(-1)
                largest = torch.maximum(largest, ERROR_MARGIN * error.nan_to_num(0.0, 0.0, 0.0))
        return largest.expand(len(recorded.scores))

    def _as_exact(self, moment: Moment, number: int, recorded: RecordedChoices) -> Tensor | None:
        notes = self.exact.found.get(moment, [])
        alike = number < len(notes) and notes[number].chosen.shape == recorded.chosen.shape
        return notes[number].chosen if alike else None

    def _as_ranks(self, moment: Moment, number: int, recorded: RecordedChoices) -> Tensor | None:
        """Return the ranks' choices for rows whose scores are equal but for roundings."""
        errors, notes = self.score_errors.get((moment, number)), self.ranks.get(moment, ())
        if errors is None or errors.shape != recorded.scores.shape[:1]:
            return None
        if moment[-1] and not notes:
            return None  # ranks recorded no evaluation
        notes = [note for note in notes if note.scores.shape[-1] == recorded.scores.shape[-1]]
        chosen, scores = recorded.chosen.clone(), recorded.scores.double()
        for row in _tipped_rows(recorded, errors).nonzero().flatten().tolist():
            reach = float(errors[row])
            choices = _rank_choices(scores[row], chosen[row], notes, reach)
            if len(choices) > 1 or not notes:
                other = choices[1] if choices else _swap_nearest(scores[row], chosen[row], reach)
                self.alternatives.setdefault((moment, number), {})[row] = other
            if choices:
                self.held_count += not torch.equal(choices[0], chosen[row])
                chosen[row] = choices[0]
        return chosen


def _tipped_rows(recorded: RecordedChoices, errors: Tensor) -> Tensor:
    """Return the rows in which a chosen score is within a rounding's reach of another score."""
    values, order = recorded.scores.double().sort(-1)
    is_chosen = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, recorded.chosen, True)
    is_chosen = is_chosen.gather(-1, order)
    close = values.diff(dim=-1) <= 2 * errors.unsqueeze(-1)
    return (close & (is_chosen[:, 1:] | is_chosen[:, :-1])).any(-1)


def _rank_choices(
    scores: Tensor, chosen: Tensor, notes: Sequence[RecordedChoices], reach: float
) -> list[Tensor]:
    """Return what ranks chose for scores equal to these but for roundings, the nearest first.

    Two choices are returned if an equally near row chose otherwise. Rows with other scores, and
    choices that no rounding explains, are skipped.
    """
    candidates = []
    for one in notes:
        gaps = (one.scores - scores).abs().amax(-1)
        candidates += [(float(gaps[k]), one.chosen[k]) for k in (gaps <= reach).nonzero().flatten()]
    candidates.sort(key=lambda pair: pair[0])
    accepted: list[Tensor] = []
    for gap, indices in candidates:
        if accepted and gap > 2 * candidates[0][0]:
            break
        if indices.shape != chosen.shape or any(torch.equal(indices, one) for one in accepted):
            continue
        if bool(((scores[indices] - scores[chosen]).abs() <= 2 * reach).all()):
            accepted.append(indices)
    return accepted


def _swap_nearest(scores: Tensor, chosen: Tensor, reach: float) -> Tensor:
    """Replace a chosen score by the nearest score that is not chosen, if roundings reach it."""
    not_chosen = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, chosen, False)
    gaps = (scores[chosen].unsqueeze(-1) - scores).abs().masked_fill(~not_chosen, math.inf)
    position, replacement = divmod(int(gaps.argmin()), len(scores))
    swapped = chosen.clone()
    if float(gaps[position, replacement]) <= 2 * reach:
        swapped[position] = replacement
    return swapped


def drop_ambiguous_rows(rows: Sequence[Row], varied: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Drop rows that fail by no more than alternative choices explain; return the rest and a note.

    `varied` are the rows of the original itself with the alternative choices, for the same
    bounds.
    """
    errors = {(row.condition, row.kind, row.name, row.step): row.error for row in varied}
    ambiguous = []
    for row in rows:
        error = errors.get((row.condition, row.kind, row.name, row.step), 0.0)
        if not row.ok and row.kind.endswith(IN_DTYPE) and not row.error > 1.0 + 2.0 * error:
            ambiguous.append(row)
    if not ambiguous:
        return list(rows), []
    reason = "choices that roundings tip are made at no known place on ranks"
    text = f"{len(ambiguous)} rows in the working dtype, the first {ambiguous[0].place}: {reason}"
    return [row for row in rows if row not in ambiguous], [text]
