"""Losses over pairs of rows, and models of rays, as people write them in one file."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_models.written import Batch, Written, make_generator, pictures
from tests.zoo_models.written_vision import Block, Patches


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
    return {
        **pictures(rows, seed),
        "text": torch.randint(0, 10, (rows, 6), generator=make_generator(seed)),
    }


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
    return {"x": x, "other": x + 0.1 * torch.randn(x.shape, generator=make_generator(seed + 50))}


class BYOL(nn.Module):
    """BYOL: a target network by moving averages, updated at the start of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8)
        )
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
                [
                    nn.Linear(wide, 16),
                    nn.Linear(16, 16),
                    nn.Linear(16 + wide, 16),
                    nn.Linear(16, 16),
                ]
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
    g = make_generator(seed)
    return {
        "origin": torch.randn(rows, 3, generator=g),
        "direction": F.normalize(torch.randn(rows, 3, generator=g), dim=-1),
        "color": torch.rand(rows, 3, generator=g),
    }


def clicks(rows: int, seed: int) -> Batch:
    """Return dense and sparse features, and clicks."""
    g = make_generator(seed)
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


MODELS: dict[str, Written] = {
    "clip": Written(CLIP, captioned),
    "siglip": Written(lambda: CLIP(True), captioned),
    "simclr": Written(lambda: SimCLR(False), two_views),
    "simclr_joined": Written(lambda: SimCLR(True), two_views),
    "byol": Written(BYOL, two_views),
    "nerf": Written(NeRF, rays),
    "siren": Written(lambda: NeRF(True), rays),
    "two_tower": Written(TwoTower, pairs),
}
