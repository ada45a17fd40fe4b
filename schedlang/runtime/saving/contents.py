"""The small things of a checkpoint: what they must be for a program to take them over.

Whoever has written a folder decides what is in it.  So all of it is looked at before anything of
the program is changed: each entry is there, of its kind and in its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from schedlang.runtime.saving.index import DTYPES, Unreadable

VERSION = 1
_MOST = 1 << 62
Is = Callable[[Any], bool]


def checked(found: Any) -> dict[str, Any]:
    """The contents, as `archive.save` writes them.  Raises Unreadable."""
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise Unreadable(f"its version is not {VERSION}")
    _entries(
        found, "",
        step=_count, optimizer=_is_dict, parameters=_named(_shape), buffers=_named(_shape),
        dtypes=_named(_dtype), ties=_list(_list(_text)),
    )  # fmt: skip
    missing = (found["parameters"].keys() | found["buffers"].keys()) - found["dtypes"].keys()
    if missing:
        raise Unreadable(f"the dtype of `{min(missing)}` is missing")
    _optimizer(found["optimizer"])
    if (sums := found.get("sums")) is not None:
        _entries(
            sums, "sums.", step=_count, places=lambda n: _count(n) and 0 < n <= 1 << 20,
            errors=_named(_dtype), starts=_named(_start),
        )  # fmt: skip
    if (scale := found.get("loss scale")) is not None:
        _entries(scale, "loss scale.", scale=_scale, good=_count)
    return found


def _optimizer(told: dict[str, Any]) -> None:
    _entries(
        told, "optimizer.", kind=lambda kind: kind is None or _text(kind),
        groups=_list(_named(_plain)), of=_named(_count), parts=_named(_named(_dtype)),
        values=_named(_named(_plain)),
    )  # fmt: skip
    if extra := told.keys() - {"kind", "groups", "of", "parts", "values"}:
        raise Unreadable(f"`optimizer` has an unknown entry: `{min(map(str, extra))}`")
    if any(number >= len(told["groups"]) for number in told["of"].values()):
        raise Unreadable("`optimizer.of` names a group that does not exist")
    if any({"params", "param_names"} & group.keys() for group in told["groups"]):
        raise Unreadable("a group of the optimizer has its own parameters")
    for what in ("parts", "values"):
        if odd := told[what].keys() - told["of"].keys():
            raise Unreadable(f"`optimizer.{what}` names `{min(odd)}`, which it did not train")
    for name, values in told["values"].items():
        if twice := values.keys() & told["parts"].get(name, {}).keys():
            raise Unreadable(f"`{min(twice)}` of `{name}` is in the optimizer's state twice")


def _entries(found: Any, at: str, **wanted: Is) -> None:
    """Each of these entries is there, and of its kind."""
    if not isinstance(found, dict):
        raise Unreadable(f"`{at.rstrip('.')}` is not a table")
    for key, right in wanted.items():
        if key not in found:
            raise Unreadable(f"`{at}{key}` is missing")
        if not right(found[key]):
            raise Unreadable(f"`{at}{key}` has a wrong type")


# -- kinds -----------------------------------------------------------------------------------------


def _is_dict(found: Any) -> bool:
    return isinstance(found, Mapping)


def _text(found: Any) -> bool:
    return isinstance(found, str)


def _count(found: Any) -> bool:
    return type(found) is int and 0 <= found < _MOST


def _dtype(found: Any) -> bool:
    return isinstance(found, str) and found in DTYPES


def _shape(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(map(_count, found))


def _start(found: Any) -> bool:
    """The size and the dtype of what an iteration starts from."""
    return (
        isinstance(found, list | tuple) and len(found) == 2
        and _shape(found[0]) and len(found[0]) == 2 and _dtype(found[1])
    )  # fmt: skip


def _scale(found: Any) -> bool:
    return isinstance(found, float | int) and math.isfinite(found) and found > 0


def _plain(found: Any) -> bool:
    """What `moments` writes of a value: numbers, texts, lists of such, and tensors."""
    if isinstance(found, dict):
        tensor, moved = found.get("tensor"), found.get("moved")
        return len(found) == 2 and type(tensor) is Tensor and isinstance(moved, bool)
    if isinstance(found, list | tuple):
        return all(map(_plain, found))
    return found is None or isinstance(found, bool | int | float | str)


def _named(right: Is) -> Is:
    def of_each(found: Any) -> bool:
        return isinstance(found, dict) and all(_text(k) and right(v) for k, v in found.items())

    return of_each


def _list(right: Is) -> Is:
    return lambda found: isinstance(found, list | tuple) and all(map(right, found))
