"""Graphs, molecules, proteins and recommenders as people write them in one file."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_models.written import Batch, Written, first, make_generator
from tests.zoo_models.written_contrastive import clicks

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
        return x + torch.zeros_like(x).index_add_(
            1, dst, x[:, src] * (deg[src] * deg[dst])[:, None]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.propagate(self.lin1(x)))
        h = self.propagate(self.lin2(h))
        return F.mse_loss(self.out(h.mean(1))[:, 0], y)


class GAT(nn.Module):
    """GAT: scores of edges, softmax over neighbours by scatter_reduce and scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 16, bias=False)
        self.att_src, self.att_dst = (
            nn.Parameter(torch.randn(1, 1, 4, 4) / 2),
            nn.Parameter(torch.randn(1, 1, 4, 4) / 2),
        )
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
        out = torch.zeros_like(h).scatter_add_(
            1, dst[None, :, None, None].expand_as(messages), messages
        )
        return F.mse_loss(self.out(F.elu(out.flatten(2)).mean(1))[:, 0], y)


def graphs(rows: int, seed: int) -> Batch:
    """Return graphs with a number for each."""
    g = make_generator(seed)
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
        if not self.forces:
            return F.mse_loss(self.energies(z, pos), energy)
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            e = self.energies(z, pos)
            (grad,) = torch.autograd.grad(e.sum(), pos, create_graph=True)
        return F.mse_loss(e, energy) + F.mse_loss(-grad, force)

    def energies(self, z: Tensor, pos: Tensor) -> Tensor:
        """Return an energy for each molecule."""
        gap = pos[:, :, None] - pos[:, None]
        d = (gap.pow(2).sum(-1) + 1e-3).sqrt()
        rbf = torch.exp(-2 * (d[..., None] - self.centers) ** 2)
        cut = 0.5 * (torch.cos(d * math.pi / 5) + 1) * (d < 5)
        h = self.embedding(z)
        for _ in range(2):
            h = h + self.f2out((self.filter(rbf) * cut[..., None] * self.in2f(h)[:, None]).sum(2))
        return self.energy(h).sum((1, 2))


def molecules(rows: int, seed: int) -> Batch:
    """Return molecules with energies and forces."""
    g = make_generator(seed)
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
        logits = (
            torch.einsum("bsihc,bsjhc->bshij", q, k) * 0.5
            + self.bias(pair).permute(0, 3, 1, 2)[:, None]
        )
        out = torch.einsum("bshij,bsjhc->bsihc", logits.softmax(-1), v).flatten(-2)
        m = m + self.o(torch.sigmoid(self.gate(x)) * out)
        outer = torch.einsum("bsic,bsjd->bijcd", self.a(m), self.b(m)).flatten(-2) / m.shape[1]
        z = z + self.outer(outer)
        left, lg = self.left(z).chunk(2, -1)
        right, rg = self.right(z).chunk(2, -1)
        tri = torch.einsum("bikc,bjkc->bijc", left * lg.sigmoid(), right * rg.sigmoid())
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
    g = make_generator(seed)
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
        ids = sparse.clamp(max=9)[:, :, 0] + self.offsets
        e = self.table(ids)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        history = self.table(sparse[:, 2])
        target = e[:, 2:3].expand_as(history)
        score = self.attend(torch.cat([target, history, target - history, target * history], -1))
        pooled = (score.transpose(1, 2) @ history).squeeze(1)
        deep = self.mlp(torch.cat([e.flatten(1), pooled, dense], 1))
        logit = self.bias + self.linear(ids).sum(1) + fm + deep
        return F.binary_cross_entropy(torch.sigmoid(logit.squeeze(1)), click)


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


MODELS: dict[str, Written] = {
    "gcn": Written(GCN, graphs),
    "gat": Written(GAT, graphs),
    "schnet": Written(lambda: SchNet(False), molecules),
    "schnet_forces": Written(lambda: SchNet(True), molecules),
    "evoformer": Written(Fold, alignments, loss=first),
    "dlrm": Written(DLRM, clicks),
    "deepfm": Written(DeepFM, clicks),
    "ode": Written(NeuralODE, graphs),
}
