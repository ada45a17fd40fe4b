"""Models that ranks get by pickle, with more than pickle keeps, are judged and verified there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import schedlang
from schedlang import verify_program
from schedlang.runtime.launch.pool import Pool


class AttentionNet(nn.Module):
    """An attention module that stores its SDPA backends, as trainers' modules do."""

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
    """Return the cross-entropy of the tokens."""
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
    """A program of a model with `SDPBackend` values passes."""
    options: Any = {"batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    assert verify_program(program, model=AttentionNet(), **options).ok


def test_a_schedule_of_such_a_model_is_verified() -> None:
    """A schedule of such a model is verified."""
    sch = schedlang.create_schedule(AttentionNet())
    sch.mesh(dp=2)
    sch.zero(stage=1, over="dp")
    assert schedlang.verify(sch, batch=batch, loss=loss).ok


def routed() -> Any:
    """Return a model of transformers whose loss reads the router logits that hooks collect."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 22, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    config = transformers.MixtralConfig(**sizes, **heads, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def routed_batch(seed: int) -> dict[str, Any]:
    """Return the tokens under the model's name for them."""
    return {"input_ids": batch(seed)["ids"]}


def routed_loss(output: Any, batch: Any) -> Tensor:
    """Return the mean of logits, and of router logits."""
    logits, routers = output.logits, torch.stack(output.router_logits)
    return logits.square().mean() + routers.square().mean()


def test_outputs_that_hooks_collect_are_collected_on_ranks(pool: Pool) -> None:
    """Ranks know the classes of a model that was made elsewhere, so its hooks collect there."""

    def program(model: nn.Module) -> Any:
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

        def step(batch: Any) -> Tensor:
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            value = routed_loss(ddp(**{k: v.chunk(size)[rank] for k, v in batch.items()}), {})
            value.backward()
            return value

        return schedlang.TrainingProgram(ddp, step)

    options: Any = {"batch": routed_batch, "loss": routed_loss, "ranks": 2, "pool": pool}
    report = verify_program(program, model=routed(), **options)
    assert report.ok, str(report)
