"""Knowledge distillation: a frozen teacher in evaluation beside a student, in one model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import make_plan, sgd

TENSOR = "student.layers.*.0  shard(col, over=tp)\nstudent.layers.*.2  shard(row, over=tp)\n"
LAYOUTS = {
    "zero3": ("zero(stage=3, over=dp)", "dp=2"),
    "tp": (TENSOR, "tp=2"),
    "pp": ('student.layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
}


class Words(nn.Module):
    """Layers with dropout between words."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(layers)
        )
        self.drop = nn.Dropout(0.0 if layers == 2 else 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + self.drop(layer(hidden))
        scores: Tensor = self.head(hidden)
        return scores


class Distilled(nn.Module):
    """A student of two layers with a teacher of three, which stays in evaluation."""

    def __init__(self, inference: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = Words(2), Words(3)
        self.teacher.requires_grad_(False)
        self.without_graph = torch.inference_mode if inference else torch.no_grad
        self.double().train()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, ids: Tensor) -> Tensor:
        with self.without_graph():
            target = F.softmax(self.teacher(ids) / 2.0, -1)
        logs = F.log_softmax(self.student(ids) / 2.0, -1)
        return 4.0 * F.kl_div(logs, target.clone(), reduction="batchmean")


def batch(seed: int) -> dict[str, Tensor]:
    """Return six rows."""
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(11, (6, 5), generator=generator)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_student_learns_as_in_a_plain_loop(
    inference: bool, layout: str, threads: Threads
) -> None:
    """Losses and parameters after three steps are equal, in `no_grad` and in `inference_mode`."""
    rows, mesh = LAYOUTS[layout]

    def body() -> Any:
        program = build(make_plan(Distilled(inference), rows, mesh), batch(0), optimizer=sgd)
        return [program.train_step(batch(seed)) for seed in range(3)], program.state_dict()

    model, losses = Distilled(inference), []
    optimizer = sgd((n, p) for n, p in model.named_parameters() if p.requires_grad)
    for seed in range(3):
        optimizer.zero_grad()
        losses.append(model(**batch(seed)))
        losses[-1].backward()
        optimizer.step()
    state = copy.deepcopy(dict(model.state_dict()))
    for found, left in threads.run(body, 2):
        torch.testing.assert_close(found, [x.detach() for x in losses], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(left, state, rtol=1e-9, atol=1e-12)
