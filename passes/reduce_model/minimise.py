"""The smallest sizes that keep what matters of a model: what divides what, order, ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.reduce_model.recipe import Recipe

# -- dims and numbers as functions of sizes --------------------------------------------------------


FACTORS = (Fraction(2), Fraction(4), Fraction(1, 2), Fraction(1, 4), Fraction(3))
POWERS = (1, -1, 2, -2)
OWN = "(sizes)"  # stands for the module of the numbers from which the model is made


class Key(NamedTuple):
    """One number: dim `dim` of parameter `name`, or the attribute `name` (dim -1), of a module."""

    fqn: str
    name: str
    dim: int = -1

    @property
    def is_dim(self) -> bool:
        """True for a dim of a parameter."""
        return self.dim >= 0


@dataclass(frozen=True)
class Form:
    """A quantity as a function of the sizes: a product of powers, or a line in one size.

    `powers` maps each size to its power; with `shift` there is one size, of power 1.
    """

    factor: Fraction
    powers: tuple[tuple[str, int], ...]
    shift: int = 0

    def at(self, sizes: Mapping[str, int]) -> int | None:
        """Its value; None where that is not whole."""
        over, under = self.factor.numerator, self.factor.denominator
        for name, power in self.powers:
            if power > 0:
                over *= sizes[name] ** power
            else:
                under *= sizes[name] ** -power
        whole, rest = divmod(over, under)
        return None if rest else whole + self.shift

    @property
    def degree(self) -> int:
        """0 for a ratio of sizes."""
        return sum(power for _, power in self.powers)


@dataclass(frozen=True)
class Quantity:
    """A number of the model: its value, the sizes it depends on, and its form where one fits."""

    key: Key
    value: int
    depends: tuple[str, ...]
    form: Form | None


def counted(model: nn.Module) -> dict[Key, int]:
    """Every dim of every parameter and every whole-number attribute of every module."""
    found: dict[Key, int] = {}
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and not name.startswith("_") and value > 0:
                found[Key(fqn, name)] = value
        for name, tensor in module._parameters.items():
            if tensor is not None:
                found |= {Key(fqn, name, dim): size for dim, size in enumerate(tensor.shape)}
    return found


def written_in(model: nn.Module) -> list[tuple[object, ...]]:
    """Plain attributes of every module, its hooks, and whether it has a forward of its own."""
    plain = (bool, int, float, str, type(None))
    found: list[tuple[object, ...]] = []
    for fqn, module in model.named_modules():
        for name, value in sorted(vars(module).items()):
            if type(value) in plain and not name.startswith("_") and name != "training":
                found.append((fqn, name, value))
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        found.append((fqn, hooks, "forward" in vars(module)))
    return found


def learned(recipe: Recipe, fixed: Mapping[str, int]) -> list[Quantity]:
    """Every quantity that depends on a size which is not in `fixed`, found by trying other sizes.

    `fixed` are sizes already chosen.  A constructor that refuses a try teaches nothing.
    """
    base_model = recipe.meta(fixed)
    assert base_model is not None, "the sizes chosen so far make a model"
    base = counted(base_model)
    seen: dict[str, list[tuple[Fraction, dict[Key, int]]]] = {}
    for name, size in recipe.sizes.items():
        if name in fixed:
            continue
        tries = [f for f in FACTORS if (size * f).denominator == 1 and size * f > 0]
        models = [(f, recipe.meta({**fixed, name: int(size * f)})) for f in tries]
        seen[name] = [(f, counted(m)) for f, m in models if m is not None]
    out = []
    for name, size in recipe.sizes.items():  # the number itself, where it decides anything
        if name not in fixed and any(counts != base for _, counts in seen[name]):
            out.append(Quantity(Key(OWN, name), size, (name,), Form(Fraction(1), ((name, 1),))))
    for key, value in base.items():
        depends = tuple(
            name for name, tries in seen.items() if any(c.get(key) != value for _, c in tries)
        )
        if depends:
            form = _form(key, value, {n: seen[n] for n in depends}, recipe.sizes)
            out.append(Quantity(key, value, depends, form))
    return out


def _form(
    key: Key,
    value: int,
    seen: Mapping[str, Sequence[tuple[Fraction, dict[Key, int]]]],
    sizes: Mapping[str, int],
) -> Form | None:
    """The form that fits what was seen; None if none does."""
    powers: list[tuple[str, int]] = []
    for name, tries in seen.items():
        pairs = [(factor, counts[key]) for factor, counts in tries if key in counts]
        fits = {p: sum(Fraction(got) == value * f**p for f, got in pairs) for p in POWERS}
        power = max(fits, key=lambda p: fits[p])
        if fits[power] < 2:
            return _line(name, value, pairs, sizes[name]) if len(seen) == 1 else None
        powers.append((name, power))
    factor = Fraction(value)
    for name, power in powers:
        factor /= Fraction(sizes[name]) ** power
    return Form(factor, tuple(powers))


def _line(name: str, value: int, pairs: Sequence[tuple[Fraction, int]], size: int) -> Form | None:
    """factor x size + shift, through all that was seen."""
    slopes = {Fraction(got - value) / (size * (f - 1)) for f, got in pairs}
    if len(pairs) < 2 or len(slopes) != 1:
        return None
    factor = slopes.pop()
    shift = value - factor * size
    return Form(factor, ((name, 1),), int(shift)) if shift.denominator == 1 else None


def limits(quantities: Sequence[Quantity]) -> set[str]:
    """The sizes that decide no shape and nothing together with another: a longest sequence."""
    names = {name for q in quantities for name in q.depends}
    return {
        name
        for name in names
        if not any(name in q.depends and (q.key.is_dim or len(q.depends) > 1) for q in quantities)
    }


# -- the search for the smallest sizes -------------------------------------------------------------


KEPT = 4  # numbers up to this say what kind of thing it is (top-k, channels), not how large
RATIO = 16  # ratios of sizes up to this are kept exactly: query heads per key-value head
ROWS = 16  # of an embedding: positions for a few tokens, and a choice of ids
WIDTH = 4096  # values tried for one size
NODES = 50_000  # of the search


@dataclass(frozen=True)
class Split:
    """An axis that splits tensors: its ranks as they are and after the reduction."""

    before: int
    after: int


@dataclass(frozen=True)
class Rules:
    """Constraints on reduced sizes.

    `pads` are the multiples that dims are padded to, by the value of the dim.
    """

    splits: tuple[Split, ...] = ()
    pads: tuple[tuple[int, int], ...] = ()
    tables: frozenset[Key] = frozenset()  # rows of embeddings

    def allow(self, q: Quantity, new: int) -> bool:
        """Tell whether a quantity may become `new`."""
        old = q.value
        if not 0 < new <= old:
            return False
        if q.form is not None and q.form.degree == 0 and old <= RATIO:
            return new == old
        dividing = [s for s in self.splits if s.before > 1 and old % s.before == 0]
        if old <= KEPT and all(s.before == s.after for s in dividing):
            return new == old
        for split in dividing:  # two different parts on each rank show their order
            each = min(old // split.before, 2) if q.key.is_dim else 1
            if new % split.after or new < each * split.after:
                return False
            if old // split.before > 1 and new < KEPT:
                return False
        if any(old % s.after and not new % s.after for s in self.splits if s not in dividing):
            return False
        if new % 2 != old % 2 and (old % 2 == 0 or not dividing):
            return False
        least = ROWS if q.key in self.tables else KEPT if not dividing else 1
        return new >= min(old, least) and (q.key not in self.tables or self._padded(old, new))

    def _padded(self, old: int, new: int) -> bool:
        """Tell whether a dim is padded as before, with the last rank's shard not all padding."""
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
        self.sizes, self.rules = sizes, rules
        # small ones first: what counts heads decides widths, and not the other way round
        names = {name for q in quantities for name in q.depends}
        self.names = sorted(names, key=sizes.__getitem__)
        self.visited = 0
        self.decided: list[list[tuple[Form, Quantity]]] = [[] for _ in self.names]
        alike: set[tuple[Form, bool, bool]] = set()  # quantities of one form have one value
        for q in quantities:
            if q.form is None:
                continue
            kind = (q.form, q.key.is_dim, q.key in rules.tables)
            if kind not in alike:
                alike.add(kind)
                last = max(self.names.index(name) for name, _ in q.form.powers)
                self.decided[last].append((q.form, q))

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.visited = 0
        yield from self._below({}, {})

    def _below(self, chosen: dict[str, int], dims: dict[int, int]) -> Iterator[dict[str, int]]:
        if len(chosen) == len(self.names):
            yield dict(chosen)
            return
        name = self.names[len(chosen)]
        for value in self.values[name]:
            self.visited += 1
            if self.visited > NODES:
                return
            tried = {**chosen, name: value}
            found = self._fitting(tried, dims)
            if found is not None:
                yield from self._below(tried, found)

    @cached_property
    def values(self) -> dict[str, list[int]]:
        """The values that satisfy the rules about each size alone."""
        out = {}
        for place, name in enumerate(self.names):
            alone = [(f, q) for f, q in self.decided[place] if len(f.powers) == 1]
            size = self.sizes[name]
            wanted = (*range(1, min(size, WIDTH)), size)
            out[name] = [v for v in wanted if self._allowed(alone, {name: v})]
        return out

    def _allowed(self, known: Sequence[tuple[Form, Quantity]], chosen: Mapping[str, int]) -> bool:
        for form, q in known:
            new = form.at(chosen)
            if new is None or not self.rules.allow(q, new):
                return False
        return True

    def _fitting(self, chosen: Mapping[str, int], dims: dict[int, int]) -> dict[int, int] | None:
        """Return dims by their old size, if every quantity decided so far is allowed; else None."""
        known = self.decided[len(chosen) - 1]
        if not self._allowed(known, chosen):
            return None
        dims = dict(dims)
        for form, q in known:
            new = form.at(chosen)
            if q.key.is_dim and new is not None and dims.setdefault(q.value, new) != new:
                return None
        return dims if in_order(dims) else None


def in_order(dims: Mapping[int, int]) -> bool:
    """Tell whether the order of dims is strictly kept."""
    new = [dims[old] for old in sorted(dims)]
    return all(a < b for a, b in zip(new, new[1:]))


def keeps(quantities: Sequence[Quantity], now: Mapping[Key, int], rules: Rules) -> bool:
    """Tell whether the sizes of a reduced model, as it was made, satisfy all rules."""
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
