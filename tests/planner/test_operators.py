"""Layouts of operators: found without being told, equal to every choice, and proven to compute."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.model import ModelFacts
from schedlang.language import printer
from schedlang.passes.complete.proposal import Trial
from schedlang.passes.planner.operators.graph import Graph, graph_of
from schedlang.passes.planner.operators.placements import Asked, Placed
from schedlang.passes.planner.operators.rows import Chosen, chosen, text
from schedlang.passes.planner.operators.solve import solve
from schedlang.passes.planner.values import Kind
from schedlang.passes.reduce_model.blocks import blocks_of
from tests import models
from tests.engine import Threads
from tests.proofs import planned, proven


@dataclass(frozen=True)
class Slow:
    """Costs by which small models are split: numbers are slow, and what is sent is quick."""

    sent: float = 1e-3
    fixed: float = 0.0

    def operator(self, kind: Kind, flops: float, moved: float) -> float:
        return flops + moved

    def collective(self, op: str, size: float, ranks: int, stride: int) -> float:
        return self.fixed + size * self.sent * (2 if op == "all_reduce" else 1)


def trial_of(model: nn.Module, batch: dict[str, Tensor], loss: Any = None) -> Trial:
    facts = ModelFacts(model)
    return Trial(facts, blocks_of(facts), batch, loss)


def found(model: nn.Module, batch: dict[str, Tensor], **more: Any) -> tuple[Trial, Chosen]:
    trial = trial_of(model, batch)
    asked = Asked(2, more.pop("costs", Slow()), **more)
    one = chosen(trial, graph_of(trial), "tp", asked)
    assert one is not None
    return trial, one


def calls(one: Chosen) -> dict[str, str]:
    """The rows by the names of modules."""
    return {name: printer.expr(row.call) for row in one.rows for name in row.names}


def test_megatrons_plan_of_a_gpt2(threads: Threads) -> None:
    """Column then row, heads split, the vocabulary padded and split: and it computes the same."""
    _, one = found(models.gpt2(), models.tokens(8), tokens=False)
    rows = calls(one)
    assert rows["transformer.h.*.attn.c_attn"] == "shard(col, blocks=3, over=tp)"
    assert rows["transformer.h.*.attn.c_proj"] == "shard(row, over=tp)"
    assert rows["transformer.h.*.mlp.c_fc"] == "shard(col, over=tp)"
    assert rows["transformer.h.*.mlp.c_proj"] == "shard(row, over=tp)"
    assert rows["transformer.wte"] == rows["lm_head"] == "shard(vocab, over=tp)"
    print(rows)
