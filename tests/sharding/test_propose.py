"""`propose`: schedules for models that it has never seen; they can be planned and verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.language.printer import fmt
from schedlang.language.syntax import parse
from schedlang.passes.autoshard.propose import propose
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.reduce_model.blocks import fewest_layers
from schedlang.passes.simulate.account import account
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.tracing.units import units_of
from schedlang.schedule import Schedule
from tests import models
from tests.proofs import assert_proven
from tests.survey import tiny_model

SPLIT = {"dp": 2, "pp": 2, "tp": 2}
KINDS = ["gpt2", "gpt_neox", "mixtral"]
MORE = [
    "llama",
    "opt",
    "phi3",
    "gemma2",
    "bloom",
    "falcon",
    "deepseek_v3",
    "olmo2",
    "mpt",
    "gptj",
    "qwen3_next",
]


def tiny_batch_model(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = tiny_model(kind, 2)
    rows = {name: torch.cat([value] * 4) for name, value in batch.items()}
    return model, {**rows, "attention_mask": torch.ones_like(rows["input_ids"])}


def plan_from_text(model: nn.Module, text: str) -> Plan:
    return Schedule(model, parse(Source("proposed.sched", text)), Settings()).plan()


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(k, marks=pytest.mark.deep) for k in MORE)])
def test_plans(kind: str) -> None:
    """Proposals for models of transformers are in canonical form and can be planned."""
    model, batch = tiny_batch_model(kind)
    proposal = propose(model, batch, SPLIT)
    assert fmt(Source("proposed.sched", proposal.text)) == proposal.text
    plan = plan_from_text(model, proposal.text)
    assert account(plan, batch).collectives
    split = sum(
        parameter.numel
        for name, parameter in plan.model.unique_parameters.items()
        if plan.effective_layout(name).splits
    )
    assert split > 0.5 * plan.model.numel("")


# -- a model that no library knows -----------------------------------------------------------------


class Odd(nn.Module):
    """A block with meaningless names: packed heads and a gated MLP."""

    def __init__(self, width: int, heads: int, packed: str) -> None:
        super().__init__()
        self.heads, self.packed = heads, packed
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.a, self.b = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c, self.d = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        mixed = self.a(self.n1(x))
        if self.packed == "heads":  # q, k, v of one head side by side
            mixed = mixed.view(rows, length, self.heads, -1)
            q, k, v = (t.transpose(1, 2) for t in mixed.chunk(3, -1))
        elif self.packed == "parts":
            parts = mixed.chunk(3, -1)
            q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in parts)
        else:  # every third column: nothing that lies side by side
            parts = (mixed[..., k::3] for k in range(3))
            q, k, v = (t.reshape(rows, length, self.heads, -1).transpose(1, 2) for t in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.b(attended.transpose(1, 2).flatten(2))
        left, right = self.c(self.n2(x)).chunk(2, -1)
        return x + self.d(F.silu(left) * right)


class Unknown(nn.Module):
    """A language model of such blocks; the head is tied to an embedding of 31 rows."""

    def __init__(self, packed: str = "parts") -> None:
        super().__init__()
        self.words = nn.Embedding(31, 16)
        self.stack = nn.ModuleList(Odd(16, 4, packed) for _ in range(4))
        self.out = nn.Linear(16, 31, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.stack:
            x = block(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def word_batch(seed: int, rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 31, (rows, 6), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


@pytest.mark.parametrize("packed", ["parts", "heads"])
def test_an_unknown_model(packed: str) -> None:
    """Packed weights, gates, ties and uneven tables are recognized from one forward."""
    proposal = propose(Unknown(packed), word_batch(0), SPLIT)
    text = " ".join(proposal.text.split())
    assert f"a shard(col, {'blocks=3, ' * (packed == 'parts')}over=tp)" in text
    assert "c shard(col, blocks=2, over=tp)" in text
    assert "words  pad(vocab, multiple=2)" in proposal.text
    assert "out  " in proposal.text and "logits stay split" in proposal.text
    assert "4 blocks of stack" in proposal.text
    assert proposal.notes == ()


def test_an_oddly_packed_model() -> None:
    """Columns that are not contiguous are gathered, and a note says why."""
    proposal = propose(Unknown("odd"), word_batch(0), {"tp": 2})
    assert "a shard(col, output=R, over=tp)" in " ".join(proposal.text.split())
    assert any(note.startswith("gathered: stack.*.a: ") for note in proposal.notes)


def test_proposals_verify(pool: Pool) -> None:
    """A proposed schedule for an unknown model equals the model, in gradients and after steps."""
    model = Unknown().double()
    proposal = propose(model, word_batch(0), {"pp": 2, "tp": 2})
    assert_proven(
        pool, plan_from_text(model, proposal.text), [word_batch(0), word_batch(1), word_batch(2)]
    )


@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
def test_other_axes(mesh: dict[str, int]) -> None:
    """Experts, sliced parameters and sequences have axes of their own."""
    model, batch = tiny_batch_model("mixtral" if "ep" in mesh else "llama")
    proposal = propose(model, batch, mesh)
    for axis in mesh:
        assert f"over={axis}" in proposal.text or "over=(dp, ep)" in proposal.text
    assert account(plan_from_text(model, proposal.text), batch).classes


def test_what_runs_on_no_part_of_its_tokens_is_not_split_by_them() -> None:
    """BART computes positions from shapes: a split of its sequences is refused, and the reason
    names the module."""
    with pytest.raises(Refusal) as raised:
        propose(models.bart(), models.tokens(4, 8), {"cp": 2})
    message = raised.value.render()
    assert "S212" in message and "cannot be split by tokens" in message
    assert "`model.decoder.embed_tokens` computes a token differently" in message


def test_whole_weights_are_said() -> None:
    """A note says that the table of positions stays replicated."""
    model, batch = tiny_batch_model("gpt2")
    proposal = propose(model, batch, {"tp": 2})
    assert proposal.notes == ("replicated: transformer.wpe: a small table",)


def test_fewest() -> None:
    """The fewest layers that contain all kinds and all pairs of neighbours, and fill the stages."""
    assert len(fewest_layers("aaaaaa")) == 2
    assert len(fewest_layers("abbbbb")) == 3
    assert len(fewest_layers("abababab")) == 4
    assert len(fewest_layers("a" * 126, stages=4)) == 9  # neither divides into stages
    assert fewest_layers("abc") == [0, 1, 2]


# -- refusals --------------------------------------------------------------------------------------


def test_unknown_axis() -> None:
    """An axis whose name says nothing is refused with the names that do."""
    with pytest.raises(Refusal, match=r"S211(.|\n)*`dp`, `data` and `fsdp`, which split the batch"):
        propose(nn.Linear(2, 2), {}, {"rows": 2})


def test_two_axes_of_one_kind() -> None:
    """Two axes that would split the same are refused."""
    with pytest.raises(Refusal, match=r"S211(.|\n)*`tp` and `model` would split the same"):
        propose(nn.Linear(2, 2), {}, {"tp": 2, "model": 2})


def squared_loss(output: torch.Tensor, batch: object) -> torch.Tensor:
    """A loss of any output."""
    return output.square().mean()


class Linear(nn.Module):
    """A class with the name of torch's, but a transposed weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Embedding(Linear):
    """A class with the name of torch's: a product with one-hot codes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.one_hot(x, len(self.weight)).to(self.weight))


class Judged(nn.Module):
    """A generator, and a discriminator that is called for generated and real data."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        generated = self.make(z)
        return (
            self.judge(real) - self.judge(generated)
        ).sigmoid().mean() + generated.square().mean()


def test_a_list_that_is_walked_twice(pool: Pool) -> None:
    """A list that is called twice stays in one stage, and the other list is cut."""
    model, generator = Judged().double(), torch.Generator().manual_seed(0)
    batch = {key: torch.randn(8, 4, generator=generator).double() for key in ("z", "real")}
    proposal = propose(model, batch, {"pp": 2})
    assert "make.2  pipeline_split(over=pp)" in proposal.text
    assert_proven(pool, plan_from_text(model, proposal.text), [batch])
    with pytest.raises(Refusal, match="S601.*`judge.0` is called 2 times"):
        units_of(model, batch, ["judge.2"])
    short_model = Judged().double()
    short_model.make = nn.Sequential(nn.Linear(4, 4)).double()
    with pytest.raises(Refusal, match="S212") as caught:
        propose(short_model, batch, {"pp": 2})
    assert "`judge.0` is called 2 times" in caught.value.diagnostic.notes[0]


class Scaled(nn.Module):
    """Parameters of one number: of the model, and of each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)
        )
        for block in self.blocks:
            block.register_parameter("gain", nn.Parameter(torch.tensor(2.0)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.gain * block(x)
        return (self.scale.exp() * x).square().mean()


def test_parameters_of_one_number(pool: Pool) -> None:
    """Scalar parameters, as the temperature of contrastive models, do not prevent a proposal."""
    model = Scaled().double()
    batch = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double()}
    proposal = propose(model, batch, {"dp": 2, "tp": 2})
    assert "shard(col, over=tp)" in proposal.text
    assert_proven(pool, plan_from_text(model, proposal.text), [batch])


class Namesakes(nn.Module):
    """The user's modules with torch's names, and a pair of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(12, 16), Embedding(12, 16)
        self.lower = Linear(16, 8)
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), Linear(8, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lower(self.table(x) + self.read(x))
        return F.cross_entropy(self.head(self.down(self.up(h).relu())), y)


def test_namesakes(pool: Pool) -> None:
    """Modules with torch's names stay unsharded, and torch's own are split."""
    model, generator = Namesakes().double(), torch.Generator().manual_seed(0)
    batch = {key: torch.randint(12, (8,), generator=generator) for key in ("x", "y")}
    proposal = propose(model, batch, {"dp": 2, "tp": 2})
    text = proposal.text.partition("# replicated")[0]
    assert "up     shard(col, over=tp)" in text and "table  shard(vocab, over=tp)" in text
    assert not any(name in text for name in ("lower", "read", "head"))
    assert_proven(pool, plan_from_text(model, proposal.text), [batch])


def test_nothing_to_split() -> None:
    """A model without two projections in a row is refused for a tensor axis, with the reasons."""
    with pytest.raises(Refusal, match=r"S212(.|\n)*`tp=1`"):
        propose(nn.Linear(2, 2), {"input": torch.ones(4, 2)}, {"tp": 2}, squared_loss)


def test_a_large_batch_is_cut() -> None:
    """A batch with masks that are too large to trace at once gets stages, too."""
    model, _ = tiny_batch_model("llama")
    ids = torch.zeros(64, 8192, dtype=torch.long)
    proposal = propose(model, {"input_ids": ids, "labels": ids}, {"pp": 2})
    assert "pipeline_split(over=pp)" in proposal.text


def test_no_blocks_to_cut() -> None:
    """A model without a list of blocks is refused for a pipeline."""
    with pytest.raises(Refusal, match=r"S212(.|\n)*no list of blocks"):
        propose(nn.Linear(2, 2), {"input": torch.ones(4, 2)}, {"pp": 2}, squared_loss)


def test_too_few_rows() -> None:
    """A batch with fewer rows than ranks is refused as `plan` would."""
    with pytest.raises(Refusal, match="S606"):
        propose(Unknown(), word_batch(0, rows=2), {"dp": 4})


class Sharing(nn.Module):
    """Attention whose later layers take keys and values of an earlier one."""

    def __init__(self, has_own: bool) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        if has_own:
            self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *cached: Tensor) -> tuple[Tensor, ...]:
        heads = (*x.shape[:2], -1, 4)
        if hasattr(self, "k_proj"):
            cached = tuple(f(x).view(heads).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        q = self.q_proj(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, cached[0], cached[1])
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2)), *cached


class Adapted(nn.Module):
    """A layer; every second one has a list of adapters."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.attn = Sharing(index < 2)
        if index % 2:
            self.side = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)) for _ in range(2)
            )

    def forward(self, x: Tensor, *cached: Tensor) -> tuple[Tensor, ...]:
        x, *new_cached = self.attn(x, *cached)
        for pair in getattr(self, "side", ()):
            x = x + pair(x)
        return x, *new_cached


class Uneven(nn.Module):
    """Layers of one class that do not all have the same children."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(index) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cached: list[Tensor] = []
        for layer in self.layers:
            x, *cached = layer(x, *cached)
        return x.square().mean()


def test_children_that_only_some_layers_have(pool: Pool) -> None:
    """Rows select only the layers that have their modules, also with lists inside."""
    model = Uneven().double()
    batch = {"x": torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(0)).double()}
    proposal = propose(model, batch, {"dp": 2, "tp": 2})
    assert "layers[0:2].attn.{k,v}_proj  shard(col, over=tp)" in proposal.text, proposal.text
    assert "at layers[1, 3].side.* {" in proposal.text, proposal.text
    assert_proven(pool, plan_from_text(model, proposal.text), [batch])


def test_encoder_and_decoder_are_both_cut(pool: Pool) -> None:
    """One row cuts both lists of blocks, encoder and decoder."""
    model = models.bart()
    ids = torch.randint(3, 61, (4, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    proposal = propose(model, batch, {"pp": 2})
    assert "model.encoder.layers, model.decoder.layers  pipeline_split(over=pp)" in proposal.text
    assert_proven(pool, plan_from_text(model, proposal.text), [batch])
