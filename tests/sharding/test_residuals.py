"""Residuals of all tokens that meet a sum along the sequence: cut once, their gradients right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.propagate.propagate import propagate
from tests.engine import Threads
from tests.proofs import planned, proven

INSIDE = """layers.*.up  shard(col, over=tp)
layers.*.out.down  shard(row, output=S(seq), over=tp)
"""
NORMS = "layers.*.out.norm  shard(input=S(seq), output=S(seq), over=tp)\n"
ENDS = """layers.0  shard(input=S(seq), over=tp)
layers.2  shard(output=R, over=tp)
"""


class Out(nn.Module):
    """A sum with what it is given, and a norm behind it (BERT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, hidden: Tensor, given: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(hidden) + given)
        return out


class Layer(nn.Module):
    """Its input goes up, and to the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(width, 2 * width), Out(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.gelu(self.up(x)), x)
        return out


class Counting(nn.Module):
    """Counts heads, and their width, by its input, as people write it (nanoGPT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.heads = nn.Linear(width, width), nn.Linear(width, width), 4

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        heads = self.up(x).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        out: Tensor = self.down(mixed.transpose(1, 2).contiguous().view(rows, length, width))
        return out


class Added(nn.Module):
    """A norm, what counts by its input, and the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), Counting(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.norm(x))
        return out


class Stacked(nn.Module):
    """Words, layers of which the first may be called again and again, and the loss."""

    def __init__(self, calls: int, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.calls = nn.Embedding(13, 8), calls
        self.layers = nn.ModuleList(kind(8) for _ in range(3))
        self.head = nn.Linear(8, 13)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in [self.layers[0]] * self.calls + list(self.layers[1:]):
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def words(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"words": torch.randint(13, (4, length), generator=generator)}


def stacked(calls: int = 1, kind: type[nn.Module] = Layer) -> nn.Module:
    torch.manual_seed(0)
    return Stacked(calls, kind).double()


@pytest.mark.parametrize("rows", [INSIDE + NORMS + ENDS, INSIDE + ENDS, INSIDE + NORMS + ENDS[39:]])
def test_a_residual_of_gathered_tokens(rows: str, threads: Threads) -> None:
    """The input of a layer is gathered for its projection and cut again for the sum: gradients of
    both add up to those of the original, for sequences of any length."""
    plan = planned(stacked(), rows, "tp=2")
    assert propagate(plan, words(8, 0)).narrowed_arguments
    for length in (8, 16):
        proven(threads, plan, [words(length, seed) for seed in (1, 2, 3)])


@pytest.mark.parametrize("order", ["", '\npipeline(order="1F1B", micro=2)'])
def test_a_stage_that_begins_with_tokens_it_gathers(order: str, threads: Threads) -> None:
    """What a stage reads through a gather alone, its residual too, comes from the stage before."""
    rows = INSIDE + ENDS + "layers  pipeline_split(over=pp)"
    plan = planned(stacked(), rows + order, "pp=2, tp=2")
    proven(threads, plan, [words(8, seed) for seed in (1, 2, 3)])


def test_a_residual_of_which_only_some_calls_are_cut(threads: Threads) -> None:
    """A block called again with what it gave is refused where that is a part; the help works."""
    rows = INSIDE.replace("layers.*", "layers.0")
    with pytest.raises(Refusal) as no:
        propagate(planned(stacked(2), rows, "tp=2"), words(8, 0))
    assert "called several times, and its input arrives differently" in no.value.diagnostic.title
    (said,) = [h for h in no.value.diagnostic.helps if "output=R, over=tp" in h]
    more = said.partition("`")[2].rpartition("`")[0]
    proven(
        threads,
        planned(stacked(2), f"{rows}{more}\n", "tp=2"),
        [words(8, seed) for seed in (1, 2, 3)],
    )


def test_what_counts_by_an_input_that_is_gathered(threads: Threads) -> None:
    """A module whose input arrives in parts of the sequence, and is gathered for it, may count its
    heads' width by it."""
    rows = """layers.*.inner.up  shard(col, over=tp)
layers.*.inner.down  shard(row, output=S(seq), over=tp)
layers.*  shard(input=S(seq), output=R, over=tp)
"""
    plan = planned(stacked(kind=Added), rows, "tp=2")
    proven(threads, plan, [words(8, seed) for seed in (1, 2, 3)])
