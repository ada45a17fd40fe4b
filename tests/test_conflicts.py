"""The conflict table against what happens: every pair of verbs' examples in both orders."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import combinations

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostic import Refusal
from schedlang.passes.legality import meetings
from schedlang.plan import Plan
from schedlang.primitive import conflicts, registry
from tests.proofs import planned
from tests.test_primitives import ABOVE, NAMES, _axes, _relax, _row, _toy

ALONE = [name for name in NAMES if name not in ABOVE]
PAIRS = list(combinations(ALONE, 2))


def _planned(*names: str) -> Plan:
    """The plan of the examples, in this order, on a mesh with all their axes."""
    axes = dict.fromkeys((axis for name in names for axis in _axes(name)), 2)
    mesh = ", ".join(f"{axis}={size}" for axis, size in sorted(axes.items()))
    relaxed = ", ".join(sorted({_relax(name) for name in names} - {""}))
    return planned(_toy(), "\n".join(map(_row, names)), mesh, relaxed)


def _tried(*names: str) -> Plan | str:
    """The plan, or the codes of its refusal."""
    try:
        return _planned(*names)
    except Refusal as refusal:
        return " ".join(d.code for d in refusal.diagnostics)


def _meet(one: str, other: str) -> bool:
    plan, then = _planned(one), _planned(other)
    return any(meetings(plan, plan.actions[-1].sites, then.actions[-1].sites))


@pytest.mark.parametrize("one, other", PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_both_orders(one: str, other: str) -> None:
    """Where the table says clash the order is refused; where it says commute in both orders, no
    order is refused for it, and both give one plan."""
    if isinstance(_tried(one), str) or isinstance(_tried(other), str):
        return  # stands on rows above it, which tests of its own have
    known = registry()
    found = {(a, b): _tried(a, b) for a, b in ((one, other), (other, one))}
    told = {(a, b): conflicts(known[a], known[b]) for a, b in found}
    for pair, how in told.items():
        if how == "clash" and _meet(*pair):
            assert isinstance(found[pair], str) and "S5" in found[pair], (pair, found[pair])
        if how in ("commute", "order"):
            assert "S503" not in str(found[pair] if isinstance(found[pair], str) else "")
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    if set(told.values()) == {"commute"} and len(plans) == 2:
        same = [replace(plan, actions=()) for plan in plans]
        different = [
            f.name for f in fields(Plan)
            if f.compare and getattr(same[0], f.name) != getattr(same[1], f.name)
        ]  # fmt: skip
        assert not different, different


def test_enough_pairs_are_tried() -> None:
    """Most examples stand by themselves, so that most pairs say something."""
    alone = [name for name in ALONE if not isinstance(_tried(name), str)]
    assert len(alone) >= 0.7 * len(NAMES), sorted({*NAMES} - {*alone})


def test_explain_shows_the_table() -> None:
    """As text, a row for each verb and what the signs mean; for machines, the words."""
    shown = CliRunner().invoke(app, ["explain", "--conflicts"]).stdout
    lines = shown.split("\n")
    row = next(line for line in lines if " offload " in line)
    assert "refused, turn them round" in shown and row.split()[1:4] == ["offload", "x", "x"]
    told = json.loads(CliRunner().invoke(app, ["explain", "--conflicts", "--json"]).stdout)
    assert told["offload"]["checkpoint"] == "clash" and told["checkpoint"]["offload"] == "order"
    assert set(told) == set(NAMES) and all(set(row) == set(NAMES) for row in told.values())
