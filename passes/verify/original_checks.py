"""Check that the original can be compared: a trainable parameter, finite loss, finite gradients.

If the original's loss is not finite, so is every program's, and nothing can be proven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal, quote_names
from schedlang.passes.verify.observe import Batch, Condition, Observation
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.proof_case import Case, original_subject
from schedlang.runtime.batch import named_tensors
from schedlang.runtime.tracing.meta_runs import tensors_in

_MOST_NAMES = 3  # names in a message
_TRAIN = "train at least one parameter: `requires_grad_(True)`"
_UNBOUND = (
    "an unbounded derivative, such as that of `sqrt` at 0 behind a `where`: replace its input, not "
    "its output"
)


def check_finite(case: Case, conditions: Sequence[Condition], observed: Observation) -> None:
    """Refuse batches on which the original trains without a finite loss or gradient (S707).

    `observed` is the original's observation in float64. The first condition has the batches as
    given.
    """
    tensors = {k: v for k, v in observed.tensors.items() if k.condition == conditions[0].name}
    for key, value in tensors.items():
        if key.kind in ("loss", "gradients") and value is not None and not _finite(value):
            check_batch(case, key.step)
            quantity = "loss" if key.kind == "loss" else f"gradient of `{key.name}`"
            raise Refusal.of(
                "S707",
                f"the original's {quantity} is not finite in step {key.step + 1}",
                notes=(
                    "with the initial weights it is finite on the same batch: steps of SGD "
                    "with a learning rate of 0.01 made it so, in float64, without any schedule",
                ),
                helps=("scale the batches or the loss, so that a few such steps stay finite",),
            )


def check_trainable(case: Case) -> Case:
    """Refuse a model that no step changes (S710); else return the case."""
    parameters = list(case.plan.model.model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise Refusal.of(
            "S710",
            "no parameter of the original is trained",
            notes=(
                f"none of its {len(parameters)} requires a gradient: there are no steps, "
                "gradients or updates to compare",
            ),
            helps=(_TRAIN,),
        )
    return case


def check_batch(case: Case, index: int) -> None:
    """Refuse a batch on which the original's loss or gradients are not finite (S707)."""
    batch = case.batches[index]
    watched = _run_watched(case, batch)
    nonfinite = [name for name, grad in watched.gradients.items() if not _finite(grad)]
    if math.isfinite(watched.loss) and not nonfinite:
        return
    if math.isfinite(watched.loss):
        title = "the original's gradients are not finite"
        names_text = quote_names(nonfinite, _MOST_NAMES)
        cause = f"the loss is {watched.loss:.4g}, and the gradient of {names_text} is not finite"
        helps = [_UNBOUND]
    else:
        title = f"the original's loss is {watched.loss}"
        cause, *helps = _cause(case, batch, watched)
    batch_text = (
        f"batch {index + 1} of {len(case.batches)}" if len(case.batches) > 1 else "the batch"
    )
    context_text = f"on {batch_text}, in float64, in one process, without the schedule"
    raise Refusal.of("S707", title, notes=(cause, context_text), helps=tuple(helps))


@dataclass
class _Look:
    """One forward and backward of the original: loss, gradients, first place of NaN or inf."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    first: str | None = None  # place and number of elements


def _run_watched(case: Case, batch: Batch) -> _Look:
    watched = _Look()
    with original_subject(case) as subject:
        for name, child in subject.module.named_modules():
            if name:
                child.register_forward_hook(_watch_module(watched, name))
        watched.loss = float(subject.forward_backward(batch, range(count_rows(batch))))
        gradients = subject.gradients()
    watched.gradients = {name: grad for name, grad in gradients.items() if grad is not None}
    return watched


def _watch_module(watched: _Look, name: str) -> Any:
    """Make a hook that records the first NaN or inf in inputs or outputs; masks may hold -inf."""

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        for label, value in (("the input of", inputs), ("the output of", output)):
            for tensor in tensors_in(value) if watched.first is None else ():
                if count := int((tensor.isnan() | (tensor == math.inf)).sum()):
                    watched.first = f"{label} `{name}`: {count} of {tensor.numel()} elements"

    return note


def _cause(case: Case, batch: Batch, watched: _Look) -> Iterator[str]:
    """Yield why a loss is not finite, then what to do."""
    tensors: Mapping[str, Tensor] = named_tensors(batch)
    nonfinite = [name for name, value in tensors.items() if not _finite(value)]
    if nonfinite:
        value = tensors[nonfinite[0]]
        count = int((~value.isfinite()).sum())
        names_text = quote_names(nonfinite, _MOST_NAMES)
        yield f"{names_text} of the batch: {count} of {value.numel()} elements are not finite"
        yield "fix the code that makes the batch, or leave such rows out"
        return
    rules = case.prepared.traced.labels if case.prepared is not None else ()
    empty = [rule for rule in rules if rule.count(batch) == 0]
    if empty:
        rule = empty[0]
        yield (
            f"no label of `{rule.source}` counts, all are {rule.ignore_index}: "
            "a mean over none is 0 / 0"
        )
        yield "leave out batches without a label that counts, as they train nothing"
        yield "or return a loss of 0 if there are no labels"
        return
    if watched.first is not None:
        yield f"it arises first in {watched.first} are not finite"
        yield "fix the model, or give it a batch on which it is finite"
        return
    yield "the outputs of all modules are finite: it arises in the loss, or between modules"
    yield "fix the loss, or give it a batch on which it is finite"


def _finite(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or bool(value.isfinite().all())
