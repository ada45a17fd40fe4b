"""Unusual batches: nested, without labels in a part, with inputs that nothing reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.original import Sequential
from schedlang.runtime.batch import named_tensors, row_count, split_batch
from schedlang.runtime.launch.pool import Pool
from schedlang.schedule import Schedule
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

DP2 = "zero(stage=2, over=dp)"


class NestedBatch(nn.Module):
    """Reads inputs, labels and a scale from inside of a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.head = nn.Linear(3, 5), nn.Linear(5, 4)
        self.double()

    def forward(self, inputs: Any, unread: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.enter(inputs["x"] * inputs["scale"][0])))
        return {"loss": F.cross_entropy(logits, inputs["labels"][0]), "logits": logits}


def nested_batch(rows: int, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (rows,), generator=g)
    labels[1:2] = -100
    x = torch.randn(rows, 3, generator=g, dtype=torch.float64)
    return {"inputs": {"x": x, "labels": (labels,), "scale": [2.0]}, "unread": x.clone()}


def test_tensors_inside_are_named_and_cut() -> None:
    """A tensor inside a dict or list of the batch is split by rows like one of the batch itself."""
    batch = nested_batch(5)
    assert list(named_tensors(batch)) == ["inputs.x", "inputs.labels.0", "unread"]
    assert row_count({"inputs": batch["inputs"]}) == 5
    parts = [part for share in split_batch(batch, 2, 2) for part in share]
    assert [len(part.rows) for part in parts] == [2, 1, 1, 1]
    for part in parts:
        (labels,) = part.inputs["inputs"]["labels"]
        rows = list(part.rows)
        assert torch.equal(labels, batch["inputs"]["labels"][0][rows])
        assert torch.equal(part.inputs["inputs"]["x"], batch["inputs"]["x"][rows])
        assert part.inputs["inputs"]["scale"] == [2.0]


def test_a_nested_batch_trains(pool: Pool) -> None:
    """Labels inside weigh the parts, and gradients of floats inside are compared."""
    plan = make_plan(NestedBatch(), f'{DP2}\n  pipeline(order="GPipe", micro=2)', "dp=2")
    report = assert_proven(pool, plan, [nested_batch(5, 1), nested_batch(6, 2)])
    names = {row.name for row in report.rows if row.kind == "input gradients"}
    assert names == {"inputs.x", "unread"}


def test_the_loss_of_a_part_without_labels(pool: Pool) -> None:
    """In evaluation too, a part in which no label counts adds nothing, and no NaN."""
    batch = nested_batch(4)
    batch["inputs"]["labels"][0][2:] = -100
    for rows in (DP2, 'pipeline(order="GPipe", micro=3)'):
        assert_proven(
            pool,
            make_plan(NestedBatch(), rows, "dp=2" if "dp" in rows else ""),
            [batch, nested_batch(5)],
        )


def test_an_input_that_nothing_reads(pool: Pool) -> None:
    """Its gradient is None in the original, and zero where state is sliced: both count as equal."""
    report = assert_proven(pool, make_plan(NestedBatch(), DP2, "dp=2"), [nested_batch(4)])
    (row, *_) = [r for r in report.rows if (r.kind, r.name) == ("input gradients", "unread")]
    assert row.ok and "nothing reads" in row.note


class RunningAverage(nn.Module):
    """Keeps a running average of its weight, of its input, or of both in a complex buffer."""

    def __init__(self, of: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.of = nn.Linear(3, 3), of
        dtype = torch.complex128 if of == "both" else torch.float64
        self.double().register_buffer("mean", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight, row_mean = self.lin.weight.detach()[0], x.detach().mean(0)
        current = {"weight": weight, "input": row_mean, "both": torch.complex(weight, row_mean)}[
            self.of
        ]
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * current)
        return self.lin(x).square().mean()


@pytest.mark.parametrize(
    "of, rows, refused",
    [
        ("weight", DP2, False),
        ("weight", 'pipeline(order="GPipe", micro=2)', True),
        ("input", DP2, True),
        ("both", DP2, True),
        ("input", "lin  checkpoint()", False),
    ],
)
def test_buffers_that_depend_on_the_split(of: str, rows: str, refused: bool, pool: Pool) -> None:
    """A buffer whose value depends on the split is refused by name, and no other."""
    batch = {"x": torch.arange(12.0, dtype=torch.float64).view(4, 3)}
    case = Case(
        make_plan(RunningAverage(of), rows, "dp=2" if "dp" in rows else ""), (batch,), dtype="none"
    )
    if not refused:
        assert prove(case, pool=pool).ok
        return
    with pytest.raises(Refusal, match="S708") as caught:
        prove(case, pool=pool)
    assert "`mean`" in caught.value.render()


def test_buffers_are_put_back() -> None:
    """The check restores the buffers of the model."""
    from schedlang.passes.verify.probe import check_buffers

    batch = {"x": torch.ones(4, 3, dtype=torch.float64)}
    reference = Sequential(RunningAverage("weight"))
    with pytest.raises(Refusal):
        check_buffers(reference, batch, split_batch(batch, 1, 2))
    assert not reference.module.mean.any()


def test_a_cut_gives_up_rounding() -> None:
    """Stages sum a tied weight's gradient and the norm in another order: equal up to rounding."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = make_plan(nn.Sequential(layers), "`0`  pipeline_split(over=pp)", "pp=2")
    assert plan.gives_up == {"rounding"}


def count_threads() -> int:
    return torch.get_num_threads()


def test_one_rank_has_the_threads_of_its_parent(pool: Pool) -> None:
    """A single rank uses the parent's threads, so that sums have one order; several share them."""
    original = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert pool.run(count_threads, 1) == [threads]
            assert pool.run(count_threads, 2) == [1, 1]
    finally:
        torch.set_num_threads(original)


class TokenModel(nn.Module):
    """Embedding, blocks and head; without labels the loss is NaN, or 0 with `bounded`."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 9)
        self.bounded = bounded
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x).flatten(0, 1)
        if not self.bounded:
            return {"loss": F.cross_entropy(logits, labels.flatten())}
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss": loss / (labels != -100).sum().clamp(min=1)}


LAYOUTS = {
    "one": ("dp=1", ""),
    "dp": ("dp=2", DP2),
    "tp": ("tp=2", "blocks.*.0  shard(col, over=tp)\n  blocks.*.2  shard(row, over=tp)"),
    "pp": ("pp=2", 'blocks  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=2)'),
    "both": (
        "dp=2, pp=2",
        "blocks  pipeline_split(over=pp)\n  zero(stage=1, over=dp)\n"
        '  pipeline(order="1F1B", micro=2)',
    ),
}


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_without_any_label(layout: str, bounded: bool, threads: Threads) -> None:
    """Loss, gradients and weights equal those of the original, under every layout."""
    mesh, rows = LAYOUTS[layout]
    ids = torch.arange(24).reshape(4, 6).remainder(9)
    batch = {"ids": ids, "labels": torch.full_like(ids, -100)}
    model = TokenModel(bounded)
    loss = model(**batch)["loss"]
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    text = f'schedule 1\n\nmesh({mesh})\n\nstep "s" {{\n  {rows}\n}}\n'

    def body() -> Any:
        program = Schedule(TokenModel(bounded), parse(Source("a.sched", text))).build(
            batch=batch | {"labels": ids}, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
        )
        return program.train_step(batch), program.gradients(), program.state_dict()

    world = 4 if layout == "both" else 1 if layout == "one" else 2
    for value, gradients, state in threads.run(body, world):
        torch.testing.assert_close(value.double(), loss.detach(), equal_nan=True)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], expected[name], equal_nan=True)
            torch.testing.assert_close(state[name], parameter.detach() - 0.1 * expected[name])


@pytest.mark.parametrize("layout", ["dp", "pp", "both"])
def test_a_sum_that_is_divided_by_a_count_of_labels(layout: str, threads: Threads) -> None:
    """It is a mean over labels, however few a part has, and parts are weighed by them."""
    mesh, rows = LAYOUTS[layout]
    ids = torch.arange(24).reshape(4, 6).remainder(9)
    counts = torch.tensor([0, 6, 1, 3])[:, None]
    batch = {"ids": ids, "labels": ids.masked_fill(torch.arange(6) >= counts, -100)}
    report = assert_proven(
        threads, make_plan(TokenModel(True), rows, mesh), [batch, {**batch, "labels": ids}]
    )
    assert report.equivalence == "algebraic"


class ShiftedLabels(nn.Module):
    """Reads its labels twice: shifted by one as decoder input, and in its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.noise = nn.Parameter(torch.tensor(0.3))
        self.double()

    def forward(self, labels: Tensor) -> Any:
        decoder_ids = F.pad(labels[:, :-1], (1, 0), value=1)
        decoder_ids = decoder_ids.masked_fill(decoder_ids == -100, 2)
        x = self.embed(decoder_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": mean * torch.exp(-self.noise) + self.noise, "logits": logits}


@pytest.mark.parametrize(
    "rows, mesh",
    [(DP2, "dp=2"), ('blocks  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=2)', "pp=2")],
)
def test_a_part_without_labels_is_computed_as_it_is(rows: str, mesh: str, pool: Pool) -> None:
    """What a model computes from labels beside its loss is the same in a part as in the batch.

    A loss that adds a weight to its mean gives that weight a gradient, not NaN.
    """
    labels = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(0))
    labels[2:] = -100
    assert_proven(
        pool,
        make_plan(ShiftedLabels(), rows, mesh),
        [{"labels": labels}, {"labels": labels.flip(1)}],
    )


def test_graphs_of_a_library() -> None:
    """A list of graphs of torch_geometric is refused with what to give instead."""
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 2]])
    graphs = [data.Data(x=torch.ones(3 + k, 4), edge_index=edges) for k in range(4)]
    with pytest.raises(Refusal, match=r"S605.*`data` is made of `Data") as caught:
        row_count({"data": graphs})
    assert "Batch.from_data_list" in caught.value.render()
    mixed = {"data": graphs, "y": torch.ones(4)}
    assert len(split_batch(mixed, 1, 1)[0]) == 1  # it may be given unsplit
    with pytest.raises(Refusal, match=r"S670.*`data` is made of `Data"):
        split_batch(mixed, 2, 1)
