"""Find how a model runs on slices of its sequences, by the probe: helpers for tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from schedlang.passes.propagate.original_forward import weight_of
from schedlang.passes.propagate.propagate import Traced, propagate
from schedlang.runtime.propagation.label_flow import LabelRule
from schedlang.runtime.sequence_pipelining.probe import probe
from schedlang.runtime.sequence_pipelining.slices import Slicing
from schedlang.runtime.sequence_pipelining.trial import make_trial
from tests.proofs import make_plan


def trace_model(model: nn.Module, batch: Any, loss: Any = None) -> Traced:
    """Trace one forward of a model without a schedule."""
    return propagate(make_plan(model, ""), batch, loss)


def label_rule(model: nn.Module, batch: Any) -> LabelRule:
    """The rule by which a model's loss reads its labels."""
    (rule,) = trace_model(model, batch).labels
    return rule


def probe_slices(model: nn.Module, batch: Any, count: int, loss: Any = None) -> Slicing:
    """How a model runs on slices; raises a refusal if it cannot."""
    traced_model = trace_model(model, batch, loss)
    rule = traced_model.labels[0] if len(traced_model.labels) == 1 else None
    trial = make_trial(
        model,
        batch,
        count,
        loss=loss,
        weight=weight_of(traced_model, count),
        rule=rule,
        random=traced_model.is_random,
    )
    return probe(trial, count)
