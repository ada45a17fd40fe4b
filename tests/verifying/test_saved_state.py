"""The program of one rank that loads a saved state is prepared from the trace of the ranks."""

from __future__ import annotations

import pytest

from schedlang.ir.mesh import Mesh
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.prove import Case
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.passes.verify.saved_state import _prepared_without_rows
from tests import models
from tests.proofs import make_plan

BATCH = models.tokens(rows=8)


@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        (
            "lm_head  pad(out, multiple=4)\nlm_head  shard(vocab, over=tp)\nzero(stage=3, over=dp)",
            "dp=2, tp=2",
        ),
        (
            "model.layers.*  checkpoint()\nmodel.layers  pipeline_split(over=pp)\n"
            'pipeline(order="1F1B", micro=2)',
            "pp=2",
        ),
    ],
)
def test_it_is_what_prepare_finds(rows: str, mesh: str) -> None:
    """Stages, holdings, draws and the facts of the original are those of a plan without rows."""
    case = prepare_case(Case(make_plan(models.llama(2), rows, mesh), (BATCH,)))
    plain_plan = Plan(case.plan.model, Mesh())
    prepared, expected = _prepared_without_rows(case, plain_plan), prepare(plain_plan, BATCH)
    assert prepared is not None and vars(prepared.traced).keys() == vars(expected.traced).keys()
    assert prepared.staged == expected.staged and prepared.holdings == expected.holdings
    assert prepared.draws == expected.draws and prepared.traced.layouts == expected.traced.layouts
    assert prepared.traced.reached_parameters == expected.traced.reached_parameters
    assert prepared.traced.call_counts == expected.traced.call_counts
