"""The form of a recorded plan: which field holds what; anything else is no plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Wrong = Iterator[tuple[str, str]]  # the place in the record, and what should stand there
_LARGEST = 2**63  # of whole numbers, those that indices and sizes can be
_DEEPEST = 50  # of lists within lists


def wrong_in(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first place of a record that has not its form, and what should stand there."""
    return next(_wrong(record), None)


def _wrong(record: Mapping[str, Any]) -> Wrong:
    yield from _values("", record, 0)
    yield from _mesh(record)
    yield from _texts("schedule_file schedule_text model_file device", record)
    decisions, relaxed = record.get("decisions", {}), record.get("relaxed", {})
    if not isinstance(decisions, dict):
        yield "decisions", "knobs and their values"
    if not isinstance(relaxed, dict) or not all(map(_are_texts, relaxed.values())):
        yield "relaxed", "steps, and the names that each gives up"
    actions, expected = record.get("actions"), record.get("expected", [])
    if not isinstance(actions, list):
        yield "actions", "a list of rows"
        return
    for place, action in enumerate(actions):
        yield from _action(f"actions[{place}]", action)
    if not isinstance(expected, list):
        yield "expected", "a list of bounds"
        return
    for place, one in enumerate(expected):
        at = f"expected[{place}]"
        if not isinstance(one, dict):
            yield at, "a bound"
            continue
        yield from _place(at, one)
        if not _are_texts(one.get("axes")):
            yield f"{at}.axes", "names of axes"


def _mesh(record: Mapping[str, Any]) -> Wrong:
    axes, views = record.get("mesh"), record.get("views", {})
    if not isinstance(axes, dict) or not all(type(n) is int and n >= 1 for n in axes.values()):
        yield "mesh", "axes and their sizes, each 1 or more"
        return
    if not isinstance(views, dict) or not all(map(_are_texts, views.values())):
        yield "views", "names, each with the axes that it folds"
        return
    for name, over in views.items():
        if name in axes or not over or not set(over) <= set(axes):
            yield f"views.{name}", "a name of its own for axes of the mesh"


def _action(at: str, action: object) -> Wrong:
    if not isinstance(action, dict):
        yield at, "a row"
        return
    if not isinstance(action.get("step"), str | None) or "step" not in action:
        yield f"{at}.step", "the name of a step"
    if not isinstance(action.get("do"), str):
        yield f"{at}.do", "the name of a primitive"
    if not action.get("at") or not _are_texts(action["at"]):
        yield f"{at}.at", "names of modules, one or more"
    if not isinstance(action.get("args", {}), dict):
        yield f"{at}.args", "arguments by name"
    yield from _place(at, action)


def _place(at: str, holder: Mapping[str, Any]) -> Wrong:
    """The file, line and column that asked for it."""
    found = holder.get("from", ["", 0, 0])
    right = isinstance(found, list) and list(map(type, found)) == [str, int, int]
    if not right or min(found[1:]) < 0:
        yield f"{at}.from", "a file, a line and a column"


def _texts(names: str, record: Mapping[str, Any]) -> Wrong:
    for name in names.split():
        if not isinstance(record.get(name), str | None):
            yield name, "a text"


def _values(at: str, value: object, depth: int) -> Wrong:
    """Numbers that no size can be, and lists in lists without end."""
    if depth > _DEEPEST:
        yield at, "fewer lists in lists"
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        yield at, "a smaller number"
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _values(f"{at}.{name}" if at else name, item, depth + 1)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _values(f"{at}[{place}]", item, depth + 1)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
