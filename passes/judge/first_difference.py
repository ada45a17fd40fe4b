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
from schedlang.passes.judge import gradient_terms, module_calls, module_comparison
from schedlang.passes.judge.discrete_choices import ChoiceRecorder, RecordedChoices
from schedlang.passes.judge.explanations import INITIAL, FirstModule
from schedlang.passes.judge.gradient_terms import GradientTape
from schedlang.passes.judge.low_dtype import model_dtype, rounding_mode
from schedlang.passes.judge.low_dtype_comparison import LowDtypeComparison
from schedlang.passes.judge.module_inputs import (
    RankCall,
    RankOutputs,
    change_batches,
    explain_dependence,
    explain_inputs,
)
from schedlang.passes.judge.rank_copies import RankCopy
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.subject import ProgramSubject
from schedlang.passes.judge.trial import RankTask, Trial
from schedlang.passes.localize.diagnosis import is_close
from schedlang.passes.verify.conditioning import IN_DTYPE, PerturbedRounding
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import Sequential, count_rows
from schedlang.passes.verify.proof_case import copy_original
from schedlang.report import Report
from schedlang.runtime.isolated_modules import CallFrame
from schedlang.runtime.launch.pool import Hang, RankDied, use_threads_of_ranks
from schedlang.runtime.modes import enter_modes

MOST_STORED = 1 << 20  # elements that a rank stores
LEAST_ELEMENTS = 8  # nonzero elements that an explanation needs
RTOL = 1e-9


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor that a rank's function took or returned, and its gradient."""

    value: Tensor
    gradient: Tensor


class TensorRecorder(GradientTape):
    """Tape that also records the values of tensors with some shapes."""

    def __init__(self, wanted: frozenset[torch.Size]) -> None:
        super().__init__()
        self.wanted, self.space = wanted, MOST_STORED
        self.values: dict[int, Tensor] = {}

    def watch(self, tensor: Tensor) -> None:
        """Record a tensor's value, and its gradient when backward computes it."""
        size = tensor.numel()
        asked = tensor.shape in self.wanted and not tensor.is_leaf and size <= self.space
        if asked and id(tensor) not in self.gradients and not isinstance(tensor, DTensor):
            self.space -= size
            self.values[id(tensor)] = tensor.detach().clone()
        super().watch(tensor)

    @property
    def notes(self) -> list[RecordedTensor]:
        """The recorded tensors that have a gradient, in order."""
        pairs = ((value, self.gradients[key]) for key, value in self.values.items())
        return [RecordedTensor(value, gradient) for value, gradient in pairs if gradient.numel()]


def output_shapes(tape: GradientTape) -> frozenset[torch.Size]:
    """Return the shapes of all function results in a step."""
    return frozenset(one.shape for call in tape.calls for one in call.outputs)


def explain_unmasked(tape: GradientTape, ranks: Sequence[Sequence[RecordedTensor]]) -> str:
    """Explain a gradient whose elements are right on one rank each, and not zero on others."""
    if len(ranks) < 2:
        return ""
    for call in reversed(tape.calls):
        for tensor in call.outputs:
            want = tape.gradient(tensor)
            if want is None or int((want != 0).sum()) < LEAST_ELEMENTS:
                continue
            value = tensor.detach()
            if any(t._version != v for t, v in call.inputs):
                continue
            for gradients in _match_gradients(value, ranks):
                if _is_owned(want, gradients):
                    return (
                        f"the gradient of what {call.name} gives: each element is right on one "
                        "rank, but others add something there, where zero is due: what they "
                        "compute for elements that are not theirs is not masked in backward"
                    )
    return ""


def _match_gradients(
    value: Tensor, ranks: Sequence[Sequence[RecordedTensor]]
) -> Iterator[list[Tensor]]:
    """Yield the ranks' gradients of a value: the first of each rank, then the second."""
    each = [
        [
            note.gradient
            for note in notes
            if note.value.shape == value.shape and is_close(note.value, value)
        ]
        for notes in ranks
    ]
    for one in zip(*each):
        yield list(one)


def _is_owned(want: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether each element is right on exactly one rank, and some rank adds to others'."""
    near = RTOL * float(want.abs().max())
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
class FirstStep:
    """The first step of a trial under one condition, to be run repeatedly.

    `choices` are the choices of the original's discrete operators, by number.
    """

    trial: Trial
    choices: Sequence[RecordedChoices] = ()

    @property
    def batch(self) -> Batch:
        """The batch of the step."""
        return self.trial.conditions[0].batches[0]

    def record_original(
        self, batch: Batch, *modes: Any, live: bool = False, taken: bool = False
    ) -> module_calls.RecordedStep:
        """Run and record the original's step; `live` and `taken` as in
        `module_calls.record_step`."""
        case = self.trial.case
        subject = Sequential(copy_original(case), loss=case.loss, follow=False)
        with enter_modes(*self._replay_choices(), *self.trial.modes, *modes):
            run = module_calls.record_step(
                dict(subject.module.named_modules()),
                lambda: subject.forward_backward(batch, range(count_rows(batch))),
                live=live,
                taken=taken,
            )
        if live:
            run.parameters.update(subject.module.named_parameters())
        return run

    def _replay_choices(self) -> Iterator[ChoiceRecorder]:
        def hold(_: Any, number: int, noted: RecordedChoices) -> Tensor | None:
            right = self.choices[number].chosen if number < len(self.choices) else noted.chosen
            return right if right.shape == noted.chosen.shape else None

        if self.choices:
            yield ChoiceRecorder(hold)

    def make_comparison(self, dtype: str | None) -> module_comparison.ValueComparison:
        """Run the original, and return the comparison for ranks' values."""
        if dtype is None:
            return module_comparison.ValueComparison(self.record_original(self.batch))
        exact = replace(self, trial=self.trial.in_float64)

        def run(draw: int) -> module_calls.RecordedStep:
            nudged = PerturbedRounding(draw) if draw else contextlib.nullcontext()
            with use_threads_of_ranks(self.trial.world), nudged, rounding_mode(dtype)():
                return self.record_original(self.batch)

        eps = torch.finfo(getattr(torch, model_dtype(dtype))).eps
        return LowDtypeComparison(exact.record_original(exact.batch), run, eps)

    def run_on_ranks(self, part: Callable[..., Any], *more: Any) -> list[Any]:
        """Call a function on all ranks."""
        return self.trial.run_on_ranks(part, *more)


def find_first_module(
    trial: Trial,
    conditions: Sequence[Condition],
    report: Report,
    record: RunRecord,
    dtype: str | None = None,
    chosen: ChoiceRecorder | None = None,
) -> FirstModule:
    """Find the first module that is wrong in the first step; empty if it cannot be found.

    Nothing is searched in a program that starts from other weights. The given conditions have the
    report's names; those of the trial have the ranks' names. In a low dtype the discrete operators
    repeat the chosen indices.
    """
    wrong = [row for row in report.rows if not row.ok]
    if any(row.kind == INITIAL for row in wrong):
        return FirstModule()
    of_a_step = [row for row in wrong if row.kind.removesuffix(IN_DTYPE) in _STEP_KINDS]
    first = next((row for row in of_a_step if row.step == 0), None)
    if first is None:
        return FirstModule()
    place = next(k for k, one in enumerate(conditions) if one.name == first.condition)
    asked = trial.conditions[place]
    one = replace(asked, batches=asked.batches[:1])
    noted = () if chosen is None else chosen.found.get((place, 0, False), ())
    step = FirstStep(replace(trial, conditions=(one,), quiet=True), noted)
    try:
        looks, ranks = step.make_comparison(dtype), step.run_on_ranks(_record_modules)
    except _FAILURES:
        return FirstModule()
    followed = module_comparison.StepComparison(looks, ranks, {"ranks": trial.world})
    turns, factors = followed.microbatches_and_factors()
    cut = followed.rank_rows(count_rows(step.batch))
    mine = (row for row in of_a_step if (row.condition, row.step) == (first.condition, 0))
    kinds = {row.kind.removesuffix(IN_DTYPE) for row in mine}
    found = _first_leading(step, followed, forward=bool(kinds & {"loss", "training outputs"}))
    if found is None:
        return FirstModule("", turns, factors, cut)
    if trial.float64 and not found.pattern.explains:
        with contextlib.suppress(*_FAILURES):
            wrong_ones = [row for row in of_a_step if row.step == 0 and row.kind == "gradients"]
            copies = {
                row.name: record.gradient_copies(first.condition, row.name) for row in wrong_ones
            }
            found = replace(found, cause=found.cause or _explain(step, found, copies))
    how = found.pattern.explains or bool(found.cause)
    return FirstModule(found.text, turns, factors, cut, how)


def _first_leading(
    step: FirstStep, followed: module_comparison.StepComparison, forward: bool
) -> module_comparison.Difference | None:
    """Return the first difference that leads to another difference, or a wrong loss."""
    passed: set[module_calls.OutputKey] = set()
    run = None
    while True:
        found = followed.first_difference(forward, passed)
        if found is None or found.is_gradient or not step.trial.float64:
            return found
        run = run or step.record_original(step.batch, live=True)
        later = followed.right_after(found.at)
        if not any(
            _leads_to(run.autograd_outputs[found.at], run.autograd_outputs[one]) for one in later
        ):
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


Copies = Mapping[str, Sequence[RankCopy]]  # ranks' copies of gradients, by parameter


def _explain(step: FirstStep, found: module_comparison.Difference, copies: Copies) -> str:
    """Explain a wrong output or gradient without a known pattern."""
    if found.is_gradient:
        return _explain_gradient(step, found, copies)
    return _explain_inputs(step, found) or _explain_output(step, found)


# ---- A gradient: its terms.


def _explain_gradient(step: FirstStep, found: module_comparison.Difference, copies: Copies) -> str:
    tape = gradient_terms.GradientTape()
    run = step.record_original(step.batch, tape, live=True)
    got = [
        gradient_terms.RankGradient(p.rank, p.value.reshape(-1), p.places.reshape(-1))
        for p in found.parts
        if p.places is not None
    ]
    with enter_modes(*step.trial.modes[:-1]):
        said = (
            gradient_terms.explain_by_terms(tape, run.autograd_outputs[found.at], got)
            if got
            else ""
        )
        said = said or _explain_parameters(tape, run, copies)
    if said or step.trial.world < 2:
        return said
    return explain_unmasked(tape, step.run_on_ranks(_record_tensors, output_shapes(tape)))


def _explain_parameters(
    tape: gradient_terms.GradientTape, run: module_calls.RecordedStep, copies: Copies
) -> str:
    """Explain the first parameter gradient whose terms are known."""
    for name, held in [*copies.items()][:MOST_PARAMETERS]:
        got = [
            gradient_terms.RankGradient(c.rank, c.values, c.places)
            for c in held
            if c.values is not None
        ]
        if got and name in run.parameters:
            said = gradient_terms.explain_by_terms(tape, run.parameters[name], got)
            if said:
                return f"{said} (it gives the gradient of `{name}`)"
    return ""


# ---- An output: its module's inputs, and the positions that it depends on.


def _explain_inputs(step: FirstStep, found: module_comparison.Difference) -> str:
    """Explain a wrong output by its module's inputs: another order, or other rows."""
    frame, _ = found.at
    right = step.record_original(step.batch, taken=True).calls[frame].outputs
    seen = step.run_on_ranks(_record_calls, [step.batch], _frames_by_rank(found), True)
    ranks = [RankCall(p.rank, seen[p.rank][0].get(p.frame, ()), p.value) for p in found.parts]
    module = dict(step.trial.case.plan.model.model.named_modules())[frame[0]]

    def again(value: Tensor) -> Tensor | None:
        if len(right) > 1 or any(module.children()):
            return None
        with enter_modes(*step.trial.modes[:-1]), torch.no_grad(), contextlib.suppress(*_FAILURES):
            made = module(value)
            return made if isinstance(made, Tensor) else None
        return None

    return explain_inputs(right, ranks, again)


def _explain_output(step: FirstStep, found: module_comparison.Difference) -> str:
    """Explain a wrong output by the positions that it depends on."""
    frame, k = found.at
    for made in change_batches(step.batch):
        batches = [step.batch, *(one.batch for one in made)]
        right = [step.record_original(batch).calls[frame].outputs[k] for batch in batches]
        if all(torch.equal(one, right[0]) for one in right) or right[0].dim() < 2:
            continue
        if right[0].shape[1] != batches[0][made[0].source].shape[1]:
            continue
        ranks = step.run_on_ranks(_record_calls, batches, _frames_by_rank(found))
        parts = [
            RankOutputs([one[part.frame][part.output] for one in ranks[part.rank]], there)
            for part in found.parts
            if (there := module_comparison.find_rows(part, found.anchors, right[0].shape))
            is not None
        ]
        return explain_dependence(right, parts, made)
    return ""


def _frames_by_rank(found: module_comparison.Difference) -> dict[int, set[CallFrame]]:
    """Return the calls that a difference is about, by rank."""
    asked: dict[int, set[CallFrame]] = {}
    for part in found.parts:
        asked.setdefault(part.rank, set()).add(part.frame)
    return asked


# ---- Functions that run on ranks.


@contextlib.contextmanager
def _program(task: RankTask) -> Iterator[ProgramSubject]:
    """Yield this rank's program, under the modes of its step."""
    with task.prepare(RunRecord()) as (dropping, made), enter_modes(*task.modes, dropping):
        yield made(task.conditions[0])


def _record_modules(task: RankTask) -> tuple[module_calls.RecordedStep, dict[str, str]]:
    """Record this rank's step, and map its module names to the original's."""
    with _program(task) as judged:
        named = judged.named_modules()
        run = module_calls.record_settled_step(
            named, lambda: judged.forward_backward(task.conditions[0].batches[0])
        )
    names = {name: judged.original_module(name) for name in named}
    return run, {name: meant for name, meant in names.items() if meant is not None}


def _record_tensors(task: RankTask, wanted: frozenset[torch.Size]) -> list[RecordedTensor]:
    """Record the tensors of this rank's step with some shapes, and their gradients."""
    with _program(task) as judged, enter_modes(noting := TensorRecorder(wanted)):
        judged.forward_backward(task.conditions[0].batches[0])
    return noting.notes


def _record_calls(
    task: RankTask,
    batches: Sequence[Batch],
    wanted: Mapping[int, set[CallFrame]],
    taken: bool = False,
) -> list[dict[CallFrame, list[Tensor]]]:
    """Return outputs (or inputs) of requested calls on this rank, for each batch."""
    found = []
    with _program(task) as judged:
        named, mine = judged.named_modules(), wanted.get(judged.rank, set())
        asked = {name: named[name] for name, _ in mine}
        for batch in batches:
            run = module_calls.record_step(
                asked, partial(judged.forward_backward, batch), taken=taken
            )
            found.append({frame: run.calls[frame].outputs for frame in mine & run.calls.keys()})
    return found
