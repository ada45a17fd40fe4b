"""Rows at very many modules: checked and stored once per class of equal modules.

* `LayeredMapping`: an immutable mapping; `put` returns a new one that shares the unchanged items.
* `module_classes`: a number for each class of equal modules of a model.
* `SharedValue`, `SharedValues`: values of a row for very many modules, stored once and expanded on
  access.
* `RowIndex`: the rows of a plan at each module, and inside of it.
* `apply_by_class`: apply a row once for each class of equal modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar, cast

from schedlang.ir.features import Uniform
from schedlang.ir.model import is_inside
from schedlang.ir.primitive import registry

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.plan import Action, Plan


K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


@dataclass(eq=False, repr=False)
class LayeredMapping(Mapping[K, V]):
    """Layers of items over a base mapping, newest last; immutable.

    `put` adds a layer, and merges layers of similar size: of n items put one by one each is copied
    log n times in all, where copies of a dict would take n * n. Layers are never merged with the
    base, so that `added_items` is what was put since the mapping was made. Items are ordered as in
    a dict: by first put.
    """

    _base: Mapping[K, V]
    _layers: tuple[dict[K, V], ...] = ()
    # keys, default and result of the last `get_many`
    _last_answer: tuple[Sequence[K], object, list[Any]] | None = field(default=None, init=False)

    def put(self, items: Mapping[K, V]) -> LayeredMapping[K, V]:
        """Return the mapping with these items added; they replace items of the same keys."""
        layers = [*self._layers, dict(items)]
        while len(layers) > 1 and 2 * len(layers[-1]) >= len(layers[-2]):
            above = layers.pop()
            layers[-1] = {**layers[-1], **above}
        return LayeredMapping(self._base, tuple(layers))

    @property
    def added_items(self) -> dict[K, V]:
        """The items put since the mapping was made."""
        return {key: value for layer in self._layers for key, value in layer.items()}

    @cached_property
    def _merged(self) -> dict[K, V]:
        merged = dict(self._base)
        for layer in self._layers:
            merged.update(layer)
        return merged

    def get_many(self, keys: Sequence[K], missing: D) -> list[V | D]:
        """Return the values of many keys, `missing` for absent ones; much faster than one by one.

        The last result is cached: one row looks up its modules several times.
        """
        last = self._last_answer
        if last is not None and last[:2] == (keys, missing):
            return last[2]
        base = self._base
        if isinstance(base, LayeredMapping):
            values = base.get_many(keys, missing)
        else:
            values = list(map(base.get, keys, repeat(missing))) if base else [missing] * len(keys)
        for layer in self._layers:
            values = list(map(layer.get, keys, values))
        self._last_answer = keys, missing, values
        return values

    def get(self, key: K, default: D | None = None) -> V | D | None:  # type: ignore[override]
        """Return the value of a key, or `default`; avoids the cost of an exception."""
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
        return iter(self._merged)

    def __len__(self) -> int:
        return len(self._merged)

    def __repr__(self) -> str:
        return repr(self._merged)

    def __getstate__(self) -> dict[str, object]:
        """Return one dict with all items, without the shared layers."""
        return {"_base": {}, "_layers": (self._merged,)}


def as_layered(mapping: Mapping[K, V]) -> LayeredMapping[K, V]:
    """Return the mapping itself if it is a Persistent, else a Persistent over it."""
    return mapping if isinstance(mapping, LayeredMapping) else LayeredMapping(mapping)


def module_classes(facts: ModelFacts, attributes: tuple[str, ...] = ()) -> Mapping[str, int]:
    """Return, for each module, the number of its class of equal modules.

    Equal are modules of one Python class whose `attributes`, own parameters and buffers are equal
    except for the tensors' values, and whose children have the same names and are equal. A module
    that shares a tensor with another name, or contains such a module, equals no other; neither does
    a module whose forward was replaced on the object itself.
    """
    key = ("alike", attributes)
    if key not in facts.cache:
        facts.cache[key] = _number_classes(facts, attributes)
    return cast(Mapping[str, int], facts.cache[key])


def _number_classes(facts: ModelFacts, attributes: tuple[str, ...]) -> Mapping[str, int]:
    """Number the classes from the leaves up: a module's key contains the numbers of its
    children."""
    shared = {name for tied in (*facts.ties, *facts.shared_buffers) for name in tied}
    single = {holder for name in shared for holder in parents_of(name)}
    class_of: dict[str, int] = {}
    numbers: dict[object, int] = {}
    names_of: dict[tuple[str, ...], list[str]] = {}  # vars(module) -> those among `attributes`
    for fqn, site in reversed(tuple(facts.sites.items())):  # children before their parents
        module = facts.module(fqn)
        attrs, prefix = vars(module), f"{fqn}." if fqn else ""
        class_key: object = fqn
        if fqn not in single and "forward" not in attrs:
            below = [(child, class_of[prefix + child]) for child in site.children]
            tensors = [(n, f.shape, f.dtype, f.requires_grad) for n, f in site.parameters.items()]
            buffers = [(n, attrs["_buffers"][n]) for n in site.buffers]
            shapes = [(n, tuple(buffer.shape), buffer.dtype) for n, buffer in buffers]
            has = tuple(attrs)
            if has not in names_of:
                names_of[has] = [n for n in attributes if n in attrs]
            values = [(n, _attribute_key(attrs[n])) for n in names_of[has]]
            class_key = type(module), tuple(values), *below, *tensors, *shapes
        class_of[fqn] = numbers.setdefault(class_key, len(numbers))
    return class_of


def _attribute_key(value: object) -> object:
    """Return a key that is equal for equal attributes: type and value of plain values, else
    identity."""
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return (type(value), value) if is_plain else id(value)


def parents_of(fqn: str) -> Iterator[str]:
    """Yield the modules that contain a module or parameter, from the inside out; the model is
    last."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


@lru_cache(maxsize=4)  # one row calls it several times
def all_parents_of(modules: tuple[str, ...]) -> frozenset[str]:
    """Return all modules that contain one of these modules."""
    parents: set[str] = set()
    level = {fqn.rpartition(".")[0] for fqn in modules if fqn}
    while level:
        parents |= level
        level = {fqn.rpartition(".")[0] for fqn in level if fqn} - parents
    return frozenset(parents)


T = TypeVar("T")


@dataclass(frozen=True)
class SharedValue:
    """One value for several modules; iterating yields a copy for each, with the module's name as
    `fqn`."""

    value: Any
    sites: tuple[str, ...]

    @cached_property
    def _site_set(self) -> frozenset[str]:
        return frozenset(self.sites)

    @cached_property
    def _above(self) -> frozenset[str]:
        return all_parents_of(self.sites)

    def __iter__(self) -> Iterator[Any]:
        return (replace(self.value, fqn=fqn) for fqn in self.sites)

    def values_near(self, fqn: str) -> Iterator[Any]:
        """Yield the values at a module, at modules that contain it and at modules inside of it."""
        for site in (fqn, *parents_of(fqn)):
            if site in self._site_set:
                yield replace(self.value, fqn=site)
        if fqn in self._above:
            inside = (site for site in self.sites if site != fqn and is_inside(site, fqn))
            yield from (replace(self.value, fqn=site) for site in inside)


class SharedValues(Sequence[T]):
    """A sequence of parts, one after the other; equal to a tuple of all their values."""

    def __init__(self, parts: tuple[SharedValue, ...]) -> None:
        self.values = parts

    def __iter__(self) -> Iterator[T]:
        return (value for part in self.values for value in part)

    def __len__(self) -> int:
        return sum(len(part.sites) for part in self.values)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, SharedValues)) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


def as_shared_values(values: Sequence[Any]) -> tuple[SharedValue, ...]:
    """Return values as parts: those of a Spread, or one part for each value."""
    if isinstance(values, SharedValues):
        return values.values
    return tuple(SharedValue(value, (value.fqn,)) for value in values)


def values_near(values: Sequence[T], fqn: str) -> Iterator[T]:
    """Yield the values for a module, for modules that contain it, and for modules inside of it."""
    if isinstance(values, SharedValues):
        return (value for part in values.values for value in part.values_near(fqn))
    return (v for v in values if is_inside(v.fqn, fqn) or is_inside(fqn, v.fqn))  # type: ignore[attr-defined]


Rows = tuple[int, ...]


@dataclass(frozen=True)
class RowIndex:
    """The positions in `rows` of the rows `rows_at` each module, and of the rows `rows_below` it
    (at its contents).

    `one_by_one`: some row was applied to its modules one by one, and may have made equal modules
    different.
    """

    rows: tuple[Any, ...] = ()
    one_by_one: bool = False
    rows_at: LayeredMapping[str, Rows] = field(default_factory=lambda: LayeredMapping({}))
    rows_below: LayeredMapping[str, Rows] = field(default_factory=lambda: LayeredMapping({}))

    @staticmethod
    def index_rows(rows: tuple[Any, ...]) -> RowIndex:
        """The trail of some rows."""
        trail = RowIndex(rows)
        for count in range(len(rows)):
            trail = trail.with_row(rows[: count + 1], True)
        return replace(trail, rows=rows)

    def with_row(self, rows: tuple[Any, ...], one_by_one: bool) -> RowIndex:
        """Return the trail of these rows, which are one more than the current ones."""
        index, sites = len(rows) - 1, rows[-1].sites
        longer = []
        for mapping, modules in (
            (self.rows_at, sites),
            (self.rows_below, tuple(all_parents_of(sites))),
        ):
            before = mapping.get_many(modules, ())
            extended = {rows: (*rows, index) for rows in set(before)}
            longer.append(mapping.put(dict(zip(modules, map(extended.__getitem__, before)))))
        return RowIndex(rows, self.one_by_one or one_by_one, *longer)

    def rows_around(self, sites: tuple[str, ...], ties: Sequence[tuple[str, ...]] = ()) -> set[int]:
        """Return the rows at these modules, at modules that contain them and at modules inside of
        them.

        `ties`: names of parameters that are one tensor; rows at their other modules are included,
        too.
        """
        tied = [{name.rpartition(".")[0] for name in names} for names in ties]
        others = {owner for owners in tied if not owners.isdisjoint(sites) for owner in owners}
        holding = self.rows_at.get_many((*all_parents_of(sites), *others), ())
        marks = {*holding, *self.rows_at.get_many(sites, ()), *self.rows_below.get_many(sites, ())}
        return {row for rows in marks for row in rows}


MAPS = ("layouts", "boundaries")  # of a plan: keys begin with the module's name
_NOTHING: Mapping[str, Any] = {}
LISTS = (
    "casts",
    "stores",
    "activation_codings",
    "padded",
)  # of a plan: values have the module's name as `fqn`


@dataclass(frozen=True)
class SiteChange:
    """The annotations that a row adds at one module; keys are relative to the module's name."""

    maps: Mapping[str, Mapping[str, Any]]
    lists: Mapping[str, tuple[Any, ...]]


def apply_by_class(plan: Plan, action: Action) -> Plan | None:
    """Apply a row to the first module of each class and copy the result; None: apply it one by one.

    None for verbs that do not declare what they read (`Uniform`), for modules inside of each other,
    and for modules that are all different. A refusal is that of the first module in order that
    cannot be done, as if the row were applied one by one: its class fails where it does. What a row
    adds to lists (`LISTS`) at one module it does not see at the other modules.
    """
    sites, primitive = action.sites, action.primitive
    if not isinstance(primitive, Uniform) or len(action.groups) < len(sites):
        return None
    if len(set(sites)) < len(sites) or all_parents_of(sites) & set(sites):
        return None
    groups = group_equal_sites(plan, sites)
    if len(groups) == len(sites):
        return None
    changes: list[SiteChange] = []
    layered: dict[str, Any] = {name: LayeredMapping(getattr(plan, name)) for name in MAPS}
    lists: dict[str, Any] = {name: getattr(plan, name) for name in LISTS}
    empty: dict[str, Any] = dict.fromkeys(LISTS, ())
    current = replace(plan, **layered)
    for group in groups:
        first = plan.model.sites[group[0]]
        target = (first,) if primitive.takes == "selection" else first
        primitive.check(target, current)
        before = replace(current, **empty)
        after = primitive.transform(target, before)
        change = _diff_at(before, after, group[0])
        if change is None:
            return None
        changes.append(change)
        current = replace(after, **lists)
    return _apply_changes(plan, sites, groups, changes)


def changes_layouts(before: Plan, after: Plan) -> bool:
    """Return whether a row has changed what `group_equal_sites` compares."""
    return any(getattr(before, name) is not getattr(after, name) for name in MAPS)


def _diff_at(before: Plan, after: Plan, fqn: str) -> SiteChange | None:
    """Return what has changed at one module; None if anything else changed, too."""
    maps: dict[str, Mapping[str, Any]] = {}
    lists: dict[str, tuple[Any, ...]] = {}
    for plan_field in fields(before):
        earlier, later = getattr(before, plan_field.name), getattr(after, plan_field.name)
        if earlier is later:
            continue
        if plan_field.name in MAPS:
            earlier_items = earlier.added_items
            new = {
                key: value
                for key, value in later.added_items.items()
                if earlier_items.get(key) is not value
            }
            if not all(key == fqn or key.startswith(f"{fqn}.") for key in new):
                return None
            maps[plan_field.name] = {key[len(fqn) :]: value for key, value in new.items()}
        elif plan_field.name in LISTS:
            if any(value.fqn != fqn for value in later):
                return None
            lists[plan_field.name] = tuple(replace(value, fqn="") for value in later)
        else:
            return None
    return SiteChange(maps, lists)


def _apply_changes(
    plan: Plan, sites: tuple[str, ...], groups: list[list[str]], changes: list[SiteChange]
) -> Plan:
    """Return the plan with the changes at each module, in order of the modules."""
    values: dict[str, Any] = {}
    for name in MAPS:
        items = _expand_items(
            sites, groups, [change.maps.get(name, _NOTHING) for change in changes]
        )
        if items:
            values[name] = as_layered(getattr(plan, name)).put(items)
    for name in LISTS:
        added = _expand_lists(sites, groups, [change.lists.get(name, ()) for change in changes])
        if added:
            values[name] = SharedValues((*as_shared_values(getattr(plan, name)), *added))
    return replace(plan, **values)


def _expand_items(
    sites: Sequence[str], groups: list[list[str]], new: list[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the new items of each module by full name; `new` has the items of each group."""
    if not any(new):
        return {}
    if list(new[0]) == [""] and all(items == new[0] for items in new):
        return dict.fromkeys(sites, new[0][""])
    pairs = zip(sites, _value_per_site(sites, groups, new))
    return {site + end: value for site, items in pairs for end, value in items.items()}


def _expand_lists(
    sites: tuple[str, ...], groups: list[list[str]], values: list[tuple[Any, ...]]
) -> tuple[SharedValue, ...]:
    """Return the annotations of modules in order: one part if all modules have the same."""
    if len(values[0]) <= 1 and all(group_values == values[0] for group_values in values):
        return tuple(SharedValue(value, sites) for value in values[0])
    pairs = zip(sites, _value_per_site(sites, groups, values))
    return tuple(SharedValue(value, (site,)) for site, own_values in pairs for value in own_values)


def _value_per_site(sites: Sequence[str], groups: list[list[str]], values: list[T]) -> list[T]:
    """Return for each module, in order, the value in `values` of its group."""
    if len(groups) == 1:
        return values * len(sites)
    by_site: dict[str, T] = {}
    for group, value in zip(groups, values):
        by_site.update(dict.fromkeys(group, value))
    return list(map(by_site.__getitem__, sites))


def group_equal_sites(plan: Plan, sites: tuple[str, ...]) -> list[list[str]]:
    """Return modules in groups that a row cannot distinguish, ordered by their first modules.

    Modules of a group have one class (`module_classes`, by all attributes that some verb reads),
    equal layouts, and the same rows at them, at modules that contain them, and at each of their
    contents.
    """
    uniform = (verb for verb in registry().values() if issubclass(verb, Uniform))
    features = {name for verb in uniform for name in verb.looks_at}
    answers = [
        list(map(module_classes(plan.model, tuple(sorted(features))).__getitem__, sites)),
        plan.trail.rows_at.get_many(sites, ()),
        _rows_around(plan, sites),
        _rows_inside(plan, sites),
        *(_layout_keys(plan, sites) if plan.trail.one_by_one else ()),
    ]
    return _group_by_answers(sites, [answer for answer in answers if len(set(answer)) > 1])


def _group_by_answers(sites: tuple[str, ...], answers: list[list[Any]]) -> list[list[str]]:
    """Group the sites for which all answers are equal."""
    if not answers:
        return [list(sites)]
    groups: dict[Any, list[str]] = {}
    for site, key in zip(sites, answers[0] if len(answers) == 1 else zip(*answers)):
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def _rows_around(plan: Plan, sites: tuple[str, ...]) -> list[object]:
    """Return the rows at the modules that contain each module, from the inside out."""
    ancestors = tuple(all_parents_of(sites))
    marks = dict(zip(ancestors, plan.trail.rows_at.get_many(ancestors, ())))
    if not any(marks.values()):
        return [None]
    parents = [site.rpartition(".")[0] for site in sites]
    rows_of = {
        parent: (marks[parent], *map(marks.get, parents_of(parent))) for parent in set(parents)
    }
    return list(map(rows_of.__getitem__, parents))


def _rows_inside(plan: Plan, sites: tuple[str, ...]) -> list[object]:
    """Return the rows at the contents of each module."""
    below = plan.trail.rows_below.get_many(sites, ())
    if not any(below):
        return [None]
    return [_child_rows(plan, site) if rows else None for site, rows in zip(sites, below)]


def _child_rows(plan: Plan, fqn: str) -> tuple[object, ...]:
    """Return the children with rows at them or inside of them, and those rows."""
    result: list[object] = []
    for child in plan.model.children(fqn):
        name = f"{fqn}.{child}" if fqn else child
        rows, inner_rows = plan.trail.rows_at.get(name), plan.trail.rows_below.get(name)
        if rows or inner_rows:
            result.append((child, rows, _child_rows(plan, name) if inner_rows else None))
    return tuple(result)


def _layout_keys(plan: Plan, sites: tuple[str, ...]) -> Iterator[list[Any]]:
    """Yield the boundaries of each module, and the layouts of its parameters."""
    boundaries, layouts = as_layered(plan.boundaries), as_layered(plan.layouts)
    yield boundaries.get_many(sites, ())
    per_site = [plan.model.sites[site].parameters for site in sites]
    yield [tuple([layouts.get(fact.name) for fact in params.values()]) for params in per_site]
