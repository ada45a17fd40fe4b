"""Changes of a recorded schedule: its last row taken back, rows of one kind folded into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from schedlang.language import nodes as n

Fold: TypeAlias = n.Rule | n.At  # what may be said of one module after the other
Family: TypeAlias = tuple[Any, int]  # a statement without one of its numbers, and its place


def without_last(items: Sequence[Any]) -> list[Any]:
    """The items without the last row; a step or scope left empty goes with it."""
    *rest, last = items or (None,)
    if isinstance(last, n.Step | n.At) and last.block.body:
        body = without_last(last.block.body)
        if body:
            rest.append(replace(last, block=replace(last.block, body=tuple(body))))
    return rest


def folded(items: Sequence[Any], same: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """The items with `h.0` to `h.11` as `h[:12]`, wherever `same` finds that nothing changes.

    Rows between rows of the same kind may change places: `same` has the word.
    """
    found = list(items)
    for place in range(len(found)):
        if isinstance(found[place], n.Step | n.At):
            inner = _inside(found, place, same)
            found[place] = replace(found[place], block=replace(found[place].block, body=inner))
    tried: set[Family] = set()
    while (family := next((f for f in _families(found) if f not in tried), None)) is not None:
        tried.add(family)
        made = _fold(found, family)
        found = made if same(made) else found
    return found


def _inside(
    items: Sequence[Any], place: int, same: Callable[[Sequence[Any]], bool]
) -> tuple[Any, ...]:
    """The body of a step or a scope, folded as the whole allows."""
    outer = items[place]

    def still(body: Sequence[Any]) -> bool:
        inner = replace(outer, block=replace(outer.block, body=tuple(body)))
        return same([*items[:place], inner, *items[place + 1 :]])

    return tuple(folded(outer.block.body, still))


def _families(items: Sequence[Any]) -> Iterator[Family]:
    """What at least two statements have in common, but for one number that goes up evenly."""
    seen: dict[Family, list[int]] = {}
    for item in items:
        for place, number in _numbers(item):
            seen.setdefault((_without(item, place), place), []).append(number)
    for family, numbers in seen.items():
        steps = {b - a for a, b in zip(numbers, numbers[1:])}
        if len(steps) == 1 and min(steps) > 0:
            yield family


def _paths(item: Any) -> tuple[n.Path, ...]:
    if isinstance(item, n.Rule):
        return item.paths
    return item.paths if isinstance(item, n.At) else ()


def _numbers(item: Any) -> Iterator[tuple[int, int]]:
    """Places and values of the numbers in the one path of a statement: h.3.mlp has 3, at 1."""
    paths = _paths(item)
    for place, seg in enumerate(paths[0].segs) if len(paths) == 1 else ():
        before = paths[0].segs[place - 1] if place else None
        if seg.text.isdigit() and not seg.index and before is not None and not before.index:
            yield place, int(seg.text)


def _with(item: Fold, path: n.Path) -> Fold:
    return replace(item, path=path) if isinstance(item, n.Rule) else replace(item, paths=(path,))


def _without(item: Fold, place: int) -> Fold:
    path = _paths(item)[0]
    segs = (*path.segs[:place], replace(path.segs[place], text=""), *path.segs[place + 1 :])
    return _with(item, replace(path, segs=segs))


def _fold(items: Sequence[Any], family: Family) -> list[Any]:
    """One statement where the first of a family stands, in the place of all."""
    like, place = family
    mine = [
        (item, dict(_numbers(item))[place])
        for item in items
        if place in dict(_numbers(item)) and _without(item, place) == like
    ]
    numbers = [number for _, number in mine]
    step = numbers[1] - numbers[0]
    bounds = n.Slice(
        str(numbers[0]) if numbers[0] else None,
        str(numbers[-1] + 1),
        str(step) if step > 1 else None,
    )
    first = mine[0][0]
    path = _paths(first)[0]
    head = replace(path.segs[place - 1], index=(bounds,))
    one = _with(first, replace(path, segs=(*path.segs[: place - 1], head, *path.segs[place + 1 :])))
    gone = {id(item) for item, _ in mine[1:]}
    return [one if item is first else item for item in items if id(item) not in gone]
