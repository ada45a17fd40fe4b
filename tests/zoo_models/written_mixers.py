"""Language models with other mixers of tokens than attention, as people write them in one file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_models.written import Written, second
from tests.zoo_models.written_language import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Gated,
    RMSNorm,
    word_loss,
    words,
)


class CastedLinear(nn.Linear):
    """modded-nanogpt's layer: the weight in the type of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x))


class ModdedAttention(nn.Module):
    """modded-nanogpt: a weight [3, H, C], normed q and k, value embeddings mixed by lambdas."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, 4
        self.qkv_w = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.c_proj = CastedLinear(WIDTH, WIDTH, bias=False)
        freq = (1 / 1024) ** torch.linspace(0, 1, steps=1)
        theta = torch.outer(torch.arange(32.0), torch.cat([freq, freq.new_zeros(1)]))
        self.cos, self.sin = nn.Buffer(theta.cos()), nn.Buffer(theta.sin())

    def rotary(self, x: Tensor) -> Tensor:
        """Rotate half of the dims; the others have frequency 0."""
        cos = self.cos[None, : x.size(-3), None, :]
        sin = self.sin[None, : x.size(-3), None, :]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos), 3).type_as(x)

    def forward(self, x: Tensor, ve: Tensor | None) -> Tensor:
        B, T = x.size(0), x.size(1)
        q, k, v = (
            F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x))
            .view(B, T, 3 * self.num_heads, self.head_dim)
            .chunk(3, dim=-2)
        )
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        q, k = self.rotary(q), self.rotary(k)
        if ve is not None:
            v = self.lambdas[0] * v + self.lambdas[1] * ve.view_as(v)
        else:
            v = self.lambdas[0] * v
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=0.12
        ).transpose(1, 2)
        return self.c_proj(y.contiguous().view(B, T, self.num_heads * self.head_dim))


class ModdedMLP(nn.Module):
    """Squared relu."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = CastedLinear(WIDTH, 4 * WIDTH, bias=False)
        self.c_proj = CastedLinear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class ModdedBlock(nn.Module):
    """A block that mixes in the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = ModdedAttention(), ModdedMLP()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.1]))

    def forward(self, x: Tensor, ve: Tensor | None, x0: Tensor) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x = x + self.attn(F.rms_norm(x, (x.size(-1),)), ve)
        return x + self.mlp(F.rms_norm(x, (x.size(-1),)))


class Modded(nn.Module):
    """modded-nanogpt: skips between layers as in a U-Net, value embeddings, soft-capped logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.value_embeds = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH) for _ in range(1)])
        self.blocks = nn.ModuleList([ModdedBlock() for _ in range(4)])
        self.lm_head = CastedLinear(WIDTH, VOCABULARY, bias=False)
        self.skip_weights = nn.Parameter(torch.ones(2))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        ve = [value_embed(idx) for value_embed in self.value_embeds]
        ve = [ve[0], None, None, ve[0]]
        x = x0 = F.rms_norm(self.embed(idx), (WIDTH,))
        skips: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i >= 2:
                x = x + self.skip_weights[i - 2] * skips.pop()
            x = block(x, ve[i], x0)
            if i < 2:
                skips.append(x)
        logits = self.lm_head(F.rms_norm(x, (x.size(-1),)))
        logits = 15 * torch.sigmoid(logits / (7.5 * x.size(-1) ** 0.5))
        return word_loss(logits, targets)


class Mixer(nn.Module):
    """A language model of any mixer of tokens, with norms before and tied weights."""

    def __init__(self, mixer: Any, mlp: Any = Gated) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"ln1": RMSNorm(), "mix": mixer(), "ln2": RMSNorm(), "mlp": mlp()})
            for _ in range(2)
        )
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(idx)
        for layer in self.layers:
            x = x + layer["mix"](layer["ln1"](x))
            x = x + layer["mlp"](layer["ln2"](x))
        logits = self.head(self.norm(x))
        return logits, word_loss(logits, targets)


class TimeMix(nn.Module):
    """RWKV-4's time mixing: a recurrence over tokens with a decay of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_decay = nn.Parameter(torch.linspace(-2, 1, WIDTH))
        self.time_first = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.time_mix_k = nn.Parameter(torch.linspace(0, 1, WIDTH).view(1, 1, WIDTH))
        self.time_mix_v = nn.Parameter(torch.linspace(0.2, 1, WIDTH).view(1, 1, WIDTH))
        self.time_mix_r = nn.Parameter(torch.linspace(0, 0.5, WIDTH).view(1, 1, WIDTH))
        self.key, self.value = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.receptance = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        xx = self.time_shift(x)
        k = self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))
        v = self.value(x * self.time_mix_v + xx * (1 - self.time_mix_v))
        r = torch.sigmoid(self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r)))
        w, u = -torch.exp(self.time_decay), self.time_first
        aa, bb = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        pp = torch.full_like(k[:, 0], -1e38)
        outs = []
        for t in range(x.size(1)):
            kk, vv = k[:, t], v[:, t]
            ww = u + kk
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            outs.append((e1 * aa + e2 * vv) / (e1 * bb + e2))
            ww = pp + w
            p = torch.maximum(ww, kk)
            e1, e2 = torch.exp(ww - p), torch.exp(kk - p)
            aa, bb, pp = e1 * aa + e2 * vv, e1 * bb + e2, p
        return self.output(r * torch.stack(outs, 1))


class ChannelMix(nn.Module):
    """RWKV-4's channel mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix_k = nn.Parameter(torch.linspace(0, 1, WIDTH).view(1, 1, WIDTH))
        self.key, self.value = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.receptance = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        xk = x * self.time_mix_k + self.time_shift(x) * (1 - self.time_mix_k)
        return torch.sigmoid(self.receptance(xk)) * self.value(
            torch.square(torch.relu(self.key(xk)))
        )


class MambaMixer(nn.Module):
    """mamba-minimal: selective scan by a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.d_inner, self.d_state, self.dt_rank = 24, 4, 3
        self.in_proj = nn.Linear(WIDTH, 2 * self.d_inner, bias=False)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, 3, groups=self.d_inner, padding=2)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * self.d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        A = torch.arange(1, self.d_state + 1).float().repeat(self.d_inner, 1)
        self.A_log, self.D = nn.Parameter(torch.log(A)), nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        x, res = self.in_proj(x).split([self.d_inner, self.d_inner], dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        x = F.silu(x)
        delta, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        A = -torch.exp(self.A_log)
        dA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        dBu = torch.einsum("bld,bln,bld->bldn", delta, B, x)
        h = torch.zeros((b, self.d_inner, self.d_state), device=dA.device, dtype=dA.dtype)
        ys = []
        for i in range(length):
            h = dA[:, i] * h + dBu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i, :]))
        y = torch.stack(ys, dim=1) + x * self.D
        return self.out_proj(y * F.silu(res))


class Retention(nn.Module):
    """RetNet: retention by a mask of decays, a group norm of heads, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 4, WIDTH // 4
        self.q_proj, self.k_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.v_proj, self.g_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-2 - torch.arange(4.0))))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            p(x).view(B, T, self.heads, self.size).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        index = torch.arange(T, device=x.device)
        gap = (index[:, None] - index[None]).to(x.dtype)
        mask = torch.where(gap >= 0, torch.exp(gap * self.decay[:, None, None]), 0.0)
        scores = q @ (k * self.size**-0.5).transpose(-1, -2) * mask
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
        out = F.layer_norm((scores @ v).transpose(1, 2), (self.size,)).reshape(B, T, WIDTH)
        return self.out_proj(F.silu(self.g_proj(x)) * out)


class Hyena(nn.Module):
    """Hyena: implicit long filters, convolved by FFT, and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        self.filter = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, WIDTH, bias=False))
        self.bias = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        L = x.size(1)
        u = self.short(self.in_proj(x).transpose(1, 2))[..., :L]
        x1, x2, v = u.split(WIDTH, dim=1)
        t = torch.linspace(0, 1, L, device=x.device, dtype=x.dtype)[:, None]
        k = self.filter(torch.cat([t, torch.sin(6 * t), torch.cos(6 * t)], -1)).t() * torch.exp(
            -3 * t.t()
        )
        v = v * x2
        y = torch.fft.irfft(torch.fft.rfft(v, n=2 * L) * torch.fft.rfft(k, n=2 * L), n=2 * L)[
            ..., :L
        ]
        y = (y + v * self.bias[:, None]) * x1
        return self.out_proj(y.transpose(1, 2))


class LSHAttention(nn.Module):
    """Reformer: tokens sorted by hashes, attention inside of chunks, unsorted."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.register_buffer("rotations", torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        qk = self.qk(x).view(B, T, 4, 4).transpose(1, 2)
        v = self.v(x).view(B, T, 4, 4).transpose(1, 2)
        rotated = qk.detach() @ self.rotations
        buckets = torch.cat([rotated, -rotated], -1).argmax(-1)
        order = (buckets * T + torch.arange(T, device=x.device)).argsort(-1)
        undo = order.argsort(-1)
        qk = qk.gather(2, order[..., None].expand_as(qk)).reshape(B, 4, 2, T // 2, 4)
        v = v.gather(2, order[..., None].expand_as(v)).reshape(B, 4, 2, T // 2, 4)
        scores = qk @ F.normalize(qk, dim=-1).transpose(-1, -2)
        out = (scores.softmax(-1) @ v).reshape(B, 4, T, 4)
        out = out.gather(2, undo[..., None].expand_as(out))
        return self.o(out.transpose(1, 2).reshape(B, T, -1))


class PerformerAttention(nn.Module):
    """Performer: positive random features, causal by cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("features", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))

        def phi(t: Tensor) -> Tensor:
            dash = torch.einsum("bhnd,jd->bhnj", t * 4**-0.25, self.features)
            diag = (t**2).sum(-1, keepdim=True) / 4
            return torch.exp(dash - diag - dash.amax(dim=-1, keepdim=True).detach()) + 1e-4

        q, k = phi(q), phi(k)
        context = torch.cumsum(torch.einsum("bhnj,bhne->bhnje", k, v), dim=2)
        out = torch.einsum("bhnje,bhnj->bhne", context, q)
        out = out / torch.einsum("bhnj,bhnj->bhn", q, k.cumsum(2))[..., None]
        return self.to_out(out.transpose(1, 2).flatten(2))


class LinformerAttention(nn.Module):
    """Linformer: keys and values projected along the sequence by parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.proj_k, self.proj_v = (
            nn.Parameter(torch.randn(8, 3) / 3),
            nn.Parameter(torch.randn(8, 3) / 3),
        )
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q = self.to_q(x).reshape(b, n, -1, 4).transpose(1, 2)
        k = (
            torch.einsum("bnd,nk->bkd", self.to_k(x), self.proj_k)
            .reshape(b, 3, -1, 4)
            .transpose(1, 2)
        )
        v = (
            torch.einsum("bnd,nk->bkd", self.to_v(x), self.proj_v)
            .reshape(b, 3, -1, 4)
            .transpose(1, 2)
        )
        attn = (torch.einsum("bhnd,bhkd->bhnk", q, k) * 0.5).softmax(-1)
        return self.to_out(
            torch.einsum("bhnk,bhkd->bhnd", attn, v).transpose(1, 2).reshape(b, n, -1)
        )


class LoRALinear(nn.Linear):
    """loralib's layer: a subclass of Linear with two more parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.lora_A = nn.Parameter(torch.randn(2, inputs) / 4)
        self.lora_B = nn.Parameter(torch.randn(outputs, 2) / 4)
        self.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + (x @ self.lora_A.T @ self.lora_B.T) * 0.5


class LoRAMlp(nn.Module):
    """An MLP of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = LoRALinear(WIDTH, 32), LoRALinear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class EinsumAttention(nn.Module):
    """Attention by einsum with weights [D, H, K], as in flax and in trax."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q = nn.Parameter(torch.randn(WIDTH, 4, 4) / 4)
        self.w_kv = nn.Parameter(torch.randn(2, WIDTH, 4, 4) / 4)
        self.w_o = nn.Parameter(torch.randn(4, 4, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btd,dhk->bthk", x, self.w_q)
        k, v = torch.einsum("bsd,cdhk->cbshk", x, self.w_kv)
        logits = torch.einsum("bthk,bshk->bhts", q, k) * 0.5
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
        probs = logits.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-1)
        return torch.einsum("bhts,bshk,hkd->btd", probs, v, self.w_o)


def text(mixer: Any, mlp: Any = Gated) -> Written:
    """Return a language model of a mixer."""
    return Written(lambda: Mixer(mixer, mlp), words, loss=second)


MODELS: dict[str, Written] = {
    "modded": Written(Modded, words),
    "rwkv": text(TimeMix, ChannelMix),
    "mamba": text(MambaMixer),
    "retnet": text(Retention),
    "hyena": text(Hyena),
    "reformer": text(LSHAttention),
    "performer": text(PerformerAttention),
    "linformer": text(LinformerAttention),
    "lora": text(Retention, LoRAMlp),
    "einsum": text(EinsumAttention),
}
