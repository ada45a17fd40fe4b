"""Find the first wrong module of a failing step, and the cause of its wrong output or gradient.

Both sides run the step again with recording hooks. One cause is specific: elements that several
ranks compute and one rank owns, where the others' gradients must be zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge import calls, modules, terms
from schedlang.passes.judge.choices import Choosing, Noted
from schedlang.passes.judge.copies import Copy
from schedlang.passes.judge.kinds import INITIAL, Located
from schedlang.passes.judge.record import Kept
from schedlang.passes.judge.rounded import kept_in, rounding
from schedlang.passes.judge.subject import Judged
from schedlang.passes.judge.taken import Part, Taken, changes, misgiven, seen_otherwise
from schedlang.passes.judge.terms import Tape
from schedlang.passes.judge.trial import Given, Trial
from schedlang.passes.judge.within import Within
from schedlang.passes.localize.diagnose import fits
from schedlang.passes.verify.conditioning import IN_DTYPE, Nudged
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import Sequential, rows
from schedlang.passes.verify.sides import twin
from schedlang.report import Report
from schedlang.runtime.isolated import Frame
from schedlang.runtime.launch.pool import Hang, RankDied, threads_of_ranks
from schedlang.runtime.modes import ambient

MOST = 1 << 20  # elements that a rank stores
FEWEST = 8  # nonzero elements that an explanation needs
CLOSE = 1e-9


@dataclass(frozen=True)
class Note:
    """A tensor that a rank's function took or returned, and its gradient."""

    value: Tensor
    gradient: Tensor


class Noting(Tape):
    """Tape that also records the values of tensors with some shapes."""

    def __init__(self, wanted: frozenset[torch.Size]) -> None:
        super().__init__()
        self.wanted, self.left = wanted, MOST
        self.values: dict[int, Tensor] = {}

    def watch(self, tensor: Tensor) -> None:
        """Record a tensor's value, and its gradient when backward computes it."""
        size = tensor.numel()
        asked = tensor.shape in self.wanted and not tensor.is_leaf and size <= self.left
        if asked and id(tensor) not in self.gradients and not isinstance(tensor, DTensor):
            self.left -= size
            self.values[id(tensor)] = tensor.detach().clone()
        super().watch(tensor)

    @property
    def notes(self) -> list[Note]:
        """The recorded tensors that have a gradient, in order."""
        pairs = ((value, self.gradients[key]) for key, value in self.values.items())
        return [Note(value, gradient) for value, gradient in pairs if gradient.numel()]


def shapes(tape: Tape) -> frozenset[torch.Size]:
    """Return the shapes of all function results in a step."""
    return frozenset(one.shape for call in tape.calls for one in call.outputs)


def unmasked(tape: Tape, ranks: Sequence[Sequence[Note]]) -> str:
    """Explain a gradient whose elements are right on one rank each, and not zero on others."""
    if len(ranks) < 2:
        return ""
    for call in reversed(tape.calls):
        for tensor in call.outputs:
            want = tape.gradient(tensor)
            if want is None or int((want != 0).sum()) < FEWEST:
                continue
            value = tensor.detach()
            if any(t._version != v for t, v in call.given):
                continue
            for gradients in _match_gradients(value, ranks):
                if _is_owned(want, gradients):
                    return (
                        f"the gradient of what {call.name} gives: each element is right on one "
                        "rank, but others add something there, where zero is due: what they "
                        "compute for elements that are not theirs is not masked in backward"
                    )
    return ""


def _match_gradients(value: Tensor, ranks: Sequence[Sequence[Note]]) -> Iterator[list[Tensor]]:
    """Yield the ranks' gradients of a value: the first of each rank, then the second."""
    each = [
        [
            note.gradient
            for note in notes
            if note.value.shape == value.shape and fits(note.value, value)
        ]
        for notes in ranks
    ]
    for one in zip(*each):
        yield list(one)


def _is_owned(want: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether each element is right on exactly one rank, and some rank adds to others'."""
    near = CLOSE * float(want.abs().max())
    there = want.abs() > near
    right = [(one - want).abs() <= near for one in gradients]
    count = torch.stack(right).sum(0)
    others = [there & ~ok & (one.abs() > near) for one, ok in zip(gradients, right)]
    return (
        bool((count[there] == 1).all())
        and all(bool((ok & there).any()) for ok in right)
        and any(bool(one.any()) for one in others)
    )


MOST_PARAMETERS = 8
_STEP_KINDS = ("training outputs", "loss", "gradients", "replicas")
_FAILURES = (Refusal, RankDied, Hang, RuntimeError)  # a step may fail under hooks


@dataclass(frozen=True)
class Step:
    """The first step of a trial under one condition, to be run repeatedly.

    `chosen` are the choices of the original's discrete operators, by number.
    """

    trial: Trial
    chosen: Sequence[Noted] = ()

    @property
    def batch(self) -> Batch:
        """The batch of the step."""
        return self.trial.conditions[0].batches[0]

    def original(
        self, batch: Batch, *modes: Any, live: bool = False, taken: bool = False
    ) -> calls.Run:
        """Run and record the original's step; `live` and `taken` as in `calls.followed`."""
        case = self.trial.case
        subject = Sequential(twin(case), loss=case.loss, follow=False)
        with ambient(*self._replay_choices(), *self.trial.modes, *modes):
            run = calls.followed(
                dict(subject.module.named_modules()),
                lambda: subject.derive(batch, range(rows(batch))),
                live=live,
                taken=taken,
            )
        if live:
            run.parameters.update(subject.module.named_parameters())
        return run

    def _replay_choices(self) -> Iterator[Choosing]:
        def hold(_: Any, number: int, noted: Noted) -> Tensor | None:
            right = self.chosen[number].chosen if number < len(self.chosen) else noted.chosen
            return right if right.shape == noted.chosen.shape else None

        if self.chosen:
            yield Choosing(hold)

    def looks(self, dtype: str | None) -> modules.Exact:
        """Run the original, and return the comparison for ranks' values."""
        if dtype is None:
            return modules.Exact(self.original(self.batch))
        exact = replace(self, trial=self.trial.exact)

        def run(draw: int) -> calls.Run:
            nudged = Nudged(draw) if draw else contextlib.nullcontext()
            with threads_of_ranks(self.trial.world), nudged, rounding(dtype)():
                return self.original(self.batch)

        eps = torch.finfo(getattr(torch, kept_in(dtype))).eps
        return Within(exact.original(exact.batch), run, eps)

    def on_ranks(self, part: Callable[..., Any], *more: Any) -> list[Any]:
        """Call a function on all ranks."""
        return self.trial.on_ranks(part, *more)


def located(
    trial: Trial,
    conditions: Sequence[Condition],
    report: Report,
    record: Kept,
    dtype: str | None = None,
    chosen: Choosing | None = None,
) -> Located:
    """Find the first module that is wrong in the first step; empty if it cannot be found.

    Nothing is searched in a program that starts from other weights. The given conditions have the
    report's names; those of the trial have the ranks' names. In a low dtype the discrete operators
    repeat the chosen indices.
    """
    wrong = [row for row in report.rows if not row.ok]
    if any(row.kind == INITIAL for row in wrong):
        return Located()
    of_a_step = [row for row in wrong if row.kind.removesuffix(IN_DTYPE) in _STEP_KINDS]
    first = next((row for row in of_a_step if row.step == 0), None)
    if first is None:
        return Located()
    place = next(k for k, one in enumerate(conditions) if one.name == first.condition)
    asked = trial.conditions[place]
    one = replace(asked, batches=asked.batches[:1])
    noted = () if chosen is None else chosen.found.get((place, 0, False), ())
    step = Step(replace(trial, conditions=(one,), aside=True), noted)
    try:
        looks, ranks = step.looks(dtype), step.on_ranks(_record_modules)
    except _FAILURES:
        return Located()
    followed = modules.Followed(looks, ranks, {"ranks": trial.world})
    turns, factors = followed.turns_and_factors()
    cut = followed.rows(rows(step.batch))
    mine = (row for row in of_a_step if (row.condition, row.step) == (first.condition, 0))
    kinds = {row.kind.removesuffix(IN_DTYPE) for row in mine}
    found = _first_leading(step, followed, forward=bool(kinds & {"loss", "training outputs"}))
    if found is None:
        return Located("", turns, factors, cut)
    if trial.wide and not found.pattern.how:
        with contextlib.suppress(*_FAILURES):
            wrong_ones = [row for row in of_a_step if row.step == 0 and row.kind == "gradients"]
            copies = {row.name: record.of(first.condition, row.name) for row in wrong_ones}
            found = replace(found, because=found.because or _explain(step, found, copies))
    how = found.pattern.how or bool(found.because)
    return Located(found.text, turns, factors, cut, how)


def _first_leading(step: Step, followed: modules.Followed, forward: bool) -> modules.Found | None:
    """Return the first difference that leads to another difference, or a wrong loss."""
    passed: set[calls.At] = set()
    run = None
    while True:
        found = followed.first_difference(forward, passed)
        if found is None or found.back or not step.trial.wide:
            return found
        run = run or step.original(step.batch, live=True)
        later = followed.right_after(found.at)
        if not any(_leads_to(run.live[found.at], run.live[one]) for one in later):
            return found
        passed.add(found.at)


def _leads_to(first: Tensor, last: Tensor) -> bool:
    """Return whether `last` was computed from `first`, by the autograd graph."""
    seen, waiting = set(), [last.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
    return first.grad_fn in seen


Copies = Mapping[str, Sequence[Copy]]  # ranks' copies of gradients, by parameter


def _explain(step: Step, found: modules.Found, copies: Copies) -> str:
    """Explain a wrong output or gradient without a known pattern."""
    if found.back:
        return _explain_gradient(step, found, copies)
    return _explain_inputs(step, found) or _explain_output(step, found)


# ---- A gradient: its terms.


def _explain_gradient(step: Step, found: modules.Found, copies: Copies) -> str:
    tape = terms.Tape()
    run = step.original(step.batch, tape, live=True)
    got = [
        terms.Got(p.rank, p.value.reshape(-1), p.places.reshape(-1))
        for p in found.parts
        if p.places is not None
    ]
    with ambient(*step.trial.modes[:-1]):
        said = terms.made_of(tape, run.live[found.at], got) if got else ""
        said = said or _explain_parameters(tape, run, copies)
    if said or step.trial.world < 2:
        return said
    return unmasked(tape, step.on_ranks(_record_tensors, shapes(tape)))


def _explain_parameters(tape: terms.Tape, run: calls.Run, copies: Copies) -> str:
    """Explain the first parameter gradient whose terms are known."""
    for name, held in [*copies.items()][:MOST_PARAMETERS]:
        got = [terms.Got(c.rank, c.values, c.places) for c in held if c.values is not None]
        if got and name in run.parameters:
            said = terms.made_of(tape, run.parameters[name], got)
            if said:
                return f"{said} (it gives the gradient of `{name}`)"
    return ""


# ---- An output: its module's inputs, and the positions that it depends on.


def _explain_inputs(step: Step, found: modules.Found) -> str:
    """Explain a wrong output by its module's inputs: another order, or other rows."""
    frame, _ = found.at
    right = step.original(step.batch, taken=True).calls[frame].outputs
    seen = step.on_ranks(_record_calls, [step.batch], _frames_by_rank(found), True)
    ranks = [Taken(p.rank, seen[p.rank][0].get(p.frame, ()), p.value) for p in found.parts]
    module = dict(step.trial.case.plan.model.model.named_modules())[frame[0]]

    def again(value: Tensor) -> Tensor | None:
        if len(right) > 1 or any(module.children()):
            return None
        with ambient(*step.trial.modes[:-1]), torch.no_grad(), contextlib.suppress(*_FAILURES):
            made = module(value)
            return made if isinstance(made, Tensor) else None
        return None

    return misgiven(right, ranks, again)


def _explain_output(step: Step, found: modules.Found) -> str:
    """Explain a wrong output by the positions that it depends on."""
    frame, k = found.at
    for made in changes(step.batch):
        batches = [step.batch, *(one.batch for one in made)]
        right = [step.original(batch).calls[frame].outputs[k] for batch in batches]
        if all(torch.equal(one, right[0]) for one in right) or right[0].dim() < 2:
            continue
        if right[0].shape[1] != batches[0][made[0].source].shape[1]:
            continue
        ranks = step.on_ranks(_record_calls, batches, _frames_by_rank(found))
        parts = [
            Part([one[part.frame][part.k] for one in ranks[part.rank]], there)
            for part in found.parts
            if (there := modules.rows_of(part, found.anchors, right[0].shape)) is not None
        ]
        return seen_otherwise(right, parts, made)
    return ""


def _frames_by_rank(found: modules.Found) -> dict[int, set[Frame]]:
    """Return the calls that a difference is about, by rank."""
    asked: dict[int, set[Frame]] = {}
    for part in found.parts:
        asked.setdefault(part.rank, set()).add(part.frame)
    return asked


# ---- Functions that run on ranks.


@contextlib.contextmanager
def _program(task: Given) -> Iterator[Judged]:
    """Yield this rank's program, under the modes of its step."""
    with task.ready(Kept()) as (dropping, made), ambient(*task.modes, dropping):
        yield made(task.conditions[0])


def _record_modules(task: Given) -> tuple[calls.Run, dict[str, str]]:
    """Record this rank's step, and map its module names to the original's."""
    with _program(task) as judged:
        named = judged.named_modules()
        run = calls.settled(named, lambda: judged.derive(task.conditions[0].batches[0]))
    names = {name: judged.original_module(name) for name in named}
    return run, {name: meant for name, meant in names.items() if meant is not None}


def _record_tensors(task: Given, wanted: frozenset[torch.Size]) -> list[Note]:
    """Record the tensors of this rank's step with some shapes, and their gradients."""
    with _program(task) as judged, ambient(noting := Noting(wanted)):
        judged.derive(task.conditions[0].batches[0])
    return noting.notes


def _record_calls(
    task: Given,
    batches: Sequence[Batch],
    wanted: Mapping[int, set[Frame]],
    taken: bool = False,
) -> list[dict[Frame, list[Tensor]]]:
    """Return outputs (or inputs) of requested calls on this rank, for each batch."""
    found = []
    with _program(task) as judged:
        named, mine = judged.named_modules(), wanted.get(judged.rank, set())
        asked = {name: named[name] for name, _ in mine}
        for batch in batches:
            run = calls.followed(asked, partial(judged.derive, batch), taken=taken)
            found.append({frame: run.calls[frame].outputs for frame in mine & run.calls.keys()})
    return found
