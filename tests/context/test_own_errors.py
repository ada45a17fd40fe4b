"""Refusals of sequence splits blame the model only for what the model alone shows."""

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
from tests.proofs import make_plan

Patch = pytest.MonkeyPatch
ROW = OWN.format("ring, over=cp, layout=zigzag")


def probe_tokens(model: nn.Module, row: str, mask: bool = False) -> Any:
    """The split of tokens that the probe finds for a model."""
    return prepare(make_plan(model, row, "cp=2"), models.tokens(3, 11, mask), None).tokens


# -- mistakes of ours ----------------------------------------------------------------------------


def scale_attention(patch: Patch) -> None:
    """The trial's attention gives too much."""
    real = trying._TrialExchange.__call__
    patch.setattr(trying._TrialExchange, "__call__", lambda self, *args: real(self, *args) * 1.01)


def shift_labels(patch: Patch) -> None:
    """Tokens get the labels of the place before."""
    real = splitting.TokenSplit.take_part

    def part(self: Any, *args: Any, **options: Any) -> Any:
        local_inputs = real(self, *args, **options)
        for name in ("labels", "shift_labels"):
            if name in local_inputs.inputs:
                local_inputs.inputs[name] = local_inputs.inputs[name].roll(1, -1)
        return local_inputs

    patch.setattr(splitting.TokenSplit, "take_part", part)


def reset_positions(patch: Patch) -> None:
    """Every part begins at the first position."""
    real = splitting.SequenceShard.positions
    patch.setattr(
        splitting.SequenceShard,
        "positions",
        lambda self, *args: real(self, *args) - real(self, *args).min(),
    )


def double_gradients(patch: Patch) -> None:
    """Gradients of parts are taken too large."""
    real = trial.gradients_of
    patch.setattr(trying, "gradients_of", lambda model: {k: 2 * v for k, v in real(model).items()})


MISTAKES = {
    "attention, llama": (scale_attention, lambda: models.llama(2), LLAMA, True),
    "attention, gpt2 that drops": (
        scale_attention,
        lambda: models.gpt2(2, dropout=0.2),
        GPT2,
        True,
    ),
    "attention, bert": (scale_attention, models.bert, BERT, True),
    "attention, products": (scale_attention, lambda: Causal("products", layers=2), OWN, False),
    "labels, llama": (shift_labels, lambda: models.llama(2), LLAMA, True),
    "labels, of one's own": (shift_labels, lambda: Causal(layers=2), OWN, False),
    "positions, llama": (reset_positions, lambda: models.llama(2), LLAMA, True),
    "positions, from shapes": (reset_positions, lambda: Causal(layers=2), OWN, False),
    "positions, a table": (
        reset_positions,
        lambda: Causal(positions="table", layers=2),
        OWN,
        False,
    ),
    "gradients": (double_gradients, lambda: Causal("full", shift=False, layers=2), OWN, False),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_ours_is_ours(name: str, monkeypatch: Patch) -> None:
    """A bug in the trial is reported as an error of schedlang, not of the model."""
    mistake, make, row, mask = MISTAKES[name]
    probe_tokens(make(), row.format("ring, over=cp"), mask)
    mistake(monkeypatch)
    with pytest.raises(OwnError) as caught:
        probe_tokens(make(), row.format("ring, over=cp"), mask)
    message = str(caught.value)
    kind = type(make()).__name__
    assert "an error of schedlang, not of the model" in message and "please report" in message, (
        message
    )
    assert f"`{kind}` on [" in message, message


@pytest.mark.parametrize("mistake", [scale_attention, shift_labels, double_gradients])
@pytest.mark.parametrize("name", REFUSED)
def test_a_property_of_the_model_stays_one(
    name: str, mistake: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """A model that mixes tokens is refused as such, whatever bug the trial has."""
    mistake(monkeypatch)
    with pytest.raises(Refusal, match="S659"):
        probe_tokens(REFUSED[name][0](), ROW)


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

    monkeypatch.setattr("schedlang.runtime.context_parallel.probe.run_full", fails)
    with pytest.raises(OwnError, match="runs alone on a small batch") as caught:
        probe_tokens(Causal(layers=2), ROW)
    assert "a trial that trips" in str(caught.value)


def test_a_small_batch_that_the_model_does_not_take() -> None:
    """A model that takes rows of one length only is refused as such."""
    with pytest.raises(Refusal, match="S659"):
        probe_tokens(Widths(layers=2), ROW)


# -- draws ---------------------------------------------------------------------------------------


def test_still_draws_do_not_depend_on_tokens() -> None:
    """Constant draws: nothing is dropped, and every random number is the same."""
    with SourceMode(ConstantDraws()):
        assert torch.equal(torch.rand(3, 2), torch.full((3, 2), 0.5))
        assert torch.randn(4).abs().max() < 1e-9
        x = torch.ones(2, 3)
        assert torch.equal(nn.functional.dropout(x, 0.5), x * 2)


def test_draws_by_row_are_those_of_the_row() -> None:
    """A part draws the same numbers for its rows as the full batch, new ones in each call."""

    def drawn(rows: list[int]) -> Tensor:
        with SourceMode(RowDraws(rows)):
            return torch.stack([torch.rand(2 * len(rows), 3), torch.randn(2 * len(rows), 3)])

    full = drawn([0, 1, 2, 3])
    assert torch.equal(drawn([2, 3]), full[:, 4:])
    assert len(full.unique()) == full.numel()
