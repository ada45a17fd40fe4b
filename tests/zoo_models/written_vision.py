"""Vision models as people write them in one file, in the styles of their authors, small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo_models.written import Batch, Written, first, images, make_generator, pictures


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


def blocks(*modules: nn.Module) -> nn.Module:
    """Return modules in a row."""
    return nn.Sequential(*modules)


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
    g = make_generator(seed)
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
        u = self.squash(
            self.conv(x).view(x.size(0), 4, 4, -1).permute(0, 1, 3, 2).reshape(x.size(0), -1, 4)
        )
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
    g = make_generator(seed)
    return {
        "points": torch.randn(rows, 10, 3, generator=g),
        "labels": torch.randint(0, 5, (rows,), generator=g),
    }


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
        self.decoder_blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True)]
        )
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
    return {**pictures(rows, seed), "noise": torch.rand(rows, 16, generator=make_generator(seed))}


MODELS: dict[str, Written] = {
    "mae": Written(MAE, masked),
    "mixer": Written(
        lambda: Classifier(Patches(16), blocks(MixerBlock(), MixerBlock()), 16, False),
        images,
        loss=first,
    ),
    "convnext": Written(
        lambda: Classifier(
            nn.Conv2d(3, 8, 2, 2), blocks(ConvNeXtBlock(), ConvNeXtBlock()), 8, True
        ),
        images,
        loss=first,
    ),
    "swin": Written(
        lambda: Classifier(Patches(16, flat=False), blocks(SwinBlock(0), SwinBlock(1)), 16, False),
        images,
        loss=first,
    ),
    "efficientnet": Written(
        lambda: Classifier(
            nn.Conv2d(3, 8, 3, 2, 1),
            blocks(MBConv(nn.BatchNorm2d), MBConv(nn.BatchNorm2d)),
            8,
            True,
        ),
        images,
        loss=first,
    ),
    "efficientnet_gn": Written(
        lambda: Classifier(
            nn.Conv2d(3, 8, 3, 2, 1), blocks(MBConv(group_norm), MBConv(group_norm)), 8, True
        ),
        images,
        loss=first,
    ),
    "resnet": Written(lambda: resnet(nn.BatchNorm2d), images, loss=first),
    "resnet_gn": Written(lambda: resnet(group_norm), images, loss=first),
    "detr": Written(DETR, boxed),
    "capsules": Written(Capsules, images, loss=first),
    "pointnet": Written(PointNet, clouds, loss=first),
}
