"""Sizes of a model: a recipe that makes it from sizes, and a search for the smallest sizes.

Dims and attributes of the model are learned as functions of its sizes, by making it on the meta
device with other sizes. `Search` yields choices of sizes that satisfy the rules of a schedule.
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


TOKENS = ("token_id", "token_index")  # ends of names of ids in configurations of transformers

LAYERS = "layer"  # in names of numbers of layers in these: n_layer, num_hidden_layers

TITLES = {
    "S751": "this model cannot be reduced",
    "S752": "no reduced model keeps all that the schedule does",
    "S753": "the batch does not fit the reduced model",
}


def refused(code: str, reason: str, *helps: str) -> Refusal:
    """Return the refusal of a reduction; its help offers `small()` of the model file."""
    offer = "define `small()` in the model file: it returns the model to verify"
    return Refusal.of(code, TITLES[code], notes=(reason,), helps=(offer, *helps))


@dataclass(frozen=True)
class Recipe:
    """A recipe that makes a model from sizes.

    sizes     by name; names inside nested configurations are dotted
    make      a function from changed sizes to a model
    specials  ids with a meaning, such as padding or the end of a text
    """

    sizes: Mapping[str, int]
    make: Callable[[Mapping[str, int]], nn.Module]
    specials: tuple[int, ...] = ()

    def meta(self, changed: Mapping[str, int]) -> nn.Module | None:
        """Return the model with other sizes on the meta device; None if its constructor fails."""
        import torch

        try:
            with torch.device("meta"):
                return self.make(changed)
        except Exception:  # the constructor rejects these sizes
            return None


def recipes(model: nn.Module, function: Callable[..., nn.Module] | None = None) -> Iterator[Recipe]:
    """Yield recipes of a model: its class with its `config`, then a function of sizes.

    The config is like transformers', with `to_dict`. The sizes of a function are its parameters
    with integer defaults.
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
    """Return the parameters of a function with integer defaults, without `seed`."""
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
    """Return a copy of a configuration with other numbers.

    Lists with an entry per layer are cut to the number of layers; ids of tokens are mapped into
    the vocabulary.
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
    _fold_token_ids(new, None)
    return new


def _fold_token_ids(config: Any, above: int | None) -> None:
    """Replace ids beyond the vocabulary by its last ids; different ids stay different."""
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
        _fold_token_ids(value, size)


def special_ids(ids: tuple[int, ...], size: int) -> dict[int, int]:
    """Map special ids into a vocabulary of `size`: an id is unchanged, or becomes a last id."""
    ids = tuple(sorted({v for v in ids if v >= 0}))
    high = [v for v in ids if v >= size - len(ids)]
    return {v: v for v in ids} | {v: size - len(high) + k for k, v in enumerate(high)}


@dataclass(frozen=True)
class Deep:
    """A size that is a number of layers, and the module lists whose length depends on it."""

    name: str
    layers: int
    lists: tuple[str, ...]


def deep_sizes(recipe: Recipe, facts: ModelFacts) -> list[Deep]:
    """Return the sizes that count layers: one less shortens a list of modules and changes no dim.

    Experts in a list are not layers: their number is also a dim of the router.
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
OWN = "(sizes)"  # module name of the sizes themselves


class Key(NamedTuple):
    """The place of a number in a module: a dim of a parameter, or an attribute (`dim` is -1)."""

    fqn: str
    name: str
    dim: int = -1

    @property
    def is_dim(self) -> bool:
        """Whether the number is a dim of a parameter."""
        return self.dim >= 0


@dataclass(frozen=True)
class Form:
    """A quantity as a function of sizes: a product of powers, or linear in one size.

    `powers` are pairs of a size and its power; with `shift` there is one size, with power 1.
    """

    factor: Fraction
    powers: tuple[tuple[str, int], ...]
    shift: int = 0

    def at(self, sizes: Mapping[str, int]) -> int | None:
        """Return the value for some sizes; None where it is not an integer."""
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
        """Return the sum of the powers; 0 for a ratio of sizes."""
        return sum(power for _, power in self.powers)


@dataclass(frozen=True)
class Quantity:
    """A number of the model: its value, the sizes on which it depends, and its form or None."""

    key: Key
    value: int
    depends: tuple[str, ...]
    form: Form | None


def counted(model: nn.Module) -> dict[Key, int]:
    """Return all dims of parameters and all positive integer attributes of modules."""
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
    """Return plain attributes of each module, its number of hooks, and whether it has `forward`."""
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
    """Return the quantities that depend on sizes outside `fixed`, found by trying other sizes.

    `fixed` are sizes already chosen. Tries that the constructor rejects are ignored.
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
    for name, size in recipe.sizes.items():  # the size itself, if something depends on it
        if name not in fixed and any(counts != base for _, counts in seen[name]):
            out.append(Quantity(Key(OWN, name), size, (name,), Form(Fraction(1), ((name, 1),))))
    for key, value in base.items():
        depends = tuple(
            name for name, tries in seen.items() if any(c.get(key) != value for _, c in tries)
        )
        if depends:
            form = _fit_form(key, value, {n: seen[n] for n in depends}, recipe.sizes)
            out.append(Quantity(key, value, depends, form))
    return out


def _fit_form(
    key: Key,
    value: int,
    seen: Mapping[str, Sequence[tuple[Fraction, dict[Key, int]]]],
    sizes: Mapping[str, int],
) -> Form | None:
    """Return the form that fits the observed values, or None."""
    powers: list[tuple[str, int]] = []
    for name, tries in seen.items():
        pairs = [(factor, counts[key]) for factor, counts in tries if key in counts]
        fits = {p: sum(Fraction(got) == value * f**p for f, got in pairs) for p in POWERS}
        power = max(fits, key=lambda p: fits[p])
        if fits[power] < 2:
            return _fit_line(name, value, pairs, sizes[name]) if len(seen) == 1 else None
        powers.append((name, power))
    factor = Fraction(value)
    for name, power in powers:
        factor /= Fraction(sizes[name]) ** power
    return Form(factor, tuple(powers))


def _fit_line(
    name: str, value: int, pairs: Sequence[tuple[Fraction, int]], size: int
) -> Form | None:
    """Return the form factor x size + shift through all observed values, or None."""
    slopes = {Fraction(got - value) / (size * (f - 1)) for f, got in pairs}
    if len(pairs) < 2 or len(slopes) != 1:
        return None
    factor = slopes.pop()
    shift = value - factor * size
    return Form(factor, ((name, 1),), int(shift)) if shift.denominator == 1 else None


def limits(quantities: Sequence[Quantity]) -> set[str]:
    """Return the sizes on which no dim depends, and no quantity of several sizes.

    An example is the longest sequence.
    """
    names = {name for q in quantities for name in q.depends}
    return {
        name
        for name in names
        if not any(name in q.depends and (q.key.is_dim or len(q.depends) > 1) for q in quantities)
    }


# -- the search for the smallest sizes -------------------------------------------------------------


KEPT = 4  # numbers up to this are a kind (top-k, channels), not a size, and do not change
RATIO = 16  # ratios of sizes up to this do not change: query heads per key-value head
ROWS = 16  # least rows of an embedding: positions for a few tokens, and a choice of ids
WIDTH = 4096  # values tried for one size
NODES = 50_000  # largest number of nodes of the search


Dims = dict[int, int]  # new sizes of dims by their old ones


@dataclass(frozen=True)
class Split:
    """An axis that splits tensors: its number of ranks before and after the reduction."""

    before: int
    after: int


@dataclass(frozen=True)
class Rules:
    """Constraints on reduced sizes.

    `pads` are pairs of a dim's size and the multiple to which it is padded.
    """

    splits: tuple[Split, ...] = ()
    pads: tuple[tuple[int, int], ...] = ()
    tables: frozenset[Key] = frozenset()  # rows of embeddings

    def allow(self, q: Quantity, new: int) -> bool:
        """Return whether a quantity may become `new`."""
        old = q.value
        if not 0 < new <= old:
            return False
        if q.form is not None and q.form.degree == 0 and old <= RATIO:
            return new == old
        dividing = [s for s in self.splits if s.before > 1 and old % s.before == 0]
        if old <= KEPT and all(s.before == s.after for s in dividing):
            return new == old
        for split in dividing:  # two elements on each rank show a wrong order
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
        """Return `dims` with the new sizes of some quantities, by old size.

        Returns None where a new size is no integer or not allowed, or where the order of sizes
        would change.
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
        """Return whether padding of a dim stays: the last rank's shard must not be all padding."""
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
    """The choices of sizes that satisfy the rules, small sizes first."""

    def __init__(
        self, sizes: Mapping[str, int], quantities: Sequence[Quantity], rules: Rules
    ) -> None:
        self.sizes, self.rules = sizes, rules
        # small sizes are chosen first: numbers of heads decide widths, not the reverse
        names = {name for q in quantities for name in q.depends}
        self.names = sorted(names, key=sizes.__getitem__)
        self.visited = 0
        self.decided: list[list[tuple[Form, Quantity]]] = [[] for _ in self.names]
        known: set[tuple[Form, bool, bool]] = set()  # quantities of one form have one value
        for q in quantities:
            if q.form is None:
                continue
            kind = (q.form, q.key.is_dim, q.key in rules.tables)
            if kind not in known:
                known.add(kind)
                last = max(self.names.index(name) for name, _ in q.form.powers)
                self.decided[last].append((q.form, q))

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.visited = 0
        yield from self._search_below({}, {})

    def _search_below(self, chosen: dict[str, int], dims: Dims) -> Iterator[dict[str, int]]:
        if len(chosen) == len(self.names):
            yield dict(chosen)
            return
        name = self.names[len(chosen)]
        for value in self.values[name]:
            self.visited += 1
            if self.visited > NODES:
                return
            tried = {**chosen, name: value}
            found = self._fit_dims(self.decided[len(chosen)], tried, dims)
            if found is not None:
                yield from self._search_below(tried, found)

    @cached_property
    def values(self) -> dict[str, list[int]]:
        """Return, for each size, the values allowed by quantities that depend on this size only."""
        out = {}
        for place, name in enumerate(self.names):
            single = [(f, q) for f, q in self.decided[place] if len(f.powers) == 1]
            size = self.sizes[name]
            wanted = (*range(1, min(size, WIDTH)), size)
            out[name] = [v for v in wanted if self._fit_dims(single, {name: v}, {}) is not None]
        return out

    def _fit_dims(
        self, known: Sequence[tuple[Form, Quantity]], chosen: Mapping[str, int], dims: Dims
    ) -> Dims | None:
        return self.rules.fitting(((q, form.at(chosen)) for form, q in known), dims)


def keeps(quantities: Sequence[Quantity], now: Mapping[Key, int], rules: Rules) -> bool:
    """Return whether the quantities of a reduced model satisfy all rules."""
    # modules that the reduced model does not have are skipped
    made = ((q, now[q.key]) for q in quantities if q.key in now)
    return rules.fitting(made, {}) is not None and _keeps_order(quantities, now)


def _keeps_order(quantities: Sequence[Quantity], now: Mapping[Key, int]) -> bool:
    """Return whether sizes of a module stay above its unchanged small numbers.

    For example, num_experts stays above top_k.
    """
    kept: dict[str, int] = {}
    for q in quantities:
        if not q.key.is_dim and q.value <= KEPT:
            kept[q.key.fqn] = max(kept.get(q.key.fqn, 0), q.value)
    return all(
        now.get(q.key, q.value) > kept[q.key.fqn]
        for q in quantities
        if q.key.fqn in kept and q.value > kept[q.key.fqn]
    )
