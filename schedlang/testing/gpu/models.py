"""A small language model, its batches, and how it is trained untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 3
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; `rate` of the blocks' outputs is dropped."""

    width: int = 256
    depth: int = 4
    heads: int = 8
    words: int = 1000
    rows: int = 8
    length: int = 128
    rate: float = 0.0


TINY = Shape(16, 4, 4, 24, 8, 8)


class Attention(nn.Module):
    """Causal."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        # a bias of keys changes nothing, so that its gradient would be rounding alone
        self.q, self.k, self.v = (
            nn.Linear(shape.width, shape.width, bias=name != "k") for name in "qkv"
        )
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position to those before it."""
        each = (one(x).unflatten(-1, (self.heads, -1)) for one in (self.q, self.k, self.v))
        q, k, v = (one.transpose(1, 2) for one in each)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product of a gate and a projection, projected back."""
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.calm, self.attn = nn.LayerNorm(shape.width), Attention(shape)
        self.norm, self.mlp = nn.RMSNorm(shape.width, eps=1e-6), Gated(shape.width)
        self.drop = nn.Dropout(shape.rate)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after both."""
        x = x + self.drop(self.attn(self.calm(x)))
        found: Tensor = x + self.drop(self.mlp(self.norm(x)))
        return found


class Words(nn.Module):
    """Embedding, blocks, and a head with its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def model(shape: Shape, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights at every call, rounded to a type; in host memory."""
    torch.manual_seed(0)
    return Words(shape).to(dtype)


def batch(shape: Shape, step: int) -> dict[str, Tensor]:
    """The batch of a step, in host memory; some rows end early."""
    draw = torch.Generator().manual_seed(100 + step)
    size = (shape.rows, shape.length)
    ids, labels = (torch.randint(shape.words, size, generator=draw) for _ in range(2))
    labels[1, shape.length // 2 :] = labels[-1, 2:] = -100
    return {"ids": ids, "labels": labels}


def batches(shape: Shape, device: str) -> list[dict[str, Tensor]]:
    """Return the batches of all steps, on a device."""
    return [{k: v.to(device) for k, v in batch(shape, step).items()} for step in range(STEPS)]


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, eps=1e-5)


Optimizer = Callable[..., torch.optim.Optimizer]
Seen = dict[str, Tensor]  # losses, and by how much each parameter changed


def moved(shape: Shape, dtype: torch.dtype, after: Mapping[str, Tensor]) -> Seen:
    """Return the change of each parameter by training: what errs little in itself errs here."""
    first = dict(model(shape, dtype).named_parameters())
    return {f"change of {n}": after[n].cpu() - first[n].detach() for n in first}


def untouched(
    shape: Shape,
    device: str,
    dtype: torch.dtype = torch.float64,
    make: Optimizer = sgd,
    low: torch.dtype | None = None,
) -> Seen:
    """Some steps of the model as it is; `low`: under autocast to it. Dropout is seeded by 1."""
    subject = model(shape, dtype).to(device)
    optimizer = make(subject.named_parameters())
    seen: Seen = {}
    torch.manual_seed(1)
    for step, given in enumerate(batches(shape, device)):
        optimizer.zero_grad()
        kind = torch.device(device).type
        with torch.autocast(kind, low, enabled=low is not None):
            loss: Any = subject(**given)["loss"]
        loss.backward()
        optimizer.step()
        seen[f"loss {step}"] = loss.detach().cpu()
    return seen | moved(shape, dtype, {n: p.detach() for n, p in subject.named_parameters()})
