"""Draws from Python's and numpy's generators in a step: both sides start them anew in each step.

A model may skip layers by `random.random()`, or mask inputs by `numpy.random`. These generators,
and those that modules hold, are seeded with the number of the step, so a rank that draws as often
as the original draws the same numbers. If it draws less or more often, its generators end in other
states.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.program import Make, TrainingProgram, make_program
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.original import Sequential
from schedlang.report import Row
from schedlang.runtime.global_state import (
    host_generator_states,
    restore_generators,
    seed_host_generators,
)

RANDOM = "random numbers"
OTHER_SEEDS = (
    "`program` leaves it in other states on other ranks (seeds with the rank in them): ranks draw "
    "other numbers, where the original draws once for all of the batch"
)
# generators that a step draws from -> their states after it
EndStates = Mapping[str, frozenset[object]]


@contextmanager
def seeded_generators(
    step: int, modules: Sequence[nn.Module]
) -> Iterator[dict[str, frozenset[object]]]:
    """Seed the generators with the step's number, and restore the global ones after the block.

    Yields a dict that afterwards has the end states of the generators that were drawn from.
    """
    drawn: dict[str, frozenset[object]] = {}
    with restore_generators():
        seed_host_generators(step)
        held = _held_generators(modules)
        for generator in (g for generators in held.values() for g in generators):
            if isinstance(generator, random.Random):
                generator.seed(step)
            else:
                bits = generator.bit_generator
                bits.state = type(bits)(step).state
        before = _generator_states(held)
        yield drawn
        for name, states in _generator_states(held).items():
            if ends := states - before[name]:
                drawn[name] = ends


def _held_generators(modules: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Return the generators of Python and numpy that are attributes of modules, each once."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.random.Generator)
    found = {
        id(value): (name, value)
        for module in modules
        for submodule in module.modules()
        for name, value in vars(submodule).items()
        if isinstance(value, kinds)
    }
    held: dict[str, list[Any]] = {}
    for name, value in found.values():
        held.setdefault(f"its own generator `{name}`", []).append(value)
    return held


def _generator_states(held: Mapping[str, Sequence[Any]]) -> dict[str, frozenset[object]]:
    states = {name: frozenset([state]) for name, state in host_generator_states().items()}
    return states | {name: frozenset(map(_state_of, held[name])) for name in held}


def _state_of(generator: Any) -> object:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return str(generator.bit_generator.state)


def make_from_equal_states(
    make: Make, model: nn.Module, rank: int
) -> tuple[TrainingProgram, dict[str, bytes]]:
    """Call a user's `program` with generators that are alike on all ranks; return the program, and
    digests of the states in which it leaves the generators, by name."""
    seed_host_generators("program")
    program = make_program(make, model, rank)
    states = _generator_states(_held_generators(program.modules))
    texts = {name: repr(sorted(map(repr, of))).encode() for name, of in states.items()}
    return program, {name: hashlib.sha256(text).digest() for name, text in texts.items()}


def differing_seeds(drawn: Iterable[str], ranks: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Return the generators among `drawn` that ranks' programs leave in different states."""
    return sorted(name for name in drawn if len({states.get(name) for states in ranks}) > 1)


def seed_rows(seeds: Sequence[str], unequal: Mapping[str, object]) -> Iterator[Row]:
    """Yield a failing row for each generator that ranks seed differently, and draw equally often
    from."""
    for name in seeds:
        if name not in unequal:
            yield Row("", RANDOM, name, math.inf, 0.0, False, None, OTHER_SEEDS)


class SeededSequential(Sequential):
    """The original's plain training loop, whose draws from the generators are those of the step.

    drawn  end states of the generators that the last step drew from
    """

    seeds_draws = False  # but as ranks of other programs draw
    drawn: EndStates = {}

    def forward_backward(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """See `Sequential`."""
        with seeded_generators(self._steps, [self.module]) as drawn:
            loss = super().forward_backward(batch, samples)
        self.drawn = drawn
        return loss

    def eval_step(self, batch: Batch) -> Any:
        """See `Sequential`."""
        with seeded_generators(self._steps, [self.module]):
            return super().eval_step(batch)


class Unevaluated(SeededSequential):
    """The same loop beside a program without `evaluate`: the original is not evaluated either."""

    def eval_step(self, batch: Batch) -> Any:
        """Return None: nothing would be compared, and not every model can be evaluated."""


_NONE: frozenset[object] = frozenset()


def unequal_draws(expected: EndStates, ranks: Sequence[EndStates]) -> dict[str, list[int]]:
    """Return the generators that ranks draw from less or more often than the original, by name."""
    unequal: dict[str, list[int]] = {}
    for rank, drawn in enumerate(ranks):
        for name in {*expected, *drawn}:
            if drawn.get(name, _NONE) - expected.get(name, _NONE) or not drawn.get(name, _NONE):
                unequal.setdefault(name, []).append(rank)
    return dict(sorted(unequal.items()))


def refuse_unequal_draws(unequal: Mapping[str, Sequence[int]], originals: Sequence[str]) -> None:
    """Refuse (S812) draws that the original makes, and ranks make less or more often."""
    for name in originals:
        if name in unequal:
            ranks = ", ".join(map(str, unequal[name]))
            message = (
                f"the original draws from {name} in a step, and rank {ranks} draws less or more "
                "often: the numbers cannot be aligned"
            )
            notes = (
                "ranks start each step with the original's generators: equal draws, in the same "
                "order, are the original's",
                "microbatches, stages, and draws for each row draw other numbers",
            )
            helps = ("put what is drawn into the batch, so that each rank takes its part of it",)
            raise Refusal.of("S812", message, notes=notes, helps=helps)


def describe_extra_draws(unequal: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, str]]:
    """Describe draws that ranks make, if the original makes none."""
    for name, ranks in unequal.items():
        text = f"rank {', '.join(map(str, ranks))} draws from {name} in a step"
        yield RANDOM, f"{text}, and the original draws nothing from it"
