"""`Assembly`: all that a program runs with on one rank, as `build` puts it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.annotations import Boundary
from schedlang.ir.model import AdapterChange
from schedlang.ir.placement import Layout
from schedlang.runtime.batch import Batch, BatchPart, RowShares, named_arguments
from schedlang.runtime.batch_weights import Number, as_numbers
from schedlang.runtime.checkpointing.holdings import Holding, TransferPlans
from schedlang.runtime.comm.collectives import RankGroups
from schedlang.runtime.context_parallel.installation import ExchangeKeys, MetaExchange
from schedlang.runtime.context_parallel.local_tokens import TokenSplit
from schedlang.runtime.grad_reduction.compressed import Compressor
from schedlang.runtime.grad_reduction.gradient import (
    GradientReduction,
    LocalParameters,
    as_local_parameters,
)
from schedlang.runtime.grad_reduction.zero import ShardedStage
from schedlang.runtime.label_means import LabelMeans
from schedlang.runtime.mixed_precision import CastRegion
from schedlang.runtime.pipeline.executor import Pipeline
from schedlang.runtime.pipeline.overlapped_reduction import OverlappedReduction
from schedlang.runtime.replica_buffers import ReplicaBuffers
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.rng.native_dropout import NativeDropout
from schedlang.runtime.scope import Scope

WeightFunction = Callable[[Batch], float]


@dataclass(frozen=True)
class Assembly:
    """All that `build` puts together on one rank, and that a `Program` runs.

    parameters        first name -> this rank's tensor, for the stages of this rank
    reductions        reductions after the last backward, in this order on all ranks
    dropout           how masks are drawn: logically or natively; None: by torch's own generators
    native            how masks would be drawn natively where `dropout` is logical: a proof reads it
    early_reductions  the reductions that begin as soon as a stage has ended; None: there are none
    region            the dtype in which modules compute, and casts that a step keeps; None: no
                      casts
    weight            the weight of a part of the batch in the mean loss
    """

    module: nn.Module
    pipeline: Pipeline
    ranks: RankGroups
    replicas: tuple[str, ...]  # data axes
    microbatches: int
    parameters: Mapping[str, nn.Parameter]
    holdings: Mapping[str, Holding]
    ties: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]  # keys of the original's state_dict, in order
    reductions: tuple[GradientReduction, ...]
    sliced: Mapping[int, ShardedStage]  # stage -> its ZeRO units
    weight: WeightFunction
    # changes that add parameters, and can merge them into others
    adapter_changes: tuple[AdapterChange, ...] = ()
    stage_axis: str | None = None
    last_rank: int = 0  # a rank of the last stage, at coordinate 0 of all other axes
    buffer_stages: Mapping[str, frozenset[int] | None] = field(default_factory=dict)
    # name -> coordinate on the stage axis of the stage whose buffer counts; of stages that are
    # placed twice, the first replica's
    buffer_homes: Mapping[str, int] = field(default_factory=dict)
    built_buffers: frozenset[str] | None = None  # names of all buffers when it was built
    # buffers that a forward has added since -> the stage that counts
    added_homes: dict[str, int] = field(default_factory=dict)
    # such buffers as a load has put them into all ranks -> the tensor and its version
    loaded_buffers: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    # of replicas that have statistics of their own; None: all have the same
    replica_buffers: ReplicaBuffers | None = None
    region: CastRegion | None = None
    early_reductions: OverlappedReduction | None = None
    compressor: Compressor | None = None  # does the remaining reductions, in fewer bytes
    dropout: LogicalDropout | NativeDropout | None = None
    native: NativeDropout | None = None
    logical_dropout_reason: str = ""  # why masks are not drawn natively
    # of a model that draws from Python's or numpy's generators, on several ranks: see `Scope`
    host_draws: Callable[[Scope], AbstractContextManager[None]] | None = None
    outputs_missing: tuple[str, ...] = ()
    # no gradient is sent to the first stages, which are frozen from the start
    backward_ends_early: bool = False
    takes_gradient: bool = False  # whether a forward takes a gradient, also in evaluation
    loss_dtype: torch.dtype = torch.float32  # the same on every rank
    # why the model has no loss to train with; raised by `train_step`
    no_loss: Diagnostic | None = None
    tokens: TokenSplit | None = None  # how sequences are split over ranks, where they are
    # module -> its boundaries
    boundaries: Mapping[str, tuple[Boundary, ...]] = field(default_factory=dict)
    context: tuple[str, ...] = ()  # data axes whose ranks see different tokens of the same rows
    row_weights: RowShares | None = (
        None  # the weights by which rows are dealt to ranks; None: equally
    )
    gathers_rows: bool = False  # whether modules give the rows of the full batch on every rank
    batch_keys: frozenset[str] = frozenset()  # keys of the batch that it was built from
    # routes by which shards have been gathered, cached
    gather_routes: TransferPlans = field(default_factory=dict)
    # batches as they were dealt, shared by dry runs of several ranks
    split_batches: dict[object, Any] | None = None

    def end_broken_step(self) -> None:
        """End what an exception has left undone of the last step or evaluation.

        Not when it is raised: this waits for other ranks, and a rank that fails alone must end.
        """
        for stage in self.sliced.values():
            stage.end_broken_step()
        if self.early_reductions is not None:
            self.early_reductions.end_broken_step()
        self.local_parameters.broken = False

    def enter_evaluation(self, step: int) -> AbstractContextManager[None]:
        """Return the context of an evaluation after a step: with the buffers that are saved."""
        if self.local_parameters.broken:
            self.end_broken_step()
        if self.replica_buffers is None:
            return nullcontext()
        return self.replica_buffers.of_first_replica(self.buffers, step)

    @cached_property
    def primary_parameters(self) -> frozenset[str]:
        """The parameters whose shard this rank counts in the norm, for all ranks that hold it."""
        mesh, rank = self.ranks.mesh, self.ranks.rank
        return frozenset(n for n, h in self.holdings.items() if h.is_primary(mesh, rank))

    @cached_property
    def sliced_parameters(self) -> tuple[str, ...]:
        """The parameters that ZeRO slices over ranks."""
        return tuple(name for name, holding in self.holdings.items() if holding.sliced)

    @property
    def trained(self) -> frozenset[str]:
        """The parameters of this rank that take gradients now: a loop may freeze some."""
        return frozenset(name for name, p in self.parameters.items() if p.requires_grad)

    @cached_property
    def local_parameters(self) -> LocalParameters:
        """This rank's parameters, with values derived from them that do not change."""
        parameters = as_local_parameters(self.parameters)
        # an order with stale weights drops gradients within a step
        if not self.pipeline.timeline.stale:
            parameters.flatten(
                self.reductions if self.early_reductions is None else self.early_reductions.rest
            )
        return parameters

    @cached_property
    def needs_no_weights(self) -> bool:
        """Whether no stage of this rank needs the weights of the parts of a batch.

        The last stage needs them for its losses. Another stage needs them only if its model takes
        the labels, of which perhaps none counts, or if its updates are scaled by weights (stale
        weights).
        """
        stages, rule = self.pipeline.stages.values(), getattr(self.weight, "rule", None)
        if rule is None or self.pipeline.timeline.stale or any(stage.last for stage in stages):
            return False
        accepted = [named_arguments(stage.model) for stage in stages]
        return all(
            names is not None and rule.source.split(".")[0] not in names for names in accepted
        )

    @cached_property
    def row_axes(self) -> tuple[str, ...]:
        """Data axes whose ranks see different rows."""
        return tuple(axis for axis in self.replicas if axis not in self.context)

    @cached_property
    def batch_parts(self) -> tuple[RowShares, int, int]:
        """The shares of rows, the number of parts by rows and tokens, and the index of this rank's
        part.

        All three are constant over steps.
        """
        mesh = self.ranks.mesh
        dealt = self.row_weights or mesh.size(self.row_axes)
        return dealt, mesh.size(self.replicas), self.part_index(self.ranks.rank)

    @cached_property
    def is_primary(self) -> bool:
        """Whether this rank counts the loss; see `is_primary_rank`."""
        return self.is_primary_rank(self.ranks.rank)

    def part_index(self, rank: int) -> int:
        """Return the index of a rank's part of the batch: first by rows, then by tokens of these
        rows."""
        mesh = self.ranks.mesh
        count = mesh.size(self.context)
        return mesh.index(rank, self.row_axes) * count + mesh.index(rank, self.context)

    def split_tokens(self, parts: Sequence[BatchPart]) -> list[list[BatchPart]]:
        """Split microbatches by tokens: for each rank of a sequence, its tokens of the same
        rows."""
        if self.tokens is None:
            return [list(parts)]
        on_meta = any(parameter.is_meta for parameter in self.parameters.values())
        exchange = MetaExchange() if on_meta else ExchangeKeys(self.dropout)
        return [
            [self.tokens.take_part(part, position, exchange) for part in parts]
            for position in range(self.tokens.ranks)
        ]

    def part_weights(self, parts: Sequence[BatchPart]) -> list[Number]:
        """Return the weight of each part of a batch in the mean loss.

        The weights are plain numbers, or tensors on this rank's device if labels are on a device.
        """
        weight = getattr(self.weight, "counted", self.weight)
        weights = [
            weight(p.weight_inputs if p.weight_inputs is not None else p.inputs) for p in parts
        ]
        return as_numbers(weights, self.ranks.device)

    @property
    def weighs_means(self) -> bool:
        """Whether the loss has several means, each of which is weighted by its own labels."""
        return isinstance(self.weight, LabelMeans)

    def label_counts(self, parts: Sequence[BatchPart]) -> list[list[Number]]:
        """Return how many labels of each part each of several means counts."""
        assert isinstance(self.weight, LabelMeans)
        counts = [count for part in parts for count in self.weight.counts(part.inputs)]
        flat, each = as_numbers(counts, self.ranks.device), len(self.weight.rules)
        return [flat[start : start + each] for start in range(0, len(flat), each)]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now: a model may replace the tensor of a buffer."""
        return dict(self.module.named_buffers())

    @property
    def saved_buffers(self) -> dict[str, Tensor]:
        """Buffers of the state dict."""
        return {name: buffer for name, buffer in self.buffers.items() if name in self.keys}

    @property
    def added_buffers(self) -> dict[str, Tensor]:
        """The buffers that forwards on this rank have added since the build, and that are saved."""
        if self.built_buffers is None:
            return {}
        added = {n: buffer for n, buffer in self.buffers.items() if n not in self.built_buffers}
        owners = {name: name.rpartition(".") for name in added}
        return {
            name: added[name]
            for name, (owner, _, local_name) in owners.items()
            if local_name not in self.module.get_submodule(owner)._non_persistent_buffers_set
        }

    def is_as_loaded(self, name: str, buffer: Tensor) -> bool:
        """Return whether an added buffer is as a load has put it here: its stage may be another."""
        loaded, version = self.loaded_buffers.get(name, (None, 0))
        return buffer is loaded and buffer._version == version

    def buffer_holding(self, name: str, shape: Sequence[int]) -> Holding:
        """Return the holding of a buffer: where the value that counts is; every rank has a copy."""
        stage = self.buffer_homes.get(name, self.added_homes.get(name))
        stages = None if stage is None else frozenset([stage])
        return Holding(name, Layout.whole(shape), (), self.stage_axis, stages)

    def is_primary_rank(self, rank: int) -> bool:
        """Return whether a rank is the first of the ranks that see the same rows in the same
        stage."""
        mesh = self.ranks.mesh
        axes = (*self.replicas, *((self.stage_axis,) if self.stage_axis is not None else ()))
        free = {mesh_axis for axis in axes for mesh_axis in mesh.fold(axis)}
        return all(index == 0 for axis, index in mesh.coordinates(rank).items() if axis not in free)
