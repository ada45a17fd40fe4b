"""Mixed precision (`cast`): against torch's own in one process; overflow, loss scaling, bytes."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.traffic import list_collectives
from schedlang.report import Report
from schedlang.runtime.comm.collectives import listen_to_collectives
from schedlang.runtime.storage.offloaded_gradients import in_backward
from tests import models
from tests.docs.test_page_contents import ROOT, fenced_blocks
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, sgd

SHARDED = """transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
transformer.h.*.attn.c_proj shard(row, over=tp)
transformer.h.*.mlp.c_fc shard(col, over=tp)
transformer.h.*.mlp.c_proj shard(row, over=tp)
"""
STAGES = 'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
BATCHES = [models.tokens(rows=4, seed=seed) for seed in range(2)]


class Net(nn.Module):
    """Three layers and a mean of squares, in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        nn.init.normal_(self.norm.weight)  # with ones no cast would show

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.norm(self.up(x)))).float() ** 2).mean()


def batch(seed: int, rows: int = 6, size: float = 1.0) -> dict[str, Tensor]:
    """Return a batch of Net."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": size * torch.randn(rows, 8, generator=generator)}


def cast_plan(rows: str, mesh: str = "", model: Any = None) -> Plan:
    """Plan a float32 model under casts."""
    return make_plan(model or models.gpt2(2).float(), rows, mesh, "dtype")


def prove_in_both(pool: Threads, plan: Plan, batches: Sequence[Any] = BATCHES) -> Report:
    """Prove in float64 and in the model's own dtype: return the report, which must pass."""
    report = prove(Case(plan, tuple(batches), dtype="float32"), pool=pool)
    failures = [(r.kind, r.step, r.name, r.error, r.note) for r in report.rows if not r.ok]
    assert not failures, failures[:6]
    assert report.equivalence == "relaxed (dtype)"
    assert any("working dtype" in row.kind for row in report.rows)
    return report


# -- against one process -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("cast(bf16)\n" + SHARDED, "tp=2"),
        ("cast(fp16)\nzero(stage=2, over=dp)", "dp=2"),
        (
            "cast(bf16, params=true)\ntransformer.h.*.ln_1 cast(fp32)\nzero(stage=3, over=dp)",
            "dp=2",
        ),
        ("transformer.h.* cast(fp16, params=true)\n" + STAGES, "pp=2"),
        pytest.param(
            "cast(fp16, params=true)\nlm_head cast(fp32)\n"
            + SHARDED
            + "transformer.h.* checkpoint()\n"
            + STAGES.replace("pipeline(", "zero(stage=1, over=dp)\npipeline("),
            "tp=2, pp=2, dp=2",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_as_near_as_one_process_under_the_same_casts(
    threads: Threads, rows: str, mesh: str
) -> None:
    """In float64 the results are those of the untouched original; in low dtypes their error is at
    most twice that of torch's autocast, cast modules and GradScaler: outputs, loss, gradients,
    parameters."""
    prove_in_both(threads, cast_plan(rows, mesh))


def train_by_hand(rows: str, plan: Plan, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Train in the loop of torch's documentation: return first gradients and the last state."""
    module = copy.deepcopy(plan.model.model)
    optimizer = sgd(module.named_parameters())
    results: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(**batch).loss
        loss.backward()
        if not step:
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                results[f"grad {name}"] = parameter.grad.clone()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return results | {n: p.detach() for n, p in module.named_parameters()}


def test_alone_it_is_autocast_bit_by_bit() -> None:
    """On one rank, with one microbatch, `cast(bf16)` is torch.autocast to the last bit."""
    plan = cast_plan("cast(bf16)")
    program = build(plan, BATCHES[0], optimizer=sgd, clip=1.0)
    expected = train_by_hand("", plan, BATCHES)
    for step, batch in enumerate(BATCHES):
        program.train_step(batch)
        for name, grad in program.gradients().items() if not step and program.grad_norm < 1 else ():
            assert torch.equal(grad, expected[f"grad {name}"]), name
    for name, value in program.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(value, expected[name]), name
    assert all(p.dtype == torch.float32 for p in program.assembly.parameters.values())


def test_the_rule_is_really_followed() -> None:
    """Each form of `cast` gives another loss than float32, and so does a float32 island."""
    losses = {}
    for rows in (
        "",
        "up cast(bf16)",
        "cast(bf16)",
        "cast(bf16, params=true)",
        "cast(bf16, params=true)\nnorm cast(fp32)",
        "cast(fp16)",
    ):
        program = build(cast_plan(rows, model=Net()), batch(0), optimizer=sgd)
        losses[rows] = float(program.train_step(batch(0)))
    exact = losses.pop("")
    assert all(0 < abs(loss - exact) < 0.02 * exact for loss in losses.values()), losses
    autocast, island = losses.pop("cast(bf16)"), losses["cast(bf16, params=true)\nnorm cast(fp32)"]
    assert len(set(losses.values())) == len(losses)
    assert autocast == island  # only the norm's parameters are float32 there


# -- scaled losses -------------------------------------------------------------------------------


def train_with_overflow(rank: int, step: int, plan: Plan, batches: Sequence[Any]) -> list[Any]:
    """Train with one infinite gradient on one rank in one step: return scale, overflow and state by
    step."""
    import torch.distributed as dist

    program = build(plan, batches[0], optimizer=sgd, clip=1.0)
    steps: list[Any] = []
    for number, batch in enumerate(batches):
        handles = []
        if dist.get_rank() == rank and number == step:
            parameter = next(p for p in program.assembly.parameters.values() if p.requires_grad)
            handles.append(parameter.register_post_accumulate_grad_hook(in_backward(make_infinite)))
        program.train_step(batch)
        for handle in handles:
            handle.remove()
        assert program.loss_scale is not None
        values = {n: v.clone() for n, v in program.state_dict().items()}
        steps.append((program.loss_scale.scale, program.loss_scale.overflow, values))
    return steps


def make_infinite(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    grad = parameter.grad
    (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = math.inf


@pytest.mark.parametrize(
    "rows, mesh, count",
    [(SHARDED, "tp=2", 2), (STAGES, "pp=2", 2), ("zero(stage=2, over=dp)", "dp=2", 2)],
)
def test_an_overflow_on_one_rank_skips_the_step_of_all(
    threads: Threads, rows: str, mesh: str, count: int
) -> None:
    """No rank updates a parameter in that step, and the scale halves on all; the next step updates,
    and the scale doubles again after `growth` good steps."""
    plan = cast_plan("cast(fp16, scale=1024, growth=2)\n" + rows, mesh)
    batches = [models.tokens(rows=4, seed=seed) for seed in range(4)]
    for steps in threads.run(train_with_overflow, count, count - 1, 1, plan, batches):
        assert [scale for scale, *_ in steps] == [1024, 512, 512, 1024]
        assert [skipped for _, skipped, _ in steps] == [False, True, False, False]
        before, skipped_step, after = (values for *_, values in steps[:3])
        assert all(torch.equal(before[n], skipped_step[n]) for n in before)
        assert not all(torch.equal(skipped_step[n], after[n]) for n in skipped_step)


def test_what_would_vanish_without_a_scale_survives() -> None:
    """Gradients below float16's smallest number are zero at scale 1, but not at 65536."""
    norms = {}
    for scale in (1, 65536):
        rows = f"cast(fp16, params=true, scale={scale})"
        program = build(cast_plan(rows, model=Net()), batch(0), optimizer=sgd, loss=tiny_loss)
        program.train_step(batch(0))
        norms[scale] = float(program.gradients()["up.weight"].norm())
    assert norms[1] == 0.0 < norms[65536]


def tiny_loss(output: Tensor, batch: Any) -> Tensor:
    return output.float() * 1e-8


def save_and_load(plan: Plan, batches: Sequence[Any], path: str) -> tuple[float, int]:
    program = build(plan, batches[0], optimizer=sgd)
    for batch in batches:
        program.train_step(batch)
    program.save(path)
    loaded = build(plan, batches[0], optimizer=sgd)
    loaded.load(path)
    assert loaded.loss_scale is not None
    return loaded.loss_scale.scale, loaded.loss_scale.good


def test_the_scale_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint restores the scale and its count of good steps."""
    plan = cast_plan("cast(fp16, scale=64, growth=2)", model=Net())
    batches = [batch(seed) for seed in range(3)]
    assert save_and_load(plan, batches, str(tmp_path / "state")) == (128.0, 1)


# -- bytes ---------------------------------------------------------------------------------------


def record_messages(plan: Plan, batch: Any) -> tuple[Counter[Any], list[int]]:
    """Return what a rank sends in a step: collectives, and tensors to other stages."""
    program = build(plan, batch, optimizer=sgd)
    collectives: Counter[Any] = Counter()
    sent: list[int] = []
    mail: Any = program.assembly.pipeline.mail
    original = mail.send

    def send(target: int, key: Any, tensors: Sequence[Tensor], *, header: bool) -> None:
        sent.extend(t.numel() * t.element_size() for t in tensors)
        original(target, key, tensors, header=header)

    mail.send = send
    with listen_to_collectives(lambda kind, group, size: collectives.update([(kind, size)])):
        program.train_step(batch)
    return collectives, sent


@pytest.mark.parametrize(
    "row, output, grad, stage", [("cast(bf16)", 2, 4, 4), ("cast(fp16, params=true)", 2, 2, 2)]
)
def test_bytes_are_those_of_the_plan(
    threads: Threads, row: str, output: int, grad: int, stage: int
) -> None:
    """Sums of row-parallel outputs and sends between stages have the low dtype; where all is cast,
    so have gradients of column-parallel inputs. The plan counts the same bytes."""
    batch = models.tokens(rows=4, mask=False)
    elements = 4 * 8 * 16
    planned_counts = planned_messages(cast_plan(f"{row}\n{SHARDED}", "tp=2"), batch)
    (observed, _), _ = threads.run(
        record_messages, 2, cast_plan(f"{row}\n{SHARDED}", "tp=2"), batch
    )
    assert planned_counts == Counter(dict(observed))
    assert planned_counts == Counter({("all-reduce", output * elements): 4}) + Counter(
        {("all-reduce", grad * elements): 4}
    )
    plan = cast_plan(f"{row}\n{STAGES}", "pp=2")
    (_, forward), (_, backward) = threads.run(record_messages, 2, plan, batch)
    sends = {
        key: count for key, count in planned_messages(plan, batch, 2).items() if key[0] == "send"
    }
    assert sends == {("send", stage * elements // 2): 4}
    assert forward == backward == [stage * elements // 2] * 2


def planned_messages(plan: Plan, batch: Any, micro: int = 1) -> Counter[Any]:
    """Return the messages that a plan predicts, except those of the loss."""
    sample = {name: value[: len(value) // micro] for name, value in batch.items()}
    prepared = prepare(plan, sample)
    collectives = list_collectives(plan, prepared, sample)
    counts: Counter[Any] = Counter()
    for collective in collectives:
        if collective.what != "loss and gradient norm":
            counts[collective.kind, collective.bytes] += collective.count
    return counts


def gathered_dtypes(plan: Plan, batch: Any) -> list[torch.dtype]:
    """Return the dtypes in which this rank gathers its slices; gradients must be float32."""
    program = build(plan, batch, optimizer=sgd)
    program.train_step(batch)
    from schedlang.runtime.adapters.fully_shard import groups_of

    units = [unit for sliced in program.assembly.sliced.values() for unit in sliced.units]
    parameters = [
        sliced for unit in units for group in groups_of(unit) for sliced in group.fsdp_params
    ]
    grads = (p.grad for p in program.assembly.parameters.values() if p.grad is not None)
    assert {grad.dtype for grad in grads} == {torch.float32}
    return [
        sliced._unsharded_param.dtype
        for sliced in parameters
        if hasattr(sliced, "_unsharded_param")
    ]


def test_slices_are_gathered_in_what_they_are_used_in(threads: Threads) -> None:
    """Half the bytes where all is cast; the stored dtype where an island needs the stored
    values."""
    batch = models.tokens(rows=4, mask=False)
    zero = "zero(stage=3, over=dp)"
    uncast = planned_messages(make_plan(models.gpt2(2).float(), zero, "dp=2"), batch)
    for row, in_bf16 in (("cast(bf16)", False), ("cast(bf16, params=true)", True)):
        plan = cast_plan(f"{row}\n{zero}", "dp=2")
        dtypes = {torch.bfloat16 if in_bf16 else torch.float32}
        assert set(threads.run(gathered_dtypes, 2, plan, batch)[0]) == dtypes
        counts = planned_messages(plan, batch)
        for (kind, size), count in uncast.items():
            assert counts[kind, size // 2 if in_bf16 and kind == "all-gather" else size] == count
    island = "cast(bf16, params=true)\ntransformer.h.*.ln_1 cast(fp32)\n"
    dtypes = set(threads.run(gathered_dtypes, 2, cast_plan(island + zero, "dp=2"), batch)[0])
    assert dtypes == {torch.bfloat16, torch.float32}


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, code, said",
    [
        ("cast(fp32, params=true)", "S890", "`cast(fp32)`"),
        ("cast(bf16, scale=1024)", "S890", "`bf16` takes no loss scaling"),
        ("cast(fp16, scale=1000)", "S890", "`scale` must be a power of two"),
        ("up cast(bf16)\ncast(bf16)", "S892", "put the row of the outer module first"),
        ("cast(bf16)\nup cast(fp16)", "S892", "cast(fp32)"),
        ("up cast(bf16)\nup cast(bf16)", "S501", "twice"),
        ("up cast(fp16)\ndown cast(fp16, scale=2)", "S893", "the rows name two loss scales"),
        ("up shard(col, over=dp)\nup cast(bf16)", "S503", "move `cast` above this `shard`"),
    ],
)
def test_refusals(rows: str, code: str, said: str) -> None:
    """Rows without meaning, repeated rows, and rows in the wrong place are refused."""
    with pytest.raises(Refusal) as error:
        make_plan(Net(), rows, "dp=2", "dtype")
    assert code in error.value.render() and said in error.value.render()


def test_refused_beside_what_cannot_follow() -> None:
    """Low-precision weights, compressed sums of scaled gradients, and a cast without `relax`."""
    coded = "cast(fp16)\nzero(stage=0, over=dp)\ncompress(gradients, int8, over=dp)"
    for model, rows, relax, code, message in (
        (Net().bfloat16(), "cast(bf16)", "dtype", "S891", "master weight"),
        (Net(), coded, "dtype, lossy", "S894", "`cast(bf16)`"),
        (Net(), "cast(bf16)", "", "S505", "relax(dtype)"),
    ):
        with pytest.raises(Refusal) as error:
            make_plan(model, rows, "dp=2", relax)
        assert code in error.value.render() and message in error.value.render(), rows


def test_in_the_limit_it_is_the_original(threads: Threads) -> None:
    """In float64, without rounding, every form equals the untouched model to 1e-9, with loss
    scaling too."""
    rows = "cast(fp16, params=true)\nnorm cast(fp32)\nzero(stage=1, over=dp)"
    plan = make_plan(Net().double(), rows, "dp=2", "dtype")
    assert_proven(threads, plan, [{"x": batch(seed)["x"].double()} for seed in range(2)])


def test_the_page_runs() -> None:
    """The Python of docs/cast.md runs: the scale, a skipped step, dtypes."""
    (source,) = fenced_blocks(ROOT / "docs" / "cast.md", "python")
    exec(compile(source, "docs/cast.md", "exec"), {"__name__": "shown"})
