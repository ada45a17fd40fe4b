"""Vision, generative and contrastive models as people write them in one file, small."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_models.written import Written

Batch = dict[str, Any]


def generator(seed: int) -> torch.Generator:
    """Return a generator of a seed."""
    return torch.Generator().manual_seed(seed)


def images(rows: int, seed: int) -> Batch:
    """Return images of 8 x 8 and labels."""
    g = generator(seed)
    return {
        "x": torch.randn(rows, 3, 8, 8, generator=g),
        "labels": torch.randint(0, 5, (rows,), generator=g),
    }


def pictures(rows: int, seed: int) -> Batch:
    """Return images alone."""
    return {"x": images(rows, seed)["x"]}


def noised(rows: int, seed: int) -> Batch:
    """Return images, noise, times and labels for a diffusion model."""
    g = generator(seed)
    return {
        **images(rows, seed),
        "noise": torch.randn(rows, 3, 8, 8, generator=g),
        "t": torch.randint(0, 100, (rows,), generator=g),
        "keep": torch.rand(rows, generator=g) > 0.3,
    }


def times(t: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return sinusoidal embeddings of times."""
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1).to(dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale by row."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class ViTAttention(nn.Module):
    """timm's attention: qkv reshaped into [3, B, H, N, D]."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Mlp(nn.Module):
    """timm's MLP."""

    def __init__(self, dim: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class DiTBlock(nn.Module):
    """A block of DiT: modulated by the condition, gates start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(16, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(16, elementwise_affine=False, eps=1e-6)
        self.attn, self.mlp = ViTAttention(), Mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(16, 6 * 16))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        parts = self.adaLN_modulation(c).chunk(6, dim=1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = parts
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class DiT(nn.Module):
    """DiT with labels that are dropped for guidance without a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(3, 16, 2, stride=2)
        self.t_embedder = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.y_embedder = nn.Embedding(6, 16)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 16) / 4, requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(2)])
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(16, 32))
        self.linear = nn.Linear(16, 2 * 2 * 3)
        for block in self.blocks:
            nn.init.constant_(block.adaLN_modulation[-1].weight, 0.01)

    def unpatchify(self, x: Tensor) -> Tensor:
        """Return images of patches."""
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(shape=(x.shape[0], h, w, 2, 2, 3))
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 3, h * 2, w * 2)

    def forward(self, x: Tensor, noise: Tensor, t: Tensor, labels: Tensor, keep: Tensor) -> Any:
        alpha = torch.cos(t / 100 * math.pi / 2).view(-1, 1, 1, 1).to(x.dtype)
        noisy = alpha * x + (1 - alpha**2).sqrt() * noise
        h = self.x_embedder(noisy).flatten(2).transpose(1, 2) + self.pos_embed
        labels = torch.where(keep, labels, 5)
        c = self.t_embedder(times(t, 16, x.dtype)) + self.y_embedder(labels)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.ada(c).chunk(2, dim=1)
        out = self.unpatchify(self.linear(modulate(self.norm(h), shift, scale)))
        return {"loss": F.mse_loss(out, noise), "out": out}


class ResBlock(nn.Module):
    """A residual block of DDPM's U-Net."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.temb_proj = nn.Linear(16, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb_proj(F.silu(temb))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class ConvAttention(nn.Module):
    """DDPM's attention over pixels, by 1 x 1 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.q, self.k = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.v, self.proj_out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        b, c, height, width = h.shape
        q = self.q(h).reshape(b, c, -1).permute(0, 2, 1)
        k, v = self.k(h).reshape(b, c, -1), self.v(h).reshape(b, c, -1)
        w = F.softmax(torch.bmm(q, k) * (int(c) ** (-0.5)), dim=2).permute(0, 2, 1)
        return x + self.proj_out(torch.bmm(v, w).reshape(b, c, height, width))


class CrossAttention(nn.Module):
    """Stable diffusion's attention to a text, heads in the batch."""

    def __init__(self, dim: int, context: int | None = None) -> None:
        super().__init__()
        self.heads, self.scale = 2, (dim // 2) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(context or dim, dim, bias=False)
        self.to_v = nn.Linear(context or dim, dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        h = self.heads

        def split(t: Tensor) -> Tensor:
            b, n, _ = t.shape
            return t.view(b, n, h, -1).transpose(1, 2).reshape(b * h, n, -1)

        q, k, v = split(self.to_q(x)), split(self.to_k(context)), split(self.to_v(context))
        attn = (torch.einsum("bid,bjd->bij", q, k) * self.scale).softmax(dim=-1)
        out = torch.einsum("bij,bjd->bid", attn, v)
        b = x.shape[0]
        out = out.view(b, h, out.shape[1], -1).transpose(1, 2).reshape(b, out.shape[1], -1)
        return self.to_out(out)


class SpatialTransformer(nn.Module):
    """A transformer over pixels with GEGLU, as in SDXL."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, dim)
        self.proj_in = nn.Linear(dim, dim)
        self.norm1, self.attn1 = nn.LayerNorm(dim), CrossAttention(dim)
        self.norm2, self.attn2 = nn.LayerNorm(dim), CrossAttention(dim, 12)
        self.norm3 = nn.LayerNorm(dim)
        self.ff_in, self.ff_out = nn.Linear(dim, 2 * 2 * dim), nn.Linear(2 * dim, dim)
        self.proj_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, c, height, width = x.shape
        h = self.proj_in(self.norm(x).permute(0, 2, 3, 1).reshape(b, height * width, c))
        h = h + self.attn1(self.norm1(h))
        h = h + self.attn2(self.norm2(h), context)
        value, gate = self.ff_in(self.norm3(h)).chunk(2, dim=-1)
        h = h + self.ff_out(value * F.gelu(gate))
        h = self.proj_out(h).reshape(b, height, width, c).permute(0, 3, 1, 2)
        return h + x


class UNet(nn.Module):
    """DDPM's U-Net; with a text the attention is a transformer with cross attention (SDXL)."""

    def __init__(self, text: bool) -> None:
        super().__init__()
        self.text = nn.Embedding(6, 12) if text else None
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        attend = SpatialTransformer if text else ConvAttention
        self.downs = nn.ModuleList([ResBlock(8, 8), ResBlock(8, 16)])
        self.downsample = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.mid1, self.attn, self.mid2 = ResBlock(16, 16), attend(16), ResBlock(16, 16)
        self.ups = nn.ModuleList([ResBlock(32, 16), ResBlock(24, 8)])
        self.norm_out, self.conv_out = nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, noise: Tensor, t: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
        temb = self.time(times(t, 8, x.dtype))
        a = (1 - t / 100).to(x.dtype)[:, None, None, None]
        h = self.conv_in(a.sqrt() * x + (1 - a).sqrt() * noise)
        h1 = self.downs[0](h, temb)
        h2 = self.downs[1](self.downsample(h1), temb)
        h = self.mid1(h2, temb)
        if self.text is not None:
            context = self.text(torch.stack([labels, labels.flip(0) * 0 + 5], 1))
            h = self.attn(h, context * keep[:, None, None])
        else:
            h = self.attn(h)
        h = self.mid2(h, temb)
        h = self.ups[0](torch.cat([h, h2], dim=1), temb)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.ups[1](torch.cat([h, h1], dim=1), temb)
        return F.mse_loss(self.conv_out(F.silu(self.norm_out(h))), noise)


class VQVAE(nn.Module):
    """VQ-VAE: nearest codes, straight through; the codebook learned or by moving averages."""

    def __init__(self, ema: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )
        self.ema = ema
        if ema:
            self.register_buffer("codes", torch.randn(12, 4))
            self.register_buffer("cluster_size", torch.ones(12))
            self.register_buffer("embed_avg", self.codes.clone())
        else:
            self.embedding = nn.Embedding(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 4)
        codes = self.codes if self.ema else self.embedding.weight
        d = flat.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * flat @ codes.t()
        index = torch.argmin(d, dim=1)
        if self.ema:
            zq = F.embedding(index, self.codes).view(z.shape)
            if self.training:
                with torch.no_grad():
                    onehot = F.one_hot(index, 12).type(flat.dtype)
                    self.cluster_size.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                    self.embed_avg.mul_(0.9).add_(onehot.t() @ flat, alpha=0.1)
                    self.codes.copy_(self.embed_avg / self.cluster_size.unsqueeze(1))
            loss = 0.25 * F.mse_loss(zq.detach(), z)
        else:
            zq = self.embedding(index).view(z.shape)
            loss = F.mse_loss(zq, z.detach()) + 0.25 * F.mse_loss(zq.detach(), z)
        zq = z + (zq - z).detach()
        out = self.decoder(zq.permute(0, 3, 1, 2).contiguous())
        return F.mse_loss(out, x) + loss, out


class MAE(nn.Module):
    """Masked autoencoder: patches kept by argsort and gather, restored by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 2, stride=2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16) / 8)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 16) / 8, requires_grad=False)
        self.blocks = nn.ModuleList([MAE.block() for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.decoder_embed = nn.Linear(16, 8)
        self.mask_token = nn.Parameter(torch.randn(1, 1, 8) / 8)
        self.decoder_blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True)])
        self.decoder_pred = nn.Linear(8, 12)

    @staticmethod
    def block() -> nn.Module:
        """Return a block."""
        return Block()

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        N = x.shape[0]
        h = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:, :]
        L, D = h.shape[1:]
        len_keep = int(L * 0.5)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        h = torch.gather(h, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :len_keep] = 0
        mask = torch.gather(mask, dim=1, index=ids_restore)
        cls = (self.cls_token + self.pos_embed[:, :1, :]).expand(N, -1, -1)
        h = torch.cat((cls, h), dim=1)
        for blk in self.blocks:
            h = blk(h)
        h = self.decoder_embed(self.norm(h))
        tokens = self.mask_token.repeat(N, ids_restore.shape[1] + 1 - h.shape[1], 1)
        h_ = torch.cat([h[:, 1:, :], tokens], dim=1)
        h_ = torch.gather(h_, 1, ids_restore.unsqueeze(-1).repeat(1, 1, h.shape[2]))
        h = torch.cat([h[:, :1, :], h_], dim=1)
        for blk in self.decoder_blocks:
            h = blk(h)
        pred = self.decoder_pred(h)[:, 1:, :]
        target = x.reshape(N, 3, 4, 2, 4, 2)
        target = torch.einsum("nchpwq->nhwpqc", target).reshape(N, 16, 12)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return {"loss": (loss * mask).sum() / mask.sum(), "pred": pred}


def masked(rows: int, seed: int) -> Batch:
    """Return images and noise that orders patches."""
    return {**pictures(rows, seed), "noise": torch.rand(rows, 16, generator=generator(seed))}


class Block(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, dim: int = 16, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), attention or ViTAttention(dim)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """A stem, a trunk, a mean over positions, and a head with cross entropy."""

    def __init__(self, stem: nn.Module, trunk: nn.Module, width: int, channels: bool) -> None:
        super().__init__()
        self.stem, self.trunk, self.channels = stem, trunk, channels
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(self.stem(x))
        logits = self.head(h.mean((2, 3)) if self.channels else h.flatten(1, -2).mean(1))
        return F.cross_entropy(logits, labels, label_smoothing=0.1), logits


class Patches(nn.Module):
    """Patches as tokens, or as a picture with channels last."""

    def __init__(self, dim: int, size: int = 2, flat: bool = True) -> None:
        super().__init__()
        self.proj, self.flat = nn.Conv2d(3, dim, size, size), flat

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2) if self.flat else x.permute(0, 2, 3, 1)


class MixerBlock(nn.Module):
    """MLP-Mixer: one MLP over tokens, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mlp_tokens = nn.LayerNorm(16), Mlp(16, 24)
        self.norm2, self.mlp_channels = nn.LayerNorm(16), Mlp(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class ConvNeXtBlock(nn.Module):
    """ConvNeXt: a depthwise convolution, projections of channels, a layer scale."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act = nn.Linear(dim, 4 * dim), nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.gamma * self.pwconv2(self.act(self.pwconv1(x)))
        return skip + x.permute(0, 3, 1, 2)


class WindowAttention(nn.Module):
    """Swin's attention in windows, with a table of relative biases."""

    def __init__(self, dim: int = 16, heads: int = 4, window: int = 2) -> None:
        super().__init__()
        self.num_heads, self.scale, self.window = heads, (dim // heads) ** -0.5, window
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) / 4)
        coords = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        index = relative[:, :, 0] * (2 * window - 1) + relative[:, :, 1]
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        x = (attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    """A Swin block, with or without a shift by roll."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.window = shift, 2
        self.norm1, self.attn = nn.LayerNorm(16), WindowAttention()
        self.norm2, self.mlp = nn.LayerNorm(16), Mlp()
        mask = None
        if shift:
            img = torch.zeros(1, 4, 4, 1)
            cnt = 0
            slices = (slice(0, -2), slice(-2, -1), slice(-1, None))
            for h in slices:
                for w in slices:
                    img[:, h, w, :] = cnt
                    cnt += 1
            windows = self.partition(img).view(-1, 4)
            mask = windows.unsqueeze(1) - windows.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        self.register_buffer("attn_mask", mask)

    def partition(self, x: Tensor) -> Tensor:
        """Return windows [B * windows, tokens, C]."""
        B, H, W, C = x.shape
        x = x.view(B, H // 2, 2, W // 2, 2, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, C)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        h = self.norm1(x)
        if self.shift:
            h = torch.roll(h, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = self.attn(self.partition(h), self.attn_mask)
        B = int(windows.shape[0] / (H * W / 4))
        h = windows.view(B, H // 2, W // 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
        h = h.contiguous().view(B, H, W, -1)
        if self.shift:
            h = torch.roll(h, shifts=(self.shift, self.shift), dims=(1, 2))
        x = x + h
        return x + self.mlp(self.norm2(x))


class SqueezeExcite(nn.Module):
    """EfficientNet's gate of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(s))))


class MBConv(nn.Module):
    """EfficientNet's block with batch norm (or group norm)."""

    def __init__(self, norm: Any, channels: int = 8) -> None:
        super().__init__()
        wide = 2 * channels
        self.conv = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            norm(wide),
            nn.SiLU(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            norm(wide),
            nn.SiLU(),
            SqueezeExcite(wide),
            nn.Conv2d(wide, channels, 1, bias=False),
            norm(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class BasicBlock(nn.Module):
    """ResNet's basic block."""

    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int, norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1, self.relu = norm(planes), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), norm(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), norm(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def group_norm(channels: int) -> nn.Module:
    """Return a norm of each picture alone."""
    return nn.GroupNorm(4, channels)


def resnet(norm: Any) -> nn.Module:
    """Return a small ResNet."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), norm(8), nn.ReLU(inplace=True))
    trunk = nn.Sequential(
        nn.Sequential(BasicBlock(8, 8, 1, norm), BasicBlock(8, 8, 1, norm)),
        nn.Sequential(BasicBlock(8, 16, 2, norm), BasicBlock(16, 16, 1, norm)),
    )
    return Classifier(stem, trunk, 16, True)


class DETR(nn.Module):
    """DETR's demo: queries, torch's transformer, targets matched without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU())
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
        self.linear_class, self.linear_bbox = nn.Linear(16, 4), nn.Linear(16, 4)
        self.query_pos = nn.Parameter(torch.rand(5, 16))
        self.row_embed = nn.Parameter(torch.rand(4, 8))
        self.col_embed = nn.Parameter(torch.rand(4, 8))

    def forward(self, x: Tensor, boxes: Tensor, classes: Tensor) -> dict[str, Tensor]:
        h = self.backbone(x)
        H, W = h.shape[-2:]
        col = self.col_embed[:W].unsqueeze(0).repeat(H, 1, 1)
        pos = torch.cat([col, self.row_embed[:H].unsqueeze(1).repeat(1, W, 1)], -1)
        source = pos.flatten(0, 1).unsqueeze(0) + 0.1 * h.flatten(2).permute(0, 2, 1)
        queries = self.query_pos.unsqueeze(0).repeat(len(x), 1, 1)
        h = self.transformer(source, queries)
        logits, out = self.linear_class(h), self.linear_bbox(h).sigmoid()
        with torch.no_grad():
            cost = torch.cdist(out, boxes, p=1)
            picked = torch.zeros(cost.shape[:2], dtype=torch.bool, device=x.device)
            index = []
            for k in range(boxes.shape[1]):  # greedy, instead of scipy's
                best = cost[:, :, k].masked_fill(picked, float("inf")).argmin(1)
                picked = picked.scatter(1, best[:, None], True)
                index.append(best)
            index = torch.stack(index, 1)
        matched = torch.gather(out, 1, index[..., None].expand(-1, -1, 4))
        target = torch.full(logits.shape[:2], 3, dtype=torch.int64, device=x.device)
        target.scatter_(1, index, classes)
        weight = torch.tensor([1.0, 1.0, 1.0, 0.1], dtype=logits.dtype, device=x.device)
        nll = F.cross_entropy(logits.transpose(1, 2), target, weight, reduction="none").mean()
        return {"loss": nll + 5 * F.l1_loss(matched, boxes), "logits": logits, "boxes": out}


def boxed(rows: int, seed: int) -> Batch:
    """Return images with three boxes and their classes."""
    g = generator(seed)
    return {
        **pictures(rows, seed),
        "boxes": torch.rand(rows, 3, 4, generator=g),
        "classes": torch.randint(0, 3, (rows, 3), generator=g),
    }


class Capsules(nn.Module):
    """Capsules with routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 2, 1)
        self.W = nn.Parameter(0.3 * torch.randn(1, 64, 5, 6, 4))

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        """Return vectors shorter than one."""
        norm = (s**2).sum(-1, keepdim=True)
        return norm / (1 + norm) * s / torch.sqrt(norm + 1e-8)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        u = self.squash(self.conv(x).view(x.size(0), 4, 4, -1).permute(0, 1, 3, 2).reshape(x.size(0), -1, 4))
        u_hat = torch.matmul(self.W, u[:, :, None, :, None]).squeeze(-1)
        frozen = u_hat.detach()
        b = torch.zeros(x.size(0), 64, 5, 1, device=x.device, dtype=x.dtype)
        for i in range(3):
            c = F.softmax(b, dim=2)
            if i == 2:
                v = self.squash((c * u_hat).sum(dim=1))
            else:
                v = self.squash((c * frozen).sum(dim=1))
                b = b + (frozen * v.unsqueeze(1)).sum(-1, keepdim=True)
        length = v.norm(dim=-1)
        T = F.one_hot(labels, 5).to(x.dtype)
        loss = T * F.relu(0.9 - length) ** 2 + 0.5 * (1 - T) * F.relu(length - 0.1) ** 2
        return loss.sum(1).mean(), length


class GAN(nn.Module):
    """Generator and discriminator in one module; both losses in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(
            nn.Linear(8, 64), nn.ReLU(), nn.Unflatten(1, (4, 4, 4)),
            nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.Conv2d(8, 3, 3, padding=1), nn.Tanh(),
        )
        self.D = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1),
        )

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        fake = self.G(z)
        d_loss = F.softplus(-self.D(x)).mean() + F.softplus(self.D(fake.detach())).mean()
        for p in self.D.parameters():
            p.requires_grad_(False)
        g_loss = F.softplus(-self.D(fake)).mean()
        for p in self.D.parameters():
            p.requires_grad_(True)
        return d_loss + g_loss


def with_z(rows: int, seed: int) -> Batch:
    """Return images and noise."""
    return {**pictures(rows, seed), "z": torch.randn(rows, 8, generator=generator(seed))}


class VAE(nn.Module):
    """A VAE; the noise comes with the batch, so that all runs draw alike."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(192, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 192)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 192)))
        mu, logvar = self.fc21(h), self.fc22(h)
        h = F.relu(self.fc3(mu + z * torch.exp(0.5 * logvar)))
        recon = torch.sigmoid(self.fc4(h))
        target = torch.sigmoid(x.view(-1, 192))
        bce = F.binary_cross_entropy(recon, target, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / x.size(0), recon, mu


class Coupling(nn.Module):
    """An affine coupling of RealNVP."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], dim=1), log_det + s.sum(1)


class Flow(nn.Module):
    """RealNVP with an invertible linear map (Glow), and its log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0] if torch.empty(0).device.type != "meta" else torch.empty(8, 8))
        self.couplings = nn.ModuleList([Coupling(bool(k % 2)) for k in range(4)])
        self.register_buffer("base", torch.zeros(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        log_det = torch.slogdet(self.mix)[1].expand(x.size(0))
        x = x @ self.mix
        for coupling in self.couplings:
            x, log_det = coupling(x, log_det)
        prior = torch.distributions.Normal(self.base, torch.ones_like(self.base), validate_args=False)
        return {"loss": -(prior.log_prob(x).sum(1) + log_det).mean(), "z": x}


def vectors(rows: int, seed: int) -> Batch:
    """Return vectors of 8."""
    return {"x": torch.randn(rows, 8, generator=generator(seed))}


class CLIP(nn.Module):
    """CLIP, or SigLIP with its sigmoid loss over all pairs."""

    def __init__(self, sigmoid: bool = False) -> None:
        super().__init__()
        self.sigmoid = sigmoid
        self.visual = nn.Sequential(Patches(16), Block(), Block())
        self.visual_proj = nn.Parameter(torch.randn(16, 12) / 4)
        self.token_embedding = nn.Embedding(10, 16)
        self.transformer = nn.Sequential(Block(), Block())
        self.text_projection = nn.Parameter(torch.randn(16, 12) / 4)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0)) if sigmoid else None

    def encode_image(self, x: Tensor) -> Tensor:
        """Return normed features of images."""
        return F.normalize(self.visual(x).mean(1) @ self.visual_proj, dim=-1)

    def encode_text(self, text: Tensor) -> Tensor:
        """Return normed features at the last token."""
        h = self.transformer(self.token_embedding(text))
        h = h[torch.arange(h.shape[0]), text.argmax(dim=-1)]
        return F.normalize(h @ self.text_projection, dim=-1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        a, b = self.encode_image(x), self.encode_text(text)
        logits = self.logit_scale.exp() * a @ b.t()
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
            labels = 2 * torch.eye(len(a), device=a.device, dtype=a.dtype) - 1
            return -F.logsigmoid(labels * logits).sum() / len(a)
        labels = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def captioned(rows: int, seed: int) -> Batch:
    """Return images and texts."""
    return {**pictures(rows, seed), "text": torch.randint(0, 10, (rows, 6), generator=generator(seed))}


class SimCLR(nn.Module):
    """SimCLR: both views through one encoder, in one call or in two."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.joined:
            z = self.encoder(torch.cat([x, other]))
        else:
            z = torch.cat([self.encoder(x), self.encoder(other)])
        z = F.normalize(z, dim=1)
        sim = z @ z.t() / 0.5
        n = len(x)
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=x.device), -1e9)
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(x.device)
        return F.cross_entropy(sim, target)


def two_views(rows: int, seed: int) -> Batch:
    """Return two views of images."""
    x = pictures(rows, seed)["x"]
    return {"x": x, "other": x + 0.1 * torch.randn(x.shape, generator=generator(seed + 50))}


class BYOL(nn.Module):
    """BYOL: a target network by moving averages, updated at the start of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.predictor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters()):
                    q.data.mul_(0.9).add_(p.data, alpha=0.1)
        p1, p2 = self.predictor(self.online(x)), self.predictor(self.online(other))
        with torch.no_grad():
            t1, t2 = self.target(x), self.target(other)
        loss = 4 - 2 * F.cosine_similarity(p1, t2, dim=-1) - 2 * F.cosine_similarity(p2, t1, dim=-1)
        return loss.mean()


class Siren(nn.Module):
    """SIREN: sines, with its own initial values."""

    def __init__(self, omega: float) -> None:
        super().__init__()
        self.omega, self.linear = omega, nn.Linear(16, 16)
        with torch.no_grad():
            self.linear.weight.uniform_(-0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * self.linear(x))


class NeRF(nn.Module):
    """NeRF: encoded positions, an MLP with a skip, volume rendering along rays."""

    def __init__(self, siren: bool = False) -> None:
        super().__init__()
        wide = 3 + 3 * 2 * 2
        if siren:
            self.pts_linears = nn.ModuleList([nn.Linear(wide, 16)] + [Siren(3.0) for _ in range(3)])
        else:
            self.pts_linears = nn.ModuleList(
                [nn.Linear(wide, 16), nn.Linear(16, 16), nn.Linear(16 + wide, 16), nn.Linear(16, 16)]
            )
        self.skip = not siren
        self.sigma, self.rgb = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, origin: Tensor, direction: Tensor, color: Tensor) -> Tensor:
        z = torch.linspace(0.5, 2.0, 6, device=origin.device, dtype=origin.dtype)
        pts = origin[:, None] + direction[:, None] * z[:, None]
        enc = [pts] + [f(pts * 2**k) for k in range(2) for f in (torch.sin, torch.cos)]
        inputs = h = torch.cat(enc, -1)
        for i, layer in enumerate(self.pts_linears):
            if self.skip and i == 2:
                h = torch.cat([inputs, h], -1)
            h = F.relu(layer(h)) if isinstance(layer, nn.Linear) else layer(h)
        sigma, rgb = F.softplus(self.sigma(h))[..., 0], torch.sigmoid(self.rgb(h))
        alpha = 1.0 - torch.exp(-sigma * 0.3)
        ones = torch.ones((alpha.shape[0], 1), device=alpha.device, dtype=alpha.dtype)
        T = torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        return F.mse_loss(((alpha * T)[..., None] * rgb).sum(-2), color)


def rays(rows: int, seed: int) -> Batch:
    """Return rays with their colors."""
    g = generator(seed)
    return {
        "origin": torch.randn(rows, 3, generator=g),
        "direction": F.normalize(torch.randn(rows, 3, generator=g), dim=-1),
        "color": torch.rand(rows, 3, generator=g),
    }


class PointNet(nn.Module):
    """PointNet: a shared MLP by 1 x 1 convolutions, a learned transform, a maximum over points."""

    def __init__(self, norm: Any = nn.Identity) -> None:
        super().__init__()
        self.tnet = nn.Sequential(nn.Conv1d(3, 16, 1), norm(16), nn.ReLU())
        self.fc_t = nn.Linear(16, 9)
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 5)

    def forward(self, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = points.transpose(2, 1)
        t = torch.max(self.tnet(x), 2, keepdim=True)[0].view(-1, 16)
        iden = torch.eye(3, dtype=x.dtype, device=x.device).view(1, 9).repeat(x.size(0), 1)
        trans = (self.fc_t(t) + iden).view(-1, 3, 3)
        x = torch.bmm(points, trans).transpose(2, 1)
        x = torch.max(self.conv2(F.relu(self.conv1(x))), 2)[0]
        logits = F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)
        d = torch.eye(3, dtype=x.dtype, device=x.device)[None]
        reg = torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - d, dim=(1, 2)).mean()
        return F.nll_loss(logits, labels) + 0.001 * reg, logits


def clouds(rows: int, seed: int) -> Batch:
    """Return clouds of points with labels."""
    g = generator(seed)
    return {
        "points": torch.randn(rows, 10, 3, generator=g),
        "labels": torch.randint(0, 5, (rows,), generator=g),
    }


def blocks(*modules: nn.Module) -> nn.Module:
    """Return modules in a row."""
    return nn.Sequential(*modules)


def first(output: Any, batch: Any) -> Tensor:
    """Return the first output, the loss."""
    loss: Tensor = output[0]
    return loss


MODELS: dict[str, Written] = {
    "dit": Written(DiT, noised),
    "ddpm": Written(lambda: UNet(False), noised),
    "sdxl": Written(lambda: UNet(True), noised),
    "vqvae": Written(lambda: VQVAE(False), pictures, loss=first),
    "vqvae_ema": Written(lambda: VQVAE(True), pictures, loss=first),
    "mae": Written(MAE, masked),
    "mixer": Written(lambda: Classifier(Patches(16), blocks(MixerBlock(), MixerBlock()), 16, False), images, loss=first),
    "convnext": Written(lambda: Classifier(nn.Conv2d(3, 8, 2, 2), blocks(ConvNeXtBlock(), ConvNeXtBlock()), 8, True), images, loss=first),
    "swin": Written(lambda: Classifier(Patches(16, flat=False), blocks(SwinBlock(0), SwinBlock(1)), 16, False), images, loss=first),
    "efficientnet": Written(lambda: Classifier(nn.Conv2d(3, 8, 3, 2, 1), blocks(MBConv(nn.BatchNorm2d), MBConv(nn.BatchNorm2d)), 8, True), images, loss=first),
    "efficientnet_gn": Written(lambda: Classifier(nn.Conv2d(3, 8, 3, 2, 1), blocks(MBConv(group_norm), MBConv(group_norm)), 8, True), images, loss=first),
    "resnet": Written(lambda: resnet(nn.BatchNorm2d), images, loss=first),
    "resnet_gn": Written(lambda: resnet(group_norm), images, loss=first),
    "detr": Written(DETR, boxed),
    "capsules": Written(Capsules, images, loss=first),
    "gan": Written(GAN, with_z),
    "vae": Written(VAE, with_z, loss=first),
    "flow": Written(Flow, vectors),
    "clip": Written(CLIP, captioned),
    "siglip": Written(lambda: CLIP(True), captioned),
    "simclr": Written(lambda: SimCLR(False), two_views),
    "simclr_joined": Written(lambda: SimCLR(True), two_views),
    "byol": Written(BYOL, two_views),
    "nerf": Written(NeRF, rays),
    "siren": Written(lambda: NeRF(True), rays),
    "pointnet": Written(PointNet, clouds, loss=first),
}
