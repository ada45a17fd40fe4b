"""A built program: one rank's share of a scheduled model, trained step by step."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal, refuse_methods_at_caller
from schedlang.diagnostics.tables import format_count, html_table
from schedlang.pipeline.timeline.table import Op
from schedlang.runtime import full_tensors, user_loops, weight_export
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.batch import (
    Batch,
    BatchPart,
    batch_to_device,
    check_batch,
    with_leaf_tensors,
)
from schedlang.runtime.batch_weights import Number, nonzero_weight, stack_numbers, sum_numbers
from schedlang.runtime.checkpointing import archive
from schedlang.runtime.checkpointing.background import BackgroundSave
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import run_in_own_world
from schedlang.runtime.context_parallel.installation import ShardContext
from schedlang.runtime.device import host_number, on_accelerator, plain_numbers
from schedlang.runtime.full_tensors import full_output
from schedlang.runtime.grad_reduction.gradient import (
    clip_factor,
    norm_on_one_rank,
    scale_gradients,
    square_sum,
    sum_gradients,
)
from schedlang.runtime.grad_reduction.zero import gradient_flags, pack_flags, unpack_counts
from schedlang.runtime.launch.hang_watch import waits_for_ranks
from schedlang.runtime.offload.offloaded_step import OffloadedState, with_peer_state
from schedlang.runtime.optim.full_tensor_step import FullTensorStep, step_optimizer
from schedlang.runtime.optim.loss_scale import LossScale
from schedlang.runtime.pipeline.executor import BACKWARD, ScheduledOp
from schedlang.runtime.pipeline.measured_times import StepTimer
from schedlang.runtime.pipeline.step import MicrobatchResult
from schedlang.runtime.pipeline.weight_versions import WeightVersions, sum_update_weights
from schedlang.runtime.scope import Scope, enter_scope
from schedlang.runtime.step_batch import BatchComparison, check_batch_names, split_step_batch
from schedlang.runtime.storage.offloaded_gradients import drop_gradient
from schedlang.runtime.storage.tiers import DEVICE
from schedlang.runtime.training_mode import TrainingMode
from schedlang.runtime.zero_weight_loss import nest, with_loss_weight

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


@refuse_methods_at_caller
@run_in_own_world
@dataclass(repr=False)
class Program:
    """A scheduled model on this rank.

    `train_step` and `eval_step` take the same full batch on every rank (`local=True`: this rank's
    rows) and return the same value on every rank. Gradients, state and outputs have the original's
    names and full shapes.
    """

    assembly: Assembly
    optimizer: torch.optim.Optimizer | None = None
    clip: float | None = None
    step: int = 0
    follow_inputs: bool = False  # also keep the gradients of the batch's float tensors
    evaluate: bool = False  # train in eval mode: no dropout, running statistics fixed
    # the step, and the number of evaluations since: each draws anew
    evaluated: tuple[int, int] = (0, 0)
    keep_output: bool = False  # also keep the output of a training step, in `output`
    output: Any = None
    whole: FullTensorStep | None = None  # parameters are gathered for each step of the optimizer
    offloaded: OffloadedState | None = None  # state that is offloaded from the device
    watch: StepTimer | None = None  # records when the operations of a step run
    loss_scale: LossScale | None = None  # of float16; a step that overflows is skipped
    comparing: BatchComparison | None = None  # compares the next batch among ranks
    # missing values of the last output: path -> reason
    left_out: dict[str, str] = field(default_factory=dict)
    _inputs: list[BatchPart] = field(default_factory=list)
    _totals: Mapping[int, float] = field(default_factory=dict)  # update -> its weight
    _weights_of_ranks: Sequence[Sequence[Number]] = ()  # of a step, by replica and microbatch
    _same_shapes: Callable[[], bool] | None = None  # whether the parts of all ranks have one shape
    _norm: Tensor | float | None = None  # norm of the last step's gradients, on the device
    _used: tuple[tuple[float, ...], Tensor | list[float]] | None = None  # flags of the last step
    _saving: BackgroundSave = field(default_factory=BackgroundSave)  # the save in flight
    # decides by loss and norm whether to step
    allowed: Callable[[Tensor, Tensor | float], bool] | None = None
    known_training: InitVar[TrainingMode | None] = None  # that of the modules, if it is made

    def __post_init__(self, known_training: TrainingMode | None) -> None:
        self._training = known_training or TrainingMode(self.assembly.module)
        if self.offloaded is not None:
            self.offloaded.check_full_step(self.whole)
        a = self.assembly
        self._at = ShardContext(a.tokens) if a.tokens is not None else None

    def __repr__(self) -> str:
        facts = self._facts()
        rank = f", rank {facts['rank']}" if "rank" in facts else ""
        micro = f", {facts['microbatches']} microbatches" if "microbatches" in facts else ""
        dropout = f", dropout {facts['dropout']}" if "dropout" in facts else ""
        description = f"{facts['parameters here']} parameters here{micro}, {facts['optimizer']}"
        return f"<Program of {self._model}{rank}: {description}, step {self.step}{dropout}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        if self.assembly.ranks.mesh.world > 1:
            reason = "a program of several ranks cannot be copied: its groups are this job's"
            raise user_loops.copy_refusal(reason)
        twin = memo[id(self)] = user_loops.copy_program(self)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    __copy__, __reduce_ex__ = user_loops.copy_program, user_loops.refuse_pickle

    def _repr_html_(self) -> str:
        """Return the text of `repr` as a table, for notebooks."""
        return html_table(f"Program of {self._model}", tuple(self._facts().items()))

    @cached_property
    def _versions(self) -> WeightVersions | None:
        """The versions of weights, if the timeline updates weights inside the step."""
        a = self.assembly
        if not a.pipeline.timeline.stale:
            return None
        timeline, position = a.pipeline.timeline, a.pipeline.place
        return WeightVersions(timeline, position, tuple(a.parameters.values()), self._update)

    @property
    def _model(self) -> str:
        return type(self.assembly.module).__name__

    def _facts(self) -> dict[str, str]:
        """Return the facts of this rank's program for `repr`; usual values are left out."""
        a = self.assembly
        indices = ", ".join(f"{axis}={index}" for axis, index in a.ranks.at.items())
        count = sum(parameter.numel() for parameter in a.parameters.values())
        optimizer, reason = self.optimizer, a.logical_dropout_reason
        facts = {
            "rank": f"{a.ranks.rank} of {a.ranks.mesh.world} ({indices})" if indices else "",
            "parameters here": format_count(count),
            "microbatches": str(a.microbatches) if a.microbatches > 1 else "",
            "optimizer": "no optimizer" if optimizer is None else type(optimizer).__name__,
            "step": str(self.step),
            "dropout": f"drawn logically ({reason})" if reason else "",
        }
        return {name: text for name, text in facts.items() if text}

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's gradients before clipping; None before the first step.

        The value is on the device: reading it makes the host wait for the step.
        """
        return None if self._norm is None else float(self._norm)

    @property
    def dp_size(self) -> int:
        """The number of parts into which a batch's rows are split: a sampler's `num_replicas`."""
        return self.assembly.ranks.mesh.size(self.assembly.row_axes)

    @property
    def dp_rank(self) -> int:
        """The index of this rank's part: a sampler's `rank`; several ranks may have the same."""
        a = self.assembly
        return a.ranks.mesh.index(a.ranks.rank, a.row_axes)

    def rank_of(self, axis: str) -> int:
        """Return the coordinate of this rank along an axis of the mesh, from 0."""
        return self.assembly.ranks.coordinate(axis)

    @property
    def module(self) -> nn.Module:
        """The plain module, for loops of your own; refused (S617) with a pipeline.

        Such a loop does not reduce gradients over ranks; if that is needed, backward is refused.
        """
        tiers = () if self.offloaded is None else self.offloaded.tiers.values()
        return user_loops.module_of(self.assembly, any(tier.gradient != DEVICE for tier in tiers))

    # -- a step ----------------------------------------------------------------------------------

    @waits_for_ranks()
    def train_step(self, batch: Batch, *, local: bool = False) -> Tensor:
        """Run forward, backward, reduction, clipping, optimizer step; return the batch's loss.

        `clip` bounds the true global norm of the gradients. Without an optimizer the gradients stay
        for the caller's own. Submodules in eval while the model trains stay so. With stale weights
        a step makes several updates, each by the mean of its own microbatches; the loss is the mean
        over all of them, each under the weights that it ran with.
        """
        check_batch_names(batch, self.assembly.batch_keys)
        # on all ranks: else others would wait for the last stage
        if self.assembly.no_loss is not None:
            raise Refusal(self.assembly.no_loss)
        if self.comparing is not None:
            self.comparing.check(self.assembly, batch, local, self.step)
        self._training.evaluate() if self.evaluate else self._training.train()
        if self.assembly.local_parameters.broken:
            self.assembly.end_broken_step()
        self.assembly.local_parameters.zero()
        if self.offloaded is not None:
            self.offloaded.begin(self.assembly.buffers)
        parts, weights, total = self._parts(batch, local)
        if self.follow_inputs:
            parts = self._inputs = [replace(p, inputs=with_leaf_tensors(p.inputs)) for p in parts]
        if self._versions is None:
            loss_scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
            results = self._run(parts, [loss_scale * w / total for w in weights], train=True)
            self._sum()
        else:
            self._versions.begin()
            updates = self._versions.made
            # whether an update happens is decided on the host, which waits once
            numbers = iter(plain_numbers([w for ws in self._weights_of_ranks for w in ws]))
            host_weights = [[next(numbers) for _ in ws] for ws in self._weights_of_ranks]
            self._totals = sum_update_weights(host_weights, updates)
            scale = [w / nonzero_weight(self._totals[updates[k]]) for k, w in enumerate(weights)]
            results = self._run(parts, scale, train=True)
            self._versions.finish()
        loss = self._clip_and_reduce(results, weights, total)
        if self.keep_output:
            self.output = self._whole(results, parts, weights)
        may_skip = self.loss_scale is not None or self.allowed is not None
        if self._versions is None and (not may_skip or self._should_step(loss)):
            self._step_weights()
        if self.optimizer is not None or self.assembly.local_parameters.shapes:
            user_loops.end_step(self.assembly, self.optimizer)
        self.step += 1
        return loss

    def _should_step(self, loss: Tensor) -> bool:
        """Return, equal on all ranks, whether the optimizer steps: by loss scale and `allowed`."""
        if self.loss_scale is not None and not self.loss_scale.update():
            return False
        assert self._norm is not None
        return self.allowed is None or self.allowed(loss, self._norm)

    def _update(self, update: int) -> None:
        """Make one update inside a step, with this rank's gradients of the finished microbatches.

        An update of microbatches without any weight (no labels) changes nothing.
        """
        if not self._totals[update] > 0:
            self.assembly.local_parameters.zero()
            return
        self._sum()
        self._step_weights()

    def _step_weights(self) -> None:
        """Step the optimizer: on shards, or on full parameters if it needs these."""
        a, optimizer = self.assembly, self.optimizer
        hooked = optimizer is not None and user_loops.begin_update(a, optimizer)
        with user_loops.hooks_around(a, optimizer, self.whole) if hooked else _NOTHING:
            if self.offloaded is not None:
                self.offloaded.step(optimizer, self.whole)
            elif self.whole is not None:
                self.whole.step(optimizer)
            elif optimizer is not None:
                step_optimizer(optimizer)

    @waits_for_ranks()
    def eval_step(self, batch: Batch, *, local: bool = False) -> Any:
        """Return the output for the full batch, structured as the model's own, on every rank.

        Rows are concatenated; numbers are weighted means over parts. Values that no rank has in
        full, such as caches of other stages, are None; `left_out` gives their paths and reasons.
        """
        if self.comparing is not None:
            self.comparing.check(self.assembly, batch, local, None)
        if self.assembly.tokens is not None:  # names decide which inputs are split
            check_batch_names(batch, self.assembly.batch_keys)
        return self._evaluate(batch, local=local)

    def generate(self, inputs: Tensor | None = None, **options: Any) -> Any:
        """Generate tokens as the model's own `generate` of transformers does, equal on every rank.

        inputs   prompts (rows, tokens), the same on every rank; ranks split the rows
        options  those of `model.generate`: `attention_mask=`, `max_new_tokens=`, `do_sample=`, ...
        Keys and values stay on the rank that computes them. Raises Refusal S627 for unsupported
        options.
        """
        from schedlang.runtime.generation import generate

        with torch.no_grad():
            return generate(self.assembly, self._evaluate, inputs, options)

    def _evaluate(
        self,
        batch: Batch,
        prepare: Callable[[int, BatchPart], BatchPart] | None = None,
        local: bool = False,
        whole: bool = False,
    ) -> Any:
        """Return the output of a batch, of `each(k, microbatch)`; `whole`: of unsplit tokens."""
        check_batch(batch)
        self._training.evaluate()
        step, count = self.evaluated
        self.evaluated = self.step, count + 1 if step == self.step else 1
        parts, weights, _ = self._parts(batch, local, whole)
        if prepare is not None:
            parts = [prepare(k, part) for k, part in enumerate(parts)]
        graph = torch.set_grad_enabled(self.assembly.takes_gradient)
        with graph, self.assembly.enter_evaluation(self.step):
            results = self._run(parts, None, train=False)
        if self.offloaded is not None:
            self.offloaded.finish_backward()
        return self._whole(results, parts, weights)

    def _whole(
        self,
        results: Mapping[int, MicrobatchResult],
        parts: Sequence[BatchPart],
        weights: Sequence[Number],
    ) -> Any:
        weights = plain_numbers(weights)
        outputs = {k: (r.output, len(parts[k].rows), weights[k]) for k, r in results.items()}
        layout = parts[0].token_shard.layout if parts[0].token_shard is not None else None
        output, self.left_out = full_output(self.assembly, outputs, layout)
        return output

    def _parts(
        self, batch: Batch, local: bool, whole: bool = False
    ) -> tuple[list[BatchPart], list[Number], Number]:
        """Return this rank's microbatches, their weights, and the weight of the full batch."""
        split = split_step_batch(self.assembly, batch, local, whole)
        self._weights_of_ranks, self._same_shapes = split.weights_of_ranks, split.same_shapes
        device, parts = self.assembly.ranks.device, list(split.parts)
        if on_accelerator(device):
            parts = [replace(part, inputs=batch_to_device(part.inputs, device)) for part in parts]
        return parts, list(split.weights), split.total

    def _run(
        self, parts: Sequence[BatchPart], scale: Sequence[Number] | None, *, train: bool
    ) -> dict[int, MicrobatchResult]:
        a = self.assembly
        if a.local_parameters.guarded:  # the module was handed out
            user_loops.check_loop(a)
        pass_index = 0 if train else self.evaluated[1]
        scopes = [
            Scope(self.step, index, part.rows, pass_index, self._same_shapes, a.host_draws)
            for index, part in enumerate(parts)
        ]

        def around(op: Op) -> contextlib.AbstractContextManager[Any]:
            shard = parts[op.microbatch].token_shard
            scope: contextlib.AbstractContextManager[Any] = enter_scope(scopes[op.microbatch])
            if shard is not None and self._at is not None:
                scope = self._at.enter_shard(shard, scope)
            if scale is not None:
                scope = with_loss_weight(scale[op.microbatch], scope)
            if (means := parts[op.microbatch].means) is not None and op.kind not in BACKWARD:
                scope = nest(scope, means.scaled(complete=train and a.stage_axis is None))
            return scope if self.watch is None else self.watch.around(op, scope)

        trained = a.early_reductions, self._versions, a.region
        early, versions, region = trained if train else (None,) * 3
        observed = a.sliced or any(item is not None for item in (early, versions, region))

        def on_op(event: ScheduledOp) -> None:
            if versions is not None:
                versions.prepare(event.op)
            if early is not None:
                early.prepare(event.op.stage, event.last)
            if region is not None and not event.before_last_forward:
                region.end_step()
            if event.op.kind in BACKWARD and event.op.stage in a.sliced:
                a.sliced[event.op.stage].before_backward(event.last, event.reduces)

        # also in evaluation: a model may draw there, and ranks must agree
        moment = self.step if train else (self.step, self.evaluated[1])
        drawing = a.dropout.enter_step(moment) if a.dropout is not None else _NOTHING
        if region is not None:
            region.begin_step()
        try:
            with drawing, a.local_parameters.step():
                results = a.pipeline.run(
                    [part.inputs for part in parts],
                    scale,
                    train=train,
                    around=around,
                    on_op=on_op if observed else None,
                    keep_outputs=self.keep_output or not train,
                )
        finally:
            if region is not None:
                region.end_step()
        for item in a.sliced.values():
            item.free_gathered()
        return results

    def _sum(self) -> None:
        """Finish the reductions of gradients that remain after the last backward."""
        a = self.assembly
        for stage in a.sliced.values():
            stage.finish_backwards()
            stage.check_calls()
        if self.offloaded is not None:
            self.offloaded.finish_backward()
        a.local_parameters.drop_unwritten()
        if a.early_reductions is not None:
            a.early_reductions.finish()
        reductions = a.reductions if a.early_reductions is None else a.early_reductions.rest
        sum_gradients(a.local_parameters, reductions)
        if a.compressor is not None:
            a.compressor.sum(a.parameters)
        if self.loss_scale is not None:
            self.loss_scale.unscale(a.parameters)
        if a.local_parameters.hooks is not None:
            a.local_parameters.hooks.run(a.local_parameters.shapes)

    def _clip_and_reduce(
        self, results: Mapping[int, MicrobatchResult], weights: Sequence[Number], total: Number
    ) -> Tensor:
        """Clip by the global norm; all-reduce loss and norm in one collective; return the loss.

        Both stay on this rank's device: the host waits for them when they are read. It waits here
        only if a ZeRO-sliced parameter got no gradient on this rank: did another rank use it?
        """
        a = self.assembly
        value, scale = self._loss(results, weights, total), self.loss_scale
        if a.ranks.mesh.world == 1:
            self._norm = host_number(norm_on_one_rank(a.parameters, self.clip))
            return torch.as_tensor(value, dtype=a.loss_dtype)
        squares = host_number(square_sum(a.parameters, a.primary_parameters, a.ranks.device))
        names = a.sliced_parameters
        used_flags = gradient_flags(a.sliced, a.parameters, names) if names else []
        stacked = stack_numbers([squares, value])
        if used_flags:
            stacked = torch.cat([stacked, self._used_flags(used_flags, stacked)])
        end = len(stacked)
        if scale is not None:
            stacked = torch.cat([stacked, scale.overflow_flag(stacked)])
        world.all_reduce(stacked, a.ranks.world.group)
        if scale is not None:
            scale.set_overflow(stacked[end:])
        trained = () if all(used_flags) else a.trained
        if any(not is_used and name in trained for name, is_used in zip(names, used_flags)):
            counted = stacked[2:end].tolist()
            counts = unpack_counts(counted, len(names), a.ranks.mesh.world, stacked.dtype)
            for name, count in zip(names, counts):
                # unused on all ranks: no gradient, as in a plain loop
                if not count and name in trained:
                    drop_gradient(a.parameters[name])
        self._norm = norm = host_number(stacked[0].sqrt())
        factor = clip_factor(norm, self.clip) if self.clip is not None else None
        if factor is not None:
            scale_gradients(a.parameters, factor)
        return stacked[1].to(a.loss_dtype)

    def _loss(
        self, results: Mapping[int, MicrobatchResult], weights: Sequence[Number], total: Number
    ) -> Number:
        """Return this rank's share of the loss of the full batch, on an accelerator in float64."""
        a = self.assembly
        losses = {k: r.loss for k, r in results.items() if r.loss is not None}
        # `None in` would compare each tensor with None, which torch answers by an error
        assert len(losses) == len(results), "the model returns no loss: pass `loss=`"
        if not losses or not a.is_primary:
            return 0.0
        shares = [weights[k] / total for k in losses]
        on_device = on_accelerator(a.ranks.device)  # on the host the shares are plain numbers
        device, values = a.ranks.device, losses.values()
        terms = [x.double().to(device) if on_device else host_number(x) for x in values]
        # nothing to add; a weight that is on the device is not read
        single = len(shares) == 1 and not isinstance(shares[0], Tensor) and shares[0] == 1.0
        share = terms[0] if single else sum_numbers([x * part for x, part in zip(terms, shares)])
        return share.to(torch.float64).reshape(()) if isinstance(share, Tensor) else share

    def _used_flags(self, used: Sequence[float], like: Tensor) -> Tensor:
        """Return flags of which parameters this rank used, packed, on the device of `like`.

        On an accelerator the tensor is cached: the host would wait for each copy from its memory.
        """
        key = tuple(used)
        if self._used is None or self._used[0] != key:
            numbers = pack_flags(used, self.assembly.ranks.mesh.world, like.dtype)
            on_device = on_accelerator(like)
            self._used = (
                key,
                torch.tensor(numbers, dtype=like.dtype).to(like.device) if on_device else numbers,
            )
        flags = self._used[1]
        return flags if isinstance(flags, Tensor) else like.new_tensor(flags)

    # -- state -----------------------------------------------------------------------------------

    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradients of the last step, after clipping, by original name."""
        return full_tensors.full_gradients(self.assembly)

    def input_gradients(self) -> dict[str, Tensor | None] | None:
        """Return full gradients of the float tensors of the last batch; needs `follow_inputs`.

        None if backward ends before the first stage, which is frozen.
        """
        if self.assembly.backward_ends_early:
            return None
        times = 1.0 if self.loss_scale is None else self.loss_scale.used
        return full_tensors.full_input_gradients(self.assembly, self._inputs, times)

    def trained(self) -> list[str]:
        """Return the names of all parameters that an optimizer of some rank updates."""
        return full_tensors.trained_names(self.assembly)

    def replica_errors(self) -> dict[str, float]:
        """Return the largest relative difference between copies of one shard, by parameter."""
        return full_tensors.replica_errors(self.assembly)

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers by original name, including those that a state dict omits."""
        return full_tensors.full_buffers(self.assembly)

    def buffer_errors(self) -> dict[str, float]:
        """Return for each buffer 0 if its copies on all ranks are equal, else 1."""
        return full_tensors.buffer_errors(self.assembly)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the original's state dict: its keys and order, full values on every rank's CPU."""
        return full_tensors.full_state_dict(self.assembly)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load full values, as `state_dict` returns them; every rank passes the same.

        Raises Refusal S641 naming keys that are missing, unknown or misshapen, before any change.
        """
        full_tensors.load_full_state(self.assembly, state)
        archive.settle_loaded(self)

    @with_peer_state
    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state by original name: full tensors, and plain numbers."""
        return full_tensors.full_optimizer_state(self.assembly, self.optimizer)

    @with_peer_state
    def save(
        self,
        path: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        wait: bool = True,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the state into a folder of checkpoints, of which `keep` stay; see `archive.save`.

        wait    False: return as soon as the state is copied to host memory; it is written while
                training goes on. One save is in flight: the next save waits for it
        beside  plain data of this rank to store with it; `archive.beside` reads it
        An error of a background save is raised on all ranks by the next `save`, `load` or `saved`;
        every older checkpoint is still there then.
        """
        self.saved()
        if wait:
            archive.save(self, path, keep, beside)
        else:
            self._saving.start(
                archive.prepare_checkpoint(self, path, keep, beside), self.assembly.ranks.world
            )

    def saved(self) -> None:
        """Wait until the save in flight is on disk; return at once without one.

        All ranks call this together. Raises the Refusal (S631, S632, S638) of a failed save.
        """
        self._saving.finish()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the last checkpoint of a folder, of any layout; see `archive.load`."""
        self.saved()
        archive.load(self, path)

    def export(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        adapter: bool = False,
        shard: int = weight_export.FILE_BYTES,
    ) -> None:
        """Write full weights in files of `shard` bytes, with adapters merged into them.

        With `adapter` only the adapters, for PEFT. See `weight_export`.
        """
        a = self.assembly
        parts, buffers = full_tensors.local_shards(a), full_tensors.full_buffers(a)
        if adapter:
            weight_export.export_adapter(a, path, model, parts, buffers, self.trained())
        else:
            weight_export.export_weights(a, path, model, parts, buffers, shard)
