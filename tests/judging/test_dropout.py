"""Programs with dropout: ranks apply their parts of the original's masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge.tensor_search import FullTensor, find_elements
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging import by_hand, net, wrapped
from tests.judging.catches.collectives import (
    CopyToSplit,
    GatherFromSplit,
    ReduceFromSplit,
    ScatterToSplit,
    shard_param,
)
from tests.judging.catches.language_model import VOCAB, WIDTH, LanguageModel

UNKNOWN = "its part of the whole is not known"


def judge_program(
    pool: Pool, program: Any, model: nn.Module, sides: Any = net, ranks: int = 2
) -> Report:
    """The report on a program."""
    return verify_program(
        program, model=model, batch=sides.batch, loss=sides.loss, ranks=ranks, pool=pool
    )


def dropout_rows(report: Report) -> dict[str, bool]:
    """Return the modules with dropout, and whether ranks drop there."""
    return {row.name: row.ok for row in report.rows if row.kind == "dropout"}


def unknown_places(report: Report) -> list[str]:
    """Return the gaps of dropouts whose part is not known."""
    return [gap.condition for gap in report.gaps if UNKNOWN in gap.condition]


RIGHT = [
    pytest.param(wrapped.ddp, 2, id="rows"),
    pytest.param(wrapped.tp_fsdp, 4, id="rows of two of four ranks"),
    pytest.param(wrapped.vocab_parallel, 2, id="words"),
    pytest.param(by_hand.megatron, 2, id="whole, by hand"),
    pytest.param(by_hand.gpipe, 2, id="microbatches of stages under other names"),
]


@pytest.mark.parametrize("program, ranks", RIGHT)
def test_parts_are_found_however_they_are_cut(pool: Pool, program: Any, ranks: int) -> None:
    """Every dropout of the original is found in the program, with its part."""
    torch.manual_seed(0)
    depth = 2 if program is by_hand.gpipe else 1  # one block per stage
    report = judge_program(pool, program, net.Net(depth=depth), ranks=ranks)
    assert report.ok, str(report)
    names = [f"blocks.{k}.drop" for k in range(depth)]
    assert dropout_rows(report) == dict.fromkeys(names, True) and not unknown_places(report)


class SmallInputs:
    """Batches and loss of the smallest model; all rows differ."""

    @staticmethod
    def batch(seed: int) -> dict[str, Tensor]:
        """Return four rows of six tokens."""
        draw = torch.Generator().manual_seed(seed)
        return {"ids": torch.randint(VOCAB, (4, 6), generator=draw)}

    @staticmethod
    def loss(output: Tensor, batch: Any) -> Tensor:
        """Return the mean over all tokens."""
        return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def same_loss(model: nn.Module, forward: Any, **options: Any) -> TrainingProgram:
    """Return a program whose ranks all have the loss of the full batch."""

    def step(batch: Any) -> Any:
        value = SmallInputs.loss(forward(batch["ids"]), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same", **options)


class Heads(nn.Module):
    """Attention with dropout inside torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """Return the output of as many heads as the weights have."""
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all heads."""
        return self.out(self.heads(x))


def split_heads(model: Any) -> TrainingProgram:
    """Split heads over ranks."""
    inner = model.inner
    for layer in (inner.q, inner.k, inner.v):
        shard_param(layer, "weight")
        shard_param(layer, "bias")
    shard_param(inner.out, "weight", 1)

    def forward(ids: Tensor) -> Tensor:
        x = CopyToSplit.apply(model.embed(ids))
        return model.head(ReduceFromSplit.apply(inner.out(inner.heads(x))))

    return same_loss(model, forward)


def split_hidden(model: Any) -> TrainingProgram:
    """Split the hidden features of a feed-forward, with dropout on them."""
    up, _, drop, down = model.inner
    shard_param(up, "weight")
    shard_param(up, "bias")
    shard_param(down, "weight", 1)

    def forward(ids: Tensor) -> Tensor:
        x = CopyToSplit.apply(model.embed(ids))
        return model.head(ReduceFromSplit.apply(down(drop(up(x).relu()))))

    return same_loss(model, forward)


def feed_forward() -> nn.Module:
    """Return a feed-forward with dropout between its layers."""
    up, down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
    return LanguageModel(nn.Sequential(up, nn.ReLU(), nn.Dropout(0.3), down))


def tokens_first(model: Any) -> TrainingProgram:
    """Tokens before rows, as in Megatron, with half of the tokens on each rank."""
    up, act, drop, down = model.inner

    def forward(ids: Tensor) -> Tensor:
        x = ScatterToSplit.apply(model.embed(ids.T), 0)
        y = GatherFromSplit.apply(down(drop(act(up(x)))), 0)
        return model.head(y.transpose(0, 1))

    full_program = same_loss(model, forward)

    def step(batch: Any) -> Any:
        value = full_program.step(batch)
        for layer in (up, down):
            for p in layer.parameters():
                dist.all_reduce(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


def strided_rows(model: Any) -> TrainingProgram:
    """Every second row on each rank, as a sampler distributes them, in two microbatches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> Any:
        loss_sum = 0.0
        for ids in batch["ids"][rank::size].chunk(2):
            value = SmallInputs.loss(replica(ids), {"ids": ids}) / 2
            value.backward()
            loss_sum += float(value)
        return loss_sum

    return TrainingProgram(replica, step)


class Layers(nn.Module):
    """A recurrent network with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 5, num_layers=2, dropout=0.4, batch_first=True)
        self.out = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """All tokens."""
        return self.out(self.rnn(x)[0])


def sequence_parallel(model: Any) -> TrainingProgram:
    """Dropout of a DTensor, with torch's sequence parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    drop = model.inner[1]
    parallelize_module(drop, mesh, SequenceParallel())

    def forward(ids: Tensor) -> Tensor:
        y = drop(ScatterToSplit.apply(model.inner[0](model.embed(ids)), 1))
        assert isinstance(y, DTensor) and y.placements == (Shard(1),)
        return model.head(y.full_tensor())

    return same_loss(model, forward)


VARIANTS = {
    "heads of an attention": (split_heads, lambda: LanguageModel(Heads()), {"inner"}),
    "features": (split_hidden, feed_forward, {"inner.2"}),
    "words before rows": (tokens_first, feed_forward, {"inner.2"}),
    "every second row": (strided_rows, feed_forward, {"inner.2"}),
    "layers of a recurrent network": (strided_rows, lambda: LanguageModel(Layers()), {"inner.rnn"}),
    "a DTensor": (
        sequence_parallel,
        lambda: LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))),
        {"inner.1"},
    ),
}


@pytest.mark.parametrize("program, model, names", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_dropout(pool: Pool, program: Any, model: Any, names: set[str]) -> None:
    """Masks of attention, recurrent layers and DTensors equal the original's."""
    torch.manual_seed(0)
    report = judge_program(pool, program, model(), SmallInputs)
    assert report.ok, str(report)
    assert dropout_rows(report) == dict.fromkeys(names, True) and not unknown_places(report)


def no_dropout(model: Any) -> TrainingProgram:
    """Wrong: nothing is dropped."""
    up, act, _, down = model.inner
    return same_loss(model, lambda ids: model.head(down(act(up(model.embed(ids))))))


def other_rate(model: Any) -> TrainingProgram:
    """Wrong: more is dropped."""
    up, act, _, down = model.inner
    return same_loss(model, lambda ids: model.head(down(F.dropout(act(up(model.embed(ids))), 0.4))))


def unscaled(model: Any) -> TrainingProgram:
    """Wrong: kept values are not scaled up."""
    up, act, drop, down = model.inner
    return same_loss(model, lambda ids: model.head(down(0.7 * drop(act(up(model.embed(ids)))))))


@pytest.mark.parametrize("program", [no_dropout, other_rate, unscaled])
def test_dropout_that_is_wrong(pool: Pool, program: Any) -> None:
    """A wrong rate, a wrong scale and a missing dropout fail, though without dropout all is equal.

    A missing dropout is named.
    """
    torch.manual_seed(0)
    report = judge_program(pool, program, feed_forward(), SmallInputs)
    assert report.exit_code == 1
    assert dropout_rows(report) == {"inner.2": program is not no_dropout}
    if program is no_dropout:
        assert any("`inner.2`: no rank drops there" in text for _, text in report.localised)
    still = feed_forward()
    still.inner[2].p = 0.0
    if program is no_dropout:
        assert judge_program(pool, program, still, SmallInputs).ok


def rescaled(model: Any) -> TrainingProgram:
    """Dropout of scaled values, scaled back after it: no part of the original's input."""
    up, act, drop, down = model.inner
    return same_loss(model, lambda ids: model.head(down(drop(act(up(model.embed(ids))) * 2) / 2)))


def test_a_place_that_is_not_known(pool: Pool) -> None:
    """An unknown part is reported, with dropout off on both sides, unless the user gives it."""
    torch.manual_seed(0)
    report = judge_program(pool, rescaled, feed_forward(), SmallInputs)
    assert report.ok and not dropout_rows(report), str(report)
    assert unknown_places(report) == [f"dropout of `inner.2` ({UNKNOWN})"]

    def said(model: Any) -> TrainingProgram:
        from torch.distributed.tensor import Replicate

        rescaled_program = rescaled(model)
        options = {"world_loss": "same", "dropout": {"inner.2": Replicate()}}
        return TrainingProgram(rescaled_program.module, rescaled_program.step, **options)

    report = judge_program(pool, said, feed_forward(), SmallInputs)
    assert report.ok and dropout_rows(report) == {"inner.2": True} and not unknown_places(report), (
        str(report)
    )


def test_a_part_is_found_by_its_numbers() -> None:
    """Parts by blocks, strides and permuted dims are found; ambiguous or foreign values are not."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    numbers = torch.arange(x.numel()).reshape(x.shape)
    for cut in (
        lambda t: t,
        lambda t: t[2:5, :, 1:3],
        lambda t: t[1::2, 2:],
        lambda t: t[[5, 0, 3]],
        lambda t: t.transpose(0, 1)[:, 3:],
        lambda t: t.flatten(0, 1)[4:9],
    ):
        elements = find_elements(cut(x) * (1 + 1e-13), FullTensor(x))
        assert elements is not None and torch.equal(elements, cut(numbers))
    zeros = torch.where(x > 0.5, x, 0)  # most values occur many times
    assert torch.equal(find_elements(zeros[3:], FullTensor(zeros)), numbers[3:])
    repeated = torch.cat([x[:3], x[:3]])
    assert find_elements(repeated[:2], FullTensor(repeated)) is None
    assert find_elements(x[:3] + 1e-3, FullTensor(x)) is None


# ---- Dropout that the original has at another place.


class Residual(nn.Module):
    """A feed-forward with dropout before it is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + self.drop(self.down(F.gelu(self.up(x))))


MOVED = {
    "of a scaled value": (lambda m, x: x + m.drop(2 * m.down(F.gelu(m.up(x)))) / 2, True),
    "of the sum": (lambda m, x: m.drop(x + m.down(F.gelu(m.up(x)))), False),
    "before a layer with a bias": (lambda m, x: x + m.down(m.drop(F.gelu(m.up(x)))), False),
    "before the activation": (lambda m, x: x + m.down(F.gelu(m.drop(m.up(x)))), False),
    "at another rate": (lambda m, x: x + F.dropout(2 * m.down(F.gelu(m.up(x))), 0.1) / 2, False),
}


def moved(forward: Any) -> Any:
    """Return ranks with the rows of a batch, whose inner module computes `forward(module, x)`."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Tensor:
            part = net.batch_part(batch, dist.get_rank(), dist.get_world_size())
            output = model.head(forward(model.inner, model.embed(part["ids"])))
            value = SmallInputs.loss(output, part)
            value.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            return value

        return TrainingProgram(model, step)

    return program


@pytest.mark.parametrize("case", MOVED)
def test_dropout_at_another_place(pool: Pool, case: str) -> None:
    """If the place changes the effect, the program fails; if not, the masks are a gap."""
    forward, right = MOVED[case]
    torch.manual_seed(0)
    report = judge_program(pool, moved(forward), LanguageModel(Residual()), SmallInputs)
    assert unknown_places(report) and report.ok == right, str(report)
    assert right or "keep every element" in report.localised[0][1]
