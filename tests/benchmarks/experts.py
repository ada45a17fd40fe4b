"""Expert parallelism against a manual all-to-all, and unsplit: python -m tests.benchmarks.experts

A transformers Mixtral on gloo ranks with different rows, float32, in three variants: a schedule
with a row for the experts, the same exchange written with torch's collectives around the same
expert modules, and all experts on every rank.  Also printed as JSON (`--json`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from schedlang.schedule import create_schedule
from tests.benchmarks.step_variants import (
    CLIP,
    Sizes,
    StepVariant,
    adamw,
    batch,
    config_sizes,
    main,
    scheduled,
)

EXPERTS, CHOICES = 8, 2


def mixtral(sizes: Sizes) -> Any:
    """Return the same Mixtral on every rank and for every variant; no dropout."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    expert_sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    return MixtralForCausalLM(MixtralConfig(**config_sizes(sizes), **expert_sizes))


def expert_parallel(sizes: Sizes) -> StepVariant:
    """Return the variant of a schedule with an expert row and a ZeRO row."""
    sch = create_schedule(mixtral(sizes))
    sch.mesh(dp=sizes.ranks)
    sch["model.layers.*.mlp.experts"].expert_parallel(over="dp")
    sch.zero(stage=0, over="dp")
    return scheduled(sch, batch(sizes))


# -- the peers -------------------------------------------------------------------------------------


class ExchangedExperts:
    """The forward of an expert module whose experts are split over ranks."""

    def __init__(self, module: Any) -> None:
        self.inner, self.here = module.forward, EXPERTS // dist.get_world_size()
        first_expert = dist.get_rank() * self.here
        for name, parameter in list(module.named_parameters()):
            part = parameter.detach()[first_expert : first_expert + self.here].clone()
            setattr(module, name, nn.Parameter(part))
        module.num_experts = self.here

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send tokens to their experts and back, sorted by expert."""
        ranks, expert_index = dist.get_world_size(), index.flatten()
        order = expert_index.argsort(stable=True)
        send_counts = torch.bincount(expert_index, minlength=EXPERTS)
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts)
        send_sizes = send_counts.view(ranks, -1).sum(1).tolist()
        recv_sizes = recv_counts.view(ranks, -1).sum(1).tolist()
        rows = x[order // CHOICES]
        received = all_to_all_single_autograd(rows, recv_sizes, send_sizes, dist.group.WORLD)
        local_index = torch.arange(self.here).repeat(ranks).repeat_interleave(recv_counts)
        y = self.inner(
            received, local_index[:, None], torch.ones(len(local_index), 1, dtype=x.dtype)
        )
        returned = all_to_all_single_autograd(y, send_sizes, recv_sizes, dist.group.WORLD)
        returned = returned * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // CHOICES, returned)


def by_hand(sizes: Sizes) -> StepVariant:
    """Return the variant with a manual all-to-all around the same modules."""
    model = mixtral(sizes)
    for layer in model.model.layers:
        layer.mlp.experts.forward = ExchangedExperts(layer.mlp.experts)
    return data_parallel(model, sizes, lambda name: ".experts." in name)


def unsplit(sizes: Sizes) -> StepVariant:
    """Return the variant with all experts on every rank and summed gradients."""
    return data_parallel(mixtral(sizes), sizes, lambda name: False)


def data_parallel(model: nn.Module, sizes: Sizes, is_expert: Callable[[str], bool]) -> StepVariant:
    """Return a data parallel training loop; gradients of replicated parameters are summed."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    data = {name: value.chunk(ranks)[rank] for name, value in batch(sizes).items()}
    model.train()
    parameters = dict(model.named_parameters())
    replicated = [p for name, p in parameters.items() if not is_expert(name)]
    expert_params = [p for name, p in parameters.items() if is_expert(name)]
    optimizer = adamw(list(parameters.items()))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**data).loss / ranks
        loss.backward()
        reduce_grads(replicated)
        value = clip_grads(replicated, expert_params, loss.detach())
        optimizer.step()
        return value

    def gradients() -> dict[str, Tensor]:
        return {
            name: gather_grads(p.grad) if is_expert(name) else p.grad
            for name, p in parameters.items()
            if p.grad is not None
        }

    return StepVariant(step, gradients)


def reduce_grads(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce gradients in one flat message."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def clip_grads(
    replicated: list[nn.Parameter], expert_params: list[nn.Parameter], loss: Tensor
) -> Tensor:
    """Clip by the global norm, with one all-reduce for norm and loss; return the loss."""
    counted = [*(replicated if dist.get_rank() == 0 else ()), *expert_params]
    grads_here = [p.grad for p in counted if p.grad is not None]
    norms = torch._foreach_norm(grads_here) if grads_here else ()
    squares = torch.stack(norms).square().sum() if norms else loss.new_zeros(())
    squares_and_loss = torch.stack([squares, loss])
    dist.all_reduce(squares_and_loss)
    norm = float(squares_and_loss[0].sqrt())
    if norm > CLIP:
        grads = [p.grad for p in (*replicated, *expert_params) if p.grad is not None]
        torch._foreach_mul_(grads, CLIP / (norm + 1e-6))
    return squares_and_loss[1]


def gather_grads(part: Tensor) -> Tensor:
    """Return the gathered gradients of all experts."""
    gathered_grad = part.new_empty(EXPERTS, *part.shape[1:])
    dist.all_gather_into_tensor(gathered_grad, part.contiguous())
    return gathered_grad


SCHEDLANG = {"spread": expert_parallel}
PEERS = {"by hand": by_hand, "unsplit": unsplit}

if __name__ == "__main__":
    main(__doc__.partition("\n")[0], SCHEDLANG, PEERS)
