"""Batches that are one object of many samples, as graphs: cut by sample, of whatever sizes."""

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
from tests.proofs import planned, proven

WIDTH = 5
ROWS = {"dp=2": "zero(stage=2, over=dp)", "": 'pipeline(order="GPipe", micro=2)'}


class Graphs:
    """Many graphs as one: nodes of all, edges between them, and which graph each node is of."""

    def __init__(self, sizes: list[int], x: Tensor, edges: Tensor, y: Tensor) -> None:
        self.sizes, self.x, self.edges, self.y = sizes, x, edges, y
        self.graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))

    @property
    def num_graphs(self) -> int:
        """How many they are."""
        return len(self.sizes)

    def to_data_list(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Nodes, edges and answers of each."""
        first = [sum(self.sizes[:k]) for k in range(len(self.sizes))]
        inside = [self.graph[self.edges[0]] == k for k in range(len(self.sizes))]
        return [
            (self.x[a : a + n], self.edges[:, mine] - a, self.y[a : a + n])
            for a, n, mine in zip(first, self.sizes, inside)
        ]

    @classmethod
    def from_data_list(cls, samples: list[tuple[Tensor, Tensor, Tensor]]) -> Graphs:
        """One of many."""
        sizes = [len(x) for x, _, _ in samples]
        edges = [e + sum(sizes[:k]) for k, (_, e, _) in enumerate(samples)]
        x, y = (torch.cat([one[k] for one in samples]) for k in (0, 2))
        return cls(sizes, x, torch.cat(edges, 1), y)


class Net(nn.Module):
    """Two rounds of messages; an answer for each node, or the mean of each graph's."""

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


def judged(output: Tensor, batch: Any) -> Tensor:
    """Of nodes or of graphs, as many as there are answers."""
    y = batch["data"].y
    return F.mse_loss(output[:, 0], y[: len(output)].to(output.dtype))


def nodes(batch: Any) -> float:
    """A part weighs its nodes."""
    return float(len(batch["data"].x))


def samples(seed: int, pooled: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Graphs of 2 to 6 nodes."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for size in [3, 6, 2, 5, 4 + seed]:
        x = torch.randn(size, WIDTH, dtype=torch.float64, generator=g)
        edges = torch.randint(size, (2, 2 * size), generator=g)
        found.append((x, edges, torch.randn(1 if pooled else size, generator=g).double()))
    return found


def ours(seed: int) -> dict[str, Any]:
    """Graphs of our own class."""
    return {"data": Graphs.from_data_list(samples(seed, False))}


def theirs(seed: int, pooled: bool) -> dict[str, Any]:
    """A `Batch` of torch_geometric."""
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=x, edge_index=e, y=y) for x, e, y in samples(seed, pooled)]
    return {"data": data.Batch.from_data_list(graphs)}


def test_parts_have_whole_samples() -> None:
    """A part has the nodes, the edges and the answers of its graphs, edges numbered within it."""
    batch = ours(0)
    assert row_count(batch) == 5
    assert list(named_tensors(batch)) == ["data.x", "data.edges", "data.y", "data.graph"]
    parts = [part for share in split_batch(batch, 2, 2) for part in share]
    assert [part.inputs["data"].sizes for part in parts] == [[3, 6], [2], [5], [4]]
    assert [part.rows for part in parts] == [(0, 1), (2,), (3,), (4,)]
    for part in parts:
        held = part.inputs["data"]
        assert held.edges.max() < len(held.x)
    assert torch.equal(torch.cat([part.inputs["data"].x for part in parts]), batch["data"].x)


@pytest.mark.parametrize("mesh", ROWS)
def test_graphs_train_as_one(mesh: str, pool: Pool) -> None:
    """Uneven graphs, weighed by nodes, dealt to ranks or microbatches, train as the whole batch."""
    proven(pool, planned(Net(), ROWS[mesh], mesh), [ours(0), ours(1)], loss=judged, weight=nodes)


def test_graphs_weighed_wrongly_are_told(pool: Pool) -> None:
    """The mean over nodes is not the mean of graphs: refused, with the function to give."""
    with pytest.raises(Refusal, match=r"S703[\s\S]*weight"):
        proven(pool, planned(Net(), ROWS["dp=2"], "dp=2"), [ours(0), ours(1)], loss=judged)


@pytest.mark.parametrize("pooled", [True, False], ids=["graphs", "nodes"])
def test_a_library_trains_as_one(pooled: bool, pool: Pool) -> None:
    """Layers and batches of torch_geometric under data parallelism, with losses of graphs and of
    nodes."""
    plan = planned(Net(True, pooled), ROWS["dp=2"], "dp=2")
    weight = None if pooled else nodes
    batches = [theirs(0, pooled), theirs(1, pooled)]
    proven(pool, plan, batches, loss=judged, weight=weight)


def test_samples_that_are_not_given_back() -> None:
    """An object that was not made of samples cannot be cut: refused with the reason."""
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 0]])
    alone = data.Batch(x=torch.ones(4, 2), edge_index=edges, batch=torch.tensor([0, 0, 1, 1]))
    assert row_count({"data": alone}) == 2
    with pytest.raises(Refusal, match=r"S670.*`DataBatch` does not return\s+them") as caught:
        split_batch({"data": alone}, 2, 1)
    assert "from_data_list" in caught.value.render()


def test_what_follows_a_key_is_made_anew() -> None:
    """`follow_batch` of a loader holds for parts, too."""
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=x, edge_index=e, y=y) for x, e, y in samples(0, False)]
    whole = data.Batch.from_data_list(graphs, follow_batch=["y"])
    (first,), (second,) = split_batch({"data": whole}, 2, 1)
    assert first.inputs["data"].y_batch.tolist() == [0] * 3 + [1] * 6 + [2] * 2
    assert second.inputs["data"].keys() == whole.keys()


@pytest.mark.parametrize("mesh", ROWS)
def test_static_proofs_leave_out_what_needs_the_values_of_graphs(mesh: str) -> None:
    """Where a batch of graphs is cut follows from its values, which simulated ranks do not have."""
    found = static(planned(Net(), ROWS[mesh], mesh), ours(0), judged, nodes)
    claims = {claim.name: claim for claim in found.claims}
    assert not found.problems and not claims["matching"].checked
    assert claims["reductions"].checked and claims["ownership"].checked
