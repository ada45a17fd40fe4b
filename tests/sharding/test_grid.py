"""2-D, 2.5-D and 3-D tensor parallelism (`grid`): equal to the original, with the papers' costs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.partition.staging import local_skeleton
from schedlang.passes.simulate.account import account
from schedlang.runtime.comm.collectives import Group
from tests import models
from tests.engine import Threads
from tests.models import SIZES, VOCAB
from tests.proofs import (
    assert_near,
    assert_proven,
    make_plan,
    refusal_text,
    static_holds,
    train_on_ranks,
    train_sequential,
)

SUMMA, CUBE, CUBE_BACK = "summa, over=(r, c)", "cube, over=(x, y, z)", "cube, over=(x, z, y)"


def gpt2() -> nn.Module:
    """One layer with dropout; embedding and head tied."""
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    return models.hf(
        "GPT2LMHeadModel",
        n_embd=16,
        n_layer=1,
        n_head=4,
        n_positions=16,
        loss_type="ForCausalLM",
        **rates,
        **SIZES,
    )


def llama(keys: int) -> nn.Module:
    """One layer, embedding and head apart."""
    return models.llama_like("LlamaForCausalLM", num_hidden_layers=1, num_key_value_heads=keys)


def gpt2_rows(forward_row: str, back_row: str) -> str:
    """Rows that shard every module of GPT-2; the second argument is for output projections."""
    head = forward_row.replace(",", ", output=S(vocab),", 1)
    return f"""
      transformer.wte  pad(vocab, multiple=8)
      transformer.{{wte,wpe,ln_f}}  grid({forward_row})
      at transformer.h.* {{
        attn.c_attn  grid({forward_row.replace(",", ", blocks=3,", 1)})
        {{ln_1,ln_2}}  grid({forward_row})
        mlp.c_fc  grid({forward_row})
        {{attn,mlp}}.c_proj  grid({back_row})
      }}
      lm_head  grid({head})
    """


def llama_rows(forward_row: str, back_row: str) -> str:
    """Rows that shard every module of Llama."""
    return f"""
      model.embed_tokens  pad(vocab, multiple=8)
      lm_head  pad(out, multiple=8)
      model.{{embed_tokens,norm}}  grid({forward_row})
      at model.layers.* {{
        {{input_layernorm,post_attention_layernorm}}  grid({forward_row})
        self_attn.{{q,k,v}}_proj  grid({forward_row})
        mlp.{{gate,up}}_proj  grid({forward_row})
        self_attn.o_proj  grid({back_row})
        mlp.down_proj  grid({back_row})
      }}
      lm_head  grid({forward_row.replace(",", ", output=S(vocab),", 1)})
    """


def token_batch(seed: int, rows: int) -> dict[str, Tensor]:
    """Token ids; for odd numbers of rows some labels are ignored and a row is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, 6), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if rows % 2:
        labels[0, 2:], mask[0, 4:] = -100, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.deep
def test_gpt2_on_a_grid_is_proven(threads: Threads) -> None:
    """Everything from the embedding to the tied head in 2 x 2 parts, with dropout: outputs, loss,
    gradients, three steps and saved state equal the original's, and all static proofs hold."""
    plan = make_plan(gpt2(), gpt2_rows(SUMMA, SUMMA) + "zero(stage=0, over=r)", "r=2, c=2")
    batches = [token_batch(0, 5), token_batch(1, 4)]
    report = assert_proven(threads, plan, batches)
    assert report.ok
    static_holds(plan, batches[0])


def assert_trains_equal(threads: Threads, plan: Plan, model: nn.Module, rows: int) -> None:
    """Assert that two steps, on odd and even numbers of rows, equal those of a plain loop."""
    batches = [token_batch(0, rows + 1), token_batch(1, rows)]
    assert_near(
        train_on_ranks(threads, plan, batches, seed=3), train_sequential(model, batches, seed=3)
    )
    static_holds(plan, batches[0])


def test_replicas_of_a_grid_train_llama(threads: Threads) -> None:
    """2.5-D: two grids of 2 x 2 see different rows; kv heads are fewer than query heads."""
    rows = llama_rows(SUMMA, SUMMA) + "zero(stage=0, over=(d, r))"
    assert_trains_equal(threads, make_plan(llama(2), rows, "d=2, r=2, c=2"), llama(2), 4)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.deep)])
def test_a_cube_trains(threads: Threads, name: str) -> None:
    """3-D: eight ranks, each with an eighth of every weight and activation."""
    model = gpt2() if name == "gpt2" else llama(4)
    rows = gpt2_rows(CUBE, CUBE_BACK) if name == "gpt2" else llama_rows(CUBE, CUBE_BACK)
    assert_trains_equal(
        threads, make_plan(model, rows + "zero(stage=0, over=x)", "x=2, y=2, z=2"), model, 2
    )


class Toy(nn.Module):
    """An MLP with a shortcut, between an embedding and a head."""

    def __init__(self, width: int = 12, hidden: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        logits = self.head(h + self.down(torch.tanh(self.up(h))))
        return {"loss": F.cross_entropy(logits, labels), "out": logits}


def points(seed: int, rows: int) -> dict[str, Tensor]:
    """Points with labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(3, (rows,), generator=generator)}


PAIR = "up  grid({0})\ndown  grid({1})\n"


@pytest.mark.parametrize(
    ("mesh", "there", "back", "data"),
    [
        ("r=2, c=3", SUMMA, SUMMA, "r"),  # panels of neither side alone
        ("c=2, r=3", SUMMA, SUMMA, "r"),  # columns named first
        ("r=1, c=2", SUMMA, SUMMA, "r"),
        ("r=2, c=1", SUMMA, SUMMA, "r"),
        ("z=2, x=1, y=2", CUBE, CUBE_BACK, "x"),  # another order of the mesh
        ("x=2, y=1, z=2", CUBE, CUBE_BACK, "x"),
        ("x=2, y=2, z=1", CUBE, CUBE_BACK, "x"),
        ("x=2, y=1, z=3", CUBE, CUBE_BACK, "x"),
    ],
)
def test_sides_need_not_be_equal(
    threads: Threads, mesh: str, there: str, back: str, data: str
) -> None:
    """Grids and cubes of unequal sides, or flat ones, in any order of the mesh's axes, equal the
    original, of rows that do not divide."""
    last_row = back.replace(",", ", output=R,", 1)
    rows = PAIR.format(there, last_row) + f"zero(stage=0, over={data})"
    plan, batches = make_plan(Toy().double(), rows, mesh), [points(0, 7), points(1, 6)]
    assert_near(train_on_ranks(threads, plan, batches), train_sequential(Toy().double(), batches))
    static_holds(plan, batches[0])


# -- what is sent, and what is kept ---------------------------------------------------------------

# bytes that a rank receives of a tensor of one byte, as rings send it
SHARE = {
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
}
WIDTH = 36


class Squares(nn.Module):
    """Square layers without biases; with a square batch all matrices have one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(torch.tanh(self.first(x)))))


def squares(rows: str, mesh: str) -> tuple[Plan, dict[str, Tensor]]:
    """The plan of Squares, and its batch: a square."""
    return make_plan(Squares().double(), rows, mesh), {"x": torch.zeros(WIDTH, WIDTH).double()}


def received_share(plan: Plan, batch: dict[str, Tensor], *sites: str) -> float:
    """What a rank receives for some modules in forward and backward, in units of one matrix."""
    collectives = account(plan, batch, mean_loss).collectives
    received = sum(
        collective.count
        * collective.bytes
        * SHARE[collective.kind](plan.mesh.size(collective.axes))
        for collective in collectives
        if collective.fqn in sites and collective.phase != "step"
    )
    return received / (WIDTH * WIDTH * 8)


def mean_loss(output: Any, batch: Any) -> Tensor:
    """A loss: the mean of the output."""
    return output.mean()


TRUNK = "first  grid({0})\nup  grid({1})\ndown  grid({2})\nzero(stage=0, over={3})"


def grid_of(q: int, d: int = 1) -> tuple[Plan, dict[str, Tensor]]:
    """Squares on d grids of q x q."""
    data = "(d, r)" if d > 1 else "r"
    rows = TRUNK.format(SUMMA, SUMMA, SUMMA.replace(",", ", output=R,", 1), data)
    return squares(rows, f"d={d}, r={q}, c={q}" if d > 1 else f"r={q}, c={q}")


def cube_of(q: int) -> tuple[Plan, dict[str, Tensor]]:
    """Squares on a cube."""
    last_row = CUBE.replace(",", ", output=R,", 1)
    return squares(TRUNK.format(CUBE, CUBE_BACK, last_row, "x"), f"x={q}, y={q}, z={q}")


@pytest.mark.parametrize(("q", "d"), [(2, 1), (4, 1), (2, 2), (2, 3)])
def test_a_grid_sends_what_the_papers_say(q: int, d: int) -> None:
    """Per layer 6 (q-1)/q of a block row of a matrix in 2-D, 3 (q-1)(d+1)/(d q) in 2.5-D."""
    published = 3 * (q - 1) * (d + 1) / (d * q)
    assert d > 1 or published == 6 * (q - 1) / q
    plan, batch = grid_of(q, d)
    assert received_share(plan, batch, "up") == pytest.approx(published / q)


@pytest.mark.parametrize("q", [2, 3])
def test_a_cube_sends_what_the_papers_say(q: int) -> None:
    """Per layer 6 (q-1)/q**3 of a matrix, and 2 (q-1)/q**3 to gather both factors once more in
    backward instead of keeping them whole."""
    plan, batch = cube_of(q)
    assert received_share(plan, batch, "up") == pytest.approx((6 + 2) * (q - 1) / q**3)


def test_one_dimension_sends_more(threads: Threads) -> None:
    """A pair of Megatron's layers sends 2 x 2 (P-1)/P of a whole activation: 1-D."""
    plan, batch = squares("first  shard(col, over=tp)\nup  shard(row, over=tp)", "tp=4")
    assert received_share(plan, batch, "first", "up") == pytest.approx(
        2 * 3 / 4
    )  # first needs no gradient
    plan, batch = squares("up  shard(col, over=tp)\ndown  shard(row, over=tp)", "tp=4")
    assert received_share(plan, batch, "up", "down") == pytest.approx(2 * 2 * 3 / 4)


@pytest.mark.parametrize(
    ("make", "share", "rows"),
    [(lambda: grid_of(2), 4, 2), (lambda: grid_of(2, 2), 4, 4), (lambda: cube_of(2), 8, 2)],
)
def test_a_rank_keeps_its_parts_only(make: Any, share: int, rows: int) -> None:
    """Weights take 1/q**2 of their bytes (1/q**3 on a cube), and what a layer keeps for backward
    is its part of input and weight: 1/q**2 of an activation, of the rows that its replica sees."""
    plan, batch = make()
    matrix = WIDTH * WIDTH
    (elements,) = {group.elements for group in account(plan, batch, mean_loss).classes or ()}
    assert elements == 3 * matrix // share
    sample = {"x": batch["x"][: WIDTH // rows].to("meta")}
    traced = prepare(plan, {"x": batch["x"][: WIDTH // rows]}, mean_loss, None).traced
    model, saved = local_skeleton(plan, traced), Counter[str]()
    parameter_ids = {id(parameter) for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        saved["weights" if id(tensor) in parameter_ids else "activations"] += tensor.numel()
        return tensor

    inner = model.up.forward
    full_input = sample["x"].new_zeros(WIDTH // rows, math.isqrt(matrix)).requires_grad_()

    def noted(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            output: Tensor = inner(x)
        return output

    model.up.forward = noted
    model(**sample)
    assert full_input.numel() == matrix // rows
    assert saved["activations"] == matrix // rows // (share // 2)
    assert saved["weights"] in (0, matrix // share)


@pytest.mark.parametrize("make", [lambda: grid_of(2), lambda: cube_of(2)])
def test_each_half_of_a_backward_makes_its_own(make: Any) -> None:
    """The gradient of a layer's input, and that of its weight, take two products each (with the
    next layer's); a forward takes three."""
    plan, batch = make()
    sample = {"x": batch["x"][: WIDTH // 2].to("meta")}
    model, up_inputs = (
        local_skeleton(plan, prepare(plan, sample, mean_loss, None).traced),
        list[Tensor](),
    )
    model.up.register_forward_pre_hook(lambda _, args: up_inputs.append(args[0]))
    with FlopCounterMode(display=False) as forward:
        loss = model(**sample).mean()
    for leaf in (*up_inputs, model.up.weight):
        with FlopCounterMode(display=False) as half:
            torch.autograd.grad(loss, leaf, retain_graph=True)
        assert 3 * half.get_total_flops() == 2 * forward.get_total_flops() > 0


# -- refusals -------------------------------------------------------------------------------------

MESH = "r=2, c=2, x=1, y=1"


@pytest.mark.parametrize(
    ("rows", "mesh", "said"),
    [
        ("up  grid(summa, over=r)", MESH, "[S304]: `summa` needs 2 axes, not 1"),
        ("up  grid(summa, over=(r, r))", MESH, "[S304]: `summa` needs 2 axes, not 2"),
        ("up  grid(cube, over=(r, c))", MESH, "name them all: `over=(x, y, z)`"),
        ("up  grid(summa, over=(r, c))", "r=2, c=5", "[S402]: cannot split 12 evenly 10 ways"),
        (
            "up  grid(summa, over=(r, c))",
            "r=2, c=5",
            "`r` and `c` may each be 2 or 3 or 4 or 6 or 12",
        ),
        ("up  grid(summa, blocks=[5, 4], over=(r, c))", MESH, "[S406]"),
        (f"up  grid(summa, blocks={10**15}, over=(r, c))", MESH, "[S406]"),
        ("up  grid(summa, output=S(seq), over=(r, c))", MESH, "[S307]"),
        ("grid(summa, over=(r, c))", MESH, "[S401]"),
        ("up  shard(col, over=c)\nup  grid(summa, over=(r, c))", MESH, "[S504]"),
    ],
)
def test_refusals_say_what_fits(rows: str, mesh: str, said: str) -> None:
    """What a grid cannot do is refused with what it can."""
    assert said in refusal_text(Toy().double(), rows, mesh)


def test_rows_of_a_grid_have_to_split_the_batch() -> None:
    """Without its `zero` row a grid would sum the same gradient on every row of it."""
    text = refusal_text(Toy().double(), PAIR.format(SUMMA, SUMMA), "r=2, c=2", points(0, 4))
    assert "[S510]: no row splits the batch over `r`, for the grid of `up`" in text
    assert "add `zero(stage=0, over=r)` at the end" in text


def test_columns_of_a_grid_see_the_same_rows() -> None:
    """An axis cannot split the batch and the hidden dim."""
    rows = TRUNK.format(SUMMA, SUMMA, SUMMA, "(r, c)")
    text = refusal_text(Squares().double(), rows, "r=2, c=2", {"x": torch.zeros(4, WIDTH).double()})
    assert "[S510]: `c` cannot shard both the batch and the hidden dim of `first`" in text
    assert "leave `c` out of `zero`" in text


def test_a_cube_names_its_axes_in_turn() -> None:
    """A layer that is given the hidden dim in the order of its own results says what to swap."""
    rows = PAIR.format(CUBE, CUBE) + "zero(stage=0, over=x)"
    text = refusal_text(Toy().double(), rows, "x=1, y=2, z=2", points(0, 4))
    assert "in the order of its own outputs" in text
    assert "swap the last two axes of its `over`" in text


def test_a_group_counts_in_the_order_named(threads: Threads) -> None:
    """Shards over `z.y` are ordered with z slowest, whatever the order of the mesh."""
    assert threads.run(_check_group_order, 6) == [True] * 6


def _check_group_order() -> bool:
    from schedlang.ir.mesh import Mesh
    from schedlang.runtime.comm import collectives
    from schedlang.runtime.comm.collectives import RankGroups

    ranks = RankGroups(Mesh((("y", 2), ("z", 3))))
    group: Group = ranks.group("z.y")
    y, z = divmod(ranks.rank, 3)
    full = torch.arange(12.0).view(2, 6)
    part = collectives.local_shard(full, 1, group)
    assert torch.equal(part, full[:, [2 * z + y]])
    for dim in (0, 1):
        local = collectives.local_shard(full.t() if dim == 0 else full, dim, group)
        gathered = collectives.all_gather(local, dim, group)
        summed = collectives.reduce_scatter(gathered, dim, group)
        assert torch.equal(summed, 6 * local)
        assert torch.equal(gathered, full.t() if dim == 0 else full)
    return True
