"""Programs with experts in a low dtype: router choices tipped by rounding are no mistake."""

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
from tests.judging.catches.language_model import VOCAB, LanguageModel
from tests.judging.catches.moe import Experts

RUN = (0, 0, False)


class TwoLayers(nn.Module):
    """Two layers of experts with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers."""
        x = x + self.first(x)
        return x + self.second(x)


def batch(seed: int) -> dict[str, Tensor]:
    """Return enough tokens that some have nearly equal best scores."""
    draw = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(VOCAB, (16, 8), generator=draw)}


def loss(output: Tensor, batch: Any) -> Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def split_rows(model: nn.Module, dim: int = 0) -> TrainingProgram:
    """Right: each rank has a part of the batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model, find_unused_parameters=True)

    def step(batch: Any) -> Tensor:
        local = {name: value.chunk(size, dim)[rank] for name, value in batch.items()}
        value = loss(replica(local["ids"]), local)
        value.backward()
        return value

    return TrainingProgram(replica, step)


def split_tokens(model: nn.Module) -> TrainingProgram:
    """Right: each rank has a part of the tokens of every row."""
    return split_rows(model, dim=1)


def next_best(model: Any) -> TrainingProgram:
    """Wrong: tokens go to their second and third expert."""
    for layer in (model.inner.first, model.inner.second):
        layer.routed = lambda x, layer=layer: tuple(
            part[..., 1:] for part in layer.router(x).softmax(-1).topk(3)
        )
    return split_rows(model)


def never_first(model: Any) -> TrainingProgram:
    """Wrong: no token goes to expert 0."""
    for layer in (model.inner.first, model.inner.second):

        def routed(x: Tensor, layer: Any = layer) -> tuple[Tensor, Tensor]:
            scores = layer.router(x).softmax(-1)
            indices = scores.index_fill(-1, torch.tensor([0]), -1.0).topk(2).indices
            return scores.gather(-1, indices), indices

        layer.routed = routed
    return split_rows(model)


def router_scaled(model: Any) -> TrainingProgram:
    """Wrong: router gradients are 1.5 times too large."""
    right_program = split_rows(model)

    def step(batch: Any) -> Any:
        value = right_program.step(batch)
        for layer in (model.inner.first, model.inner.second):
            layer.router.weight.grad.mul_(1.5)
        return value

    return TrainingProgram(right_program.module, step)


def judge_program(pool: Pool, program: Any, dtype: str, seed: int) -> Report:
    """Judge a program of this model, and return the report."""
    torch.manual_seed(seed)
    sides: dict[str, Any] = {"model": LanguageModel(TwoLayers()), "batch": batch, "loss": loss}
    return verify_program(program, ranks=2, dtype=dtype, seed=seed, pool=pool, **sides)


RIGHT, WRONG = (split_rows, split_tokens), (next_best, never_first, router_scaled)


# with this seed rounding tips choices, and bounds from float64 choices would be too tight
@pytest.mark.parametrize("program", RIGHT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_choices_that_roundings_tip_are_those_of_ranks(
    pool: Pool, program: Any, dtype: str
) -> None:
    """Where scores nearly tie, the original follows the ranks' choices; the report counts them."""
    report = judge_program(pool, program, dtype, seed=4)
    assert report.ok, str(report)
    assert "roundings tip" in dict(report.facts)["choices"]


@pytest.mark.parametrize("program", WRONG)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wrong_experts_are_no_rounding(pool: Pool, program: Any, dtype: str) -> None:
    """Wrong programs fail, and no row stays undecided."""
    report = judge_program(pool, program, dtype, seed=4)
    assert report.exit_code == 1 and not report.unchecked, str(report)


def _replay_of(ranks: dict[Any, Any], far: float = 0.02) -> ChoiceReplay:
    return ChoiceReplay(ranks, {(RUN, 0): torch.full((2,), far)})


SCORES = torch.tensor([[0.50, 0.51, 0.10], [0.70, 0.10, 0.40]])
BEST = RecordedChoices(SCORES, torch.tensor([[1], [0]]))


def _recorded(scores: list[list[float]], indices: list[list[int]]) -> dict[Any, Any]:
    return {RUN: [RecordedChoices(torch.tensor(scores), torch.tensor(indices))]}


def test_only_a_choice_that_roundings_explain_is_taken_over() -> None:
    """A choice is taken over if scores nearly tie and equal a rank's, in any order of tokens."""
    rank_scores = [[0.70, 0.10, 0.40], [0.505, 0.504, 0.10]]
    routes = _replay_of(_recorded(rank_scores, [[2], [0]]))
    choice = routes._as_ranks(RUN, 0, BEST)
    assert choice is not None and choice.tolist() == [[0], [0]]
    assert routes.held_count == 1 and not routes.alternatives
    wrong_scores = [[0.70, 0.10, 0.40], [0.56, 0.51, 0.10]]  # the rank's scores are wrong
    routes = _replay_of(_recorded(wrong_scores, [[0], [0]]))
    choice = routes._as_ranks(RUN, 0, BEST)
    assert choice is not None and choice.tolist() == [[1], [0]] and not routes.alternatives
    routes = _replay_of(_recorded(rank_scores, [[2], [0]]), far=0.001)
    choice = routes._as_ranks(RUN, 0, BEST)  # 0.50 and 0.51 differ by more than rounding
    assert choice is not None and choice.tolist() == [[1], [0]] and not routes.held_count


def test_a_choice_that_no_rank_tells_leaves_open_what_it_explains() -> None:
    """Equal tokens with different choices, or unseen choices, leave explained rows undecided."""
    twice = [[0.505, 0.504, 0.10], [0.505, 0.504, 0.10]]
    for ranks in (_recorded(twice, [[0], [1]]), {}):
        routes = _replay_of(ranks)
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
    moved_rows = [Row("SGD", row.kind, "w", 1.5, 1.0, True, 0) for row in (small, large)]
    kept_rows, messages = drop_ambiguous_rows([small, large, exact], moved_rows)
    assert kept_rows == [large, exact] and "1 rows" in messages[0]
