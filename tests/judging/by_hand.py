"""Programs with hand-written tensor, sequence and pipeline parallelism; right and wrong ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.net import HEADS, WIDTH, loss_share


class CopyToSplit(torch.autograd.Function):
    """Enter a split region: forward copies, backward all-reduces."""

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


class ReduceFromSplit(torch.autograd.Function):
    """Leave a split region: forward all-reduces, backward copies."""

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


class ScatterTokens(torch.autograd.Function):
    """Take this rank's tokens; backward gathers the tokens of all ranks."""

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


class GatherTokens(torch.autograd.Function):
    """Gather the tokens of all ranks; backward keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All parts."""
        return ScatterTokens.backward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """This rank's part."""
        return ScatterTokens.forward(ctx, grad)


class SplitBlock(nn.Module):
    """One block: fused qkv of this rank's heads, its part of the MLP, norms on its tokens."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        rank_heads = HEADS // size

        def rows(weight: Tensor) -> Tensor:
            return weight.detach().chunk(size)[rank]

        attention = block.attention
        heads = [
            torch.stack(
                [rows(p.weight).unflatten(0, (rank_heads, -1)) for p in attention.three], 1
            ),
            torch.stack([rows(p.bias).unflatten(0, (rank_heads, -1)) for p in attention.three], 1),
        ]  # for each head its q, its k and its v
        self.qkv = nn.Parameter(heads[0].flatten(0, 2))
        self.qkv_bias = nn.Parameter(heads[1].flatten())
        self.o = nn.Parameter(attention.o.weight.detach().chunk(size, 1)[rank].clone())
        self.o_bias = nn.Parameter(attention.o.bias.detach().clone())
        self.up = nn.Parameter(rows(block.up.weight).T.contiguous())  # transposed, as some do
        self.up_bias = nn.Parameter(rows(block.up.bias).clone())
        self.down = nn.Parameter(block.down.weight.detach().chunk(size, 1)[rank].clone())
        self.down_bias = nn.Parameter(block.down.bias.detach().clone())
        self.n1, self.n2, self.drop = block.n1, block.n2, block.drop

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on all tokens; norms see this rank's tokens."""
        h = GatherTokens.apply(self.n1(ScatterTokens.apply(x)))
        qkv = F.linear(CopyToSplit.apply(h), self.qkv, self.qkv_bias)
        q, k, v = qkv.unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + ReduceFromSplit.apply(F.linear(mixed, self.o)) + self.o_bias
        h = CopyToSplit.apply(GatherTokens.apply(self.n2(ScatterTokens.apply(x))))
        h = F.gelu(h @ self.up + self.up_bias)
        return x + self.drop(ReduceFromSplit.apply(F.linear(h, self.down)) + self.down_bias)


class SplitNet(nn.Module):
    """Split blocks, and an embedding padded to a number of rows that ranks divide."""

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
    """Tensor and sequence parallel by hand; gradients of norms are all-reduced."""
    net = SplitNet(model)

    def step(batch: Any) -> Any:
        output = net(batch["ids"])
        value = loss_share(output, batch, batch)
        value.backward()
        for layer in net.layers:
            for p in (*layer.n1.parameters(), *layer.n2.parameters()):
                if reduced:
                    dist.all_reduce(p.grad)
        return value, output

    return TrainingProgram(net, step, world_loss="same")


def norms_unreduced(model: nn.Module) -> TrainingProgram:
    """Wrong: gradients of norms are not reduced over the parts of tokens."""
    return megatron(model, reduced=False)


def grad_doubled(model: nn.Module) -> TrainingProgram:
    """Wrong: the gradient of one weight's part on rank 0 is doubled."""
    right_program = megatron(model)

    def step(batch: Any) -> Any:
        result = right_program.step(batch)
        if dist.get_rank() == 0:
            right_program.module.layers[0].down.grad.mul_(2)
        return result

    return TrainingProgram(right_program.module, step, world_loss="same")


def one_rank_off(model: nn.Module) -> TrainingProgram:
    """Wrong: after the all-reduce, rank 1 scales its gradient of a replicated bias."""
    right_program = megatron(model)

    def step(batch: Any) -> Any:
        result = right_program.step(batch)
        if dist.get_rank() == 1:
            right_program.module.norm.bias.grad.mul_(0.5)
        return result

    return TrainingProgram(right_program.module, step, world_loss="same")


class FirstStage(nn.Module):
    """The first stage."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.emb, self.block = net.emb, net.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to hidden states."""
        return self.block(self.emb(x))


class LastStage(nn.Module):
    """The last stage."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.block, self.norm, self.head = net.blocks[1], net.norm, net.head

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states to logits."""
        return self.head(self.norm(self.block(x))) * 0.5


def gpipe(model: nn.Module, tied: bool = False) -> TrainingProgram:
    """Two stages, two microbatches, by send and recv; gradients of a tied weight are summed."""
    rank = dist.get_rank()
    stage = FirstStage(model) if rank == 0 else LastStage(model)
    shape = (4, 6, WIDTH)

    def step(batch: Any) -> Any:
        parts = [{k: v.chunk(2)[n] for k, v in batch.items()} for n in range(2)]
        total, saved = None, []
        for micro in parts:
            if rank == 0:
                saved.append(stage(micro["ids"]))
                dist.send(saved[-1].detach(), 1)
            else:
                hidden = torch.empty(shape, dtype=torch.float64)
                dist.recv(hidden, 0)
                value = loss_share(stage(hidden.requires_grad_()), micro, batch)
                saved.append((hidden, value))
                total = value.detach() if total is None else total + value.detach()
        for micro in saved:
            if rank == 0:
                grad = torch.empty(shape, dtype=torch.float64)
                dist.recv(grad, 1)
                micro.backward(grad)
            else:
                micro[1].backward()
                dist.send(micro[0].grad, 0)
        if tied:
            dist.all_reduce((stage.emb if rank == 0 else stage.head).weight.grad)
        return total

    return TrainingProgram(stage, step)


def gpipe_tied(model: nn.Module) -> TrainingProgram:
    """A pipeline with a tied weight on both stages, whose gradients are summed."""
    return gpipe(model, tied=True)


def torch_pipeline(model: nn.Module) -> TrainingProgram:
    """Two stages by torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    stage = FirstStage(model) if rank == 0 else LastStage(model)
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


def trains_frozen(model: nn.Module) -> TrainingProgram:
    """Wrong: parameters are created anew, and a frozen one trains."""
    net = SplitNet(model)
    net.norm.weight.requires_grad_(True)
    right_program = megatron(model)
    return TrainingProgram(right_program.module, right_program.step, world_loss="same")


def untied(model: nn.Module) -> TrainingProgram:
    """Wrong: a tied weight becomes two separate weights."""
    model.head.weight = nn.Parameter(model.emb.weight.detach().clone())

    def step(batch: Any) -> Any:
        value = loss_share(model(batch["ids"]), batch, batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same")


def renamed(model: nn.Module) -> TrainingProgram:
    """Wrong: rows of an embedding under another name, with changed values."""
    from torch.distributed.tensor import Shard

    rank, size = dist.get_rank(), dist.get_world_size()
    table = nn.Parameter(model.emb.weight.detach().chunk(size)[rank] * 1.5)
    remainder = model
    del remainder.emb
    holder = nn.Module()
    holder.table, holder.rest = table, remainder

    def step(batch: Any) -> Any:
        parts = [torch.empty_like(table) for _ in range(size)]
        dist.all_gather(parts, table.detach())
        parts[rank] = table
        x = F.embedding(batch["ids"], torch.cat(parts))
        for block in remainder.blocks:
            x = block(x)
        value = loss_share(remainder.head(remainder.norm(x)) * remainder.scale, batch, batch)
        value.backward()
        return value

    return TrainingProgram(
        holder,
        step,
        world_loss="same",
        names=lambda name: "emb.weight" if name == "table" else name.removeprefix("rest."),
        layouts={"table": Shard(0)},
    )
