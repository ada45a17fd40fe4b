"""Module lists that are never called: rows on them are refused, rows on their modules offered."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.lift import spell_in_python
from tests.proofs import make_plan

ROWS = (
    "cast(bf16)",
    "checkpoint()",
    "offload(activations)",
    "compress(activations, int8)",
    "fuse()",
    "shard(output=R, over=tp)",
)


class Block(nn.Module):
    """A projection and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(x).relu()
        return out


class CallableList(nn.ModuleList):
    """A module list with its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


class NestedLists(nn.Module):
    """Lists inside a list, as in towers of stages; only the last list is called."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.last = CallableList([Block()])
        self.empty = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            for block in pair:
                x = block(x)
        out: torch.Tensor = self.last(x)
        return out.square().mean()


def plan_row(path: str, row: str) -> Any:
    """The plan of one row at a path of the model."""
    return make_plan(NestedLists(), f"  {path}  {row}", "tp=2", relax="dtype, lossy")


@pytest.mark.parametrize("row", ROWS)
def test_a_list_is_never_called(row: str) -> None:
    """A row that would do nothing is refused at every level; the offered rows have an effect."""
    for path, inner in (("pairs", "pairs.*.*"), ("pairs.1", "pairs.1.*")):
        with pytest.raises(Refusal) as caught:
            plan_row(path, row)
        diagnostic = caught.value.diagnostic
        assert diagnostic.code == "S401" and "never called" in diagnostic.primary.text
        (help_,) = diagnostic.helps
        offered = re.findall(
            rf"^select the modules that it holds: `{re.escape(inner)}  (.*)`$", help_
        )
        assert {len(plan_row(inner, call).actions) for call in (*offered, row)} == {1}, help_
    assert plan_row("last", row).actions


def test_nothing_is_offered_where_nothing_is_held() -> None:
    """An empty list offers no selector; in Python the offered row is spelled as a call."""
    with pytest.raises(Refusal) as caught:
        plan_row("empty", "cast(bf16)")
    assert caught.value.diagnostic.helps == ()
    assert spell_in_python("`pairs.*.*  cast(bf16)`") == '`sch["pairs.*.*"].cast("bf16")`'
