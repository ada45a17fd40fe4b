"""What a model raises on a part of a batch that it takes as a whole: a refusal, no traceback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.schedule import _build_program
from tests.engine import Threads
from tests.proofs import make_plan

ROWS = 8


class Table(nn.Module):
    """Looks rows of a table up, which the batch holds: as many as the batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)

    def forward(self, ids: Tensor, table: Tensor) -> Tensor:
        loss: Tensor = self.head(table[ids]).square().mean()
        return loss


class Pairs(nn.Module):
    """Compares all rows, whose labels are not gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 2)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        features = F.normalize(self.tower(x), dim=-1)
        same = (label[:, None] == label[None]).to(features.dtype)
        loss: Tensor = ((features @ features.T) * same).mean()
        return loss


def batch(kind: type[nn.Module]) -> dict[str, Tensor]:
    """Return eight rows."""
    if kind is Table:
        return {"ids": torch.arange(ROWS).view(ROWS, 1), "table": torch.ones(ROWS, 1)}
    return {"x": torch.arange(3.0 * ROWS).view(ROWS, 3), "label": torch.arange(ROWS) % 3}


@pytest.mark.parametrize(
    "kind, rows, text",
    [
        (Table, "", "the model rejects a part of this batch"),
        (Pairs, "tower  gather_rows(over=dp)\n", "the model rejects gathered rows"),
    ],
)
def test_it_is_refused_with_its_line(kind: type[nn.Module], rows: str, text: str) -> None:
    """By `build` on all ranks, and before a proof: S604 names what was split, and the line."""
    plan = make_plan(kind(), f"{rows}zero(stage=0, over=dp)", "dp=2")
    for check in (
        lambda: Threads().run(lambda: _build_program(plan, {**OPTIONS}, batch(kind)), 2),
        lambda: prove(Case(plan, (batch(kind),), dtype="none"), pool=Threads()),
    ):
        with pytest.raises(Refusal, match=text) as caught:
            check()
        notes = " ".join(caught.value.diagnostic.notes)
        assert caught.value.diagnostic.code == "S604" and "test_part_errors.py" in notes
        assert "split by rows, 8 of them" in notes
    assert build(make_plan(kind(), ""), batch(kind)).train_step(batch(kind)).isfinite()


OPTIONS = {"loss": None, "weight": None}
