"""Experts over an all-to-all by hand, and unsplit: python -m tests.benchmarks.experts

A Mixtral of transformers on ranks of gloo that see different rows, float32, in three ways: the
schedule with a row for the experts, the same exchange written with torch's collectives around the
same modules of experts, and every expert on every rank.  Also printed as JSON (`--json`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from schedlang.schedule import create_schedule
from tests.benchmarks.ways import CLIP, Sizes, Way, adamw, batch, main, scheduled, shapes

EXPERTS, CHOICES = 8, 2


def mixtral(sizes: Sizes) -> Any:
    """The same on every rank and for every way; no dropout."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    more = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOICES}
    return MixtralForCausalLM(MixtralConfig(**shapes(sizes), **more))


def spread(sizes: Sizes) -> Way:
    """A row for the experts, one for the batch."""
    sch = create_schedule(mixtral(sizes))
    sch.mesh(dp=sizes.ranks)
    sch["model.layers.*.mlp.experts"].expert_parallel(over="dp")
    sch.zero(stage=0, over="dp")
    return scheduled(sch, batch(sizes))


# -- the peers -------------------------------------------------------------------------------------


class Exchanged:
    """The forward of a module of experts of which this rank has its share."""

    def __init__(self, module: Any) -> None:
        self.inner, self.here = module.forward, EXPERTS // dist.get_world_size()
        first = dist.get_rank() * self.here
        for name, whole in list(module.named_parameters()):
            part = whole.detach()[first : first + self.here].clone()
            setattr(module, name, nn.Parameter(part))
        module.num_experts = self.here

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Tokens to their experts and back, sorted by expert on both ways."""
        ranks, chosen = dist.get_world_size(), index.flatten()
        order = chosen.argsort(stable=True)
        going = torch.bincount(chosen, minlength=EXPERTS)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going)
        give = going.view(ranks, -1).sum(1).tolist()
        take = coming.view(ranks, -1).sum(1).tolist()
        rows = x[order // CHOICES]
        came = all_to_all_single_autograd(rows, take, give, dist.group.WORLD)
        own = torch.arange(self.here).repeat(ranks).repeat_interleave(coming)
        y = self.inner(came, own[:, None], torch.ones(len(own), 1, dtype=x.dtype))
        back = all_to_all_single_autograd(y, give, take, dist.group.WORLD)
        back = back * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // CHOICES, back)


def by_hand(sizes: Sizes) -> Way:
    """The all-to-all around the same modules."""
    made = mixtral(sizes)
    for layer in made.model.layers:
        layer.mlp.experts.forward = Exchanged(layer.mlp.experts)
    return by_rows(made, sizes, lambda name: ".experts." in name)


def unsplit(sizes: Sizes) -> Way:
    """Every expert on every rank, all gradients summed."""
    return by_rows(mixtral(sizes), sizes, lambda name: False)


def by_rows(made: nn.Module, sizes: Sizes, spread_out: Callable[[str], bool]) -> Way:
    """The loop around it: this rank's rows; gradients of what is not spread are summed."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    data = {name: value.chunk(ranks)[rank] for name, value in batch(sizes).items()}
    made.train()
    parameters = dict(made.named_parameters())
    alike = [p for name, p in parameters.items() if not spread_out(name)]
    apart = [p for name, p in parameters.items() if spread_out(name)]
    optimizer = adamw(list(parameters.items()))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = made(**data).loss / ranks
        loss.backward()
        summed(alike)
        value = clipped(alike, apart, loss.detach())
        optimizer.step()
        return value

    def gradients() -> dict[str, Tensor]:
        return {
            name: gathered(p.grad) if spread_out(name) else p.grad
            for name, p in parameters.items()
            if p.grad is not None
        }

    return Way(step, gradients)


def summed(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients over all ranks, in one message."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))


def clipped(alike: list[nn.Parameter], apart: list[nn.Parameter], loss: Tensor) -> Tensor:
    """Clip by the global norm; one reduction for it and the loss, which is given back."""
    counted = [*(alike if dist.get_rank() == 0 else ()), *apart]
    held = [p.grad for p in counted if p.grad is not None]
    norms = torch._foreach_norm(held) if held else ()
    squares = torch.stack(norms).square().sum() if norms else loss.new_zeros(())
    both = torch.stack([squares, loss])
    dist.all_reduce(both)
    norm = float(both[0].sqrt())
    if norm > CLIP:
        grads = [p.grad for p in (*alike, *apart) if p.grad is not None]
        torch._foreach_mul_(grads, CLIP / (norm + 1e-6))
    return both[1]


def gathered(part: Tensor) -> Tensor:
    """The gradients of the experts of all ranks."""
    out = part.new_empty(EXPERTS, *part.shape[1:])
    dist.all_gather_into_tensor(out, part.contiguous())
    return out


OURS = {"spread": spread}
PEERS = {"by hand": by_hand, "unsplit": unsplit}

if __name__ == "__main__":
    main(__doc__.partition("\n")[0], OURS, PEERS)
