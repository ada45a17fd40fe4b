"""Rows `expect`: bounds on the costs of a plan, in text and Python, and their messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.simulate.account import Account, account
from schedlang.passes.simulate.expectations import unmet_expectations
from tests import models
from tests.models import tokens
from tests.proofs import make_plan, refusal_text

ROWS = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
MESH = "pp=2"


@pytest.fixture(scope="module")
def costs() -> Account:
    """Return the costs of the plan of ROWS, counted once."""
    return account(make_plan(models.gpt2(), ROWS, MESH), tokens(rows=4), memory=True)


def unmet_messages(costs: Account, *expected: str) -> list[str]:
    """Return the messages of all bounds that do not hold."""
    rows = ROWS + "".join(f"expect {bound}\n" for bound in expected)
    return [
        bound.render() for bound in unmet_expectations(make_plan(models.gpt2(), rows, MESH), costs)
    ]


def test_what_holds_says_nothing(costs: Account) -> None:
    """Bounds close to the counted values hold, on either side of the comparison."""
    assert costs.memory is not None
    peak = max(stage_memory.peak for stage_memory in costs.memory)
    close_bounds = f"peak_memory < {peak + 1}", f"{peak} <= peak_memory", f"peak_memory >= {peak}B"
    assert (
        unmet_messages(
            costs, *close_bounds, "comm_bytes(pp) > 0", "comm_bytes() < 1GiB", "bubble < 0.34"
        )
        == []
    )


def test_a_peak_that_is_too_high_says_where_and_of_what(costs: Account) -> None:
    """The message names the value, stage, operation, kinds of memory and remedies."""
    (message,) = unmet_messages(costs, "peak_memory < 1KiB")
    assert "error[S860]: `peak_memory < 1KiB` does not hold: it is " in message
    assert "on pp=" in message and "optimizer" in message and "activations" in message
    assert "= help:" in message


def test_bytes_and_bubble_too_high(costs: Account) -> None:
    """A byte bound names the largest transfer, a bubble bound refers to other orders."""
    sent, bubble = unmet_messages(costs, "comm_bytes(pp) < 8B", "bubble < 0.1")
    assert "most of it: send of" in sent or "most of it: all-reduce of" in sent
    assert "it is 0.333" in bubble and "docs/pipelines.md" in bubble


def test_what_cannot_be_told(costs: Account) -> None:
    """Without a batch memory is unknown: reported as S862, not silently accepted."""
    rows = ROWS + "expect peak_memory < 1GiB\n"
    plan = make_plan(models.gpt2(), rows, MESH)
    (problem,) = unmet_expectations(plan, replace(costs, memory=None))
    assert problem.code == "S862" and "cannot be computed" in problem.title


def test_another_machine(costs: Account) -> None:
    """A bound for one machine is ignored for a plan on another."""
    plan = make_plan(models.gpt2(), ROWS + "expect peak_memory < 1B on h100x64\n", MESH)
    on = lambda device: replace(plan, mesh=replace(plan.mesh, device=device))  # noqa: E731
    assert (
        len(unmet_expectations(on("h100x64"), costs))
        == len(unmet_expectations(on(None), costs))
        == 1
    )
    assert unmet_expectations(on("v100"), costs) == ()


@pytest.mark.parametrize(
    "text, said",
    [
        ("peak_memori < 1GiB", "did you mean `peak_memory`?"),
        ("peak_memory", "must compare a measure with a bound"),
        ("peak_memory == 3", "a bound is one of <, <=, >, >="),
        ("comm_bytes(tp) < 3", "takes axes of the mesh"),
        ("peak_memory(pp) < 3", "takes no arguments"),
        ("bubble < true", "not a number"),
        ("time < 180ms", "`time` needs `step`"),
        ("time(row) < 180ms", "`time` needs `step`"),
        ("time(step) < 180", "a time with its unit, not `180`"),
        ("time(step) < 2GiB", "a time with its unit, not `2GiB`"),
        ("peak_memory < 2s", "a number of bytes, not `2s`"),
        ("bubble < 1KiB", "a share, not `1KiB`"),
    ],
)
def test_what_is_no_expectation(text: str, said: str) -> None:
    """An invalid bound is refused (S861) with what would be legal."""
    message = refusal_text(models.gpt2(), f"{ROWS}expect {text}\n", MESH)
    assert "S861" in message and said in message


def test_knobs_and_python() -> None:
    """A bound may be an expression over knobs, and may be set in Python."""
    sch: Any = schedlang.create_schedule(models.gpt2())
    sch.knob("most", 1024)
    sch.expect("peak_memory < most * 1024")
    plan: Plan = sch.plan()
    assert [bound.bound for bound in plan.expected] == [1024.0 * 1024]
    (none,) = unmet_expectations(plan, account(plan))
    assert none.code == "S862"
    with pytest.raises(Refusal):
        sch.expect("peak_memory")
    assert sch.plan() == plan
