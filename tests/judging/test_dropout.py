"""Programs are judged with dropout on: ranks drop by the original's masks, each its own part."""

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
from tests.judging.catches.parts import Copied, Gathered, Summed, Taken, split
from tests.judging.catches.words import VOCAB, WIDTH, Words

UNKNOWN = "its part of the whole is not known"


def judged(pool: Pool, program: Any, model: nn.Module, sides: Any = net, ranks: int = 2) -> Report:
    """The report on a program."""
    return verify_program(
        program, model=model, batch=sides.batch, loss=sides.loss, ranks=ranks, pool=pool
    )


def drops(report: Report) -> dict[str, bool]:
    """The modules that drop, and whether ranks drop there."""
    return {row.name: row.ok for row in report.rows if row.kind == "dropout"}


def unknown(report: Report) -> list[str]:
    """What drops at no known place."""
    return [gap.condition for gap in report.gaps if UNKNOWN in gap.condition]


RIGHT = [
    pytest.param(wrapped.ddp, 2, id="rows"),
    pytest.param(wrapped.tp_fsdp, 4, id="rows of two of four ranks"),
    pytest.param(wrapped.vocabulary, 2, id="words"),
    pytest.param(by_hand.megatron, 2, id="whole, by hand"),
    pytest.param(by_hand.gpipe, 2, id="microbatches of stages under other names"),
]


@pytest.mark.parametrize("program, ranks", RIGHT)
def test_parts_are_found_however_they_are_cut(pool: Pool, program: Any, ranks: int) -> None:
    """Every dropout of the original is one of the program, and all places are known."""
    torch.manual_seed(0)
    depth = 2 if program is by_hand.gpipe else 1  # a stage has one
    report = judged(pool, program, net.Net(depth=depth), ranks=ranks)
    assert report.ok, str(report)
    names = [f"blocks.{k}.drop" for k in range(depth)]
    assert drops(report) == dict.fromkeys(names, True) and not unknown(report)


class Sides:
    """Batches and loss of the smallest model, whose rows all differ."""

    @staticmethod
    def batch(seed: int) -> dict[str, Tensor]:
        """Four rows of six words."""
        draw = torch.Generator().manual_seed(seed)
        return {"ids": torch.randint(VOCAB, (4, 6), generator=draw)}

    @staticmethod
    def loss(output: Tensor, batch: Any) -> Tensor:
        """The mean over all words."""
        return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def told(model: nn.Module, forward: Any, **options: Any) -> TrainingProgram:
    """A program whose ranks all have the loss of the whole batch."""

    def step(batch: Any) -> Any:
        value = Sides.loss(forward(batch["ids"]), batch)
        value.backward()
        return value

    return TrainingProgram(model, step, world_loss="same", **options)


class Heads(nn.Module):
    """Attention that drops inside of torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """As many heads as there are rows of weights."""
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """All heads."""
        return self.out(self.heads(x))


def split_heads(model: Any) -> TrainingProgram:
    """Half of the heads."""
    inner = model.inner
    for layer in (inner.q, inner.k, inner.v):
        split(layer, "weight")
        split(layer, "bias")
    split(inner.out, "weight", 1)

    def forward(ids: Tensor) -> Tensor:
        x = Copied.apply(model.embed(ids))
        return model.head(Summed.apply(inner.out(inner.heads(x))))

    return told(model, forward)


def split_features(model: Any) -> TrainingProgram:
    """Half of the hidden features of a feed-forward, which drops them."""
    up, _, drop, down = model.inner
    split(up, "weight")
    split(up, "bias")
    split(down, "weight", 1)

    def forward(ids: Tensor) -> Tensor:
        x = Copied.apply(model.embed(ids))
        return model.head(Summed.apply(down(drop(up(x).relu()))))

    return told(model, forward)


def feed_forward() -> nn.Module:
    """Two layers that drop between them."""
    up, down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
    return Words(nn.Sequential(up, nn.ReLU(), nn.Dropout(0.3), down))


def words_first(model: Any) -> TrainingProgram:
    """Words before rows, as Megatron has them, and half of the words on each rank."""
    up, act, drop, down = model.inner

    def forward(ids: Tensor) -> Tensor:
        x = Taken.apply(model.embed(ids.T), 0)
        y = Gathered.apply(down(drop(act(up(x)))), 0)
        return model.head(y.transpose(0, 1))

    whole = told(model, forward)

    def step(batch: Any) -> Any:
        value = whole.step(batch)
        for layer in (up, down):
            for p in layer.parameters():
                dist.all_reduce(p.grad)
        return value

    return TrainingProgram(model, step, world_loss="same")


def every_second_row(model: Any) -> TrainingProgram:
    """Rows as a sampler deals them, in two microbatches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> Any:
        found = 0.0
        for ids in batch["ids"][rank::size].chunk(2):
            value = Sides.loss(replica(ids), {"ids": ids}) / 2
            value.backward()
            found += float(value)
        return found

    return TrainingProgram(replica, step)


class Layers(nn.Module):
    """A recurrent network that drops between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 5, num_layers=2, dropout=0.4, batch_first=True)
        self.out = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """All words."""
        return self.out(self.rnn(x)[0])


def sequence(model: Any) -> TrainingProgram:
    """A dropout of torch's own sequence parallelism: of a DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    drop = model.inner[1]
    parallelize_module(drop, mesh, SequenceParallel())

    def forward(ids: Tensor) -> Tensor:
        y = drop(Taken.apply(model.inner[0](model.embed(ids)), 1))
        assert isinstance(y, DTensor) and y.placements == (Shard(1),)
        return model.head(y.full_tensor())

    return told(model, forward)


WAYS = {
    "heads of an attention": (split_heads, lambda: Words(Heads()), {"inner"}),
    "features": (split_features, feed_forward, {"inner.2"}),
    "words before rows": (words_first, feed_forward, {"inner.2"}),
    "every second row": (every_second_row, feed_forward, {"inner.2"}),
    "layers of a recurrent network": (every_second_row, lambda: Words(Layers()), {"inner.rnn"}),
    "a DTensor": (
        sequence,
        lambda: Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))),
        {"inner.1"},
    ),
}


@pytest.mark.parametrize("program, model, names", WAYS.values(), ids=WAYS)
def test_every_kind_of_dropout(pool: Pool, program: Any, model: Any, names: set[str]) -> None:
    """Masks of attention, of recurrent layers and of DTensors are those of the original."""
    torch.manual_seed(0)
    report = judged(pool, program, model(), Sides)
    assert report.ok, str(report)
    assert drops(report) == dict.fromkeys(names, True) and not unknown(report)


def forgotten(model: Any) -> TrainingProgram:
    """Wrong: nothing is dropped."""
    up, act, _, down = model.inner
    return told(model, lambda ids: model.head(down(act(up(model.embed(ids))))))


def another_rate(model: Any) -> TrainingProgram:
    """Wrong: more is dropped."""
    up, act, _, down = model.inner
    return told(model, lambda ids: model.head(down(F.dropout(act(up(model.embed(ids))), 0.4))))


def unscaled(model: Any) -> TrainingProgram:
    """Wrong: what is kept is as it was."""
    up, act, drop, down = model.inner
    return told(model, lambda ids: model.head(down(0.7 * drop(act(up(model.embed(ids)))))))


@pytest.mark.parametrize("program", [forgotten, another_rate, unscaled])
def test_dropout_that_is_wrong(pool: Pool, program: Any) -> None:
    """A rate, a scale, a dropout that is missing: each fails, though without dropout all is equal.

    What drops nowhere is named.
    """
    torch.manual_seed(0)
    report = judged(pool, program, feed_forward(), Sides)
    assert report.exit_code == 1
    assert drops(report) == {"inner.2": program is not forgotten}
    if program is forgotten:
        assert any("`inner.2`: no rank drops there" in text for _, text in report.localised)
    still = feed_forward()
    still.inner[2].p = 0.0
    if program is forgotten:
        assert judged(pool, program, still, Sides).ok


def rescaled(model: Any) -> TrainingProgram:
    """Drop what is no part of what the original drops from: it is scaled before, and back after."""
    up, act, drop, down = model.inner
    return told(model, lambda ids: model.head(down(drop(act(up(model.embed(ids))) * 2) / 2)))


def test_a_place_that_is_not_known(pool: Pool) -> None:
    """Such a module drops nothing on either side, and is named; or the user says its part."""
    torch.manual_seed(0)
    report = judged(pool, rescaled, feed_forward(), Sides)
    assert report.ok and not drops(report), str(report)
    assert unknown(report) == [f"dropout of `inner.2` ({UNKNOWN})"]

    def said(model: Any) -> TrainingProgram:
        from torch.distributed.tensor import Replicate

        made = rescaled(model)
        options = {"world_loss": "same", "dropout": {"inner.2": Replicate()}}
        return TrainingProgram(made.module, made.step, **options)

    report = judged(pool, said, feed_forward(), Sides)
    assert report.ok and drops(report) == {"inner.2": True} and not unknown(report), str(report)


def test_a_part_is_found_by_its_numbers() -> None:
    """Blocks, strides and orders of dims are found; what fits twice, or nowhere, is not."""
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
        found = find_elements(cut(x) * (1 + 1e-13), FullTensor(x))
        assert found is not None and torch.equal(found, cut(numbers))
    zeros = torch.where(x > 0.5, x, 0)  # most numbers are there many times
    assert torch.equal(find_elements(zeros[3:], FullTensor(zeros)), numbers[3:])
    twice = torch.cat([x[:3], x[:3]])
    assert find_elements(twice[:2], FullTensor(twice)) is None
    assert find_elements(x[:3] + 1e-3, FullTensor(x)) is None
