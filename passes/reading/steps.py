"""Steps: their names, and what their rows may give up."""

from __future__ import annotations

from dataclasses import replace

from schedlang import nodes as n
from schedlang.diagnostic import Diagnostic, Label, Refusal, guess
from schedlang.passes.reading.state import RELAXABLE, State
from schedlang.primitive import Primitive
from schedlang.source import Span


def open_step(node: n.Step, state: State) -> State:
    """The state in which a step's name and what it may give up are known."""
    if node.name in state.steps:
        label = Label(node.span and step_head(node), "the second step of this name")
        raise Refusal(Diagnostic("S101", f"there are two steps `{node.name}`", label))
    for name in node.relax:
        if name not in RELAXABLE:
            title = f"a step cannot relax `{name}`"
            help_ = guess(name, RELAXABLE, "choose among")
            raise Refusal(Diagnostic("S303", title, Label(step_head(node)), helps=(help_,)))
    plan = state.plan
    if plan is not None:
        plan = replace(plan, relaxed=(*plan.relaxed, (node.name, node.relax)))
    return replace(state, steps=(*state.steps, node.name), plan=plan)


def step_head(node: n.Step) -> Span:
    """The words `step "name"`."""
    if not node.span or not node.span.source.name.endswith(".sched"):
        return node.span
    start_ = node.span
    end = start_.col + len(f'step "{node.name}"')
    return Span(start_.source, start_.line, start_.col, start_.line, end)


def allowed(primitive: Primitive, state: State, span: Span) -> None:
    """Refuse a row that gives up what its step has not allowed (S505)."""
    step = state.step
    relaxed = {"rounding", *(step.relax if step else ())}
    beyond = sorted(primitive.gives_up - relaxed)
    if not beyond:
        return
    name = beyond[0]
    title = f"this row changes numerics (`{name}`): its step does not allow that"
    also = (Label(step_head(step), "allows only " + _allows(step)),) if step else ()
    if step:
        names = ", ".join((*step.relax, *beyond))
        help_ = f'allow it: `step "{step.name}" relax({names}) {{`'
    else:
        help_ = f'move it into a step that allows it: `step "..." relax({name}) {{`'
    label = Label(span, f"results may differ in {', '.join(beyond)}")
    raise Refusal(Diagnostic("S505", title, label, also, (), (help_,)))


def _allows(step: n.Step) -> str:
    return " and ".join(("rounding", *step.relax))
