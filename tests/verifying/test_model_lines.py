"""Refusals of models name the model's line: where rows are combined, inputs without rows, random
operators, unknown shapes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.runtime.launch.pool import Pool
from tests.proofs import assert_proven, make_plan

ROWS = 8
Body = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A head, and a function of its output."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(6, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.head(x).tanh())


def make_batch() -> dict[str, Tensor]:
    return {"x": torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(0))}


def std_loss(x: Tensor) -> Tensor:
    y = x.square().flip(-1)
    return y.std()  # rows meet


def pair_loss(x: Tensor) -> Tensor:
    scores = x @ x.T  # rows meet
    return scores.logsumexp(-1).mean()


def masked_loss(x: Tensor) -> Tensor:
    x = x.masked_fill(torch.ones(4, 4).triu(1)[:, 1].bool(), -torch.inf).softmax(-1)
    scores = x @ x.T  # rows meet
    return scores.logsumexp(-1).mean()


def max_loss(x: Tensor) -> Tensor:
    x = x.T.contiguous()
    x = x - x.amax(-1, keepdim=True)  # rows meet
    return x.square().mean()


def sum_loss(x: Tensor) -> Tensor:
    y = x.square().mean(-1)
    return y.sum()  # rows meet


@pytest.mark.parametrize("body", [std_loss, pair_loss, masked_loss, max_loss, sum_loss])
def test_where_rows_meet(pool: Pool, body: Body) -> None:
    """A loss that is no mean over parts is refused with the line that combines rows."""
    plan = make_plan(Net(body), "zero(stage=0, over=dp)", "dp=2")
    with pytest.raises(Refusal) as caught:
        prove(Case(plan, (make_batch(),) * 2, dtype="none"), pool=pool)
    code = body.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    line_number = next(n for n in range(code.co_firstlineno, 999) if "rows meet" in lines[n - 1])
    message = " ".join(caught.value.render().split())
    assert "S703" in message and f"at test_model_lines.py:{line_number}" in message


class Lists(nn.Module):
    """A model of lists of images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, images: list[Tensor], sizes: list[Tensor]) -> Tensor:
        return torch.stack([self.head(image).mean() for image in images]).mean()


def test_what_has_no_rows_names_the_forward() -> None:
    """A batch of lists is refused with the line of the forward."""
    plan = make_plan(Lists(), "zero(stage=0, over=dp)", "dp=2")
    batch = {"images": [torch.rand(n, 6) for n in (2, 3)], "sizes": [torch.tensor([1])] * 2}
    with pytest.raises(Refusal) as caught:
        account(plan, batch)
    line = Lists.forward.__code__.co_firstlineno
    message = " ".join(caught.value.render().split())
    assert "S605" in message and f"`Lists`, at test_model_lines.py:{line}" in message


class Speech(nn.Module):
    """Speech recognition with CTC loss, whose shape torch cannot infer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(
        self, sounds: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        x = sounds + self.down(self.up(sounds).relu())
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, lengths, target_lengths)


def speech_batch(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "sounds": torch.randn(ROWS, 9, 6, generator=g),
        "targets": torch.randint(1, 5, (ROWS, 3), generator=g),
        "lengths": torch.randint(7, 10, (ROWS,), generator=g),
        "target_lengths": torch.randint(1, 4, (ROWS,), generator=g),
    }


@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        ("zero(stage=1, over=dp)", "dp=2"),
        ('zero(stage=0, over=dp)\npipeline(order="GPipe", micro=2)', "dp=2"),
        ("up  shard(col, over=tp)\ndown  shard(row, over=tp)", "tp=2"),
    ],
)
def test_recognised_speech(pool: Pool, rows: str, mesh: str) -> None:
    """CTC loss is planned and proven like any other mean over rows."""
    batches = [speech_batch(seed) for seed in range(3)]
    plan = make_plan(Speech(), rows, mesh)
    assert_proven(pool, plan, batches)
    account(plan, batches[0], memory=True)


class Packed(nn.Module):
    """A GRU over packed rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden: Tensor = self.rnn(packed)[1]
        return hidden.square().mean()


def test_packed_rows() -> None:
    """Packed rows are refused at their line, with a suggestion."""
    plan = make_plan(Packed(), "zero(stage=0, over=dp)", "dp=2")
    with pytest.raises(Refusal) as caught:
        account(plan, {"x": torch.rand(ROWS, 5, 6), "lengths": torch.full((ROWS,), 4)})
    message = " ".join(caught.value.render().split())
    line = Packed.forward.__code__.co_firstlineno + 1
    assert f"`test_model_lines.py:{line}`" in message and "pad instead of packing" in message


def shuffled_mean(x: Tensor) -> Tensor:
    return (x * torch.randperm(4, device=x.device)).mean()


def test_what_draws_apart() -> None:
    """A random operator without a logical form is refused with its line."""
    plan = make_plan(Net(shuffled_mean), "zero(stage=0, over=dp)", "dp=2")
    with pytest.raises(Refusal) as caught:
        account(plan, make_batch())
    line = shuffled_mean.__code__.co_firstlineno + 1
    message = " ".join(caught.value.render().split())
    assert "S812" in message and f"at test_model_lines.py:{line}," in message
