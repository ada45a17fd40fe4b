"""`Assembly`: all that a program runs with on one rank, as `build` puts it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.annotations import Boundary
from schedlang.ir.model import Adapting
from schedlang.ir.placement import Layout
from schedlang.runtime.batch import Batch, Part, Shares, named_arguments
from schedlang.runtime.checkpointing.holding import Holding, Ways
from schedlang.runtime.comm.collectives import Ranks
from schedlang.runtime.context_parallel.install import ExchangeKeys, WithoutValues
from schedlang.runtime.context_parallel.local_tokens import Tokens
from schedlang.runtime.grad_reduction.compressed import Compressor
from schedlang.runtime.grad_reduction.gradient import LocalParameters, Sum, held_of
from schedlang.runtime.grad_reduction.zero import Sliced
from schedlang.runtime.mixed_precision import Region
from schedlang.runtime.pipeline.executor import Pipeline
from schedlang.runtime.pipeline.overlapped_sums import EarlySums
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.rng.native import NativeDropout
from schedlang.runtime.weights import Number, counted

Weight = Callable[[Batch], float]


@dataclass(frozen=True)
class Assembly:
    """All that `build` puts together on one rank, and that a `Program` runs.

    parameters  first name -> this rank's tensor, for the stages of this rank
    sums        reductions after the last backward, in this order on all ranks
    dropout     how masks are drawn: logically or natively; None: by torch's own generators
    native      how masks would be drawn natively where `dropout` is logical: a proof reads it
    early       the reductions that begin as soon as a stage has ended; None: there are none
    region      the dtype in which modules compute, and casts that a step keeps; None: no casts
    weight      the weight of a part of the batch in the mean loss
    """

    module: nn.Module
    pipeline: Pipeline
    ranks: Ranks
    replicas: tuple[str, ...]  # data axes
    micro: int
    parameters: Mapping[str, nn.Parameter]
    holdings: Mapping[str, Holding]
    ties: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]  # keys of the original's state_dict, in order
    sums: tuple[Sum, ...]
    sliced: Mapping[int, Sliced]  # stage -> its ZeRO units
    weight: Weight
    merges: tuple[Adapting, ...] = ()  # changes that add parameters, and can merge them into others
    stage_axis: str | None = None
    last_rank: int = 0  # a rank of the last stage, at coordinate 0 of all other axes
    buffer_stages: Mapping[str, frozenset[int] | None] = field(default_factory=dict)
    # name -> coordinate on the stage axis of the stage whose buffer counts; of stages that are
    # placed twice, the first replica's
    buffer_homes: Mapping[str, int] = field(default_factory=dict)
    region: Region | None = None
    early: EarlySums | None = None
    compressor: Compressor | None = None  # does the remaining reductions, in fewer bytes
    dropout: LogicalDropout | NativeDropout | None = None
    native: NativeDropout | None = None
    drawn_because: str = ""  # why masks are not drawn natively
    outputs_missing: tuple[str, ...] = ()
    # no gradient is sent to the first stages, which are frozen from the start
    ends_early: bool = False
    loss_dtype: torch.dtype = torch.float32  # the same on every rank
    # why the model has no loss to train with; raised by `train_step`
    lossless: Diagnostic | None = None
    tokens: Tokens | None = None  # how sequences are split over ranks, where they are
    # module -> its boundaries
    boundaries: Mapping[str, tuple[Boundary, ...]] = field(default_factory=dict)
    context: tuple[str, ...] = ()  # data axes whose ranks see different tokens of the same rows
    dealt: Shares | None = None  # the weights by which rows are dealt to ranks; None: equally
    inputs: frozenset[str] = frozenset()  # keys of the batch that it was built from
    ways: Ways = field(default_factory=dict)  # routes by which shards have been gathered, cached
    # batches as they were dealt, shared by dry runs of several ranks
    dealings: dict[object, Any] | None = None

    @cached_property
    def primary_parameters(self) -> frozenset[str]:
        """The parameters whose shard this rank counts in the norm, for all ranks that hold it."""
        mesh, rank = self.ranks.mesh, self.ranks.rank
        return frozenset(n for n, one in self.holdings.items() if one.primary(mesh, rank))

    @cached_property
    def cut(self) -> tuple[str, ...]:
        """The parameters that ZeRO slices over ranks."""
        return tuple(name for name, holding in self.holdings.items() if holding.sliced)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters of this rank that take gradients."""
        return frozenset(name for name, one in self.parameters.items() if one.requires_grad)

    @cached_property
    def held(self) -> LocalParameters:
        """This rank's parameters, with values derived from them that do not change."""
        held = held_of(self.parameters)
        # an order with stale weights drops gradients within a step
        if not self.pipeline.timeline.stale:
            held.flatten(self.sums if self.early is None else self.early.rest)
        return held

    @cached_property
    def unweighed(self) -> bool:
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
    def parts(self) -> tuple[Shares, int, int]:
        """The shares of rows, the number of parts by rows and tokens, and the index of this rank's
        part.

        All three are constant over steps.
        """
        mesh = self.ranks.mesh
        dealt = self.dealt or mesh.size(self.row_axes)
        return dealt, mesh.size(self.replicas), self.place(self.ranks.rank)

    @cached_property
    def is_primary(self) -> bool:
        """Whether this rank counts the loss; see `primary`."""
        return self.primary(self.ranks.rank)

    def place(self, rank: int) -> int:
        """Return the index of a rank's part of the batch: first by rows, then by tokens of these
        rows."""
        mesh = self.ranks.mesh
        count = mesh.size(self.context)
        return mesh.index(rank, self.row_axes) * count + mesh.index(rank, self.context)

    def by_tokens(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Split microbatches by tokens: for each rank of a sequence, its tokens of the same
        rows."""
        if self.tokens is None:
            return [list(parts)]
        played = any(one.is_meta for one in self.parameters.values())
        meet = WithoutValues() if played else ExchangeKeys(self.dropout)
        return [
            [self.tokens.part(part, place, meet) for part in parts]
            for place in range(self.tokens.ranks)
        ]

    def weigh_all(self, parts: Sequence[Part]) -> list[Number]:
        """Return the weight of each part of a batch in the mean loss.

        The weights are plain numbers, or tensors on this rank's device if labels are on a device.
        """
        weight = getattr(self.weight, "counted", self.weight)
        weights = [weight(p.weighed if p.weighed is not None else p.inputs) for p in parts]
        return counted(weights, self.ranks.device)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now: a model may replace the tensor of a buffer."""
        return dict(self.module.named_buffers())

    @property
    def saved_buffers(self) -> dict[str, Tensor]:
        """Buffers of the state dict."""
        return {name: buffer for name, buffer in self.buffers.items() if name in self.keys}

    def buffer_holding(self, name: str, shape: Sequence[int]) -> Holding:
        """Return the holding of a buffer: where the value that counts is; every rank has a copy."""
        home = self.buffer_homes.get(name)
        stages = None if home is None else frozenset([home])
        return Holding(name, Layout.whole(shape), (), self.stage_axis, stages)

    def primary(self, rank: int) -> bool:
        """Return whether a rank is the first of the ranks that see the same rows in the same
        stage."""
        mesh = self.ranks.mesh
        axes = (*self.replicas, *((self.stage_axis,) if self.stage_axis is not None else ()))
        free = {plain for axis in axes for plain in mesh.fold(axis)}
        return all(at == 0 for axis, at in mesh.coordinates(rank).items() if axis not in free)
