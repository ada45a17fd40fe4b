"""Language models as people write them in one file, in the styles of their authors, small."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_models.written import Batch, Written, second

VOCABULARY = 20
WIDTH, HEADS = 16, 4


def words(rows: int, seed: int, length: int = 8) -> dict[str, Tensor]:
    """Return a batch of tokens and of the next tokens; some targets of later rows are ignored."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length + 1), generator=g)
    targets = ids[:, 1:].clone()
    lengths = torch.randint(2, length + 1, (rows, 1), generator=g)
    targets[torch.arange(length) >= lengths] = -1
    return {"idx": ids[:, :-1], "targets": targets}


def word_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over counted targets."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


class NanoAttention(nn.Module):
    """nanoGPT's attention: one projection, split into three."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.flash = HEADS, WIDTH, flash
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoBlock(nn.Module):
    """A block with norms before."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), NanoAttention(flash)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            dict(
                c_fc=nn.Linear(WIDTH, 4 * WIDTH), act=nn.GELU(), c_proj=nn.Linear(4 * WIDTH, WIDTH)
            )
        )
        m = self.mlp
        if not flash:
            self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        h = self.ln_2(x)
        if hasattr(self, "mlpf"):
            return x + self.mlpf(h)
        return x + self.mlp.c_proj(self.mlp.act(self.mlp.c_fc(h)))


class NanoGPT(nn.Module):
    """nanoGPT (flash, tied) or minGPT (a mask as a buffer, untied)."""

    def __init__(self, flash: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCABULARY, WIDTH),
                wpe=nn.Embedding(32, WIDTH),
                h=nn.ModuleList([NanoBlock(flash) for _ in range(2)]),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if flash:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, word_loss(logits, targets)


class RMSNorm(nn.Module):
    """The norm of llama's file."""

    def __init__(self, dim: int = WIDTH, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def angles(dim: int, length: int = 32) -> Tensor:
    """Return the angles of rotary positions, [length, dim / 2]."""
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    return torch.outer(torch.arange(length).float(), freqs)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours, as llama2.c does; x [B, T, H, D]."""
    xr, xi = x.reshape(x.shape[:-1] + (-1, 2)).unbind(-1)
    shape = [d if i == 1 or i == xr.ndim - 1 else 1 for i, d in enumerate(xr.shape)]
    cos, sin = cos.view(shape), sin.view(shape)
    return torch.stack([xr * cos - xi * sin, xr * sin + xi * cos], dim=-1).flatten(3)


class Llama2cAttention(nn.Module):
    """llama2.c's attention: key heads repeated by expand."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = HEADS, 2, WIDTH // HEADS
        self.n_rep = self.n_local_heads // self.n_local_kv_heads
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, 2 * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, 2 * self.head_dim, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat key heads."""
        bs, slen, n_kv_heads, head_dim = x.shape
        return (
            x[:, :, :, None, :]
            .expand(bs, slen, n_kv_heads, self.n_rep, head_dim)
            .reshape(bs, slen, n_kv_heads * self.n_rep, head_dim)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_local_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xq, xk = rotate_pairs(xq, cos, sin), rotate_pairs(xk, cos, sin)
        xk, xv = self.repeat(xk), self.repeat(xv)
        xq, xk, xv = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        mask = torch.full((1, 1, 32, 32), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = F.softmax(scores + mask[:, :, :seqlen, :seqlen], dim=-1).type_as(xq)
        return self.wo(torch.matmul(scores, xv).transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class Gated(nn.Module):
    """SwiGLU as in llama's file."""

    def __init__(self, dim: int = WIDTH, hidden: int = 24) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama2cBlock(nn.Module):
    """A block of llama2.c."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Llama2cAttention(), Gated()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
        h = x + self.attention.forward(self.attention_norm(x), freqs_cos, freqs_sin)
        return h + self.feed_forward.forward(self.ffn_norm(h))


class Llama2c(nn.Module):
    """llama2.c's model.py: the loss is an attribute, the forward returns logits."""

    last_loss: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            self.layers.append(Llama2cBlock())
        self.norm = RMSNorm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tok_embeddings.weight = self.output.weight
        table = angles(WIDTH // HEADS)
        self.register_buffer("freqs_cos", table.cos(), persistent=False)
        self.register_buffer("freqs_sin", table.sin(), persistent=False)
        self.last_loss = None

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        _, seqlen = idx.shape
        h = self.tok_embeddings(idx)
        for layer in self.layers:
            h = layer(h, self.freqs_cos[:seqlen], self.freqs_sin[:seqlen])
        h = self.norm(h)
        logits: Tensor = self.output(h)
        return logits


def outer_word_loss(output: Any, batch: Any) -> Tensor:
    """Return the loss of a model that returns logits."""
    return word_loss(output, batch["targets"])


class FastAttention(nn.Module):
    """gpt-fast's attention: wqkv of unequal parts, rotary by a cache [T, D / 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim, self.dim = HEADS, 2, WIDTH // HEADS, WIDTH
        total = (self.n_head + 2 * self.n_local_heads) * self.head_dim
        self.wqkv = nn.Linear(WIDTH, total, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        kv_size = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([self.dim, kv_size, kv_size], dim=-1)
        q = q.view(bsz, seqlen, self.n_head, self.head_dim)
        k = k.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        v = v.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        q, k = self.rotate(q, freqs), self.rotate(k, freqs)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k = k.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        v = v.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().view(bsz, seqlen, self.dim))

    @staticmethod
    def rotate(x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Rotate pairs."""
        xshaped = x.reshape(*x.shape[:-1], -1, 2)
        freqs_cis = freqs_cis.view(1, xshaped.size(1), 1, xshaped.size(3), 2)
        x_out2 = torch.stack(
            [
                xshaped[..., 0] * freqs_cis[..., 0] - xshaped[..., 1] * freqs_cis[..., 1],
                xshaped[..., 1] * freqs_cis[..., 0] + xshaped[..., 0] * freqs_cis[..., 1],
            ],
            -1,
        )
        return x_out2.flatten(3).type_as(x)


class LitAttention(nn.Module):
    """lit-gpt's attention: groups of queries with their key and value in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.n_query_groups, self.head_size, self.n_head, self.n_embd = 2, 4, HEADS, WIDTH
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * 2) * 4, bias=True)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=True)

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        B, T, C = x.size()
        qkv = self.attn(x)
        q_per_kv = self.n_head // self.n_query_groups
        total_qkv = q_per_kv + 2
        qkv = qkv.view(B, T, self.n_query_groups, total_qkv, self.head_size)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        k = k.expand(B, self.n_query_groups, q_per_kv, T, self.head_size)
        v = v.expand(B, self.n_query_groups, q_per_kv, T, self.head_size)
        q = q.reshape(B, -1, T, self.head_size)
        k = k.reshape(B, -1, T, self.head_size)
        v = v.reshape(B, -1, T, self.head_size)
        cos, sin = freqs[..., 0].repeat(1, 2), freqs[..., 1].repeat(1, 2)

        def rope(x: Tensor) -> Tensor:
            half = x.size(-1) // 2
            rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
            return (x * cos) + (rotated * sin)

        y = F.scaled_dot_product_attention(rope(q), rope(k), v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, self.n_embd))


class LatentAttention(nn.Module):
    """DeepSeek's latent attention: a low-rank query, one latent key-value, a shared rotary key."""

    def __init__(self, absorbed: bool = False) -> None:
        super().__init__()
        self.n_heads, self.nope, self.rope, self.v_dim, self.rank = HEADS, 4, 4, 4, 8
        self.wq_a = nn.Linear(WIDTH, 8, bias=False)
        self.q_norm = RMSNorm(8)
        self.wq_b = nn.Linear(8, HEADS * (self.nope + self.rope), bias=False)
        self.wkv_a = nn.Linear(WIDTH, self.rank + self.rope, bias=False)
        self.kv_norm = RMSNorm(self.rank)
        self.wkv_b = nn.Linear(self.rank, HEADS * (self.nope + self.v_dim), bias=False)
        self.wo = nn.Linear(HEADS * self.v_dim, WIDTH, bias=False)
        self.softmax_scale, self.absorbed = (self.nope + self.rope) ** -0.5, absorbed

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        bsz, seqlen, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x)))
        q = q.view(bsz, seqlen, -1, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q_pe = FastAttention.rotate(q_pe, freqs)
        kv, k_pe = torch.split(self.wkv_a(x), [self.rank, self.rope], dim=-1)
        k_pe = FastAttention.rotate(k_pe.unsqueeze(2), freqs)
        if self.absorbed:
            wkv_b = self.wkv_b.weight.view(self.n_heads, -1, self.rank)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : self.nope])
            latent = self.kv_norm(kv)
            scores = torch.einsum("bshc,btc->bsht", q_nope, latent) + torch.einsum(
                "bshr,btr->bsht", q_pe, k_pe.squeeze(2)
            )
        else:
            kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, -1, self.nope + self.v_dim)
            k_nope, v = torch.split(kv, [self.nope, self.v_dim], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, k_nope.size(2), -1)], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", torch.cat([q_nope, q_pe], dim=-1), k)
        scores = scores * self.softmax_scale + mask.to(x.dtype).log().unsqueeze(1)
        scores = scores.softmax(dim=-1)
        if self.absorbed:
            x = torch.einsum("bsht,btc->bshc", scores, latent)
            x = torch.einsum("bshc,hdc->bshd", x, wkv_b[:, -self.v_dim :])
        else:
            x = torch.einsum("bsht,bthd->bshd", scores, v)
        return self.wo(x.flatten(2))


class LoopMixture(nn.Module):
    """Experts by a loop over the chosen tokens of each, with index_add (Mixtral)."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([Gated(hidden=12) for _ in range(4)])
        self.shared_experts = Gated(hidden=8) if shared else None
        if shared:
            self.register_buffer("bias", torch.tensor([0.0, 0.1, -0.1, 0.05]))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, WIDTH)
        if self.shared_experts is None:
            routing = F.softmax(self.gate(x), dim=1)
            weights, selected = torch.topk(routing, 2, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            final = torch.zeros_like(x)
            expert_mask = F.one_hot(selected, num_classes=4).permute(2, 1, 0)
            for expert_idx in range(4):
                idx, top_x = torch.where(expert_mask[expert_idx])
                current = x[None, top_x].reshape(-1, WIDTH)
                current = self.experts[expert_idx](current) * weights[top_x, idx, None]
                final.index_add_(0, top_x, current.to(x.dtype))
            return final.view(shape)
        scores = self.gate(x).sigmoid()
        indices = torch.topk(scores + self.bias, 2, dim=-1)[1]
        weights = scores.gather(1, indices)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=4).tolist()
        for i in range(4):
            if counts[i] == 0:
                continue
            idx, top = torch.where(indices == i)
            y[idx] += self.experts[i](x[idx]) * weights[idx, top, None]
        return (y + self.shared_experts(x)).view(shape)


class SwitchMixture(nn.Module):
    """Switch: einsum dispatch with capacity for each row, experts in stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.w_in = nn.Parameter(torch.randn(4, WIDTH, 24) / 4)
        self.w_out = nn.Parameter(torch.randn(4, 24, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        capacity = 4
        gates = self.router(x).softmax(-1)
        top, index = gates.max(-1)
        mask = F.one_hot(index, 4).to(x.dtype)
        position = (mask.cumsum(1) - 1) * mask
        mask = mask * (position < capacity)
        slots = F.one_hot(position.sum(-1).long().clamp(max=capacity - 1), capacity).to(x.dtype)
        dispatch = torch.einsum("bte,btc->btec", mask, slots)
        inputs = torch.einsum("btec,btd->ebcd", dispatch, x)
        hidden = torch.relu(torch.einsum("ebcd,edf->ebcf", inputs, self.w_in))
        outputs = torch.einsum("ebcf,efd->ebcd", hidden, self.w_out)
        return torch.einsum("btec,ebcd->btd", dispatch * top[..., None, None], outputs)


class DecoderBlock(nn.Module):
    """A block with norms before, of any attention and any MLP."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, mlp
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    """gpt-fast's frame; `ahead`: heads that predict further tokens (Meta, DeepSeek-V3)."""

    def __init__(self, attention: Any, mlp: Any = Gated, ahead: int = 0) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderBlock(attention(), mlp()) for _ in range(2))
        self.norm = RMSNorm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        table = angles(4)
        self.register_buffer("freqs_cis", torch.stack([table.cos(), table.sin()], -1))
        self.register_buffer("causal", torch.tril(torch.ones(32, 32, dtype=torch.bool)))
        self.ahead = nn.ModuleList(DecoderBlock(attention(), Gated()) for _ in range(ahead))
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(ahead))

    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x, length = self.tok_embeddings(idx), idx.size(1)
        freqs, mask = self.freqs_cis[:length], self.causal[:length, :length]
        for layer in self.layers:
            x = layer(x, freqs, mask)
        logits = self.output(self.norm(x))
        loss = word_loss(logits, targets)
        for depth, (block, join) in enumerate(zip(self.ahead, self.joins), 1):
            later = self.tok_embeddings(F.pad(idx[:, depth:], (0, depth)))
            x = block(join(torch.cat([self.norm(x), later], -1)), freqs, mask)
            further = F.pad(targets[:, depth:], (0, depth), value=-1)
            loss = loss + 0.3 * word_loss(self.output(self.norm(x)), further)
        return {"loss": loss, "logits": logits}


def count_rows(batch: Any) -> float:
    """Return the number of rows: the weight of a part whose rows have equally many labels."""
    return float(len(batch["idx"]))


def all_words(rows: int, seed: int) -> Batch:
    """Return a batch of which every target counts."""
    batch = words(rows, seed)
    return {**batch, "targets": batch["targets"].clamp(min=1)}


def ahead() -> nn.Module:
    """Return a model with two more heads."""
    return Decoder(FastAttention, ahead=2)


MODELS: dict[str, Written] = {
    "nanogpt": Written(NanoGPT, words, loss=second),
    "mingpt": Written(lambda: NanoGPT(False), words, loss=second),
    "llama2c": Written(Llama2c, words, loss=outer_word_loss),
    "gptfast": Written(lambda: Decoder(FastAttention), words),
    "litgpt": Written(lambda: Decoder(LitAttention), words),
    "mla": Written(lambda: Decoder(LatentAttention, lambda: LoopMixture(True)), words),
    "mla_absorbed": Written(lambda: Decoder(lambda: LatentAttention(True)), words),
    "mixtral_loop": Written(lambda: Decoder(FastAttention, LoopMixture), words),
    "switch": Written(lambda: Decoder(FastAttention, SwitchMixture), words),
    "ahead": Written(ahead, all_words, weight=count_rows),
    "ahead_ragged": Written(ahead, words),
}
