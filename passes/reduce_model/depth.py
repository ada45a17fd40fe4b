"""The fewest layers that show what a schedule does to all: each kind, neighbour and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.passes.reduce_model.recipe import Recipe

LISTS = ("ModuleList", "Sequential", "ModuleDict")
Kind = object  # equal for layers that are alike and to which the schedule does the same


@dataclass(frozen=True)
class Deep:
    """A size that is a number of layers, and the lists of modules that it makes long."""

    name: str
    layers: int
    lists: tuple[str, ...]


def deep_sizes(recipe: Recipe, facts: ModelFacts) -> list[Deep]:
    """The sizes that count layers: one less of them is one module less in a list, and no dim less.

    Experts in a list are no layers: their number is also a dim of what chooses among them.
    """
    from schedlang.ir.model import ModelFacts

    lengths = {
        fqn: len(site.children)
        for fqn, site in facts.sites.items()
        if any(site.is_a(kind) for kind in LISTS)
    }
    shapes = {name: fact.shape for name, fact in facts.parameters.items()}
    found = []
    for name, size in recipe.sizes.items():
        if not any(abs(size - length) <= 2 for length in lengths.values()):
            continue
        made = recipe.meta({name: size - 1})
        if made is None:
            continue
        less = ModelFacts(made)
        shorter = [f for f, n in lengths.items() if f in less.sites and n > len(less.children(f))]
        same = all(f.shape == shapes.get(n) for n, f in less.parameters.items())
        if shorter and same:
            found.append(Deep(name, size, tuple(shorter)))
    return found


def kinds(plan: Plan, trunk: str) -> list[Kind]:
    """Return the kind of each child of a list, by its modules and the rows that act on them."""
    facts = plan.model
    cuts = [fqn for cut in plan.cuts for fqn in cut.before]
    out: list[Kind] = []
    for child in facts.children(trunk):
        root = f"{trunk}.{child}"
        inside = [f for f in facts.sites if f == root or f.startswith(f"{root}.")]
        build = frozenset((f[len(root) :], facts.sites[f].kind, _trained(facts, f)) for f in inside)
        rows = frozenset(
            (_place(action.span), action.name, site[len(root) :])
            for action in plan.actions
            for site in _within(action.sites, set(inside))
        )
        starts = tuple(k for k, fqn in enumerate(cuts) if fqn in inside)
        out.append((build, rows, starts))
    return out


def _within(sites: Sequence[str], wanted: set[str]) -> list[str]:
    return [site for site in sites if site in wanted]


def _trained(facts: ModelFacts, fqn: str) -> tuple[bool, ...]:
    return tuple(fact.requires_grad for fact in facts.sites[fqn].parameters.values())


def _place(span: object) -> object:
    line, col = getattr(span, "line", 0), getattr(span, "col", 0)
    return (getattr(getattr(span, "source", None), "name", ""), line, col)


def neighbours(sequence: Sequence[Kind]) -> set[tuple[Kind, Kind]]:
    """Return the pairs of adjacent kinds, the two ends included."""
    ends: list[Kind] = ["first", *sequence, "last"]
    return set(zip(ends, ends[1:]))


def shows_all(old: Plan, new: Plan, lists: Sequence[str]) -> bool:
    """Tell whether the shorter model has all kinds of layers, adjacent pairs and stages."""
    for trunk in lists:
        before, after = kinds(old, trunk), kinds(new, trunk)
        if neighbours(before) != neighbours(after):
            return False
        stages_old, stages_new = _stages(old, trunk), _stages(new, trunk)
        if stages_old == 1:
            continue
        if len(after) < min(2, len(before) // stages_old) * stages_new:
            return False
        if (len(before) % stages_old == 0) != (len(after) % stages_new == 0):
            return False
        everywhere = set.intersection(*_shares(before, stages_old))
        if not all(everywhere <= share for share in _shares(after, stages_new)):
            return False
    return True


def _stages(plan: Plan, trunk: str) -> int:
    """Count the stages that a row about the list itself splits it into."""
    cut = [cut for cut in plan.cuts if trunk in cut.trunks]
    return plan.stages(cut[0].axis) if cut else 1


def _shares(sequence: Sequence[Kind], stages: int) -> list[set[Kind]]:
    """The kinds in each of equal shares of the layers."""
    size, more = divmod(len(sequence), stages)
    shares, at = [], 0
    for k in range(stages):
        end = at + size + (k < more)
        shares.append(set(sequence[at:end]))
        at = end
    return shares


def counterpart(name: str, shorter: Mapping[str, tuple[int, int]]) -> str:
    """The name in the whole model of a parameter of the shorter: layers from both ends.

    `shorter` gives for each list how many layers it has and had.
    """
    for trunk, (now, before) in shorter.items():
        if name.startswith(f"{trunk}."):
            rest = name[len(trunk) + 1 :]
            index, dot, tail = rest.partition(".")
            if index.isdigit() and int(index) >= (now + 1) // 2:
                name = f"{trunk}.{int(index) + before - now}{dot}{tail}"
    return name
