"""Sizes of a model: a recipe that makes it from sizes, and a search for the smallest sizes.

Dims and attributes of the model are learned as functions of its sizes, by making it on the meta
device with other sizes. `SizeSearch` yields choices of sizes that satisfy the rules of a schedule.
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

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import ModelFacts


TOKEN_ID_ENDS = (
    "token_id",
    "token_index",
)  # ends of names of ids in configurations of transformers

LAYER_WORD = "layer"  # in names of numbers of layers in these: n_layer, num_hidden_layers

TITLES = {
    "S751": "this model cannot be reduced",
    "S752": "no reduced model keeps all that the schedule does",
    "S753": "the batch does not fit the reduced model",
}


def reduction_refusal(code: str, reason: str, *helps: str) -> Refusal:
    """Return the refusal of a reduction; its help offers `small()` of the model file."""
    offer = "define `small()` in the model file: it returns the model to verify"
    return Refusal.of(code, TITLES[code], notes=(reason,), helps=(offer, *helps))


@dataclass(frozen=True)
class ModelRecipe:
    """A recipe that makes a model from sizes.

    sizes     by name; names inside nested configurations are dotted
    make      a function from changed sizes to a model
    specials  ids with a meaning, such as padding or the end of a text
    """

    sizes: Mapping[str, int]
    make: Callable[[Mapping[str, int]], nn.Module]
    specials: tuple[int, ...] = ()

    def make_on_meta(self, changed: Mapping[str, int]) -> nn.Module | None:
        """Return the model with other sizes on the meta device; None if its constructor fails."""
        import torch

        try:
            with torch.device("meta"):
                return self.make(changed)
        except Exception:  # the constructor rejects these sizes
            return None


def find_recipes(
    model: nn.Module, function: Callable[..., nn.Module] | None = None
) -> Iterator[ModelRecipe]:
    """Yield recipes of a model: its class with its `config`, then a function of sizes.

    The config is like transformers', with `to_dict`. The sizes of a function are its parameters
    with integer defaults.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        yield ModelRecipe(
            {name: value for name, value in _numbers(config) if not name.endswith(TOKEN_ID_ENDS)},
            lambda new_sizes: type(model)(change_config(config, new_sizes)),
            tuple(
                sorted(
                    {
                        token_id
                        for name, token_id in _numbers(config, least=0)
                        if name.endswith(TOKEN_ID_ENDS)
                    }
                )
            ),
        )
    numbers = _defaults(function) if function is not None else {}
    if function is not None and numbers:
        yield ModelRecipe(numbers, lambda new_sizes: function(**{**numbers, **new_sizes}))


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
        elif isinstance(value, list | tuple) and name.endswith(TOKEN_ID_ENDS):
            yield from ((prefix + name, token_id) for token_id in value if type(token_id) is int)
        elif hasattr(value, "to_dict"):
            yield from _numbers(value, f"{prefix}{name}.", least)


def change_config(config: Any, changed: Mapping[str, int]) -> Any:
    """Return a copy of a configuration with other numbers.

    Lists with an entry per layer are cut to the number of layers; ids of tokens are mapped into
    the vocabulary.
    """
    new_config = copy.deepcopy(config)
    for path, value in changed.items():
        *parents, name = path.split(".")
        holder, old_holder = new_config, config
        for part in parents:
            holder, old_holder = getattr(holder, part), getattr(old_holder, part)
        old_size = getattr(old_holder, name)
        setattr(holder, name, value)
        for key, entry in vars(old_holder).items() if LAYER_WORD in name else ():
            if value < old_size and isinstance(entry, list | tuple) and len(entry) == old_size:
                setattr(holder, key, entry[:value])
    _fold_token_ids(new_config, None)
    return new_config


def _fold_token_ids(config: Any, outer: int | None) -> None:
    """Replace ids beyond the vocabulary by its last ids; different ids stay different."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    own_size = getattr(config, "vocab_size", None)
    size = (
        own_size
        or outer
        or next((s for s in (getattr(c, "vocab_size", None) for c in inner) if s), 0)
    )
    entries = {
        key: entry
        for key, entry in vars(config).items()
        if key.endswith(TOKEN_ID_ENDS) and entry is not None and size
    }
    ids = [
        value_id
        for e in entries.values()
        for value_id in (e if isinstance(e, list | tuple) else (e,))
    ]
    folded = special_ids(tuple(value_id for value_id in ids if type(value_id) is int), size)
    for key, entry in entries.items():
        if isinstance(entry, list | tuple):
            setattr(config, key, type(entry)(folded.get(value_id, value_id) for value_id in entry))
        else:
            setattr(config, key, folded.get(entry, entry))
    for value in inner:
        _fold_token_ids(value, size)


def special_ids(ids: tuple[int, ...], size: int) -> dict[int, int]:
    """Map special ids into a vocabulary of `size`: an id is unchanged, or becomes a last id."""
    ids = tuple(sorted({v for v in ids if v >= 0}))
    high_ids = [v for v in ids if v >= size - len(ids)]
    return {v: v for v in ids} | {v: size - len(high_ids) + k for k, v in enumerate(high_ids)}


@dataclass(frozen=True)
class LayerSize:
    """A size that is a number of layers, and the module lists whose length depends on it."""

    name: str
    layers: int
    lists: tuple[str, ...]


def find_layer_sizes(recipe: ModelRecipe, facts: ModelFacts) -> list[LayerSize]:
    """Return the sizes that count layers: one less shortens a list of modules and changes no dim.

    Experts in a list are not layers: their number is also a dim of the router.
    """
    lengths = {fqn: len(site.children) for fqn, site in facts.sites.items() if site.is_list}
    shapes = {name: param.shape for name, param in facts.parameters.items()}
    layer_sizes = []
    for name, size in recipe.sizes.items():
        if not any(abs(size - length) <= 2 for length in lengths.values()):
            continue
        shorter_model = recipe.make_on_meta({name: size - 1})
        if shorter_model is None:
            continue
        shorter_facts = ModelFacts(shorter_model)
        shorter = [
            f
            for f, n in lengths.items()
            if f in shorter_facts.sites and n > len(shorter_facts.children(f))
        ]
        same_shapes = all(f.shape == shapes.get(n) for n, f in shorter_facts.parameters.items())
        if shorter and same_shapes:
            layer_sizes.append(LayerSize(name, size, tuple(shorter)))
    return layer_sizes


# -- dims and numbers as functions of sizes --------------------------------------------------------


FACTORS = (Fraction(2), Fraction(4), Fraction(1, 2), Fraction(1, 4), Fraction(3))
POWERS = (1, -1, 2, -2)
SIZES_MODULE = "(sizes)"  # module name of the sizes themselves


class QuantityPlace(NamedTuple):
    """The place of a number in a module: a dim of a parameter, or an attribute (`dim` is -1)."""

    fqn: str
    name: str
    dim: int = -1

    @property
    def is_dim(self) -> bool:
        """Whether the number is a dim of a parameter."""
        return self.dim >= 0


@dataclass(frozen=True)
class SizeFormula:
    """A quantity as a function of sizes: a product of powers, or linear in one size.

    `powers` are pairs of a size and its power; with `shift` there is one size, with power 1.
    """

    factor: Fraction
    powers: tuple[tuple[str, int], ...]
    shift: int = 0

    def evaluate(self, sizes: Mapping[str, int]) -> int | None:
        """Return the value for some sizes; None where it is not an integer."""
        numerator, denominator = self.factor.numerator, self.factor.denominator
        for name, power in self.powers:
            if power > 0:
                numerator *= sizes[name] ** power
            else:
                denominator *= sizes[name] ** -power
        quotient, remainder = divmod(numerator, denominator)
        return None if remainder else quotient + self.shift

    @property
    def degree(self) -> int:
        """Return the sum of the powers; 0 for a ratio of sizes."""
        return sum(power for _, power in self.powers)


@dataclass(frozen=True)
class SizedQuantity:
    """A number of the model: its value, the sizes on which it depends, and its form or None."""

    key: QuantityPlace
    value: int
    depends: tuple[str, ...]
    formula: SizeFormula | None


def read_quantities(model: nn.Module) -> dict[QuantityPlace, int]:
    """Return all dims of parameters and all positive integer attributes of modules."""
    quantities: dict[QuantityPlace, int] = {}
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int and not name.startswith("_") and value > 0:
                quantities[QuantityPlace(fqn, name)] = value
        for name, tensor in module._parameters.items():
            if tensor is not None:
                quantities |= {
                    QuantityPlace(fqn, name, dim): size for dim, size in enumerate(tensor.shape)
                }
    return quantities


def plain_attributes(model: nn.Module) -> list[tuple[object, ...]]:
    """Return plain attributes of each module, its number of hooks, and whether it has `forward`."""
    plain_types = (bool, int, float, str, type(None))
    attributes: list[tuple[object, ...]] = []
    for fqn, module in model.named_modules():
        for name, value in sorted(vars(module).items()):
            if type(value) in plain_types and not name.startswith("_") and name != "training":
                attributes.append((fqn, name, value))
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        attributes.append((fqn, hooks, "forward" in vars(module)))
    return attributes


def dropout_rates(model: nn.Module) -> set[str]:
    """Return the positive rates of dropout, by class and attribute."""
    return {
        f"{type(module).__name__}.{name}"
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) is float
        and value > 0
        and "drop" in f"{type(module).__name__}.{name}".lower()
    }


def learn_quantities(recipe: ModelRecipe, fixed: Mapping[str, int]) -> list[SizedQuantity]:
    """Return the quantities that depend on sizes outside `fixed`, found by trying other sizes.

    `fixed` are sizes already chosen. Tries that the constructor rejects are ignored.
    """
    base_model = recipe.make_on_meta(fixed)
    assert base_model is not None, "the sizes chosen so far make a model"
    base = read_quantities(base_model)
    counts_of: dict[str, list[tuple[Fraction, dict[QuantityPlace, int]]]] = {}
    for name, size in recipe.sizes.items():
        if name in fixed:
            continue
        tries = [f for f in FACTORS if (size * f).denominator == 1 and size * f > 0]
        models = [(f, recipe.make_on_meta({**fixed, name: int(size * f)})) for f in tries]
        counts_of[name] = [(f, read_quantities(model)) for f, model in models if model is not None]
    quantities = []
    for name, size in recipe.sizes.items():  # the size itself, if something depends on it
        if name not in fixed and any(counts != base for _, counts in counts_of[name]):
            quantities.append(
                SizedQuantity(
                    QuantityPlace(SIZES_MODULE, name),
                    size,
                    (name,),
                    SizeFormula(Fraction(1), ((name, 1),)),
                )
            )
    for key, value in base.items():
        depends = tuple(
            name for name, tries in counts_of.items() if any(c.get(key) != value for _, c in tries)
        )
        if depends:
            formula = _fit_form(key, value, {n: counts_of[n] for n in depends}, recipe.sizes)
            quantities.append(SizedQuantity(key, value, depends, formula))
    return quantities


def _fit_form(
    key: QuantityPlace,
    value: int,
    counts_by_size: Mapping[str, Sequence[tuple[Fraction, dict[QuantityPlace, int]]]],
    sizes: Mapping[str, int],
) -> SizeFormula | None:
    """Return the form that fits the observed values, or None."""
    powers: list[tuple[str, int]] = []
    for name, tries in counts_by_size.items():
        pairs = [(factor, counts[key]) for factor, counts in tries if key in counts]
        fits = {p: sum(Fraction(count) == value * f**p for f, count in pairs) for p in POWERS}
        power = max(fits, key=lambda p: fits[p])
        if fits[power] < 2:
            return _fit_line(name, value, pairs, sizes[name]) if len(counts_by_size) == 1 else None
        powers.append((name, power))
    factor = Fraction(value)
    for name, power in powers:
        factor /= Fraction(sizes[name]) ** power
    return SizeFormula(factor, tuple(powers))


def _fit_line(
    name: str, value: int, pairs: Sequence[tuple[Fraction, int]], size: int
) -> SizeFormula | None:
    """Return the form factor x size + shift through all observed values, or None."""
    slopes = {Fraction(count - value) / (size * (f - 1)) for f, count in pairs}
    if len(pairs) < 2 or len(slopes) != 1:
        return None
    factor = slopes.pop()
    shift = value - factor * size
    return SizeFormula(factor, ((name, 1),), int(shift)) if shift.denominator == 1 else None


def find_free_sizes(quantities: Sequence[SizedQuantity]) -> set[str]:
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


MAX_FIXED = 4  # numbers up to this are a kind (top-k, channels), not a size, and do not change
MAX_FIXED_RATIO = 16  # ratios of sizes up to this do not change: query heads per key-value head
MIN_ROWS = 16  # least rows of an embedding: positions for a few tokens, and a choice of ids
MAX_TRIED = 4096  # values tried for one size
MAX_NODES = 50_000  # largest number of nodes of the search


Dims = dict[int, int]  # new sizes of dims by their old ones


@dataclass(frozen=True)
class AxisRanks:
    """An axis that splits tensors: its number of ranks before and after the reduction."""

    before: int
    after: int


@dataclass(frozen=True)
class SizeRules:
    """Constraints on reduced sizes.

    `pads` are pairs of a dim's size and the multiple to which it is padded.
    """

    splits: tuple[AxisRanks, ...] = ()
    pads: tuple[tuple[int, int], ...] = ()
    tables: frozenset[QuantityPlace] = frozenset()  # rows of embeddings

    def allow(self, q: SizedQuantity, new: int) -> bool:
        """Return whether a quantity may become `new`."""
        old = q.value
        if not 0 < new <= old:
            return False
        if q.formula is not None and q.formula.degree == 0 and old <= MAX_FIXED_RATIO:
            return new == old
        dividing = [s for s in self.splits if s.before > 1 and old % s.before == 0]
        if old <= MAX_FIXED and all(s.before == s.after for s in dividing):
            return new == old
        for split in dividing:  # two elements on each rank show a wrong order
            min_per_rank = min(old // split.before, 2) if q.key.is_dim else 1
            if new % split.after or new < min_per_rank * split.after:
                return False
            if old // split.before > 1 and new < MAX_FIXED:
                return False
        if any(old % s.after and not new % s.after for s in self.splits if s not in dividing):
            return False
        if new % 2 != old % 2 and (old % 2 == 0 or not dividing):
            return False
        min_size = MIN_ROWS if q.key in self.tables else MAX_FIXED if not dividing else 1
        return new >= min(old, min_size) and (q.key not in self.tables or self._padded(old, new))

    def fit_dims(
        self, pairs: Iterable[tuple[SizedQuantity, int | None]], dims: Dims
    ) -> Dims | None:
        """Return `dims` with the new sizes of some quantities, by old size.

        Returns None where a new size is no integer or not allowed, or where the order of sizes
        would change.
        """
        dims = dict(dims)
        for q, new in pairs:
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
                padded = -(-new // multiple) * multiple
                ranks = max((s.after for s in self.splits), default=1)
                if any(padded % s.after for s in self.splits):
                    return False
                if bool(new % multiple) != bool(old % multiple) or new <= padded - padded // ranks:
                    return False
        return True


class SizeSearch:
    """The choices of sizes that satisfy the rules, small sizes first."""

    def __init__(
        self, sizes: Mapping[str, int], quantities: Sequence[SizedQuantity], rules: SizeRules
    ) -> None:
        self.sizes, self.rules = sizes, rules
        # small sizes are chosen first: numbers of heads decide widths, not the reverse
        names = {name for q in quantities for name in q.depends}
        self.names = sorted(names, key=sizes.__getitem__)
        self.visited = 0
        self.decided: list[list[tuple[SizeFormula, SizedQuantity]]] = [[] for _ in self.names]
        # quantities of one form have one value
        known_kinds: set[tuple[SizeFormula, bool, bool]] = set()
        for q in quantities:
            if q.formula is None:
                continue
            kind = (q.formula, q.key.is_dim, q.key in rules.tables)
            if kind not in known_kinds:
                known_kinds.add(kind)
                last = max(self.names.index(name) for name, _ in q.formula.powers)
                self.decided[last].append((q.formula, q))

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.visited = 0
        yield from self._search_below({}, {})

    def _search_below(self, sizes_chosen: dict[str, int], dims: Dims) -> Iterator[dict[str, int]]:
        if len(sizes_chosen) == len(self.names):
            yield dict(sizes_chosen)
            return
        name = self.names[len(sizes_chosen)]
        for value in self.values[name]:
            self.visited += 1
            if self.visited > MAX_NODES:
                return
            tried = {**sizes_chosen, name: value}
            new_dims = self._fit_dims(self.decided[len(sizes_chosen)], tried, dims)
            if new_dims is not None:
                yield from self._search_below(tried, new_dims)

    @cached_property
    def values(self) -> dict[str, list[int]]:
        """Return, for each size, the values allowed by quantities that depend on this size only."""
        choices = {}
        for index, name in enumerate(self.names):
            single = [(f, q) for f, q in self.decided[index] if len(f.powers) == 1]
            size = self.sizes[name]
            tried = (*range(1, min(size, MAX_TRIED)), size)
            choices[name] = [v for v in tried if self._fit_dims(single, {name: v}, {}) is not None]
        return choices

    def _fit_dims(
        self,
        formulas: Sequence[tuple[SizeFormula, SizedQuantity]],
        sizes: Mapping[str, int],
        dims: Dims,
    ) -> Dims | None:
        return self.rules.fit_dims(((q, formula.evaluate(sizes)) for formula, q in formulas), dims)


def satisfies_rules(
    quantities: Sequence[SizedQuantity], sizes: Mapping[QuantityPlace, int], rules: SizeRules
) -> bool:
    """Return whether the quantities of a reduced model satisfy all rules."""
    # modules that the reduced model does not have are skipped
    pairs = ((q, sizes[q.key]) for q in quantities if q.key in sizes)
    return rules.fit_dims(pairs, {}) is not None and _keeps_order(quantities, sizes)


def _keeps_order(quantities: Sequence[SizedQuantity], sizes: Mapping[QuantityPlace, int]) -> bool:
    """Return whether sizes of a module stay above its unchanged small numbers.

    For example, num_experts stays above top_k.
    """
    largest: dict[str, int] = {}
    for q in quantities:
        if not q.key.is_dim and q.value <= MAX_FIXED:
            largest[q.key.fqn] = max(largest.get(q.key.fqn, 0), q.value)
    return all(
        sizes.get(q.key, q.value) > largest[q.key.fqn]
        for q in quantities
        if q.key.fqn in largest and q.value > largest[q.key.fqn]
    )
