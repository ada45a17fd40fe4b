"""The sizes from which a model is made, and the smallest that keep what matters of it.

* A recipe: the whole numbers from which a model was made, and the model for other numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.model import ModelFacts
from schedlang.passes.reduce_model.blocks import LISTS

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import ModelFacts


TOKENS = ("token_id", "token_index")  # how transformers names numbers that are ids, not sizes

LAYERS = "layer"  # in the names of their numbers of layers: n_layer, num_hidden_layers

TITLES = {
    "S751": "this model cannot be reduced",
    "S752": "no reduced model keeps all that the schedule does",
    "S753": "the batch does not fit the reduced model",
}


def refused(code: str, reason: str, *helps: str) -> Refusal:
    """Make the refusal of a reduction, with what to write instead."""
    offer = "define `small()` in the model file: it returns the model to verify"
    return Refusal.of(code, TITLES[code], notes=(reason,), helps=(offer, *helps))


@dataclass(frozen=True)
class Recipe:
    """`sizes` by name, dotted inside nested configurations; `make` takes those that change.

    `specials` are the ids that stand for something: padding, the end of a text.
    """

    sizes: Mapping[str, int]
    make: Callable[[Mapping[str, int]], nn.Module]
    specials: tuple[int, ...] = ()

    def meta(self, changed: Mapping[str, int]) -> nn.Module | None:
        """The model of other sizes on the meta device; None where its constructor fails."""
        import torch

        try:
            with torch.device("meta"):
                return self.make(changed)
        except Exception:  # whatever a constructor raises, it refuses these numbers
            return None


def recipes(model: nn.Module, function: Callable[..., nn.Module] | None = None) -> Iterator[Recipe]:
    """Yield ways to make a model anew: by its class from its `config`, or by a function of sizes.

    A config is one of transformers' kind, with `to_dict`; the numbers of a function are those of
    its parameters whose defaults are whole.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        yield Recipe(
            {name: value for name, value in _numbers(config) if not name.endswith(TOKENS)},
            lambda changed: type(model)(changed_config(config, changed)),
            tuple(sorted({v for name, v in _numbers(config, least=0) if name.endswith(TOKENS)})),
        )
    numbers = _defaults(function) if function is not None else {}
    if function is not None and numbers:
        yield Recipe(numbers, lambda changed: function(**{**numbers, **changed}))


def _defaults(function: Callable[..., Any]) -> dict[str, int]:
    """The keyword parameters of a function whose defaults are whole numbers."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if type(p.default) is int and p.name != "seed"}


def _numbers(config: Any, prefix: str = "", least: int = 2) -> Iterator[tuple[str, int]]:
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if type(value) is int and value >= least:
            yield prefix + name, value
        elif isinstance(value, list | tuple) and name.endswith(TOKENS):
            yield from ((prefix + name, one) for one in value if type(one) is int)
        elif hasattr(value, "to_dict"):
            yield from _numbers(value, f"{prefix}{name}.", least)


def changed_config(config: Any, changed: Mapping[str, int]) -> Any:
    """A copy of a configuration with other numbers.

    Lists with an entry for each layer become as short as the number of layers; ids of tokens stay
    below the vocabulary.
    """
    new = copy.deepcopy(config)
    for path, value in changed.items():
        *above, name = path.split(".")
        holder, before = new, config
        for part in above:
            holder, before = getattr(holder, part), getattr(before, part)
        old = getattr(before, name)
        setattr(holder, name, value)
        for key, entry in vars(before).items() if LAYERS in name else ():
            if value < old and isinstance(entry, list | tuple) and len(entry) == old:
                setattr(holder, key, entry[:value])
    _tokens_inside(new, None)
    return new


def _tokens_inside(config: Any, above: int | None) -> None:
    """Ids beyond the vocabulary become its last ones, different ids different ones."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    own = getattr(config, "vocab_size", None)
    size = (
        own or above or next((s for s in (getattr(c, "vocab_size", None) for c in inner) if s), 0)
    )
    named = {
        key: entry
        for key, entry in vars(config).items()
        if key.endswith(TOKENS) and entry is not None and size
    }
    known = [v for e in named.values() for v in (e if isinstance(e, list | tuple) else (e,))]
    folded = special_ids(tuple(v for v in known if type(v) is int), size)
    for key, entry in named.items():
        if isinstance(entry, list | tuple):
            setattr(config, key, type(entry)(folded.get(v, v) for v in entry))
        else:
            setattr(config, key, folded.get(entry, entry))
    for value in inner:
        _tokens_inside(value, size)


def special_ids(ids: tuple[int, ...], size: int) -> dict[int, int]:
    """Map special ids into a vocabulary of `size`: an id stays, or becomes one of the last."""
    ids = tuple(sorted({v for v in ids if v >= 0}))
    high = [v for v in ids if v >= size - len(ids)]
    return {v: v for v in ids} | {v: size - len(high) + k for k, v in enumerate(high)}


@dataclass(frozen=True)
class Deep:
    """A size that is a number of layers, and the lists of modules that it makes long."""

    name: str
    layers: int
    lists: tuple[str, ...]


def deep_sizes(recipe: Recipe, facts: ModelFacts) -> list[Deep]:
    """The sizes that count layers: one less of them is one module less in a list, and no dim less.

    Experts in a list are no layers: their number is also a dim of what chooses among them.
    """
    lengths = {
        fqn: len(site.children)
        for fqn, site in facts.sites.items()
        if any(site.is_a(kind) for kind in LISTS)
    }
    shapes = {name: fact.shape for name, fact in facts.parameters.items()}
    found = []
    for name, size in recipe.sizes.items():
        if not any(abs(size - length) <= 2 for length in lengths.values()):
            continue
        made = recipe.meta({name: size - 1})
        if made is None:
            continue
        less = ModelFacts(made)
        shorter = [f for f, n in lengths.items() if f in less.sites and n > len(less.children(f))]
        same = all(f.shape == shapes.get(n) for n, f in less.parameters.items())
        if shorter and same:
            found.append(Deep(name, size, tuple(shorter)))
    return found


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
        """Return the value for these sizes; None where it is not whole."""
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


Dims = dict[int, int]  # new sizes of dims by their old ones


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

    def fitting(self, made: Iterable[tuple[Quantity, int | None]], dims: Dims) -> Dims | None:
        """Return new dims by their old size, these added, if all are allowed and keep their order.

        None where they do not, or a quantity is no whole number.
        """
        dims = dict(dims)
        for q, new in made:
            if new is None or not self.allow(q, new):
                return None
            if q.key.is_dim and dims.setdefault(q.value, new) != new:
                return None
        sizes = [dims[old] for old in sorted(dims)]
        return dims if all(a < b for a, b in zip(sizes, sizes[1:])) else None

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

    def _below(self, chosen: dict[str, int], dims: Dims) -> Iterator[dict[str, int]]:
        if len(chosen) == len(self.names):
            yield dict(chosen)
            return
        name = self.names[len(chosen)]
        for value in self.values[name]:
            self.visited += 1
            if self.visited > NODES:
                return
            tried = {**chosen, name: value}
            found = self._fitting(self.decided[len(chosen)], tried, dims)
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
            out[name] = [v for v in wanted if self._fitting(alone, {name: v}, {}) is not None]
        return out

    def _fitting(
        self, known: Sequence[tuple[Form, Quantity]], chosen: Mapping[str, int], dims: Dims
    ) -> Dims | None:
        return self.rules.fitting(((q, form.at(chosen)) for form, q in known), dims)


def keeps(quantities: Sequence[Quantity], now: Mapping[Key, int], rules: Rules) -> bool:
    """Tell whether the sizes of a reduced model, as it was made, satisfy all rules."""
    # what is of a module that a smaller count left out is not there
    made = ((q, now[q.key]) for q in quantities if q.key in now)
    return rules.fitting(made, {}) is not None and _choices(quantities, now)


def _choices(quantities: Sequence[Quantity], now: Mapping[Key, int]) -> bool:
    """Return whether each module keeps its sizes above the small numbers it keeps, as experts above
    the number of those chosen."""
    kept: dict[str, int] = {}
    for q in quantities:
        if not q.key.is_dim and q.value <= KEPT:
            kept[q.key.fqn] = max(kept.get(q.key.fqn, 0), q.value)
    return all(
        now.get(q.key, q.value) > kept[q.key.fqn]
        for q in quantities
        if q.key.fqn in kept and q.value > kept[q.key.fqn]
    )
