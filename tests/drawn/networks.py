"""Small networks in styles of real code: fused attention, embedding bags, LSTM, adapters, loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Attention(nn.Module):
    """Causal attention with one weight for q, k and v; head size is computed from the width."""

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.n_head, self.n_embd, self.rate = nn.Dropout(rate), heads, width, rate

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in (q, k, v))
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class _MLP(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.c_proj(F.gelu(self.c_fc(x))))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), _Attention(width, heads, rate)
        self.ln_2, self.mlp = nn.LayerNorm(width), _MLP(width, rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """As nanoGPT: a ModuleDict, a tied head, logits and loss as a tuple."""

    def __init__(self, vocab_size: int = 61, width: int = 16, rate: float = 0.1) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab_size, width),
                wpe=nn.Embedding(16, width),
                h=nn.ModuleList([_Block(width, 4, rate) for _ in range(4)]),
                ln_f=nn.LayerNorm(width),
            )
        )
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        t: Any = self.transformer
        x = t.wte(idx) + t.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class DLRM(nn.Module):
    """Embedding bags and their products with dense features; the loss is outside the model."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in (40, 24, 16))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        e = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        i, j = torch.tril_indices(4, 4, offset=-1)
        scores: Tensor = self.top(torch.cat([x, (e @ e.transpose(1, 2))[:, i, j]], 1))
        return scores.squeeze(1)


class Recurrent(nn.Module):
    """A language model around two layers of nn.LSTM, with dropout between them."""

    def __init__(self, vocab_size: int = 30, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.rnn(self.embed(x))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@dataclass
class Denoised:
    """An output object."""

    noise: Tensor


class _Modulated(nn.Module):
    """A block whose norms are modulated by a condition (DiT)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.move = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, d, e = self.move(F.silu(c))[:, None].chunk(4, -1)
        h = self.norm1(x) * (1 + a) + b
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.down(F.silu(self.up(self.norm2(x) * (1 + d) + e)))


class Denoiser(nn.Module):
    """As DiT: time and class modulate every norm; the output is a dataclass."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.kinds = nn.Linear(8, width), nn.Embedding(7, width)
        self.place = nn.Parameter(torch.randn(6, width) / 4)
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_Modulated(width, 2) for _ in range(4))
        self.leave = nn.Linear(width, 8)

    def forward(self, x: Tensor, t: Tensor, kind: Tensor) -> Denoised:
        waves = torch.sin(t[:, None].to(x.dtype) / 10.0 * torch.arange(1, 9, device=x.device))
        c = self.time(waves.to(x.dtype)) + self.kinds(kind)
        h = self.enter(x) + self.place
        for block in self.blocks:
            h = block(h, c)
        return Denoised(self.leave(h))


class _LoRA(nn.Module):
    """A frozen projection with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(self.drop(x)))


class _AdaptedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width).requires_grad_(False)
        self.gate, self.up = _LoRA(width, 2 * width), _LoRA(width, 2 * width)
        self.down = _LoRA(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Adapted(nn.Module):
    """Frozen blocks with adapters: most parameters have no gradient."""

    def __init__(self, vocab_size: int = 61, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width).requires_grad_(False)
        self.layers = nn.ModuleList(_AdaptedBlock(width) for _ in range(4))
        self.head = nn.Linear(width, vocab_size, bias=False).requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class _Mixed(nn.Module):
    """ConvNeXt block: a depthwise convolution, a norm over channels, layers with layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.deep(x).permute(0, 2, 3, 1))
        h = self.gain * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class Convolved(nn.Module):
    """A stem, blocks of two widths in Sequentials, and scores; the loss is outside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(_Mixed(8), _Mixed(8)),
                nn.Sequential(nn.Conv2d(8, 16, 2, stride=2), _Mixed(16), _Mixed(16)),
            ]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for stage in self.stages:
            h = stage(h)
        scores: Tensor = self.head(h.mean((2, 3)))
        return scores


class Towers(nn.Module):
    """Two towers with shared weights, joined; a constant buffer."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width))
        self.join = nn.Bilinear(width, width, 8)
        self.norm = nn.GroupNorm(2, 8)
        self.register_buffer("scale", torch.full((8,), 1.5))
        self.head = nn.Linear(8, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        joined = self.norm(self.join(self.tower(left), self.tower(right))) * self.scale
        scores: Tensor = self.head(F.relu(joined))
        return scores


class Looped(nn.Module):
    """One block called three times (ALBERT), with one norm after each call."""

    def __init__(self, vocab_size: int = 61, width: int = 16) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(vocab_size, width), _Block(width, 2, 0.1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(input_ids)
        for _ in range(3):
            h = self.norm(self.block(h))
        logits = self.head(h)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class _Reading(nn.Module):
    """Attention to keys and values that this or an earlier layer has stored in a dict."""

    def __init__(self, width: int, makes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        if makes:
            self.k, self.v = nn.Linear(width, width), nn.Linear(width, width)
        self.makes = makes

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        h = self.norm(x)
        heads = (*x.shape[:2], -1, 4)
        if self.makes:
            cache["k"] = self.k(h).view(heads).transpose(1, 2)
            cache["v"] = self.v(h).view(heads).transpose(1, 2)
        q = self.q(h).view(heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, cache["k"], cache["v"], is_causal=True)
        result: Tensor = x + self.o(y.transpose(1, 2).flatten(2))
        return result


class Sharing(nn.Module):
    """As Gemma 3n: later layers read keys and values that earlier ones stored in a dict."""

    def __init__(self, vocab_size: int = 61, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.ModuleList([_Reading(width, k < 2) for k in range(4)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h, cache = self.embed(input_ids), dict[str, Tensor]()
        for layer in self.layers:
            h = layer(h, cache)
        logits = self.head(h)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Fast(nn.Module):
    """Weights of layers that are never called, and layers called with other weights."""

    def __init__(self, vocab_size: int = 61, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))
        self.fast = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(input_ids)
        for up, down, fast in zip(self.up, self.down, self.fast):
            scaled = {name: value * self.gain for name, value in fast.named_parameters()}
            h = h + torch.func.functional_call(fast, scaled, (h,))
            h = h + F.linear(F.gelu(up(h)), down.weight, down.bias)  # type: ignore[arg-type]
        logits = self.head(h)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Taught(nn.Module):
    """A mean teacher updated in forward; losses of masked rows, and an overlap loss."""

    def __init__(self, width: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))
        self.teacher = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))
        self.teacher.requires_grad_(False)
        self.head, self.other = nn.Linear(width, classes), nn.Linear(width, 2)

    def forward(self, x: Tensor, domain: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, quick in zip(self.teacher.parameters(), self.student.parameters()):
                if self.training:
                    slow.lerp_(quick, 0.1)
            goal = self.teacher(x)
        h = self.student(x)
        logits, selected = self.head(h), domain == 0
        row_losses = F.cross_entropy(logits, y, reduction="none")
        p, t = logits.sigmoid()[:, 0], (y == 0).to(x.dtype)
        overlap = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        masked = (row_losses * selected).sum() / selected.sum().clamp(min=1)
        loss: Tensor = masked + overlap + F.cross_entropy(self.other(h), domain)
        return loss + F.mse_loss(h, goal)


class Routed(nn.Module):
    """Layers in an order that depends on each row; an adapter per language."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(6, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.adapters = nn.ModuleDict({k: nn.Linear(width, width) for k in ("de", "en", "fr")})

    def forward(self, x: Tensor, language: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h, names, outputs = self.enter(x), list(self.adapters), []
        for row, language_id in zip(h, language.tolist()):
            for layer in self.layers if row.sum() > 0 else list(self.layers)[::-1]:
                row = row + layer(row).tanh()
            outputs.append(row + self.adapters[names[language_id]](row))
        logits = self.head(torch.stack(outputs))
        return F.cross_entropy(logits, y), logits


_POSITION_TABLES: dict[int, Tensor] = {}


def _position_table(length: int) -> Tensor:
    """Return a position table that is cached outside of modules."""
    if length not in _POSITION_TABLES:
        _POSITION_TABLES[length] = torch.sin(torch.arange(length))[:, None] / 4
    return _POSITION_TABLES[length]


class _Rounded(torch.autograd.Function):
    """Rounding with straight-through gradients and a trained scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.round(x * 8) / 8 * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * x).sum().view_as(scale)


class _Sorted(nn.Module):
    """Tokens sorted by a score and restored; a hook stores the value of a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score, self.mix = nn.Linear(width, 1), nn.Linear(2 * width, width)
        self.kept: dict[str, Tensor] = {}
        self.mix.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept["mixed"] = output

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1)
        order = score.argsort(dim=1, descending=True, stable=True)[..., None]
        y = torch.gather(x, 1, order.expand_as(x)) * score.gather(1, order[..., 0])[..., None]
        restored = torch.empty_like(y).scatter_(1, order.expand_as(y), y)
        mixed: Tensor = self.mix(torch.cat([restored, y.flip(1)], -1))
        return x + mixed * torch.sigmoid(self.kept.pop("mixed"))


class _Twice(nn.Module):
    """One layer called twice and its weight used once more; ParameterList and ParameterDict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(1))
        self.many = nn.ParameterList([torch.randn(width, width) / 4 for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.ones(width), "shift": torch.zeros(width)})

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.one(torch.tanh(self.one(x))))
        h = F.linear(h, self.one.weight.t(), self.one.bias)
        for weight in self.many:
            h = h + _Rounded.apply(torch.tanh(h @ weight), self.scale) * self.named["gain"]
        h[:, 0] *= 0.5
        return x + h + self.named["shift"] + _position_table(x.shape[1])


class _Sent(nn.Module):
    """Two experts per token by masks and `index_add_`; a running mean over tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.a = nn.Linear(width, 3, bias=False), nn.Parameter(torch.zeros(width))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, selected = self.router(flat).softmax(-1).topk(2, -1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(selected == number)
            result.index_add_(0, token, expert(flat[token]) * weight[token, slot, None])
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return x + result.view_as(x) + torch.vmap(torch.sigmoid)(self.a) * x.cumsum(1) / count


class Assorted(nn.Module):
    """Unusual code: sorting, experts by masks, hooks, lists, custom backwards."""

    def __init__(self, vocab_size: int = 61, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab_size, width) / 2)
        kinds = (_Sorted, _Twice, _Sent, _Twice)
        self.blocks = nn.ModuleList(kind(width) for kind in kinds)
        self.mixed, self.bias = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(vocab_size))

    def forward(self, *, inputs: dict[str, Tensor]) -> dict[str, Any]:
        h = F.embedding(inputs["words"], self.table)
        hidden = [h]
        for block in self.blocks:
            h = block(h)
            hidden.append(h)
        h = (torch.stack(hidden) * self.mixed.softmax(0).view(-1, 1, 1, 1)).sum(0)
        return {"scores": h @ self.table.T + self.bias, "hidden": hidden}
