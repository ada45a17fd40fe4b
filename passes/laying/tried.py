"""A model tried on a small stand-in before it trains: how it may run on parts of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from schedlang.diagnostic import Refusal
from schedlang.own_error import OwnError
from schedlang.passes.laying.dryrun import Loss
from schedlang.passes.laying.propagate import Traced
from schedlang.passes.laying.weigh import Weight, weight_of
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.slicing.slice_trial import Trial

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """What is tried: the model of a plan, a microbatch, and a user's own loss and weight."""

    plan: Plan
    traced: Traced
    sample: Mapping[str, Any]
    loss: Loss | None = None
    weight: Weight | None = None

    @property
    def model(self) -> nn.Module:
        """The untouched model."""
        return self.plan.model.model

    def trial(self, count: int, *, short: bool) -> Trial:
        """A stand-in for `count` parts; `short`: of few tokens, and of one block of each kind."""
        from schedlang.runtime.slicing.slice_trial import trial_of

        labels = self.traced.labels
        return trial_of(
            self.model, self.sample, count, loss=self.loss,
            weight=self.weight or weight_by_tokens(self.traced, count),
            rule=labels[0] if len(labels) == 1 else None, random=self.traced.random, short=short,
        )  # fmt: skip


@dataclass(frozen=True)
class Question(Generic[T]):
    """What a trial is to answer.

    guess    the answer for a model without values, untried
    probe    the answer of a trial, or a Refusal
    refusal  of a title and notes, for a model that no trial can run
    """

    guess: Callable[[Trial], T]
    probe: Callable[[Trial], T]
    refusal: Callable[..., Refusal]


def answer(subject: Subject, count: int, ask: Question[T]) -> T:
    """What a short stand-in answers, else one with all blocks, as long as the sample."""
    from schedlang.runtime.context.plainly import runs

    if hollow(subject.model):
        return ask.guess(subject.trial(count, short=True))
    try:
        return ask.probe(subject.trial(count, short=True))
    except Exception as error:
        # whatever it says, a refusal too: blocks that were left out, or sequences too short for
        # what it does, may be all that is wrong; the other stand-in is nearer, and has the word
        short = error
    trial = subject.trial(count, short=False)
    try:
        return ask.probe(trial)
    except (Refusal, OwnError) as refusal:
        raise refusal from short
    except Exception as error:
        error.__cause__ = short
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if runs(trial):
            kind = type(subject.model).__name__
            raise OwnError(f"`{kind}` runs alone on a small batch", said) from error
        title = f"`{type(subject.model).__name__}` does not run on a small batch, to be tried"
        raise ask.refusal(title, said) from error


def hollow(model: nn.Module) -> bool:
    """Whether a model has no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def weight_by_tokens(traced: Traced, count: int) -> Weight:
    """What a part weighs in the mean: its labels that count; its tokens where there are none."""
    from schedlang.runtime.parts import rows_of
    from schedlang.runtime.slicing.slices import length_of

    if traced.labels:
        return weight_of(traced, count)
    return lambda batch: float(rows_of(batch) * length_of(batch))
