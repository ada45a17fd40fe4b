"""Blocks of random user models: modules in the styles of user code, one for each style.

Each takes tokens [rows, length, width] and a mask [rows, length] or None; `KINDS` builds them from
a width, the rate of dropout and noise, and a random generator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Mask = Tensor | None


class Heads(nn.Module):
    """Grouped-query attention with or without rotary positions: by einsum, bmm or torch's own."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.heads = rng.choice([2, 4])
        self.groups = rng.choice([self.heads, self.heads // 2])
        self.size, self.rate = rng.choice([2, 4]), rate
        self.way, self.turns = rng.choice(["einsum", "bmm", "sdpa"]), rng.random() < 0.5
        self.norm = rng.choice([nn.LayerNorm, nn.RMSNorm])(width)
        bias, inner = rng.random() < 0.5, self.heads * self.size
        self.q = nn.Linear(width, inner, bias=bias)
        self.kv = nn.Linear(width, 2 * self.groups * self.size, bias=bias)
        self.out = nn.Linear(inner, width, bias=bias)
        self.drop = nn.Dropout(rate)
        waves = 10.0 ** -torch.arange(0, self.size, 2).div(self.size)
        self.register_buffer("waves", waves, persistent=rng.random() < 0.5)

    def _turned(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * self.waves
        cos, sin = angles.cos().repeat(1, 2).to(x.dtype), angles.sin().repeat(1, 2).to(x.dtype)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        h = self.norm(x)
        rows, length, _ = h.shape
        q = self.q(h).view(rows, length, -1, self.size).transpose(1, 2)
        k, v = self.kv(h).chunk(2, dim=-1)
        k = k.reshape(rows, length, -1, self.size).transpose(1, 2)
        v = v.reshape(rows, length, -1, self.size).transpose(1, 2)
        if self.turns:
            q, k = self._turned(q), self._turned(k)
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        keep = None if mask is None else mask[:, None, None, :]
        if self.way == "sdpa":
            rate = self.rate if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, keep, dropout_p=rate)
        else:
            y = self._mixed(q, k, v, keep)
        return x + self.drop(self.out(y.transpose(1, 2).reshape(rows, length, -1)))

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, keep: Mask) -> Tensor:
        if self.way == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.size**0.5
        else:
            flat = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
            scores = flat.view(*q.shape[:3], -1).mul(self.size**-0.5)
        if keep is not None:
            scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        return F.dropout(scores.softmax(-1), self.rate, self.training) @ v


class Packed(nn.Module):
    """torch's MultiheadAttention, or a full encoder layer."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.whole = rng.random() < 0.5
        if self.whole:
            self.layer: nn.Module = nn.TransformerEncoderLayer(
                *(width, 2, 2 * width, rate),
                activation=rng.choice(["relu", "gelu"]),
                norm_first=rng.random() < 0.5,
                batch_first=True,
            )
        else:
            self.layer = nn.MultiheadAttention(
                *(width, 2, rate), bias=rng.random() < 0.5, batch_first=True
            )
            self.weights = rng.random() < 0.5

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        padding = None if mask is None else ~mask
        if self.whole:
            return self.layer(x, src_key_padding_mask=padding)
        y, _ = self.layer(x, x, x, key_padding_mask=padding, need_weights=self.weights)
        return x + y


class Gated(nn.Module):
    """A gated MLP, fused or separate, with layer scale and dropout."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        hidden = rng.choice([6, 8, 7])
        self.norm = nn.RMSNorm(width)
        self.fused = rng.random() < 0.5
        if self.fused:
            self.gate_up = nn.Linear(width, 2 * hidden, bias=rng.random() < 0.5)
        else:
            self.gate = nn.Linear(width, hidden, bias=False)
            self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=rng.random() < 0.5)
        self.gamma = nn.Parameter(torch.full((width,), 0.3))
        self.rate = rate

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        h = self.norm(x)
        if self.fused:
            gate, up = self.gate_up(h).split(self.down.in_features, dim=-1)
        else:
            gate, up = self.gate(h), self.up(h)
        y = F.dropout(self.down(F.silu(gate) * up), p=self.rate, training=self.training)
        return x + self.gamma * y


class Stack(nn.Module):
    """A Sequential with dropout, and a residual with a learned factor."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        hidden = rng.choice([6, 8])
        act = rng.choice([nn.GELU, nn.ReLU, nn.Tanh])
        self.net = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            act(),
            nn.Dropout(rate),
            nn.Linear(hidden, width, bias=rng.random() < 0.5),
        )
        self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        y = x + self.alpha * self.net(x)
        return y if mask is None else y * mask[..., None]


class Parametrized(nn.Module):
    """Computed weights: weight norm, a mask, a symmetric sum."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(width, width))
        self.two = nn.Linear(width, width)
        self.register_buffer("kept", (torch.arange(width * width) % 3 > 0).view(width, width))
        self.symmetric = rng.random() < 0.5

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        weight = self.two.weight * self.kept
        if self.symmetric:
            weight = weight + weight.t()
        return x + F.linear(torch.tanh(self.one(x)), weight, self.two.bias)


class Recurrent(nn.Module):
    """A recurrent layer over tokens, or a loop over a cell."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.kind = rng.choice(["gru", "lstm", "cell"])
        if self.kind == "cell":
            self.rnn: nn.Module = nn.GRUCell(width, width)
        else:
            rnn_class = nn.GRU if self.kind == "gru" else nn.LSTM
            self.rnn = rnn_class(width, width, batch_first=True)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if self.kind != "cell":
            return x + self.rnn(x)[0]
        state, states = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = self.rnn(token, state)
            states.append(state)
        return x + torch.stack(states, 1)


class Convolved(nn.Module):
    """Convolutions along tokens, a norm over channels or groups, a gate (Conformer)."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.enter = nn.Conv1d(width, 2 * width, 1)
        groups = rng.choice([1, width])
        self.deep = nn.Conv1d(width, width, 3, padding=1, groups=groups)
        norms: list[Any] = [
            nn.GroupNorm(2, width),
            nn.InstanceNorm1d(width, affine=True),
            nn.Identity(),
        ]
        self.norm = rng.choice(norms)
        self.leave = nn.Conv1d(width, width, 1)
        self.drop = nn.Dropout1d(rate)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        h = F.glu(self.enter(x.transpose(1, 2)), dim=1)
        h = self.leave(F.silu(self.norm(self.deep(h))))
        return x + self.drop(h).permute(0, 2, 1)


class Statistics(nn.Module):
    """Batch norm over all tokens."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, momentum=rng.choice([0.1, None]))
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        h = self.norm(self.lin(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return x + F.relu(h)


class Counting(nn.Module):
    """Buffers that forward writes: a count of calls, and a scaled copy of a weight."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("slow", torch.zeros(width, width))
        self.slowly = rng.random() < 0.5
        self.reads = rng.random() < 0.5

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if self.training:
            with torch.no_grad():
                if self.slowly:
                    self.slow.copy_(self.lin.weight * 0.1)
                self.calls += 1
        y = torch.tanh(self.lin(x))
        return x + y + F.linear(x, self.slow.clone()) if self.reads else x + y


def _scaled_gradients(module: nn.Module, grads: Any, outputs: Any) -> tuple[Any, ...]:
    """Scale the gradient of the first input; None behind frozen modules."""
    return (None if grads[0] is None else grads[0] * 0.9, *grads[1:])


class Hooked(nn.Module):
    """Hooks on modules and tensors that change values and gradients.

    One of them may be registered by the first forward, as transformers does for hidden states.
    """

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, 6), nn.Linear(6, width)
        hooks = rng.sample(["before", "after", "backward", "tensor", "module"], 2)
        if "before" in hooks:
            self.one.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        if "after" in hooks:
            self.two.register_forward_hook(
                lambda module, args, output: output + 0.1 * output.tanh()
            )
        if "backward" in hooks:
            self.two.register_full_backward_hook(lambda m, grads, outs: (grads[0] * 0.7,))
        if "module" in hooks:
            self.register_full_backward_hook(_scaled_gradients)
        self.on_tensor = "tensor" in hooks
        # not by `rng`: numbers that were drawn before stay the same models
        traits = Random(f"{width} {rng.getstate()}")
        self.is_late, self.is_wide = traits.random() < 0.4, traits.random() < 0.4

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if self.is_late:
            self.is_late = False
            self.one.register_forward_hook(lambda module, args, output: output * 1.25)
        # as rotary embeddings and norms do, which should not be in a low dtype
        with torch.autocast(x.device.type, enabled=False) if self.is_wide else nullcontext():
            h = F.gelu(self.one(x))
        if self.on_tensor and h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return x + self.two(h)


class _Clipped(torch.autograd.Function):
    """Clamp with a custom backward, also for the bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: Tensor) -> Tensor:
        ctx.save_for_backward(x, bound)
        return torch.minimum(torch.maximum(x, -bound), bound)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, bound = ctx.saved_tensors
        inside = x.abs() <= bound
        input_grad = (grads[0] * inside) if ctx.needs_input_grad[0] else None
        return input_grad, (grads[0] * x.sign() * ~inside).sum().view_as(bound)


class Own(nn.Module):
    """A custom autograd function, a straight-through codebook, a detached branch."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.tensor(0.8))
        self.lin, self.codes = nn.Linear(width, width), nn.Embedding(5, width)
        self.side = nn.Linear(width, width)
        self.coded = rng.random() < 0.5

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        h = _Clipped.apply(self.lin(x), self.bound)
        if self.coded:
            with torch.no_grad():
                nearest = torch.cdist(h, self.codes.weight[None]).argmin(-1)
            h = h + (self.codes(nearest) - h).detach() + 0.1 * self.codes(nearest)
        return x + h + self.side(h.detach() * 0.5)


class Shared(nn.Module):
    """One layer called twice, its weight used a third time; an unused layer."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.unused = nn.Linear(width, 3)
        self.third = rng.random() < 0.5

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        h = self.norm(self.lin(x).relu())
        h = self.norm(self.lin(h))
        return x + (h @ self.lin.weight if self.third else h)


class Viewed(nn.Module):
    """Windows by strides, in-place operations and masks."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.mix, self.taps = nn.Linear(3 * width, width), nn.Parameter(torch.ones(width) / 2)
        self.strided = rng.random() < 0.5

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        rows, length, width = x.shape
        padded = F.pad(x, (0, 0, 2, 0)).contiguous()
        if self.strided:
            strides = padded.stride()
            windows = padded.as_strided((rows, length, 3, width), (*strides[:2], *strides[1:]))
        else:
            windows = padded.unfold(1, 3, 1).transpose(2, 3)
        h = self.mix(windows.reshape(rows, length, -1))
        h[:, 0] *= 0.5
        h.mul_(self.taps)
        if mask is not None:
            h = h.masked_fill_(~mask[..., None], 0.0)
        return x.add(h)


ROUTES = ("soft", "soft", "guards", "list", "split", "masks")


class Mixture(nn.Module):
    """Layers weighted by a router, whose auxiliary loss is stored on the module.

    All layers for each token (`soft`), or one, found by guarded numbers of tokens, by a list of
    chosen layers, by tokens that are sorted and split, or by masks.
    """

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleDict({k: nn.Linear(width, width) for k in ("a", "b", "c")})
        self.weights = nn.ParameterList([torch.ones(width) for _ in range(3)])
        self.balanced = rng.random() < 0.5
        self.aux: Any = 0.0
        # not by `rng`: numbers that were drawn before stay the same models
        self.route = Random(f"{width} {rng.getstate()}").choice(ROUTES)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        logits = self.router(x)
        shares = logits.softmax(-1)
        self.aux = logits.square().flatten(1).mean(1).mean() * 0.1 if self.balanced else 0.0
        if self.route != "soft":
            tokens, (best, chosen) = x.flatten(0, 1), shares.flatten(0, 1).max(-1)
            return x + (self._by_choice(tokens, chosen) * best[:, None]).view_as(x)
        outputs = [expert(x) * w for expert, w in zip(self.experts.values(), self.weights)]
        return x + (torch.stack(outputs, -1) * shares[..., None, :]).sum(-1)

    def _by_choice(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs of the chosen layers for tokens [tokens, width]."""
        layers = list(zip(self.experts.values(), self.weights))
        counts, output = torch.bincount(chosen, minlength=3), torch.zeros_like(tokens)
        if self.route == "split":
            order = chosen.argsort(stable=True)
            parts = zip(layers, tokens[order].split(counts.tolist()))
            results = torch.cat([layer(part) * w for (layer, w), part in parts])
            return output.index_copy(0, order, results)
        if self.route == "masks":
            masks = ((chosen == k)[:, None] for k in range(3))
            return sum((m * layer(tokens) * w for m, (layer, w) in zip(masks, layers)), output)
        for k in chosen.unique().tolist() if self.route == "list" else range(3):
            (rows,) = torch.where(chosen == k)
            if self.route == "guards" and (counts[k].item() == 0 or len(rows) == 0):
                continue
            layer, w = layers[k]
            output = output.index_add(0, rows, layer(tokens[rows]) * w)
        return output


class Drawing(nn.Module):
    """Random operators: noise, alpha dropout, or stochastic depth."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.lin, self.rate = nn.Linear(width, width), rate
        self.kind = rng.choice(["noise", "path", "alpha"])

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        y = torch.tanh(self.lin(x))
        if not self.training or self.rate == 0.0:
            return x + y
        if self.kind == "noise":
            return x + y + self.rate * torch.randn_like(y)
        if self.kind == "alpha":
            return x + F.alpha_dropout(y, self.rate, training=True)
        mask_drawn = torch.rand(len(x), 1, 1, device=x.device) >= self.rate
        return x + y * mask_drawn.to(y.dtype) / (1 - self.rate)


@dataclass
class BlockOutput:
    """The output of a block as an object."""

    hidden: Tensor
    gate: Tensor


class _Inner(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.up, self.gate, self.kind = nn.Linear(width, 6), nn.Linear(width, 6), kind

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Any:
        hidden, gate = self.up(x) * scale, self.gate(x).sigmoid()
        if self.kind == "dict":
            return {"hidden": hidden, "gate": gate}
        return BlockOutput(hidden, gate)


class Wrapped(nn.Module):
    """An inner module with keyword arguments that returns a dict or a dataclass."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.inner = _Inner(width, rng.choice(["dict", "class"]))
        self.down, self.drop = nn.Linear(6, width), nn.Dropout(rate, inplace=rng.random() < 0.3)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        inner_output = self.inner(x=x, scale=0.7)
        if isinstance(inner_output, dict):
            return x + self.drop(self.down(inner_output["hidden"] * inner_output["gate"]))
        return x + self.drop(self.down(inner_output.hidden * inner_output.gate))


class Biased(nn.Module):
    """Attention with a learned relative position bias (T5) and one parameter for all weights."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=rng.random() < 0.5)
        self.near, self.width = nn.Embedding(7, 2), width
        self.weight = nn.Parameter(torch.randn(3, width, width) / width**0.5)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        q, k, v = torch.einsum("btc,ncd->nbtd", self.norm(x), self.weight).unbind(0)
        q, k, v = (z.unflatten(-1, (2, -1)).movedim(2, 1) for z in (q, k, v))
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.near((places[:, None] - places).clamp(-3, 3) + 3).permute(2, 0, 1)
        scores = q.matmul(k.mT) / k.shape[-1] ** 0.5 + bias
        if mask is not None:
            scores = scores + torch.where(mask[:, None, None], 0.0, -1e9)
        y = scores.softmax(-1) @ v
        return x + self.out(y.movedim(1, 2).flatten(2))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, checkpointed by the model itself."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.drop, self.again = nn.Dropout(rate), rng.random() < 0.4

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + 2.0 * self.up(self.down(self.drop(x))))

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if self.again and self.training:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)


class Linearly(nn.Module):
    """Linear attention by cumulative sums; a custom norm, an early return, a bilinear gate."""

    def __init__(self, width: int, rate: float, rng: Random) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Bilinear(width, width, width)
        self.gain = nn.Parameter(torch.ones(width))
        self.exits = rng.random() < 0.3

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if self.exits and bool(x.detach().isnan().any()):
            return x
        q, k, v = self.qkv(x).chunk(3, -1)
        k = F.elu(k) + 1
        state = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
        y = torch.einsum("btk,btkv->btv", F.elu(q) + 1, state)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return x + 0.5 * torch.tanh(self.gate(x, y))


BlockMaker = Callable[[int, float, Random], nn.Module]
KINDS: dict[str, BlockMaker] = {
    made.__name__.lower(): made
    for made in (
        *(Heads, Packed, Gated, Stack, Parametrized, Recurrent, Convolved, Statistics, Counting),
        *(Hooked, Own, Shared, Viewed, Mixture, Drawing, Wrapped, Biased, Adapted, Linearly),
    )
}
