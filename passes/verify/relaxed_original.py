"""The original under the rules that a schedule relaxes, in a plain loop in one process.

  relax(batch_stats)  trained by parts: each part has its own statistics
  relax(lossy)        gradients of data-parallel parts are encoded before they are summed
  relax(staleness)    each microbatch uses the weight versions that a table names
  relax(dtype)        torch.autocast around modules, cast parameters, a scaled loss

Only the codecs and the table of versions are shared with the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils.stateless import _reparametrize_module

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.annotations import Cast, Codec
from schedlang.ir.plan import Plan
from schedlang.ir.pytree import tree_leaves, tree_map
from schedlang.passes.analyze.holdings import compression_axes
from schedlang.passes.analyze.staleness import Versions, VersionTable
from schedlang.passes.partition.staging import Staged, buffer_homes
from schedlang.passes.propagate.casts import root_cast
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.original import Sequential, count_rows, returned_loss
from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime.batch import BatchPart, run_model, stack_outputs
from schedlang.runtime.checkpointing.holdings import Holding, shard_of, write_shard
from schedlang.runtime.grad_reduction.compressed import (
    decode,
    encode,
    fill_zero_columns,
    orthogonalize,
)
from schedlang.runtime.scope import Scope, enter_scope

if TYPE_CHECKING:
    from schedlang.passes.verify.proof_case import Case

# ---- relax(batch_stats): trained by parts.


@dataclass(frozen=True)
class BufferReplicas:
    """Copies of buffers that microbatches use, where stages are placed on ranks in two directions.

    `replica_of_microbatch`   the replica of the stages of each microbatch; empty: one replica for
                              all
    homes  for each replica, the place that stores a buffer; replicas at one place share a copy
    """

    replica_of_microbatch: tuple[int, ...] = ()
    homes: tuple[Mapping[str, int], ...] = field(default_factory=tuple)

    def copy(self, name: str, replica: int) -> int:
        """Return the copy of a buffer that a replica of the stages reads and writes."""
        return self.homes[replica].get(name, 0) if self.homes else 0

    def replica(self, microbatch: int) -> int:
        """Return the replica of the stages that a microbatch goes through."""
        return self.replica_of_microbatch[microbatch] if self.replica_of_microbatch else 0

    def split_by_replica(self, parts: Sequence[BatchPart]) -> list[list[BatchPart]]:
        """Return the microbatches of each replica, in order."""
        found: dict[int, list[BatchPart]] = {}
        for k, part in enumerate(parts):
            found.setdefault(self.replica(k), []).append(part)
        return list(found.values())


def buffer_replicas(staged: Staged) -> BufferReplicas:
    """Read the replica of each microbatch from the timeline."""
    t = staged.timeline
    if staged.axis is None or t.replicas < 2:
        return BufferReplicas()
    forward = t.kind == Kind.F
    through = dict(zip(t.microbatch[forward].tolist(), t.replica[forward].tolist()))
    return BufferReplicas(tuple(through[k] for k in range(t.microbatches)), buffer_homes(staged))


def check_sums(case: Case) -> None:
    """Refuse (S717) parts that share sums, if one process must run them one after the other."""
    known, plan = case.prepared, case.plan
    if known is None or known.traced.statistics is None or plan.shares * plan.micro == 1:
        return
    if not (plan.activation_codings or compression_axes(plan) or case.table is not None):
        return
    raise Refusal.of(
        "S717",
        "a single process cannot reproduce lossy rows if ranks share sums",
        notes=("it computes one part of the batch after another, but this loss needs all of them",),
        helps=(
            'let each part have its own sums: `step "..." relax(batch_stats, lossy) {`',
            "or leave `compress` out, and prove the other rows",
        ),
    )


class ReplicaPart(NamedTuple):
    """One part of a batch: data-parallel replica, microbatch, inputs, and loss weight."""

    replica: int
    microbatch: int
    part: BatchPart
    weight: float


@dataclass(frozen=True)
class _PartRun:
    """The forward of one part: loss, output and inputs."""

    loss: Tensor
    output: Any
    inputs: dict[str, Any]


class SequentialByParts(Sequential):
    """The plain loop over microbatches of each replica; the loss is their weighted sum.

    This is the oracle for statistics over parts. Each part is a separate batch for code that looks
    at the full batch. Each replica has its own buffers and other state that its forward writes,
    like its ranks; so has each direction of stages placed in two directions. Evaluation uses the
    first direction.
    """

    def __init__(
        self,
        *args: Any,
        split: Callable[[Batch], Sequence[Sequence[BatchPart]]],
        weigh: Callable[[Batch], float],
        directions: BufferReplicas | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.split, self.weigh = split, weigh
        self.directions = directions or BufferReplicas()
        # by name, replica and copy
        self._stored_buffers: dict[tuple[str, int, int], Tensor] = {}
        self._initial_buffers: dict[str, Tensor] | None = None
        self._position = (0, 0)

    def forward_backward(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """Return the weighted loss of all parts in training mode; see `gradients()`."""
        self._set_mode()
        self.module.zero_grad(set_to_none=True)
        members = self._split_batch(batch)
        total = _total_weight(members) or 1.0
        return self._join_parts(
            members, [self._run_part(one, one.weight / total) for one in members]
        )

    def _split_batch(self, batch: Batch) -> list[ReplicaPart]:
        """Return all parts of a batch, replica after replica."""
        return [
            ReplicaPart(place, k, part, self.weigh(part.inputs))
            for place, parts in enumerate(self.split(batch))
            for k, part in enumerate(parts)
        ]

    def _run_part(self, one: ReplicaPart, share: float) -> _PartRun:
        """Do forward and backward of one part; a part of weight 0 only updates its statistics."""
        self._enter_replica(one.replica, self.directions.replica(one.microbatch))
        given = self._given(one.part.inputs)
        self._use_weights("forward", one.microbatch)
        with enter_scope(Scope(self._steps, 0, one.part.rows)), self._record_order():
            self.output = run_model(self.module, given)
            loss = self.loss(self.output, given) * self.scale
            self._use_weights("backward", one.microbatch)
            if share:
                (loss * share).backward()  # type: ignore[no-untyped-call]
        return _PartRun(loss.detach(), self.output, self._inputs)

    def _use_weights(self, phase: str, microbatch: int) -> None:
        """Put a microbatch's weights in place; here all microbatches use the current ones."""

    def _join_parts(self, members: Sequence[ReplicaPart], ran: Sequence[_PartRun]) -> Tensor:
        """Join outputs and inputs of all parts into one batch; return the weighted mean loss."""
        self._enter_replica(0)
        self._inputs = join_inputs([one.inputs for one in ran])
        weights = [one.weight for one in members]
        rows = [len(one.part.rows) for one in members]
        self.output = stack_outputs([one.output for one in ran], rows, weights)
        total = sum(weights) or 1.0
        losses = [one.loss * (weight / total) for one, weight in zip(ran, weights) if weight]
        return torch.stack(losses).sum()

    def eval_step(self, batch: Batch) -> Any:
        """Return the output in eval mode, each replica's rows with its own buffers."""
        self._training.evaluate()
        outputs, evaluation, members = [], self._next_evaluation(), self._split_batch(batch)
        for one in members:
            self._enter_replica(one.replica)
            with torch.no_grad(), enter_scope(Scope(self._steps, 0, one.part.rows, evaluation)):
                outputs.append(run_model(self.module, one.part.inputs))
        self._enter_replica(0)
        rows = [len(one.part.rows) for one in members]
        return stack_outputs(outputs, rows, [one.weight for one in members])

    def _enter_replica(self, place: int, direction: int = 0) -> None:
        """Put the buffers of a replica and direction in place, and store the previous ones."""
        own = self._current_buffers()
        if self._initial_buffers is None:
            self._initial_buffers = {name: one.clone() for name, one in own.items()}
        if (place, direction) == self._position:
            return
        before, was = self._position
        copy = self.directions.copy
        for name, one in own.items():
            self._stored_buffers[name, before, copy(name, was)] = one.clone()
        for name, value in self._initial_buffers.items():
            own[name].copy_(self._stored_buffers.get((name, place, copy(name, direction)), value))
        self._position = place, direction

    def _current_buffers(self) -> dict[str, Tensor]:
        """Return buffers, and frozen parameters that the forward writes to."""
        frozen = ((n, p) for n, p in self.module.named_parameters() if not p.requires_grad)
        moved = {n: p.detach() for n, p in frozen if n in self.rewritten}
        return {n: b.detach() for n, b in self.module.named_buffers()} | moved


def _total_weight(members: Sequence[ReplicaPart]) -> float:
    return sum(one.weight for one in members)


def join_inputs(inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the parts' inputs and their gradients; only the gradients are used."""
    out = {}
    for name in inputs[0]:
        grads = [given[name].grad for given in inputs]
        whole = torch.cat([given[name].detach() for given in inputs]).requires_grad_()
        if any(grad is not None for grad in grads):
            there = [torch.zeros_like(g[name]) if x is None else x for g, x in zip(inputs, grads)]
            whole.grad = torch.cat(there)
        out[name] = whole
    return out


# ---- relax(lossy): compressed all-reduce.
# Gradients of each data-parallel part are sharded as on ranks, then encoded, summed and decoded by
# the codec, with one codec state for each shard. Only the codec is shared with the program.


@dataclass
class CodecState:
    """Codec state of one rank's part: its error feedback, and the start of the power iteration."""

    errors: dict[int, Tensor] = field(default_factory=dict)
    q: Tensor | None = None


class SequentialCompressed(SequentialByParts):
    """The loop over the parts of a batch, with encoded gradients."""

    def __init__(
        self, *args: Any, plan: Plan, holdings: Mapping[str, Holding], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        how = plan.compression
        assert how is not None
        self.plan, self.holdings = plan, holdings
        self.codec = how.codec
        self._codec_states: dict[tuple[str, object], CodecState] = {}

    def forward_backward(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """Return the weighted loss of all parts; `gradients()` are sums of encoded ones."""
        self._set_mode()
        members = self._split_batch(batch)
        total = _total_weight(members) or 1.0
        ran: list[_PartRun] = []
        grads: list[dict[str, Tensor | None]] = []  # of each replica
        for _, mine in groupby(members, key=lambda one: one.replica):
            self.module.zero_grad(set_to_none=True)
            ran += [self._run_part(one, one.weight / total) for one in mine]
            grads.append({name: p.grad for name, p in self._parameters})
        with torch.no_grad():
            for name, parameter in self._parameters:
                parameter.grad = self._sum_gradients(name, [one[name] for one in grads])
        return self._join_parts(members, ran)

    def _sum_gradients(self, name: str, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient that every rank has at the end, assembled from what ranks hold."""
        given = next((part for part in parts if part is not None), None)
        if given is None:
            return None
        whole = torch.zeros_like(given)
        by_place = self._sum_by_place([torch.zeros_like(given) if p is None else p for p in parts])
        mesh, holding = self.plan.mesh, self.holdings[name]
        for rank, key in self._distinct_shards(holding):
            local = [shard_of(one, holding, mesh, rank) for one in by_place]
            write_shard(self._encode_and_sum(name, key, local), whole, holding, mesh, rank)
            real = shard_of(torch.ones_like(whole), holding, mesh, rank)
            errors = self._codec_states[name, key].errors
            errors.update({k: left * real.view_as(left) for k, left in errors.items()})
        return whole

    def _sum_by_place(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the exact sum over all other axes, for each place along the compressed axes."""
        mesh, rows = self.plan.mesh, self.plan.row_axes
        axes = compression_axes(self.plan)
        sums: list[Any] = [0.0] * mesh.size(axes)
        ranks = {mesh.index(r, rows): r for r in reversed(range(mesh.world))}
        for place, part in enumerate(parts):
            at = mesh.index(ranks[place], axes)
            sums[at] = sums[at] + part
        return sums

    def _distinct_shards(self, holding: Holding) -> Iterator[tuple[int, object]]:
        """Yield a rank for each different shard of a parameter, and a key of the shard."""
        mesh, known = self.plan.mesh, set()
        for rank in range(mesh.world):
            key = holding.segments(mesh, rank)
            if holding.is_held(mesh, rank) and key not in known:
                known.add(key)
                yield rank, key

    def _encode_and_sum(self, name: str, key: object, parts: Sequence[Tensor]) -> Tensor:
        """Return the encoded sum over all places, as the codec makes it."""
        kept = self._codec_states.setdefault((name, key), CodecState())
        if not self.codec.compresses(parts[0].shape):
            return torch.stack(list(parts)).sum(0)
        own = [part.reshape(part.shape[0], -1) for part in parts]
        own = [part + kept.errors.get(place, 0.0) for place, part in enumerate(own)]
        run = _powersgd_sum if self.codec.kind == "powersgd" else _quantized_sum
        total, left = run(self.codec, name, self._steps, own, kept)
        if self.codec.feedback:
            kept.errors = dict(enumerate(left))
        return total.view_as(parts[0])


def _powersgd_sum(
    codec: Codec, name: str, step: int, own: Sequence[Tensor], kept: CodecState
) -> tuple[Tensor, list[Tensor]]:
    """Return PowerSGD's sum (the exact sum, projected by a power iteration) and the errors."""
    q = own[0].new_zeros(own[0].shape[1], codec.rank) if kept.q is None else kept.q
    total = torch.stack(list(own)).sum(0)
    p = orthogonalize(total @ fill_zero_columns(q, name, step))
    kept.q = total.T @ p
    return p @ kept.q.T, [part - p @ (p.T @ part) for part in own]


def _quantized_sum(
    codec: Codec, name: str, step: int, own: Sequence[Tensor], kept: CodecState
) -> tuple[Tensor, list[Tensor]]:
    """Quantise each part by itself; return the sum of the decoded parts and the errors."""
    read = [
        decode(codec, encode(codec, part, name, step, place), part.numel()).view_as(part)
        for place, part in enumerate(own)
    ]
    return torch.stack(read).sum(0), [part - said for part, said in zip(own, read)]


# ---- relax(staleness): stale weights.
# For each microbatch, each stage's parameters are filled with the version in the table, once for
# the forward and once for the backward. Autograd saves a parameter's own storage, so backward reads
# the later version. An update follows all of its microbatches, on the newest weights.


class SequentialStale(SequentialByParts):
    """The loop over microbatches with a table's weight versions, an update after each group."""

    def __init__(self, *args: Any, table: VersionTable, **options: Any) -> None:
        super().__init__(*args, **options)
        self.table = table
        self._history: list[dict[str, Tensor]] = []  # of this step, by version

    def train_step(self, batch: Batch) -> Tensor:
        """Make all updates of a step; return the weighted mean of the losses."""
        self._set_mode()
        members = self._split_batch(batch)
        self._history = [self._copy_weights()]
        ran: dict[int, _PartRun] = {}
        for made in range(1, max(self.table.produced) + 1):
            mine = [
                n for n, one in enumerate(members) if self.table.produced[one.microbatch] == made
            ]
            total = _total_weight([members[n] for n in mine])
            self.module.zero_grad(set_to_none=True)
            for n in mine:
                ran[n] = self._run_part(members[n], members[n].weight / total if total else 0.0)
            self._update_weights(total)
        self._steps += 1
        return self._join_parts(members, [ran[n] for n in range(len(members))])

    def _use_weights(self, phase: str, microbatch: int) -> None:
        named = self.table.forward if phase == "forward" else self.table.backward
        self._fill(named[microbatch])

    def _update_weights(self, total: float) -> None:
        """Compute the next version from the newest; without loss weight it equals the newest."""
        assert self._optimizer is not None, "this subject was made without an optimizer"
        newest = len(self._history) - 1
        self._fill(dict.fromkeys(self._stages(), newest))
        self._clip()
        if total:
            self._optimizer.step()
        self._history.append(self._copy_weights())

    def _stages(self) -> set[int]:
        return {0, *self.table.stage_of.values()}

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters}

    def _fill(self, versions: Versions) -> None:
        """Write versions of the weights into the parameters, unseen by autograd."""
        for name, parameter in self._parameters:
            version = versions[self.table.stage_of.get(name, 0)]
            parameter.data.copy_(self._history[version][name])


# ---- relax(dtype): casts, with torch's autocast and GradScaler.


def apply_casts(plan: Plan, module: nn.Module, options: dict[str, Any]) -> None:
    """Apply the casts of rows to a copy of the original, and to the loss in its loop's options."""
    for one in plan.casts:
        _apply_cast(module, one, _float32_islands(plan, one))
    root = root_cast(plan)
    if root is not None and not root.params:
        options["loss"] = _autocast(options.get("loss") or returned_loss, root.dtype)


class SequentialScaled(Sequential):
    """The plain loop with torch's GradScaler."""

    def __init__(self, *args: Any, row: Cast, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scaler = GradScaler("cpu", init_scale=row.scale, growth_interval=row.growth)
        self._base = self.scale

    def train_step(self, batch: Batch) -> Tensor:
        """Do forward, loss, backward, unscale, clip and step, unless skipped; return the loss."""
        scaler = self._scaler
        assert self._optimizer is not None, "this subject was made without an optimizer"
        scaler.scale(torch.zeros(()))  # initialises the scale
        times = scaler.get_scale()
        self.scale = self._base * times
        loss = self.forward_backward(batch, range(count_rows(batch))) / times
        scaler.unscale_(self._optimizer)
        for value in self._inputs.values():
            if value.grad is not None:
                value.grad /= times
        self._clip()
        scaler.step(self._optimizer)
        scaler.update()
        self._steps += 1
        return loss


class SequentialScaledByParts(SequentialScaled, SequentialByParts):
    """The loop with GradScaler over the parts of a batch."""


def _float32_islands(plan: Plan, one: Cast) -> Sequence[str]:
    """List the modules inside of one that compute in float32."""
    return [o.fqn for o in plan.casts if o.dtype == "fp32" and _is_inside(o.fqn, one.fqn)]


def _is_inside(name: str, fqn: str) -> bool:
    return name != fqn and (not fqn or name.startswith(f"{fqn}."))


def _apply_cast(module: nn.Module, one: Cast, islands: Sequence[str]) -> None:
    """Apply a cast row to a module of the copy."""
    found = module.get_submodule(one.fqn)
    dtype = _dtype(one.dtype)
    if one.dtype != "fp32" and not one.params:
        found.forward = _autocast(found.forward, one.dtype, back=bool(one.fqn))
        return
    inner = [i[len(one.fqn) + 1 :] if one.fqn else i for i in islands]
    found.forward = _cast_forward(found, found.forward, dtype, inner)


def _dtype(word: str) -> Any:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[word]


def _autocast(call: Callable[..., Any], word: str, back: bool = False) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=_dtype(word)):
            out = call(*args, **kwargs)
        return _cast_floats(out, _first_dtype(args, kwargs)) if back else out

    return run


def _cast_forward(
    module: nn.Module, call: Callable[..., Any], dtype: Any, islands: Sequence[str]
) -> Callable[..., Any]:
    """Wrap a forward: arguments and parameters are cast, except parameters of float32 islands."""

    def run(*args: Any, **kwargs: Any) -> Any:
        named = module.named_parameters(remove_duplicate=False)
        cast = (
            {
                n: p.to(dtype)
                for n, p in named
                if p.dtype == torch.float32 and not any(n.startswith(f"{i}.") for i in islands)
            }
            if dtype != torch.float32
            else {}
        )
        came = _first_dtype(args, kwargs)
        with torch.autocast("cpu", enabled=False), _reparametrize_module(module, cast):
            out = call(*_cast_floats(args, dtype), **_cast_floats(kwargs, dtype))
        return _cast_floats(out, came)

    return run


def _first_dtype(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the dtype of the first float argument, else float32."""
    found = [t.dtype for t in tree_leaves((args, kwargs)) if _is_float(t)]
    return found[0] if found else torch.float32


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast_floats(value: Any, dtype: Any) -> Any:
    """Cast the floats of a structure; values without gradient that would overflow are clamped."""

    def one(leaf: Any) -> Any:
        if not _is_float(leaf) or leaf.dtype in (torch.float64, dtype):
            return leaf
        made = leaf.to(dtype)
        if leaf.requires_grad:
            return made
        top = torch.finfo(dtype).max
        return torch.where(leaf.isfinite() & made.isinf(), made.sign() * top, made)

    return tree_map(one, value)
