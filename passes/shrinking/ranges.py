"""Names that differ in their numbers only as one name, `h.0..3.mlp`, and back; nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

_MOST, _DIGITS = 1_000_000, 19  # names that one stands for; digits of a number that counts
WHOLE = "."  # the model itself, whose own name is empty
Numbers = tuple[int, ...]
Range = tuple[int, int]


def gathered(names: Iterable[str]) -> list[str]:
    """The fewest names with ranges (`0..3`, both included) that stand for exactly these, sorted."""
    alike: dict[str, set[Numbers]] = {}
    every = set(names)
    whole = sorted(every & {WHOLE})
    for name in every - {WHOLE}:
        numbers = tuple(int(part) for part in name.split(".") if _counts(part))
        alike.setdefault(_shape(name), set()).add(numbers)
    found = [(shape, box) for shape, held in alike.items() for box in _boxes(held)]
    return whole + [_written(shape, box) for shape, box in sorted(found)]


def spread(name: str) -> Iterator[str]:
    """The names that a name with ranges stands for, in order; ValueError for absurdly many."""
    if name == WHOLE:
        return iter([name])
    choices: list[list[str]] = []
    many = 1
    parts = name.split(".")
    while parts:
        part = parts.pop(0)
        # no module is called "", so an empty part is the middle of a range
        if len(parts) > 1 and parts[0] == "" and _counts(part) and _counts(parts[1]):
            many *= max(1, int(parts[1]) - int(part) + 1)
            if many > _MOST:
                raise ValueError(f"stands for more than {_MOST} names")
            choices.append([str(n) for n in range(int(part), int(parts[1]) + 1)])
            del parts[:2]
        else:
            choices.append([part])
    return (".".join(chosen) for chosen in itertools.product(*choices))


def _counts(part: str) -> bool:
    """Is this part of a name a number as one counts, without leading zeros?"""
    few = len(part) < _DIGITS and part.isascii() and part.isdigit()
    return few and str(int(part)) == part


def _shape(name: str) -> str:
    """The name with every such number left out: names of modules have no empty part."""
    return ".".join("" if _counts(part) else part for part in name.split("."))


def _boxes(every: set[Numbers]) -> list[tuple[Range, ...]]:
    """A set of tuples of numbers as products of ranges."""
    if every == {()}:
        return [()]
    rests: dict[int, frozenset[Numbers]] = {}
    for first in sorted({numbers[0] for numbers in every}):
        rests[first] = frozenset(n[1:] for n in every if n[0] == first)
    runs: list[tuple[int, int, frozenset[Numbers]]] = []
    for first, rest in rests.items():
        if runs and runs[-1][1] == first - 1 and runs[-1][2] == rest:
            runs[-1] = (runs[-1][0], first, rest)
        else:
            runs.append((first, first, rest))
    return [((low, high), *box) for low, high, rest in runs for box in _boxes(set(rest))]


def _written(shape: str, box: tuple[Range, ...]) -> str:
    ranges = iter(box)
    parts = []
    for part in shape.split("."):
        if part:
            parts.append(part)
            continue
        low, high = next(ranges)
        parts.append(str(low) if low == high else f"{low}..{high}")
    return ".".join(parts)
