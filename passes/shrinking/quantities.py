"""What a model counts, dims of tensors and numbers of modules, as functions of its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.shrinking.recipe import Recipe

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
        """Is it a dim of a parameter?"""
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
    key: Key, value: int, seen: Mapping[str, Sequence[tuple[Fraction, dict[Key, int]]]],
    sizes: Mapping[str, int],
) -> Form | None:  # fmt: skip
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
