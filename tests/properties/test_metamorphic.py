"""Properties 4, 8, 10, 11, 13 of random schedules: pairs of runs that must agree."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from tests.engine import Threads
from tests.proofs import Observed, adamw, assert_near, assert_same, prepare_plan
from tests.properties import engine, schedules
from tests.properties.models import Batch, Block, Config
from tests.properties.profiles import examples
from tests.properties.schedules import MESHES, Drawn, Step, allowed

SMALL_MESHES = st.sampled_from([mesh for mesh in MESHES if len(mesh) < 3])


def _without_batch_norm(config: Config) -> Config:
    """Return the configuration without blocks that depend on how the batch is split."""
    norms = {"conv": "past"}
    blocks = tuple(
        replace(b, norm=norms.get(b.kind, b.norm) if b.norm == "batch" else b.norm, average=False)
        for b in config.blocks
    )
    return replace(config, blocks=blocks)


def _with_steps(drawn: Drawn, verb: str, steps: Sequence[Step]) -> Drawn:
    """Replace the steps of one verb in a drawn schedule."""
    other_steps = [s for s in drawn.steps if s.verb != verb]
    return replace(drawn, steps=allowed((*steps, *other_steps), drawn.config, drawn.axes))


@examples(5)
@given(schedules.legal(), st.data())
def test_4_parts_and_stages_do_not_matter(
    threads: Threads, drawn: Drawn, data: st.DataObject
) -> None:
    """Another number of microbatches, pipeline order or ZeRO stage gives the same losses,
    gradients, norms, parameters and optimizer state."""
    drawn = replace(drawn, config=_without_batch_norm(drawn.config))
    sizes, length = dict(drawn.axes), drawn.length
    orders = schedules.pipeline(drawn.config, sizes, length)
    zeros = schedules.zero(drawn.config, sizes, length)
    other = _with_steps(drawn, "pipeline", [data.draw(st.sampled_from(orders))])
    if zeros:
        other = _with_steps(other, "zero", [data.draw(st.sampled_from(zeros))])
    rows = max(drawn.rows, other.rows)
    batches = engine.batches_of(drawn, 2, rows)
    result, other_result = (
        engine.run_training(d, threads, batches, adamw, clip=0.1) for d in (drawn, other)
    )
    assert_near(result, other_result)


# -- 8 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """A training run of some steps on one layout, which may load and save its state."""

    drawn: Drawn
    load: str = ""
    save: str = ""

    def run(self, threads: Threads, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Run the steps and return the state of rank 0."""
        with enter_modes(Float64()):
            plan = engine.plan_of(self.drawn)
        prepared = prepare_plan(plan, batches, self.drawn.config.loss)
        state: dict[str, Tensor] = threads.run(
            _run_leg, self.drawn.world, self, *prepared, batches
        )[0]
        return state


def _run_leg(
    leg: Leg, plan: Plan, prepared: Prepared, batches: Sequence[Batch]
) -> dict[str, Tensor]:
    """On this rank: load, train, save; returns full model and optimizer state."""
    from schedlang.passes.lower.build import build

    with enter_modes(Float64()):
        program = build(
            plan,
            batches[0],
            optimizer=adamw,
            clip=0.1,
            loss=leg.drawn.config.loss,
            seed=engine.SEED,
            prepared=prepared,
        )
        if leg.load:
            program.load(leg.load)
        for batch in batches:
            program.train_step(batch)
        if leg.save:
            program.save(leg.save)
    state = {f"state {name}": value.clone() for name, value in program.state_dict().items()}
    for name, slots in program.optimizer_state().items():
        state |= {f"optimizer {s} {name}": torch.as_tensor(v).clone() for s, v in slots.items()}
    return state


def _without_relaxed(steps: tuple[schedules.Step, ...]) -> tuple[schedules.Step, ...]:
    """Return the steps whose verbs need no `relax`."""
    return tuple(checked_step for checked_step in steps if checked_step.verb not in schedules.RELAX)


@examples(4)
@given(schedules.legal(), SMALL_MESHES, st.data())
def test_8_saved_here_loaded_there(
    threads: Threads, drawn: Drawn, mesh: schedules.Axes, data: st.DataObject
) -> None:
    """Saving on one layout and resuming on another equals training without interruption; names and
    full shapes of the state are the original's."""
    drawn = replace(
        drawn, config=_without_batch_norm(drawn.config), steps=_without_relaxed(drawn.steps)
    )
    config, sizes = drawn.config, dict(mesh)
    if sizes.get("pp", 1) > len(config.blocks):
        return
    offers = [s for make in schedules.GENERATORS.values() for s in make(config, sizes, 3)]
    steps = data.draw(st.lists(st.sampled_from(offers), max_size=5)) if offers else []
    other = Drawn(config, mesh, _without_relaxed(allowed(steps, config, mesh)), length=drawn.length)
    first, second = engine.batches_of(drawn, 2, max(drawn.rows, other.rows))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/state"
        Leg(drawn, save=path).run(threads, [first])
        # dropout masks depend on the step count, which is saved
        resumed = Leg(other, load=path).run(threads, [second])
    uninterrupted = Leg(drawn).run(threads, [first, second])
    assert_near(resumed, uninterrupted)
    original_state = config.model().state_dict()
    shapes_found = {
        n.removeprefix("state "): v for n, v in resumed.items() if n.startswith("state ")
    }
    assert {n: v.shape for n, v in shapes_found.items()} == {
        n: v.shape for n, v in original_state.items()
    }


# -- 10 and 11 -------------------------------------------------------------------------------------


def _loss_and_grads(observed: Observed) -> Observed:
    return {name: value for name, value in observed.items() if name.startswith(("loss", "grad"))}


def _select_rows(batch: Any, rows: Sequence[int], count: int) -> Any:
    """Select rows of a batch, in the given order."""
    from torch.utils import _pytree as pytree

    has_rows = lambda v: isinstance(v, Tensor) and v.ndim and len(v) == count  # noqa: E731
    return pytree.tree_map(lambda v: v[list(rows)] if has_rows(v) else v, batch)


def _without_dropout(drawn: Drawn) -> Drawn:
    """Return the drawn schedule without dropout, whose masks depend on row numbers."""
    return replace(drawn, config=replace(_without_batch_norm(drawn.config), dropout=0.0))


@examples(5)
@given(schedules.legal(), st.randoms(use_true_random=False))
def test_10_ranks_and_rows_may_be_renumbered(threads: Threads, drawn: Drawn, random: Any) -> None:
    """Permuting the axes of the mesh and the rows of the batch (other rows on each rank and in each
    microbatch) gives the same loss and gradients."""
    drawn = _without_dropout(drawn)
    # the rows of every part change, and with them the number of labels per part
    (batch,) = engine.batches_of(drawn)
    order = list(range(drawn.rows))
    random.shuffle(order)
    axes = list(drawn.axes)
    random.shuffle(axes)
    other = replace(drawn, axes=tuple(axes))
    result = engine.run_training(other, threads, [_select_rows(batch, order, drawn.rows)])
    assert_near(
        _loss_and_grads(result), _loss_and_grads(engine.run_training(drawn, threads, [batch]))
    )


def _padded_text_config(config: Config) -> Config:
    """Return the configuration of a text model whose results do not depend on padding."""
    kinds = ("mlp", "attention", "chain", "experts", "twice", "custom")
    blocks = tuple(b if b.kind in kinds else Block("mlp", b.hidden) for b in config.blocks)
    seeing = tuple(replace(b, causal=True) if b.kind == "attention" else b for b in blocks)
    return replace(config, blocks=seeing, entry="words", mask=True, returns="dict", side=False)


def _padded_text(drawn: Drawn) -> Drawn:
    """Return the drawn schedule on such a model; steps that it does not offer are left out."""
    drawn = _without_dropout(drawn)
    config = _padded_text_config(drawn.config)
    sizes = dict(drawn.axes)
    offers = [s for m in schedules.GENERATORS.values() for s in m(config, sizes, drawn.length)]
    steps = tuple(s for s in drawn.steps if s in offers)
    return replace(drawn, config=config, steps=allowed(steps, config, drawn.axes))


@examples(4)
@given(schedules.legal(), st.integers(1, 3))
def test_10_more_padding_changes_nothing(threads: Threads, drawn: Drawn, more: int) -> None:
    """Padding tokens at the end of every row do not change loss and gradients."""
    drawn = _padded_text(drawn)
    (batch,) = engine.batches_of(drawn)
    fill = {"ids": 0, "labels": -100, "mask": 0}
    padded = {
        name: torch.nn.functional.pad(value, (0, more), value=fill[name])
        for name, value in batch.items()
    }
    result = engine.run_training(drawn, threads, [padded])
    assert_near(
        _loss_and_grads(result), _loss_and_grads(engine.run_training(drawn, threads, [batch]))
    )


@examples(4)
@given(schedules.legal(), st.data())
def test_11_a_row_without_labels_weighs_nothing(
    threads: Threads, drawn: Drawn, data: st.DataObject
) -> None:
    """A row whose labels are all ignored is equal to no row."""
    drawn = replace(_padded_text(drawn), spare=2)
    (batch,) = engine.batches_of(drawn)
    ignored_row = data.draw(st.integers(1, drawn.rows - 1))
    remaining = [row for row in range(drawn.rows) if row != ignored_row]
    without = _select_rows(batch, remaining, drawn.rows)
    batch["labels"][ignored_row] = -100
    result = engine.run_training(drawn, threads, [batch])
    assert_near(
        _loss_and_grads(result), _loss_and_grads(engine.run_training(drawn, threads, [without]))
    )


@dataclass(frozen=True)
class Scaled:
    """A loss multiplied by a factor."""

    loss: Any
    factor: float

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        return self.factor * self.loss(output, batch)


@examples(4)
@given(schedules.legal())
def test_11_gradients_are_linear_in_the_loss(threads: Threads, drawn: Drawn) -> None:
    """Twice the loss gives exactly twice the gradients, bitwise: 2 is a power of two."""
    config = replace(_without_batch_norm(drawn.config), returns="tuple", entry="floats", tied=False)
    sizes = dict(drawn.axes)
    offers = [s for m in schedules.GENERATORS.values() for s in m(config, sizes, drawn.length)]
    # without `fuse`, which compiles for every shape; it has its own tests
    steps = tuple(s for s in drawn.steps if s in offers and s.verb != "fuse")
    drawn = replace(drawn, config=config, steps=allowed(steps, config, drawn.axes))
    once = _loss_and_grads(engine.run_training(drawn, threads))
    twice = _loss_and_grads(engine.run_training(drawn, threads, loss=Scaled(config.loss, 2.0)))
    assert_same(twice, {name: 2 * value for name, value in once.items()})


# -- 13 --------------------------------------------------------------------------------------------


def _round_trip(
    plan: Plan, prepared: Prepared, loss: Any, batches: Sequence[Batch]
) -> list[list[Tensor]]:
    """Return outputs of the first batch on this rank, before and after training."""
    from schedlang.passes.lower.build import build
    from schedlang.runtime.tracing.meta_runs import tensors_in

    program = build(plan, batches[0], loss=loss, seed=engine.SEED, prepared=prepared)
    outputs = [tensors_in(program.eval_step(batches[0]))]
    program.train_step(batches[1])
    program.eval_step(batches[1])
    outputs.append(tensors_in(program.eval_step(batches[0])))
    reordered = dict(reversed(batches[0].items()))
    outputs.append(tensors_in(program.eval_step(reordered)))
    return outputs


@examples(4)
@given(schedules.legal())
def test_13_evaluation_remembers_nothing(threads: Threads, drawn: Drawn) -> None:
    """Evaluation is bitwise equal before and after a training step and a call with another shape,
    and for any order of keyword arguments."""
    blocks = tuple(b for b in _without_batch_norm(drawn.config).blocks if b.norm != "batch")
    config = replace(drawn.config, blocks=blocks or (Block(),), skip=None, frozen="")
    if len(blocks) < dict(drawn.axes).get("pp", 1):
        return
    sizes = dict(drawn.axes)
    offers = [s for m in schedules.GENERATORS.values() for s in m(config, sizes, drawn.length)]
    steps = tuple(s for s in drawn.steps if s in offers)
    drawn = replace(drawn, config=config, steps=allowed(steps, config, drawn.axes))
    batches = engine.batches_of(drawn, 2)
    prepared = prepare_plan(engine.plan_of(drawn), batches, config.loss)
    for outputs in threads.run(_round_trip, drawn.world, *prepared, config.loss, batches):
        first, second, third = outputs
        assert len(first) == len(second) == len(third) > 0
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*outputs))
