"""Tests of `adapt(base=...)`: frozen weights in codes, against a quantisation written by hand."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.plan import Plan
from schedlang.passes.verify.changed import KIND
from schedlang.runtime.storage.codebook import NF4, Codebook
from schedlang.runtime.storage.coded import Coded
from tests import models
from tests.engine import Threads
from tests.proofs import adamw, assert_near, planned, proven, sequential, sgd, trained

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(4)]
BLOCK = "model.layers.*"
COL = [f"{BLOCK}.self_attn.{name}_proj" for name in "qkv"]
COL += [f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.mlp.up_proj"]
ROW = [f"{BLOCK}.self_attn.o_proj", f"{BLOCK}.mlp.down_proj"]
SPLIT = f"{', '.join(COL)}  shard(col, over=tp)\n{', '.join(ROW)}  shard(row, over=tp)\n"
ONE_F = 'model.layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


def quantiles() -> list[float]:
    """The levels of nf4 as the paper makes them: of a normal distribution, on each side of zero."""
    normal, end = torch.distributions.Normal(0.0, 1.0), (1 - 1 / 30 + 1 - 1 / 32) / 2
    sides = [normal.icdf(torch.linspace(end, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8)]
    levels = torch.cat([sides[0], -sides[1], torch.zeros(1, dtype=torch.float64)]).sort().values
    return [float(level) for level in levels / levels.max()]


def test_the_levels_of_nf4() -> None:
    """They are the paper's, which are told in 32 bits."""
    assert list(NF4) == pytest.approx(quantiles(), abs=1e-7)


def by_hand(weight: Tensor, kind: str, block: int) -> Tensor:
    """A weight [out, in] quantised element by element, in plain Python."""
    made = weight.clone()
    steps = {"int8": 127, "int4": 7}.get(kind)
    levels = NF4 if steps is None else [k / steps for k in range(-steps, steps + 1)]
    for row in made:
        for part in row.split(block):
            most = max(abs(float(x)) for x in part)
            for k, x in enumerate(part.tolist()):
                part[k] = min(levels, key=lambda level: abs(level * most - x)) * most
    return made


class Adapter(nn.Module):
    """A frozen layer with a low-rank one beside it: nothing is shared with the library."""

    def __init__(self, weight: Tensor, bias: Any, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias
        self.lora_A, self.lora_B = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.scale * (
            x @ self.lora_A.T @ self.lora_B.T
        )


def quantised_by_hand(plan: Plan, scale: float, kind: str, block: int) -> nn.Module:
    """The untouched model of a plan, its adapted layers quantised and adapted by hand."""
    twin = copy.deepcopy(plan.model.base.model).requires_grad_(False)
    found = dict(plan.model.model.named_parameters())
    for fqn, module in list(twin.named_modules()):
        if f"{fqn}.lora_A" in found:
            a, b = (found[f"{fqn}.lora_{name}"].detach() for name in "AB")
            owner, _, name = fqn.rpartition(".")
            weight = by_hand(module.weight.detach(), kind, block)  # type: ignore[arg-type]
            setattr(twin.get_submodule(owner), name, Adapter(weight, module.bias, a, b, scale))
    return twin


def begun(rows: str, mesh: str = "", model: nn.Module | None = None) -> Plan:
    """A plan in float64 whose B is not zero."""
    plan = planned((model or models.llama(2)).double(), rows, mesh, "model")
    return replace(plan, model=plan.model.like(plan.model.base.model, True))


def lora(base: str, more: str = "") -> str:
    return f"{', '.join(COL + ROW)}  adapt(lora, rank=4, alpha=6, base={base}{more})\n"


@pytest.mark.parametrize("kind, block", [("int8", 4), ("int4", 4), ("nf4", 2)])
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("", ""),
        (SPLIT, "tp=2"),
        (f"{SPLIT}zero(stage=3, over=dp)", "dp=2, tp=2"),
        (f"{SPLIT}{ONE_F}", "pp=2, tp=2"),
    ],
)
def test_it_trains_as_one_written_by_hand(
    threads: Threads, kind: str, block: int, rows: str, mesh: str
) -> None:
    """Losses, gradients, four steps and states, on 1, 2 and 4 ranks; also what is frozen."""
    plan = begun(lora(kind, f", block={block}") + rows, mesh)
    optimizer = sgd if kind == "int4" else adamw
    wanted = sequential(quantised_by_hand(plan, 1.5, kind, block), BATCHES, optimizer)
    seen = trained(threads, plan, BATCHES, optimizer)
    assert_near(seen, wanted)
    assert sum("grad 0" in name for name in seen) == 28
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(seen[f"state {name}"], plan.model.base.model.state_dict()[name])


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_what_is_on_the_grid_stays_there(kind: str, dtype: torch.dtype) -> None:
    """Codes of decoded values are the same codes and scales, bit by bit, from the least number of
    a dtype to the greatest; rows that no block divides; blocks longer than a row; no rows."""
    least, most = (math.log10(end) for end in (torch.finfo(dtype).tiny, torch.finfo(dtype).max))
    sizes = torch.logspace(max(least - 3, -300), min(most - 1, 300), 97, dtype=torch.float64)
    for (rows, width), block in (((97, 200), 64), ((97, 7), 1000), ((97, 33), 1), ((0, 8), 64)):
        torch.manual_seed(block)
        drawn = torch.randn(rows, width, dtype=torch.float64).clamp(-5, 5)
        weight = (drawn * sizes[:rows, None]).to(dtype)
        book = Codebook(kind, block)
        codes, scales = book.encoded(weight)
        found = book.decoded(codes, scales, width)
        assert (found.shape, found.dtype) == (weight.shape, dtype)
        assert codes.nbytes + scales.nbytes == book.bytes(rows, width, weight.itemsize)
        assert torch.isfinite(found).all()
        again = book.encoded(found)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
        assert torch.equal(book.decoded(*again, width), found)


def test_every_bfloat16_scale_and_step() -> None:
    """The narrowest case: 127 steps of every mantissa of 8 bits are found again."""
    scales = torch.arange(128, 256).to(torch.bfloat16)[:, None]
    steps = torch.arange(-127, 128)[None] / 127
    weight = (steps * scales.float()).to(torch.bfloat16)
    book = Codebook("int8", 255)
    codes, found = book.encoded(weight)
    assert torch.equal(codes, torch.arange(-127, 128, dtype=torch.int8).expand(128, 255))
    assert torch.equal(book.decoded(codes, found, 255), weight)


def test_what_is_no_number_stays_none() -> None:
    """It is not turned into a weight."""
    weight = torch.ones(3, 8)
    weight[0, 1], weight[1, 1] = torch.nan, torch.inf
    for kind in ("int8", "int4", "nf4"):
        found = Codebook(kind, 8).rounded(weight)
        assert not found[:2].isfinite().all(1).any() and found[2].isfinite().all()


GPT2 = "transformer.h.*."
CASES = {
    "q, k, v in one": (
        lambda: models.gpt2(2),
        f"{GPT2}attn.c_attn, {GPT2}attn.c_proj  adapt(lora, rank=4, base=int8, block=8)\n"
        f"{GPT2}attn.c_attn  shard(col, blocks=3, over=tp)\n{GPT2}attn.c_proj  shard(row, over=tp)",
        "tp=2",
    ),
    "a head": (
        lambda: models.gpt2(2, tied=False),
        "lm_head  adapt(dora, rank=4, base=nf4)\nlm_head  pad(out, multiple=4)\n"
        "lm_head  shard(vocab, over=tp)\nzero(stage=1, over=dp)",
        "dp=2, tp=2",
    ),
    "3-D, computed again": (
        lambda: models.llama(2),
        f"{lora('nf4', ', block=4')}{SPLIT}{BLOCK}  checkpoint()\n"
        "model.layers  pipeline_split(over=pp)\nzero(stage=2, over=dp)\n"
        'pipeline(order="1F1B", micro=2)',
        "dp=2, pp=2, tp=2",
    ),
    "halves of a backward": (
        lambda: models.llama(2),
        f'{lora("int4")}model.layers  pipeline_split(over=pp)\npipeline(order="ZB-H1", micro=2)',
        "pp=2",
    ),
    "shared heads": (
        lambda: models.llama(2, keys=2),
        f"{lora('int8', ', block=4')}{BLOCK}.self_attn.q_proj  shard(col, over=tp)\n"
        f"{BLOCK}.self_attn.k_proj, {BLOCK}.self_attn.v_proj"
        "  shard(col, heads=2, uneven=replicate, over=tp)\n"
        f"{BLOCK}.self_attn.o_proj  shard(row, over=tp)",
        "tp=4",
    ),
    "cast": (
        lambda: models.llama(2),
        f"{lora('int8', ', block=4')}{SPLIT}cast(bf16)",
        "tp=2",
    ),
    "sequences, dropout": (
        lambda: models.llama(2),
        f"{lora('int4', ', block=4, dropout=0.25')}"
        f"{SPLIT.replace('shard(row,', 'shard(row, output=S(seq),')}"
        "model.norm  shard(output=R, over=tp)",
        "tp=2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_proven(threads: Threads, case: str) -> None:
    """Under every kind of split, order and recomputation, and with casts."""
    make, rows, mesh = CASES[case]
    report = proven(threads, planned(make(), rows, mesh, "model"), BATCHES[:2])
    assert "model" in report.equivalence
    assert any(row.kind == KIND for row in report.rows)


def test_codes_of_other_values_are_found(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is made by the same function: the untouched weights tell that it is wrong."""
    plain = Codebook.decoded

    def shifted(self: Any, codes: Tensor, scales: Tensor, inputs: int) -> Tensor:
        return plain(self, codes.roll(1, 0), scales, inputs)

    monkeypatch.setattr(Codebook, "decoded", shifted)
    with pytest.raises(AssertionError, match=KIND):
        proven(threads, planned(models.llama(2), lora("int8"), "", "model"), BATCHES[:2])


def test_a_rank_that_decodes_otherwise_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a module computes with is compared, and not what is stored."""
    plain = Coded.value

    def coarser(self: Any, dtype: Any = None) -> Tensor:
        return plain(self, dtype) * (1.01 if dtype is not None else 1.0)

    monkeypatch.setattr(Coded, "value", coarser)
    with pytest.raises(AssertionError):
        proven(threads, planned(models.llama(2), lora("int8"), "", "model"), BATCHES[:2])
