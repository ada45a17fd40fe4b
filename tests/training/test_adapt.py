"""Tests of `adapt`: adapters beside projections, split with them, against some made by hand."""

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
from tests.proofs import adamw, assert_near, planned, proven, sequential, sgd, trained

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(3)]
BLOCK = "model.layers.*"
COL = [f"{BLOCK}.self_attn.{name}_proj" for name in "qkv"]
COL += [f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.mlp.up_proj"]
ROW = [f"{BLOCK}.self_attn.o_proj", f"{BLOCK}.mlp.down_proj"]
SPLIT = f"{', '.join(COL)}  shard(col, over=tp)\n{', '.join(ROW)}  shard(row, over=tp)\n"
LORA = f"{', '.join(COL + ROW)}  adapt(lora, rank=4, alpha=6)\n"
DORA = f"{', '.join(COL + ROW)}  adapt(dora, rank=4, alpha=6)\n"
ONE_F = 'model.layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


class ByHand(nn.Module):
    """What a paper says, around a layer: nothing is shared with the library."""

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


def by_hand(plan: Plan, scale: float) -> nn.Module:
    """The untouched model of a plan with adapters around its layers, at the plan's values."""
    twin = copy.deepcopy(plan.model.base.model).requires_grad_(False)
    found = dict(plan.model.model.named_parameters())
    for fqn, module in list(twin.named_modules()):
        if f"{fqn}.lora_A" in found:
            own = (found.get(f"{fqn}.lora_{n}") for n in ("A", "B", "magnitude"))
            values = [None if p is None else p.detach() for p in own]
            owner, _, name = fqn.rpartition(".")
            assert isinstance(module, nn.Linear)
            setattr(twin.get_submodule(owner), name, ByHand(module, *values, scale))  # type: ignore[arg-type]
    return twin


def begun(rows: str, mesh: str = "", model: nn.Module | None = None) -> Plan:
    """A plan in float64 whose B is not zero: at zero half of all mistakes do not show."""
    plan = planned((model or models.llama(2)).double(), rows, mesh, "model")
    return replace(plan, model=plan.model.for_module(plan.model.base.model, True))


def of_adapters(seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is seen of a run: losses, norms, and all that adapters have; bare names."""
    return {k: v for k, v in seen.items() if "lora" in k or k.startswith(("loss", "norm"))}


@pytest.mark.parametrize("adapters", [LORA, DORA])
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("", ""),
        (SPLIT, "tp=2"),
        (f"{SPLIT}zero(stage=3, over=dp)", "dp=2, tp=2"),
        (f"{SPLIT}{ONE_F}", "pp=2, tp=2"),
    ],
)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_it_trains_as_one_written_by_hand(
    threads: Threads, adapters: str, rows: str, mesh: str, optimizer: Any
) -> None:
    """Losses, every gradient, three steps and the optimizer's state, on 1, 2 and 4 ranks."""
    plan = begun(adapters + rows, mesh)
    wanted = sequential(by_hand(plan, 1.5), BATCHES, optimizer)
    seen = trained(threads, plan, BATCHES, optimizer)
    assert_near(of_adapters(seen), of_adapters(wanted))
    assert sum("grad 0" in name for name in seen) == len(plan.model.changes[0].sites) * (
        3 if adapters is DORA else 2
    )
    for name, value in plan.model.base.model.state_dict().items():
        assert torch.equal(seen[f"state {name}"], value), name  # what is frozen stays


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
    """Proven under every kind of split, and by types alone."""
    plan = planned(make(), rows, mesh, "model")
    report = proven(threads, plan, BATCHES[:2])
    assert report.equivalence == "relaxed (model)"
    assert any(row.kind == KIND for row in report.rows)
    if "replicate" in rows:
        return  # by types alone heads that ranks share are summed too often, with and without
    found = static(plan, BATCHES[0])
    assert found.claims and not found.problems, found.problems


def test_a_gradient_that_nobody_sums_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole beside a split weight has a part of its gradient on each rank."""
    monkeypatch.setattr(sharded_run, "_full_adapter_parameters", lambda *_: ())
    with pytest.raises(AssertionError, match=r"lora_A|lora_B"):
        proven(threads, planned(models.llama(2), LORA + SPLIT, "tp=2", "model"), BATCHES[:2])


def test_an_adapter_that_is_not_what_it_says_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle computes with the same module: the untouched model with merged weights tells."""
    plain = low_rank_adapters.AdaptedProjection.add_adapter

    def twice(self: Any, x: Tensor, *rest: Any) -> Tensor:
        return plain(self, x * 1.01, *rest)

    monkeypatch.setattr(low_rank_adapters.AdaptedProjection, "add_adapter", twice)
    with pytest.raises(AssertionError, match=KIND):
        proven(threads, planned(models.llama(2), LORA, "", "model"), BATCHES[:2])


class Encoder(nn.Module):
    """Torch's own layers, which in evaluation read weights and call no module."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(x)).square().mean()
        return found


def test_layers_that_call_nothing_in_evaluation(threads: Threads) -> None:
    """There the adapter counts too, as in the merged model; it once did not."""
    rows = "layers.layers.*.linear1, layers.layers.*.linear2  adapt(lora, rank=2)"
    batches = [{"x": torch.randn(4, 5, 8)} for _ in range(2)]
    report = proven(threads, planned(Encoder(), rows, "", "model"), batches)
    assert any(row.kind == KIND and "evaluation" in row.name for row in report.rows)
    with pytest.raises(Refusal, match="is never called"):
        planned(Encoder(), "layers.layers.*.self_attn.out_proj  adapt(lora)", "", "model")


def test_what_is_trained() -> None:
    """Adapters alone, what `keep` names beside them, and nothing that was frozen above."""

    def names(rows: str, relax: str = "model") -> set[str]:
        unique = planned(models.llama(2), rows, "", relax).model.unique_parameters
        return {name for name, fact in unique.items() if fact.requires_grad}

    up = {f"model.layers.{k}.mlp.up_proj.lora_{m}" for k in range(2) for m in "AB"}
    row = f"{BLOCK}.mlp.up_proj  adapt(lora"
    assert names(f"{row})") == up
    assert names(f'{row}, keep="model.norm.*")') == up | {"model.norm.weight"}
    frozen = f'model.norm  freeze()\n{row}, keep="model.norm.*")'
    assert names(frozen, "model, updates") == up
    down = f'{BLOCK}.mlp.down_proj  adapt(dora, keep="lm_head.*")'
    more = {n.replace("up_proj", "down_proj") for n in up}
    more |= {f"model.layers.{k}.mlp.down_proj.lora_magnitude" for k in range(2)}
    assert names(f"{row})\n{down}") == up | more | {"lm_head.weight"}


def test_the_model_and_its_names_stay() -> None:
    """The given module is as it was; all its names are there; the first output is its own."""
    model = models.llama(2)
    names = list(model.state_dict())
    plan = planned(model, DORA, "", "model")
    assert (
        list(model.state_dict()) == names and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    )
    assert set(names) < set(plan.model.model.state_dict())
    assert all(p.requires_grad for p in model.parameters())
    program = build(plan, BATCHES[0], optimizer=adamw)
    same = program.eval_step(BATCHES[0]).loss - model.eval()(**BATCHES[0]).loss
    assert abs(float(same)) < 1e-5
    program.train_step(BATCHES[0])
    assert set(program.optimizer_state()) == {n for n in program.state_dict() if "lora" in n}
    twin = pickle.loads(pickle.dumps(plan.model.model))
    assert torch.equal(twin(**BATCHES[0]).loss, plan.model.model(**BATCHES[0]).loss)


def test_first_values_hang_on_the_seed_and_the_name() -> None:
    """Every rank draws the same, and no two adapters are alike."""
    row = f"{BLOCK}.mlp.up_proj  adapt(lora"
    one, again, other = (
        planned(models.llama(2), f"{row}{more})", "", "model").model.model.state_dict()
        for more in ("", "", ", seed=1")
    )
    a = [f"model.layers.{k}.mlp.up_proj.lora_A" for k in range(2)]
    assert torch.equal(one[a[0]], again[a[0]]) and not torch.equal(one[a[0]], other[a[0]])
    assert not torch.equal(one[a[0]], one[a[1]])
    assert one[a[0]].abs().max() <= one[a[0]].shape[1] ** -0.5
    assert not one[a[0].replace("_A", "_B")].any()


def test_a_model_without_values(tmp_path: Path) -> None:
    """Values come of files, or of the record, and those of adapters are drawn as ever."""
    model = models.llama(2)
    row = f"{BLOCK}.mlp.up_proj  adapt(lora, rank=4)"
    wanted = planned(model, row, "", "model").model.model.state_dict()
    create_schedule(model).build(batch=BATCHES[0]).export(tmp_path / "base", model)
    bare = deferred_init(models.llama, 2)
    plan = planned(bare, row, "", "model")
    held = build(plan, BATCHES[0], weights=tmp_path / "base").state_dict()
    assert held.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not torch.equal(held[name], value)]
    state = build(plan, BATCHES[0]).state_dict()
    name = "model.layers.0.mlp.up_proj.lora_A"
    assert torch.equal(state[name], wanted[name])
    frozen = planned(bare, "model.norm  freeze()", "", "updates")
    assert build(frozen, BATCHES[0]).state_dict().keys() == model.state_dict().keys()
    with pytest.raises(Refusal, match="S623") as error:
        build(
            planned(bare, row.replace("lora", "dora"), "", "model"),
            BATCHES[0],
            weights=tmp_path / "base",
        )
    assert "is the norm of" in " ".join(error.value.render().split())


def _saved(plan: Plan, folder: str, dcp: str) -> dict[str, Tensor]:
    """Two steps of the model as it is; a checkpoint of it, and one that torch writes."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    for one in BATCHES[:2]:
        program.train_step(one)
    program.save(folder)
    state = program.state_dict()
    if program.assembly.ranks.rank == 0:
        save(state, storage_writer=FileSystemWriter(dcp), no_dist=True)
    return state


def _gone_on(plan: Plan, folder: str) -> tuple[dict[str, Tensor], int, bool, list[float]]:
    program = build(plan, BATCHES[0], optimizer=adamw, weights=folder)
    assert program.optimizer is not None
    begun, step, known = program.state_dict(), program.step, bool(program.optimizer.state)
    return begun, step, known, [float(program.train_step(one)) for one in BATCHES]


def test_a_checkpoint_of_before(threads: Threads, tmp_path: Path) -> None:
    """What was saved without adapters, by a program under another layout or by torch, gives an
    adapted program its weights: adapters are drawn as ever, and the run begins at step 0.  It then
    trains as the model would that has these values, with adapters; a program that is there is not
    changed by such a checkpoint."""
    whole = planned(models.llama(2).double(), SPLIT, "tp=2")
    folder, dcp = str(tmp_path / "saved"), str(tmp_path / "dcp")
    base = threads.run(_saved, 2, whole, folder, dcp)[0]
    tuned = copy.deepcopy(whole.model.base.model)
    tuned.load_state_dict(base)
    wanted = planned(tuned, LORA, "", "model").model.model.state_dict()
    expected = sequential(by_hand(planned(tuned, LORA, "", "model"), 1.5), BATCHES, adamw)
    plan = planned(models.llama(2).double(), f"{LORA}{SPLIT}{ONE_F}", "pp=2, tp=2", "model")
    for path in (folder, dcp):
        for begun, step, known, losses in threads.run(_gone_on, 4, plan, path):
            assert begun.keys() == wanted.keys() and (step, known) == (0, False)
            assert all(torch.equal(begun[name], value) for name, value in wanted.items())
            assert losses == pytest.approx([expected[f"loss {k}"].item() for k in range(3)])
    program = build(planned(models.llama(2).double(), LORA, "", "model"), BATCHES[0])
    with pytest.raises(Refusal, match="S634"):
        program.load(folder)
    dora = planned(models.llama(2).double(), DORA, "", "model")
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
    """Other kinds, numbers that make no adapter, other modules, and rows in another order."""
    with pytest.raises(Refusal) as error:
        planned(models.llama(2), rows, "tp=2, c=2", "model")
    assert code in error.value.render() and said in error.value.render()


def test_experts_in_one_tensor_have_none() -> None:
    """Refused by the name and the class of what was selected, in one layer as in all."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, use_cache=False))
    for row in (f"{BLOCK}.mlp.experts  adapt(lora)", "model.layers.1.mlp.experts  adapt(dora)"):
        with pytest.raises(Refusal) as error:
            planned(model, row, "", "model")
        said = " ".join(error.value.render().split())
        assert "S401" in said and "Experts`, not a projection" in said, said
    planned(model, f"{BLOCK}.self_attn.q_proj  adapt(lora)", "", "model")


class Int8(nn.Linear):
    """A frozen layer whose weight is whole numbers, with a scale for each output."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        weight = base.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        whole = (weight / self.scale).round().to(torch.int8)
        self.weight, self.bias = nn.Parameter(whole, requires_grad=False), base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantised() -> nn.Module:
    """Llama whose products after attention are quantised, and nothing else."""
    model: Any = models.llama(2).double()
    for layer in model.model.layers:
        layer.self_attn.o_proj = Int8(layer.self_attn.o_proj)
        layer.mlp.down_proj = Int8(layer.mlp.down_proj)
    return model


def test_a_base_that_is_quantised_in_part_trains_beside_it(threads: Threads) -> None:
    """Adapters of other projections train as by hand; of a quantised one they are refused, since
    they could not be merged."""
    rows = f"{', '.join(COL)}  adapt(lora, rank=4, alpha=6)\n"
    plan = begun(f"{rows}zero(stage=0, over=dp)", "dp=2", quantised())
    wanted = sequential(by_hand(plan, 1.5), BATCHES, adamw)
    seen = of_adapters(trained(threads, plan, BATCHES, adamw))
    assert_near(seen, of_adapters(wanted))
    assert sum("grad 0" in name for name in seen) == 2 * 2 * len(COL)
    with pytest.raises(Refusal, match="its weight is quantised") as error:
        planned(quantised(), LORA, "", "model")
    assert error.value.diagnostic.code == "S404"


def test_a_tied_table_is_untied_first() -> None:
    """Merged, the adapter of a tied head would change the embedding."""
    with pytest.raises(Refusal, match="S418") as error:
        planned(models.gpt2(2), "lm_head  adapt(lora)", "", "model")
    assert "lm_head  untie(weight)" in error.value.render()
    planned(models.gpt2(2), "lm_head  untie(weight)\nlm_head  adapt(lora)", "", "model")


def exported(plan: Plan, folder: str, model: nn.Module) -> dict[str, Tensor]:
    """On this rank: a step, and the weights with adapters in them."""
    program = build(plan, BATCHES[0], optimizer=sgd)
    program.train_step(BATCHES[0])
    program.export(f"{folder}/merged", model)
    program.export(f"{folder}/alone", model, adapter=True)
    return program.state_dict()


@pytest.mark.parametrize("adapters", [LORA, DORA])
def test_merged_weights_are_exported(threads: Threads, tmp_path: Path, adapters: str) -> None:
    """`from_pretrained` loads a model that computes what the trained one does."""
    plan = begun(f"{adapters}{SPLIT}{ONE_F}", "pp=2, tp=2")
    model = plan.model.base.model
    state = threads.run(exported, 4, plan, str(tmp_path), model)[0]
    found: Any = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    own = copy.deepcopy(plan.model.model)
    own.load_state_dict(state)
    with torch.no_grad():
        wanted, got = (one.eval()(**BATCHES[1]).logits for one in (own, found))
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(got, model.eval()(**BATCHES[1]).logits, rtol=1e-3)


def alone(plan: Plan, folder: str, model: nn.Module) -> tuple[list[tuple[str, int]], Any]:
    """On this rank: what is put together while adapters are exported, and what was trained."""
    program = build(plan, BATCHES[0], optimizer=sgd)
    program.train_step(BATCHES[0])
    seen: list[tuple[str, int]] = []

    class Noting(weight_export.GatheredTensors):
        def gather_box(self, name: str, *given: Any) -> Tensor:
            found = super().gather_box(name, *given)
            here = self.cached[self.writer].values()
            seen.append((name, sum(one.nbytes for one in here if one is not None)))
            return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_export, "GatheredTensors", Noting)
        program.export(folder, model, adapter=True)
    return seen, program.state_dict()


@pytest.mark.parametrize(
    "adapters", [LORA, DORA, f'{COL[0]}  adapt(lora, rank=3, alpha=6, keep="lm_head.*")\n']
)
def test_adapters_alone_are_all_that_is_put_together(
    tmp_path: Path, pool: Any, adapters: str
) -> None:
    """Frozen weights stay in their parts; the first rank has at most two whole tensors at once, the
    others none; what is written are the trained values."""
    from safetensors.torch import load_file

    plan = begun(f"{adapters}{SPLIT}{ONE_F}", "pp=2, tp=2")
    model = plan.model.base.model
    told = pool.run(alone, 4, plan, str(tmp_path / "alone"), model)
    state = told[0][1]
    trained = {name for name, p in plan.model.model.named_parameters() if p.requires_grad}
    for rank, (seen, _) in enumerate(told):
        assert {name for name, _ in seen} == trained
        sizes = sorted(state[name].nbytes for name in trained)
        most = sum(sizes[-2:]) if rank == 0 else 0
        assert max(held for _, held in seen) <= most and min(held for _, held in seen) >= 0
    found = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    prefix = "base_model.model."
    own = {
        key.removeprefix(prefix)
        .replace("_vector", "")
        .replace("lora_A.weight", "lora_A")
        .replace("lora_B.weight", "lora_B"): value
        for key, value in found.items()
    }
    assert own.keys() == trained and all(key.startswith(prefix) for key in found)
    assert not [key for key, value in own.items() if not torch.equal(value, state[key])]
