"""Quantized bases (`adapt(base=...)`): weights stored as codes, against code written by hand."""

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
from tests.proofs import (
    adamw,
    assert_near,
    assert_proven,
    make_plan,
    sgd,
    train_on_ranks,
    train_sequential,
)
from tests.training.test_adapt import BLOCK, COLUMN, ROW, SPLIT, STAGES, adapter_plan

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(4)]


def quantiles() -> list[float]:
    """Return the levels of nf4 as the paper makes them: quantiles of a normal distribution, on each
    side of zero."""
    normal, end = torch.distributions.Normal(0.0, 1.0), (1 - 1 / 30 + 1 - 1 / 32) / 2
    sides = [normal.icdf(torch.linspace(end, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8)]
    levels = torch.cat([sides[0], -sides[1], torch.zeros(1, dtype=torch.float64)]).sort().values
    return [float(level) for level in levels / levels.max()]


def test_the_levels_of_nf4() -> None:
    """The levels equal those of the paper, which are printed in 32 bits."""
    assert list(NF4) == pytest.approx(quantiles(), abs=3e-7)


def quantize_by_hand(weight: Tensor, kind: str, block: int) -> Tensor:
    """Quantize a weight [out, in] element by element, in plain Python."""
    quantized = weight.clone()
    steps = {"int8": 127, "int4": 7}.get(kind)
    levels = NF4 if steps is None else [k / steps for k in range(-steps, steps + 1)]
    for row in quantized:
        for part in row.split(block):
            largest = max(abs(float(x)) for x in part)
            for k, x in enumerate(part.tolist()):
                part[k] = min(levels, key=lambda level: abs(level * largest - x)) * largest
    return quantized


class ReferenceAdapter(nn.Module):
    """A frozen layer with a low-rank one beside it; it shares no code with the library."""

    def __init__(self, weight: Tensor, bias: Any, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias
        self.lora_A, self.lora_B = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.scale * (
            x @ self.lora_A.T @ self.lora_B.T
        )


def adapt_by_hand(plan: Plan, scale: float, kind: str, block: int) -> nn.Module:
    """Return the plan's untouched model, its adapted layers quantized and adapted by hand."""
    reference = copy.deepcopy(plan.model.base.model).requires_grad_(False)
    parameters = dict(plan.model.model.named_parameters())
    for fqn, module in list(reference.named_modules()):
        if f"{fqn}.lora_A" in parameters:
            a, b = (parameters[f"{fqn}.lora_{name}"].detach() for name in "AB")
            owner, _, name = fqn.rpartition(".")
            weight = quantize_by_hand(module.weight.detach(), kind, block)  # type: ignore[arg-type]
            setattr(
                reference.get_submodule(owner),
                name,
                ReferenceAdapter(weight, module.bias, a, b, scale),
            )
    return reference


def lora_of(base: str, options: str = "") -> str:
    """Return the row that adapts all projections, over a base of this kind."""
    return f"{', '.join(COLUMN + ROW)}  adapt(lora, rank=4, alpha=6, base={base}{options})\n"


@pytest.mark.parametrize("kind, block", [("int8", 4), ("int4", 4), ("nf4", 2)])
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("", ""),
        (SPLIT, "tp=2"),
        (f"{SPLIT}zero(stage=3, over=dp)", "dp=2, tp=2"),
        (f"{SPLIT}{STAGES}", "pp=2, tp=2"),
    ],
)
def test_it_trains_as_one_written_by_hand(
    threads: Threads, kind: str, block: int, rows: str, mesh: str
) -> None:
    """Losses, gradients, four steps and states, on 1, 2 and 4 ranks; frozen weights too."""
    plan = adapter_plan(lora_of(kind, f", block={block}") + rows, mesh)
    optimizer = sgd if kind == "int4" else adamw
    expected = train_sequential(adapt_by_hand(plan, 1.5, kind, block), BATCHES, optimizer)
    results = train_on_ranks(threads, plan, BATCHES, optimizer)
    assert_near(results, expected)
    assert sum("grad 0" in name for name in results) == 28
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(results[f"state {name}"], plan.model.base.model.state_dict()[name])


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_what_is_on_the_grid_stays_there(kind: str, dtype: torch.dtype) -> None:
    """Encoding decoded values gives the same codes and scales, bit by bit.

    From the smallest number of a dtype to the largest; rows that no block divides; blocks longer
    than a row; no rows.
    """
    smallest, largest = (
        math.log10(end) for end in (torch.finfo(dtype).tiny, torch.finfo(dtype).max)
    )
    sizes = torch.logspace(max(smallest - 3, -300), min(largest - 1, 300), 97, dtype=torch.float64)
    for (rows, width), block in (((97, 200), 64), ((97, 7), 1000), ((97, 33), 1), ((0, 8), 64)):
        torch.manual_seed(block)
        random = torch.randn(rows, width, dtype=torch.float64).clamp(-5, 5)
        weight = (random * sizes[:rows, None]).to(dtype)
        book = Codebook(kind, block)
        codes, scales = book.encode(weight)
        decoded = book.decode(codes, scales, width)
        assert (decoded.shape, decoded.dtype) == (weight.shape, dtype)
        assert codes.nbytes + scales.nbytes == book.bytes(rows, width, weight.itemsize)
        assert torch.isfinite(decoded).all()
        encoded = book.encode(decoded)
        assert torch.equal(encoded[0], codes) and torch.equal(encoded[1], scales)
        assert torch.equal(book.decode(*encoded, width), decoded)


def test_every_bfloat16_scale_and_step() -> None:
    """The narrowest case: all 127 steps of every 8-bit mantissa survive."""
    scales = torch.arange(128, 256).to(torch.bfloat16)[:, None]
    steps = torch.arange(-127, 128)[None] / 127
    weight = (steps * scales.float()).to(torch.bfloat16)
    book = Codebook("int8", 255)
    codes, encoded_scales = book.encode(weight)
    assert torch.equal(codes, torch.arange(-127, 128, dtype=torch.int8).expand(128, 255))
    assert torch.equal(book.decode(codes, encoded_scales, 255), weight)


def test_what_is_no_number_stays_none() -> None:
    """NaN and infinity do not become a weight."""
    weight = torch.ones(3, 8)
    weight[0, 1], weight[1, 1] = torch.nan, torch.inf
    for kind in ("int8", "int4", "nf4"):
        rounded = Codebook(kind, 8).round_rows(weight)
        assert not rounded[:2].isfinite().all(1).any() and rounded[2].isfinite().all()


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
        f"{lora_of('nf4', ', block=4')}{SPLIT}{BLOCK}  checkpoint()\n"
        "model.layers  pipeline_split(over=pp)\nzero(stage=2, over=dp)\n"
        'pipeline(order="1F1B", micro=2)',
        "dp=2, pp=2, tp=2",
    ),
    "halves of a backward": (
        lambda: models.llama(2),
        f'{lora_of("int4")}model.layers  pipeline_split(over=pp)\npipeline(order="ZB-H1", micro=2)',
        "pp=2",
    ),
    "shared heads": (
        lambda: models.llama(2, keys=2),
        f"{lora_of('int8', ', block=4')}{BLOCK}.self_attn.q_proj  shard(col, over=tp)\n"
        f"{BLOCK}.self_attn.k_proj, {BLOCK}.self_attn.v_proj"
        "  shard(col, heads=2, uneven=replicate, over=tp)\n"
        f"{BLOCK}.self_attn.o_proj  shard(row, over=tp)",
        "tp=4",
    ),
    "cast": (lambda: models.llama(2), f"{lora_of('int8', ', block=4')}cast(bf16)\n{SPLIT}", "tp=2"),
    "sequences, dropout": (
        lambda: models.llama(2),
        f"{lora_of('int4', ', block=4, dropout=0.25')}"
        f"{SPLIT.replace('shard(row,', 'shard(row, output=S(seq),')}"
        "model.norm  shard(output=R, over=tp)",
        "tp=2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_proven(threads: Threads, case: str) -> None:
    """`verify` proves every kind of split, order and recomputation, also with casts."""
    make, rows, mesh = CASES[case]
    relaxed = "model, dtype" if "cast" in rows else "model"
    report = assert_proven(threads, make_plan(make(), rows, mesh, relaxed), BATCHES[:2])
    assert "model" in report.equivalence
    assert any(row.kind == KIND for row in report.rows)


def test_codes_of_other_values_are_found(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference uses the same encoder; comparing with the untouched weights shows the
    mistake."""
    encode = Codebook.encode

    def coarser(self: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        int4 = Codebook("int4", self.block)
        return encode(self, int4.decode(*encode(int4, rows), rows.shape[1]))

    monkeypatch.setattr(Codebook, "encode", coarser)
    with pytest.raises(AssertionError, match=KIND):
        assert_proven(
            threads, make_plan(models.llama(2), lora_of("int8"), "", "model"), BATCHES[:2]
        )


def test_a_rank_that_decodes_otherwise_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison reads the values a module computes with, not the stored ones."""
    value = QuantizedParameter.value

    def coarser(self: Any, dtype: Any = None) -> Tensor:
        return value(self, dtype) * (1.01 if dtype is not None else 1.0)

    monkeypatch.setattr(QuantizedParameter, "value", coarser)
    with pytest.raises(AssertionError):
        assert_proven(
            threads, make_plan(models.llama(2), lora_of("int8"), "", "model"), BATCHES[:2]
        )


DOWN_WEIGHT = "model.layers.1.mlp.down_proj.weight"
FLOAT_BYTES = (2, 4)  # bytes of one element


def measure_storage(plan: Plan) -> tuple[int, int, set[int], set[int]]:
    """On this rank: measure how weights are stored.

    Returns the bytes of stored parameters, the elements of one weight, the sizes of the blocks that
    live between a forward and its backward, and those of all blocks of the forward.
    """
    program = build(plan, BATCHES[0], optimizer=adamw)
    a = program.assembly
    weight = a.parameters[DOWN_WEIGHT]
    assert weight.untyped_storage().nbytes() <= 8 and weight.isnan().all()
    assert len(list_quantized(a.parameters.values())) == 14
    size = sum(tensor.nbytes for tensor in stored_tensors(a.parameters.values()))
    with Footprint("cpu") as footprint:
        output = a.module.train()(**BATCHES[0])
        gc.collect()
        between = {footprint.blocks[k].now for _, k in footprint._alive.values()}
        sizes = {size for _, size in footprint.events}
        output.loss.backward()
    return size, weight.numel(), between, sizes


@pytest.mark.parametrize("kind, block", [("int8", 4), ("int4", 4), ("nf4", 4)])
@pytest.mark.parametrize("rows, mesh", [(SPLIT, "tp=2"), (f"cast(bf16)\n{SPLIT}", "tp=2")])
def test_codes_are_all_that_lies_there(
    threads: Threads, kind: str, block: int, rows: str, mesh: str
) -> None:
    """Running ranks store as many bytes as the plan says, at most codes and scales.

    A weight has values only while its module runs, cast where it is used so, and none for its
    backward.
    """
    model = models.llama(2).float()
    relax = "model, dtype" if "cast" in rows else "model"
    plan = make_plan(model, lora_of(kind, f", block={block}") + rows, mesh, relax)
    classes = account(plan, BATCHES[0]).classes
    bits = 8 if kind == "int8" else 4
    for size, elements, between, sizes in threads.run(measure_storage, 2, plan):
        assert [rank_class.parameters for rank_class in classes] == [size]
        coded = sum(
            parameter.numel // 2
            for name, parameter in plan.model.unique_parameters.items()
            if plan.model.coding_of(name)
        )
        float_bytes = sum(
            4 * math.prod(plan.effective_layout(name).local_shape(plan.mesh))
            for name in plan.model.unique_parameters
            if not plan.model.coding_of(name)
        )
        assert size == float_bytes + coded * bits // 8 + coded // block * 4
        assert elements * (2 if "cast" in rows else 4) in sizes
        assert not between & {elements * width for width in FLOAT_BYTES}


@pytest.mark.parametrize("cast, each", [("", 4), ("cast(bf16)\n", 2)])
def test_what_lies_is_found_to_lie(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, cast: str, each: int
) -> None:
    """The test above can fail: it detects a weight that autograd keeps."""
    monkeypatch.setattr(decoded_weights, "_pack", lambda *_: outer_pack())
    rows, relax = lora_of("int8", ", block=4") + cast + SPLIT, "model, dtype" if cast else "model"
    plan = make_plan(models.llama(2).float(), rows, "tp=2", relax)
    _, elements, between, _ = threads.run(measure_storage, 2, plan)[0]
    assert each * elements in between


def states_after(
    case: Case, other_case: Case, folder: str, model: nn.Module
) -> list[dict[str, Tensor]]:
    """Return states on this rank: trained, loaded, initialized from files, assigned, and
    transferred."""
    program = build(case.plan, BATCHES[0], optimizer=adamw, prepared=case.prepared)
    build_other = partial(build, other_case.plan, BATCHES[0], prepared=other_case.prepared)
    for batch in BATCHES[:2]:
        program.train_step(batch)
    program.save(f"{folder}/saved")
    program.export(f"{folder}/merged", model)
    states = [program.state_dict()]
    for resumed in (build_other(optimizer=adamw), build_other(weights=f"{folder}/saved")):
        if resumed.optimizer is not None:
            resumed.load(f"{folder}/saved")
        states.append(resumed.state_dict())
    assigned, taken = build_other(), build_other()
    assigned.load_state_dict(states[0])
    transfer(program, taken)
    states += [assigned.state_dict(), taken.state_dict()]
    losses = [float(case.eval_step(BATCHES[3]).loss) for case in (program, assigned, taken)]
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2])
    return states


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_values_travel_as_they_are(threads: Threads, tmp_path: Path, kind: str) -> None:
    """A state, a checkpoint, files and a transfer to another layout carry the values of the codes,
    bit by bit, under the original names; exported weights are merged with them."""
    rows = lora_of(kind, ", block=4")
    plan = adapter_plan(f"{rows}{SPLIT}{STAGES}", "pp=2, tp=2")
    other = adapter_plan(f"{rows}{SPLIT}zero(stage=3, over=dp)", "dp=2, tp=2")
    model, cases = (
        plan.model.base.model,
        [prepare_case(Case(case, BATCHES)) for case in (plan, other)],
    )
    for first_state, *other_states in threads.run(states_after, 4, *cases, str(tmp_path), model):
        assert set(model.state_dict()) < set(first_state)
        for state in other_states:
            assert not [
                name for name in first_state if not torch.equal(first_state[name], state[name])
            ]
        for name in (
            n
            for n, parameter in plan.model.unique_parameters.items()
            if plan.model.coding_of(parameter.name)
        ):
            expected = quantize_by_hand(model.get_parameter(name).detach(), kind, 4)
            assert torch.allclose(first_state[name], expected, rtol=1e-7, atol=1e-9), name
    loaded: Any = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    merged = copy.deepcopy(plan.model.model)
    merged.load_state_dict(first_state)
    with torch.no_grad():
        expected, logits = (case.eval()(**BATCHES[1]).logits for case in (merged, loaded))
    assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-11)


def load_state(plan: Plan, folder: str) -> dict[str, Tensor]:
    """On this rank: build a model without values from files, and return its state."""
    return build(plan, BATCHES[0], weights=folder).state_dict()


def test_a_model_without_values(threads: Threads, tmp_path: Path) -> None:
    """Weights from files are encoded part by part, to the codes of the full weight."""
    model = models.llama(2)
    create_schedule(model).build(batch=BATCHES[0]).export(tmp_path / "base", model)
    rows = lora_of("int4", ", block=4") + SPLIT
    expected = make_plan(model, rows, "tp=2", "model").model.model.state_dict()
    bare = make_plan(deferred_init(models.llama, 2), rows, "tp=2", "model")
    for state in threads.run(load_state, 2, bare, str(tmp_path / "base")):
        assert not [name for name, value in expected.items() if not torch.equal(state[name], value)]


@pytest.mark.parametrize(
    "rows, mesh, words",
    [
        (lora_of("int8", ", block=16") + SPLIT, "tp=2", "would be on two ranks"),
        (lora_of("int8") + SPLIT, "tp=2", "`block=8`"),
        (lora_of("int8", ', keep="*.weight"'), "", "would train"),
        (
            lora_of("int8") + 'lm_head  adapt(lora, keep="*up_proj.weight")',
            "",
            "would train `model.layers.0.mlp.up_proj.weight`",
        ),
        (lora_of("int8") + "model.layers  offload(parameters)", "", "cannot be offloaded"),
    ],
)
def test_what_cannot_lie_in_codes(rows: str, mesh: str, words: str) -> None:
    """A weight that codes cannot store is refused, with a legal alternative."""
    with pytest.raises(Refusal, match="S414") as error:
        build_dry(make_plan(models.llama(2), rows, mesh, "model"))
    assert words in " ".join(error.value.render().split())


def build_dry(plan: Plan) -> None:
    """Run all checks that precede the build of a program."""
    prepare(plan, parts.split_batch(BATCHES[0], plan.shares, plan.micro)[0][0].inputs)


def test_numbers_that_make_no_blocks() -> None:
    """A block has one element or more; other numbers are refused."""
    for options in ("base=int8, block=0", "block=32", "base=int3"):
        with pytest.raises(Refusal, match="S30[34]"):
            make_plan(models.llama(2), f"{BLOCK}.mlp.up_proj  adapt(lora, {options})", "", "model")


def test_a_compiled_region_runs_eagerly_and_says_so() -> None:
    """A quantized weight cannot be compiled: the step is the same, and the program reports it."""
    losses = []
    for rows in (f"{BLOCK}.mlp  fuse()\n", ""):
        plan = make_plan(models.llama(2).float(), lora_of("int8", ", block=4") + rows, "", "model")
        program = build(plan, BATCHES[0], optimizer=adamw)
        losses.append([float(program.train_step(batch)) for batch in BATCHES])
        messages = [str(message) for message in declined_in(program.assembly.module)]
        assert bool(messages) == bool(rows) and all(
            "is quantised" in message for message in messages
        )
    assert losses[0] == losses[1]
