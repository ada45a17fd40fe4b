"""`fold_rows`: equal rows on consecutive modules become one row with a slice."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import schedlang
from schedlang.diagnostics.source import Source
from schedlang.language import nodes as n
from schedlang.language.nodes import fold_rows
from schedlang.language.printer import path
from schedlang.language.syntax import parse
from tests import models


def fold_selectors(rows: str, same_result: Any = lambda items: True) -> list[str]:
    """The selectors of these rows after folding."""
    items = fold_rows(parse(Source("x", f"schedule 1\n{rows}")).items, same_result)
    return [path(item.paths[0]) for item in items if isinstance(item, n.Rule)]


@pytest.mark.parametrize(
    "rows, found",
    [
        ("h.0 a()\nh.1 a()\nh.2 a()", ["h[:3]"]),
        ("h.1 a()\nh.3 a()\nh.5 a()", ["h[1:6:2]"]),
        ("h.0.x a()\nh.0.y b()\nh.1.x a()\nh.1.y b()", ["h[:2].x", "h[:2].y"]),
        ("h.0.e.0 a()\nh.0.e.1 a()\nh.1.e.0 a()\nh.1.e.1 a()", ["h[:2].e[:2]"]),
        ("h.0 a()\nh.1 a(b=2)", ["h.0", "h.1"]),
        ("h.0 a()\nh.1 a()\nh.3 a()", ["h.0", "h.1", "h.3"]),
        ("h.1 a()\nh.0 a()", ["h.1", "h.0"]),
        ("h.0 a()", ["h.0"]),
    ],
)
def test_what_is_folded(rows: str, found: list[str]) -> None:
    """Equal rows whose index rises by a constant step are folded, at every depth; no others."""
    assert fold_selectors(rows) == found


def test_who_asks_has_the_word() -> None:
    """Rows are not folded where the caller says that the result would differ."""
    assert fold_selectors("h.0 a()\nh.1 a()", lambda items: False) == ["h.0", "h.1"]


def _loop_schedule(model: Any) -> Any:
    """A schedule made by a loop in Python."""
    sch: Any = schedlang.create_schedule(model)
    sch.mesh(tp=2)
    with sch.step("tensor parallel"):
        for k in range(4):
            sch[f"transformer.h.{k}.attn.c_attn"].shard("col", blocks=3, over="tp")
            sch[f"transformer.h.{k}.attn.c_proj"].shard("row", over="tp")
            with sch.at(f"transformer.h.{k}.mlp") as mlp:
                mlp["c_fc"].shard("col", over="tp")
                mlp["c_proj"].shard("row", over="tp")
    for k in (0, 2):
        sch[f"transformer.h.{k}"].checkpoint()
    return sch


def test_a_loop_of_python_becomes_a_table() -> None:
    """`to_sched(fold=True)` is the text that one would write by hand, with the same plan."""
    sch = _loop_schedule(models.gpt2(4))
    assert (
        sch.to_sched(fold=True)
        == """\
schedule 1 for GPT2LMHeadModel

mesh(tp=2)

step "tensor parallel" {
  transformer.h[:4].attn.c_attn  shard(col, blocks=3, over=tp)
  transformer.h[:4].attn.c_proj  shard(row, over=tp)
  at transformer.h[:4].mlp {
    c_fc    shard(col, over=tp)
    c_proj  shard(row, over=tp)
  }
}

transformer.h[:3:2]  checkpoint()
"""
    )
    assert sch.to_sched() != sch.to_sched(fold=True) and "h.3.attn" in sch.to_sched()


def test_names_that_are_no_places() -> None:
    """Numbered names that are not indices of a list are not folded."""
    net = nn.Sequential()
    net.add_module("parts", nn.ModuleDict({name: nn.Linear(2, 2) for name in "123"}))
    sch: Any = schedlang.create_schedule(net)
    for name in "12":
        sch[f"parts.{name}"].checkpoint()
    assert sch.to_sched(fold=True) == sch.to_sched() != ""
