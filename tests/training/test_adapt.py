"""Adapters (`adapt`): LoRA and DoRA beside split projections, against adapters written by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

from schedlang import create_schedule, deferred_init
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.passes.propagate import sharded_run
from schedlang.passes.static_checks.static import static
from schedlang.passes.verify.changed_model import KIND
from schedlang.runtime import low_rank_adapters, weight_export
from tests import models
from tests.engine import Threads
from tests.proofs import (
    adamw,
    assert_near,
    assert_proven,
    make_plan,
    run_prepared,
    sgd,
    train_on_ranks,
    train_sequential,
)

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(3)]
BLOCK = "model.layers.*"
COLUMN = [f"{BLOCK}.self_attn.{name}_proj" for name in "qkv"]
COLUMN += [f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.mlp.up_proj"]
ROW = [f"{BLOCK}.self_attn.o_proj", f"{BLOCK}.mlp.down_proj"]
SPLIT = f"{', '.join(COLUMN)}  shard(col, over=tp)\n{', '.join(ROW)}  shard(row, over=tp)\n"
LORA = f"{', '.join(COLUMN + ROW)}  adapt(lora, rank=4, alpha=6)\n"
DORA = f"{', '.join(COLUMN + ROW)}  adapt(dora, rank=4, alpha=6)\n"
STAGES = 'model.layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


class ReferenceAdapter(nn.Module):
    """An adapter as in its paper, around a layer; it shares no code with the library."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, m: Tensor | None, scale: float):
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A, self.lora_B = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.lora_magnitude = None if m is None else nn.Parameter(m.clone())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.scale * self.lora_B @ self.lora_A
        if self.lora_magnitude is not None:
            weight = self.lora_magnitude[:, None] * weight / weight.detach().norm(dim=1)[:, None]
        return F.linear(x, weight, self.base.bias)


def adapt_by_hand(plan: Plan, scale: float) -> nn.Module:
    """Return the plan's untouched model with reference adapters, at the values of the plan."""
    reference = copy.deepcopy(plan.model.base.model).requires_grad_(False)
    parameters = dict(plan.model.model.named_parameters())
    for fqn, module in list(reference.named_modules()):
        if f"{fqn}.lora_A" in parameters:
            tensors = (parameters.get(f"{fqn}.lora_{n}") for n in ("A", "B", "magnitude"))
            values = [None if p is None else p.detach() for p in tensors]
            owner, _, name = fqn.rpartition(".")
            assert isinstance(module, nn.Linear)
            setattr(reference.get_submodule(owner), name, ReferenceAdapter(module, *values, scale))  # type: ignore[arg-type]
    return reference


def adapter_plan(rows: str, mesh: str = "", model: nn.Module | None = None) -> Plan:
    """Plan a float64 model whose B is not zero: a zero B would hide half of all mistakes."""
    plan = make_plan((model or models.llama(2)).double(), rows, mesh, "model")
    return replace(plan, model=plan.model.for_module(plan.model.base.model, True))


def adapter_results(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select losses, norms and tensors of adapters, by name."""
    return {k: v for k, v in results.items() if "lora" in k or k.startswith(("loss", "norm"))}


@pytest.mark.parametrize("adapters", [LORA, DORA])
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("", ""),
        (SPLIT, "tp=2"),
        (f"{SPLIT}zero(stage=3, over=dp)", "dp=2, tp=2"),
        (f"{SPLIT}{STAGES}", "pp=2, tp=2"),
    ],
)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_it_trains_as_one_written_by_hand(
    threads: Threads, adapters: str, rows: str, mesh: str, optimizer: Any
) -> None:
    """Losses, every gradient, three steps and the optimizer's state, on 1, 2 and 4 ranks."""
    plan = adapter_plan(adapters + rows, mesh)
    expected = train_sequential(adapt_by_hand(plan, 1.5), BATCHES, optimizer)
    results = train_on_ranks(threads, plan, BATCHES, optimizer)
    assert_near(adapter_results(results), adapter_results(expected))
    assert sum("grad 0" in name for name in results) == len(plan.model.changes[0].sites) * (
        3 if adapters is DORA else 2
    )
    for name, value in plan.model.base.model.state_dict().items():
        assert torch.equal(results[f"state {name}"], value), name  # frozen values do not change


VOCAB = "lm_head  pad(out, multiple=4)\nlm_head  shard(vocab, over=tp)\n"
SEQUENCES = SPLIT.replace("shard(row,", "shard(row, output=S(seq),")
GPT2 = "transformer.h.*."
FUSED = (
    f"{GPT2}attn.c_attn, {GPT2}attn.c_proj, {GPT2}mlp.c_fc  adapt(lora, rank=4, dropout=0.25)\n"
    f"{GPT2}attn.c_attn  shard(col, blocks=3, over=tp)\n{GPT2}attn.c_proj  shard(row, over=tp)\n"
)


@pytest.mark.parametrize(
    "make, rows, mesh",
    [
        (lambda: models.gpt2(2), FUSED, "tp=2"),
        (
            lambda: models.gpt2(2, tied=False),
            f"lm_head  adapt(dora, rank=4)\n{VOCAB}zero(stage=1, over=dp)",
            "dp=2, tp=2",
        ),
        (lambda: models.llama(2), f"{DORA}{SEQUENCES}model.norm  shard(output=R, over=tp)", "tp=2"),
        (
            lambda: models.llama(2),
            f"{LORA}{SPLIT}{BLOCK}  checkpoint()\nmodel.layers  pipeline_split(over=pp)\n"
            'zero(stage=2, over=dp)\npipeline(order="1F1B", micro=2)',
            "dp=2, pp=2, tp=2",
        ),
        (
            lambda: models.llama(2),
            f"{BLOCK}.mlp.up_proj  adapt(dora, rank=4)\n"
            f"{BLOCK}.mlp.up_proj  shard(col, over=a, output=R)\n"
            f"{BLOCK}.mlp.up_proj  shard(row, over=b)",
            "a=2, b=2",
        ),
        (
            lambda: models.llama(2, keys=2),
            f"{DORA}{BLOCK}.self_attn.q_proj  shard(col, over=tp)\n"
            f"{BLOCK}.self_attn.k_proj, {BLOCK}.self_attn.v_proj"
            "  shard(col, heads=2, uneven=replicate, over=tp)\n"
            f"{BLOCK}.self_attn.o_proj  shard(row, over=tp)",
            "tp=4",
        ),
    ],
    ids=["dropout in q, k, v", "a head", "sequences", "3-D", "both dims", "shared heads"],
)
def test_it_is_split_with_its_projection(threads: Threads, make: Any, rows: str, mesh: str) -> None:
    """`verify` proves every kind of split, and the static checks accept it."""
    plan = make_plan(make(), rows, mesh, "model")
    report = assert_proven(threads, plan, BATCHES[:2])
    assert report.equivalence == "relaxed (model)"
    assert any(row.kind == KIND for row in report.rows)
    if "replicate" in rows:
        return  # static checks count gradients of shared heads too often, with or without adapters
    checked = static(plan, BATCHES[0])
    assert checked.claims and not checked.problems, checked.problems


def test_a_gradient_that_nobody_sums_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is replicated beside a split weight has a partial gradient on each rank."""
    monkeypatch.setattr(sharded_run, "_full_adapter_parameters", lambda *_: ())
    with pytest.raises(AssertionError, match=r"lora_A|lora_B"):
        assert_proven(
            threads, make_plan(models.llama(2), LORA + SPLIT, "tp=2", "model"), BATCHES[:2]
        )


def test_an_adapter_that_is_not_what_it_says_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference uses the same module; comparing with merged weights shows the mistake."""
    original = low_rank_adapters.AdaptedProjection.add_adapter

    def twice(self: Any, x: Tensor, *args: Any) -> Tensor:
        return original(self, x * 1.01, *args)

    monkeypatch.setattr(low_rank_adapters.AdaptedProjection, "add_adapter", twice)
    with pytest.raises(AssertionError, match=KIND):
        assert_proven(threads, make_plan(models.llama(2), LORA, "", "model"), BATCHES[:2])


class Encoder(nn.Module):
    """Torch's own encoder layers: in evaluation they read weights and call no submodule."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layers(x)).square().mean()
        return loss


def test_layers_that_call_nothing_in_evaluation(threads: Threads) -> None:
    """In evaluation the adapter counts too, as in the merged model."""
    rows = "layers.layers.*.linear1, layers.layers.*.linear2  adapt(lora, rank=2)"
    batches = [{"x": torch.randn(4, 5, 8)} for _ in range(2)]
    report = assert_proven(threads, make_plan(Encoder(), rows, "", "model"), batches)
    assert any(row.kind == KIND and "evaluation" in row.name for row in report.rows)
    with pytest.raises(Refusal, match="is never called"):
        make_plan(Encoder(), "layers.layers.*.self_attn.out_proj  adapt(lora)", "", "model")


def test_what_is_trained() -> None:
    """Only adapters train, and what `keep` names, but nothing that an earlier row froze."""

    def names(rows: str, relax: str = "model") -> set[str]:
        unique = make_plan(models.llama(2), rows, "", relax).model.unique_parameters
        return {name for name, parameter in unique.items() if parameter.requires_grad}

    up = {f"model.layers.{k}.mlp.up_proj.lora_{m}" for k in range(2) for m in "AB"}
    row = f"{BLOCK}.mlp.up_proj  adapt(lora"
    assert names(f"{row})") == up
    assert names(f'{row}, keep="model.norm.*")') == up | {"model.norm.weight"}
    frozen = f'model.norm  freeze()\n{row}, keep="model.norm.*")'
    assert names(frozen, "model, updates") == up
    down = f'{BLOCK}.mlp.down_proj  adapt(dora, keep="lm_head.*")'
    dora_names = {n.replace("up_proj", "down_proj") for n in up}
    dora_names |= {f"model.layers.{k}.mlp.down_proj.lora_magnitude" for k in range(2)}
    assert names(f"{row})\n{down}") == up | dora_names | {"lm_head.weight"}


def test_the_model_and_its_names_stay() -> None:
    """The given module does not change; the plan keeps all its names and its first output."""
    model = models.llama(2)
    names = list(model.state_dict())
    plan = make_plan(model, DORA, "", "model")
    assert (
        list(model.state_dict()) == names and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    )
    assert set(names) < set(plan.model.model.state_dict())
    assert all(p.requires_grad for p in model.parameters())
    program = build(plan, BATCHES[0], optimizer=adamw)
    difference = program.eval_step(BATCHES[0]).loss - model.eval()(**BATCHES[0]).loss
    assert abs(float(difference)) < 1e-5
    program.train_step(BATCHES[0])
    assert set(program.optimizer_state()) == {n for n in program.state_dict() if "lora" in n}
    unpickled = pickle.loads(pickle.dumps(plan.model.model))
    assert torch.equal(unpickled(**BATCHES[0]).loss, plan.model.model(**BATCHES[0]).loss)


def test_first_values_hang_on_the_seed_and_the_name() -> None:
    """Every rank draws the same values, and no two adapters have equal ones."""
    row = f"{BLOCK}.mlp.up_proj  adapt(lora"
    state, repeated, reseeded = (
        make_plan(models.llama(2), f"{row}{options})", "", "model").model.model.state_dict()
        for options in ("", "", ", seed=1")
    )
    a = [f"model.layers.{k}.mlp.up_proj.lora_A" for k in range(2)]
    assert torch.equal(state[a[0]], repeated[a[0]]) and not torch.equal(state[a[0]], reseeded[a[0]])
    assert not torch.equal(state[a[0]], state[a[1]])
    assert state[a[0]].abs().max() <= state[a[0]].shape[1] ** -0.5
    assert not state[a[0].replace("_A", "_B")].any()


def test_a_model_without_values(tmp_path: Path) -> None:
    """Weights come from files or from the record; adapters are drawn as always."""
    model = models.llama(2)
    row = f"{BLOCK}.mlp.up_proj  adapt(lora, rank=4)"
    expected = make_plan(model, row, "", "model").model.model.state_dict()
    create_schedule(model).build(batch=BATCHES[0]).export(tmp_path / "base", model)
    bare = deferred_init(models.llama, 2)
    plan = make_plan(bare, row, "", "model")
    loaded = build(plan, BATCHES[0], weights=tmp_path / "base").state_dict()
    assert loaded.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(loaded[name], value)]
    state = build(plan, BATCHES[0]).state_dict()
    name = "model.layers.0.mlp.up_proj.lora_A"
    assert torch.equal(state[name], expected[name])
    frozen = make_plan(bare, "model.norm  freeze()", "", "updates")
    assert build(frozen, BATCHES[0]).state_dict().keys() == model.state_dict().keys()
    with pytest.raises(Refusal, match="S623") as error:
        build(
            make_plan(bare, row.replace("lora", "dora"), "", "model"),
            BATCHES[0],
            weights=tmp_path / "base",
        )
    assert "is the norm of" in " ".join(error.value.render().split())


def save_base(plan: Plan, folder: str, dcp: str) -> dict[str, Tensor]:
    """Train the model two steps; write a checkpoint of it, and one by torch; return its state."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    for batch in BATCHES[:2]:
        program.train_step(batch)
    program.save(folder)
    state = program.state_dict()
    if program.assembly.ranks.rank == 0:
        save(state, storage_writer=FileSystemWriter(dcp), no_dist=True)
    return state


def resume(plan: Plan, folder: str) -> tuple[dict[str, Tensor], int, bool, list[float]]:
    """Load a checkpoint: return state, step, whether the optimizer has state, and further
    losses."""
    program = build(plan, BATCHES[0], optimizer=adamw, weights=folder)
    assert program.optimizer is not None
    initial, step, has_state = program.state_dict(), program.step, bool(program.optimizer.state)
    return initial, step, has_state, [float(program.train_step(batch)) for batch in BATCHES]


def test_a_checkpoint_of_before(threads: Threads, tmp_path: Path) -> None:
    """A checkpoint saved without adapters gives an adapted program its weights.

    It may be from another layout or written by torch. Adapters are drawn as always, and the run
    begins at step 0; it trains as a model of these weights with adapters does. A program that
    already exists refuses such a checkpoint and does not change.
    """
    base_plan = make_plan(models.llama(2).double(), SPLIT, "tp=2")
    folder, dcp = str(tmp_path / "saved"), str(tmp_path / "dcp")
    base = threads.run(save_base, 2, base_plan, folder, dcp)[0]
    tuned = copy.deepcopy(base_plan.model.base.model)
    tuned.load_state_dict(base)
    adapted = make_plan(tuned, LORA, "", "model").model.model.state_dict()
    expected = train_sequential(
        adapt_by_hand(make_plan(tuned, LORA, "", "model"), 1.5), BATCHES, adamw
    )
    plan = make_plan(models.llama(2).double(), f"{LORA}{SPLIT}{STAGES}", "pp=2, tp=2", "model")
    for path in (folder, dcp):
        for initial, step, has_state, losses in threads.run(resume, 4, plan, path):
            assert initial.keys() == adapted.keys() and (step, has_state) == (0, False)
            assert all(torch.equal(initial[name], value) for name, value in adapted.items())
            assert losses == pytest.approx([expected[f"loss {k}"].item() for k in range(3)])
    program = build(make_plan(models.llama(2).double(), LORA, "", "model"), BATCHES[0])
    with pytest.raises(Refusal, match="S634"):
        program.load(folder)
    dora = make_plan(models.llama(2).double(), DORA, "", "model")
    with pytest.raises(Refusal, match="S623"):
        build(dora, BATCHES[0], weights=folder)


@pytest.mark.parametrize(
    "rows, code, said",
    [
        (f"{BLOCK}.mlp.up_proj  adapt(lorra)", "S303", "choose one of `lora`, `dora`"),
        (f"{BLOCK}.mlp.up_proj  adapt(lora, rank=0)", "S304", "must be 1 or more"),
        (f"{BLOCK}.mlp.up_proj  adapt(lora, rank=17)", "S304", "has a rank of 16 itself"),
        (f"{BLOCK}.mlp.up_proj  adapt(lora, alpha=0)", "S304", "more than 0"),
        (f"{BLOCK}.mlp.up_proj  adapt(lora, dropout=1.0)", "S304", "below 1"),
        (f'{BLOCK}.mlp.up_proj  adapt(lora, keep="score")', "S305", "no parameter `score`"),
        (f"{BLOCK}  adapt(lora)", "S401", "0.self_attn.q_proj  adapt(lora, rank=8)`"),
        ("model.norm  adapt(lora)", "S401", "not a projection"),
        (f"{LORA}{LORA}", "S418", "has an adapter already"),
        (f"{SPLIT}{LORA}", "S503", "`adapt` must stand above `shard`"),
        (f"{BLOCK}.mlp  replace_kernel(gated)\n{LORA}", "S503", "above `replace_kernel`"),
        (
            f"{LORA}{BLOCK}.mlp.up_proj  grid(summa, over=(tp, c))",
            "S404",
            "computes with `lora_A` too",
        ),
        (
            f"{LORA}{BLOCK}.mlp.up_proj  shard(weight=S(out), over=tp)",
            "S407",
            "only one of weight and lora_B",
        ),
    ],
)
def test_refusals(rows: str, code: str, said: str) -> None:
    """Unknown kinds, invalid numbers, other modules, and rows in another order are refused."""
    with pytest.raises(Refusal) as error:
        make_plan(models.llama(2), rows, "tp=2, c=2", "model")
    assert code in error.value.render() and said in error.value.render()


def test_experts_in_one_tensor_have_none() -> None:
    """Experts stored in one tensor are refused by name and class, in one layer as in all."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, use_cache=False))
    for row in (f"{BLOCK}.mlp.experts  adapt(lora)", "model.layers.1.mlp.experts  adapt(dora)"):
        with pytest.raises(Refusal) as error:
            make_plan(model, row, "", "model")
        message = " ".join(error.value.render().split())
        assert "S401" in message and "Experts`, not a projection" in message, message
    make_plan(model, f"{BLOCK}.self_attn.q_proj  adapt(lora)", "", "model")


class Int8Linear(nn.Linear):
    """A frozen layer whose weight is integers, with a scale for each output."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        weight = base.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        codes = (weight / self.scale).round().to(torch.int8)
        self.weight, self.bias = nn.Parameter(codes, requires_grad=False), base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantized_llama() -> nn.Module:
    """Return a Llama whose projections after attention are quantized, and no others."""
    model: Any = models.llama(2).double()
    for layer in model.model.layers:
        layer.self_attn.o_proj = Int8Linear(layer.self_attn.o_proj)
        layer.mlp.down_proj = Int8Linear(layer.mlp.down_proj)
    return model


def test_a_base_that_is_quantised_in_part_trains_beside_it(threads: Threads) -> None:
    """Adapters of other projections train as by hand; those of a quantized one are refused, since
    they could not be merged."""
    rows = f"{', '.join(COLUMN)}  adapt(lora, rank=4, alpha=6)\n"
    plan = adapter_plan(f"{rows}zero(stage=0, over=dp)", "dp=2", quantized_llama())
    expected = train_sequential(adapt_by_hand(plan, 1.5), BATCHES, adamw)
    results = adapter_results(train_on_ranks(threads, plan, BATCHES, adamw))
    assert_near(results, adapter_results(expected))
    assert sum("grad 0" in name for name in results) == 2 * 2 * len(COLUMN)
    with pytest.raises(Refusal, match="its weight is quantised") as error:
        make_plan(quantized_llama(), LORA, "", "model")
    assert error.value.diagnostic.code == "S404"


def test_a_tied_table_is_untied_first() -> None:
    """Merged, the adapter of a tied head would change the embedding."""
    with pytest.raises(Refusal, match="S418") as error:
        make_plan(models.gpt2(2), "lm_head  adapt(lora)", "", "model")
    assert "lm_head  untie(weight)" in error.value.render()
    make_plan(models.gpt2(2), "lm_head  untie(weight)\nlm_head  adapt(lora)", "", "model")


def export_merged(plan: Plan, prepared: Any, folder: str, model: nn.Module) -> dict[str, Tensor]:
    """On this rank: train a step, export, and return the weights with adapters."""
    program = build(plan, BATCHES[0], optimizer=sgd, prepared=prepared)
    program.train_step(BATCHES[0])
    program.export(f"{folder}/merged", model)
    program.export(f"{folder}/alone", model, adapter=True)
    return program.state_dict()


@pytest.mark.parametrize("adapters", [LORA, DORA])
def test_merged_weights_are_exported(threads: Threads, tmp_path: Path, adapters: str) -> None:
    """`from_pretrained` loads a model with the outputs of the trained one."""
    plan = adapter_plan(f"{adapters}{SPLIT}{STAGES}", "pp=2, tp=2")
    model = plan.model.base.model
    state = run_prepared(threads, export_merged, plan, BATCHES[0], str(tmp_path), model)[0]
    loaded: Any = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    merged = copy.deepcopy(plan.model.model)
    merged.load_state_dict(state)
    with torch.no_grad():
        expected, logits = (network.eval()(**BATCHES[1]).logits for network in (merged, loaded))
    assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(logits, model.eval()(**BATCHES[1]).logits, rtol=1e-3)


def export_adapter(
    plan: Plan, prepared: Any, folder: str, model: nn.Module
) -> tuple[list[tuple[str, int]], Any]:
    """On this rank: return the tensors gathered while adapters are exported, and the trained
    state."""
    program = build(plan, BATCHES[0], optimizer=sgd, prepared=prepared)
    program.train_step(BATCHES[0])
    gathered: list[tuple[str, int]] = []

    class Noting(weight_export.GatheredTensors):
        def gather_box(self, name: str, *args: Any) -> Tensor:
            tensor = super().gather_box(name, *args)
            tensors = self.cached[self.writer].values()
            gathered.append(
                (
                    name,
                    sum(tensor_held.nbytes for tensor_held in tensors if tensor_held is not None),
                )
            )
            return tensor

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_export, "GatheredTensors", Noting)
        program.export(folder, model, adapter=True)
    return gathered, program.state_dict()


@pytest.mark.parametrize(
    "adapters", [LORA, DORA, f'{COLUMN[0]}  adapt(lora, rank=3, alpha=6, keep="lm_head.*")\n']
)
def test_adapters_alone_are_all_that_is_put_together(
    tmp_path: Path, pool: Any, adapters: str
) -> None:
    """Frozen weights are not gathered; the first rank has at most two full tensors at once, the
    others none; the file has the trained values."""
    from safetensors.torch import load_file

    plan = adapter_plan(f"{adapters}{SPLIT}{STAGES}", "pp=2, tp=2")
    model = plan.model.base.model
    ranks = run_prepared(pool, export_adapter, plan, BATCHES[0], str(tmp_path / "alone"), model)
    state = ranks[0][1]
    trained = {name for name, p in plan.model.model.named_parameters() if p.requires_grad}
    for rank, (gathered, _) in enumerate(ranks):
        assert {name for name, _ in gathered} == trained
        sizes = sorted(state[name].nbytes for name in trained)
        limit = sum(sizes[-2:]) if rank == 0 else 0
        assert (
            max(nbytes for _, nbytes in gathered) <= limit
            and min(nbytes for _, nbytes in gathered) >= 0
        )
    file = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    prefix = "base_model.model."
    written = {
        key.removeprefix(prefix)
        .replace("_vector", "")
        .replace("lora_A.weight", "lora_A")
        .replace("lora_B.weight", "lora_B"): value
        for key, value in file.items()
    }
    assert written.keys() == trained and all(key.startswith(prefix) for key in file)
    assert not [key for key, value in written.items() if not torch.equal(value, state[key])]
