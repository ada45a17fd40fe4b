"""What is tried: every setting of a schedule's knobs, or every mesh of so many ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal, guess

if TYPE_CHECKING:
    from schedlang import nodes as n
    from schedlang.knob import Knob

MOST = 1000  # settings


def settings_of(
    tree: n.File, fixed: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Every setting of the knobs of a schedule that are not `fixed`.

    `wanted` names values of some; of the others all that their domains list are tried, of a long
    interval its powers of two.  A knob whose domain lists nothing stays as it is.  Raises Refusal
    S106 for a knob that there is not, S109 for more than can be tried.
    """
    from schedlang.passes.reading.expand import expand
    from schedlang.passes.reading.state import Settings

    knobs = expand(tree, None, Settings(fixed)).knobs
    for name in wanted:
        if name not in knobs:
            title = f"the schedule has no knob `{name}`"
            raise Refusal(Diagnostic("S106", title, helps=(guess(name, knobs, "its knobs are"),)))
    menus = {
        name: wanted.get(name) or _values(knob) for name, knob in knobs.items() if name not in fixed
    }
    _not_too_many(menus)
    free = {name: values for name, values in menus.items() if values}
    return [dict(zip(free, chosen)) for chosen in product(*free.values())]


def _values(knob: Knob) -> list[Any]:
    if knob.choices is not None:
        return [str(v) if knob.type == "choice" else v for v in knob.choices]
    if knob.type == "int" and knob.interval is not None:
        low, high = knob.interval
        powers = [2**k for k in range(high.bit_length() + 1) if low <= 2**k <= high]
        return powers or [low]
    return list(knob.options)


def _not_too_many(menus: Mapping[str, Sequence[Any]]) -> None:
    count = math.prod(len(values) or 1 for values in menus.values())
    if count > MOST:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in menus.items() if values)
        longest = max(menus, key=lambda name: len(menus[name]))
        few = ",".join(map(str, menus[longest][:3]))
        raise Refusal(Diagnostic(
            "S109", f"{count} settings are too many: at most {MOST} are tried", notes=(sizes,),
            helps=(f"give fewer values: `--try {longest}={few}`", "or fix some knobs: `--knob"
                                                                  " k=v`"),
        ))  # fmt: skip


def meshes(ranks: int, node: int) -> Iterator[dict[str, int]]:
    """Every mesh of so many ranks over data, stages and tensors, as `init` knows their axes.

    Tensors are split within a node.  Each with sliced optimizer state (`dp`), and with sliced
    parameters (`fsdp`).  Axes of one rank are left out.
    """
    for tp in _divisors(ranks):
        for pp in _divisors(ranks // tp) if tp <= node else ():
            rest = ranks // tp // pp
            for data in ("dp", "fsdp") if rest > 1 else ("dp",):
                sizes = {data: rest, "pp": pp, "tp": tp}
                yield {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]
