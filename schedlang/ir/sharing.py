"""Rows at very many modules: checked and stored once per class of equal modules.

* A mapping that never changes: putting items gives another one, which shares what stays.
* Modules that are alike: a number for each class of equal modules of a model.
* Values of rows for very many modules: each is kept once for its row, and made when asked for.
* Which rows of a plan stand at each module, and which inside of it.
* A row at many modules: checked once for each class of equal ones, and shared by all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar, cast

from schedlang.ir.features import Uniform
from schedlang.ir.model import inside
from schedlang.ir.primitive import registry

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.plan import Action, Plan


K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


@dataclass(eq=False, repr=False)
class Persistent(Mapping[K, V]):
    """Layers of items over a base, newest last.

    `put` adds a layer, and joins layers of like size: of n items put one by one each is copied
    log n times in all, where copies of a dict would take n * n.  Layers are never joined with the
    base, so that `own` is what was put since it was laid.  Order is that of a dict: of first puts.
    """

    _base: Mapping[K, V]
    _layers: tuple[dict[K, V], ...] = ()
    # the last answer of `many`
    _asked: tuple[Sequence[K], object, list[Any]] | None = field(default=None, init=False)

    def put(self, items: Mapping[K, V]) -> Persistent[K, V]:
        """The mapping with these items, instead of those that it has for the same keys."""
        layers = [*self._layers, dict(items)]
        while len(layers) > 1 and 2 * len(layers[-1]) >= len(layers[-2]):
            above = layers.pop()
            layers[-1] = {**layers[-1], **above}
        return Persistent(self._base, tuple(layers))

    @property
    def own(self) -> dict[K, V]:
        """The items put since the base was set."""
        return {key: value for layer in self._layers for key, value in layer.items()}

    @cached_property
    def _whole(self) -> dict[K, V]:
        whole = dict(self._base)
        for layer in self._layers:
            whole.update(layer)
        return whole

    def many(self, keys: Sequence[K], missing: D) -> list[V | D]:
        """The values of many keys, `missing` where there is none; much faster than one by one.

        The last answer is kept: one row asks for those of its modules several times.
        """
        asked = self._asked
        if asked is not None and asked[:2] == (keys, missing):
            return asked[2]
        base = self._base
        if isinstance(base, Persistent):
            found = base.many(keys, missing)
        else:
            found = list(map(base.get, keys, repeat(missing))) if base else [missing] * len(keys)
        for layer in self._layers:
            found = list(map(layer.get, keys, found))
        self._asked = keys, missing, found
        return found

    def get(self, key: K, default: D | None = None) -> V | D | None:  # type: ignore[override]
        """The value of a key; without an exception on the way, which would cost more than it."""
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        return self._base.get(key, default)

    def __getitem__(self, key: K) -> V:
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        return self._base[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def __repr__(self) -> str:
        return repr(self._whole)

    def __getstate__(self) -> dict[str, object]:
        """One dict, without what was shared."""
        return {"_base": {}, "_layers": (self._whole,)}


def persistent(known: Mapping[K, V]) -> Persistent[K, V]:
    """A mapping of this kind: it itself, or what is laid on it."""
    return known if isinstance(known, Persistent) else Persistent(known)


def classes(facts: ModelFacts, attributes: tuple[str, ...] = ()) -> Mapping[str, int]:
    """Module -> the number of its class.

    Alike are modules of one Python class whose `attributes`, own parameters and buffers are equal
    but for their values, and whose children have the same names and are alike.  What shares a
    tensor with another name, and what holds it, is alike to nothing; so is a module whose forward
    was replaced on the object itself.
    """
    key = ("alike", attributes)
    if key not in facts.cache:
        facts.cache[key] = _found(facts, attributes)
    return cast(Mapping[str, int], facts.cache[key])


def _found(facts: ModelFacts, attributes: tuple[str, ...]) -> Mapping[str, int]:
    """Numbers given from the leaves up: that of a module is made of those of its children."""
    shared = {name for same in (*facts.ties, *facts.shared_buffers) for name in same}
    single = {holder for name in shared for holder in holders(name)}
    found: dict[str, int] = {}
    numbers: dict[object, int] = {}
    looked: dict[tuple[str, ...], list[str]] = {}  # what a module has -> the attributes among it
    for fqn, site in reversed(tuple(facts.sites.items())):  # children stand below what holds them
        module = facts.module(fqn)
        own, prefix = vars(module), f"{fqn}." if fqn else ""
        said: object = fqn
        if fqn not in single and "forward" not in own:
            held = [(child, found[prefix + child]) for child in site.children]
            tensors = [(n, f.shape, f.dtype, f.requires_grad) for n, f in site.parameters.items()]
            buffers = [(n, own["_buffers"][n]) for n in site.buffers]
            shapes = [(n, tuple(buffer.shape), buffer.dtype) for n, buffer in buffers]
            has = tuple(own)
            if has not in looked:
                looked[has] = [n for n in attributes if n in own]
            values = [(n, _value(own[n])) for n in looked[has]]
            said = type(module), tuple(values), *held, *tensors, *shapes
        found[fqn] = numbers.setdefault(said, len(numbers))
    return found


def _value(value: object) -> object:
    """Return a key that is equal for equal attributes: of plain values type and value, else the
    identity."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return (type(value), value) if plain else id(value)


def holders(fqn: str) -> Iterator[str]:
    """Yield the modules that hold a module or parameter, from the inside out; the model itself is
    last."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


@lru_cache(maxsize=4)  # one row asks several times
def above(modules: tuple[str, ...]) -> frozenset[str]:
    """All that holds one of some modules."""
    found: set[str] = set()
    level = {fqn.rpartition(".")[0] for fqn in modules if fqn}
    while level:
        found |= level
        level = {fqn.rpartition(".")[0] for fqn in level if fqn} - found
    return frozenset(found)


T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One value for some modules: for each of them with its name as `fqn`."""

    value: Any
    sites: tuple[str, ...]

    @cached_property
    def _here(self) -> frozenset[str]:
        return frozenset(self.sites)

    @cached_property
    def _above(self) -> frozenset[str]:
        return above(self.sites)

    def __iter__(self) -> Iterator[Any]:
        return (replace(self.value, fqn=fqn) for fqn in self.sites)

    def near(self, fqn: str) -> Iterator[Any]:
        """The values at a module, at what holds it and at what it holds."""
        for site in (fqn, *holders(fqn)):
            if site in self._here:
                yield replace(self.value, fqn=site)
        if fqn in self._above:
            held = (site for site in self.sites if site != fqn and inside(site, fqn))
            yield from (replace(self.value, fqn=site) for site in held)


class Spread(Sequence[T]):
    """The parts one after the other; equal to a tuple of all their values."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[T]:
        return (value for part in self.parts for value in part)

    def __len__(self) -> int:
        return sum(len(part.sites) for part in self.parts)

    def __getitem__(self, place: Any) -> Any:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, Spread)) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


def parts(values: Sequence[Any]) -> tuple[Part, ...]:
    """Values, spread or each by itself, as parts."""
    if isinstance(values, Spread):
        return values.parts
    return tuple(Part(value, (value.fqn,)) for value in values)


def near(values: Sequence[T], fqn: str) -> Iterator[T]:
    """Return the values that are for a module, for one that holds it, or for one inside of it."""
    if isinstance(values, Spread):
        return (value for part in values.parts for value in part.near(fqn))
    return (v for v in values if inside(v.fqn, fqn) or inside(fqn, v.fqn))  # type: ignore[attr-defined]


Rows = tuple[int, ...]


@dataclass(frozen=True)
class Trail:
    """Places of rows in `of`: those `at` a module itself, and `below` it at what it holds.

    `alone`: some row took its modules each by itself, and may have made equal ones unlike.
    """

    of: tuple[Any, ...] = ()
    alone: bool = False
    at: Persistent[str, Rows] = field(default_factory=lambda: Persistent({}))
    below: Persistent[str, Rows] = field(default_factory=lambda: Persistent({}))

    @staticmethod
    def along(rows: tuple[Any, ...]) -> Trail:
        """The trail of some rows."""
        trail = Trail(rows)
        for count in range(len(rows)):
            trail = trail.after(rows[: count + 1], True)
        return replace(trail, of=rows)

    def after(self, rows: tuple[Any, ...], alone: bool) -> Trail:
        """The trail of rows that are one more than these."""
        place, sites = len(rows) - 1, rows[-1].sites
        longer = []
        for known, modules in ((self.at, sites), (self.below, tuple(above(sites)))):
            before = known.many(modules, ())
            more = {rows: (*rows, place) for rows in set(before)}
            longer.append(known.put(dict(zip(modules, map(more.__getitem__, before)))))
        return Trail(rows, self.alone or alone, *longer)

    def around(self, sites: tuple[str, ...], ties: Sequence[tuple[str, ...]] = ()) -> set[int]:
        """The rows at these modules, at what holds them and at what they hold.

        `ties`: names of parameters that are one tensor; rows at their other modules, too.
        """
        tied = [{name.rpartition(".")[0] for name in names} for names in ties]
        others = {owner for owners in tied if not owners.isdisjoint(sites) for owner in owners}
        holding = self.at.many((*above(sites), *others), ())
        marks = {*holding, *self.at.many(sites, ()), *self.below.many(sites, ())}
        return {row for rows in marks for row in rows}


MAPS = ("layouts", "boundaries")  # by names that begin with the module's
_NOTHING: Mapping[str, Any] = {}
LISTS = ("casts", "stores", "kept", "padded")  # of values that have the module's name as `fqn`


@dataclass(frozen=True)
class Change:
    """The annotations that a row adds at one module; keys and names follow the module's own
    name."""

    maps: Mapping[str, Mapping[str, Any]]
    lists: Mapping[str, tuple[Any, ...]]


def shared(plan: Plan, action: Action) -> Plan | None:
    """The plan after a row, checked at the first module of each class; None: take each alone.

    Alone are taken modules of verbs that do not say what they look at (`Uniform`), modules
    within each other, and modules that are all different.  A refusal is that of the first module
    in order that cannot be done, as if each were taken alone: its class fails where it does.  What
    a row lists (`LISTS`) of one module it does not see at the others.
    """
    sites, primitive = action.sites, action.primitive
    if not isinstance(primitive, Uniform) or len(action.each) < len(sites):
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
        first = plan.model.sites[group[0]]
        target = (first,) if primitive.takes == "selection" else first
        primitive.check(target, now)
        before = replace(now, **empty)
        after = primitive.transform(target, before)
        change = _change(before, after, group[0])
        if change is None:
            return None
        changes.append(change)
        now = replace(after, **lists)
    return _changed(plan, sites, groups, changes)


def changed(before: Plan, after: Plan) -> bool:
    """Return whether a row has changed what `alike` compares."""
    return any(getattr(before, name) is not getattr(after, name) for name in MAPS)


def _change(before: Plan, after: Plan, fqn: str) -> Change | None:
    """Return what has changed at one module; None where more than names at that module changed."""
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
    """Return the new items of each module by full name; `new` has the items of each group."""
    if not any(new):
        return {}
    if list(new[0]) == [""] and all(one == new[0] for one in new):
        return dict.fromkeys(sites, new[0][""])
    pairs = zip(sites, _each(sites, groups, new))
    return {site + end: value for site, one in pairs for end, value in one.items()}


def _parts(
    sites: tuple[str, ...], groups: list[list[str]], values: list[tuple[Any, ...]]
) -> tuple[Part, ...]:
    """Return the annotations of modules in their order: one part where all modules have the
    same."""
    if len(values[0]) <= 1 and all(one == values[0] for one in values):
        return tuple(Part(value, sites) for value in values[0])
    pairs = zip(sites, _each(sites, groups, values))
    return tuple(Part(value, (site,)) for site, mine in pairs for value in mine)


def _each(sites: Sequence[str], groups: list[list[str]], said: list[T]) -> list[T]:
    """Return for each module, in order, what `said` has for its group."""
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
    uniform = (verb for verb in registry().values() if issubclass(verb, Uniform))
    looked = {name for verb in uniform for name in verb.looks_at}
    answers = [
        list(map(classes(plan.model, tuple(sorted(looked))).__getitem__, sites)),
        plan.trail.at.many(sites, ()),
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
    marks = dict(zip(there, plan.trail.at.many(there, ())))
    if not any(marks.values()):
        return [None]
    parents = [site.rpartition(".")[0] for site in sites]
    known = {one: (marks[one], *map(marks.get, holders(one))) for one in set(parents)}
    return list(map(known.__getitem__, parents))


def _inside(plan: Plan, sites: tuple[str, ...]) -> list[object]:
    """The rows at what each module holds."""
    below = plan.trail.below.many(sites, ())
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
