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
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.regions import RankCopy
from schedlang.passes.judge.step_draws import SeededSequential
from schedlang.passes.judge.subject import ProgramSubject
from schedlang.passes.judge.tensor_search import FullTensor, find_elements
from schedlang.passes.judge.trial import RankTask, Trial
from schedlang.passes.localize.diagnosis import is_close
from schedlang.passes.verify.conditioning import IN_DTYPE, PerturbedRounding
from schedlang.passes.verify.linear_backward import autograd_nodes
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import count_rows
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

    def __init__(self, shapes: frozenset[torch.Size]) -> None:
        super().__init__()
        self.wanted, self.space = shapes, MOST_STORED
        self.values: dict[int, Tensor] = {}

    def watch(self, tensor: Tensor) -> None:
        """Record a tensor's value, and its gradient when backward computes it."""
        size = tensor.numel()
        is_wanted = tensor.shape in self.wanted and not tensor.is_leaf and size <= self.space
        if is_wanted and id(tensor) not in self.gradients and not isinstance(tensor, DTensor):
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
    return frozenset(output.shape for call in tape.calls for output in call.outputs)


def explain_unmasked(tape: GradientTape, ranks: Sequence[Sequence[RecordedTensor]]) -> str:
    """Explain a gradient whose elements are right on one rank each, and not zero on others."""
    if len(ranks) < 2:
        return ""
    for call in reversed(tape.calls):
        for tensor in call.outputs:
            expected = tape.gradient(tensor)
            if expected is None or int((expected != 0).sum()) < LEAST_ELEMENTS:
                continue
            value = tensor.detach()
            if any(t._version != v for t, v in call.inputs):
                continue
            for gradients in _match_gradients(value, ranks):
                if _is_owned(expected, gradients):
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
    matches = [
        [
            note.gradient
            for note in notes
            if note.value.shape == value.shape and is_close(note.value, value)
        ]
        for notes in ranks
    ]
    for gradients in zip(*matches):
        yield list(gradients)


def _is_owned(expected: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether each element is right on exactly one rank, and some rank adds to others'."""
    tolerance = RTOL * float(expected.abs().max())
    nonzero = expected.abs() > tolerance
    matches = [(grad - expected).abs() <= tolerance for grad in gradients]
    count = torch.stack(matches).sum(0)
    strays = [nonzero & ~ok & (grad.abs() > tolerance) for grad, ok in zip(gradients, matches)]
    return (
        bool((count[nonzero] == 1).all())
        and all(bool((ok & nonzero).any()) for ok in matches)
        and any(bool(grad.any()) for grad in strays)
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
        original = SeededSequential(copy_original(case), loss=case.loss, follow=False)
        with enter_modes(*self._replay_choices(), *self.trial.modes, *modes):
            run = module_calls.record_step(
                dict(original.module.named_modules()),
                lambda: original.forward_backward(batch, range(count_rows(batch))),
                live=live,
                taken=taken,
            )
        if live:
            run.parameters.update(original.module.named_parameters())
        return run

    def _replay_choices(self) -> Iterator[ChoiceRecorder]:
        def hold(_: Any, number: int, recorded: RecordedChoices) -> Tensor | None:
            choices = self.choices[number].chosen if number < len(self.choices) else recorded.chosen
            return choices if choices.shape == recorded.chosen.shape else None

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

    def run_on_ranks(self, part: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on all ranks."""
        return self.trial.run_on_ranks(part, *args)


def find_first_module(
    trial: Trial,
    conditions: Sequence[Condition],
    report: Report,
    record: RunRecord,
    dtype: str | None = None,
    recorder: ChoiceRecorder | None = None,
) -> FirstModule:
    """Find the first module that is wrong in the first step; empty if it cannot be found.

    Nothing is searched in a program that starts from other weights. The given conditions have the
    report's names; those of the trial have the ranks' names. In a low dtype the discrete operators
    repeat the chosen indices.
    """
    failing = [row for row in report.rows if not row.ok]
    if any(row.kind == INITIAL for row in failing):
        return FirstModule()
    step_failures = [row for row in failing if row.kind.removesuffix(IN_DTYPE) in _STEP_KINDS]
    first = next((row for row in step_failures if row.step == 0), None)
    if first is None:
        return FirstModule()
    number = next(k for k, condition in enumerate(conditions) if condition.name == first.condition)
    given_condition = trial.conditions[number]
    condition = replace(given_condition, batches=given_condition.batches[:1])
    recorded = () if recorder is None else recorder.found.get((number, 0, False), ())
    step = FirstStep(replace(trial, conditions=(condition,), quiet=True), recorded)
    try:
        comparison, ranks = step.make_comparison(dtype), step.run_on_ranks(_record_modules)
    except _FAILURES:
        return FirstModule()
    steps = module_comparison.StepComparison(comparison, ranks, {"ranks": trial.world})
    microbatches, factors = steps.microbatches_and_factors()
    rank_rows = steps.rank_rows(count_rows(step.batch))
    same_step = (row for row in step_failures if (row.condition, row.step) == (first.condition, 0))
    kinds = {row.kind.removesuffix(IN_DTYPE) for row in same_step}
    diff = _first_leading(step, steps, forward=bool(kinds & {"loss", "training outputs"}))
    if diff is None:
        return FirstModule("", microbatches, factors, rank_rows)
    if trial.float64 and not diff.pattern.explains:
        with contextlib.suppress(*_FAILURES):
            wrong_rows = [row for row in step_failures if row.step == 0 and row.kind == "gradients"]
            copies = {
                row.name: record.gradient_copies(first.condition, row.name) for row in wrong_rows
            }
            diff = replace(diff, cause=diff.cause or _explain(step, diff, copies))
    explained = diff.pattern.explains or bool(diff.cause)
    return FirstModule(diff.text, microbatches, factors, rank_rows, explained)


def _first_leading(
    step: FirstStep, steps: module_comparison.StepComparison, forward: bool
) -> module_comparison.Difference | None:
    """Return the first difference that leads to another difference, or a wrong loss."""
    passed: set[module_calls.OutputKey] = set()
    run = None
    while True:
        diff = steps.first_difference(forward, passed)
        if diff is None or diff.is_gradient or not step.trial.float64:
            return diff
        run = run or step.record_original(step.batch, live=True)
        later = steps.right_after(diff.at)
        if not any(
            _leads_to(run.autograd_outputs[diff.at], run.autograd_outputs[key]) for key in later
        ):
            return diff
        passed.add(diff.at)


def _leads_to(first: Tensor, last: Tensor) -> bool:
    """Return whether `last` was computed from `first`, by the autograd graph."""
    return last.grad_fn is not None and first.grad_fn in autograd_nodes(last.grad_fn)


Copies = Mapping[str, Sequence[RankCopy]]  # ranks' copies of gradients, by parameter


def _explain(step: FirstStep, diff: module_comparison.Difference, copies: Copies) -> str:
    """Explain a wrong output or gradient without a known pattern."""
    if diff.is_gradient:
        return _explain_gradient(step, diff, copies)
    return _explain_order(step, diff) or _explain_inputs(step, diff) or _explain_output(step, diff)


# ---- A gradient: its terms.


def _explain_gradient(step: FirstStep, diff: module_comparison.Difference, copies: Copies) -> str:
    tape = gradient_terms.GradientTape()
    run = step.record_original(step.batch, tape, live=True)
    grads = [
        gradient_terms.RankGradient(p.rank, p.value.reshape(-1), p.places.reshape(-1))
        for p in diff.parts
        if p.places is not None
    ]
    with enter_modes(*step.trial.modes[:-1]):
        text = (
            gradient_terms.explain_by_terms(tape, run.autograd_outputs[diff.at], grads)
            if grads
            else ""
        )
        text = text or _explain_parameters(tape, run, copies)
    if text or step.trial.world < 2:
        return text
    return explain_unmasked(tape, step.run_on_ranks(_record_tensors, output_shapes(tape)))


def _explain_parameters(
    tape: gradient_terms.GradientTape, run: module_calls.RecordedStep, copies: Copies
) -> str:
    """Explain the first parameter gradient whose terms are known."""
    for name, rank_copies in [*copies.items()][:MOST_PARAMETERS]:
        grads = [
            gradient_terms.RankGradient(c.rank, c.values, c.places)
            for c in rank_copies
            if c.values is not None
        ]
        if grads and name in run.parameters:
            text = gradient_terms.explain_by_terms(tape, run.parameters[name], grads)
            if text:
                return f"{text} (it gives the gradient of `{name}`)"
    return ""


# ---- An output: its module's inputs, and the positions that it depends on.


def _explain_inputs(step: FirstStep, diff: module_comparison.Difference) -> str:
    """Explain a wrong output by its module's inputs: another order, or other rows."""
    frame, _ = diff.at
    expected = step.record_original(step.batch, taken=True).calls[frame].outputs
    recorded = step.run_on_ranks(_record_calls, [step.batch], _frames_by_rank(diff), True)
    ranks = [RankCall(p.rank, recorded[p.rank][0].get(p.frame, ()), p.value) for p in diff.parts]
    module = dict(step.trial.case.plan.model.model.named_modules())[frame[0]]

    def again(value: Tensor) -> Tensor | None:
        if len(expected) > 1 or any(module.children()):
            return None
        with enter_modes(*step.trial.modes[:-1]), torch.no_grad(), contextlib.suppress(*_FAILURES):
            output = module(value)
            return output if isinstance(output, Tensor) else None
        return None

    return explain_inputs(expected, ranks, again)


def _explain_order(step: FirstStep, diff: module_comparison.Difference) -> str:
    """Explain a wrong output by a module of the same kind that takes, on a rank, what this one
    takes in the original."""
    (name, number), _ = diff.at
    modules = dict(step.trial.case.plan.model.model.named_modules())
    kind = type(modules[name])
    alike = [n for n, m in modules.items() if n != name and type(m) is kind]
    calls = step.record_original(step.batch, taken=True).calls
    due = calls[name, number].outputs[:1]
    if not alike or number or not due or not due[0].is_floating_point():
        return ""
    whole = FullTensor(due[0])
    for rank, taken in enumerate(step.run_on_ranks(_record_inputs, frozenset(alike))):
        for other, value in taken.items():
            own = calls[other, 0].outputs if (other, 0) in calls else []
            same_shape = bool(own) and value.shape[1:] == due[0].shape[1:]
            if not same_shape or find_elements(value, whole) is None:
                continue
            if find_elements(value, FullTensor(own[0])) is None:
                here, there = _differing_parts(other, name)
                return (
                    f"`{here}` takes on rank {rank} what `{there}` takes in the original: they run "
                    "in another order, or on the stage of each other"
                )
    return ""


def _differing_parts(a: str, b: str) -> tuple[str, str]:
    """Return two names without the parts at their ends that are equal."""
    first, second = a.split("."), b.split(".")
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join(first), ".".join(second)


def _explain_output(step: FirstStep, diff: module_comparison.Difference) -> str:
    """Explain a wrong output by the positions that it depends on."""
    frame, k = diff.at
    for changes in change_batches(step.batch):
        batches = [step.batch, *(one.batch for one in changes)]
        outputs = [step.record_original(batch).calls[frame].outputs[k] for batch in batches]
        if all(torch.equal(one, outputs[0]) for one in outputs) or outputs[0].dim() < 2:
            continue
        if outputs[0].shape[1] != batches[0][changes[0].source].shape[1]:
            continue
        ranks = step.run_on_ranks(_record_calls, batches, _frames_by_rank(diff))
        parts = [
            RankOutputs([one[part.frame][part.output] for one in ranks[part.rank]], rows)
            for part in diff.parts
            if (rows := module_comparison.find_rows(part, diff.anchors, outputs[0].shape))
            is not None
        ]
        return explain_dependence(outputs, parts, changes)
    return ""


def _frames_by_rank(diff: module_comparison.Difference) -> dict[int, set[CallFrame]]:
    """Return the calls that a difference is about, by rank."""
    frames: dict[int, set[CallFrame]] = {}
    for part in diff.parts:
        frames.setdefault(part.rank, set()).add(part.frame)
    return frames


# ---- Functions that run on ranks.


@contextlib.contextmanager
def _program(task: RankTask) -> Iterator[ProgramSubject]:
    """Yield this rank's program, under the modes of its step."""
    with task.prepare(RunRecord()) as (dropping, make_subject), enter_modes(*task.modes, dropping):
        yield make_subject(task.conditions[0])


def _record_modules(task: RankTask) -> tuple[module_calls.RecordedStep, dict[str, str]]:
    """Record this rank's step, and map its module names to the original's."""
    with _program(task) as subject:
        modules = subject.named_modules()
        run = module_calls.record_settled_step(
            modules, lambda: subject.forward_backward(task.conditions[0].batches[0])
        )
    names = {name: subject.original_module(name) for name in modules}
    return run, {name: original for name, original in names.items() if original is not None}


def _record_inputs(task: RankTask, originals: frozenset[str]) -> dict[str, Tensor]:
    """Record the first input of the first call of modules on this rank, by their original names."""
    with _program(task) as subject:
        names = {name: subject.original_module(name) for name in subject.named_modules()}
        wanted = {n: m for n, m in subject.named_modules().items() if names[n] in originals}
        batch = task.conditions[0].batches[0]
        run = module_calls.record_step(wanted, lambda: subject.forward_backward(batch), taken=True)
    taken = {str(names[name]): call.outputs for (name, k), call in run.calls.items() if k == 0}
    return {name: values[0] for name, values in taken.items() if values}


def _record_tensors(task: RankTask, shapes: frozenset[torch.Size]) -> list[RecordedTensor]:
    """Record the tensors of this rank's step with some shapes, and their gradients."""
    with _program(task) as subject, enter_modes(recorder := TensorRecorder(shapes)):
        subject.forward_backward(task.conditions[0].batches[0])
    return recorder.notes


def _record_calls(
    task: RankTask,
    batches: Sequence[Batch],
    frames: Mapping[int, set[CallFrame]],
    taken: bool = False,
) -> list[dict[CallFrame, list[Tensor]]]:
    """Return outputs (or inputs) of requested calls on this rank, for each batch."""
    outputs = []
    with _program(task) as subject:
        modules, local = subject.named_modules(), frames.get(subject.rank, set())
        called_modules = {name: modules[name] for name, _ in local}
        for batch in batches:
            run = module_calls.record_step(
                called_modules, partial(subject.forward_backward, batch), taken=taken
            )
            outputs.append({frame: run.calls[frame].outputs for frame in local & run.calls.keys()})
    return outputs
