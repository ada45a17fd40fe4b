"""https://github.com/huggingface/transformers/pull/48873: each rank trains an adapter of its own.

FSDP2 reduces gradients of sharded parameters only.  An adapter that is added afterwards is a plain
tensor beside a frozen base of DTensors, and its gradient is never averaged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, rank_sum, world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, loss, program_pair

NAMED = r"inner\.(down|up)\.weight.*ranks differ and their mean is right"


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = (nn.Linear(*s, bias=False) for s in ((WIDTH, 2), (2, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of the layer and the adapter."""
        return x + self.base(x).tanh() + self.up(self.down(x))


def model() -> nn.Module:
    """Return the model, frozen except for the adapter."""
    language_model = LanguageModel(Adapted())
    language_model.embed.requires_grad_(False)
    language_model.head.requires_grad_(False)
    return language_model


def _program(model: Any, averaged: bool) -> TrainingProgram:
    for base in (model.embed, model.inner.base, model.head):
        fully_shard(base)

    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        value = loss(model(local["ids"]), local)
        value.backward()
        for adapter in (model.inner.down, model.inner.up) if averaged else ():
            adapter.weight.grad = rank_sum(adapter.weight.grad) / world_size()
        return value

    return TrainingProgram(model, step)


# bug: each rank keeps its own rows' gradient; fixed: gradients of what is not
# sharded are averaged, too
wrong, right = program_pair(_program, False, True)
