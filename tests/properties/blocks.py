"""Blocks of random test models: one module for each feature that has broken a training system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Scaled(nn.Module):
    """RMSNorm as in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * hidden.to(x.dtype)


def norm_of(kind: str, width: int) -> nn.Module:
    """Return a norm over the last dim."""
    return Scaled(width) if kind == "rms" else nn.LayerNorm(width)


class Chain(nn.Module):
    """One linear layer and tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return torch.tanh(self.lin(x))


class MLP(nn.Module):
    """A residual pair of layers between norm and dropout."""

    def __init__(self, width: int, hidden: int, norm: str, dropout: float, pre: bool) -> None:
        super().__init__()
        self.norm, self.pre = norm_of(norm, width), pre
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=pre)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.norm(x) if self.pre else x
        h = x + self.drop(self.down(self.drop(F.gelu(self.up(h)))))
        return h if self.pre else self.norm(h)


# unusual ways to use a pair of layers
USES = {
    "norm": "its norm is called again, on what comes out",
    "again": "all of it is called twice",
    "functional": "its weights are also used by functions, beside their modules",
    "gain": "the norm's weight is used by the block, beside its module",
    "named": "layers are called with keyword arguments",
    "dict": "an inner module gives a dict",
    "object": "an inner module gives an object of a class of its own",
    "named tuple": "an inner module gives a named tuple, and a value beside it",
    "seldom": "short batches do not call it",
    "never": "a layer that no batch calls",
    "strided": "its weights are not contiguous",
    "folded": "its rows and tokens are one dim",
    "buffers": "complex and integer buffers, each used twice",
}


@dataclass
class InnerOutput:
    """The output of an inner module, as an object."""

    wide: Tensor
    scale: float = 1.0


class InnerPair(NamedTuple):
    """The output of an inner module, as a named tuple."""

    wide: Tensor
    scale: float = 1.0


class Inner(nn.Module):
    """A layer and a function with keyword arguments, whose output is in a container."""

    def __init__(self, up: nn.Module, kind: str) -> None:
        super().__init__()
        self.up, self.kind = up, kind

    def forward(self, *, x: Tensor, mask: Tensor | None = None) -> Any:
        hidden = F.gelu(self.up(x))
        if self.kind == "dict":
            return {"wide": hidden, "scale": 1.0}
        return InnerOutput(hidden) if self.kind == "object" else (InnerPair(hidden), x)


class Used(MLP):
    """The residual pair of layers, used in one of the ways listed in `USES`."""

    def __init__(self, width: int, hidden: int, norm: str, dropout: float, use: str) -> None:
        super().__init__(width, hidden, norm, dropout, pre=True)
        self.use = use
        if use in ("dict", "object", "named tuple"):
            self.inner = Inner(self.up, use)
            del self.up
        if use == "never":
            self.spare = nn.Linear(width, width)
        if use == "strided":
            self.up.weight = nn.Parameter(torch.zeros(width, hidden).t())
            self.down.weight = nn.Parameter(torch.zeros(hidden, 2 * width).t()[::2])
        if use == "buffers":
            places = torch.arange(1, width + 1)
            self.register_buffer("places", places)
            self.register_buffer("wave", torch.polar(torch.ones(width), places / 3.0))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        match self.use:
            case "norm":
                output = super().forward(x, mask)
                return output + self.norm(output)
            case "again":
                return super().forward(super().forward(x, mask), mask)
            case "functional":
                functional_output = F.linear(
                    torch.sin(F.linear(x, self.up.weight)), self.down.weight
                )
                return super().forward(x, mask) + functional_output
            case "gain":
                return super().forward(x * self.norm.weight, mask)
            case "named":
                h = self.down(input=self.drop(F.gelu(self.up(input=self.norm(x)))))
                return x + self.drop(input=h)
            case "dict" | "object" | "named tuple":
                inner_output = self.inner(x=self.norm(x), mask=mask)
                inner_output = (
                    inner_output[0]._asdict() if isinstance(inner_output, tuple) else inner_output
                )
                inner_output = (
                    inner_output if isinstance(inner_output, dict) else vars(inner_output)
                )
                return x + self.down(self.drop(inner_output["wide"])) * inner_output["scale"]
            case "folded":
                return super().forward(x.flatten(0, 1), mask).view(x.shape)
            case "seldom":
                return super().forward(x, mask) if x.shape[1] > 5 else torch.tanh(x)
            case "buffers":
                rotated_input = (torch.complex(x, x) * self.wave).real / self.places
                return super().forward(rotated_input, mask) + self.wave.imag * self.places
        return super().forward(x, mask)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary positions to queries and keys of shape [rows, heads, tokens, size]."""
    cos, sin = cos[:, None], sin[:, None]
    results = []
    for x in (q, k):
        a, b = x.chunk(2, -1)
        results.append(x * cos + torch.cat((-b, a), -1) * sin)
    return results[0], results[1]


class Attention(nn.Module):
    """Grouped-query attention: causal, windowed, padded; q, k and v separate or fused.

    `flag`: the mask is only torch's `is_causal` flag.  `turn`: queries and keys get rotary
    positions.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        size: int,
        *,
        norm: str,
        dropout: float,
        pre: bool,
        fused: bool,
        causal: bool,
        window: int,
        plain: bool,
        flag: bool = False,
        turn: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.flag = heads, groups, size, flag
        self.turn = turn
        self.pre, self.causal, self.window, self.plain = pre, causal, window, plain
        self.norm = norm_of(norm, width)
        if fused:
            self.qkv = nn.Linear(width, (heads + 2 * groups) * size)
        else:
            self.q = nn.Linear(width, heads * size)
            self.k = nn.Linear(width, groups * size, bias=False)
            self.v = nn.Linear(width, groups * size)
        self.o = nn.Linear(heads * size, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.norm(x) if self.pre else x
        rows, length, _ = h.shape
        q, k, v = self._projected(h)
        q = q.view(rows, length, self.heads, self.size).transpose(1, 2)
        k = k.view(rows, length, self.groups, self.size).transpose(1, 2)
        v = v.view(rows, length, self.groups, self.size).transpose(1, 2)
        if self.turn:
            angle = torch.arange(length)[None, :, None] / (1.0 + torch.arange(self.size // 2))
            angle = torch.cat((angle, angle), -1).to(h.dtype)
            q, k = rotate(q, k, angle.cos(), angle.sin())
        k = k.repeat_interleave(self.heads // self.groups, 1)
        v = v.repeat_interleave(self.heads // self.groups, 1)
        visible = None if self.flag else self._seen(length, mask)
        if visible is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        elif self.plain:
            scores = (q @ k.transpose(-1, -2)) * self.size**-0.5
            attended = self.drop(scores.masked_fill(~visible, float("-inf")).softmax(-1)) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        attended = attended.transpose(1, 2).reshape(rows, length, self.heads * self.size)
        h = x + self.drop(self.o(attended))
        return h if self.pre else self.norm(h)

    def _projected(self, h: Tensor) -> Any:
        if not hasattr(self, "qkv"):
            return self.q(h), self.k(h), self.v(h)
        widths = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        return self.qkv(h).split(widths, -1)

    def _seen(self, length: int, mask: Tensor | None) -> Tensor:
        """Return which keys a query sees, [1 or rows, 1, length, length]; always itself."""
        positions = torch.arange(length)
        gap = positions[:, None] - positions[None, :]
        visible = torch.ones(length, length, dtype=torch.bool)
        if self.causal:
            visible = visible & (gap >= 0)
        if self.window:
            visible = visible & (gap.abs() < self.window)
        visible = visible[None, None]
        if mask is not None:
            visible = visible & (mask != 0)[:, None, None, :]
        return visible | (gap == 0)


class Experts(nn.Module):
    """A router and experts that compute all tokens, weighted by the best two."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(count))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.norm(x)
        chances = self.router(h).softmax(-1)
        best, selected = chances.topk(min(2, len(self.experts)), -1)
        share = torch.zeros_like(chances).scatter(-1, selected, best / best.sum(-1, keepdim=True))
        for index, expert in enumerate(self.experts):
            x = x + share[..., index : index + 1] * expert(h)
        return x


class Routed(nn.Module):
    """A router and stacked experts in one module; each computes the tokens that select it."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Fused(width, hidden, count)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        flat = self.norm(x).flatten(0, -2)
        best, selected = self.router(flat).softmax(-1).topk(2, -1)
        expert_output: Tensor = self.experts(flat, selected, best / best.sum(-1, keepdim=True))
        return x + expert_output.view(x.shape)


class Fused(nn.Module):
    """Experts with stacked parameters."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.randn(count, width, hidden))
        self.bias = nn.Parameter(torch.randn(count, hidden))
        self.down = nn.Parameter(torch.randn(count, hidden, width))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.count):
            token, slot = torch.where(index == expert)
            h = torch.tanh(x[token] @ self.up[expert] + self.bias[expert])
            result = result.index_add(0, token, h @ self.down[expert] * weights[token, slot, None])
        return result


class Expert(nn.Module):
    """A gated pair of layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Convolved(nn.Module):
    """A convolution along the sequence, and a norm: batch, running statistics ("past") or group."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        kinds = {"batch": nn.BatchNorm1d, "past": Past}
        self.norm = kinds[norm](width) if norm in kinds else nn.GroupNorm(1, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Past(nn.BatchNorm1d):
    """Batch norm that uses running statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class Twice(nn.Module):
    """One module called twice."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.lin(self.drop(torch.sin(self.lin(x))))


class Counting(nn.Module):
    """Writes a buffer in forward: the size of its weight, or an average over its calls."""

    def __init__(self, width: int, average: bool) -> None:
        super().__init__()
        self.gain, self.average = nn.Parameter(torch.ones(width)), average
        self.register_buffer("size", torch.zeros(width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            size = self.gain.detach().abs()
            self.size.copy_(0.9 * self.size + 0.1 * size if self.average else size)
        return x * self.gain


class AddInPlace(nn.Module):
    """Adds a weight to its input in place, and returns nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> None:
        x += self.by


class Writing(nn.Module):
    """Writes in place into an argument, an output of a layer, and a view of it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.moved = nn.LayerNorm(width), AddInPlace(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.up(self.norm(x))
        h.tanh_()
        result = self.down(h)
        self.moved(result)
        result += x
        result[:, 1:] += 0.5 * x[:, :-1]
        return result


class _SquaredReLU(torch.autograd.Function):
    """Squared ReLU with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.clamp(min=0) * grad


class Custom(nn.Module):
    """A pair of layers around a function with a custom backward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.down(_SquaredReLU.apply(self.up(x)))
