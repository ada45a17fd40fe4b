"""Batches of one object with many samples, such as graphs: split by sample, of any sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.static_checks.static import static
from schedlang.runtime.batch import named_tensors, row_count, split_batch
from schedlang.runtime.launch.pool import Pool
from tests.proofs import assert_proven, make_plan

WIDTH = 5
ROWS = {"dp=2": "zero(stage=2, over=dp)", "": 'pipeline(order="GPipe", micro=2)'}


class Graphs:
    """Many graphs in one object: all nodes, edges between them, and the graph of each node."""

    def __init__(self, sizes: list[int], x: Tensor, edges: Tensor, y: Tensor) -> None:
        self.sizes, self.x, self.edges, self.y = sizes, x, edges, y
        self.graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs."""
        return len(self.sizes)

    def to_data_list(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return nodes, edges and answers of each graph."""
        starts = [sum(self.sizes[:k]) for k in range(len(self.sizes))]
        inside = [self.graph[self.edges[0]] == k for k in range(len(self.sizes))]
        return [
            (self.x[a : a + n], self.edges[:, edges_inside] - a, self.y[a : a + n])
            for a, n, edges_inside in zip(starts, self.sizes, inside)
        ]

    @classmethod
    def from_data_list(cls, samples: list[tuple[Tensor, Tensor, Tensor]]) -> Graphs:
        """Join graphs to one object."""
        sizes = [len(x) for x, _, _ in samples]
        edges = [e + sum(sizes[:k]) for k, (_, e, _) in enumerate(samples)]
        x, y = (torch.cat([sample[k] for sample in samples]) for k in (0, 2))
        return cls(sizes, x, torch.cat(edges, 1), y)


class Net(nn.Module):
    """Two rounds of message passing; an answer for each node, or for each graph."""

    def __init__(self, library: bool = False, pooled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        if library:
            convolution = pytest.importorskip("torch_geometric.nn").GCNConv
            self.convs = nn.ModuleList([convolution(WIDTH, WIDTH) for _ in range(2)])
        else:
            self.convs = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head, self.library, self.pooled = nn.Linear(WIDTH, 3), library, pooled
        self.double()

    def forward(self, data: Any) -> Tensor:
        x = data.x
        for conv in self.convs:
            if self.library:
                x = conv(x, data.edge_index).tanh()
            else:
                sent = conv(x)
                x = torch.tanh(sent.index_add(0, data.edges[1], sent[data.edges[0]]))
        if self.pooled:
            graph = data.batch if self.library else data.graph
            x = x.new_zeros(data.num_graphs, WIDTH).index_add(0, graph, x)
        return self.head(x)


def answer_loss(output: Tensor, batch: Any) -> Tensor:
    """Return the mean error, over nodes or graphs."""
    y = batch["data"].y
    return F.mse_loss(output[:, 0], y[: len(output)].to(output.dtype))


def node_count(batch: Any) -> float:
    """Return the weight of a part: its number of nodes."""
    return float(len(batch["data"].x))


def random_graphs(seed: int, pooled: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return graphs of 2 to 6 nodes."""
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for size in [3, 6, 2, 5, 4 + seed]:
        x = torch.randn(size, WIDTH, dtype=torch.float64, generator=generator)
        edges = torch.randint(size, (2, 2 * size), generator=generator)
        graphs.append((x, edges, torch.randn(1 if pooled else size, generator=generator).double()))
    return graphs


def own_batch(seed: int) -> dict[str, Any]:
    """Return a batch of this module's class."""
    return {"data": Graphs.from_data_list(random_graphs(seed, False))}


def library_batch(seed: int, pooled: bool) -> dict[str, Any]:
    """Return a `Batch` of torch_geometric."""
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=x, edge_index=e, y=y) for x, e, y in random_graphs(seed, pooled)]
    return {"data": data.Batch.from_data_list(graphs)}


def test_parts_have_whole_samples() -> None:
    """A part has the nodes, edges and answers of its graphs; edges are numbered within it."""
    batch = own_batch(0)
    assert row_count(batch) == 5
    assert list(named_tensors(batch)) == ["data.x", "data.edges", "data.y", "data.graph"]
    parts = [part for share in split_batch(batch, 2, 2) for part in share]
    assert [part.inputs["data"].sizes for part in parts] == [[3, 6], [2], [5], [4]]
    assert [part.rows for part in parts] == [(0, 1), (2,), (3,), (4,)]
    for part in parts:
        graphs = part.inputs["data"]
        assert graphs.edges.max() < len(graphs.x)
    assert torch.equal(torch.cat([part.inputs["data"].x for part in parts]), batch["data"].x)


@pytest.mark.parametrize("mesh", ROWS)
def test_graphs_train_as_one(mesh: str, pool: Pool) -> None:
    """Uneven graphs, weighed by nodes, train on ranks or in microbatches as in one batch."""
    assert_proven(
        pool,
        make_plan(Net(), ROWS[mesh], mesh),
        [own_batch(0), own_batch(1)],
        loss=answer_loss,
        weight=node_count,
    )


def test_graphs_weighed_wrongly_are_told(pool: Pool) -> None:
    """The mean over nodes is not the mean over graphs: refused, with the function to give."""
    with pytest.raises(Refusal, match=r"S703[\s\S]*weight"):
        assert_proven(
            pool,
            make_plan(Net(), ROWS["dp=2"], "dp=2"),
            [own_batch(0), own_batch(1)],
            loss=answer_loss,
        )


@pytest.mark.parametrize("pooled", [True, False], ids=["graphs", "nodes"])
def test_a_library_trains_as_one(pooled: bool, pool: Pool) -> None:
    """Layers and batches of torch_geometric in data parallelism, with losses over graphs and over
    nodes."""
    plan = make_plan(Net(True, pooled), ROWS["dp=2"], "dp=2")
    weight = None if pooled else node_count
    batches = [library_batch(0, pooled), library_batch(1, pooled)]
    assert_proven(pool, plan, batches, loss=answer_loss, weight=weight)


def test_samples_that_are_not_given_back() -> None:
    """An object that does not return its samples cannot be split: refused with the reason."""
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 0]])
    without_samples = data.Batch(
        x=torch.ones(4, 2), edge_index=edges, batch=torch.tensor([0, 0, 1, 1])
    )
    assert row_count({"data": without_samples}) == 2
    with pytest.raises(Refusal, match=r"S670.*`DataBatch` does not return\s+them") as caught:
        split_batch({"data": without_samples}, 2, 1)
    assert "from_data_list" in caught.value.render()


def test_what_follows_a_key_is_made_anew() -> None:
    """A loader's `follow_batch` applies to parts, too."""
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=x, edge_index=e, y=y) for x, e, y in random_graphs(0, False)]
    full = data.Batch.from_data_list(graphs, follow_batch=["y"])
    (part,), (other_part,) = split_batch({"data": full}, 2, 1)
    assert part.inputs["data"].y_batch.tolist() == [0] * 3 + [1] * 6 + [2] * 2
    assert other_part.inputs["data"].keys() == full.keys()


@pytest.mark.parametrize("mesh", ROWS)
def test_static_proofs_leave_out_what_needs_the_values_of_graphs(mesh: str) -> None:
    """Where graphs are split depends on values, which simulated ranks do not have."""
    result = static(make_plan(Net(), ROWS[mesh], mesh), own_batch(0), answer_loss, node_count)
    claims = {claim.name: claim for claim in result.claims}
    assert not result.problems and not claims["matching"].checked
    assert claims["reductions"].checked and claims["ownership"].checked
