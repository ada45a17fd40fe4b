"""Properties 1, 2, 3, 9, 12 of random schedules: results equal those of the original model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedlang.passes.complete.complete import complete_plan
from schedlang.passes.static_checks.static import static
from schedlang.runtime.launch.pool import Pool
from tests.engine import Threads
from tests.proofs import adamw, assert_same, sgd, train_sequential, train_steps
from tests.properties import engine, schedules
from tests.properties.profiles import examples
from tests.properties.schedules import MESHES, Drawn, Step, allowed
from tests.properties.shrink import shrinking

MESHES_OF_ONE = ((("tp", 1),), (("dp", 1), ("pp", 1), ("tp", 1)), (("pp", 1), ("ep", 1), ("dp", 1)))
UNIT = 2.0**20
EXACT = {"pad", "checkpoint", "offload", "shard", "zero", "pipeline_split", "verify"}


@shrinking
@examples(16)
@given(schedules.legal())
def test_1_a_legal_schedule_is_the_original(threads: Threads, drawn: Drawn) -> None:
    """Any legal schedule gives the same outputs, loss, gradients (also inputs), norm, parameters,
    optimizer state and buffers as the original, in float64 within 1e-9, after one step."""
    engine.assert_holds(drawn, threads)


@shrinking
@examples(6)
@given(schedules.legal(used=True))
def test_1_a_parameter_used_twice_is_the_original(threads: Threads, drawn: Drawn) -> None:
    """The same if something is used in two places and a row shards one of them; refused where no
    reduction over ranks is right for both."""
    engine.assert_holds(drawn, threads)


@shrinking
@examples(4)
@given(schedules.legal())
def test_1_the_whole_proof(threads: Threads, drawn: Drawn) -> None:
    """The same after three steps on batches of different shapes, with two optimizers, with and
    without clipping, with state saved and loaded."""
    engine.assert_holds(drawn, threads, engine.whole)


@examples(12)
@given(schedules.legal())
def test_1_so_say_the_static_proofs(drawn: Drawn) -> None:
    """Static proofs accept every legal schedule: no false alarms."""
    if drawn.refused:
        return
    case = engine.case_of(drawn, 1)
    batch, loss = case.batches[0], case.loss
    report = static(complete_plan(case.plan, batch, loss), batch, loss)
    assert report.problems == (), [
        (problem.code, problem.title, problem.notes) for problem in report.problems
    ]


@pytest.mark.deep
@shrinking
@examples(6)
@given(schedules.legal(most=14))
def test_1_the_whole_proof_of_long_schedules(threads: Threads, drawn: Drawn) -> None:
    """The same, for schedules of up to fourteen steps."""
    engine.assert_holds(drawn, threads, engine.whole)


@examples(10)
@given(schedules.legal(MESHES_OF_ONE), st.sampled_from([sgd, adamw]), st.sampled_from([None, 0.01]))
def test_2_a_mesh_of_ones_is_the_original(drawn: Drawn, optimizer: Any, clip: float | None) -> None:
    """On one rank every schedule is bitwise equal to the plain training loop, for two steps."""
    drawn = replace(drawn, steps=tuple(s for s in drawn.steps if s.verb in EXACT))
    batches, loss = engine.batches_of(drawn, 2), drawn.config.loss
    options = {"loss": loss, "seed": engine.SEED}
    result = train_steps(engine.plan_of(drawn), batches, optimizer, clip, options)
    model = engine.plan_of(drawn).model.model
    expected = train_sequential(model, batches, optimizer, clip=clip, loss=loss, seed=engine.SEED)
    assert_same(result, expected)


def _memory_steps(drawn: Drawn) -> list[Step]:
    """Return all checkpoint and offload steps that the model offers."""
    sizes = dict(drawn.axes)
    makers = [schedules.GENERATORS[verb] for verb in ("checkpoint", "offload")]
    return [
        memory_step for make in makers for memory_step in make(drawn.config, sizes, drawn.length)
    ]


@examples(6)
@given(schedules.legal(), st.data())
def test_3_memory_rows_change_no_bit(threads: Threads, drawn: Drawn, data: st.DataObject) -> None:
    """`checkpoint` and `offload`, added to any schedule, keep training bitwise equal, with
    dropout."""
    other_steps = tuple(s for s in drawn.steps if s.verb not in ("checkpoint", "offload"))
    drawn = replace(drawn, config=replace(drawn.config, dropout=0.25), steps=other_steps)
    offers = _memory_steps(drawn)
    memory_steps = (
        data.draw(st.lists(st.sampled_from(offers), min_size=1, max_size=4)) if offers else []
    )
    with_rows = replace(
        drawn, steps=allowed((*other_steps, *memory_steps), drawn.config, drawn.axes)
    )
    assert_same(engine.run_training(with_rows, threads), engine.run_training(drawn, threads))


def _held_elements(drawn: Drawn) -> list[dict[str, list[float]]]:
    """Train one step on this rank; returns the elements that it holds of each parameter."""
    from schedlang.passes.lower.build import build
    from schedlang.runtime.grad_reduction.zero import reshard_all
    from schedlang.runtime.storage.offloaded_gradients import local_tensor

    plan = engine.plan_of(drawn)
    start = 1.0
    with torch.no_grad():
        for parameter in plan.model.model.parameters():
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype) + start
            parameter.copy_(numbers.view_as(parameter) / UNIT)  # small: no gradient overflows
            start += parameter.numel()
    (batch,) = engine.batches_of(drawn)
    program = build(plan, batch, optimizer=_zero_lr_sgd, loss=drawn.config.loss, seed=engine.SEED)
    program.train_step(batch)
    reshard_all(program.assembly.sliced)
    errors = max(program.replica_errors().values(), default=0.0)
    assert errors == 0.0, errors
    return [
        {
            name: (local_tensor(p) * UNIT).flatten().tolist()
            for name, p in program.assembly.parameters.items()
        }
    ]


def _zero_lr_sgd(named_parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.0)


@examples(8)
@given(schedules.legal(MESHES[1:]))
def test_9_shards_are_disjoint_and_cover(pool: Pool, drawn: Drawn) -> None:
    """After a step replicas are equal, no rank holds an element twice, and every element of every
    parameter is held by equally many ranks, at least one."""
    held_elements = [part for (part,) in pool.run(_held_elements, drawn.world, drawn)]
    model = engine.plan_of(drawn).model.model
    start = 1
    for name, parameter in model.named_parameters():
        expected = range(start, start + parameter.numel())
        start += parameter.numel()
        parts = [
            [x for x in part.get(name, []) if x != 0.0] for part in held_elements
        ]  # 0 is padding
        assert all(len(set(part)) == len(part) for part in parts), name
        counts = [sum(x in part for part in map(set, parts)) for x in expected]
        assert set(counts) == {counts[0]} and counts[0] > 0, (name, counts)
        assert not {x for part in parts for x in part} - set(expected), name


@examples(4)
@given(schedules.legal())
def test_12_the_model_is_not_touched(threads: Threads, drawn: Drawn) -> None:
    """Planning, proving and training do not change the user's module: values, hooks, flags."""
    case = engine.case_of(drawn, 1)
    model = case.plan.model.base.model
    before = _snapshot(model)
    if not drawn.refused:
        threads.run(
            train_steps,
            drawn.world,
            case.plan,
            case.batches,
            sgd,
            None,
            {"loss": case.loss, "seed": 0},
        )
    engine.cheap(drawn, threads) if not drawn.refused else None
    after = _snapshot(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        is_equal = (
            torch.equal(value, after[name]) if torch.is_tensor(value) else value == after[name]
        )
        assert is_equal, name


def _snapshot(model: torch.nn.Module) -> dict[str, Any]:
    snapshot: dict[str, Any] = {f"state {n}": v.clone() for n, v in model.state_dict().items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        snapshot[f"parameter {name}"] = (id(parameter), parameter.requires_grad, parameter.grad)
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in vars(module).items() if k.endswith("_hooks")]
        snapshot[f"module {name}"] = (type(module), module.training, hooks, sorted(vars(module)))
    return snapshot
