"""Stale weights: combinations without a clear meaning are refused, with row and help."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests import models
from tests.pipelines.test_stale import Chain, random_batch, stale_plan
from tests.proofs import sgd


def build_message(plan: Plan, batch: Any, **options: Any) -> str:
    """The message with which a build is refused."""
    with pytest.raises(Refusal) as error:
        build(plan, batch, **options)
    return error.value.render()


def test_without_relax_it_is_refused() -> None:
    """Without `relax(staleness)` stale weights are refused (S505)."""
    with pytest.raises(Refusal) as error:
        stale_plan(Chain(), '"PipeDream", micro=8', "pp=2", relax="")
    text = error.value.render()
    assert "S505" in text and "relax(staleness)" in text
    stale_plan(Chain(), '"1F1B", micro=8', "pp=2", relax="")


TOKENS = models.tokens(rows=8, seed=5)
REFUSED = {
    "tied": (
        lambda: stale_plan(models.gpt2(2), '"PipeDream", micro=4', "pp=2"),
        TOKENS,
        "`transformer.wte.weight` is used by the stages 0 and 1",
    ),
    "sliced": (
        lambda: stale_plan(
            Chain(), '"PipeDream", micro=4', "dp=2, pp=2", zero="zero(stage=1, over=dp)"
        ),
        random_batch(16, 0),
        "sharded parameters cannot be kept",
    ),
    "recomputed": (
        lambda: stale_plan(Chain(), '"PB", micro=4', "pp=2", "layers.*  checkpoint()"),
        random_batch(16, 0),
        "recomputation would use other weights",
    ),
    "early": (
        lambda: stale_plan(
            Chain(),
            '"PipeDream", micro=4',
            "dp=2, pp=2",
            zero="zero(stage=0, over=dp)\noverlap(gradients)",
        ),
        random_batch(16, 0),
        "summed at every update",
    ),
    "coded": (
        lambda: stale_plan(
            Chain(),
            '"PipeDream", micro=4',
            "dp=2, pp=2",
            relax="staleness, lossy",
            zero="zero(stage=0, over=dp)\ncompress(gradients, int8, over=dp)",
        ),
        random_batch(16, 0),
        "`compress` sums gradients once a step",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_clear_meaning(name: str) -> None:
    """Shared weights, sliced state, recomputation without old weights: S625 with row and help."""
    from schedlang.passes.analyze.prepare import prepare

    make, batch, expected = REFUSED[name]
    with pytest.raises(Refusal) as error:
        prepare(make(), batch)
    text = error.value.render()
    assert "S625" in text and expected in text and "rows.sched:" in text and "help:" in text


def test_clipping_and_no_optimizer_are_refused() -> None:
    """Clipping is refused (there is no norm of all gradients), and so is a missing optimizer."""
    plan = stale_plan(Chain(), '"PipeDream", micro=4', "pp=1")
    assert "`clip` needs one norm of all gradients" in build_message(
        plan, random_batch(8, 0), optimizer=sgd, clip=1.0
    )
    assert "needs an optimizer" in build_message(plan, random_batch(8, 0))
    build(plan, random_batch(8, 0), optimizer=sgd)


def replacing_sgd(parameters: Any) -> Any:
    """SGD that replaces the tensors of the weights."""

    class Replacing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data - parameter.grad

    return Replacing([p for _, p in parameters], lr=0.1)


def test_an_optimizer_that_replaces_weights_is_refused() -> None:
    """An optimizer that replaces weights is refused: running backwards would not see it."""
    plan = stale_plan(Chain(), '"PB", micro=4', "pp=1")
    program = build(plan, random_batch(8, 0), optimizer=replacing_sgd)
    with pytest.raises(Refusal, match="replaces the tensors"):
        program.train_step(random_batch(8, 0))
