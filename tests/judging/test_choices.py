"""Programs with experts in a low dtype: roundings tip a router's choice, and that is no mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge.discrete_choices import (
    ChoiceReplay,
    RecordedChoices,
    drop_ambiguous_rows,
)
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.moe import Experts
from tests.judging.catches.words import VOCAB, Words

RUN = (0, 0, False)


class Two(nn.Module):
    """Two layers of experts, each beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """What the second makes of the first's."""
        x = x + self.first(x)
        return x + self.second(x)


def batch(seed: int) -> dict[str, Tensor]:
    """Words enough for some whose two best scores are about the same."""
    draw = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(VOCAB, (16, 8), generator=draw)}


def loss(output: Tensor, batch: Any) -> Tensor:
    """The mean over all words."""
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def rows(model: nn.Module, dim: int = 0) -> TrainingProgram:
    """Right: each rank has a part of the batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model, find_unused_parameters=True)

    def step(batch: Any) -> Tensor:
        mine = {name: value.chunk(size, dim)[rank] for name, value in batch.items()}
        value = loss(replica(mine["ids"]), mine)
        value.backward()
        return value

    return TrainingProgram(replica, step)


def words(model: nn.Module) -> TrainingProgram:
    """Right: each rank has a part of every row."""
    return rows(model, dim=1)


def next_best(model: Any) -> TrainingProgram:
    """Wrong: words go to their second and third expert."""
    for layer in (model.inner.first, model.inner.second):
        layer.routed = lambda x, layer=layer: tuple(
            part[..., 1:] for part in layer.router(x).softmax(-1).topk(3)
        )
    return rows(model)


def never_the_first(model: Any) -> TrainingProgram:
    """Wrong: no word goes to the first expert, which would be one of its best two or not."""
    for layer in (model.inner.first, model.inner.second):

        def routed(x: Tensor, layer: Any = layer) -> tuple[Tensor, Tensor]:
            scores = layer.router(x).softmax(-1)
            which = scores.index_fill(-1, torch.tensor([0]), -1.0).topk(2).indices
            return scores.gather(-1, which), which

        layer.routed = routed
    return rows(model)


def scaled(model: Any) -> TrainingProgram:
    """Wrong: the gradient of routers is a half too large."""
    made = rows(model)

    def step(batch: Any) -> Any:
        value = made.step(batch)
        for layer in (model.inner.first, model.inner.second):
            layer.router.weight.grad.mul_(1.5)
        return value

    return TrainingProgram(made.module, step)


def judged(pool: Pool, program: Any, dtype: str, seed: int) -> Report:
    """The report on a program of this model."""
    torch.manual_seed(seed)
    sides: dict[str, Any] = {"model": Words(Two()), "batch": batch, "loss": loss}
    return verify_program(program, ranks=2, dtype=dtype, seed=seed, pool=pool, **sides)


RIGHT, WRONG = (rows, words), (next_best, never_the_first, scaled)


# on this seed roundings tip choices, and the bounds of the choices in float64 are too tight
@pytest.mark.parametrize("program", RIGHT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_choices_that_roundings_tip_are_those_of_ranks(
    pool: Pool, program: Any, dtype: str
) -> None:
    """The original chooses as ranks did where two scores are as near; the report says how often."""
    report = judged(pool, program, dtype, seed=4)
    assert report.ok, str(report)
    assert "roundings tip" in dict(report.facts)["choices"]


@pytest.mark.parametrize("program", WRONG)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wrong_experts_are_no_rounding(pool: Pool, program: Any, dtype: str) -> None:
    """Neither is what else is wrong where choices are held, nor are such rows left undecided."""
    report = judged(pool, program, dtype, seed=4)
    assert report.exit_code == 1 and not report.unchecked, str(report)


def _routes(ranks: dict[Any, Any], far: float = 0.02) -> ChoiceReplay:
    return ChoiceReplay(ranks, {(RUN, 0): torch.full((2,), far)})


SCORES = torch.tensor([[0.50, 0.51, 0.10], [0.70, 0.10, 0.40]])
BEST = RecordedChoices(SCORES, torch.tensor([[1], [0]]))


def _seen(scores: list[list[float]], chosen: list[list[int]]) -> dict[Any, Any]:
    return {RUN: [RecordedChoices(torch.tensor(scores), torch.tensor(chosen))]}


def test_only_a_choice_that_roundings_explain_is_taken_over() -> None:
    """Where scores are near each other, and are those of a rank; in whatever order these come."""
    theirs = [[0.70, 0.10, 0.40], [0.505, 0.504, 0.10]]
    routes = _routes(_seen(theirs, [[2], [0]]))
    held = routes._as_ranks(RUN, 0, BEST)
    assert held is not None and held.tolist() == [[0], [0]]
    assert routes.held_count == 1 and not routes.alternatives
    others = [[0.70, 0.10, 0.40], [0.56, 0.51, 0.10]]  # a rank's scores are wrong
    routes = _routes(_seen(others, [[0], [0]]))
    held = routes._as_ranks(RUN, 0, BEST)
    assert held is not None and held.tolist() == [[1], [0]] and not routes.alternatives
    routes = _routes(_seen(theirs, [[2], [0]]), far=0.001)
    held = routes._as_ranks(RUN, 0, BEST)  # 0.50 and 0.51 are further apart than roundings move
    assert held is not None and held.tolist() == [[1], [0]] and not routes.held_count


def test_a_choice_that_no_rank_tells_leaves_open_what_it_explains() -> None:
    """Two rows of one word that chose apart, or a router that chooses by no operator of torch."""
    twice = [[0.505, 0.504, 0.10], [0.505, 0.504, 0.10]]
    for ranks in (_seen(twice, [[0], [1]]), {}):
        routes = _routes(ranks)
        routes._as_ranks(RUN, 0, BEST)
        assert [*routes.alternatives] == [(RUN, 0)] and [*routes.alternatives[RUN, 0]] == [0]
    small, large, exact = (
        Row("SGD", kind, "w", error, 1.0, False, 0)
        for kind, error in (
            ("gradients in working dtype", 3.0),
            ("loss in working dtype", 90.0),
            ("optimizer step", 1.0),
        )
    )
    moved = [Row("SGD", one.kind, "w", 1.5, 1.0, True, 0) for one in (small, large)]
    left, said = drop_ambiguous_rows([small, large, exact], moved)
    assert left == [large, exact] and "1 rows" in said[0]
