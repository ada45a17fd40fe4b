"""What the probe finds for a model and a batch, in few words, for tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.propagate.propagate import Traced, propagate
from schedlang.runtime.propagation.trace import LabelRule
from schedlang.runtime.sequence_pipelining.probe import probe
from schedlang.runtime.sequence_pipelining.slices import Slicing
from schedlang.runtime.sequence_pipelining.trial import make_trial
from tests.proofs import planned


def traced(model: nn.Module, batch: Any, loss: Any = None) -> Traced:
    """What one forward of the model showed."""
    return propagate(planned(model, ""), batch, loss)


def labels_of(model: nn.Module, batch: Any) -> LabelRule:
    """How its loss reads its labels."""
    (rule,) = traced(model, batch).labels
    return rule


def found(model: nn.Module, batch: Any, count: int, loss: Any = None) -> Slicing:
    """How the model runs on slices; raises the refusal of one that cannot."""
    seen = traced(model, batch, loss)
    rule = seen.labels[0] if len(seen.labels) == 1 else None
    trial = make_trial(
        model,
        batch,
        count,
        loss=loss,
        weight=weight_of(seen, count),
        rule=rule,
        random=seen.is_random,
    )
    return probe(trial, count)
