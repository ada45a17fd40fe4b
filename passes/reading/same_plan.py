"""Whether other text comes to the same plan: the same done to the same modules, to the same end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang import nodes as n
from schedlang.diagnostic import Refusal
from schedlang.passes.reading.expand import expand
from schedlang.passes.reading.state import Settings
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.model import ModelFacts


def comes_to(file: n.File, plan: Plan, facts: ModelFacts, settings: Settings) -> bool:
    """Whether a file's plan is this one, in whatever rows, and is not refused."""
    try:
        made = expand(file, facts, settings).plan
    except Refusal:
        return False
    if made is None or _done(made) != _done(plan):
        return False
    return replace(made, actions=()) == replace(plan, actions=())


def _done(plan: Plan) -> Counter[tuple[str, str, tuple[str, ...]]]:
    """What is done in which step, to which modules at a time."""
    return Counter((repr(a.primitive), a.step, at) for a in plan.actions for at in a.each)
