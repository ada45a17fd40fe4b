"""A row at many modules: checked once for each class of equal ones, and shared by all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from schedlang.alike import above, classes, holders
from schedlang.persistent import Persistent, persistent
from schedlang.primitive import registry
from schedlang.spread import Part, Spread, parts

if TYPE_CHECKING:
    from schedlang.plan import Action, Plan

T = TypeVar("T")

MAPS = ("layouts", "boundaries")  # by names that begin with the module's
_NOTHING: Mapping[str, Any] = {}
LISTS = ("casts", "stores", "kept")  # of values that have the module's name as `fqn`


@dataclass(frozen=True)
class Change:
    """What a row does to one module; names are what follows the module's own."""

    maps: Mapping[str, Mapping[str, Any]]
    lists: Mapping[str, tuple[Any, ...]]


def shared(plan: Plan, action: Action) -> Plan | None:
    """The plan after a row, checked at the first module of each class; None: take each alone.

    Alone are taken modules of verbs that do not say what they look at (`Primitive.alike`), modules
    within each other, and modules that are all different.  A refusal is that of the first module
    in order that cannot be done, as if each were taken alone: its class fails where it does.  What
    a row lists (`LISTS`) of one module it does not see at the others.
    """
    sites, primitive = action.sites, action.primitive
    if primitive.alike is None or len(sites) < 2 or len(primitive.taken(sites)) < len(sites):
        return None
    if len(set(sites)) < len(sites) or above(sites) & set(sites):
        return None
    groups = alike(plan, sites)
    if len(groups) == len(sites):
        return None
    changes: list[Change] = []
    laid: dict[str, Any] = {name: Persistent(getattr(plan, name)) for name in MAPS}
    lists: dict[str, Any] = {name: getattr(plan, name) for name in LISTS}
    empty: dict[str, Any] = dict.fromkeys(LISTS, ())
    now = replace(plan, **laid)
    for group in groups:
        target = action.target(group[:1], plan.model)
        primitive.check(target, now)
        before = replace(now, **empty)
        after = primitive.effect(target, before)
        change = _change(before, after, group[0])
        if change is None:
            return None
        changes.append(change)
        now = replace(after, **lists)
    return _changed(plan, sites, groups, changes)


def changed(before: Plan, after: Plan) -> bool:
    """Whether a row has changed what `alike` compares."""
    return any(getattr(before, name) is not getattr(after, name) for name in MAPS)


def _change(before: Plan, after: Plan, fqn: str) -> Change | None:
    """What has changed at a module; None where that is more than names of it say."""
    maps: dict[str, Mapping[str, Any]] = {}
    lists: dict[str, tuple[Any, ...]] = {}
    for one in fields(before):
        was, now = getattr(before, one.name), getattr(after, one.name)
        if was is now:
            continue
        if one.name in MAPS:
            known = was.own
            new = {key: value for key, value in now.own.items() if known.get(key) is not value}
            if not all(key == fqn or key.startswith(f"{fqn}.") for key in new):
                return None
            maps[one.name] = {key[len(fqn) :]: value for key, value in new.items()}
        elif one.name in LISTS:
            if any(value.fqn != fqn for value in now):
                return None
            lists[one.name] = tuple(replace(value, fqn="") for value in now)
        else:
            return None
    return Change(maps, lists)


def _changed(
    plan: Plan, sites: tuple[str, ...], groups: list[list[str]], changes: list[Change]
) -> Plan:
    """The plan with what is changed at each module, in their order."""
    made: dict[str, Any] = {}
    for name in MAPS:
        items = _items(sites, groups, [change.maps.get(name, _NOTHING) for change in changes])
        if items:
            made[name] = persistent(getattr(plan, name)).put(items)
    for name in LISTS:
        more = _parts(sites, groups, [change.lists.get(name, ()) for change in changes])
        if more:
            made[name] = Spread((*parts(getattr(plan, name)), *more))
    return replace(plan, **made)


def _items(
    sites: Sequence[str], groups: list[list[str]], new: list[Mapping[str, Any]]
) -> dict[str, Any]:
    """What is put of each module, by its whole name; `new` is said of each group."""
    if not any(new):
        return {}
    if list(new[0]) == [""] and all(one == new[0] for one in new):
        return dict.fromkeys(sites, new[0][""])
    pairs = zip(sites, _each(sites, groups, new))
    return {site + end: value for site, one in pairs for end, value in one.items()}


def _parts(
    sites: tuple[str, ...], groups: list[list[str]], values: list[tuple[Any, ...]]
) -> tuple[Part, ...]:
    """What is noted of modules, in their order: one part where the same is noted of all."""
    if len(values[0]) <= 1 and all(one == values[0] for one in values):
        return tuple(Part(value, sites) for value in values[0])
    pairs = zip(sites, _each(sites, groups, values))
    return tuple(Part(value, (site,)) for site, mine in pairs for value in mine)


def _each(sites: Sequence[str], groups: list[list[str]], said: list[T]) -> list[T]:
    """What is said of the group of each module, in the order of the modules."""
    if len(groups) == 1:
        return said * len(sites)
    of: dict[str, T] = {}
    for group, one in zip(groups, said):
        of.update(dict.fromkeys(group, one))
    return list(map(of.__getitem__, sites))


def alike(plan: Plan, sites: tuple[str, ...]) -> list[list[str]]:
    """Modules in groups that a row cannot tell apart, in the order of their first ones.

    In one group are modules of one class (`classes`, by all attributes that some verb looks at)
    that lie alike, with the same rows at them, at what holds them and at each thing that they hold.
    """
    looked = {name for verb in registry().values() for name in verb.alike or ()}
    answers = [
        list(map(classes(plan.model, tuple(sorted(looked))).__getitem__, sites)),
        plan.trail.standing(sites),
        _around(plan, sites),
        _inside(plan, sites),
        *(_lying(plan, sites) if plan.trail.alone else ()),
    ]
    return _parted(sites, [answer for answer in answers if len(set(answer)) > 1])


def _parted(sites: tuple[str, ...], answers: list[list[Any]]) -> list[list[str]]:
    """Sites in groups for which all answers are the same."""
    if not answers:
        return [list(sites)]
    groups: dict[Any, list[str]] = {}
    for site, key in zip(sites, answers[0] if len(answers) == 1 else zip(*answers)):
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def _around(plan: Plan, sites: tuple[str, ...]) -> list[object]:
    """The rows at what holds each module, from the inside out."""
    there = tuple(above(sites))
    marks = dict(zip(there, plan.trail.standing(there)))
    if not any(marks.values()):
        return [None]
    parents = [site.rpartition(".")[0] for site in sites]
    known = {one: (marks[one], *map(marks.get, holders(one))) for one in set(parents)}
    return list(map(known.__getitem__, parents))


def _inside(plan: Plan, sites: tuple[str, ...]) -> list[object]:
    """The rows at what each module holds."""
    below = plan.trail.within(sites)
    if not any(below):
        return [None]
    return [_marks(plan, site) if rows else None for site, rows in zip(sites, below)]


def _marks(plan: Plan, fqn: str) -> tuple[object, ...]:
    """Children with rows at them or inside of them, and those rows."""
    found: list[object] = []
    for child in plan.model.children(fqn):
        name = f"{fqn}.{child}" if fqn else child
        at, below = plan.trail.at.get(name), plan.trail.below.get(name)
        if at or below:
            found.append((child, at, _marks(plan, name) if below else None))
    return tuple(found)


def _lying(plan: Plan, sites: tuple[str, ...]) -> Iterator[list[Any]]:
    """The boundaries of each module, and the layouts of its parameters."""
    boundaries, layouts = persistent(plan.boundaries), persistent(plan.layouts)
    yield boundaries.many(sites, ())
    own = [plan.model.sites[site].parameters for site in sites]
    yield [tuple([layouts.get(fact.name) for fact in one.values()]) for one in own]
