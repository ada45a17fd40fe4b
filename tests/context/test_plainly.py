"""What is said of a model that sequences cannot be split: only what the model alone shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import OwnError, Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.runtime.context_parallel import local_tokens as splitting
from schedlang.runtime.context_parallel import probe as trying
from schedlang.runtime.rng.logical_dropout import ConstantDraws, RowDraws, SourceMode
from schedlang.runtime.sequence_pipelining import trial
from tests import models
from tests.causal import Causal
from tests.context.test_context import BERT, GPT2, LLAMA, OWN, REFUSED
from tests.proofs import planned

Patch = pytest.MonkeyPatch
ROW = OWN.format("ring, over=cp, layout=zigzag")


def probed(model: nn.Module, row: str, mask: bool = False) -> Any:
    """How the model is found to run."""
    return prepare(planned(model, row, "cp=2"), models.tokens(3, 11, mask), None).tokens


# -- mistakes of ours ----------------------------------------------------------------------------


def too_much(patch: Patch) -> None:
    """The trial's attention gives too much."""
    real = trying._TrialExchange.__call__
    patch.setattr(trying._TrialExchange, "__call__", lambda self, *args: real(self, *args) * 1.01)


def other_labels(patch: Patch) -> None:
    """Tokens get the labels of the place before."""
    real = splitting.TokenSplit.take_part

    def part(self: Any, *args: Any, **options: Any) -> Any:
        made = real(self, *args, **options)
        for name in ("labels", "shift_labels"):
            if name in made.inputs:
                made.inputs[name] = made.inputs[name].roll(1, -1)
        return made

    patch.setattr(splitting.TokenSplit, "take_part", part)


def other_positions(patch: Patch) -> None:
    """Every part begins at the first position."""
    real = splitting.SequenceShard.positions
    patch.setattr(
        splitting.SequenceShard,
        "positions",
        lambda self, *args: real(self, *args) - real(self, *args).min(),
    )


def other_gradients(patch: Patch) -> None:
    """Gradients of parts are taken too large."""
    real = trial.gradients_of
    patch.setattr(trying, "gradients_of", lambda model: {k: 2 * v for k, v in real(model).items()})


MISTAKES = {
    "attention, llama": (too_much, lambda: models.llama(2), LLAMA, True),
    "attention, gpt2 that drops": (too_much, lambda: models.gpt2(2, dropout=0.2), GPT2, True),
    "attention, bert": (too_much, models.bert, BERT, True),
    "attention, products": (too_much, lambda: Causal("products", layers=2), OWN, False),
    "labels, llama": (other_labels, lambda: models.llama(2), LLAMA, True),
    "labels, of one's own": (other_labels, lambda: Causal(layers=2), OWN, False),
    "positions, llama": (other_positions, lambda: models.llama(2), LLAMA, True),
    "positions, from shapes": (other_positions, lambda: Causal(layers=2), OWN, False),
    "positions, a table": (
        other_positions,
        lambda: Causal(positions="table", layers=2),
        OWN,
        False,
    ),
    "gradients": (other_gradients, lambda: Causal("full", shift=False, layers=2), OWN, False),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_ours_is_ours(name: str, monkeypatch: Patch) -> None:
    """A model that can be split is not called one that cannot; what to report is said."""
    mistake, make, row, mask = MISTAKES[name]
    probed(make(), row.format("ring, over=cp"), mask)
    mistake(monkeypatch)
    with pytest.raises(OwnError) as caught:
        probed(make(), row.format("ring, over=cp"), mask)
    said = str(caught.value)
    kind = type(make()).__name__
    assert "an error of schedlang, not of the model" in said and "please report" in said, said
    assert f"`{kind}` on [" in said, said


@pytest.mark.parametrize("mistake", [too_much, other_labels, other_gradients])
@pytest.mark.parametrize("name", REFUSED)
def test_a_property_of_the_model_stays_one(
    name: str, mistake: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """What mixes tokens elsewhere is refused as such, whatever else is wrong."""
    mistake(monkeypatch)
    with pytest.raises(Refusal, match="S659"):
        probed(REFUSED[name][0](), ROW)


# -- small batches -------------------------------------------------------------------------------


class Widths(Causal):
    """Takes rows of eleven tokens, and of no other number."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        if input_ids.shape[1] != 11:
            raise ValueError("rows have eleven tokens")
        return super().forward(input_ids, labels, attention_mask)


def test_a_small_batch_that_is_ours(monkeypatch: Patch) -> None:
    """A trial that fails on a batch which the model alone takes is an error of ours."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("a trial that trips")

    monkeypatch.setattr("schedlang.runtime.context_parallel.probe.watched", fails)
    with pytest.raises(OwnError, match="runs alone on a small batch") as caught:
        probed(Causal(layers=2), ROW)
    assert "a trial that trips" in str(caught.value)


def test_a_small_batch_that_the_model_does_not_take() -> None:
    """Rows of one length alone: that is said of the model."""
    with pytest.raises(Refusal, match="S659"):
        probed(Widths(layers=2), ROW)


# -- draws ---------------------------------------------------------------------------------------


def test_still_draws_do_not_depend_on_tokens() -> None:
    """Every random function has its still form: nothing dropped, and one number everywhere."""
    with SourceMode(ConstantDraws()):
        assert torch.equal(torch.rand(3, 2), torch.full((3, 2), 0.5))
        assert torch.randn(4).abs().max() < 1e-9
        x = torch.ones(2, 3)
        assert torch.equal(nn.functional.dropout(x, 0.5), x * 2)


def test_draws_by_row_are_those_of_the_row() -> None:
    """A part draws for its rows what the whole draws for them, in each call something else."""

    def drawn(rows: list[int]) -> Tensor:
        with SourceMode(RowDraws(rows)):
            return torch.stack([torch.rand(2 * len(rows), 3), torch.randn(2 * len(rows), 3)])

    whole = drawn([0, 1, 2, 3])
    assert torch.equal(drawn([2, 3]), whole[:, 4:])
    assert len(whole.unique()) == whole.numel()
