"""Gradients of the original for parts of a batch: for some rows, or for some labels.

Used to explain wrong gradients that are made of the right gradients of such parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.masks import Dropping
from schedlang.passes.judge.trial import Trial
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import Sequential, rows
from schedlang.passes.verify.runs import Labels
from schedlang.passes.verify.sides import twin
from schedlang.runtime.batch import shares
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient

MANY = 16  # smaller counts of labels may equal other numbers
Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Cut:
    """A tensor's gradient for each part of `whole`: "the batch" or "the words"."""

    parts: Sequence[Tensor]
    whole: str = "the batch"


@dataclass(frozen=True)
class Parts:
    """Gradients of the original for parts of a batch, in float64.

    labels    inputs in which a label can be ignored, to divide a batch by its labels
    `shared`  the rows of each part, as ranks were seen to divide them
    """

    trial: Trial
    labels: Sequence[Labels] = ()
    shared: Sequence[Sequence[int]] = ()
    _cache: dict[tuple[Any, ...], Sequence[Gradients]] = field(default_factory=dict)

    def of_rows(self, name: str, condition: str) -> Iterator[Cut]:
        """Yield a tensor's gradients for each division of the rows, into blocks and with strides.

        The numbers of parts are the divisors of the number of ranks; two and four, as for gradient
        accumulation; and the ranks' own division.
        """
        one = self._condition(condition)
        count = rows(one.batches[0])
        for parts in sorted({*self._divisors, 2, 4}):
            if parts <= count:
                yield from self._divide(one, name, [list(part) for part in shares(count, parts)])
                yield from self._divide(
                    one, name, [[*range(k, count, parts)] for k in range(parts)]
                )
        if self.shared:
            yield from self._divide(one, name, [list(part) for part in self.shared])

    def of_words(self, name: str, condition: str) -> Iterator[Cut]:
        """Yield a tensor's gradients for each division of the labels along the sequence.

        Divisions are those of context parallelism: blocks, pairs of a first and a last half-size
        block, and strides; each for labels as they are, and shifted by one. Needs exactly one input
        of labels.
        """
        one = self._condition(condition)
        held = [(label, one.batches[0][label.source]) for label in self.labels]
        if len(held) != 1 or held[0][1].dim() < 2:
            return
        label, given = held[0]
        count = given.shape[1]
        for parts in self._divisors:
            blocks, pairs = shares(count, parts), shares(count, 2 * parts)
            ways = [
                [list(block) for block in blocks],
                [[*pairs[k], *pairs[-1 - k]] for k in range(parts)],
                [[*range(k, count, parts)] for k in range(parts)],
            ]
            for way in ways if count >= 2 * parts else ():
                for shift in (0, 1):
                    chosen = [[(place + shift) % count for place in part] for part in way]
                    yield from self._divide(one, name, chosen, label)

    def labelled(self, condition: str) -> dict[str, int]:
        """Return the number of labels that count, by description: as they are, and shifted by one.

        Numbers up to `MANY` are left out, because they may equal another number by chance.
        """
        whole = dict.fromkeys(sum(each) for each in self.counts(condition))
        words = ("labels", "labels but the first of each row")
        return {word: n for word, n in zip(words, whole, strict=False) if n > MANY}

    def counts(self, condition: str) -> list[list[int]]:
        """Return the numbers of labels that count in each part of the rows, for each division.

        Divisions are blocks, strides, and the ranks' own; labels as they are, and shifted by one.
        """
        batch, found = self._condition(condition).batches[0], list[list[int]]()
        count = rows(batch)
        ways = [list(self.shared)] if self.shared else []
        for n in (n for n in self._divisors if n <= count):
            ways += [[*shares(count, n)], [range(k, count, n) for k in range(n)]]
        for label in self.labels:
            given = batch[label.source]
            for there in (given, given[:, 1:]) if given.dim() > 1 and len(given) == count else ():
                counted = (there != label.ignored).reshape(count, -1).sum(1)
                found += [[int(counted[[*part]].sum()) for part in way] for way in ways]
        return found

    @property
    def _divisors(self) -> list[int]:
        world = self.trial.world
        return [n for n in range(2, world + 1) if world % n == 0]

    def _condition(self, name: str) -> Condition:
        return next(one for one in self.trial.conditions if one.name == name)

    def _divide(
        self, one: Condition, name: str, chosen: list[list[int]], label: Labels | None = None
    ) -> Iterator[Cut]:
        """Yield one division, if all parts are accepted and have a finite gradient."""
        key = one.name, label, *map(tuple, chosen)
        if key not in self._cache:
            self._cache[key] = self._gradients(one.batches[0], chosen, label)
        found = [of_part.get(name) for of_part in self._cache[key]]
        there = [g for g in found if g is not None and bool(g.isfinite().all())]
        if found and len(there) == len(found):
            yield Cut(there, "the batch" if label is None else "the words")

    def _gradients(
        self, batch: Batch, chosen: list[list[int]], label: Labels | None
    ) -> Sequence[Gradients]:
        """Run the original on each part; nothing if it rejects one of them."""
        count, found = rows(batch), list[Gradients]()
        for places in chosen:
            part = of_words(batch, places, label) if label else of_rows(batch, places)
            here = range(count) if label else places
            subject = Sequential(twin(self.trial.case), loss=self.trial.case.loss)
            drops = self.trial.drops
            with ambient(Float64(), Dropping(drops.seed, drops.off, tuple(here))):
                try:
                    subject.derive(part, here)
                except _REJECTIONS:
                    return []
            found.append(dict(subject.gradients()))
        return found


# errors of models and losses for rejected sizes or rows, or if nothing is trained
_REJECTIONS = (Refusal, RuntimeError, ValueError, IndexError, ZeroDivisionError, AssertionError)


def of_rows(batch: Batch, chosen: Sequence[int]) -> dict[str, Any]:
    """Select rows of a batch."""
    count = rows(batch)
    return {
        name: value[list(chosen)]
        if isinstance(value, Tensor) and value.dim() and len(value) == count
        else value
        for name, value in batch.items()
    }


def of_words(batch: Batch, chosen: Sequence[int], label: Labels) -> dict[str, Any]:
    """Return a batch in which only some positions have labels that count."""
    given = batch[label.source]
    there = torch.zeros(given.shape[1], dtype=torch.bool)
    there[list(chosen)] = True
    hidden = ~there.reshape(-1, *[1] * (given.dim() - 2))
    return {**batch, label.source: given.masked_fill(hidden, label.ignored)}
