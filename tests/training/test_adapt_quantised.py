"""Tests of `adapt(base=...)`: frozen weights in codes, against a quantisation written by hand."""

from __future__ import annotations

import copy
import gc
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang import create_schedule, deferred_init
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case
from schedlang.passes.simulate.account import account
from schedlang.passes.verify.changed_model import KIND
from schedlang.passes.verify.proof_case import prepare_case
from schedlang.runtime import batch as parts
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.offload import decoded_weights
from schedlang.runtime.storage.codebook import NF4, Codebook
from schedlang.runtime.storage.footprint import Footprint
from schedlang.runtime.storage.quantized_parameters import (
    QuantizedParameter,
    list_quantized,
    stored_tensors,
)
from schedlang.runtime.storage.saved_tensors_slot import outer_pack
from schedlang.runtime.transfer.transfer import transfer
from tests import models
from tests.engine import Threads
from tests.proofs import adamw, assert_near, planned, proven, sequential, sgd, trained
from tests.training.test_adapt import BLOCK, COL, ONE_F, ROW, SPLIT, begun

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(4)]


def quantiles() -> list[float]:
    """The levels of nf4 as the paper makes them: of a normal distribution, on each side of zero."""
    normal, end = torch.distributions.Normal(0.0, 1.0), (1 - 1 / 30 + 1 - 1 / 32) / 2
    sides = [normal.icdf(torch.linspace(end, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8)]
    levels = torch.cat([sides[0], -sides[1], torch.zeros(1, dtype=torch.float64)]).sort().values
    return [float(level) for level in levels / levels.max()]


def test_the_levels_of_nf4() -> None:
    """They are the paper's, which are told in 32 bits."""
    assert list(NF4) == pytest.approx(quantiles(), abs=3e-7)


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
        codes, scales = book.encode(weight)
        found = book.decode(codes, scales, width)
        assert (found.shape, found.dtype) == (weight.shape, dtype)
        assert codes.nbytes + scales.nbytes == book.bytes(rows, width, weight.itemsize)
        assert torch.isfinite(found).all()
        again = book.encode(found)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
        assert torch.equal(book.decode(*again, width), found)


def test_every_bfloat16_scale_and_step() -> None:
    """The narrowest case: 127 steps of every mantissa of 8 bits are found again."""
    scales = torch.arange(128, 256).to(torch.bfloat16)[:, None]
    steps = torch.arange(-127, 128)[None] / 127
    weight = (steps * scales.float()).to(torch.bfloat16)
    book = Codebook("int8", 255)
    codes, found = book.encode(weight)
    assert torch.equal(codes, torch.arange(-127, 128, dtype=torch.int8).expand(128, 255))
    assert torch.equal(book.decode(codes, found, 255), weight)


def test_what_is_no_number_stays_none() -> None:
    """It is not turned into a weight."""
    weight = torch.ones(3, 8)
    weight[0, 1], weight[1, 1] = torch.nan, torch.inf
    for kind in ("int8", "int4", "nf4"):
        found = Codebook(kind, 8).round_rows(weight)
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
    "cast": (lambda: models.llama(2), f"{lora('int8', ', block=4')}cast(bf16)\n{SPLIT}", "tp=2"),
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
    relaxed = "model, dtype" if "cast" in rows else "model"
    report = proven(threads, planned(make(), rows, mesh, relaxed), BATCHES[:2])
    assert "model" in report.equivalence
    assert any(row.kind == KIND for row in report.rows)


def test_codes_of_other_values_are_found(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is made by the same function: the untouched weights tell that it is wrong."""
    plain = Codebook.encode

    def coarser(self: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        few = Codebook("int4", self.block)
        return plain(self, few.decode(*plain(few, rows), rows.shape[1]))

    monkeypatch.setattr(Codebook, "encode", coarser)
    with pytest.raises(AssertionError, match=KIND):
        proven(threads, planned(models.llama(2), lora("int8"), "", "model"), BATCHES[:2])


def test_a_rank_that_decodes_otherwise_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a module computes with is compared, and not what is stored."""
    plain = QuantizedParameter.value

    def coarser(self: Any, dtype: Any = None) -> Tensor:
        return plain(self, dtype) * (1.01 if dtype is not None else 1.0)

    monkeypatch.setattr(QuantizedParameter, "value", coarser)
    with pytest.raises(AssertionError):
        proven(threads, planned(models.llama(2), lora("int8"), "", "model"), BATCHES[:2])


DOWN = "model.layers.1.mlp.down_proj.weight"
FLOATS = (2, 4)  # bytes of one


def lying(plan: Plan) -> tuple[int, int, set[int], set[int]]:
    """On this rank: bytes of parameters as they lie, elements of one weight, and the sizes of what
    lies there between a forward and its backward, and of all that was there in the forward."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    a = program.assembly
    weight = a.parameters[DOWN]
    assert weight.untyped_storage().nbytes() <= 8 and weight.isnan().all()
    assert len(list_quantized(a.parameters.values())) == 14
    size = sum(one.nbytes for one in stored_tensors(a.parameters.values()))
    with Footprint("cpu") as footprint:
        out = a.module.train()(**BATCHES[0])
        gc.collect()
        between = {footprint.blocks[k].now for _, k in footprint._alive.values()}
        seen = {size for _, size in footprint.events}
        out.loss.backward()
    return size, weight.numel(), between, seen


@pytest.mark.parametrize("kind, block", [("int8", 4), ("int4", 4), ("nf4", 4)])
@pytest.mark.parametrize("rows, mesh", [(SPLIT, "tp=2"), (f"cast(bf16)\n{SPLIT}", "tp=2")])
def test_codes_are_all_that_lies_there(
    threads: Threads, kind: str, block: int, rows: str, mesh: str
) -> None:
    """On running ranks: as many bytes as the plan says, at most those of codes and scales; a weight
    has values while its module runs, cast where it is used so, and none for its backward."""
    model = models.llama(2).float()
    relax = "model, dtype" if "cast" in rows else "model"
    plan = planned(model, lora(kind, f", block={block}") + rows, mesh, relax)
    told = account(plan, BATCHES[0]).classes
    bits = 8 if kind == "int8" else 4
    for size, elements, between, seen in threads.run(lying, 2, plan):
        assert [one.parameters for one in told] == [size]
        coded = sum(
            fact.numel // 2
            for name, fact in plan.model.unique_parameters.items()
            if plan.model.coding_of(name)
        )
        rest = sum(
            4 * math.prod(plan.effective_layout(name).local_shape(plan.mesh))
            for name in plan.model.unique_parameters
            if not plan.model.coding_of(name)
        )
        assert size == rest + coded * bits // 8 + coded // block * 4
        assert elements * (2 if "cast" in rows else 4) in seen
        assert not between & {elements * each for each in FLOATS}


@pytest.mark.parametrize("cast, each", [("", 4), ("cast(bf16)\n", 2)])
def test_what_lies_is_found_to_lie(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, cast: str, each: int
) -> None:
    """The test above can fail: a weight that autograd keeps is seen."""
    monkeypatch.setattr(decoded_weights, "_pack", lambda *_: outer_pack())
    rows, relax = lora("int8", ", block=4") + cast + SPLIT, "model, dtype" if cast else "model"
    plan = planned(models.llama(2).float(), rows, "tp=2", relax)
    _, elements, between, _ = threads.run(lying, 2, plan)[0]
    assert each * elements in between


def travelled(one: Case, two: Case, folder: str, model: nn.Module) -> list[dict[str, Tensor]]:
    """States on this rank: trained, saved and loaded, given and read anew, and given whole."""
    program = build(one.plan, BATCHES[0], optimizer=adamw, prepared=one.prepared)
    other = partial(build, two.plan, BATCHES[0], prepared=two.prepared)
    for batch in BATCHES[:2]:
        program.train_step(batch)
    program.save(f"{folder}/saved")
    program.export(f"{folder}/merged", model)
    found = [program.state_dict()]
    for again in (other(optimizer=adamw), other(weights=f"{folder}/saved")):
        if again.optimizer is not None:
            again.load(f"{folder}/saved")
        found.append(again.state_dict())
    given, taken = other(), other()
    given.load_state_dict(found[0])
    transfer(program, taken)
    found += [given.state_dict(), taken.state_dict()]
    losses = [float(one.eval_step(BATCHES[3]).loss) for one in (program, given, taken)]
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2])
    return found


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_values_travel_as_they_are(threads: Threads, tmp_path: Path, kind: str) -> None:
    """A state, a checkpoint, files and a transfer to another layout have the values of the codes,
    bit by bit, under the original's names; what is exported is merged with them."""
    rows = lora(kind, ", block=4")
    plan = begun(f"{rows}{SPLIT}{ONE_F}", "pp=2, tp=2")
    other = begun(f"{rows}{SPLIT}zero(stage=3, over=dp)", "dp=2, tp=2")
    model, cases = (
        plan.model.base.model,
        [prepare_case(Case(one, BATCHES)) for one in (plan, other)],
    )
    for first, *others in threads.run(travelled, 4, *cases, str(tmp_path), model):
        assert set(model.state_dict()) < set(first)
        for state in others:
            assert not [name for name in first if not torch.equal(first[name], state[name])]
        for name in (
            n for n, fact in plan.model.unique_parameters.items() if plan.model.coding_of(fact.name)
        ):
            wanted = by_hand(model.get_parameter(name).detach(), kind, 4)
            assert torch.allclose(first[name], wanted, rtol=1e-7, atol=1e-9), name
    found: Any = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    own = copy.deepcopy(plan.model.model)
    own.load_state_dict(first)
    with torch.no_grad():
        wanted, got = (one.eval()(**BATCHES[1]).logits for one in (own, found))
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-11)


def read(plan: Plan, folder: str) -> dict[str, Tensor]:
    """On this rank: a model without values, that takes those of files."""
    return build(plan, BATCHES[0], weights=folder).state_dict()


def test_a_model_without_values(threads: Threads, tmp_path: Path) -> None:
    """Weights of files are encoded part by part, to the codes of the whole."""
    model = models.llama(2)
    create_schedule(model).build(batch=BATCHES[0]).export(tmp_path / "base", model)
    rows = lora("int4", ", block=4") + SPLIT
    wanted = planned(model, rows, "tp=2", "model").model.model.state_dict()
    bare = planned(deferred_init(models.llama, 2), rows, "tp=2", "model")
    for state in threads.run(read, 2, bare, str(tmp_path / "base")):
        assert not [name for name, value in wanted.items() if not torch.equal(state[name], value)]


@pytest.mark.parametrize(
    "rows, mesh, words",
    [
        (lora("int8", ", block=16") + SPLIT, "tp=2", "would be on two ranks"),
        (lora("int8") + SPLIT, "tp=2", "`block=8`"),
        (lora("int8", ', keep="*.weight"'), "", "would train"),
        (
            lora("int8") + 'lm_head  adapt(lora, keep="*up_proj.weight")',
            "",
            "would train `model.layers.0.mlp.up_proj.weight`",
        ),
        (lora("int8") + "model.layers  offload(parameters)", "", "cannot be offloaded"),
    ],
)
def test_what_cannot_lie_in_codes(rows: str, mesh: str, words: str) -> None:
    """It is refused, with what would be legal."""
    with pytest.raises(Refusal, match="S414") as error:
        build_dry(planned(models.llama(2), rows, mesh, "model"))
    assert words in " ".join(error.value.render().split())


def build_dry(plan: Plan) -> None:
    """All that is looked at before a program is built."""
    prepare(plan, parts.split_batch(BATCHES[0], plan.shares, plan.micro)[0][0].inputs)


def test_numbers_that_make_no_blocks() -> None:
    """A scale is for one element or more, and a block of nothing is a mistake."""
    for words in ("base=int8, block=0", "block=32", "base=int3"):
        with pytest.raises(Refusal, match="S30[34]"):
            planned(models.llama(2), f"{BLOCK}.mlp.up_proj  adapt(lora, {words})", "", "model")


def test_a_compiled_region_runs_eagerly_and_says_so() -> None:
    """No graph holds what is kept as a note: the step is the same, and what is left out is told."""
    losses = []
    for rows in (f"{BLOCK}.mlp  fuse()\n", ""):
        plan = planned(models.llama(2).float(), lora("int8", ", block=4") + rows, "", "model")
        program = build(plan, BATCHES[0], optimizer=adamw)
        losses.append([float(program.train_step(batch)) for batch in BATCHES])
        said = [str(one) for one in declined_in(program.assembly.module)]
        assert bool(said) == bool(rows) and all("is quantised" in one for one in said)
    assert losses[0] == losses[1]
