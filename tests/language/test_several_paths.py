"""Rows with several paths, separated by commas: parsed, formatted, one selection in model order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.printer import fmt
from tests.language.test_primitive_examples import Toy
from tests.proofs import make_plan


def _build_toy() -> nn.Module:
    torch.manual_seed(0)
    return Toy()


def test_one_spacing() -> None:
    """`fmt` puts a comma and a space between paths, and two spaces before the primitive."""
    head = 'schedule 1\n\nstep "a" {{\n  {}\n}}\n'
    expected = head.format("layers.*.norm, head  checkpoint(save=[linear])")
    loose = head.format("layers.*.norm  ,head checkpoint( save=[linear] )")
    assert fmt(Source("x.sched", loose)) == fmt(Source("x.sched", expected)) == expected


def test_one_selection() -> None:
    """A module that two paths name is selected once, in model order."""
    plan = make_plan(_build_toy(), "layers[2, 0], layers[:2], embed  checkpoint()")
    (action,) = plan.actions
    assert action.sites == ("embed", "layers.0", "layers.1", "layers.2")


def test_each_path_matches() -> None:
    """A path that names nothing is refused, even if another path names something."""
    with pytest.raises(Refusal, match="S201"):
        make_plan(_build_toy(), "layers.*, nothing  checkpoint()")


def test_inside_a_scope() -> None:
    """Each path is relative to the scope around the row."""
    plan = make_plan(_build_toy(), "at layers[1, 2] { mlp.up, mlp.down  checkpoint() }")
    assert [site for action in plan.actions for site in action.sites] == [
        "layers.1.mlp.up",
        "layers.1.mlp.down",
        "layers.2.mlp.up",
        "layers.2.mlp.down",
    ]


@pytest.mark.parametrize("row", ["layers, ", "layers, head", ", head  checkpoint()"])
def test_what_is_no_row(row: str) -> None:
    """A missing path beside a comma, and paths without a primitive, are syntax errors."""
    with pytest.raises(Refusal, match="S00"):
        make_plan(_build_toy(), row)
