"""Small float64 networks for injected bugs, each with the one feature that its bug needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6


class Residual(nn.Module):
    """A residual block: up, tanh, down."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class DroppingTwice(nn.Module):
    """A residual block with one dropout for both of its layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.drop(self.up(x)))))


class Masked(nn.Module):
    """A residual block whose inner module zeroes elements by a mask argument."""

    class Inner(nn.Module):
        """The inner module with the mask argument."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.down(torch.where(keep, self.up(x), 0.0).tanh())

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = self.Inner(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x > 0)


class Points(nn.Module):
    """Blocks between two linear layers, with a squared error: one target for each sample."""

    def __init__(self, *blocks: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return ((self.head(h)[..., 0] - y) ** 2).mean()


class Strided(nn.Module):
    """A residual block whose first layer gets a transposed, non-contiguous input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x.t().contiguous().t())))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it: y = W x + B A x."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class AdaptedBlock(nn.Module):
    """A residual block with an adapted layer going up."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = Adapted(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Smoothed(nn.Module):
    """A tiny language model whose loss smooths its labels."""

    def __init__(self, vocab_size: int = 12, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.block = Residual(width)
        self.head = nn.Linear(width, vocab_size)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.block(self.embed(ids)))
        logits = logits.view(-1, logits.shape[-1])
        return F.cross_entropy(logits, labels.view(-1), label_smoothing=0.2)


class Gated(nn.Module):
    """A residual block whose middle is multiplied by one number that all features share."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.gate)


class Regrouped(nn.Module):
    """A block that reshapes its hidden features into groups and multiplies by group sums."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        parts = h.view(*h.shape[:-1], 3, -1)  # three of four features: two ranks would cut one
        return x + self.down((parts * parts.sum(-2, keepdim=True)).flatten(-2))


class OneKeyHead(nn.Module):
    """Attention of several query heads to one key head that they share."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.k = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], -1, x.shape[-1])
        scores = torch.tanh(q * self.k(x).unsqueeze(2))
        return x + self.down((scores * q).flatten(2))


class NormedMiddle(nn.Module):
    """A block with a softmax over its hidden features."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.softmax(self.up(x), -1))


class NormedParts(nn.Module):
    """A block with a LayerNorm over its hidden features."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Counting(Residual):
    """A block that counts its calls in a buffer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


class Inner(nn.Module):
    """A layer that does not save its input; with `writes` it first changes it in place."""

    def __init__(self, width: int = WIDTH, writes: bool = False) -> None:
        super().__init__()
        self.mix, self.writes = nn.Linear(width, width), writes

    def forward(self, x: Tensor) -> Tensor:
        x = x.add_(0.1) if self.writes else x + 0.1
        return self.mix(torch.tanh(x))


class WrittenAfter(nn.Module):
    """A block that changes in place a tensor that another module has read before."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(width, width), Inner(width)

    def forward(self, x: Tensor) -> Tensor:
        base = self.first(x)
        h = self.inner(base)
        return h + base.mul_(0.5)


class Functions(nn.Module):
    """A chain of functions that save only their outputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1
        for _ in range(8):
            x = torch.tanh(x)
        return x


class WrittenLater(WrittenAfter):
    """The same with more saved tensors in the inner module."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.inner: nn.Module = Functions()


class Writing(nn.Module):
    """A block whose inner module changes its input in place; the input is read again."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(width, width), Inner(width, writes=True)

    def forward(self, x: Tensor) -> Tensor:
        base = self.first(x)
        h = self.inner(base)
        return h + base


class Pair(nn.Sequential):
    """Two residual blocks one after the other, to be recomputed together."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(Residual(width), Residual(width))


class NormedBlock(nn.Module):
    """A residual block with an RMS norm of the output of a tanh."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.RMSNorm(2 * width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(torch.tanh(self.up(x))))


class Halves(nn.Module):
    """A residual of two layers that a schedule replaces by one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.gate(x)) * self.up(x)


class FusedHalves(nn.Module):
    """The replacement of `Halves`: one layer with both weights."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return x + torch.tanh(gate) * up


class Replaced(Points):
    """Points with `Halves` blocks and their replacements."""

    replacements = {
        "whole": lambda old: (
            FusedHalves(),
            {f"both.{kind}": [f"gate.{kind}", f"up.{kind}"] for kind in ("weight", "bias")},
        )
    }

    def __init__(self) -> None:
        super().__init__(Halves(), Halves())


class Crossed(nn.Module):
    """Causal attention with dropout from the first two positions to all five."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rate = 0.2 if self.training else 0.0
        q, k = self.q(x[:, None, :2]), self.k(x[:, None])
        attended = F.scaled_dot_product_attention(q, k, x[:, None], dropout_p=rate, is_causal=True)
        return x + attended[:, 0].mean(1, keepdim=True)


class Balanced(Residual):
    """A residual block that also returns an auxiliary loss."""

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return hidden, (hidden**2).mean()


class TwoResults(nn.Module):
    """A model whose loss includes an auxiliary loss that a block returns."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(width, width), Balanced(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, extra = self.block(self.embed(x))
        return ((self.head(h)[..., 0] - y) ** 2).mean() + 0.1 * extra


class Spare(Residual):
    """A block with a parameter that nothing reads."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.spare = nn.Parameter(torch.rand(width))


class Predicting(nn.Module):
    """A network that returns predictions, not a loss."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.block, self.head = Residual(width), nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.block(x))[..., 0]


def squared_loss(output: Tensor, batch: Any) -> Tensor:
    """The loss of Predicting."""
    return ((output - batch["y"]) ** 2).mean()


class Frozen(Residual):
    """A block of which one layer is frozen."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.up.requires_grad_(False)


class Experts(nn.Module):
    """Two experts of which a router mixes the results."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(Residual(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        outputs = [expert(x) * weights[..., k : k + 1] for k, expert in enumerate(self.experts)]
        return x + sum(outputs)


class _Relative(torch.optim.SGD):
    """SGD with steps scaled by the norm of the parameter, as in Adafactor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(p.norm() / (p.grad.norm() + 1e-9))
        super().step(closure)


def adafactor(named_parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that needs whole parameters."""
    return _Relative([p for _, p in named_parameters], lr=0.01)


def module_maker(build: Any, seed: int = 0) -> Any:
    """Return a function that builds the same module on each call."""

    def make() -> nn.Module:
        torch.manual_seed(seed)
        module: nn.Module = build()
        return module.double()

    return make


class Drops(nn.Module):
    """MultiheadAttention with dropout: the only random operator of its model."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attn(x, x, x, need_weights=False)[0]
        return x + attended


def points(seed: int, rows: int = 6, shape: tuple[int, ...] = (WIDTH,)) -> dict[str, Tensor]:
    """Return inputs and targets for Points."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *shape, generator=g, dtype=torch.float64)
    return {"x": x, "y": x.sum(-1)}


def token_batch(seed: int, rows: int = 6, length: int = 5, count: int = 12) -> dict[str, Tensor]:
    """Return token ids and labels, some of them ignored."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, count, (rows, length), generator=g)
    labels = torch.randint(0, count, (rows, length), generator=g)
    labels[torch.rand(rows, length, generator=g) < 0.3] = -100
    return {"ids": ids, "labels": labels}


class Sections(nn.Module):
    """Attention over tokens with several positions each, as in multimodal models."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)
        self.turns = nn.ModuleList(nn.Embedding(16, WIDTH) for _ in range(3))
        self.attn = Look()
        self.double()

    def forward(self, ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for embedding, positions in zip(self.turns, position_ids):
            x = x + embedding(positions)
        return F.cross_entropy(self.head(self.attn(x)).flatten(0, 1), labels.flatten())


class Look(nn.Module):
    """Causal attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)


def sections_batch(seed: int) -> dict[str, Tensor]:
    """Return nine tokens per row, three positions for each, and labels for most of them."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(13, (2, 4, 9), generator=generator)
    labels = labels.masked_fill(torch.rand(4, 9, generator=generator) < 0.2, -100)
    return {
        "ids": ids,
        "position_ids": torch.randint(16, (3, 4, 9), generator=generator),
        "labels": labels,
    }


class DroppedAgain(Points):
    """Calls the dropout of its first block once more, after all blocks."""

    def __init__(self) -> None:
        super().__init__(*(DroppingTwice() for _ in range(2)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        first_block: Any = self.blocks[0]
        return ((self.head(first_block.drop(h))[..., 0] - y) ** 2).mean()


class HookLoss(Points):
    """A model whose loss reads outputs that hooks inside its blocks record, as router losses do.

    `doubling`: the hooks also double the outputs.
    """

    def __init__(self, kwargs: bool = False, doubling: bool = False) -> None:
        super().__init__(*(Residual() for _ in range(3)))
        self.kwargs, self.doubling = kwargs, doubling

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs: list[Tensor] = []

        def hook(module: nn.Module, args: Any, *hook_args: Any) -> Any:
            outputs.append(hook_args[-1])
            return 2 * hook_args[-1] if self.doubling else None

        blocks: Any = self.blocks
        handles = [b.up.register_forward_hook(hook, with_kwargs=self.kwargs) for b in blocks]
        try:
            error = super().forward(x, y)
        finally:
            for handle in handles:
                handle.remove()
        assert len(outputs) == len(blocks)
        return (
            error + torch.stack([output.logsumexp(-1).square().mean() for output in outputs]).sum()
        )
