"""Residual connections across sequence parallelism: sliced once, with right gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.propagate.propagate import propagate
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

INSIDE = """layers.*.up  shard(col, over=tp)
layers.*.out.down  shard(row, output=S(seq), over=tp)
"""
NORMS = "layers.*.out.norm  shard(input=S(seq), output=S(seq), over=tp)\n"
ENDS = """layers.0  shard(input=S(seq), over=tp)
layers.2  shard(output=R, over=tp)
"""


class Out(nn.Module):
    """A projection, a residual and a norm (BERT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        output: Tensor = self.norm(self.down(hidden) + residual)
        return output


class Layer(nn.Module):
    """An MLP whose input is also its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(width, 2 * width), Out(width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(F.gelu(self.up(x)), x)
        return output


class Counting(nn.Module):
    """Attention that computes the width of heads from its input (nanoGPT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.heads = nn.Linear(width, width), nn.Linear(width, width), 4

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        heads = self.up(x).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        output: Tensor = self.down(mixed.transpose(1, 2).contiguous().view(rows, length, width))
        return output


class Added(nn.Module):
    """A norm, the attention and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), Counting(width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.inner(self.norm(x))
        return output


class Stacked(nn.Module):
    """A language model whose first layer can be called several times."""

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


def word_batch(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"words": torch.randint(13, (4, length), generator=generator)}


def build_stacked(calls: int = 1, kind: type[nn.Module] = Layer) -> nn.Module:
    torch.manual_seed(0)
    return Stacked(calls, kind).double()


@pytest.mark.parametrize("rows", [INSIDE + NORMS + ENDS, INSIDE + ENDS, INSIDE + NORMS + ENDS[39:]])
def test_a_residual_of_gathered_tokens(rows: str, threads: Threads) -> None:
    """A layer's input is gathered for its projection and sliced for the residual: gradients equal
    the original's, for any length."""
    plan = make_plan(build_stacked(), rows, "tp=2")
    assert propagate(plan, word_batch(8, 0)).narrowed_arguments
    for length in (8, 16):
        assert_proven(threads, plan, [word_batch(length, seed) for seed in (1, 2, 3)])


@pytest.mark.parametrize("order", ["", '\npipeline(order="1F1B", micro=2)'])
def test_a_stage_that_begins_with_tokens_it_gathers(order: str, threads: Threads) -> None:
    """A stage whose input is gathered receives it, and its residual, from the stage before."""
    rows = INSIDE + ENDS + "layers  pipeline_split(over=pp)"
    plan = make_plan(build_stacked(), rows + order, "pp=2, tp=2")
    assert_proven(threads, plan, [word_batch(8, seed) for seed in (1, 2, 3)])


def test_a_residual_of_which_only_some_calls_are_cut(threads: Threads) -> None:
    """A block called again with a shard of its own output is refused; the offered row works."""
    rows = INSIDE.replace("layers.*", "layers.0")
    with pytest.raises(Refusal) as caught:
        propagate(make_plan(build_stacked(2), rows, "tp=2"), word_batch(8, 0))
    assert (
        "called several times, and its input arrives differently" in caught.value.diagnostic.title
    )
    (help_text,) = [h for h in caught.value.diagnostic.helps if "output=R, over=tp" in h]
    added_row = help_text.partition("`")[2].rpartition("`")[0]
    assert_proven(
        threads,
        make_plan(build_stacked(2), f"{rows}{added_row}\n", "tp=2"),
        [word_batch(8, seed) for seed in (1, 2, 3)],
    )


def test_what_counts_by_an_input_that_is_gathered(threads: Threads) -> None:
    """A module whose input is gathered along the sequence may compute head sizes from it."""
    rows = """layers.*.inner.up  shard(col, over=tp)
layers.*.inner.down  shard(row, output=S(seq), over=tp)
layers.*  shard(input=S(seq), output=R, over=tp)
"""
    plan = make_plan(build_stacked(kind=Added), rows, "tp=2")
    assert_proven(threads, plan, [word_batch(8, seed) for seed in (1, 2, 3)])
