"""Programs by hand: plain parts of tensors, sequence parallel norms, a pipeline of two stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.net import HEADS, WIDTH, share


class Spread(torch.autograd.Function):
    """Go into a split region: backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same on all ranks."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The sum."""
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """Come out of a split region: forward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The same on all ranks."""
        return grad.clone()


class Own(torch.autograd.Function):
    """Take this rank's tokens; backward gathers those of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """This rank's part of dim 1."""
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """All parts."""
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, 1)


class Gathered(torch.autograd.Function):
    """Give the tokens of all ranks; backward keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All parts."""
        return Own.backward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """This rank's part."""
        return Own.forward(ctx, grad)


class SplitBlock(nn.Module):
    """One block: a fused qkv of this rank's heads, a part of the MLP, norms on a part of tokens."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        each = HEADS // size

        def rows(weight: Tensor) -> Tensor:
            return weight.detach().chunk(size)[rank]

        a = block.attention
        heads = [
            torch.stack([rows(p.weight).unflatten(0, (each, -1)) for p in a.three], 1),
            torch.stack([rows(p.bias).unflatten(0, (each, -1)) for p in a.three], 1),
        ]  # head by head its q, its k and its v
        self.qkv = nn.Parameter(heads[0].flatten(0, 2))
        self.qkv_bias = nn.Parameter(heads[1].flatten())
        self.o = nn.Parameter(a.o.weight.detach().chunk(size, 1)[rank].clone())
        self.o_bias = nn.Parameter(a.o.bias.detach().clone())
        self.up = nn.Parameter(rows(block.up.weight).T.contiguous())  # transposed, as some keep it
        self.up_bias = nn.Parameter(rows(block.up.bias).clone())
        self.down = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())
        self.down_bias = nn.Parameter(block.down.bias.detach().clone())
        self.n1, self.n2, self.drop = block.n1, block.n2, block.drop

    def forward(self, x: Tensor) -> Tensor:
        """One layer, on all tokens; norms see those of this rank."""
        h = Gathered.apply(self.n1(Own.apply(x)))
        qkv = F.linear(Spread.apply(h), self.qkv, self.qkv_bias)
        q, k, v = qkv.unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + Summed.apply(F.linear(mixed, self.o)) + self.o_bias
        h = Spread.apply(Gathered.apply(self.n2(Own.apply(x))))
        h = F.gelu(h @ self.up + self.up_bias)
        return x + self.drop(Summed.apply(F.linear(h, self.down)) + self.down_bias)


class SplitNet(nn.Module):
    """Split blocks, and an embedding whose rows are padded to what ranks divide."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(F.pad(net.emb.weight.detach(), (0, 0, 0, 2)))
        self.layers = nn.ModuleList(SplitBlock(block) for block in net.blocks)
        self.norm, self.last = net.norm, net.head

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = F.embedding(ids, self.table)
        for layer in self.layers:
            x = layer(x)
        return self.last(self.norm(x)) * 0.5


def megatron(model: nn.Module, reduced: bool = True) -> TrainingProgram:
    """Tensor and sequence parallel by hand; norms of parts of tokens have partial gradients."""
    net = SplitNet(model)

    def step(batch: Any) -> Any:
        output = net(batch["ids"])
        value = share(output, batch, batch)
        value.backward()
        for layer in net.layers:
            for p in (*layer.n1.parameters(), *layer.n2.parameters()):
                if reduced:
                    dist.all_reduce(p.grad)
        return value, output

    return TrainingProgram(net, step, world_loss="same")


def unreduced(model: nn.Module) -> TrainingProgram:
    """Wrong: the norms' gradients are those of a part of tokens."""
    return megatron(model, reduced=False)


def cut_straight(model: nn.Module) -> TrainingProgram:
    """Wrong: the first rank's part of one weight is doubled in backward."""
    whole = megatron(model)

    def step(batch: Any) -> Any:
        found = whole.step(batch)
        if dist.get_rank() == 0:
            whole.module.layers[0].down.grad.mul_(2)
        return found

    return TrainingProgram(whole.module, step, world_loss="same")


def one_rank_off(model: nn.Module) -> TrainingProgram:
    """Wrong: after the sum, one rank's gradient of a replicated bias is scaled."""
    whole = megatron(model)

    def step(batch: Any) -> Any:
        found = whole.step(batch)
        if dist.get_rank() == 1:
            whole.module.norm.bias.grad.mul_(0.5)
        return found

    return TrainingProgram(whole.module, step, world_loss="same")


class First(nn.Module):
    """The first stage."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.emb, self.block = net.emb, net.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        """From tokens to hidden states."""
        return self.block(self.emb(x))


class Last(nn.Module):
    """The last stage."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.block, self.norm, self.head = net.blocks[1], net.norm, net.head

    def forward(self, x: Tensor) -> Tensor:
        """From hidden states to logits."""
        return self.head(self.norm(self.block(x))) * 0.5


def gpipe(model: nn.Module, tied: bool = False) -> TrainingProgram:
    """Two stages, two microbatches, by sends and receives; a tied weight is summed over both."""
    rank = dist.get_rank()
    stage = First(model) if rank == 0 else Last(model)
    shape = (4, 6, WIDTH)

    def step(batch: Any) -> Any:
        parts = [{k: v.chunk(2)[n] for k, v in batch.items()} for n in range(2)]
        total, kept = None, []
        for one in parts:
            if rank == 0:
                kept.append(stage(one["ids"]))
                dist.send(kept[-1].detach(), 1)
            else:
                given = torch.empty(shape, dtype=torch.float64)
                dist.recv(given, 0)
                value = share(stage(given.requires_grad_()), one, batch)
                kept.append((given, value))
                total = value.detach() if total is None else total + value.detach()
        for one in kept:
            if rank == 0:
                grad = torch.empty(shape, dtype=torch.float64)
                dist.recv(grad, 1)
                one.backward(grad)
            else:
                one[1].backward()
                dist.send(one[0].grad, 0)
        if tied:
            dist.all_reduce((stage.emb if rank == 0 else stage.head).weight.grad)
        return total

    return TrainingProgram(stage, step)


def gpipe_tied(model: nn.Module) -> TrainingProgram:
    """A tied weight on both stages, whose gradients are summed."""
    return gpipe(model, tied=True)


def pipelining(model: nn.Module) -> TrainingProgram:
    """Two stages by torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    stage = First(model) if rank == 0 else Last(model)
    device = torch.device("cpu")

    def step(batch: Any) -> Any:
        counted = (batch["labels"] != -100).sum()

        def value(output: Tensor, labels: Tensor) -> Tensor:
            flat = output.flatten(0, 1), labels.flatten()
            return F.cross_entropy(*flat, reduction="sum") / counted

        line = PipelineStage(stage, rank, 2, device)
        order = ScheduleGPipe(line, 2, loss_fn=value, scale_grads=False)
        losses: list[Tensor] = []
        if rank == 0:
            order.step(batch["ids"])
            return None
        order.step(target=batch["labels"], losses=losses)
        return torch.stack(losses).sum()

    return TrainingProgram(stage, step)


def frozen_trained(model: nn.Module) -> TrainingProgram:
    """Wrong: parameters are made anew, and a frozen one trains."""
    net = SplitNet(model)
    net.norm.weight.requires_grad_(True)
    whole = megatron(model)
    return TrainingProgram(whole.module, whole.step, world_loss="same")


def untied(model: nn.Module) -> TrainingProgram:
    """Wrong: a tied weight becomes two on one rank."""
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())

    def step(batch: Any) -> Any:
        value = share(model(batch["ids"]), batch, batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


def renamed(model: nn.Module) -> TrainingProgram:
    """Wrong: rows of an embedding under another name, with other values than it was given."""
    from torch.distributed.tensor import Shard

    rank, size = dist.get_rank(), dist.get_world_size()
    table = nn.Parameter(model.emb.weight.detach().chunk(size)[rank] * 1.5)
    rest = model
    del rest.emb
    holder = nn.Module()
    holder.table, holder.rest = table, rest

    def step(batch: Any) -> Any:
        parts = [torch.empty_like(table) for _ in range(size)]
        dist.all_gather(parts, table.detach())
        parts[rank] = table
        x = F.embedding(batch["ids"], torch.cat(parts))
        for block in rest.blocks:
            x = block(x)
        value = share(rest.head(rest.norm(x)) * rest.scale, batch, batch)
        value.backward()
        return value

    return TrainingProgram(
        holder,
        step,
        world_loss="same",
        names=lambda name: "emb.weight" if name == "table" else name.removeprefix("rest."),
        layouts={"table": Shard(0)},
    )
