"""https://github.com/huggingface/transformers/pull/48873: each rank trains an adapter of its own.

FSDP2 reduces the gradients of what it has sharded.  An adapter that is put in afterwards is a plain
tensor next to a frozen base of DTensors, and nobody averages its gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, ranks, total
from tests.judging.catches.words import WIDTH, Words, loss, pair

NAMED = r"inner\.(down|up)\.weight.*ranks differ and their mean is right"


class Adapted(nn.Module):
    """A frozen layer and a product of two thin ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = (nn.Linear(*s, bias=False) for s in ((WIDTH, 2), (2, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        """What the layer gives, and what the adapter adds."""
        return x + self.base(x).tanh() + self.up(self.down(x))


def model() -> nn.Module:
    """Everything but the adapter is frozen."""
    made = Words(Adapted())
    made.embed.requires_grad_(False)
    made.head.requires_grad_(False)
    return made


def _program(model: Any, averaged: bool) -> TrainingProgram:
    for base in (model.embed, model.inner.base, model.head):
        fully_shard(base)

    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        value = loss(model(mine["ids"]), mine)
        value.backward()
        for adapter in (model.inner.down, model.inner.up) if averaged else ():
            adapter.weight.grad = total(adapter.weight.grad) / ranks()
        return value

    return TrainingProgram(model, step)


# as it was written: each rank keeps its own rows' gradient; mended: gradients of what is not
# sharded are averaged, too
wrong, right = pair(_program, False, True)
