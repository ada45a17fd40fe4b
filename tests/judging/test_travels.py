"""What a model may hold that pickle turns away, and still be run on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import schedlang
from schedlang import verify_program
from schedlang.runtime.launch.pool import Pool


class Attending(nn.Module):
    """A module that holds the kernels that it may take, as trainers' attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        self.emb, self.head = nn.Embedding(22, 8), nn.Linear(8, 22)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next tokens."""
        x = self.emb(ids).unsqueeze(1)
        with sdpa_kernel(self.kernels):
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x.squeeze(1))


def batch(seed: int) -> dict[str, Any]:
    """Four rows of five tokens."""
    return {"ids": torch.randint(22, (4, 5), generator=torch.Generator().manual_seed(seed))}


def loss(output: Tensor, batch: Any) -> Tensor:
    """How badly the tokens are told."""
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def program(model: nn.Module) -> Any:
    """Replicas by DDP."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(model)

    def step(batch: Any) -> Tensor:
        ids = batch["ids"].chunk(dist.get_world_size())[dist.get_rank()]
        value = loss(ddp(ids), {"ids": ids})
        value.backward()
        return value

    return schedlang.TrainingProgram(ddp, step)


def test_a_model_that_holds_names_of_kernels_is_judged(pool: Pool) -> None:
    """A program of a model that holds values of `SDPBackend` is run, and equal."""
    options: Any = {"batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    assert verify_program(program, model=Attending(), **options).ok


def test_a_schedule_of_such_a_model_is_verified() -> None:
    """So is a schedule of it."""
    sch = schedlang.create_schedule(Attending())
    sch.mesh(dp=2)
    sch.zero(stage=1, over="dp")
    assert schedlang.verify(sch, batch=batch, loss=loss).ok
