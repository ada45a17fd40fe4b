"""Tests of original: the plain loop, and the parameters and losses it needs."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.verify.original import Sequential, loss_of, randomised, rows, tied


class Tied(nn.Module):
    """An embedding and a head of one weight, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)
        self.head.weight = self.emb.weight

    def forward(self, ids, labels=None):
        logits = self.head(self.norm(self.emb(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_the_loop_is_the_plain_loop() -> None:
    """Three steps with clipping give the parameters of the loop that everyone writes."""
    torch.manual_seed(0)
    model = Tied().double()
    twin = copy.deepcopy(model)
    batch = {"ids": torch.randint(0, 7, (3, 5)), "labels": torch.randint(0, 7, (3, 5))}
    subject = Sequential(model, lambda named: torch.optim.Adam(named, lr=0.1), clip=0.5)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
    for _ in range(3):
        loss = subject.train_step(batch)
        optimizer.zero_grad()
        expected = twin(**batch)["loss"]
        expected.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        assert torch.equal(loss, expected) and torch.equal(subject.grad_norm, norm)
    for name, value in subject.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])
    assert subject.ties == (("emb.weight", "head.weight"),)
    assert set(subject.trainable()) == dict(twin.named_parameters()).keys()
    assert set(subject.optimizer_state()) == set(subject.trainable())


def test_randomised_moves_every_parameter_and_keeps_ties() -> None:
    """Zero biases and unit gains are gone, ties and the given module stay."""
    model = Tied()
    nn.init.zeros_(model.head.bias)
    before = copy.deepcopy(model.state_dict())
    twin = randomised(model, 0)
    for name, value in twin.named_parameters():
        assert not (value == before[name]).any()
    assert tied(twin) == tied(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    again = randomised(model, 0)
    assert torch.equal(again.emb.weight, twin.emb.weight)
    assert not torch.equal(randomised(model, 1).emb.weight, twin.emb.weight)


def test_the_loss_is_found_or_refused() -> None:
    """Attribute, key, or the output itself; without one the refusal says what to write."""
    one = torch.tensor(1.0)
    assert loss_of(one, {}) is loss_of({"loss": one}, {}) is one
    assert loss_of(SimpleNamespace(loss=one), {}) is one
    for bad in (torch.ones(2), {"logits": one}, (one,), SimpleNamespace(loss=None)):
        with pytest.raises(Refusal, match="loss\\(output, batch\\)"):
            loss_of(bad, {})


def test_rows_are_what_most_tensors_agree_on() -> None:
    """A tensor shared by all samples does not decide the number of samples."""
    batch = {"a": torch.ones(3, 2), "b": torch.ones(3), "shared": torch.ones(9), "n": 4}
    assert rows(batch) == 3
