"""The repeated blocks of a model, names that are equal in all of them, and fewer that show all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from schedlang.passes.reduce_model.depth import LISTS, neighbours

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import ModelFacts, Site

# -- names with ranges: `h.0..3.mlp`, and back -----------------------------------------------------


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
    """Tell whether this part of a name is a number without leading zeros."""
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


# -- repeated blocks -------------------------------------------------------------------------------


PROJECTIONS = ("Linear", "Conv1D")
TABLES = ("Embedding", "EmbeddingBag")
LEAVES = (*PROJECTIONS, *TABLES)
LEAST = 2  # projections in a block


def leaf_kind(site: Site) -> str:
    """One of LEAVES, whose weights have dims with names; else nothing."""
    weight = site.parameters.get("weight")
    if weight is None or len(weight.shape) != 2 or "weight" not in site.dims:
        return ""  # another class of that name may lay its weight otherwise
    return next((kind for kind in LEAVES if site.is_a(kind)), "")


CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")


def splits(facts: ModelFacts, fqn: str) -> bool:
    """Tell whether a module may be sharded in a pair: a leaf, or an ungrouped convolution."""
    site = facts.sites[fqn]
    convolves = any(site.is_a(kind) for kind in CONVOLUTIONS)
    return bool(leaf_kind(site)) or convolves and _groups(facts, fqn) == 1


def _groups(facts: ModelFacts, fqn: str) -> int:
    return int(facts.model.get_submodule(fqn).groups)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Blocks:
    """The lists of blocks of a model, by their names with numbers of outer blocks as `*`."""

    facts: ModelFacts
    lists: frozenset[str]

    def common(self, fqn: str) -> str:
        """The name that a module has in every block: `model.layers.*.mlp.up`."""
        out: list[str] = []
        for part in fqn.split("."):
            out.append("*" if ".".join(out) in self.lists and out else part)
        return ".".join(out)

    def inside(self, fqn: str) -> bool:
        """Tell whether the module is inside a block."""
        return "*" in self.common(fqn).split(".")  # also for names that are common already

    def is_block(self, fqn: str) -> bool:
        """Tell whether the module is a block itself."""
        return bool(fqn) and self.common(fqn).endswith(".*")

    @cached_property
    def named(self) -> Mapping[str, tuple[str, ...]]:
        """The modules of each common name, in model order."""
        found: dict[str, list[str]] = {}
        for fqn in self.facts.sites:
            found.setdefault(self.common(fqn), []).append(fqn)
        return {name: tuple(group) for name, group in found.items()}

    def of(self, facts: ModelFacts) -> Blocks:
        """The same lists in a model that has fewer blocks."""
        return Blocks(facts, self.lists)


def blocks_of(facts: ModelFacts) -> Blocks:
    """Lists of two or more blocks of one class, or of a single one that is called again and again.

    A block has at least two projections.
    """
    below: Counter[str] = Counter()
    for fqn, site in facts.sites.items():
        weights = (fact for fact in site.parameters.values() if len(fact.shape) > 1)
        if any(True for _ in weights) and leaf_kind(site) not in TABLES:
            parts = fqn.split(".")
            below.update(".".join(parts[:k]) for k in range(1, len(parts)))
    made = Blocks(facts, frozenset())
    for fqn, site in facts.sites.items():
        if fqn and any(site.is_a(kind) for kind in LISTS) and _repeats(facts, site, below):
            made = Blocks(facts, made.lists | {made.common(fqn)})
    return made


def _repeats(facts: ModelFacts, site: Site, below: Counter[str]) -> bool:
    blocks = [f"{site.fqn}.{child}" for child in site.children]
    enough = [fqn for fqn in blocks if below[fqn] >= LEAST]
    classes = Counter(facts.sites[fqn].class_name for fqn in enough)
    return len(blocks) == len(enough) and (len(blocks) == 1 or max(classes.values(), default=0) > 1)


def shorter(model: nn.Module, blocks: Blocks, stages: int = 1) -> nn.Module:
    """The model on the meta device with the fewest blocks that show all kinds and neighbours."""
    from schedlang.runtime.tracing.meta import hollow_model

    kept = {}
    for common in blocks.lists:
        for fqn in blocks.named.get(common, ()):
            children = blocks.facts.children(fqn)
            kinds = [_kind(blocks.facts, f"{fqn}.{child}") for child in children]
            places = fewest(kinds, stages)
            if len(places) < len(children):
                kept[fqn] = [children[place] for place in places]
    return hollow_model(model, {}, kept)


def _kind(facts: ModelFacts, root: str) -> object:
    inside = (f for f in facts.sites if f == root or f.startswith(f"{root}."))
    return frozenset((f[len(root) :], facts.sites[f].kind) for f in inside)


def fewest(kinds: Sequence[object], stages: int = 1) -> list[int]:
    """Places from both ends of a list that have all of its kinds, next to all their neighbours.

    For several stages they divide as the whole list does, with two a stage where it has two.
    """
    whole, count = neighbours(kinds), len(kinds)
    least = min(count, min(2, max(1, count // stages)) * stages)
    for size in range(max(1, least), count):
        if (size % stages == 0) != (count % stages == 0):
            continue
        for front in range(size, -1, -1):
            places = [*range(front), *range(count - size + front, count)]
            if neighbours([kinds[place] for place in places]) == whole:
                return places
    return list(range(count))
