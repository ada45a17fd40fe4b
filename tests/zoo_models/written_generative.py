"""Generative models as people write them in one file: diffusion, codes, flows, two players."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_models.written import Batch, Written, first, images, make_generator, pictures
from tests.zoo_models.written_vision import Mlp, ViTAttention


def noised(rows: int, seed: int) -> Batch:
    """Return images, noise, times and labels for a diffusion model."""
    g = make_generator(seed)
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


class GAN(nn.Module):
    """Generator and discriminator in one module; both losses in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(
            nn.Linear(8, 64),
            nn.ReLU(),
            nn.Unflatten(1, (4, 4, 4)),
            nn.ConvTranspose2d(4, 8, 4, 2, 1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 3, 3, padding=1),
            nn.Tanh(),
        )
        self.D = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128, 1),
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
    return {**pictures(rows, seed), "z": torch.randn(rows, 8, generator=make_generator(seed))}


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
        self.mix = nn.Parameter(
            torch.linalg.qr(torch.randn(8, 8))[0]
            if torch.empty(0).device.type != "meta"
            else torch.empty(8, 8)
        )
        self.couplings = nn.ModuleList([Coupling(bool(k % 2)) for k in range(4)])
        self.register_buffer("base", torch.zeros(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        log_det = torch.slogdet(self.mix)[1].expand(x.size(0))
        x = x @ self.mix
        for coupling in self.couplings:
            x, log_det = coupling(x, log_det)
        prior = torch.distributions.Normal(
            self.base, torch.ones_like(self.base), validate_args=False
        )
        return {"loss": -(prior.log_prob(x).sum(1) + log_det).mean(), "z": x}


def vectors(rows: int, seed: int) -> Batch:
    """Return vectors of 8."""
    return {"x": torch.randn(rows, 8, generator=make_generator(seed))}


MODELS: dict[str, Written] = {
    "dit": Written(DiT, noised),
    "ddpm": Written(lambda: UNet(False), noised),
    "sdxl": Written(lambda: UNet(True), noised),
    "vqvae": Written(lambda: VQVAE(False), pictures, loss=first),
    "vqvae_ema": Written(lambda: VQVAE(True), pictures, loss=first),
    "gan": Written(GAN, with_z),
    "vae": Written(VAE, with_z, loss=first),
    "flow": Written(Flow, vectors),
}
