"""Rows that act where a module is called: a list, which never is, is refused with what it holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.lift import spell_in_python
from tests.proofs import planned

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


class Called(nn.ModuleList):
    """A list with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self:
            x = one(x)
        return x


class Pairs(nn.Module):
    """Lists in a list, as towers of stages have them; the last one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.last = Called([Block()])
        self.empty = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            for one in pair:
                x = one(x)
        out: torch.Tensor = self.last(x)
        return out.square().mean()


def plan(path: str, row: str) -> Any:
    return planned(Pairs(), f"  {path}  {row}", "tp=2", relax="dtype, lossy")


@pytest.mark.parametrize("row", ROWS)
def test_a_list_is_never_called(row: str) -> None:
    """What would do nothing is refused, whichever level; what is offered acts, as `last` does."""
    for path, inner in (("pairs", "pairs.*.*"), ("pairs.1", "pairs.1.*")):
        with pytest.raises(Refusal) as caught:
            plan(path, row)
        found = caught.value.diagnostic
        assert found.code == "S401" and "never called" in found.primary.text
        (help_,) = found.helps
        offered = re.findall(
            rf"^select the modules that it holds: `{re.escape(inner)}  (.*)`$", help_
        )
        assert {len(plan(inner, said).actions) for said in (*offered, row)} == {1}, help_
    assert plan("last", row).actions


def test_nothing_is_offered_where_nothing_is_held() -> None:
    """An empty list holds no modules to select; what is offered in Python is a call."""
    with pytest.raises(Refusal) as caught:
        plan("empty", "cast(bf16)")
    assert caught.value.diagnostic.helps == ()
    assert spell_in_python("`pairs.*.*  cast(bf16)`") == '`sch["pairs.*.*"].cast("bf16")`'
