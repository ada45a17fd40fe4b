"""Stale weights: what has no clear meaning is refused, with the row and what would be legal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests import models
from tests.pipelines.test_stale import Chain, series, stale
from tests.proofs import sgd


def said(plan: Plan, batch: Any, **options: Any) -> str:
    """The message in which building ends."""
    with pytest.raises(Refusal) as error:
        build(plan, batch, **options)
    return error.value.render()


def test_without_relax_it_is_refused() -> None:
    """Stale weights are given up by name, as any relaxation (S505)."""
    with pytest.raises(Refusal) as error:
        stale(Chain(), '"PipeDream", micro=8', "pp=2", relax="")
    text = error.value.render()
    assert "S505" in text and "relax(staleness)" in text
    stale(Chain(), '"1F1B", micro=8', "pp=2", relax="")


TOKENS = models.tokens(rows=8, seed=5)
REFUSED = {
    "tied": (
        lambda: stale(models.gpt2(2), '"PipeDream", micro=4', "pp=2"),
        TOKENS,
        "`transformer.wte.weight` is used by the stages 0 and 1",
    ),
    "sliced": (
        lambda: stale(Chain(), '"PipeDream", micro=4', "dp=2, pp=2", zero="zero(stage=1, over=dp)"),
        series(16, 0),
        "sharded parameters cannot be kept",
    ),
    "recomputed": (
        lambda: stale(Chain(), '"PB", micro=4', "pp=2", "layers.*  checkpoint()"),
        series(16, 0),
        "recomputation would use other weights",
    ),
    "early": (
        lambda: stale(
            Chain(),
            '"PipeDream", micro=4',
            "dp=2, pp=2",
            zero="zero(stage=0, over=dp)\noverlap(gradients)",
        ),
        series(16, 0),
        "summed at every update",
    ),
    "coded": (
        lambda: stale(
            Chain(),
            '"PipeDream", micro=4',
            "dp=2, pp=2",
            relax="staleness, lossy",
            zero="zero(stage=0, over=dp)\ncompress(gradients, int8, over=dp)",
        ),
        series(16, 0),
        "`compress` sums gradients once a step",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_clear_meaning(name: str) -> None:
    """Shared weights, sliced state, recomputation without a stash: S625 with the row and a way."""
    from schedlang.passes.analyze.prepare import prepare

    make, batch, words = REFUSED[name]
    with pytest.raises(Refusal) as error:
        prepare(make(), batch)
    text = error.value.render()
    assert "S625" in text and words in text and "rows.sched:" in text and "help:" in text


def test_clipping_and_no_optimizer_are_refused() -> None:
    """There is no norm of all gradients, and an update needs an optimizer."""
    plan = stale(Chain(), '"PipeDream", micro=4', "pp=1")
    assert "`clip` needs one norm of all gradients" in said(
        plan, series(8, 0), optimizer=sgd, clip=1.0
    )
    assert "needs an optimizer" in said(plan, series(8, 0))
    build(plan, series(8, 0), optimizer=sgd)


def replacing(named: Any) -> Any:
    """An optimizer that puts new tensors in the place of the weights."""

    class Replacing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data - parameter.grad

    return Replacing([p for _, p in named], lr=0.1)


def test_an_optimizer_that_replaces_weights_is_refused() -> None:
    """Backwards in flight would not see its update."""
    plan = stale(Chain(), '"PB", micro=4', "pp=1")
    made = build(plan, series(8, 0), optimizer=replacing)
    with pytest.raises(Refusal, match="replaces the tensors"):
        made.train_step(series(8, 0))
