"""What a module takes whose output is wrong: a sentence only where it lies as it should not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge.module_inputs import RankCall, explain_inputs
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.parts import AllWords, own
from tests.judging.catches.words import WIDTH, Words, batch, in_words, loss

ROWS, PLACES = 4, 6


def whole() -> Tensor:
    """What the original takes: rows, words, features."""
    return torch.randn(
        ROWS, PLACES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def unlike(x: Tensor) -> Tensor:
    """An output that no other rank has."""
    return x.flip(-1) + 1


def doubled(x: Tensor) -> Tensor:
    """What the original's module makes: features weigh otherwise."""
    return x * torch.arange(1.0, 1.0 + x.shape[-1], dtype=x.dtype)


ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "all": (lambda x: x, ""),
    "a block": (lambda x: x[2:, :3], ""),
    "the first and the last": (lambda x: x[:, [0, 1, 4, 5]], ""),
    "halves exchanged": (lambda x: x.roll(3, 1), "holds along dim 1 the places [3, 4, 5, 0, 1, 2]"),
    "a half twice": (lambda x: x[:, [0, 1, 0, 1]], "holds along dim 1 the places [0, 1, 0, 1]"),
    "rows backwards": (lambda x: x.flip(0), "holds along dim 0 the places [3, 2, 1, 0]"),
    "no transpose": (
        lambda x: x.transpose(1, 2).reshape(x.shape),
        "has the right numbers at other places",
    ),
    "other numbers": (lambda x: x + 1, ""),
}


@pytest.mark.parametrize("laid, said", ORDERS.values(), ids=ORDERS)
def test_an_order_is_told(laid: Callable[[Tensor], Tensor], said: str) -> None:
    """Parts that keep the order are none; the places of others are listed."""
    value = laid(whole())
    found = explain_inputs([whole()], [RankCall(1, [value], unlike(value))], lambda x: None)
    assert said in found if said else not found, found
    assert not said or found.endswith("(rank 1)")


def test_ids_are_no_order() -> None:
    """Whole numbers come again and again: where they lie tells nothing."""
    ids = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    value = ids.flip(0, 1) * 1.0
    value[0, 0] = value[3, 5] = 7.0
    assert explain_inputs([ids], [RankCall(0, [value], unlike(value))], lambda x: None) == ""


def test_features_may_lie_otherwise() -> None:
    """As the weights of a rank do; not where the original's module makes the wrong output of it."""
    value = whole().roll(2, -1)
    for output, said in ((unlike(value), ""), (doubled(value), "along dim 2 the places [6, 7, 0")):
        found = explain_inputs([whole()], [RankCall(0, [value], output)], doubled)
        assert said in found if said else not found, found


def test_other_rows_are_told_of_what_is_computed_together() -> None:
    """Two ranks that give the same of other rows; those that give their own are right."""
    halves = whole().chunk(2)
    same = [RankCall(k, [half], torch.ones(3)) for k, half in enumerate(halves)]
    found = explain_inputs([whole()], same, lambda x: None)
    assert "have other rows there (rank 0 [0, 1] and rank 1 [2, 3])" in found, found
    apart = [RankCall(k, [half], unlike(half)) for k, half in enumerate(halves)]
    assert explain_inputs([whole()], apart, lambda x: None) == ""
    alike = [RankCall(k, [halves[0]], torch.ones(3)) for k in range(2)]
    assert explain_inputs([whole()], alike, lambda x: None) == ""


# ---- In verdicts.


def both() -> nn.Module:
    """Words, and a layer up and down between them."""
    return Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def split(rows: bool) -> Any:
    """The layers in two; `rows`: each rank reads its own, as if it had a copy for itself."""

    def program(model: Any) -> TrainingProgram:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan: Any = {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)

        def step(batch: Any) -> Tensor:
            mine = {"ids": own(batch["ids"])} if rows else batch
            value = loss(model(mine["ids"]), mine)
            value.backward()
            return value

        return TrainingProgram(model, step)

    return program


class Mixed(nn.Module):
    """Each word takes the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out, self.order = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        """In parts of words: those of all are put together, in turn from some rank."""
        x = self.gate(x)
        if not self.order:
            return self.out(x.cumsum(1))
        parts = AllWords.apply(x).chunk(2, 1)
        mixed = torch.cat([*parts][:: self.order], 1).cumsum(1)
        return self.out(mixed.chunk(2, 1)[dist.get_rank()])


def test_ranks_of_one_copy_that_read_other_rows(pool: Pool) -> None:
    """The layer that sums over ranks is named, and why: it is right by itself."""
    torch.manual_seed(0)
    given = {"model": both(), "batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    assert verify_program(split(False), **given).ok
    said = dict(verify_program(split(True), **given).localised)["first module"]
    assert said.startswith("the output of `inner.2`"), said
    assert "other rows there (rank 0 [0, 1] and rank 1 [2, 3])" in said, said


def test_words_that_are_put_together_in_another_order(pool: Pool) -> None:
    """No mask is blamed: the order is told."""
    torch.manual_seed(0)
    given = {"model": Words(Mixed()), "batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    for order in (1, -1):

        def program(model: Any, order: int = order) -> TrainingProgram:
            model.inner.order = order
            return in_words(model)

        report = verify_program(program, **given)
        assert report.ok == (order == 1), str(report)
    said = dict(report.localised)["first module"]
    assert "the words in the order [3, 4, 5, 0, 1, 2]" in said and "mask" not in said, said
