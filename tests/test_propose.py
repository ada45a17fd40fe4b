"""propose: schedules for models that it has never seen, which then plan and verify."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang.diagnostic import Refusal
from schedlang.passes.account import account
from schedlang.passes.propose import propose
from schedlang.passes.state import Settings
from schedlang.schedule import Schedule
from schedlang.source import Source
from schedlang.syntax import parse
from tests.survey import ready

SPLIT = {"dp": 2, "pp": 2, "tp": 2}


def batch_of(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, batch = ready(kind)
    rows = {name: torch.cat([value] * 4) for name, value in batch.items()}
    return model, {**rows, "attention_mask": torch.ones_like(rows["input_ids"])}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "opt"])
def test_plans(kind: str) -> None:
    """What is proposed is planned as it stands, in canonical form, and splits every block."""
    model, batch = batch_of(kind)
    found = propose(model, batch, SPLIT)
    plan = Schedule(model, parse(Source("proposed.sched", found.text)), Settings()).plan()
    assert account(plan, batch).collectives
    assert found.notes == ()
    blocks = {name for name, fact in plan.model.parameters.items() if len(fact.shape) > 1}
    whole = {name for name in blocks if not plan.held(name).splits}
    assert all("pos" in name or "wpe" in name for name in whole)


def test_unknown_axis() -> None:
    """An axis whose name says nothing is refused with the names that do."""
    with pytest.raises(Refusal, match=r"S211(.|\n)*`fsdp` split the batch"):
        propose(torch.nn.Linear(2, 2), {}, {"rows": 2})


def test_nothing_to_split() -> None:
    """A model without two projections in a row is refused for a tensor axis, with the reasons."""
    with pytest.raises(Refusal, match=r"S212(.|\n)*`tp=1`"):
        propose(torch.nn.Linear(2, 2), {"input": torch.ones(4, 2)}, {"tp": 2})
