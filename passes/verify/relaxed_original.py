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
from schedlang.passes.verify.original import Sequential, count_rows, returned_loss, without_graph
from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime.batch import BatchPart, run_model, stack_outputs
from schedlang.runtime.checkpointing.holdings import Holding, shard_of, write_shard
from schedlang.runtime.grad_reduction.compressed import (
    decode,
    encode,
    fill_zero_columns,
    orthogonalize,
)
from schedlang.runtime.label_means import scaled_means, with_means
from schedlang.runtime.scope import Scope, enter_scope

if TYPE_CHECKING:
    from schedlang.passes.verify.proof_case import Case

# ---- relax(batch_stats): trained by parts.


@dataclass(frozen=True)
class BufferReplicas:
    """Copies of buffers that microbatches use, where stages are placed on ranks in two directions.

    replica_of_microbatch  the replica of the stages of each microbatch; empty: one replica for all
    homes                  for each replica, the place that stores a buffer; replicas at one place
                           share a copy
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
        parts_by_replica: dict[int, list[BatchPart]] = {}
        for k, part in enumerate(parts):
            parts_by_replica.setdefault(self.replica(k), []).append(part)
        return list(parts_by_replica.values())


def buffer_replicas(staged: Staged) -> BufferReplicas:
    """Read the replica of each microbatch from the timeline."""
    t = staged.timeline
    if staged.axis is None or t.replicas < 2:
        return BufferReplicas()
    forward = t.kind == Kind.F
    replica_of = dict(zip(t.microbatch[forward].tolist(), t.replica[forward].tolist()))
    return BufferReplicas(tuple(replica_of[k] for k in range(t.microbatches)), buffer_homes(staged))


def check_sums(case: Case) -> None:
    """Refuse (S717) parts that share sums, if one process must run them one after the other."""
    prepared, plan = case.prepared, case.plan
    if prepared is None or prepared.traced.statistics is None or plan.shares * plan.micro == 1:
        return
    if plan.activation_codings or compression_axes(plan) or case.table is not None:
        raise shared_sums(plan)


def shared_sums(plan: Plan) -> Refusal:
    """Return S717: one process cannot run parts that need each other one after the other."""
    own_sums = 'let each part have its own sums: `step "..." relax(batch_stats, lossy) {`'
    leave = "leave `compress` out, and prove the other rows"
    return Refusal.of(
        "S717",
        "a single process cannot reproduce lossy rows if ranks share sums",
        notes=("it computes one part of the batch after another, but this loss needs all of them",),
        helps=(leave,) if plan.row_gathers else (own_sums, f"or {leave}"),
    )


def gathered_parts(plan: Plan) -> Refusal:
    """Return S717: parts that gather rows are compared with no model that runs by parts."""
    return Refusal.of(
        "S717",
        "`gather_rows` cannot be proven beside statistics of each part",
        notes=("one process computes one part of the batch after another, and gathers no rows",),
        helps=("leave out what needs `relax(batch_stats)`, and prove the other rows",),
    ).at(next(row.span for row in map(plan.origin, plan.row_gathers) if row is not None))


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
    first replica and direction.
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
            members, [self._run_part(member, member.weight / total) for member in members]
        )

    def _split_batch(self, batch: Batch) -> list[ReplicaPart]:
        """Return all parts of a batch, replica after replica."""
        shares = self.split(batch)
        scaled = iter(with_means(self.weigh, [part for parts in shares for part in parts]))
        return [
            ReplicaPart(replica, k, next(scaled), self.weigh(part.inputs))
            for replica, parts in enumerate(shares)
            for k, part in enumerate(parts)
        ]

    def _run_part(self, member: ReplicaPart, share: float) -> _PartRun:
        """Do forward and backward of one part; a part of weight 0 only updates its statistics."""
        self._enter_replica(member.replica, self.directions.replica(member.microbatch))
        inputs = self._given(member.part.inputs)
        self._use_weights("forward", member.microbatch)
        scope = Scope(self._steps, 0, member.part.rows, seeding=self._seeding)
        with enter_scope(scope), self._record_order():
            with scaled_means(member.part):
                self.output = run_model(self.module, inputs)
                loss = self.loss(self.output, inputs) * self.scale
            self._use_weights("backward", member.microbatch)
            if share:
                (loss * share).backward()  # type: ignore[no-untyped-call]
        return _PartRun(loss.detach(), self.output, self._inputs)

    def _use_weights(self, phase: str, microbatch: int) -> None:
        """Put a microbatch's weights in place; here all microbatches use the current ones."""

    def _join_parts(self, members: Sequence[ReplicaPart], runs: Sequence[_PartRun]) -> Tensor:
        """Join outputs and inputs of all parts into one batch; return the weighted mean loss."""
        self._enter_replica(0)
        self._inputs = join_inputs([item.inputs for item in runs])
        weights = [item.weight for item in members]
        rows = [len(item.part.rows) for item in members]
        self.output = stack_outputs([item.output for item in runs], rows, weights)
        total = sum(weights) or 1.0
        losses = [item.loss * (weight / total) for item, weight in zip(runs, weights) if weight]
        return torch.stack(losses).sum()

    def eval_step(self, batch: Batch) -> Any:
        """Return the output in eval mode, with the buffers of the first replica, which are
        saved."""
        self._training.evaluate()
        outputs, evaluation, members = [], self._next_evaluation(), self._split_batch(batch)
        self._enter_replica(0)
        buffers = self._current_buffers()
        saved = {name: buffer.clone() for name, buffer in buffers.items()}
        after = saved
        for member in members:
            if member.replica:  # what forwards of other replicas write is lost
                self._set_buffers(saved)
            samples = member.part.rows
            scope = Scope(self._steps, 0, samples, evaluation, seeding=self._seeding)
            with torch.set_grad_enabled(self.takes_gradient), enter_scope(scope):
                output = run_model(self.module, member.part.inputs)
            outputs.append(without_graph(output) if self.takes_gradient else output)
            if not member.replica:
                after = {name: buffer.clone() for name, buffer in buffers.items()}
        self._set_buffers(after)
        rows = [len(member.part.rows) for member in members]
        return stack_outputs(outputs, rows, [member.weight for member in members])

    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self._current_buffers().items():
            buffer.copy_(values[name])

    def _enter_replica(self, replica: int, direction: int = 0) -> None:
        """Put the buffers of a replica and direction in place, and store the previous ones."""
        buffers = self._current_buffers()
        if self._initial_buffers is None:
            self._initial_buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        if (replica, direction) == self._position:
            return
        old_replica, old_direction = self._position
        copy = self.directions.copy
        for name, buffer in buffers.items():
            self._stored_buffers[name, old_replica, copy(name, old_direction)] = buffer.clone()
        for name, value in self._initial_buffers.items():
            buffers[name].copy_(
                self._stored_buffers.get((name, replica, copy(name, direction)), value)
            )
        self._position = replica, direction

    def _current_buffers(self) -> dict[str, Tensor]:
        """Return buffers, and frozen parameters that the forward writes to."""
        frozen = ((n, p) for n, p in self.module.named_parameters() if not p.requires_grad)
        rewritten = {n: p.detach() for n, p in frozen if n in self.rewritten}
        return {n: b.detach() for n, b in self.module.named_buffers()} | rewritten


def _total_weight(members: Sequence[ReplicaPart]) -> float:
    return sum(member.weight for member in members)


def join_inputs(inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the parts' inputs and their gradients; only the gradients are used."""
    joined = {}
    for name in inputs[0]:
        grads = [part[name].grad for part in inputs]
        full = torch.cat([part[name].detach() for part in inputs]).requires_grad_()
        if any(grad is not None for grad in grads):
            part_grads = [
                torch.zeros_like(g[name]) if x is None else x for g, x in zip(inputs, grads)
            ]
            full.grad = torch.cat(part_grads)
        joined[name] = full
    return joined


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
        compression = plan.compression
        assert compression is not None
        self.plan, self.holdings = plan, holdings
        self.codec = compression.codec
        self._codec_states: dict[tuple[str, object], CodecState] = {}

    def forward_backward(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """Return the weighted loss of all parts; `gradients()` are sums of encoded ones."""
        self._set_mode()
        members = self._split_batch(batch)
        total = _total_weight(members) or 1.0
        runs: list[_PartRun] = []
        grads: list[dict[str, Tensor | None]] = []  # of each replica
        for _, replica_members in groupby(members, key=lambda item: item.replica):
            self.module.zero_grad(set_to_none=True)
            runs += [self._run_part(item, item.weight / total) for item in replica_members]
            grads.append({name: p.grad for name, p in self._parameters})
        with torch.no_grad():
            for name, parameter in self._parameters:
                parameter.grad = self._sum_gradients(name, [item[name] for item in grads])
        return self._join_parts(members, runs)

    def _sum_gradients(self, name: str, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient that every rank has at the end, assembled from what ranks hold."""
        example = next((part for part in parts if part is not None), None)
        if example is None:
            return None
        full_sum = torch.zeros_like(example)
        by_place = self._sum_by_place(
            [torch.zeros_like(example) if p is None else p for p in parts]
        )
        mesh, holding = self.plan.mesh, self.holdings[name]
        for rank, key in self._distinct_shards(holding):
            local = [shard_of(part_sum, holding, mesh, rank) for part_sum in by_place]
            write_shard(self._encode_and_sum(name, key, local), full_sum, holding, mesh, rank)
            unpadded_mask = shard_of(torch.ones_like(full_sum), holding, mesh, rank)
            errors = self._codec_states[name, key].errors
            errors.update({k: error * unpadded_mask.view_as(error) for k, error in errors.items()})
        return full_sum

    def _sum_by_place(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the exact sum over all other axes, for each place along the compressed axes."""
        mesh, rows = self.plan.mesh, self.plan.row_axes
        axes = compression_axes(self.plan)
        sums: list[Any] = [0.0] * mesh.size(axes)
        ranks = {mesh.index(r, rows): r for r in reversed(range(mesh.world))}
        for part_index, part in enumerate(parts):
            position = mesh.index(ranks[part_index], axes)
            sums[position] = sums[position] + part
        return sums

    def _distinct_shards(self, holding: Holding) -> Iterator[tuple[int, object]]:
        """Yield a rank for each different shard of a parameter, and a key of the shard."""
        mesh, seen_keys = self.plan.mesh, set()
        for rank in range(mesh.world):
            key = holding.segments(mesh, rank)
            if holding.is_held(mesh, rank) and key not in seen_keys:
                seen_keys.add(key)
                yield rank, key

    def _encode_and_sum(self, name: str, key: object, parts: Sequence[Tensor]) -> Tensor:
        """Return the encoded sum over all places, as the codec makes it."""
        state = self._codec_states.setdefault((name, key), CodecState())
        if not self.codec.compresses(parts[0].shape):
            return torch.stack(list(parts)).sum(0)
        matrices = [part.reshape(part.shape[0], -1) for part in parts]
        matrices = [
            part + state.errors.get(position, 0.0) for position, part in enumerate(matrices)
        ]
        codec_sum = _powersgd_sum if self.codec.kind == "powersgd" else _quantized_sum
        total, errors = codec_sum(self.codec, name, self._steps, matrices, state)
        if self.codec.feedback:
            state.errors = dict(enumerate(errors))
        return total.view_as(parts[0])


def _powersgd_sum(
    codec: Codec, name: str, step: int, matrices: Sequence[Tensor], state: CodecState
) -> tuple[Tensor, list[Tensor]]:
    """Return PowerSGD's sum (the exact sum, projected by a power iteration) and the errors."""
    q = matrices[0].new_zeros(matrices[0].shape[1], codec.rank) if state.q is None else state.q
    total = torch.stack(list(matrices)).sum(0)
    p = orthogonalize(total @ fill_zero_columns(q, name, step))
    state.q = total.T @ p
    return p @ state.q.T, [part - p @ (p.T @ part) for part in matrices]


def _quantized_sum(
    codec: Codec, name: str, step: int, matrices: Sequence[Tensor], state: CodecState
) -> tuple[Tensor, list[Tensor]]:
    """Quantise each part by itself; return the sum of the decoded parts and the errors."""
    decoded = [
        decode(codec, encode(codec, part, name, step, position), part.numel()).view_as(part)
        for position, part in enumerate(matrices)
    ]
    return torch.stack(decoded).sum(0), [part - value for part, value in zip(matrices, decoded)]


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
        runs: dict[int, _PartRun] = {}
        for version in range(1, max(self.table.produced) + 1):
            version_members = [
                n
                for n, member in enumerate(members)
                if self.table.produced[member.microbatch] == version
            ]
            total = _total_weight([members[n] for n in version_members])
            self.module.zero_grad(set_to_none=True)
            for n in version_members:
                runs[n] = self._run_part(members[n], members[n].weight / total if total else 0.0)
            self._update_weights(total)
        self._steps += 1
        return self._join_parts(members, [runs[n] for n in range(len(members))])

    def _use_weights(self, phase: str, microbatch: int) -> None:
        versions = self.table.forward if phase == "forward" else self.table.backward
        self._fill(versions[microbatch])

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
    for cast in plan.casts:
        _apply_cast(module, cast, _float32_islands(plan, cast))
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


def _float32_islands(plan: Plan, outer: Cast) -> Sequence[str]:
    """List the modules inside of one that compute in float32."""
    return [
        inner.fqn
        for inner in plan.casts
        if inner.dtype == "fp32" and _is_inside(inner.fqn, outer.fqn)
    ]


def _is_inside(name: str, fqn: str) -> bool:
    return name != fqn and (not fqn or name.startswith(f"{fqn}."))


def _apply_cast(module: nn.Module, cast: Cast, islands: Sequence[str]) -> None:
    """Apply a cast row to a module of the copy."""
    submodule = module.get_submodule(cast.fqn)
    dtype = _dtype(cast.dtype)
    if cast.dtype != "fp32" and not cast.params:
        submodule.forward = _autocast(submodule.forward, cast.dtype, back=bool(cast.fqn))
        return
    inner = [i[len(cast.fqn) + 1 :] if cast.fqn else i for i in islands]
    submodule.forward = _cast_forward(submodule, submodule.forward, dtype, inner)


def _dtype(short_name: str) -> Any:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[short_name]


def _autocast(call: Callable[..., Any], dtype_name: str, back: bool = False) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=_dtype(dtype_name)):
            output = call(*args, **kwargs)
        return _cast_floats(output, _first_dtype(args, kwargs)) if back else output

    return run


def _cast_forward(
    module: nn.Module, call: Callable[..., Any], dtype: Any, islands: Sequence[str]
) -> Callable[..., Any]:
    """Wrap a forward: arguments and parameters are cast, except parameters of float32 islands."""

    def run(*args: Any, **kwargs: Any) -> Any:
        named_parameters = module.named_parameters(remove_duplicate=False)
        cast = (
            {
                n: p.to(dtype)
                for n, p in named_parameters
                if p.dtype == torch.float32 and not any(n.startswith(f"{i}.") for i in islands)
            }
            if dtype != torch.float32
            else {}
        )
        input_dtype = _first_dtype(args, kwargs)
        with torch.autocast("cpu", enabled=False), _reparametrize_module(module, cast):
            output = call(*_cast_floats(args, dtype), **_cast_floats(kwargs, dtype))
        return _cast_floats(output, input_dtype)

    return run


def _first_dtype(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the dtype of the first float argument, else float32."""
    dtypes = [t.dtype for t in tree_leaves((args, kwargs)) if _is_float(t)]
    return dtypes[0] if dtypes else torch.float32


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast_floats(value: Any, dtype: Any) -> Any:
    """Cast the floats of a structure; values without gradient that would overflow are clamped."""

    def one(leaf: Any) -> Any:
        if not _is_float(leaf) or leaf.dtype in (torch.float64, dtype):
            return leaf
        cast_leaf = leaf.to(dtype)
        if leaf.requires_grad:
            return cast_leaf
        largest = torch.finfo(dtype).max
        return torch.where(
            leaf.isfinite() & cast_leaf.isinf(), cast_leaf.sign() * largest, cast_leaf
        )

    return tree_map(one, value)
