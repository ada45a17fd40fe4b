"""Variants of the user's batches, for what these do not show: padding, empty rows, odd counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.passes.verify.observe import Batch

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = "input_ids"  # the names that batches of text have everywhere
MASK = "attention_mask"
POSITIONS = "position_ids"
TEXT = frozenset({TOKENS, MASK, "labels", "token_type_ids", POSITIONS})


Change = Callable[["Batches", Batch], "Batch | None"]


@dataclass(frozen=True)
class Labels:
    """An input that holds labels, as the model's own loss was seen to read it."""

    source: str
    ignored: int  # the label that does not count


@dataclass(frozen=True)
class Batches:
    """What can be seen of all batches of a proof; `cut` are the row numbers of the parts."""

    all: Sequence[Batch]
    cut: Callable[[int], Sequence[range]]
    labels: Sequence[Labels] = ()

    def rows(self, batch: Batch) -> int:
        """How many samples a batch has."""
        from schedlang.passes.verify.original import rows

        return rows(batch)

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut."""
        return len(self.cut(max(self.rows(batch) for batch in self.all)))

    @property
    def ragged(self) -> bool:
        """Whether some batch has parts of different sizes."""
        return any(self.rows(batch) % self.parts for batch in self.all)

    @property
    def even(self) -> bool:
        """Whether some batch has parts of one size."""
        return any(self.rows(batch) % self.parts == 0 for batch in self.all)

    @property
    def shapes(self) -> int:
        """How many different sets of shapes there are."""
        return len({tuple(sorted(shapes(batch).items())) for batch in self.all})

    @property
    def uneven(self) -> bool:
        """Whether some rows have fewer labels that count than others."""
        return any(
            bool((counts != counts[0]).any())
            for batch in self.all
            for _, counts in self._counts(batch)
        )

    @property
    def empty(self) -> bool:
        """Whether in every part of some batch a row has no label that counts, and a part none."""
        for batch in self.all:
            for one, counts in self._counts(batch):
                parts = [counts[list(run)] for run in self.cut(len(batch[one.source]))]
                alone = len(parts) == 1 or any(not bool(p.any()) for p in parts)
                if alone and all(bool((p == 0).any()) for p in parts if len(p) > 1):
                    return True
        return False

    @property
    def padded(self) -> bool:
        """Whether some mask hides something."""
        masks = [v for b in self.all for k, v in integers(b).items() if "mask" in k]
        return any(bool((mask == 0).any()) for mask in masks)

    @property
    def classes(self) -> bool:
        """Whether some row has tokens of the lower half of the vocabulary only, some row others."""
        tokens = [b[TOKENS] for b in self.all if TOKENS in integers(b) and b[TOKENS].dim() > 1]
        if not tokens:
            return True
        half = (int(max(t.max() for t in tokens)) + 1) / 2
        low = [bool((t < half).all(1).any()) for t in tokens]
        return any(low)

    def _counts(self, batch: Batch) -> list[tuple[Labels, Tensor]]:
        """Per row the number of labels that count; all integers, where no labels are known."""
        known = list(self.labels) or [Labels(name, -100) for name in integers(batch)]
        found = [(one, batch[one.source]) for one in known if one.source in integers(batch)]
        return [
            (one, (value != one.ignored).reshape(len(value), -1).sum(1))
            for one, value in found
            if value.dim()
        ]


def shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    """The shapes of a batch's tensors."""
    from torch import Tensor

    return {k: tuple(v.shape) for k, v in batch.items() if isinstance(v, Tensor)}


def integers(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a batch that are not floats."""
    from torch import Tensor

    return {k: v for k, v in batch.items() if isinstance(v, Tensor) and not v.is_floating_point()}


def varied(seen: Batches) -> tuple[list[Batch], dict[int, list[str]]]:
    """As many batches, changed where all of them together hide something; by place, what changed.

    A batch is changed only in ways that mean the same for every model: labels that do not count,
    masked positions, fewer rows, other tokens of a text.
    """
    made = list(seen.all)
    said: dict[int, list[str]] = {}
    for place, words, there, change in _CHANGES:
        place %= len(made)
        if there(replace(seen, all=[*seen.all, *made])):
            continue
        found = change(seen, made[place])
        if found is not None:
            made[place] = found
            said.setdefault(place, []).append(words)
    return made, said


def _padded(seen: Batches, batch: Batch) -> Batch | None:
    """The ends of rows do not count, more of them in later rows; a mask hides them too."""
    out = dict(batch)
    for one in seen.labels:
        value = batch.get(one.source)
        if value is not None and value.dim() == 2 and value.shape[1] > 2:
            out[one.source] = value.masked_fill(_tail(value), one.ignored)
    mask = batch.get(MASK)
    if mask is not None and mask.dim() == 2 and bool((mask != 0).all()) and mask.shape[1] > 2:
        out[MASK] = mask.masked_fill(_tail(mask), 0)
    return out if any(out[k] is not batch[k] for k in out) else None


def _tail(value: Tensor) -> Tensor:
    """Of row k the last k % 3 positions; of a single row the last."""
    import torch

    rows, length = value.shape
    drop = torch.arange(rows) % 3 if rows > 1 else torch.ones(1, dtype=torch.long)
    return (torch.arange(length) >= length - drop.clamp(max=length - 2)[:, None]).to(value.device)


def _emptied(seen: Batches, batch: Batch) -> Batch | None:
    """The first row of each part counts for nothing, and neither does the last part at all."""
    out = dict(batch)
    for one in seen.labels:
        value = batch.get(one.source)
        if value is None or not value.dim() or value.is_floating_point():
            continue
        parts = seen.cut(len(value))
        empty = [run[0] for run in parts if len(run) > 1]
        empty += list(parts[-1]) if len(parts) > 1 else []
        left = [row for row in range(len(value)) if row not in empty]
        if empty and left and bool((value[left] != one.ignored).any()):
            value = value.clone()
            value[empty] = one.ignored
            out[one.source] = value
    return out if any(out[k] is not batch[k] for k in out) else None


def _halved(seen: Batches, batch: Batch) -> Batch | None:
    """In every part one row has tokens of the lower half of the vocabulary only."""
    tokens = batch.get(TOKENS)
    if tokens is None or not TEXT.issuperset(batch) or tokens.dim() != 2:
        return None
    rows = [run[-1] for run in seen.cut(len(tokens))]
    tokens = tokens.clone()
    tokens[rows] = tokens[rows] // 2
    return {**batch, TOKENS: tokens}


def _shortened(seen: Batches, batch: Batch) -> Batch | None:
    """One row less."""
    return _first(seen, batch, seen.rows(batch) - 1)


def _trimmed(seen: Batches, batch: Batch) -> Batch | None:
    """As many rows as make equal parts."""
    return _first(seen, batch, seen.rows(batch) // seen.parts * seen.parts)


def _first(seen: Batches, batch: Batch, rows: int) -> Batch | None:
    from schedlang.runtime.batch import cut

    if rows < seen.parts or rows == seen.rows(batch):
        return None
    return cut(batch, range(rows), seen.rows(batch))


# at which batch, what it is called, whether it is there already, and how it is made
_CHANGES: tuple[tuple[int, str, Callable[[Batches], bool], Change], ...] = (
    (0, "ignored labels and padding", lambda seen: seen.uneven and seen.padded, _padded),
    (1, "rows and a part without labels", lambda seen: seen.empty, _emptied),
    (1, "rows of half the vocabulary", lambda seen: seen.classes, _halved),
    (2, "a smaller last part", lambda seen: seen.ragged or seen.parts == 1, _shortened),
    (2, "equal parts", lambda seen: seen.even, _trimmed),
    (2, "another number of rows", lambda seen: seen.shapes > 1, _shortened),
)
