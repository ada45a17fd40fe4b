"""Properties 4, 8, 10, 11 and 13: two runs that must agree, whatever the right answer is."""

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
from tests.proofs import Seen, adamw, assert_near, assert_same, made
from tests.properties import engine, schedules
from tests.properties.models import Batch, Block, Config
from tests.properties.profiles import examples
from tests.properties.schedules import MESHES, Drawn, Step, allowed

PLAIN = st.sampled_from([mesh for mesh in MESHES if len(mesh) < 3])


def _splittable(config: Config) -> Config:
    """The configuration with blocks that no split of the batch changes."""
    norms = {"conv": "past"}
    blocks = tuple(
        replace(b, norm=norms.get(b.kind, b.norm) if b.norm == "batch" else b.norm, average=False)
        for b in config.blocks
    )
    return replace(config, blocks=blocks)


def _with(drawn: Drawn, verb: str, steps: Sequence[Step]) -> Drawn:
    """The drawn schedule with other steps of one verb, put first."""
    kept = [s for s in drawn.steps if s.verb != verb]
    return replace(drawn, steps=allowed((*steps, *kept), drawn.config, drawn.axes))


@examples(5)
@given(schedules.legal(), st.data())
def test_4_parts_and_stages_do_not_matter(
    threads: Threads, drawn: Drawn, data: st.DataObject
) -> None:
    """Another number of microbatches, another order and another stage of ZeRO give the same losses,
    gradients, norms, parameters and optimizer state."""
    drawn = replace(drawn, config=_splittable(drawn.config))
    sizes, length = dict(drawn.axes), drawn.length
    orders = schedules.pipeline(drawn.config, sizes, length)
    zeros = schedules.zero(drawn.config, sizes, length)
    other = _with(drawn, "pipeline", [data.draw(st.sampled_from(orders))])
    if zeros:
        other = _with(other, "zero", [data.draw(st.sampled_from(zeros))])
    rows = max(drawn.rows, other.rows)
    batches = engine.batches_of(drawn, 2, rows)
    one, two = (engine.seen(d, threads, batches, adamw, clip=0.1) for d in (drawn, other))
    assert_near(one, two)


# -- 8 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """A run of some steps on one layout, from a saved state and into one."""

    drawn: Drawn
    load: str = ""
    save: str = ""

    def run(self, threads: Threads, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """What rank 0 has at the end."""
        with enter_modes(Float64()):
            plan = engine.plan_of(self.drawn)
        ready = made(plan, batches, self.drawn.config.loss)
        found: dict[str, Tensor] = threads.run(_leg, self.drawn.world, self, *ready, batches)[0]
        return found


def _leg(leg: Leg, plan: Plan, ready: Prepared, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """On this rank: load, train, save; whole state and optimizer state at the end."""
    from schedlang.passes.lower.build import build

    with enter_modes(Float64()):
        program = build(
            plan,
            batches[0],
            optimizer=adamw,
            clip=0.1,
            loss=leg.drawn.config.loss,
            seed=engine.SEED,
            prepared=ready,
        )
        if leg.load:
            program.load(leg.load)
        for batch in batches:
            program.train_step(batch)
        if leg.save:
            program.save(leg.save)
    found = {f"state {name}": value.clone() for name, value in program.state_dict().items()}
    for name, slots in program.optimizer_state().items():
        found |= {f"optimizer {s} {name}": torch.as_tensor(v).clone() for s, v in slots.items()}
    return found


def _same(steps: tuple[schedules.Step, ...]) -> tuple[schedules.Step, ...]:
    """The steps that train what the original trains, to the same values."""
    return tuple(one for one in steps if one.verb not in schedules.RELAX)


@examples(4)
@given(schedules.legal(), PLAIN, st.data())
def test_8_saved_here_loaded_there(
    threads: Threads, drawn: Drawn, mesh: schedules.Axes, data: st.DataObject
) -> None:
    """State saved under one layout and loaded under another, then one more step, is what that step
    gives without saving; names and whole shapes of the state are the original's."""
    drawn = replace(drawn, config=_splittable(drawn.config), steps=_same(drawn.steps))
    config, sizes = drawn.config, dict(mesh)
    if sizes.get("pp", 1) > len(config.blocks):
        return
    offers = [s for make in schedules.GENERATORS.values() for s in make(config, sizes, 3)]
    steps = data.draw(st.lists(st.sampled_from(offers), max_size=5)) if offers else []
    other = Drawn(config, mesh, _same(allowed(steps, config, mesh)), length=drawn.length)
    first, second = engine.batches_of(drawn, 2, max(drawn.rows, other.rows))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/state"
        Leg(drawn, save=path).run(threads, [first])
        # dropout masks are of the step, which is saved, too
        moved = Leg(other, load=path).run(threads, [second])
    stayed = Leg(drawn).run(threads, [first, second])
    assert_near(moved, stayed)
    whole = config.model().state_dict()
    found = {n.removeprefix("state "): v for n, v in moved.items() if n.startswith("state ")}
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in whole.items()}


# -- 10 and 11 -------------------------------------------------------------------------------------


def _grads(found: Seen) -> Seen:
    return {name: value for name, value in found.items() if name.startswith(("loss", "grad"))}


def _picked(batch: Any, rows: Sequence[int], count: int) -> Any:
    """The batch with these of its rows, in this order."""
    from torch.utils import _pytree as pytree

    whole = lambda v: isinstance(v, Tensor) and v.ndim and len(v) == count  # noqa: E731
    return pytree.tree_map(lambda v: v[list(rows)] if whole(v) else v, batch)


def _quiet(drawn: Drawn) -> Drawn:
    """The drawn schedule of a model without dropout, whose masks belong to numbers of rows."""
    return replace(drawn, config=replace(_splittable(drawn.config), dropout=0.0))


@examples(5)
@given(schedules.legal(), st.randoms(use_true_random=False))
def test_10_ranks_and_rows_may_be_renumbered(threads: Threads, drawn: Drawn, random: Any) -> None:
    """Axes of the mesh in another sequence, and rows of the batch in another order (other rows on
    each rank, in each microbatch), give the same loss and gradients."""
    drawn = _quiet(drawn)
    # a loss over the labels of parts in other sizes: the rows of every part change
    (batch,) = engine.batches_of(drawn)
    order = list(range(drawn.rows))
    random.shuffle(order)
    axes = list(drawn.axes)
    random.shuffle(axes)
    other = replace(drawn, axes=tuple(axes))
    found = engine.seen(other, threads, [_picked(batch, order, drawn.rows)])
    assert_near(_grads(found), _grads(engine.seen(drawn, threads, [batch])))


def _worded(config: Config) -> Config:
    """A model of words whose padding nothing can see."""
    kinds = ("mlp", "attention", "chain", "experts", "twice", "custom")
    blocks = tuple(b if b.kind in kinds else Block("mlp", b.hidden) for b in config.blocks)
    seeing = tuple(replace(b, causal=True) if b.kind == "attention" else b for b in blocks)
    return replace(config, blocks=seeing, entry="words", mask=True, returns="dict", side=False)


def _words(drawn: Drawn) -> Drawn:
    """The drawn schedule on such a model; what the model does not offer is left out."""
    drawn = _quiet(drawn)
    config = _worded(drawn.config)
    sizes = dict(drawn.axes)
    offers = [s for m in schedules.GENERATORS.values() for s in m(config, sizes, drawn.length)]
    steps = tuple(s for s in drawn.steps if s in offers)
    return replace(drawn, config=config, steps=allowed(steps, config, drawn.axes))


@examples(4)
@given(schedules.legal(), st.integers(1, 3))
def test_10_more_padding_changes_nothing(threads: Threads, drawn: Drawn, more: int) -> None:
    """Tokens of padding, behind every row, change no loss and no gradient."""
    drawn = _words(drawn)
    (batch,) = engine.batches_of(drawn)
    fill = {"ids": 0, "labels": -100, "mask": 0}
    padded = {
        name: torch.nn.functional.pad(value, (0, more), value=fill[name])
        for name, value in batch.items()
    }
    found = engine.seen(drawn, threads, [padded])
    assert_near(_grads(found), _grads(engine.seen(drawn, threads, [batch])))


@examples(4)
@given(schedules.legal(), st.data())
def test_11_a_row_without_labels_weighs_nothing(
    threads: Threads, drawn: Drawn, data: st.DataObject
) -> None:
    """A sample none of whose labels counts is as good as no sample."""
    drawn = replace(_words(drawn), spare=2)
    (batch,) = engine.batches_of(drawn)
    gone = data.draw(st.integers(1, drawn.rows - 1))
    left = [row for row in range(drawn.rows) if row != gone]
    without = _picked(batch, left, drawn.rows)
    batch["labels"][gone] = -100
    found = engine.seen(drawn, threads, [batch])
    assert_near(_grads(found), _grads(engine.seen(drawn, threads, [without])))


@dataclass(frozen=True)
class Scaled:
    """A loss, many times."""

    loss: Any
    factor: float

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        return self.factor * self.loss(output, batch)


@examples(4)
@given(schedules.legal())
def test_11_gradients_are_linear_in_the_loss(threads: Threads, drawn: Drawn) -> None:
    """Twice the loss has twice the gradients, to the last bit: 2 is a power of two."""
    config = replace(_splittable(drawn.config), returns="tuple", entry="floats", tied=False)
    sizes = dict(drawn.axes)
    offers = [s for m in schedules.GENERATORS.values() for s in m(config, sizes, drawn.length)]
    # what is fused is compiled anew for every shape: tests of `fuse` evaluate it
    steps = tuple(s for s in drawn.steps if s in offers and s.verb != "fuse")
    drawn = replace(drawn, config=config, steps=allowed(steps, config, drawn.axes))
    once = _grads(engine.seen(drawn, threads))
    twice = _grads(engine.seen(drawn, threads, loss=Scaled(config.loss, 2.0)))
    assert_same(twice, {name: 2 * value for name, value in once.items()})


# -- 13 --------------------------------------------------------------------------------------------


def _round_trip(drawn: Drawn, batches: Sequence[Batch]) -> list[list[Tensor]]:
    """On this rank: outputs of the first batch before and after training and other shapes."""
    from schedlang.passes.lower.build import build
    from schedlang.runtime.tracing.meta_runs import tensors_in

    made = build(engine.plan_of(drawn), batches[0], loss=drawn.config.loss, seed=engine.SEED)
    found = [tensors_in(made.eval_step(batches[0]))]
    made.train_step(batches[1])
    made.eval_step(batches[1])
    found.append(tensors_in(made.eval_step(batches[0])))
    reordered = dict(reversed(batches[0].items()))
    found.append(tensors_in(made.eval_step(reordered)))
    return found


@examples(4)
@given(schedules.legal())
def test_13_evaluation_remembers_nothing(threads: Threads, drawn: Drawn) -> None:
    """Evaluation gives the same bits before and after a step in training and a call of another
    shape and mask, and whatever the sequence of the keyword arguments."""
    blocks = tuple(b for b in _splittable(drawn.config).blocks if b.norm != "batch")
    config = replace(drawn.config, blocks=blocks or (Block(),), skip=None, frozen="")
    if len(blocks) < dict(drawn.axes).get("pp", 1):
        return
    sizes = dict(drawn.axes)
    offers = [s for m in schedules.GENERATORS.values() for s in m(config, sizes, drawn.length)]
    steps = tuple(s for s in drawn.steps if s in offers)
    drawn = replace(drawn, config=config, steps=allowed(steps, config, drawn.axes))
    batches = engine.batches_of(drawn, 2)
    for found in threads.run(_round_trip, drawn.world, drawn, batches):
        first, second, third = found
        assert len(first) == len(second) == len(third) > 0
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found))
