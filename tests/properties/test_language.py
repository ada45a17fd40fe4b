"""Properties 5, 6, 7 and 14: what a text means, what may be swapped, taken back or is refused."""

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
    """Each primitive of the registry has a generator, and each generator a primitive."""
    load_all()
    phases = {phase.split()[0] for phase in schedules.PHASES}
    assert set(schedules.GENERATORS) == set(registry()) == phases


@examples(40)
@given(schedules.legal())
def test_what_is_drawn_is_planned(drawn: Drawn) -> None:
    """Every drawn schedule has a plan, with an action for each of its rows."""
    rows = [row for s in drawn.completed for row in s.rows]
    assert len(engine.plan_of(drawn).actions) == len(rows)


# -- 5 ---------------------------------------------------------------------------------------------


def _swapped(drawn: Drawn, place: int) -> tuple[Any, Any]:
    """The plans of a drawn schedule and of the same with two neighbouring rows swapped."""
    rows = [row for s in drawn.completed for row in s.rows]
    other = [*rows[:place], rows[place + 1], rows[place], *rows[place + 2 :]]
    head = drawn.text.split("{\n")[0]
    model = drawn.config.model()
    texts = [f"{head}{{\n" + "\n".join(f"  {r}" for r in some) + "\n}\n" for some in (rows, other)]
    first = Schedule(model, parse(Source("a.sched", texts[0]))).plan()
    try:
        return first, Schedule(model, parse(Source("b.sched", texts[1]))).plan()
    except Refusal as refusal:
        return first, refusal


def _facts(plan: Any) -> Any:
    """All that a plan says but the order of its rows."""
    named = {n: (lay.shape, lay.padded, lay.splits) for n, lay in plan.layouts.items()}
    what = sorted((a.name, a.sites, str(a.primitive)) for a in plan.actions)
    edges = {name: set(map(str, many)) for name, many in plan.boundaries.items()}
    return named, what, edges, set(plan.cuts), set(plan.replicas), plan.order


@examples(40)
@given(schedules.legal(), st.data())
def test_5_commuting_rows_commute(drawn: Drawn, data: st.DataObject) -> None:
    """Two rows whose primitives commute give the same plan in either order; two that stand in an
    order or meet give the same plan or are refused at their place, never another plan."""
    count = sum(len(s.rows) for s in drawn.completed)
    if count < 2:
        return
    place = data.draw(st.integers(0, count - 2))
    first, other = _swapped(drawn, place)
    one, two = (type(first.actions[k].primitive) for k in (place, place + 1))
    if isinstance(other, Refusal):
        both = {relation_of(one, two), relation_of(two, one)}
        assert both != {"commute"}, other.render()
        assert other.diagnostic.primary.span is not None
    else:
        assert _facts(first) == _facts(other)


@examples(6)
@given(schedules.legal(), st.randoms(use_true_random=False))
def test_5_any_order_that_is_not_refused_is_the_same_program(
    threads: Threads, drawn: Drawn, random: Any
) -> None:
    """Rows in any order that is legal build the same program, to the last bit."""
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
    from tests.proofs import sgd, trained

    found = trained(threads, plan, batches, sgd, loss=loss, seed=engine.SEED)
    assert_same(found, engine.seen(drawn, threads))


# -- 6 and 7 ---------------------------------------------------------------------------------------


@examples(40)
@given(schedules.legal())
def test_6_print_and_parse(drawn: Drawn) -> None:
    """Printing a parsed schedule gives a text that parses to the same, and prints the same."""
    file = parse(Source("a.sched", drawn.text))
    text = printer.to_text(file)
    again = parse(Source("b.sched", text))
    assert again == file and printer.to_text(again) == text


@examples(20)
@given(schedules.legal(), st.data())
def test_7_undo(drawn: Drawn, data: st.DataObject) -> None:
    """Rows that were applied and taken back leave the plan, the text and the model as they were."""
    sch = engine.schedule_of(drawn)
    model = sch.plan().model.model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plan, text = sch.plan(), sch.to_sched()
    sizes = dict(drawn.axes)
    more = [s for m in schedules.GENERATORS.values() for s in m(drawn.config, sizes, drawn.length)]
    taken = [s for s in more if not any(s.claims & o.claims for o in drawn.completed)]
    for extra in data.draw(st.lists(st.sampled_from(taken), max_size=3)) if taken else []:
        if _added(sch, extra):
            sch.undo()
    assert sch.plan() == plan and sch.to_sched() == text
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def _added(sch: Schedule, extra: schedules.Step) -> bool:
    """Add a step of one row, in Python; False if it is refused."""
    with_rows = 'schedule 1\n\nstep "more" {\n  ' + extra.rows[0] + "\n}\n"
    (node,) = parse(Source("more.sched", with_rows)).items
    before = sch.to_sched()
    try:
        sch._declare(node)  # a step as a file would bring it
    except Refusal:
        assert sch.to_sched() == before
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


def _refusal_here(drawn: Drawn) -> tuple[str, bool, list[str]]:
    """On this rank: how building is refused, whether at a place, and collectives until then."""
    from schedlang.passes.lower.build import build

    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for name in COLLECTIVES if hasattr(torch.distributed, name)):
            plain = getattr(torch.distributed, name)
            patch.setattr(
                torch.distributed,
                name,
                lambda *a, _n=name, _f=plain, **k: (called.append(_n), _f(*a, **k))[1],
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
    """An illegal row is refused with the same words by every rank, before any collective; where
    the row alone is wrong, at its place."""
    found = pool.run(_refusal_here, drawn.world, drawn)
    said, placed, _ = found[0]
    assert said, f"not refused: {drawn.illegal}"
    assert all(one == found[0] for one in found)
    assert placed or not drawn.illegal, said
    assert all(not called for _, _, called in found)


def test_14_would_notice() -> None:
    """A schedule without a wrong row is not refused."""
    fine = Drawn(schedules.Config(), (("tp", 1),))
    assert _refusal_here(fine)[0] == ""
    assert _refusal_here(replace(fine, illegal="blocks.9  checkpoint()"))[1]
