"""Gradients of the original for parts of a batch: for some rows, or for some labels.

Used to explain wrong gradients that are made of the right gradients of such parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.dropout_masks import DropoutByMasks
from schedlang.passes.judge.step_draws import SeededSequential
from schedlang.passes.judge.trial import Trial
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.proof_case import copy_original
from schedlang.passes.verify.training_runs import LabelInput
from schedlang.runtime.batch import split_rows
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes

ROWS = "rows"
MOST_ROWS = 16  # of a batch that is divided into single rows
LEAST_LABELS = 16  # smaller counts of labels may equal other numbers
GradientsByName = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class PartGradients:
    """A tensor's gradient for each part of `unit`: "the batch", "the words", or single rows."""

    parts: Sequence[Tensor]
    unit: str = "the batch"


@dataclass(frozen=True)
class BatchParts:
    """Gradients of the original for parts of a batch, in float64.

    labels     inputs in which a label can be ignored, to divide a batch by its labels
    rank_rows  the rows of each part, as ranks were seen to divide them
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
        run = self._condition(condition)
        count = count_rows(run.batches[0])
        for parts in sorted({*self._divisors, 2, 4}):
            if parts <= count:
                yield from self._divide(
                    run, name, [list(part) for part in split_rows(count, parts)]
                )
                yield from self._divide(
                    run, name, [[*range(k, count, parts)] for k in range(parts)]
                )
        if self.rank_rows:
            yield from self._divide(run, name, [list(part) for part in self.rank_rows])

    def split_by_tokens(self, name: str, condition: str) -> Iterator[PartGradients]:
        """Yield a tensor's gradients for each division of the labels along the sequence.

        Divisions are those of context parallelism: blocks, pairs of a first and a last half-size
        block, and strides; each for labels as they are, and shifted by one. Needs exactly one input
        of labels.
        """
        run = self._condition(condition)
        labelled = [(label, run.batches[0][label.input_name]) for label in self.labels]
        if len(labelled) != 1 or labelled[0][1].dim() < 2:
            return
        label, values = labelled[0]
        count = values.shape[1]
        for parts in self._divisors:
            blocks, pairs = split_rows(count, parts), split_rows(count, 2 * parts)
            splits = [
                [list(block) for block in blocks],
                [[*pairs[k], *pairs[-1 - k]] for k in range(parts)],
                [[*range(k, count, parts)] for k in range(parts)],
            ]
            for split in splits if count >= 2 * parts else ():
                for shift in (0, 1):
                    positions = [[(index + shift) % count for index in part] for part in split]
                    yield from self._divide(run, name, positions, label)

    def split_into_rows(self, name: str, condition: str) -> Iterator[PartGradients]:
        """Yield a tensor's gradients for each single row, if the batch has few rows."""
        run = self._condition(condition)
        count = count_rows(run.batches[0])
        if count <= MOST_ROWS:
            for cut in self._divide(run, name, [[row] for row in range(count)]):
                yield replace(cut, unit=ROWS)

    def label_counts(self, condition: str) -> dict[str, int]:
        """Return the number of labels that count, by description: as they are, and shifted by one.

        Numbers up to `LEAST_LABELS` are left out, because they may equal another number by chance.
        """
        totals = dict.fromkeys(sum(counts) for counts in self.label_counts_by_part(condition))
        texts = ("labels", "labels but the first of each row")
        return {text: n for text, n in zip(texts, totals, strict=False) if n > LEAST_LABELS}

    def label_counts_by_part(self, condition: str) -> list[list[int]]:
        """Return the numbers of labels that count in each part of the rows, for each division.

        Divisions are blocks, strides, and the ranks' own; labels as they are, and shifted by one.
        """
        batch, counts = self._condition(condition).batches[0], list[list[int]]()
        count = count_rows(batch)
        splits = [list(self.rank_rows)] if self.rank_rows else []
        for n in (n for n in self._divisors if n <= count):
            splits += [[*split_rows(count, n)], [range(k, count, n) for k in range(n)]]
        for label in self.labels:
            ids = batch[label.input_name]
            for shifted in (ids, ids[:, 1:]) if ids.dim() > 1 and len(ids) == count else ():
                counted = (shifted != label.ignore_index).reshape(count, -1).sum(1)
                counts += [[int(counted[[*part]].sum()) for part in split] for split in splits]
        return counts

    @property
    def _divisors(self) -> list[int]:
        world = self.trial.world
        return [n for n in range(2, world + 1) if world % n == 0]

    def _condition(self, name: str) -> Condition:
        return next(condition for condition in self.trial.conditions if condition.name == name)

    def _divide(
        self, run: Condition, name: str, parts: list[list[int]], label: LabelInput | None = None
    ) -> Iterator[PartGradients]:
        """Yield one division, if all parts are accepted and have a finite gradient."""
        key = run.name, label, *map(tuple, parts)
        if key not in self._cache:
            self._cache[key] = self._gradients(run.batches[0], parts, label)
        gradients = [of_part.get(name) for of_part in self._cache[key]]
        finite = [g for g in gradients if g is not None and bool(g.isfinite().all())]
        if gradients and len(finite) == len(gradients):
            yield PartGradients(finite, "the batch" if label is None else "the words")

    def _gradients(
        self, batch: Batch, parts: list[list[int]], label: LabelInput | None
    ) -> Sequence[GradientsByName]:
        """Run the original on each part; nothing if it rejects one of them."""
        count, gradients = count_rows(batch), list[GradientsByName]()
        for places in parts:
            part = select_labels(batch, places, label) if label else select_rows(batch, places)
            rows = range(count) if label else places
            case, drops = self.trial.case, self.trial.drops
            original = SeededSequential(copy_original(case), loss=case.loss, follow=False)
            with enter_modes(Float64(), DropoutByMasks(drops.seed, drops.off, tuple(rows))):
                try:
                    original.forward_backward(part, rows)
                except _REJECTIONS:
                    return []
            gradients.append(dict(original.gradients()))
        return gradients


# errors of models and losses for rejected sizes or rows, or if nothing is trained
_REJECTIONS = (Refusal, RuntimeError, ValueError, IndexError, ZeroDivisionError, AssertionError)


def select_rows(batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
    """Select rows of a batch."""
    count = count_rows(batch)
    return {
        name: value[list(rows)]
        if isinstance(value, Tensor) and value.dim() and len(value) == count
        else value
        for name, value in batch.items()
    }


def select_labels(batch: Batch, positions: Sequence[int], label: LabelInput) -> dict[str, Any]:
    """Return a batch in which only some positions have labels that count."""
    labels = batch[label.input_name]
    selected = torch.zeros(labels.shape[1], dtype=torch.bool)
    selected[list(positions)] = True
    hidden = ~selected.reshape(-1, *[1] * (labels.dim() - 2))
    return {**batch, label.input_name: labels.masked_fill(hidden, label.ignore_index)}
