"""Sequence models, graphs and recommenders as people write them in one file, small."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo_models.written import Written
from tests.zoo_models.written_language import (
    VOCABULARY,
    WIDTH,
    Gated,
    RMSNorm,
    second,
    word_loss,
    words,
)

Batch = dict[str, Any]


def generator(seed: int) -> torch.Generator:
    """Return a generator of a seed."""
    return torch.Generator().manual_seed(seed)


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
        self.key, self.value = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
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
        return torch.sigmoid(self.receptance(xk)) * self.value(torch.square(torch.relu(self.key(xk))))


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
        b, l, _ = x.shape
        x, res = self.in_proj(x).split([self.d_inner, self.d_inner], dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :l].transpose(1, 2)
        x = F.silu(x)
        delta, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        A = -torch.exp(self.A_log)
        dA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        dBu = torch.einsum("bld,bln,bld->bldn", delta, B, x)
        h = torch.zeros((b, self.d_inner, self.d_state), device=dA.device, dtype=dA.dtype)
        ys = []
        for i in range(l):
            h = dA[:, i] * h + dBu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i, :]))
        y = torch.stack(ys, dim=1) + x * self.D
        return self.out_proj(y * F.silu(res))


class Retention(nn.Module):
    """RetNet: retention by a mask of decays, a group norm of heads, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 4, WIDTH // 4
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj, self.g_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-2 - torch.arange(4.0))))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, self.heads, self.size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
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
        k = self.filter(torch.cat([t, torch.sin(6 * t), torch.cos(6 * t)], -1)).t() * torch.exp(-3 * t.t())
        v = v * x2
        y = torch.fft.irfft(torch.fft.rfft(v, n=2 * L) * torch.fft.rfft(k, n=2 * L), n=2 * L)[..., :L]
        y = (y + v * self.bias[:, None]) * x1
        return self.out_proj(y.transpose(1, 2))


class LSHAttention(nn.Module):
    """Reformer: tokens sorted by hashes, attention inside of chunks, unsorted."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
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
        self.proj_k, self.proj_v = nn.Parameter(torch.randn(8, 3) / 3), nn.Parameter(torch.randn(8, 3) / 3)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q = self.to_q(x).reshape(b, n, -1, 4).transpose(1, 2)
        k = torch.einsum("bnd,nk->bkd", self.to_k(x), self.proj_k).reshape(b, 3, -1, 4).transpose(1, 2)
        v = torch.einsum("bnd,nk->bkd", self.to_v(x), self.proj_v).reshape(b, 3, -1, 4).transpose(1, 2)
        attn = (torch.einsum("bhnd,bhkd->bhnk", q, k) * 0.5).softmax(-1)
        return self.to_out(torch.einsum("bhnk,bhkd->bhnd", attn, v).transpose(1, 2).reshape(b, n, -1))


class TransformerXL(nn.Module):
    """Transformer-XL: segments with detached memories, relative positions by a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([RelativeLayer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mems: list[Tensor] | None = None
        outs = []
        for segment in idx.split(4, dim=1):
            h = self.word_emb(segment)
            hids = []
            for i, layer in enumerate(self.layers):
                hids.append(h.detach())
                h = layer(h, None if mems is None else mems[i])
            mems = hids
            outs.append(h)
        logits = self.head(torch.cat(outs, 1))
        return logits, word_loss(logits, targets)


class RelativeLayer(nn.Module):
    """A layer of Transformer-XL, with q apart from k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.q_net, self.kv_net = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.r_net, self.o_net = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.r_w_bias, self.r_r_bias = nn.Parameter(torch.randn(4, 4) / 4), nn.Parameter(torch.randn(4, 4) / 4)
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, h: Tensor, mem: Tensor | None) -> Tensor:
        cat = h if mem is None else torch.cat([mem, h], 1)
        B, Q, _ = h.shape
        K = cat.size(1)
        pos = torch.arange(K - 1, -1, -1.0, device=h.device, dtype=h.dtype)
        inv = 1 / (10000 ** (torch.arange(0, WIDTH, 2, device=h.device, dtype=h.dtype) / WIDTH))
        angle = torch.outer(pos, inv)
        r = torch.cat([angle.sin(), angle.cos()], -1)
        q = self.q_net(h).view(B, Q, 4, 4)
        k, v = (t.view(B, K, 4, 4) for t in torch.chunk(self.kv_net(cat), 2, dim=-1))
        rk = self.r_net(r).view(K, 4, 4)
        AC = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        BD = torch.einsum("bind,jnd->bnij", q + self.r_r_bias, rk)
        zero = torch.zeros((*BD.shape[:3], 1), device=h.device, dtype=h.dtype)
        BD = torch.cat([zero, BD], -1).view(B, -1, K + 1, Q)[:, :, 1:].reshape_as(BD)
        score = (AC + BD) * 0.5
        mask = torch.ones(Q, K, dtype=torch.bool, device=h.device).triu(1 + K - Q)
        prob = score.masked_fill(mask, -torch.inf).softmax(-1)
        out = torch.einsum("bnij,bjnd->bind", prob, v).reshape(B, Q, -1)
        h = self.ln1(h + self.o_net(out))
        return self.ln2(h + self.ff(h))


class Universal(nn.Module):
    """Universal transformer: one block, halting by ACT with a cost of pondering."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, "gelu", batch_first=True)
        self.p = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:
        h = self.emb(idx)
        halting = torch.zeros(idx.shape, device=h.device, dtype=h.dtype)
        remainders, updates = torch.zeros_like(halting), torch.zeros_like(halting)
        previous = torch.zeros_like(h)
        for _ in range(3):
            p = torch.sigmoid(self.p(h)).squeeze(-1)
            running = (halting < 1.0).to(h.dtype)
            halted = (halting + p * running > 0.9).to(h.dtype) * running
            still = (halting + p * running <= 0.9).to(h.dtype) * running
            halting = halting + p * still
            remainders = remainders + halted * (1 - halting)
            halting = halting + halted * remainders
            updates = updates + still + halted
            weight = (p * still + halted * remainders).unsqueeze(-1)
            h = self.block(h)
            previous = h * weight + previous * (1 - weight)
        logits = self.head(previous)
        ponder = (remainders + updates).mean(1).mean()
        each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none")
        return {"loss": (each.sum(1) / (targets >= 0).sum(1)).mean() + 0.01 * ponder, "logits": logits}


class RNNLM(nn.Module):
    """An LSTM language model: packed sequences, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        lengths = (targets != -1).sum(1).cpu()
        packed = pack_padded_sequence(self.encoder(idx), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=idx.size(1))
        logits = self.decoder(out)
        return logits, word_loss(logits, targets)


class CellLM(nn.Module):
    """A decoder with attention and an LSTM cell, token by token (Tacotron, NMT)."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.enc = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.query, self.memory = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 12, bias=False)
        self.location = nn.Conv1d(1, 12, 3, padding=1, bias=False)
        self.v = nn.Linear(12, 1, bias=False)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.out = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(idx)
        memory, _ = self.enc(x)
        keys = self.memory(memory)
        h = c = memory.new_zeros(x.size(0), WIDTH)
        context, total = memory.new_zeros(x.size(0), WIDTH), memory.new_zeros(x.size(0), x.size(1))
        logits = []
        for t in range(x.size(1)):
            h, c = self.cell(torch.cat([x[:, t], context], -1), (h, c))
            place = self.location(total.unsqueeze(1)).transpose(1, 2)
            energy = self.v(torch.tanh(self.query(h).unsqueeze(1) + keys + place)).squeeze(-1)
            weights = energy.softmax(1)
            total = total + weights
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            logits.append(self.out(torch.cat([h, context], -1)))
        stacked = torch.stack(logits, 1)
        return stacked, word_loss(stacked, targets)


class NTM(nn.Module):
    """A neural Turing machine: content and location addressing, a written memory."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.controller = nn.GRUCell(WIDTH + 6, WIDTH)
        self.heads = nn.Linear(WIDTH, 6 + 1 + 1 + 3 + 6 + 6)
        self.register_buffer("start", torch.randn(5, 6) / 4)
        self.out = nn.Linear(WIDTH + 6, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        B = idx.size(0)
        memory = self.start.repeat(B, 1, 1)
        h, read = memory.new_zeros(B, WIDTH), memory.new_zeros(B, 6)
        w = memory.new_zeros(B, 5)
        w[:, 0] = 1.0
        outs = []
        for x in self.emb(idx).unbind(1):
            h = self.controller(torch.cat([x, read], 1), h)
            k, beta, g, s, e, a = self.heads(h).split([6, 1, 1, 3, 6, 6], 1)
            wc = (F.softplus(beta) * F.cosine_similarity(memory, k[:, None], dim=-1)).softmax(1)
            wg = torch.sigmoid(g) * wc + (1 - torch.sigmoid(g)) * w
            s = s.softmax(1)
            w = sum(torch.roll(wg, shift - 1, 1) * s[:, shift : shift + 1] for shift in range(3))
            memory = memory * (1 - w[..., None] * torch.sigmoid(e)[:, None]) + w[..., None] * a[:, None]
            read = (w[:, None] @ memory).squeeze(1)
            outs.append(self.out(torch.cat([h, read], 1)))
        logits = torch.stack(outs, 1)
        return logits, word_loss(logits, targets)


class WaveNet(nn.Module):
    """WaveNet and ByteNet: dilated causal convolutions, gates, skips; weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.dilated = nn.ModuleList([norm(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**k)) for k in range(3)])
        self.res = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3)])
        self.skip = nn.ModuleList([nn.Conv1d(WIDTH, 12, 1) for _ in range(3)])
        self.end = nn.Conv1d(12, VOCABULARY, 1)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(idx).transpose(1, 2)
        skips: Any = 0
        for k, (conv, res, skip) in enumerate(zip(self.dilated, self.res, self.skip)):
            a, b = conv(F.pad(x, (2**k, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            skips = skips + skip(z)
            x = x + res(z)
        logits = self.end(F.relu(skips)).transpose(1, 2).contiguous()
        return logits, word_loss(logits, targets)


class Decision(nn.Module):
    """Decision transformer: returns, states and actions in turn in one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_timestep = nn.Embedding(16, WIDTH)
        self.embed_return, self.embed_state = nn.Linear(1, WIDTH), nn.Linear(5, WIDTH)
        self.embed_action, self.embed_ln = nn.Linear(2, WIDTH), nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.predict_action = nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh())

    def forward(self, states: Tensor, actions: Tensor, returns: Tensor, steps: Tensor) -> dict[str, Tensor]:
        B, T = states.shape[:2]
        time = self.embed_timestep(steps)
        parts = (self.embed_return(returns), self.embed_state(states), self.embed_action(actions))
        h = torch.stack([part + time for part in parts], dim=1).permute(0, 2, 1, 3).reshape(B, 3 * T, WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(3 * T, device=h.device, dtype=h.dtype)
        h = self.transformer(self.embed_ln(h), mask=mask)
        h = h.reshape(B, T, 3, WIDTH).permute(0, 2, 1, 3)
        predicted = self.predict_action(h[:, 1])
        return {"loss": ((predicted - actions) ** 2).mean(), "actions": predicted}


def episodes(rows: int, seed: int) -> Batch:
    """Return episodes of a policy."""
    g = generator(seed)
    return {
        "states": torch.randn(rows, 4, 5, generator=g),
        "actions": torch.rand(rows, 4, 2, generator=g),
        "returns": torch.randn(rows, 4, 1, generator=g),
        "steps": torch.randint(0, 16, (rows, 4), generator=g),
    }


class HyperNetwork(nn.Module):
    """A network that makes the weights of another for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8 * 6 + 8 + 8))

    def forward(self, x: Tensor, task: Tensor, y: Tensor) -> Tensor:
        w1, b1, w2 = self.hyper(task).split([48, 8, 8], -1)
        h = torch.tanh(torch.baddbmm(b1[:, :, None], w1.view(-1, 8, 6), x.transpose(1, 2)))
        return F.mse_loss(torch.einsum("bhn,bh->bn", h, w2), y)


def tasks(rows: int, seed: int) -> Batch:
    """Return points of several tasks."""
    g = generator(seed)
    return {
        "x": torch.randn(rows, 7, 6, generator=g),
        "task": torch.randn(rows, 4, generator=g),
        "y": torch.randn(rows, 7, generator=g),
    }


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


class Perceiver(nn.Module):
    """Perceiver IO: latents that attend to inputs, outputs that attend to latents."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.latents = nn.Parameter(torch.randn(5, WIDTH) / 4)
        self.queries = nn.Parameter(torch.randn(8, WIDTH) / 4)
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True) for _ in range(2)]
        )
        self.decode = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        latents = self.latents.unsqueeze(0).expand(idx.size(0), -1, -1)
        mask = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], 1) == -1
        h = latents + self.cross(latents, x, x, key_padding_mask=mask, need_weights=False)[0]
        for layer in self.layers:
            h = layer(h)
        queries = self.queries.expand(idx.size(0), -1, -1)
        out, _ = self.decode(queries, h, h)
        logits = self.head(out)
        return logits, word_loss(logits, targets)


EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2, 5], [1, 2, 3, 4, 5, 3, 0, 1]])


class GCN(nn.Module):
    """Kipf's GCN on graphs [rows, nodes] that share edges, by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(4, 16), nn.Linear(16, 8)
        self.out = nn.Linear(8, 1)
        self.register_buffer("edge_index", EDGES)

    def propagate(self, x: Tensor) -> Tensor:
        """Return the normed sum over neighbours."""
        src, dst = self.edge_index
        deg = torch.ones(x.size(1), dtype=x.dtype, device=x.device)
        deg = deg.index_add(0, dst, torch.ones_like(dst, dtype=x.dtype)).pow(-0.5)
        return x + torch.zeros_like(x).index_add_(1, dst, x[:, src] * (deg[src] * deg[dst])[:, None])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.propagate(self.lin1(x)))
        h = self.propagate(self.lin2(h))
        return F.mse_loss(self.out(h.mean(1))[:, 0], y)


class GAT(nn.Module):
    """GAT: scores of edges, softmax over neighbours by scatter_reduce and scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 16, bias=False)
        self.att_src, self.att_dst = nn.Parameter(torch.randn(1, 1, 4, 4) / 2), nn.Parameter(torch.randn(1, 1, 4, 4) / 2)
        self.out = nn.Linear(16, 1)
        self.register_buffer("edge_index", EDGES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        src, dst = self.edge_index
        h = self.lin(x).view(*x.shape[:2], 4, 4)
        a_src, a_dst = (h * self.att_src).sum(-1), (h * self.att_dst).sum(-1)
        e = F.leaky_relu(a_src[:, src] + a_dst[:, dst], 0.2)
        index = dst[None, :, None].expand_as(e)
        top = torch.full((x.size(0), x.size(1), 4), -torch.inf, dtype=e.dtype, device=e.device)
        top = top.scatter_reduce(1, index, e.detach(), "amax")
        e = torch.exp(e - top.gather(1, index))
        norm = torch.zeros_like(top).scatter_add(1, index, e)
        alpha = e / norm.gather(1, index)
        messages = h[:, src] * alpha[..., None]
        out = torch.zeros_like(h).scatter_add_(1, dst[None, :, None, None].expand_as(messages), messages)
        return F.mse_loss(self.out(F.elu(out.flatten(2)).mean(1))[:, 0], y)


def graphs(rows: int, seed: int) -> Batch:
    """Return graphs with a number for each."""
    g = generator(seed)
    return {"x": torch.randn(rows, 6, 4, generator=g), "y": torch.randn(rows, generator=g)}


class SchNet(nn.Module):
    """SchNet: continuous filters of distances, energies, and forces as gradients."""

    def __init__(self, forces: bool) -> None:
        super().__init__()
        self.forces = forces
        self.embedding = nn.Embedding(5, 8)
        self.filter = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8))
        self.in2f, self.f2out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.energy = nn.Sequential(nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 1))
        self.register_buffer("centers", torch.linspace(0, 3, 6))

    def forward(self, z: Tensor, pos: Tensor, energy: Tensor, force: Tensor) -> Tensor:
        if self.forces:
            pos = pos.detach().requires_grad_()
        gap = pos[:, :, None] - pos[:, None]
        d = (gap.pow(2).sum(-1) + 1e-3).sqrt()
        rbf = torch.exp(-2 * (d[..., None] - self.centers) ** 2)
        cut = 0.5 * (torch.cos(d * math.pi / 5) + 1) * (d < 5)
        h = self.embedding(z)
        for _ in range(2):
            h = h + self.f2out((self.filter(rbf) * cut[..., None] * self.in2f(h)[:, None]).sum(2))
        e = self.energy(h).sum((1, 2))
        loss = F.mse_loss(e, energy)
        if self.forces:
            (grad,) = torch.autograd.grad(e.sum(), pos, create_graph=True)
            loss = loss + F.mse_loss(-grad, force)
        return loss


def molecules(rows: int, seed: int) -> Batch:
    """Return molecules with energies and forces."""
    g = generator(seed)
    return {
        "z": torch.randint(0, 5, (rows, 5), generator=g),
        "pos": torch.randn(rows, 5, 3, generator=g),
        "energy": torch.randn(rows, generator=g),
        "force": torch.randn(rows, 5, 3, generator=g),
    }


class Evoformer(nn.Module):
    """A block of AlphaFold: row attention with pair bias, outer product mean, triangles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_m, self.norm_z = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.bias, self.gate, self.o = nn.Linear(8, 2, bias=False), nn.Linear(8, 8), nn.Linear(8, 8)
        self.a, self.b, self.outer = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(16, 8)
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm_t, self.tri_o, self.tri_g = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        x, pair = self.norm_m(m), self.norm_z(z)
        q, k, v = (f(x).unflatten(-1, (2, 4)) for f in (self.q, self.k, self.v))
        logits = torch.einsum("bsihc,bsjhc->bshij", q, k) * 0.5 + self.bias(pair).permute(0, 3, 1, 2)[:, None]
        out = torch.einsum("bshij,bsjhc->bsihc", logits.softmax(-1), v).flatten(-2)
        m = m + self.o(torch.sigmoid(self.gate(x)) * out)
        outer = torch.einsum("bsic,bsjd->bijcd", self.a(m), self.b(m)).flatten(-2) / m.shape[1]
        z = z + self.outer(outer)
        l, lg = self.left(z).chunk(2, -1)
        r, rg = self.right(z).chunk(2, -1)
        tri = torch.einsum("bikc,bjkc->bijc", l * lg.sigmoid(), r * rg.sigmoid())
        return m, z + torch.sigmoid(self.tri_g(z)) * self.tri_o(self.norm_t(tri))


class Fold(nn.Module):
    """A trunk of such blocks over an alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.left, self.right = nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Evoformer() for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, msa: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
        m = self.embed(msa)
        z = self.left(m[:, 0])[:, :, None] + self.right(m[:, 0])[:, None]
        for block in self.blocks:
            m, z = block(m, z)
        logits = self.head(z + z.transpose(1, 2))
        return F.cross_entropy(logits.permute(0, 3, 1, 2), bins), logits


def alignments(rows: int, seed: int) -> Batch:
    """Return alignments and binned distances."""
    g = generator(seed)
    return {
        "msa": torch.randint(0, 6, (rows, 3, 5), generator=g),
        "bins": torch.randint(0, 4, (rows, 5, 5), generator=g),
    }


class DLRM(nn.Module):
    """DLRM: bags of embeddings, pairwise products of features."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, 8, mode="sum") for n in (12, 10, 20)])
        self.bot_l = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> dict[str, Tensor]:
        x = self.bot_l(dense)
        ly = [emb(sparse[:, k]) for k, emb in enumerate(self.emb_l)]
        T = torch.cat([x] + ly, dim=1).view((x.size(0), -1, x.size(1)))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        li = torch.tensor([i for i in range(4) for j in range(i)], device=x.device)
        lj = torch.tensor([j for i in range(4) for j in range(i)], device=x.device)
        logits = self.top_l(torch.cat([x, Z[:, li, lj]], dim=1))[:, 0]
        return {"loss": F.binary_cross_entropy_with_logits(logits, click), "logits": logits}


class DeepFM(nn.Module):
    """DeepFM and DIN: one table with offsets, factorisation machine, attention to a history."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(42, 8), nn.Embedding(42, 1)
        self.register_buffer("offsets", torch.tensor([0, 12, 22]))
        self.attend = nn.Sequential(nn.Linear(32, 8), nn.PReLU(), nn.Linear(8, 1))
        self.mlp = nn.Sequential(nn.Linear(3 * 8 + 8 + 4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
        ids = sparse.clamp(max=9) [:, :, 0] + self.offsets
        e = self.table(ids)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        history = self.table(sparse[:, 2])
        target = e[:, 2:3].expand_as(history)
        score = self.attend(torch.cat([target, history, target - history, target * history], -1))
        pooled = (score.transpose(1, 2) @ history).squeeze(1)
        deep = self.mlp(torch.cat([e.flatten(1), pooled, dense], 1))
        logit = self.bias + self.linear(ids).sum(1) + fm + deep
        return F.binary_cross_entropy(torch.sigmoid(logit.squeeze(1)), click)


def clicks(rows: int, seed: int) -> Batch:
    """Return dense and sparse features, and clicks."""
    g = generator(seed)
    return {
        "dense": torch.randn(rows, 4, generator=g),
        "sparse": torch.randint(0, 10, (rows, 3, 2), generator=g),
        "click": (torch.rand(rows, generator=g) > 0.5).float(),
    }


class TwoTower(nn.Module):
    """Two towers with sampled softmax over the batch, corrected by frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.item_table = nn.Embedding(12, 8)
        self.item = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        u, i = self.user(dense), self.item(self.item_table(sparse[:, 0, 0]))
        logits = F.normalize(u, dim=-1) @ F.normalize(i, dim=-1).T / 0.1
        return F.cross_entropy(logits, torch.arange(logits.size(0), device=u.device))


def pairs(rows: int, seed: int) -> Batch:
    """Return users and items."""
    batch = clicks(rows, seed)
    return {"dense": batch["dense"], "sparse": batch["sparse"]}


class NeuralODE(nn.Module):
    """A neural ODE by Runge-Kutta steps of one field."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

    def f(self, t: float, h: Tensor) -> Tensor:
        """Return the field at a time."""
        return self.field(torch.cat([h, torch.full_like(h[:, :1], t)], 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, dt = x[:, 0], 0.25
        for k in range(4):
            t = k * dt
            k1 = self.f(t, h)
            k2 = self.f(t + dt / 2, h + dt / 2 * k1)
            k3 = self.f(t + dt / 2, h + dt / 2 * k2)
            k4 = self.f(t + dt, h + dt * k3)
            h = h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return ((h.sum(1) - y) ** 2).mean()


class Conformer(nn.Module):
    """A Conformer encoder with CTC: macaron MLPs, depthwise convolutions, relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv1d(6, WIDTH, 3, 2, 1), nn.GELU())
        self.layers = nn.ModuleList([ConformerLayer() for _ in range(2)])
        self.out = nn.Linear(WIDTH, 6)

    def forward(self, audio: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        h = self.subsample(audio.transpose(1, 2)).transpose(1, 2)
        mask = torch.arange(h.size(1), device=h.device)[None] >= lengths[:, None]
        for layer in self.layers:
            h = layer(h, mask)
        log_probs = self.out(h).log_softmax(-1).transpose(0, 1)
        sizes = torch.full((len(labels),), labels.size(1), dtype=torch.long)
        losses = F.ctc_loss(log_probs, labels, lengths, sizes, reduction="none", zero_infinity=True)
        return (losses / sizes.to(losses.device)).mean()


class ConformerLayer(nn.Module):
    """A layer of a Conformer."""

    def __init__(self) -> None:
        super().__init__()
        self.ff1 = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.ff2 = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.norm_a, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm_c, self.point1 = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depth, self.norm_d = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.GroupNorm(1, WIDTH)
        self.point2, self.norm = nn.Conv1d(WIDTH, WIDTH, 1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        h = self.norm_a(x)
        x = x + self.attn(h, h, h, key_padding_mask=mask, need_weights=False)[0]
        c = F.glu(self.point1(self.norm_c(x).masked_fill(mask[..., None], 0).transpose(1, 2)), dim=1)
        x = x + self.point2(F.silu(self.norm_d(self.depth(c)))).transpose(1, 2)
        return self.norm(x + 0.5 * self.ff2(x))


def audio(rows: int, seed: int) -> Batch:
    """Return spectrograms with texts."""
    g = generator(seed)
    return {
        "audio": torch.randn(rows, 20, 6, generator=g),
        "labels": torch.randint(1, 6, (rows, 3), generator=g),
        "lengths": torch.randint(7, 11, (rows,), generator=g),
    }


def text(mixer: Any, mlp: Any = Gated) -> Written:
    """Return a language model of a mixer."""
    return Written(lambda: Mixer(mixer, mlp), words, loss=second)


def first(output: Any, batch: Any) -> Tensor:
    """Return the first output, the loss."""
    loss: Tensor = output[0]
    return loss


MODELS: dict[str, Written] = {
    "rwkv": text(TimeMix, ChannelMix),
    "mamba": text(MambaMixer),
    "retnet": text(Retention),
    "hyena": text(Hyena),
    "reformer": text(LSHAttention),
    "performer": text(PerformerAttention),
    "linformer": text(LinformerAttention),
    "lora": text(Retention, LoRAMlp),
    "einsum": text(EinsumAttention),
    "transformer_xl": Written(TransformerXL, words, loss=second),
    "universal": Written(Universal, words, weight=lambda b: float(len(b["idx"]))),
    "rnn_lm": Written(RNNLM, words, loss=second),
    "tacotron": Written(CellLM, words, loss=second),
    "ntm": Written(NTM, words, loss=second),
    "wavenet": Written(WaveNet, words, loss=second),
    "decision": Written(Decision, episodes),
    "hypernetwork": Written(HyperNetwork, tasks),
    "perceiver": Written(Perceiver, words, loss=second),
    "gcn": Written(GCN, graphs),
    "gat": Written(GAT, graphs),
    "schnet": Written(lambda: SchNet(False), molecules),
    "schnet_forces": Written(lambda: SchNet(True), molecules),
    "evoformer": Written(Fold, alignments, loss=first),
    "dlrm": Written(DLRM, clicks),
    "deepfm": Written(DeepFM, clicks),
    "two_tower": Written(TwoTower, pairs),
    "ode": Written(NeuralODE, graphs),
    "conformer": Written(Conformer, audio),
}
