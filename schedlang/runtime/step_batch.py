"""The batch of one step: split over ranks, and compared among ranks before the step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal, facts_of_unknown, find_closest
from schedlang.ir import pytree
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.batch import (
    Batch,
    BatchPart,
    check_batch,
    named_tensors,
    row_count,
    split_batch,
)
from schedlang.runtime.batch_weights import (
    Number,
    are_on_host,
    as_numbers,
    filled_like,
    if_positive,
    sum_numbers,
)
from schedlang.runtime.comm import world
from schedlang.runtime.comm.agreement import AgreementItem, checksum, describe_differences
from schedlang.runtime.comm.collectives import all_gather
from schedlang.runtime.device import has_float64
from schedlang.runtime.label_means import LabelMeans

# ---- Split the batch of a step over ranks: this rank's microbatches, and the weights of all parts.


@dataclass(frozen=True)
class SplitBatch:
    """This rank's microbatches and their weights, and the weights of all ranks.

    weights_of_ranks  for each replica, the weight of each of its microbatches
    same_shapes       returns whether the parts of all ranks have the same shapes
    """

    parts: Sequence[BatchPart]
    weights: Sequence[Number]
    weights_of_ranks: Sequence[Sequence[Number]]
    same_shapes: Callable[[], bool]
    index: int = 0  # of this rank among the replicas
    # where several means count labels of their own: for each replica, the counts of each microbatch
    counts_of_ranks: Sequence[Sequence[Sequence[Number]]] = ()

    @cached_property
    def weight_sum(self) -> Number:
        """The sum of the weights of all parts."""
        return sum_numbers([weight for weights in self.weights_of_ranks for weight in weights])

    @property
    def total(self) -> Number:
        """The weight of the full batch; if all weights are zero, every part weighs 1."""
        return if_positive(self.weight_sum, float(sum(map(len, self.weights_of_ranks))))


def split_step_batch(a: Assembly, batch: Batch, local: bool, whole: bool = False) -> SplitBatch:
    """Return this rank's part of a batch: of the full batch, or (`local`) of its own rows.

    `whole`: all ranks of a sequence get all its tokens. Raises Refusal S618 if `local` is neither
    True nor False (a string of a configuration, say).
    """
    if not isinstance(local, bool):
        raise Refusal.of(
            "S618",
            f"`local` is {local!r}",
            helps=("give True where each rank has rows of its own, else False",),
        )
    split = _split_local_rows(a, batch) if local else _split_full_batch(a, batch, whole)
    if split.counts_of_ranks:
        split = _scale_means(a, split)
    # if all weights are zero: the model's own loss (NaN, or 0) in every layout
    weight = split.weight_sum
    if not isinstance(weight, Tensor) and weight > 0:
        return split
    return replace(split, weights=[if_positive(w, 1.0, weight) for w in split.weights])


def check_batch_names(batch: Batch, known: frozenset[str]) -> None:
    """Refuse names that were not in the batch of `build`: weights of parts may need them."""
    if type(batch) is dict and known.issuperset(batch):
        return
    check_batch(batch)
    unknown = [name for name in batch if name not in known]
    if unknown and known:
        closest = find_closest(unknown[0], [name for name in known if name not in batch])
        raise Refusal.of(
            "S619",
            f"the key `{unknown[0]}` of the batch was not in the batch of `build`",
            notes=(f"the program was built from a batch of {', '.join(sorted(known))}",),
            helps=(
                *((f"did you mean `{closest}`?",) if closest else ()),
                "build with a batch that has all keys of training: `sch.build(batch=batch)`",
            ),
            facts=facts_of_unknown(unknown[0], (closest,) if closest else ()),
        )


def _split_full_batch(a: Assembly, batch: Batch, whole: bool) -> SplitBatch:
    shares, replicas, index = a.batch_parts
    single = replicas * a.microbatches == 1 and a.tokens is None and pytree.is_flat(batch)
    if single and (count := row_count(batch)):  # one part: its weight cancels
        return SplitBatch([BatchPart({**batch}, tuple(range(count)))], [1.0], [[1.0]], _always)
    all_weights: list[list[Number]]
    cached, copies = a.split_batches, 1 if a.tokens is None else a.tokens.ranks

    def with_tokens(parts: list[BatchPart]) -> list[list[BatchPart]]:
        return [parts] * copies if whole else a.split_tokens(parts)

    if cached is not None and (key := (id(batch), replicas, whole)) in cached:
        _, by_rows, all_weights, even, counts = cached[key]
        parts = with_tokens(by_rows[index // copies])[index % copies]  # with this rank's exchange
        return SplitBatch(parts, all_weights[index], all_weights, even, index, counts)
    by_rows = split_batch(batch, shares, a.microbatches)
    all_parts = [parts for share in by_rows for parts in with_tokens(share)]
    if replicas * a.microbatches == 1 or (cached is None and a.needs_no_weights):
        all_weights = [[1.0] * len(parts) for parts in all_parts]
    else:
        weights = iter(a.part_weights([part for parts in all_parts for part in parts]))
        all_weights = [[next(weights) for _ in parts] for parts in all_parts]
    counts = [a.label_counts(parts) for parts in all_parts] if a.weighs_means else ()
    even = cache(lambda: len({_shapes(parts) for parts in all_parts}) == 1)
    if cached is not None:  # with the batch, so that no other object gets its id
        cached[id(batch), replicas, whole] = batch, by_rows, all_weights, even, counts
    return SplitBatch(all_parts[index], all_weights[index], all_weights, even, index, counts)


def _always() -> bool:
    return True


def _split_local_rows(a: Assembly, batch: Batch) -> SplitBatch:
    mesh = a.ranks.mesh
    (rows,) = split_batch(batch, 1, a.microbatches)
    local_parts = a.split_tokens(rows)[mesh.index(a.ranks.rank, a.context)]
    weights = a.part_weights(local_parts)
    group = a.ranks.group(a.replicas)
    if group.pg is None:
        counts = [a.label_counts(local_parts)] if a.weighs_means else ()
        return SplitBatch(local_parts, weights, [weights], lambda: True, 0, counts)
    if a.weighs_means:  # counts of labels follow the weights
        counts_here = (count for counts in a.label_counts(local_parts) for count in counts)
        weights = as_numbers([*weights, *counts_here], a.ranks.device)
    on_host = a.ranks.host_group(a.replicas)
    assert on_host is not None
    # weights on the device are gathered there; the host gathers whether there are any, and rows
    own_known = are_on_host(weights)
    host_weights = weights if own_known else [0.0] * len(weights)
    shapes = crc32(repr(_shapes(local_parts)).encode())
    gathered = world.all_gather_numbers(
        [*map(float, host_weights), not own_known, shapes, row_count(batch)], on_host
    )
    all_weights: Sequence[Sequence[Number]] = [row[:-3] for row in gathered]
    if any(on_device for *_, on_device, _, _ in gathered):
        all_weights = _gather_on_device(a, weights)
        weights = list(all_weights[group.rank])
    # samples are numbered across all ranks; ranks of one sequence have the same samples
    offset = sum(
        int(count)
        for rank, (*_, count) in zip(group.ranks, gathered)
        if mesh.index(rank, a.row_axes) < mesh.index(a.ranks.rank, a.row_axes)
        and not any(mesh.coordinates(rank)[axis] for axis in a.context)
    )
    shifted = [replace(part, rows=tuple(offset + row for row in part.rows)) for part in local_parts]
    split = SplitBatch(
        shifted, weights, all_weights, lambda: len({shape for *_, shape, _ in gathered}) == 1
    )
    return _take_counts(split, group.rank) if a.weighs_means else split


def _take_counts(split: SplitBatch, index: int) -> SplitBatch:
    """Return a split whose numbers are weights and, behind them, counts of labels."""
    size = len(split.parts)
    each = len(split.weights) // size - 1  # counts of a part
    weights = [row[:size] for row in split.weights_of_ranks]
    counts = [
        [row[start : start + each] for start in range(size, len(row), each)]
        for row in split.weights_of_ranks
    ]
    return replace(
        split,
        weights=split.weights[:size],
        weights_of_ranks=weights,
        index=index,
        counts_of_ranks=counts,
    )


def _scale_means(a: Assembly, split: SplitBatch) -> SplitBatch:
    """Return the split with parts whose losses weigh each of several means by its labels."""
    assert isinstance(a.weight, LabelMeans)
    counts = split.counts_of_ranks
    per_part = [part for parts in counts for part in parts]
    sums = [sum_numbers(column) for column in zip(*per_part)]
    weights, total = split.weights_of_ranks[split.index], split.total
    scaled = a.weight.scale_parts(split.parts, weights, counts[split.index], total, sums)
    return replace(split, parts=scaled)


def _shapes(parts: Sequence[BatchPart]) -> tuple[object, ...]:
    """Return the names, dtypes and shapes of all tensors of a rank."""
    return tuple(
        (name, value.dtype, *value.shape)
        for part in parts
        for name, value in named_tensors(part.inputs).items()
    )


def _gather_on_device(a: Assembly, weights: Sequence[Number]) -> list[list[Tensor]]:
    """Gather the weights of each rank's parts, from device to device."""
    device = a.ranks.device
    dtype = torch.float64 if has_float64(device) else torch.float32
    like = torch.empty((), dtype=dtype, device=device)
    local = torch.stack([filled_like(like, weight) for weight in weights])
    gathered = all_gather(local, 0, a.ranks.group(a.replicas))
    return [list(row.unbind()) for row in gathered.view(-1, len(weights))]


# ---- Compare the batch of a step and the optimizer's settings among ranks, before the step runs.


_HELPS = (
    "pass the same full batch on every rank: use the same seed for samplers and shuffling",
    "or, if each rank has its own rows, write `train_step(batch, local=True)`",
)


@dataclass(frozen=True)
class BatchComparison:
    """Raises the same Refusal (S652) on all ranks if their steps would differ.

    settings  returns the optimizer's settings, which a scheduler may have changed
    every     whether all steps are compared, or only the first step and the first evaluation:
              samplers with a seed per rank already differ there
    """

    settings: Callable[[], list[AgreementItem]]
    every: bool
    # whether evaluations (True) or steps (False) have been compared
    _done: set[bool] = field(default_factory=set)

    def check(self, a: Assembly, batch: Batch, local: bool, step: int | None) -> None:
        """Compare digests in one small collective; under `local`, among ranks of the same rows.

        step  None: an evaluation
        """
        if not self.every:
            if (step is None) in self._done:
                return
            self._done.add(step is None)
            if not local and _same_for_all(a, batch):
                return
        kinds = AgreementItem(
            "batch", {name: _kind(value) for name, value in batch.items()}, helps=_HELPS
        )
        values = AgreementItem(
            "batch",
            {name: _value(value) for name, value in batch.items()},
            readable=False,
            helps=_HELPS,
        )
        (settings,) = self.settings()
        shapes = {} if local else {name: _shape(value) for name, value in batch.items()}
        rows = a.ranks.mesh.index(a.ranks.rank, a.replicas) if local else 0
        parts = [dict(kinds.parts), shapes, dict(values.parts), dict(settings.parts)]
        gathered = world.all_gather_object((rows, parts))
        items = (kinds, AgreementItem("batch", shapes, helps=_HELPS), values, settings)
        for index, item in enumerate(items):
            for ranks in _rank_groups(gathered, apart=item is values):
                _check(item, {rank: gathered[rank][1][index] for rank in ranks}, step)


def _same_for_all(a: Assembly, batch: Batch) -> bool:
    """Return, equal on all ranks, whether all ranks have the same batch.

    If a number equals the mean over ranks, and its square the mean of squares, it is equal on all
    ranks; for 20 bits the sums are exact.
    """
    local_sum = crc32(repr([(name, _value(value)) for name, value in batch.items()]).encode()) >> 12
    sums = torch.tensor([local_sum, local_sum**2], dtype=torch.float64, device=a.ranks.device)
    world.all_reduce(sums, a.ranks.world.group)
    return sums.tolist() == [a.ranks.mesh.world * local_sum, a.ranks.mesh.world * local_sum**2]


def _rank_groups(gathered: list[tuple[int, Any]], apart: bool) -> list[list[int]]:
    """Return groups of ranks to compare: all ranks, or those with the same rows."""
    rows: dict[int, list[int]] = {}
    for rank, (row_index, _) in enumerate(gathered):
        rows.setdefault(row_index if apart else 0, []).append(rank)
    return list(rows.values())


def _check(item: AgreementItem, values: Mapping[int, Mapping[str, str]], step: int | None) -> None:
    message, notes = describe_differences(item, values)
    if notes:
        when = "an evaluation" if step is None else f"step {step}"
        raise Refusal.of("S652", f"{message} in {when}", notes=tuple(notes), helps=item.helps)


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} in {value.dim()} dims"


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else ""


def _value(value: object) -> str:
    if isinstance(value, Tensor):
        return checksum(value)
    return repr(value) if isinstance(value, bool | int | float | str) else ""
