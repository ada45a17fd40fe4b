"""Programs by hand in the styles of papers: scans, latent attention, skips, policies; all kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import (
    CopyToSplit,
    ReduceFromSplit,
    average_grads,
    gather_all,
    local_part,
    rank_sum,
    shard_param,
    world_size,
)
from tests.judging.net import VOCAB, batch, batch_part, loss, loss_share

WIDTH = 8


def numbers(seed: int) -> dict[str, Tensor]:
    """Return a batch of rows of floats, and targets of the same shape."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, WIDTH, generator=draw) for name in ("x", "y")}


def squared(output: Any, batch: Any) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(output, batch["y"])


# ---- A scan whose state goes from rank to rank: each has some of the tokens.


class Scan(nn.Module):
    """A gated sum over the tokens before each token."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        return self.run(ids, torch.zeros(len(ids), WIDTH))[0]

    def run(self, ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the state after the tokens."""
        x = self.emb(ids)
        gates, values, states = torch.sigmoid(self.gate(x)), self.value(x), []
        for token in range(ids.shape[1]):
            state = gates[:, token] * state + values[:, token]
            states.append(state)
        return self.head(torch.stack(states, 1).tanh()), state


class FromBefore(torch.autograd.Function):
    """Receive the state of the rank before; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, sends: bool) -> Tensor:
        """Return zeros on the first rank."""
        ctx.sends, state = sends, start.detach().clone()
        if dist.get_rank() > 0:
            dist.recv(state, dist.get_rank() - 1)
        return state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Send the gradient, or wrongly zeros."""
        if dist.get_rank() > 0:
            dist.send(grad.contiguous() if ctx.sends else torch.zeros_like(grad), 0)
        return grad, None


class ToNext(torch.autograd.Function):
    """Send the state to the next rank; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        """Return a zero, to be added to the loss."""
        if dist.get_rank() + 1 < world_size():
            dist.send(state.detach().contiguous(), dist.get_rank() + 1)
        ctx.shape = state.shape
        return state.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return what the next rank sends."""
        state = grad.new_zeros(ctx.shape)
        if dist.get_rank() + 1 < world_size():
            dist.recv(state, dist.get_rank() + 1)
        return state


def scanning(mistake: str) -> Any:
    """Return a program whose ranks have consecutive tokens."""

    def program(model: Any) -> TrainingProgram:
        def step(whole: Any) -> Tensor:
            part = {name: local_part(value, 1) for name, value in whole.items()}
            start = torch.zeros(len(part["ids"]), WIDTH, requires_grad=True)
            state = FromBefore.apply(start, mistake != "no gradient")
            output, last = model.run(part["ids"], state)
            value = loss_share(output, part, whole) + ToNext.apply(last)
            value.backward()
            for p in model.parameters():
                p.grad = rank_sum(p.grad)
            return value

        return TrainingProgram(model, step, world_loss="sum")

    return program


# ---- Latent attention: ranks have some of the heads, and all of the latents.


class Latent(nn.Module):
    """Attention whose keys and values come from a small latent."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.query, self.down = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 5))
        self.norm, self.up = nn.LayerNorm(5), nn.Linear(5, 2 * WIDTH, bias=False)
        self.out, self.enter, self.leave = nn.Linear(WIDTH, WIDTH, bias=False), *2 * [nn.Identity()]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        x = self.emb(ids)
        query = self.query(self.enter(x)).unflatten(-1, (-1, 2)).transpose(1, 2)
        both = self.up(self.enter(self.norm(self.down(x)))).unflatten(-1, (-1, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, *both.chunk(2, -1), is_causal=True)
        return self.head(x + self.leave(self.out(mixed.transpose(1, 2).flatten(2))))


def latent(mistake: str) -> Any:
    """Return a program that shards heads."""

    class Enter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            copies = mistake != "no copy" or x.shape[-1] == WIDTH
            return CopyToSplit.apply(x) if copies else x  # type: ignore[no-any-return]

    class Leave(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ReduceFromSplit.apply(x)  # type: ignore[no-any-return]

    def program(model: Any) -> TrainingProgram:
        model.enter, model.leave = Enter(), Leave()
        for layer, dim in ((model.query, 0), (model.up, 0), (model.out, 1)):
            shard_param(layer, "weight", dim)

        def step(whole: Any) -> Tensor:
            value = loss(model(whole["ids"]), whole)
            value.backward()
            if mistake == "norm summed":
                for p in model.norm.parameters():
                    p.grad = rank_sum(p.grad)
            return value

        return TrainingProgram(model, step, world_loss="same")

    return program


# ---- Stages with a skip between: the first rank has both ends, in two microbatches.


class Skip(nn.Module):
    """Layers with a skip from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = (nn.Linear(WIDTH * n, WIDTH) for n in (1, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        high = self.down(x).tanh()
        return self.up(torch.cat([self.low(high).tanh(), high], -1))


def skipping(mistake: str) -> Any:
    """Return a program with two stages."""

    def program(model: Any) -> TrainingProgram:
        ends = nn.ModuleDict({"down": model.down, "up": model.up})
        middle = nn.ModuleDict({"low": model.low})

        def first(part: Any) -> Tensor:
            high = model.down(part["x"]).tanh()
            dist.send(high.detach(), 1)
            low, grad = torch.empty_like(high), torch.empty_like(high)
            dist.recv(low, 1)
            skipped = high.detach() if mistake == "detached" else high
            output = model.up(torch.cat([low.requires_grad_(), skipped], -1))
            value = squared(output, part) / (1 if mistake == "sum" else 2)
            value.backward(retain_graph=True)
            dist.send(low.grad, 1)
            dist.recv(grad, 1)
            high.backward(grad)
            return value.detach()

        def second(part: Any) -> None:
            high, grad = torch.empty_like(part["x"]), torch.empty_like(part["x"])
            dist.recv(high, 0)
            low = model.low(high.requires_grad_()).tanh()
            dist.send(low.detach(), 0)
            dist.recv(grad, 0)
            low.backward(grad)
            dist.send(high.grad, 0)

        def step(whole: Any) -> Any:
            parts = [batch_part(whole, k, 2) for k in range(2)]
            values = [second(p) if dist.get_rank() else first(p) for p in parts]
            return None if dist.get_rank() else torch.stack(values).sum()

        return TrainingProgram(middle if dist.get_rank() else ends, step)

    return program


# ---- A policy: rewards of a group of rows are compared, and ranks have rows of every group.


class Policy(nn.Module):
    """Logits of tokens, from all tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.emb(ids).cumsum(1).tanh())


def answers(seed: int) -> dict[str, Tensor]:
    """Return tokens, rewards, and which tokens count; in the first batch equally many of a row."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (8, 1), generator=draw) if seed else torch.full((8, 1), 4)
    return {
        "ids": torch.randint(VOCAB, (8, 6), generator=draw),
        "counts": (torch.arange(6) < lengths).double(),
        "reward": torch.randn(8, generator=draw),
    }


def advantages(reward: Tensor) -> Tensor:
    """Return rewards relative to the mean of their group of four rows."""
    groups = reward.view(-1, 4)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def policy_loss(output: Tensor, batch: Any, gain: Any = None, total: Any = None) -> Tensor:
    """Return the mean of weighted log-likelihoods over tokens that count."""
    gain = advantages(batch["reward"]) if gain is None else gain
    logs = output.log_softmax(-1).gather(-1, batch["ids"][..., None])[..., 0]
    sums = -(logs * gain[:, None] * batch["counts"]).sum()
    return sums / (batch["counts"].sum() if total is None else total)


def rewarded(mistake: str) -> Any:
    """Return a program with DDP whose ranks have every other row."""

    def program(model: Any) -> TrainingProgram:
        module, rank, size = DistributedDataParallel(model), dist.get_rank(), world_size()

        def step(whole: Any) -> Tensor:
            part = {name: value[rank::size] for name, value in whole.items()}
            rewards = gather_all(part["reward"]).view(size, -1)
            total = rank_sum(part["counts"].sum()) / size
            own = part["counts"].sum() if mistake == "own count" else total
            value = policy_loss(
                module(part["ids"]), part, advantages(rewards.T.flatten())[rank::size], own
            )
            value.backward()
            return value

        return TrainingProgram(module, step)

    return program


# ---- Adapters beside weights of eight bits, and counts of tokens in a buffer.


class Quantised(nn.Module):
    """A frozen weight of eight bits with its scale, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.first, self.last = (nn.Parameter(torch.randn(s)) for s in ((WIDTH, 2), (2, WIDTH)))
        self.register_buffer("seen", torch.zeros(()))

    def count(self, x: Tensor) -> Tensor:
        """Return the sum of positive inputs."""
        return x.detach().clamp(min=0).sum()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the weight and the adapter."""
        if self.training:
            self.seen.mul_(0.5).add_(self.count(x))
        return x @ self.weight.to(x.dtype) / 127 + x @ self.first @ self.last


def adapted(mistake: str) -> Any:
    """Return a program with averaged gradients."""

    def program(model: Any) -> TrainingProgram:
        own_count = model.count
        if mistake != "own count":
            model.count = lambda x: rank_sum(own_count(x))

        def step(whole: Any) -> Tensor:
            part = batch_part(whole, dist.get_rank(), world_size())
            value = squared(model(part["x"]), part)
            value.backward()
            average_grads(model)
            return value

        return TrainingProgram(model, step)

    return program


# ---- Verdicts.

PROGRAMS: dict[str, tuple[Any, ...]] = {
    "scan": (scanning, Scan, batch, loss),
    "latent": (latent, Latent, batch, loss),
    "skip": (skipping, Skip, numbers, squared),
    "policy": (rewarded, Policy, answers, policy_loss),
    "adapter": (adapted, Quantised, numbers, squared),
}
MISTAKES = {
    ("scan", "no gradient"): "the gradient of the output of `value`: ",
    ("latent", "no copy"): "3 of 9 (`norm.weight`, `norm.bias`, `down.weight`): ranks differ and",
    ("latent", "norm summed"): "2 of 9 (`norm.weight`, `norm.bias`): ranks = 2 times the right",
    ("skip", "detached"): "what `cat` outside of all modules sends back is missing",
    ("skip", "sum"): "6 of 6 (`up.bias`, `up.weight`, `low.bias`, `low.weight` and 2 more): ranks",
    ("policy", "own count"): "times the right gradient, and these should be equal: each rank",
    ("adapter", "own count"): "`seen`: ranks hold different values: what each of them counts",
}


def judge_program(pool: Pool, name: str, mistake: str = "") -> Report:
    """Return the verdict on two ranks."""
    torch.manual_seed(0)
    program, model, batches, loss_of = PROGRAMS[name]
    return verify_program(
        program(mistake), model=model(), batch=batches, loss=loss_of, ranks=2, pool=pool
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_by_hand_passes(name: str, pool: Pool) -> None:
    """A right program passes."""
    report = judge_program(pool, name)
    assert report.ok, str(report)


@pytest.mark.parametrize("name, mistake", MISTAKES)
def test_a_mistake_by_hand_is_named(name: str, mistake: str, pool: Pool) -> None:
    """A wrong program fails, and the mistake is named at its place."""
    report = judge_program(pool, name, mistake)
    said = "; ".join(text for _, text in report.localised)
    assert report.exit_code == 1 and MISTAKES[name, mistake] in said, str(report)
    assert mistake not in ("sum", "norm summed") or not any(
        head == "first module" for head, _ in report.localised
    )
