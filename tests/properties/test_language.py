"""Properties 5, 6, 7, 14 of random schedules: row order, printing, undo, illegal rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.primitive import load_all, registry, relation_of
from schedlang.language import printer
from schedlang.language.syntax import parse
from schedlang.runtime.launch.pool import Pool
from schedlang.schedule import Schedule
from tests.engine import Threads
from tests.proofs import assert_same
from tests.properties import engine, schedules
from tests.properties.illegal import illegal
from tests.properties.profiles import examples
from tests.properties.schedules import Drawn


def test_every_primitive_is_drawn() -> None:
    """Every registered primitive has a generator, and every generator a primitive.

    Rows for losses over pairs of rows are drawn by user_models.py, which has such losses.
    """
    load_all()
    phases = {phase.split()[0] for phase in schedules.PHASES}
    assert set(schedules.GENERATORS) == set(registry()) - {"gather_rows"} == phases


@examples(40)
@given(schedules.legal())
def test_what_is_drawn_is_planned(drawn: Drawn) -> None:
    """Every drawn schedule can be planned, with one action for each row."""
    rows = [row for s in drawn.completed for row in s.rows]
    assert len(engine.plan_of(drawn).actions) == len(rows)


# -- 5 ---------------------------------------------------------------------------------------------


def _swapped_plans(drawn: Drawn, index: int) -> tuple[Any, Any]:
    """Return the plans of a drawn schedule and of the same with two adjacent rows swapped."""
    rows = [row for s in drawn.completed for row in s.rows]
    swapped_rows = [*rows[:index], rows[index + 1], rows[index], *rows[index + 2 :]]
    head = drawn.text.split("{\n")[0]
    model = drawn.config.model()
    texts = [
        f"{head}{{\n" + "\n".join(f"  {r}" for r in order) + "\n}\n"
        for order in (rows, swapped_rows)
    ]
    plan = Schedule(model, parse(Source("a.sched", texts[0]))).plan()
    try:
        return plan, Schedule(model, parse(Source("b.sched", texts[1]))).plan()
    except Refusal as refusal:
        return plan, refusal


def _plan_facts(plan: Any) -> Any:
    """Return the content of a plan without the order of its rows."""
    layouts = {n: (lay.shape, lay.padded, lay.splits) for n, lay in plan.layouts.items()}
    actions = sorted((a.name, a.sites, str(a.primitive)) for a in plan.actions)
    edges = {name: set(map(str, many)) for name, many in plan.boundaries.items()}
    return layouts, actions, edges, set(plan.cuts), set(plan.replicas), plan.order


@examples(40)
@given(schedules.legal(), st.data())
def test_5_commuting_rows_commute(drawn: Drawn, data: st.DataObject) -> None:
    """Adjacent rows of commuting primitives give the same plan in either order; other rows give
    the same plan or are refused at their place, never another plan."""
    count = sum(len(s.rows) for s in drawn.completed)
    if count < 2:
        return
    index = data.draw(st.integers(0, count - 2))
    plan, swapped = _swapped_plans(drawn, index)
    first_type, second_type = (type(plan.actions[k].primitive) for k in (index, index + 1))
    if isinstance(swapped, Refusal):
        relations = {relation_of(first_type, second_type), relation_of(second_type, first_type)}
        assert relations != {"commute"}, swapped.render()
        assert swapped.diagnostic.primary.span is not None
    else:
        assert _plan_facts(plan) == _plan_facts(swapped)


@examples(6)
@given(schedules.legal(), st.randoms(use_true_random=False))
def test_5_any_order_that_is_not_refused_is_the_same_program(
    threads: Threads, drawn: Drawn, random: Any
) -> None:
    """Rows in any legal order build a program with bitwise equal results."""
    text = drawn.text.split("\n")
    start = text.index(next(line for line in text if line.startswith('step "all"'))) + 1
    rows = text[start:-2]
    random.shuffle(rows)
    shuffled = "\n".join([*text[:start], *rows, *text[-2:]])
    model = drawn.config.model()
    try:
        plan = Schedule(model, parse(Source("b.sched", shuffled))).plan()
    except Refusal:
        return
    batches, loss = engine.batches_of(drawn), drawn.config.loss
    from tests.proofs import sgd, train_on_ranks

    result = train_on_ranks(threads, plan, batches, sgd, loss=loss, seed=engine.SEED)
    assert_same(result, engine.run_training(drawn, threads))


# -- 6 and 7 ---------------------------------------------------------------------------------------


@examples(40)
@given(schedules.legal())
def test_6_print_and_parse(drawn: Drawn) -> None:
    """A printed schedule parses to the same tree and prints the same text."""
    file = parse(Source("a.sched", drawn.text))
    text = printer.to_text(file)
    reparsed = parse(Source("b.sched", text))
    assert reparsed == file and printer.to_text(reparsed) == text


@examples(20)
@given(schedules.legal(), st.data())
def test_7_undo(drawn: Drawn, data: st.DataObject) -> None:
    """Undoing applied rows restores the plan, the text and the model."""
    sch = engine.schedule_of(drawn)
    model = sch.plan().model.model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plan, text = sch.plan(), sch.to_sched()
    sizes = dict(drawn.axes)
    offers = [
        s for m in schedules.GENERATORS.values() for s in m(drawn.config, sizes, drawn.length)
    ]
    compatible = [s for s in offers if not any(s.claims & o.claims for o in drawn.completed)]
    for extra in data.draw(st.lists(st.sampled_from(compatible), max_size=3)) if compatible else []:
        if _try_add(sch, extra):
            sch.undo()
    assert sch.plan() == plan and sch.to_sched() == text
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def _try_add(sch: Schedule, extra: schedules.Step) -> bool:
    """Add a step of one row in Python; returns False if it is refused."""
    with_rows = 'schedule 1\n\nstep "more" {\n  ' + extra.rows[0] + "\n}\n"
    (node,) = parse(Source("more.sched", with_rows)).items
    old_text = sch.to_sched()
    try:
        sch._declare(node)  # a step as from a file
    except Refusal:
        assert sch.to_sched() == old_text
        return False
    return True


# -- 14 --------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
    "broadcast_object_list",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "barrier",
    "all_to_all_single",
)


def _refusal_on_rank(drawn: Drawn) -> tuple[str, bool, list[str]]:
    """Build on this rank; returns the refusal, if it has a place, and earlier collectives."""
    from schedlang.passes.lower.build import build

    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for name in COLLECTIVES if hasattr(torch.distributed, name)):
            collective = getattr(torch.distributed, name)
            patch.setattr(
                torch.distributed,
                name,
                lambda *a, _n=name, _f=collective, **k: (called.append(_n), _f(*a, **k))[1],
            )
        try:
            build(engine.plan_of(drawn), engine.batches_of(drawn)[0], loss=drawn.config.loss)
        except Refusal as refusal:
            placed = refusal.diagnostic.primary.span is not None
            return refusal.render(), placed, called
    return "", False, called


@examples(16)
@given(illegal())
def test_14_illegal_rows_are_refused_alike(pool: Pool, drawn: Drawn) -> None:
    """An illegal row is refused with the same message on every rank, before any collective, and at
    its place."""
    results = pool.run(_refusal_on_rank, drawn.world, drawn)
    message, placed, _ = results[0]
    assert message, f"not refused: {drawn.illegal}"
    assert all(result == results[0] for result in results)
    assert placed or not drawn.illegal, message
    assert all(not called for _, _, called in results)


def test_14_would_notice() -> None:
    """The check itself: a legal schedule is not refused, an illegal one is."""
    fine = Drawn(schedules.Config(), (("tp", 1),))
    assert _refusal_on_rank(fine)[0] == ""
    assert _refusal_on_rank(replace(fine, illegal="blocks.9  checkpoint()"))[1]
