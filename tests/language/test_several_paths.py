"""Rows of several paths: read, formatted, and one selection in model order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.printer import fmt
from tests.language.test_primitives import Toy
from tests.proofs import planned


def _toy() -> nn.Module:
    torch.manual_seed(0)
    return Toy()


def test_one_spacing() -> None:
    """A comma and a space between paths, two spaces before the primitive."""
    head = 'schedule 1\n\nstep "a" {{\n  {}\n}}\n'
    wanted = head.format("layers.*.norm, head  checkpoint(save=[linear])")
    loose = head.format("layers.*.norm  ,head checkpoint( save=[linear] )")
    assert fmt(Source("x.sched", loose)) == fmt(Source("x.sched", wanted)) == wanted


def test_one_selection() -> None:
    """What two paths name twice is taken once, in the order of the model."""
    plan = planned(_toy(), "layers[2, 0], layers[:2], embed  checkpoint()")
    (action,) = plan.actions
    assert action.sites == ("embed", "layers.0", "layers.1", "layers.2")


def test_each_path_matches() -> None:
    """One path that names nothing is refused, although the other names something."""
    with pytest.raises(Refusal, match="S201"):
        planned(_toy(), "layers.*, nothing  checkpoint()")


def test_inside_a_scope() -> None:
    """Paths start at the scope around the row, each of them."""
    plan = planned(_toy(), "at layers[1, 2] { mlp.up, mlp.down  checkpoint() }")
    assert [site for action in plan.actions for site in action.sites] == [
        "layers.1.mlp.up",
        "layers.1.mlp.down",
        "layers.2.mlp.up",
        "layers.2.mlp.down",
    ]


@pytest.mark.parametrize("row", ["layers, ", "layers, head", ", head  checkpoint()"])
def test_what_is_no_row(row: str) -> None:
    """A comma with nothing on one side, and paths without a primitive, are mistakes of form."""
    with pytest.raises(Refusal, match="S00"):
        planned(_toy(), row)
