"""Recurrent, segmented and halting sequence models, as people write them in one file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo_models.written import Batch, Written, make_generator, second
from tests.zoo_models.written_language import VOCABULARY, WIDTH, word_loss, words


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
        self.q_net, self.kv_net = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
        )
        self.r_net, self.o_net = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.r_w_bias, self.r_r_bias = (
            nn.Parameter(torch.randn(4, 4) / 4),
            nn.Parameter(torch.randn(4, 4) / 4),
        )
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
        return {
            "loss": (each.sum(1) / (targets >= 0).sum(1)).mean() + 0.01 * ponder,
            "logits": logits,
        }


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
        packed = pack_padded_sequence(
            self.encoder(idx), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=idx.size(1)
        )
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
            memory = (
                memory * (1 - w[..., None] * torch.sigmoid(e)[:, None]) + w[..., None] * a[:, None]
            )
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
        self.dilated = nn.ModuleList(
            [norm(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**k)) for k in range(3)]
        )
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
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.predict_action = nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh())

    def forward(
        self, states: Tensor, actions: Tensor, returns: Tensor, steps: Tensor
    ) -> dict[str, Tensor]:
        B, T = states.shape[:2]
        time = self.embed_timestep(steps)
        parts = (self.embed_return(returns), self.embed_state(states), self.embed_action(actions))
        h = (
            torch.stack([part + time for part in parts], dim=1)
            .permute(0, 2, 1, 3)
            .reshape(B, 3 * T, WIDTH)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(3 * T, device=h.device, dtype=h.dtype)
        h = self.transformer(self.embed_ln(h), mask=mask)
        h = h.reshape(B, T, 3, WIDTH).permute(0, 2, 1, 3)
        predicted = self.predict_action(h[:, 1])
        return {"loss": ((predicted - actions) ** 2).mean(), "actions": predicted}


def episodes(rows: int, seed: int) -> Batch:
    """Return episodes of a policy."""
    g = make_generator(seed)
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
    g = make_generator(seed)
    return {
        "x": torch.randn(rows, 7, 6, generator=g),
        "task": torch.randn(rows, 4, generator=g),
        "y": torch.randn(rows, 7, generator=g),
    }


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
        self.ff1 = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)
        )
        self.ff2 = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)
        )
        self.norm_a, self.attn = (
            nn.LayerNorm(WIDTH),
            nn.MultiheadAttention(WIDTH, 4, batch_first=True),
        )
        self.norm_c, self.point1 = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depth, self.norm_d = (
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            nn.GroupNorm(1, WIDTH),
        )
        self.point2, self.norm = nn.Conv1d(WIDTH, WIDTH, 1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        h = self.norm_a(x)
        x = x + self.attn(h, h, h, key_padding_mask=mask, need_weights=False)[0]
        c = F.glu(
            self.point1(self.norm_c(x).masked_fill(mask[..., None], 0).transpose(1, 2)), dim=1
        )
        x = x + self.point2(F.silu(self.norm_d(self.depth(c)))).transpose(1, 2)
        return self.norm(x + 0.5 * self.ff2(x))


def audio(rows: int, seed: int) -> Batch:
    """Return spectrograms with texts."""
    g = make_generator(seed)
    return {
        "audio": torch.randn(rows, 20, 6, generator=g),
        "labels": torch.randint(1, 6, (rows, 3), generator=g),
        "lengths": torch.randint(7, 11, (rows,), generator=g),
    }


MODELS: dict[str, Written] = {
    "transformer_xl": Written(TransformerXL, words, loss=second),
    "universal": Written(Universal, words, weight=lambda b: float(len(b["idx"]))),
    "rnn_lm": Written(RNNLM, words, loss=second),
    "tacotron": Written(CellLM, words, loss=second),
    "ntm": Written(NTM, words, loss=second),
    "wavenet": Written(WaveNet, words, loss=second),
    "decision": Written(Decision, episodes),
    "hypernetwork": Written(HyperNetwork, tasks),
    "perceiver": Written(Perceiver, words, loss=second),
    "conformer": Written(Conformer, audio),
}
