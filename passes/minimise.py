"""The smallest sizes that keep what matters of a model: what divides what, order, ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from schedlang.passes.quantities import Form, Key, Quantity

KEPT = 4  # numbers up to this say what kind of thing it is (top-k, channels), not how large
RATIO = 16  # ratios of sizes up to this are kept exactly: query heads per key-value head
ROWS = 16  # of an embedding: positions for a few tokens, and a choice of ids
WIDTH = 512  # values tried for one size
NODES = 200_000  # of the search


@dataclass(frozen=True)
class Split:
    """An axis that splits tensors: its ranks as they are and after the reduction."""

    before: int
    after: int


@dataclass(frozen=True)
class Rules:
    """What reduced numbers must keep.

    `pads` are the multiples that dims are padded to, by the value of the dim.
    """

    splits: tuple[Split, ...] = ()
    pads: tuple[tuple[int, int], ...] = ()
    tables: frozenset[Key] = frozenset()  # rows of embeddings

    def allow(self, q: Quantity, new: int) -> bool:
        """May a quantity become `new`?"""
        old = q.value
        if not 0 < new <= old:
            return False
        if q.form is not None and q.form.degree == 0 and old <= RATIO:
            return new == old
        dividing = [s for s in self.splits if s.before > 1 and old % s.before == 0]
        if old <= KEPT and all(s.before == s.after for s in dividing):
            return new == old
        for split in dividing:
            if new % split.after or new < min(old // split.before, 2) * split.after:
                return False
        if any(old % s.after and not new % s.after for s in self.splits if s not in dividing):
            return False
        if new % 2 != old % 2 and (old % 2 == 0 or not dividing):
            return False
        least = ROWS if q.key in self.tables else KEPT if not dividing else 1
        return new >= min(old, least) and (q.key not in self.tables or self._padded(old, new))

    def _padded(self, old: int, new: int) -> bool:
        """Is a padded dim still padded, or still full, and the last rank's part not all padding?"""
        for value, multiple in self.pads:
            if value == old:
                whole = -(-new // multiple) * multiple
                ranks = max((s.after for s in self.splits), default=1)
                if any(whole % s.after for s in self.splits):
                    return False
                if bool(new % multiple) != bool(old % multiple) or new <= whole - whole // ranks:
                    return False
        return True


class Search:
    """All choices of sizes that keep the rules, small ones first."""

    def __init__(
        self, sizes: Mapping[str, int], quantities: Sequence[Quantity], rules: Rules
    ) -> None:
        self.sizes, self.rules, self.quantities = sizes, rules, quantities
        # small ones first: what counts heads decides widths, and not the other way round
        self.names = sorted({name for q in quantities for name in q.depends}, key=sizes.__getitem__)
        self.visited = 0

    @cached_property
    def known(self) -> list[tuple[Form, list[Quantity]]]:
        """Quantities of one form together: they have one value."""
        found: dict[tuple[Form, bool, bool], list[Quantity]] = {}
        for q in self.quantities:
            if q.form is not None:
                table = q.key in self.rules.tables
                found.setdefault((q.form, q.key.is_dim, table), []).append(q)
        return [(form, same[:1]) for (form, _, _), same in found.items()]

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.visited = 0
        yield from self._below({})

    def _below(self, chosen: dict[str, int]) -> Iterator[dict[str, int]]:
        if len(chosen) == len(self.names):
            yield dict(chosen)
            return
        name = self.names[len(chosen)]
        size = self.sizes[name]
        for value in (*range(1, min(size, WIDTH)), size):
            self.visited += 1
            if self.visited > NODES:
                return
            tried = {**chosen, name: value}
            if self._fits(tried, name):
                yield from self._below(tried)

    def _fits(self, chosen: Mapping[str, int], newest: str) -> bool:
        """Is everything that is decided by now as it should be?"""
        dims: dict[int, int] = {}
        for form, same in self.known:
            names = [name for name, _ in form.powers]
            if any(name not in chosen for name in names):
                continue
            new = form.at(chosen)
            if new is None or (newest in names and not self.rules.allow(same[0], new)):
                return False
            if same[0].key.is_dim and dims.setdefault(same[0].value, new) != new:
                return False
        return in_order(dims)


def in_order(dims: Mapping[int, int]) -> bool:
    """Do larger dims stay larger, and different ones different?"""
    new = [dims[old] for old in sorted(dims)]
    return all(a < b for a, b in zip(new, new[1:]))


def keeps(quantities: Sequence[Quantity], now: Mapping[Key, int], rules: Rules) -> bool:
    """Do the numbers of a reduced model, as it was made, keep all rules?"""
    dims: dict[int, int] = {}
    for q in quantities:
        new = now.get(q.key)
        if new is None:
            continue  # of a module that a smaller count left out
        if not rules.allow(q, new):
            return False
        if q.key.is_dim and dims.setdefault(q.value, new) != new:
            return False
    return in_order(dims) and _choices(quantities, now)


def _choices(quantities: Sequence[Quantity], now: Mapping[Key, int]) -> bool:
    """In each module, what is larger than a small number that is kept stays larger: experts than
    those of them that are chosen."""
    kept: dict[str, int] = {}
    for q in quantities:
        if not q.key.is_dim and q.value <= KEPT:
            kept[q.key.fqn] = max(kept.get(q.key.fqn, 0), q.value)
    return all(
        now.get(q.key, q.value) > kept[q.key.fqn]
        for q in quantities
        if q.key.fqn in kept and q.value > kept[q.key.fqn]
    )
