"""Probes that run a small copy of a module to find whether it is a module of experts, and how its
experts can be sharded along their inner dim."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from schedlang.ir.placement import EVEN, positions
from schedlang.kernels.probe import TOLERANCE, error_line, relative_error
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.sharding.module_sizes import numbers_of, set_number
from schedlang.runtime.tracing.meta_runs import copy_with

# -- experts ---------------------------------------------------------------------------------------
# A small copy with random float64 values and the module's own forward is called with tokens, the
# experts of each and their weights. Its output must be the sum, over the experts of a token, of the
# weight times the output of that expert alone for that token alone; and a copy with some of the
# experts must give the same output for them. Dispatch to other ranks relies on nothing else.


TOKENS = 12  # tokens of a trial; each goes to two experts
LARGEST = 1 << 25  # elements of a trial's parameters


@dataclass(frozen=True)
class Experts:
    """A module of experts: their number, their parameters, and the attributes that count them.

    split    parameters whose first dim is the expert
    numbers  attributes that hold the number of experts, to be set if fewer are held
    """

    count: int
    split: tuple[str, ...]
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class NoExperts:
    """The reason why a module is no module of experts, and the relative error if it ran.

    helps   possible remedies
    """

    reason: str
    error: float | None = None
    helps: tuple[str, ...] = (
        "select the module that is called with (tokens, expert indices, routing weights)",
    )

    @property
    def message(self) -> str:
        """The reason, with the error."""
        return self.reason + (f" (by {self.error:.1e})" if self.error is not None else "")


def probe_experts(module: nn.Module) -> Experts | NoExperts:
    """Return the experts of a module, or the measured reason why it has none."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    cubes = {shape[0] for shape in shapes.values() if len(shape) >= 3}
    listed = _find_list(module)
    if not cubes and listed is not None:
        return listed
    if len(cubes) != 1:
        return NoExperts("it has no parameters of 3 dims where dim 0 counts the experts")
    (count,) = cubes
    split = tuple(n for n, shape in shapes.items() if shape[:1] == (count,) and "." not in n)
    unsplit = [name for name in shapes if name not in split]
    if unsplit:
        return NoExperts(
            f"its `{unsplit[0]}` has no dim of experts, or is shared with another module"
        )
    if count < 2:
        return NoExperts("it has only one expert")
    error: NoExperts | None = None
    with torch.random.fork_rng(devices=[]), enter_modes(Float64):
        for scale in trial_scales([shapes[name] for name in split]):
            result = _try_module(module, count, split, scale)
            if isinstance(result, Experts):
                return result
            error = error if error is not None and error.error is not None else result
    assert error is not None
    return error


def _find_list(module: nn.Module) -> NoExperts | None:
    """Return a refusal for experts that are modules in a list; None if there is no such list."""
    for name, child in module.named_modules():
        kinds = {
            (type(expert), tuple((n, p.shape) for n, p in expert.named_parameters()))
            for expert in child.children()
        }
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len(kinds) == 1:
            description = f"`{name}` holds" if name else "it is a list of"
            return NoExperts(
                f"{description} {len(child)} modules of their own, which are called one by one",
                helps=(
                    "stack their weights in one module that is called with (tokens, expert"
                    " indices, routing weights)",
                    "or shard them as they are, but not the tokens: `zero(stage=3, over=...)`",
                ),
            )
    return None


def trial_scales(shapes: list[tuple[int, ...]]) -> Iterator[int]:
    """Yield divisors of the sizes in a trial: the largest with sizes still distinct, then 1."""
    common = math.gcd(*(size for shape in shapes for size in shape[1:]))
    least = min(size for shape in shapes for size in shape[1:])
    scale = max((d for d in range(1, common + 1) if common % d == 0 and least // d >= 4), default=1)
    yield from dict.fromkeys((scale, 1))


def _try_module(
    module: nn.Module, count: int, split: tuple[str, ...], scale: int
) -> Experts | NoExperts:
    small = small_copy(module, split, scale)
    if small is None:
        return NoExperts("it is too large to be tried on a small copy")
    try:
        trial = ExpertTrial(small, count, split)
    except Exception as raised:  # the module's own code: any error is a reason
        failure = "it does not run with (tokens, expert indices, routing weights)"
        return NoExperts(f"{failure}: {error_line(raised)}")
    for reason, error in trial.faults():
        if not error <= TOLERANCE:
            return NoExperts(reason, error)
    errors: list[float] = []
    for numbers in _count_attributes(small, count):
        errors.append(trial.subset_error(numbers))
        if errors[-1] <= TOLERANCE:
            return Experts(count, split, numbers)
    return NoExperts("a copy with some of its experts returns something else", min(errors))


def _count_attributes(module: nn.Module, count: int) -> Iterator[tuple[str, ...]]:
    """Yield sets of attributes that may be the number of experts: none, all, or some."""
    matching = [path for path, value in numbers_of(module) if value == count]
    by_name = [path for path in matching if "expert" in path.lower()]
    direct = [path for path in matching if "." not in path]
    tries: list[list[str]] = [[p for p in by_name if p in direct], [], direct, by_name, matching]
    yield from dict.fromkeys(tuple(paths) for paths in (*tries, *([path] for path in matching)))


def small_copy(module: nn.Module, split: tuple[str, ...], scale: int) -> nn.Module | None:
    """Return a copy with random values, with sizes and the attributes of sizes divided."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        keep = parameter.shape[:1] if name in split else ()
        dims = parameter.shape[len(keep) :]
        shapes[name] = (*keep, *(n // scale if n % scale == 0 else n for n in dims))
    if sum(math.prod(shape) for shape in shapes.values()) > LARGEST:
        return None
    sizes = {n for name in split for n in module.get_parameter(name).shape[1:] if scale > 1}
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, parameter: nn.Parameter) -> nn.Parameter:
        values = torch.randn(shapes[name], generator=generator, dtype=torch.float64) / 2
        return nn.Parameter(values)

    def other(tensor: Tensor) -> Tensor:
        values = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.cpu()
        return values.double() if values.is_floating_point() else values.clone()

    small = copy_with(module, drawn, other)
    for path, value in list(numbers_of(small)):
        if value in sizes or 2 * value in sizes:
            set_number(small, path, value // scale)
    for child in small.modules():
        child._forward_hooks.clear()
        child._forward_pre_hooks.clear()
    return small.train()


class ExpertTrial:
    """Calls of a small copy: its output for tokens, and for each of their experts alone."""

    def __init__(self, module: nn.Module, count: int, split: tuple[str, ...]) -> None:
        self.module, self.count, self.split = module, count, split
        generator = torch.Generator().manual_seed(1)
        width = _width(module, split)
        self.x, self.index, self.weights = _trial_inputs(width, count, generator)
        self.whole = self.call(self.module, self.x, self.index, self.weights)
        repeated = self.call(self.module, self.x, self.index, self.weights)
        self.drawn = relative_error(repeated, self.whole)
        ones = torch.ones_like(self.weights[:, :1])
        self.alone = [
            self.call(self.module, self.x, self.index[:, k : k + 1], ones)
            for k in range(self.index.shape[1])
        ]

    @staticmethod
    def call(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Call a copy; raise TypeError unless it returns a row for each token."""
        with torch.no_grad():
            out = module(x.clone(), index.clone(), weights.clone())
        if not isinstance(out, Tensor) or out.shape != x.shape:
            kind = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(f"it returns {kind} for tokens of {list(x.shape)}")
        return out

    def faults(self) -> Iterator[tuple[str, float]]:
        """Yield properties that a module of experts must not have, with the measured error."""
        yield "it draws random numbers", self.drawn
        summed = sum(w[:, None] * y for w, y in zip(self.weights.unbind(1), self.alone))
        assert isinstance(summed, Tensor)
        yield "its output is not linear in the routing weights", relative_error(summed, self.whole)
        tokens = torch.tensor([5, 2, 9])
        few = self.call(self.module, self.x[tokens], self.index[tokens], self.weights[tokens])
        yield (
            "its output for a token depends on other tokens",
            relative_error(few, self.whole[tokens]),
        )

    def subset_error(self, numbers: tuple[str, ...]) -> float:
        """Return the error of a copy with the second half of the experts, for their tokens."""
        begin = self.count // 2
        part = copy.deepcopy(self.module)
        reduced = keep_experts(part, self.split, slice(begin, None), numbers, self.count - begin)
        tokens = (self.index[:, 0] >= begin).nonzero().flatten()
        ones = torch.ones(len(tokens), 1, dtype=torch.float64)
        try:
            output = self.call(reduced, self.x[tokens], self.index[tokens, :1] - begin, ones)
        except Exception:  # an attribute with another meaning was changed
            return math.inf
        return relative_error(output, self.alone[0][tokens])


def keep_experts(
    module: nn.Module, split: tuple[str, ...], kept: slice, numbers: tuple[str, ...], count: int
) -> nn.Module:
    """Reduce a module to some of its experts, in place."""
    for name in split:
        owner, _, last = name.rpartition(".")
        parameter = module.get_parameter(name)
        part = nn.Parameter(parameter.detach()[kept].clone())
        module.get_submodule(owner)._parameters[last] = part
    for path in numbers:
        set_number(module, path, count)
    return module


def _width(module: nn.Module, split: tuple[str, ...]) -> int:
    """Return the size of a token: the first one with which a call with zeros succeeds."""
    sizes = [n for name in split for n in module.get_parameter(name).shape[1:]]
    index = torch.zeros(2, 1, dtype=torch.long)
    failed: Exception | None = None
    for size in dict.fromkeys(reversed(sizes)):
        try:
            x = torch.zeros(2, size, dtype=torch.float64)
            ExpertTrial.call(module, x, index, torch.ones(2, 1, dtype=torch.float64))
            return size
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _trial_inputs(
    width: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, two different experts of each (all are used), and weights."""
    x = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)
    first = torch.arange(TOKENS) * count // TOKENS
    index = torch.stack([first, (first + 1 + torch.arange(TOKENS) % (count - 1)) % count], 1)
    weights = torch.rand(TOKENS, 2, generator=generator, dtype=torch.float64) + 0.2
    return x, index, weights


# -- the inner dim of experts ----------------------------------------------------------------------
# Megatron-LM's pair of a column-parallel and a row-parallel layer (Shoeybi et al. 2019), for
# weights that hold all experts: the dims and blocks of each parameter are found on a small copy. A
# bias that is added after the sum is replicated, and each rank adds its share of it.


PARTS = 2  # shards in a trial
DimSplit = tuple[int, int] | None  # a dim and its blocks; None: replicated


@dataclass(frozen=True)
class InnerSplit:
    """A sharding of experts along their inner dim.

    cuts     parameter -> dim and blocks; `whole`: biases of which every rank adds a share
    numbers  attributes that hold the inner size, to be divided by the ranks
    """

    cuts: tuple[tuple[str, int, int], ...]
    whole: tuple[str, ...]
    numbers: tuple[str, ...]


def probe_inner(module: nn.Module, experts: Experts) -> InnerSplit | None:
    """Return a sharding of the experts of a module along their inner dim; None if none is right."""
    shapes = [tuple(module.get_parameter(name).shape) for name in experts.split]
    with torch.random.fork_rng(devices=[]), enter_modes(Float64()):
        for scale in trial_scales(shapes):
            small = small_copy(module, experts.split, scale)
            if small is None:
                continue
            try:
                trial = ExpertTrial(small, experts.count, experts.split)
            except Exception:  # its own code: at this size it does not run
                continue
            inner_split = _find_split(trial, experts.split)
            if inner_split is not None:
                return inner_split
    return None


def _find_split(trial: ExpertTrial, split: tuple[str, ...]) -> InnerSplit | None:
    """Return the first sharding of a small copy whose shards add up to the full output."""
    options = [tuple(_split_options(trial, name)) for name in split]
    for combination in itertools.product(*options):
        cuts = {name: cut for name, cut in zip(split, combination)}
        for numbers in _size_attributes(trial, cuts):
            if _split_error(trial, cuts, numbers) <= TOLERANCE:
                sharded = tuple((n, *cut) for n, cut in cuts.items() if cut is not None)
                return InnerSplit(
                    sharded, tuple(n for n, cut in cuts.items() if cut is None), numbers
                )
    return None


def _split_options(trial: ExpertTrial, name: str) -> Iterator[DimSplit]:
    """Yield the ways to shard a parameter: matrices along a dim that is not the token size."""
    shape, width = trial.module.get_parameter(name).shape, trial.x.shape[1]
    dims = [dim for dim in range(1, len(shape)) if shape[dim] != width]
    if len(shape) == 2:
        if not dims:
            yield None
        yield from ((1, blocks) for blocks in (1, 2) if shape[1] % (PARTS * blocks) == 0)
        if dims:
            yield None
        return
    for dim in dims or range(1, len(shape)):
        yield from ((dim, blocks) for blocks in (1, 2) if shape[dim] % (PARTS * blocks) == 0)


def _size_attributes(trial: ExpertTrial, cuts: dict[str, DimSplit]) -> Iterator[tuple[str, ...]]:
    """Yield sets of attributes that may be the inner size: none, all, or one.

    Attributes that cannot be the token size come first.
    """
    module, width = trial.module, trial.x.shape[1]
    sizes = {
        module.get_parameter(name).shape[cut[0]] // blocks
        for name, cut in cuts.items()
        if cut is not None
        for blocks in (1, cut[1])
    }
    values = dict(numbers_of(module))
    matching = [path for path, value in values.items() if value in sizes]
    direct = [path for path in matching if "." not in path]
    sure = [path for path in direct if values[path] != width]
    attempts = (sure, [], direct, matching, *([path] for path in matching))
    yield from dict.fromkeys(tuple(paths) for paths in attempts)


def _split_error(trial: ExpertTrial, cuts: dict[str, DimSplit], numbers: tuple[str, ...]) -> float:
    """Return the relative error of the sum of the shards."""
    total = torch.zeros_like(trial.whole)
    for rank in range(PARTS):
        part = copy.deepcopy(trial.module)
        for name, cut in cuts.items():
            full = part.get_parameter(name).detach()
            shard = full / PARTS if cut is None else _part(full, cut, rank)
            owner, _, last = name.rpartition(".")
            part.get_submodule(owner)._parameters[last] = nn.Parameter(shard)
        for path in numbers:
            value = dict(numbers_of(part))[path]
            set_number(part, path, value // PARTS)
        try:
            total += ExpertTrial.call(part, trial.x, trial.index, trial.weights)
        except Exception:  # the sharded sizes do not fit together
            return float("inf")
    return relative_error(total, trial.whole)


def _part(full: torch.Tensor, cut: tuple[int, int], rank: int) -> torch.Tensor:
    dim, blocks = cut
    sizes = [full.shape[dim] // blocks] * blocks
    return full.index_select(dim, torch.tensor(positions(sizes, EVEN, PARTS, rank)))
