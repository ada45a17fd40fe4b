"""propose: schedules for models that it has never seen, which then plan and verify."""

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
from tests.proofs import proven
from tests.survey import ready

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


def tiny(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = ready(kind, 2)
    rows = {name: torch.cat([value] * 4) for name, value in batch.items()}
    return model, {**rows, "attention_mask": torch.ones_like(rows["input_ids"])}


def planned(model: nn.Module, text: str) -> Plan:
    return Schedule(model, parse(Source("proposed.sched", text)), Settings()).plan()


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(k, marks=pytest.mark.deep) for k in MORE)])
def test_plans(kind: str) -> None:
    """What is proposed for a model of transformers is canonical, and plans as it stands."""
    model, batch = tiny(kind)
    found = propose(model, batch, SPLIT)
    assert fmt(Source("proposed.sched", found.text)) == found.text
    plan = planned(model, found.text)
    assert account(plan, batch).collectives
    split = sum(
        fact.numel
        for name, fact in plan.model.unique_parameters.items()
        if plan.effective_layout(name).splits
    )
    assert split > 0.5 * plan.model.numel("")


# -- a model that no library knows -----------------------------------------------------------------


class Odd(nn.Module):
    """A block whose names say nothing: packed heads, a gate, an embedding that scales nothing."""

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
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.b(seen.transpose(1, 2).flatten(2))
        left, right = self.c(self.n2(x)).chunk(2, -1)
        return x + self.d(F.silu(left) * right)


class Unknown(nn.Module):
    """A language model of such blocks, its table tied to its output layer, of 31 rows."""

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


def words(seed: int, rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 31, (rows, 6), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


@pytest.mark.parametrize("packed", ["parts", "heads"])
def test_an_unknown_model(packed: str) -> None:
    """Packed weights, gates, ties and rows that do not divide are understood from one forward."""
    found = propose(Unknown(packed), words(0), SPLIT)
    said = " ".join(found.text.split())
    assert f"a shard(col, {'blocks=3, ' * (packed == 'parts')}over=tp)" in said
    assert "c shard(col, blocks=2, over=tp)" in said
    assert "words  pad(vocab, multiple=2)" in found.text
    assert "out  " in found.text and "logits stay split" in found.text
    assert "4 blocks of stack" in found.text
    assert found.notes == ()


def test_an_oddly_packed_model() -> None:
    """Columns that do not lie side by side are gathered, and the reason is said."""
    found = propose(Unknown("odd"), words(0), {"tp": 2})
    assert "a shard(col, output=R, over=tp)" in " ".join(found.text.split())
    assert any(note.startswith("gathered: stack.*.a: ") for note in found.notes)


def test_proposals_verify(pool: Pool) -> None:
    """A proposed schedule for an unknown model equals the model, in gradients and after steps."""
    model = Unknown().double()
    found = propose(model, words(0), {"pp": 2, "tp": 2})
    proven(pool, planned(model, found.text), [words(0), words(1), words(2)])


@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
def test_other_axes(mesh: dict[str, int]) -> None:
    """Experts, sliced parameters and sequences have axes of their own."""
    model, batch = tiny("mixtral" if "ep" in mesh else "llama")
    found = propose(model, batch, mesh)
    for axis in mesh:
        assert f"over={axis}" in found.text or "over=(dp, ep)" in found.text
    assert account(planned(model, found.text), batch).classes


def test_what_runs_on_no_part_of_its_tokens_is_not_split_by_them() -> None:
    """BART counts positions from shapes: its sequences are not split where that would be refused,
    and the reason names the module."""
    with pytest.raises(Refusal) as raised:
        propose(models.bart(), models.tokens(4, 8), {"cp": 2})
    said = raised.value.render()
    assert "S212" in said and "cannot be split by tokens" in said
    assert "`model.decoder.embed_tokens` computes a token differently" in said


def test_whole_weights_are_said() -> None:
    """A table of positions is large and is not split, so a note says it."""
    model, batch = tiny("gpt2")
    found = propose(model, batch, {"tp": 2})
    assert found.notes == ("replicated: transformer.wpe: a small table",)


def test_fewest() -> None:
    """As few layers as have all kinds next to all their neighbours, and fill the stages."""
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


def squared(output: torch.Tensor, batch: object) -> torch.Tensor:
    """A loss of any output."""
    return output.square().mean()


class Linear(nn.Module):
    """Called as torch's own, and none: its weight lies the other way round."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, out) / wide)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Embedding(Linear):
    """One, too: of a code for each row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.one_hot(x, len(self.weight)).to(self.weight))


class Judged(nn.Module):
    """A generator, and a discriminator that judges what it makes and what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        made = self.make(z)
        return (self.judge(real) - self.judge(made)).sigmoid().mean() + made.square().mean()


def test_a_list_that_is_walked_twice(pool: Pool) -> None:
    """It stays whole in a stage, and the other list is cut; nothing else to cut is refused."""
    model, made = Judged().double(), torch.Generator().manual_seed(0)
    batch = {key: torch.randn(8, 4, generator=made).double() for key in ("z", "real")}
    found = propose(model, batch, {"pp": 2})
    assert "make.2  pipeline_split(over=pp)" in found.text
    proven(pool, planned(model, found.text), [batch])
    with pytest.raises(Refusal, match="S601.*`judge.0` is called 2 times"):
        units_of(model, batch, ["judge.2"])
    alone = Judged().double()
    alone.make = nn.Sequential(nn.Linear(4, 4)).double()
    with pytest.raises(Refusal, match="S212") as caught:
        propose(alone, batch, {"pp": 2})
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
    """A temperature, as contrastive models have, is in nobody's way."""
    model = Scaled().double()
    batch = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double()}
    found = propose(model, batch, {"dp": 2, "tp": 2})
    assert "shard(col, over=tp)" in found.text
    proven(pool, planned(model, found.text), [batch])


class Namesakes(nn.Module):
    """Modules of its own under torch's names, and a pair of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(12, 16), Embedding(12, 16)
        self.lower = Linear(16, 8)
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), Linear(8, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lower(self.table(x) + self.read(x))
        return F.cross_entropy(self.head(self.down(self.up(h).relu())), y)


def test_namesakes(pool: Pool) -> None:
    """Modules that are called as torch's are left as they are, and those of torch are split."""
    model, made = Namesakes().double(), torch.Generator().manual_seed(0)
    batch = {key: torch.randint(12, (8,), generator=made) for key in ("x", "y")}
    found = propose(model, batch, {"dp": 2, "tp": 2})
    text = found.text.partition("# replicated")[0]
    assert "up     shard(col, over=tp)" in text and "table  shard(vocab, over=tp)" in text
    assert not any(name in text for name in ("lower", "read", "head"))
    proven(pool, planned(model, found.text), [batch])


def test_nothing_to_split() -> None:
    """A model without two projections in a row is refused for a tensor axis, with the reasons."""
    with pytest.raises(Refusal, match=r"S212(.|\n)*`tp=1`"):
        propose(nn.Linear(2, 2), {"input": torch.ones(4, 2)}, {"tp": 2}, squared)


def test_a_large_batch_is_cut() -> None:
    """Rows of a real step, whose masks are too large to be followed at once, have stages, too."""
    model, _ = tiny("llama")
    ids = torch.zeros(64, 8192, dtype=torch.long)
    made = propose(model, {"input_ids": ids, "labels": ids}, {"pp": 2})
    assert "pipeline_split(over=pp)" in made.text


def test_no_blocks_to_cut() -> None:
    """A model without a list of blocks is refused for a pipeline."""
    with pytest.raises(Refusal, match=r"S212(.|\n)*no list of blocks"):
        propose(nn.Linear(2, 2), {"input": torch.ones(4, 2)}, {"pp": 2}, squared)


def test_too_few_rows() -> None:
    """A batch with fewer rows than ranks is refused as `plan` would."""
    with pytest.raises(Refusal, match="S606"):
        propose(Unknown(), words(0, rows=2), {"dp": 4})


class Sharing(nn.Module):
    """Attention whose later layers take keys and values of an earlier one."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        if own:
            self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        heads = (*x.shape[:2], -1, 4)
        if hasattr(self, "k_proj"):
            kept = tuple(f(x).view(heads).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        q = self.q_proj(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, kept[0], kept[1])
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2)), *kept


class Adapted(nn.Module):
    """A layer; every second one has a list of small pairs beside it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.attn = Sharing(place < 2)
        if place % 2:
            self.side = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)) for _ in range(2)
            )

    def forward(self, x: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        x, *more = self.attn(x, *kept)
        for pair in getattr(self, "side", ()):
            x = x + pair(x)
        return x, *more


class Uneven(nn.Module):
    """Layers of one class that do not all have the same children."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(place) for place in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.layers:
            x, *kept = layer(x, *kept)
        return x.square().mean()


def test_children_that_only_some_layers_have(pool: Pool) -> None:
    """Rows name the layers that have what they act on, also where a list lies inside of these."""
    model = Uneven().double()
    batch = {"x": torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(0)).double()}
    found = propose(model, batch, {"dp": 2, "tp": 2})
    assert "layers[0:2].attn.{k,v}_proj  shard(col, over=tp)" in found.text, found.text
    assert "at layers[1, 3].side.* {" in found.text, found.text
    proven(pool, planned(model, found.text), [batch])


def test_encoder_and_decoder_are_both_cut(pool: Pool) -> None:
    """One row cuts all lists of blocks: with the decoder's alone the encoder is in one stage."""
    model = models.bart()
    ids = torch.randint(3, 61, (4, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    found = propose(model, batch, {"pp": 2})
    assert "model.encoder.layers, model.decoder.layers  pipeline_split(over=pp)" in found.text
    proven(pool, planned(model, found.text), [batch])
