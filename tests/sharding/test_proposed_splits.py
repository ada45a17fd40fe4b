"""Common kinds of modules that a proposed schedule splits without gathering."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.autoshard.propose import propose
from tests.engine.threads import Threads
from tests.models import Stack
from tests.proofs import assert_near, train_on_ranks, train_sequential
from tests.sharding.test_propose import plan_from_text

FILE = Path(__file__).name


class Attention(nn.Module):
    """A packed projection, one view into q, k, v and heads, and a table of biases per head."""

    def __init__(self, width: int, heads: int, first: str, table: bool) -> None:
        super().__init__()
        self.heads, self.first = heads, first
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(11, heads)) if table else None

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        if self.first == "parts":
            qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            qkv = self.qkv(x).reshape(B, N, self.heads, 3, C // self.heads)
            q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1)
        if self.table is not None:
            positions = torch.arange(N, device=x.device)
            distances = (positions[:, None] - positions[None]).clamp(-5, 5) + 5
            scores = scores + self.table[distances.view(-1)].view(N, N, -1).permute(2, 0, 1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


class Gated(nn.Module):
    """A gated MLP whose last projection is adapted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = Adapted(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, heads: int, first: str, table: bool) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attn, self.mlp = Attention(24, heads, first, table), Gated(24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Up(nn.Module):
    """A level with several blocks, as in a U-Net."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x


def stack(heads: int = 4, first: str = "parts", table: bool = False) -> nn.Module:
    """A stack of three blocks in float64."""
    return Stack(Block(heads, first, table) for _ in range(3)).double()


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 5, 24, generator=generator).double()} for _ in range(count)]


def assert_trains_equal(threads: Threads, net: nn.Module, text: str, ranks: int) -> None:
    """Assert that a proposed schedule trains as the original."""
    plan = plan_from_text(net, text)
    observed = train_on_ranks(threads, plan, batches())
    assert_near(observed, train_sequential(net, batches()))


@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("first", ["parts", "heads"])
def test_one_view_of_any_number_of_heads(threads: Threads, heads: int, first: str) -> None:
    """q, k and v in one projection are split by heads, whichever the view counts first."""
    net = stack(heads, first)
    proposal = propose(net, batches(1)[0], {"tp": 2})
    blocks = "blocks=3, " if first == "parts" else ""
    assert f"attn.qkv shard(col, {blocks}over=tp)" in " ".join(proposal.text.split())
    assert "output=R" not in proposal.text
    assert_trains_equal(threads, net, proposal.text, 2)


def test_a_table_of_biases_is_split_with_its_heads(threads: Threads) -> None:
    """A bias table in the attention is split as its heads."""
    for heads in (2, 4):
        net = stack(heads, table=True)
        proposal = propose(net, batches(1)[0], {"tp": 2})
        assert "attn shard(table=S(1), over=tp)" in " ".join(proposal.text.split())
        assert_trains_equal(threads, net, proposal.text, 2)


def test_what_reads_beside_a_sink_is_one(threads: Threads) -> None:
    """Gate and up stay split before an adapted projection, whose first LoRA factor is row-split."""
    net = stack()
    proposal = propose(net, batches(1)[0], {"tp": 2})
    text = " ".join(proposal.text.split())
    assert "mlp.{gate,up} shard(col, over=tp)" in text and "gathered" not in proposal.text
    assert "mlp.down.{base,a} shard(row, over=tp)" in text
    assert_trains_equal(threads, net, proposal.text, 2)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))


def test_numbers_that_count_no_blocks_stay(threads: Threads) -> None:
    """Blocks in only one of several levels are selected by its number."""
    levels = (nn.LayerNorm(24), Up(*(Up(_mlp()) for _ in range(2))))
    net = Stack(levels, "levels").double()
    proposal = propose(net, batches(1)[0], {"tp": 2})
    assert "levels.1.inner.*.inner.*" in proposal.text and "levels.*" not in proposal.text
    assert "1 block of " not in proposal.text and "matches no module" not in proposal.text
    assert_trains_equal(threads, net, proposal.text, 2)


class Mixer(nn.Module):
    """Blocks of a depthwise convolution and two of kernel 1, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(6, 6, 3, padding=1, groups=6),
                nn.Conv2d(6, 12, 1),
                nn.GELU(),
                nn.Conv2d(12, 6, 1),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3))).square().mean()


def test_convolutions_are_a_pair_like_projections(threads: Threads) -> None:
    """Channels between two convolutions are split; a note gives the line that prevents others."""
    net = Mixer()
    generator = torch.Generator().manual_seed(1)
    inputs = [{"x": torch.randn(2, 6, 4, 5, generator=generator).double()} for _ in range(2)]
    proposal = propose(net, inputs[0], {"tp": 2})
    text = " ".join(proposal.text.split())
    assert "`1` shard(col, over=tp) # split by channels" in text.replace("1 shard", "`1` shard")
    assert "blocks.*.0: a convolution of several groups" in text
    line = inspect.getsourcelines(Mixer.forward)[1] + 3
    note = f"head: no column/row pair found: its output is used elsewhere, at {FILE}:{line}"
    assert f"replicated: {note}" in proposal.notes
    observed = train_on_ranks(threads, plan_from_text(net, proposal.text), inputs)
    assert_near(observed, train_sequential(net, inputs))


class Recurrent(nn.Module):
    """A table, a recurrent layer and a head: no list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.rnn = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(ids))[0]).square().mean()


WORDS = [
    {"ids": torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(k))} for k in range(2)
]


def test_a_model_without_lists_is_cut_between_its_modules(threads: Threads) -> None:
    """A model without lists is cut between its modules; too many stages are refused."""
    net = Recurrent()
    proposal = propose(net, WORDS[0], {"pp": 2})
    assert "head  pipeline_split(over=pp)" in proposal.text
    observed = train_on_ranks(threads, plan_from_text(net, proposal.text), WORDS)
    assert_near(observed, train_sequential(net, WORDS))
    with pytest.raises(Refusal, match=r"S212(.|\n)*3 modules of the list cannot be cut into 4"):
        propose(net, WORDS[0], {"pp": 4})


def test_what_hinders_is_said() -> None:
    """If nothing can be split, the refusal gives a reason for each module."""
    net = Recurrent()
    net.words, net.head = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    with pytest.raises(Refusal, match=r"S212(.|\n)*rnn: no style fits a `GRU`"):
        propose(net, {"ids": torch.randn(4, 5, 8).double()}, {"tp": 2})


class Bags(nn.Module):
    """Embedding bags of several features and an MLP over them, as in DLRM."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, 8, mode=mode) for n in (16, 9, 12))
        self.top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([bag(ids[:, k]) for k, bag in enumerate(self.bags)], 1)).mean()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_split_by_rows_or_by_columns(threads: Threads, mode: str) -> None:
    """Every table is split by its rows, padded where they do not divide; a maximum by columns."""
    net = Bags(mode)
    inputs = [
        {"ids": torch.randint(9, (4, 3, 2), generator=torch.Generator().manual_seed(k))}
        for k in range(2)
    ]
    proposal = propose(net, inputs[0], {"tp": 2})
    expected_row = "shard(col, output=R, over=tp)" if mode == "max" else "shard(vocab, over=tp)"
    assert f"bags[0:3] {expected_row}" in " ".join(proposal.text.split())
    padded = "bags.1 pad(vocab, multiple=2)" in " ".join(proposal.text.split())
    assert padded == (mode != "max")
    observed = train_on_ranks(threads, plan_from_text(net, proposal.text), inputs)
    assert_near(observed, train_sequential(net, inputs))
