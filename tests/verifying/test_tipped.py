"""Tests of numbers that roundings tip: a proof follows them, and follows nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.working_dtype import TIPPED
from schedlang.report import Report
from schedlang.runtime.activation_memory import quantized
from schedlang.runtime.activation_memory.quantized import stream
from schedlang.runtime.rng.logical_dropout import mixed
from tests.engine import Threads
from tests.proofs import planned

WIDTH = 32
ROWS = "inner  compress(activations, int4, block=32)\nzero(stage=0, over=dp)"


class Net(nn.Module):
    """A layer that saves what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.inner(x) / 8)) ** 2).mean()


NEAR = 2.0**-19  # by how much less than a whole number: some roundings of float32


def _nearly() -> Tensor:
    """Rows from 0 to 15, so that a step is 1, whose numbers in the first step are nearly whole."""
    parts = []
    for samples in ((0, 1, 2), (3, 4, 5)):
        places = torch.arange(1, 3 * WIDTH + 1)
        bits = mixed(places, torch.tensor(stream("inner", 0, 0, samples, 1)))
        x = (torch.arange(3 * WIDTH) % 13 + 2 - bits.double() / 2**53 - NEAR).float()
        x.view(3, WIDTH)[:, :2] = torch.tensor([0.0, 15.0])
        parts.append(x.view(3, WIDTH))
    return torch.cat(parts)


def _report(threads: Threads) -> Report:
    batches = [{"x": _nearly()}, {"x": torch.randn(4, WIDTH)}]
    plan = planned(Net(), ROWS, "dp=2", "lossy")
    return prove(Case(plan, tuple(batches)), pool=threads)


def _more(drawn: Callable[..., Tensor], by: float) -> Callable[..., Tensor]:
    """Sums of float32 that are off by some; those of the original are not."""

    def other(like: Tensor, first: int, stream: int) -> Tensor:
        found = drawn(like, first, stream)
        return found + by if like.dtype == torch.float32 else found

    return other


def test_a_number_that_rounding_tips_is_no_difference(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either number is right: rows of the working dtype hold, within their own gates."""
    monkeypatch.setattr(quantized, "_draws", _more(quantized._draws, 2 * NEAR))
    report = _report(threads)
    assert report.ok, [row for row in report.rows if not row.ok][:3]
    assert any(row.note == TIPPED and "in working dtype" in row.kind for row in report.rows)
    assert "as ranks took them" in dict(report.facts)["in fewer bits"]


def test_other_numbers_are_a_difference(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that no rounding explains are told, although they are noted as well."""
    monkeypatch.setattr(quantized, "_draws", _more(quantized._draws, 0.5))
    report = _report(threads)
    assert not report.ok
    bad = {row.kind for row in report.rows if not row.ok}
    assert "gradients in working dtype" in bad
    assert all(kind.endswith("in working dtype") for kind in bad)


def test_where_nothing_is_tipped_nothing_is_said(threads: Threads) -> None:
    """The same sums round alike: the original is run once, as it is."""
    report = _report(threads)
    assert report.ok and not any(row.note == TIPPED for row in report.rows)
    assert "in fewer bits" not in dict(report.facts)
