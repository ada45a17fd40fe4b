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
from schedlang.passes.judge.dropout_masks import DropoutByMasks
from schedlang.passes.judge.trial import Trial
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import Sequential, count_rows
from schedlang.passes.verify.proof_case import copy_original
from schedlang.passes.verify.training_runs import LabelInput
from schedlang.runtime.batch import split_rows
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes

LEAST_LABELS = 16  # smaller counts of labels may equal other numbers
GradientsByName = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class PartGradients:
    """A tensor's gradient for each part of `unit`: "the batch" or "the words"."""

    parts: Sequence[Tensor]
    unit: str = "the batch"


@dataclass(frozen=True)
class BatchParts:
    """Gradients of the original for parts of a batch, in float64.

    labels    inputs in which a label can be ignored, to divide a batch by its labels
    `rank_rows`  the rows of each part, as ranks were seen to divide them
    """

    trial: Trial
    labels: Sequence[LabelInput] = ()
    rank_rows: Sequence[Sequence[int]] = ()
    _cache: dict[tuple[Any, ...], Sequence[GradientsByName]] = field(default_factory=dict)

    def split_by_rows(self, name: str, condition: str) -> Iterator[PartGradients]:
        """Yield a tensor's gradients for each division of the rows, into blocks and with strides.

        The numbers of parts are the divisors of the number of ranks; two and four, as for gradient
        accumulation; and the ranks' own division.
        """
        one = self._condition(condition)
        count = count_rows(one.batches[0])
        for parts in sorted({*self._divisors, 2, 4}):
            if parts <= count:
                yield from self._divide(
                    one, name, [list(part) for part in split_rows(count, parts)]
                )
                yield from self._divide(
                    one, name, [[*range(k, count, parts)] for k in range(parts)]
                )
        if self.rank_rows:
            yield from self._divide(one, name, [list(part) for part in self.rank_rows])

    def split_by_tokens(self, name: str, condition: str) -> Iterator[PartGradients]:
        """Yield a tensor's gradients for each division of the labels along the sequence.

        Divisions are those of context parallelism: blocks, pairs of a first and a last half-size
        block, and strides; each for labels as they are, and shifted by one. Needs exactly one input
        of labels.
        """
        one = self._condition(condition)
        held = [(label, one.batches[0][label.input_name]) for label in self.labels]
        if len(held) != 1 or held[0][1].dim() < 2:
            return
        label, given = held[0]
        count = given.shape[1]
        for parts in self._divisors:
            blocks, pairs = split_rows(count, parts), split_rows(count, 2 * parts)
            ways = [
                [list(block) for block in blocks],
                [[*pairs[k], *pairs[-1 - k]] for k in range(parts)],
                [[*range(k, count, parts)] for k in range(parts)],
            ]
            for way in ways if count >= 2 * parts else ():
                for shift in (0, 1):
                    chosen = [[(place + shift) % count for place in part] for part in way]
                    yield from self._divide(one, name, chosen, label)

    def label_counts(self, condition: str) -> dict[str, int]:
        """Return the number of labels that count, by description: as they are, and shifted by one.

        Numbers up to `LEAST_LABELS` are left out, because they may equal another number by chance.
        """
        whole = dict.fromkeys(sum(each) for each in self.label_counts_by_part(condition))
        words = ("labels", "labels but the first of each row")
        return {word: n for word, n in zip(words, whole, strict=False) if n > LEAST_LABELS}

    def label_counts_by_part(self, condition: str) -> list[list[int]]:
        """Return the numbers of labels that count in each part of the rows, for each division.

        Divisions are blocks, strides, and the ranks' own; labels as they are, and shifted by one.
        """
        batch, found = self._condition(condition).batches[0], list[list[int]]()
        count = count_rows(batch)
        ways = [list(self.rank_rows)] if self.rank_rows else []
        for n in (n for n in self._divisors if n <= count):
            ways += [[*split_rows(count, n)], [range(k, count, n) for k in range(n)]]
        for label in self.labels:
            given = batch[label.input_name]
            for there in (given, given[:, 1:]) if given.dim() > 1 and len(given) == count else ():
                counted = (there != label.ignore_index).reshape(count, -1).sum(1)
                found += [[int(counted[[*part]].sum()) for part in way] for way in ways]
        return found

    @property
    def _divisors(self) -> list[int]:
        world = self.trial.world
        return [n for n in range(2, world + 1) if world % n == 0]

    def _condition(self, name: str) -> Condition:
        return next(one for one in self.trial.conditions if one.name == name)

    def _divide(
        self, one: Condition, name: str, chosen: list[list[int]], label: LabelInput | None = None
    ) -> Iterator[PartGradients]:
        """Yield one division, if all parts are accepted and have a finite gradient."""
        key = one.name, label, *map(tuple, chosen)
        if key not in self._cache:
            self._cache[key] = self._gradients(one.batches[0], chosen, label)
        found = [of_part.get(name) for of_part in self._cache[key]]
        there = [g for g in found if g is not None and bool(g.isfinite().all())]
        if found and len(there) == len(found):
            yield PartGradients(there, "the batch" if label is None else "the words")

    def _gradients(
        self, batch: Batch, chosen: list[list[int]], label: LabelInput | None
    ) -> Sequence[GradientsByName]:
        """Run the original on each part; nothing if it rejects one of them."""
        count, found = count_rows(batch), list[GradientsByName]()
        for places in chosen:
            part = select_labels(batch, places, label) if label else select_rows(batch, places)
            here = range(count) if label else places
            subject = Sequential(copy_original(self.trial.case), loss=self.trial.case.loss)
            drops = self.trial.drops
            with enter_modes(Float64(), DropoutByMasks(drops.seed, drops.off, tuple(here))):
                try:
                    subject.forward_backward(part, here)
                except _REJECTIONS:
                    return []
            found.append(dict(subject.gradients()))
        return found


# errors of models and losses for rejected sizes or rows, or if nothing is trained
_REJECTIONS = (Refusal, RuntimeError, ValueError, IndexError, ZeroDivisionError, AssertionError)


def select_rows(batch: Batch, chosen: Sequence[int]) -> dict[str, Any]:
    """Select rows of a batch."""
    count = count_rows(batch)
    return {
        name: value[list(chosen)]
        if isinstance(value, Tensor) and value.dim() and len(value) == count
        else value
        for name, value in batch.items()
    }


def select_labels(batch: Batch, chosen: Sequence[int], label: LabelInput) -> dict[str, Any]:
    """Return a batch in which only some positions have labels that count."""
    given = batch[label.input_name]
    there = torch.zeros(given.shape[1], dtype=torch.bool)
    there[list(chosen)] = True
    hidden = ~there.reshape(-1, *[1] * (given.dim() - 2))
    return {**batch, label.input_name: given.masked_fill(hidden, label.ignore_index)}
