"""Tell by trying whether a module holds experts, each used by the tokens that are routed to it.

A small copy with random float64 values and the module's own forward is called with tokens, the
experts of each and their weights.  What it gives has to be the sum over a token's experts of weight
times what that expert alone gives for that token alone; and a copy that holds some of the experts
has to give the same for them.  That is all that is relied on when tokens go to other ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient
from schedlang.runtime.recording.meta import copy_with
from schedlang.runtime.sharding.numbers import numbers_of, set_number

TOLERANCE = 1e-9
TOKENS = 12  # of the trial; each goes to two experts
LARGEST = 1 << 25  # elements of a trial's parameters


@dataclass(frozen=True)
class Experts:
    """What a module of experts is: how many, what they own, and how it counts them.

    split    its parameters, whose first dim are the experts
    numbers  attributes that hold the number of experts, to be set where fewer are held
    """

    count: int
    split: tuple[str, ...]
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class NoExperts:
    """Why a module is not a module of experts, and by how much it differs (relative) if it ran.

    helps   what can be done with what it is
    """

    reason: str
    error: float | None = None
    helps: tuple[str, ...] = (
        "select the module that is called with (tokens, expert indices, routing weights)",
    )

    @property
    def said(self) -> str:
        """The reason, with the difference."""
        return self.reason + (f" (by {self.error:.1e})" if self.error is not None else "")


def probe_experts(module: nn.Module) -> Experts | NoExperts:
    """The experts that a module holds, or the measured reason why it does not."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    cubes = {shape[0] for shape in shapes.values() if len(shape) >= 3}
    listed = _listed(module)
    if not cubes and listed is not None:
        return listed
    if len(cubes) != 1:
        return NoExperts("it has no parameters of 3 dims, of which dim 0 counts the experts")
    (count,) = cubes
    split = tuple(n for n, shape in shapes.items() if shape[:1] == (count,) and "." not in n)
    other = [name for name in shapes if name not in split]
    if other:
        return NoExperts(
            f"its `{other[0]}` has no dim of experts, or is shared with another module"
        )
    if count < 2:
        return NoExperts("it has only one expert")
    error: NoExperts | None = None
    with torch.random.fork_rng(devices=[]), ambient(Float64):
        for scale in scales([shapes[name] for name in split]):
            found = _tried(module, count, split, scale)
            if isinstance(found, Experts):
                return found
            error = error if error is not None and error.error is not None else found
    assert error is not None
    return error


def _listed(module: nn.Module) -> NoExperts | None:
    """Experts that are modules of their own, one behind the other in a list."""
    for name, child in module.named_modules():
        alike = {
            (type(one), tuple((n, p.shape) for n, p in one.named_parameters()))
            for one in child.children()
        }
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len(alike) == 1:
            where = f"`{name}` holds" if name else "it is a list of"
            return NoExperts(
                f"{where} {len(child)} modules of their own, which are called one by one",
                helps=(
                    "stack their weights in one module that is called with (tokens, expert"
                    " indices, routing weights)",
                    "or shard them as they are, but not the tokens: `zero(stage=3, over=...)`",
                ),
            )
    return None


def scales(shapes: list[tuple[int, ...]]) -> Iterator[int]:
    """By how much sizes are divided in a trial: as small as is sure to differ, else as it is."""
    common = math.gcd(*(size for shape in shapes for size in shape[1:]))
    least = min(size for shape in shapes for size in shape[1:])
    scale = max((d for d in range(1, common + 1) if common % d == 0 and least // d >= 4), default=1)
    yield from dict.fromkeys((scale, 1))


def _tried(
    module: nn.Module, count: int, split: tuple[str, ...], scale: int
) -> Experts | NoExperts:
    small = small_copy(module, split, scale)
    if small is None:
        return NoExperts("it is too large to be tried on a small copy")
    try:
        trial = Trial(small, count, split)
    except Exception as raised:  # the module's own code: whatever it raises is a reason
        said = f"{type(raised).__name__}: {raised}".splitlines()[0]
        return NoExperts(f"it does not run with (tokens, expert indices, routing weights): {said}")
    for reason, error in trial.faults():
        if not error <= TOLERANCE:
            return NoExperts(reason, error)
    errors: list[float] = []
    for numbers in _countings(small, count):
        errors.append(trial.with_some(numbers))
        if errors[-1] <= TOLERANCE:
            return Experts(count, split, numbers)
    return NoExperts("a copy with some of its experts returns something else", min(errors))


def _countings(module: nn.Module, count: int) -> Iterator[tuple[str, ...]]:
    """Which attributes may say how many experts there are: none, all that could, or some."""
    own = [path for path, value in numbers_of(module) if value == count]
    named = [path for path in own if "expert" in path.lower()]
    direct = [path for path in own if "." not in path]
    tries: list[list[str]] = [[p for p in named if p in direct], [], direct, named, own]
    yield from dict.fromkeys(tuple(some) for some in (*tries, *([path] for path in own)))


def small_copy(module: nn.Module, split: tuple[str, ...], scale: int) -> nn.Module | None:
    """A copy with random values whose sizes, and the numbers that say them, are divided."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        keep = parameter.shape[:1] if name in split else ()
        rest = parameter.shape[len(keep) :]
        shapes[name] = (*keep, *(n // scale if n % scale == 0 else n for n in rest))
    if sum(math.prod(shape) for shape in shapes.values()) > LARGEST:
        return None
    sizes = {n for name in split for n in module.get_parameter(name).shape[1:] if scale > 1}
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, parameter: nn.Parameter) -> nn.Parameter:
        values = torch.randn(shapes[name], generator=generator, dtype=torch.float64) / 2
        return nn.Parameter(values)

    def other(tensor: Tensor) -> Tensor:
        plain = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.cpu()
        return plain.double() if plain.is_floating_point() else plain.clone()

    small = copy_with(module, drawn, other)
    for path, value in list(numbers_of(small)):
        if value in sizes or 2 * value in sizes:
            set_number(small, path, value // scale)
    for child in small.modules():
        child._forward_hooks.clear()
        child._forward_pre_hooks.clear()
    return small.train()


class Trial:
    """Calls of a small copy: what it gives for tokens, and for each of their experts alone."""

    def __init__(self, module: nn.Module, count: int, split: tuple[str, ...]) -> None:
        self.module, self.count, self.split = module, count, split
        generator = torch.Generator().manual_seed(1)
        width = _width(module, split)
        self.x, self.index, self.weights = _routed(width, count, generator)
        self.whole = self.call(self.module, self.x, self.index, self.weights)
        again = self.call(self.module, self.x, self.index, self.weights)
        self.drawn = gap(again, self.whole)
        ones = torch.ones_like(self.weights[:, :1])
        self.alone = [
            self.call(self.module, self.x, self.index[:, k : k + 1], ones)
            for k in range(self.index.shape[1])
        ]

    @staticmethod
    def call(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What a copy gives, which has to be a row for each token."""
        with torch.no_grad():
            out = module(x.clone(), index.clone(), weights.clone())
        if not isinstance(out, Tensor) or out.shape != x.shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(f"it returns {got} for tokens of {list(x.shape)}")
        return out

    def faults(self) -> Iterator[tuple[str, float]]:
        """What a module of experts does not do, each with how far this one does."""
        yield "it draws random numbers", self.drawn
        summed = sum(w[:, None] * y for w, y in zip(self.weights.unbind(1), self.alone))
        assert isinstance(summed, Tensor)
        yield "its output is not linear in the routing weights", gap(summed, self.whole)
        some = torch.tensor([5, 2, 9])
        few = self.call(self.module, self.x[some], self.index[some], self.weights[some])
        yield "its output for a token depends on other tokens", gap(few, self.whole[some])

    def with_some(self, numbers: tuple[str, ...]) -> float:
        """How far a copy that holds the second half of the experts differs for their tokens."""
        first = self.count // 2
        part = copy.deepcopy(self.module)
        held = part_of(part, self.split, slice(first, None), numbers, self.count - first)
        mine = (self.index[:, 0] >= first).nonzero().flatten()
        ones = torch.ones(len(mine), 1, dtype=torch.float64)
        try:
            got = self.call(held, self.x[mine], self.index[mine, :1] - first, ones)
        except Exception:  # a number that counts something else was changed
            return math.inf
        return gap(got, self.alone[0][mine])


def part_of(
    module: nn.Module, split: tuple[str, ...], held: slice, numbers: tuple[str, ...], count: int
) -> nn.Module:
    """The module with some of its experts, in place."""
    for name in split:
        owner, _, last = name.rpartition(".")
        parameter = module.get_parameter(name)
        part = nn.Parameter(parameter.detach()[held].clone())
        module.get_submodule(owner)._parameters[last] = part
    for path in numbers:
        set_number(module, path, count)
    return module


def _width(module: nn.Module, split: tuple[str, ...]) -> int:
    """The size of a token: one that a call with zeros takes."""
    sizes = [n for name in split for n in module.get_parameter(name).shape[1:]]
    index = torch.zeros(2, 1, dtype=torch.long)
    failed: Exception | None = None
    for size in dict.fromkeys(reversed(sizes)):
        try:
            x = torch.zeros(2, size, dtype=torch.float64)
            Trial.call(module, x, index, torch.ones(2, 1, dtype=torch.float64))
            return size
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _routed(width: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, two different experts of each (all are used), and weights."""
    x = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)
    first = torch.arange(TOKENS) * count // TOKENS
    index = torch.stack([first, (first + 1 + torch.arange(TOKENS) % (count - 1)) % count], 1)
    weights = torch.rand(TOKENS, 2, generator=generator, dtype=torch.float64) + 0.2
    return x, index, weights


def gap(got: Tensor, expected: Tensor) -> float:
    """The relative distance of two results; infinite where one is no number."""
    far = float((got - expected).norm() / (expected.norm() + 1e-300))
    return far if math.isfinite(far) else math.inf
