"""Tell by trying how every expert is cut along its inner dim, so that parts add up to the whole.

Megatron-LM's pair of a column and a row (Shoeybi et al. 2019), of weights that hold all experts:
which dims of which parameters, and in how many blocks, is found on a small copy.  A bias that is
added behind the sum is whole on every rank, and each adds its share of it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from schedlang.placement import EVEN, positions
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient
from schedlang.runtime.routing.expert_probe import (
    TOLERANCE,
    Experts,
    Trial,
    gap,
    scales,
    small_copy,
)
from schedlang.runtime.sharding.numbers import numbers_of, set_number

PARTS = 2  # of the trial
Cut = tuple[int, int] | None  # a dim and its blocks; None: whole on every rank


@dataclass(frozen=True)
class Inner:
    """How experts are cut along their inner dim.

    cuts     parameter -> dim and blocks; `whole` are those of which every rank adds a share
    numbers  attributes that hold the inner size, to be divided by the ranks
    """

    cuts: tuple[tuple[str, int, int], ...]
    whole: tuple[str, ...]
    numbers: tuple[str, ...]


def probe_inner(module: nn.Module, experts: Experts) -> Inner | None:
    """How the experts of a module are cut; None where no way of cutting them gives the same."""
    shapes = [tuple(module.get_parameter(name).shape) for name in experts.split]
    with torch.random.fork_rng(devices=[]), ambient(Float64()):
        for scale in scales(shapes):
            small = small_copy(module, experts.split, scale)
            if small is None:
                continue
            try:
                trial = Trial(small, experts.count, experts.split)
            except Exception:  # its own code: at this size it does not run
                continue
            found = _found(trial, experts.split)
            if found is not None:
                return found
    return None


def _found(trial: Trial, split: tuple[str, ...]) -> Inner | None:
    """The first way of cutting a small copy whose parts add up to the whole."""
    options = [tuple(_cuts(trial, name)) for name in split]
    for chosen in itertools.product(*options):
        cuts = {name: cut for name, cut in zip(split, chosen)}
        for numbers in _numbers(trial, cuts):
            if _gap(trial, cuts, numbers) <= TOLERANCE:
                told = tuple((n, *cut) for n, cut in cuts.items() if cut is not None)
                return Inner(told, tuple(n for n, cut in cuts.items() if cut is None), numbers)
    return None


def _cuts(trial: Trial, name: str) -> Iterator[Cut]:
    """The ways in which a parameter may be cut: matrices along a dim that is not a token's."""
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


def _numbers(trial: Trial, cuts: dict[str, Cut]) -> Iterator[tuple[str, ...]]:
    """Which attributes may say how large the inner dim is: none, all that could, or one.

    First those that cannot be the size of a token.
    """
    module, width = trial.module, trial.x.shape[1]
    sizes = {
        module.get_parameter(name).shape[cut[0]] // blocks
        for name, cut in cuts.items() if cut is not None
        for blocks in (1, cut[1])
    }  # fmt: skip
    known = dict(numbers_of(module))
    own = [path for path, value in known.items() if value in sizes]
    direct = [path for path in own if "." not in path]
    sure = [path for path in direct if known[path] != width]
    ways = (sure, [], direct, own, *([path] for path in own))
    yield from dict.fromkeys(tuple(some) for some in ways)


def _gap(trial: Trial, cuts: dict[str, Cut], numbers: tuple[str, ...]) -> float:
    """How far the sum of the parts is from the whole."""
    total = torch.zeros_like(trial.whole)
    for place in range(PARTS):
        part = copy.deepcopy(trial.module)
        for name, cut in cuts.items():
            whole = part.get_parameter(name).detach()
            mine = whole / PARTS if cut is None else _part(whole, cut, place)
            owner, _, last = name.rpartition(".")
            part.get_submodule(owner)._parameters[last] = nn.Parameter(mine)
        for path in numbers:
            value = dict(numbers_of(part))[path]
            set_number(part, path, value // PARTS)
        try:
            total += Trial.call(part, trial.x, trial.index, trial.weights)
        except Exception:  # what does not fit together was cut
            return float("inf")
    return gap(total, trial.whole)


def _part(whole: torch.Tensor, cut: tuple[int, int], place: int) -> torch.Tensor:
    dim, blocks = cut
    sizes = [whole.shape[dim] // blocks] * blocks
    return whole.index_select(dim, torch.tensor(positions(sizes, EVEN, PARTS, place)))
