"""Options in groups: a verb takes dataclasses, the command line takes their fields one by one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of options for a function of groups of options.

    A parameter whose annotation is a dataclass gives way to the dataclass's fields, in their order
    and with their annotations and defaults; no two groups may name an option alike.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {n: kind for n, kind in hints.items() if is_dataclass(kind)}
    if not groups:
        return function
    plain = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name])
        for one in inspect.signature(function).parameters.values()
    ]
    given = [one for each in plain for one in _spread(each, groups)]

    @functools.wraps(function)
    def run(**options: Any) -> Any:
        made = {
            name: kind(**{one.name: options.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        return function(**made, **options)

    run.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in given}
    return run


def _spread(one: inspect.Parameter, groups: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """The options that a parameter stands for: itself, or the fields of its group."""
    if one.name not in groups:
        yield one
        return
    kind = groups[one.name]
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        yield one.replace(name=each.name, default=default, annotation=hints[each.name])
