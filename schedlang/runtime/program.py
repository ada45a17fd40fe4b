"""A built program: one rank's part of a scheduled model, trained step by step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime import archive, crossing
from schedlang.runtime.folder import gathered
from schedlang.runtime.gradient import (
    Sum,
    local_gradient,
    scale_gradients,
    square_sum,
    sum_gradients,
)
from schedlang.runtime.holding import Holding, assemble, take
from schedlang.runtime.modes import ambient
from schedlang.runtime.moments import local as _local
from schedlang.runtime.parts import Batch, Part, rows_of, split, stack
from schedlang.runtime.pipeline import BACKWARD, Event, Pipeline, Result
from schedlang.runtime.random import LogicalDropout
from schedlang.runtime.ranks import Ranks
from schedlang.runtime.replicas import Sliced, reshard
from schedlang.runtime.scope import Scope, entered
from schedlang.runtime.vocab import ShardedLogits

Weight = Callable[[Batch], float]


@dataclass(frozen=True)
class Assembly:
    """What `build` puts together: everything that a Program runs.

    parameters  first name -> the parameter of this rank, of the stages that it holds
    sums        reductions after the last backward, in this order on all ranks
    weight      how much a part of the batch weighs in the mean loss
    """

    module: nn.Module
    pipeline: Pipeline
    ranks: Ranks
    replicas: tuple[str, ...]  # data axes
    micro: int
    parameters: Mapping[str, nn.Parameter]
    holdings: Mapping[str, Holding]
    buffers: Mapping[str, Tensor]
    buffer_stages: Mapping[str, frozenset[int] | None]
    ties: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]  # of the original's state_dict, in order
    sums: tuple[Sum, ...]
    sliced: Mapping[int, Sliced]  # stage -> its units
    weight: Weight
    last_rank: int  # a rank of the last stage, at place 0 of all other axes
    stage_axis: str | None = None
    dropout: LogicalDropout | None = None
    outputs_missing: tuple[str, ...] = ()
    loss_dtype: torch.dtype = torch.float32  # the same on every rank
    without_labels: Callable[[Batch], dict[str, Any]] | None = None
    inputs: frozenset[str] = frozenset()  # names in the batch that it was built from


@dataclass
class Program:
    """A scheduled model on this rank.

    `train_step` and `eval_step` take the same whole batch on every rank (`local=True`: this rank's
    rows) and give the same value on every rank.  Gradients, state and outputs carry the original's
    names and whole shapes.
    """

    assembly: Assembly
    optimizer: torch.optim.Optimizer | None = None
    clip: float | None = None
    step: int = 0
    grad_norm: float | None = None
    follow_inputs: bool = False  # also keep the gradients of the batch's float tensors
    _inputs: list[Part] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The plain module, where no pipeline is involved: bring your own loop (S617)."""
        if self.assembly.stage_axis is not None:
            title = f"the pipeline over `{self.assembly.stage_axis}` has no module of its own"
            helps = ("use `train_step` and `eval_step`: each rank runs a stage of the model",)
            raise Refusal(Diagnostic("S617", title, helps=helps))
        return self.assembly.module

    # -- a step ----------------------------------------------------------------------------------

    def train_step(self, batch: Batch, *, local: bool = False) -> Tensor:
        """Forward, backward, reduction, clipping and optimizer step; the loss of the whole batch.

        `clip` bounds the true global norm of the gradients.  Without an optimizer the gradients
        stay for the caller's own.
        """
        self._check_names(batch)
        self.assembly.module.train()
        self._zero()
        parts, weights, total = self._parts(batch, local)
        parts = [self._defined(part, weight) for part, weight in zip(parts, weights)]
        if self.follow_inputs:
            parts = self._inputs = [Part(_followed(part.inputs), part.rows) for part in parts]
        results = self._run(parts, [w / total for w in weights], train=True)
        sum_gradients(self.assembly.parameters, self.assembly.sums)
        loss = self._finish(results, weights, total)
        if self.optimizer is not None:
            self.optimizer.step()
        self.step += 1
        return loss

    def eval_step(self, batch: Batch, *, local: bool = False) -> Any:
        """The output of the whole batch, structured as the model's own, on every rank."""
        a = self.assembly
        a.module.eval()
        parts, weights, _ = self._parts(batch, local)
        with torch.no_grad():
            results = self._run(parts, None, train=False)
        reshard(a.sliced)
        output = None
        if results is not None:
            outputs = [_gathered(result.output) for result in results]
            output = stack(outputs, [len(part.rows) for part in parts], weights)
            output = self._across_replicas(output, sum(len(part.rows) for part in parts), sum(weights))
        return self._from_last(output)

    def _check_names(self, batch: Batch) -> None:
        """Refuse names that building has not seen: what a part weighs may hang on them."""
        known = self.assembly.inputs
        new = [name for name in batch if name not in known]
        if new and known:
            raise Refusal(
                Diagnostic(
                    "S619", f"the batch has `{new[0]}`, which that of building had not",
                    notes=(f"the program was built from a batch of {', '.join(sorted(known))}",),
                    helps=("build it from one as it will be trained on: `sch.build(batch=batch)`",),
                )
            )  # fmt: skip

    def _zero(self) -> None:
        for parameter in self.assembly.parameters.values():
            parameter.grad = None

    def _parts(self, batch: Batch, local: bool) -> tuple[list[Part], list[float], float]:
        """This rank's microbatches, their weights, and the weight of the whole batch."""
        a = self.assembly
        mesh = a.ranks.mesh
        count = mesh.size(a.replicas)
        if not local:
            everyone = split(batch, count, a.micro)
            mine = everyone[mesh.index(a.ranks.rank, a.replicas)]
            alone = count * a.micro == 1
            weigh = [[1.0 if alone else a.weight(p.inputs) for p in parts] for parts in everyone]
            weights = weigh[mesh.index(a.ranks.rank, a.replicas)]
            return mine, weights, _positive(sum(map(sum, weigh)))
        (own,) = split(batch, 1, a.micro)
        weights = [a.weight(part.inputs) for part in own]
        here = torch.tensor([[sum(weights), rows_of(batch)]], dtype=torch.float64)
        group = a.ranks.group(a.replicas)
        if group.pg is None:
            return own, weights, _positive(sum(weights))
        told = here.new_empty(group.size, 2)
        dist.all_gather_into_tensor(told, here, group=group.pg)
        first = int(told[: group.rank, 1].sum())  # samples are numbered across all ranks
        parts = [Part(part.inputs, tuple(first + row for row in part.rows)) for part in own]
        return parts, weights, _positive(float(told[:, 0].sum()))

    def _defined(self, part: Part, weight: float) -> Part:
        """A part in which no label counts has no mean: give it labels, its weight is zero anyway."""
        fill = self.assembly.without_labels
        return part if weight or fill is None else Part(fill(part.inputs), part.rows)

    def _run(
        self, parts: Sequence[Part], scale: Sequence[float] | None, *, train: bool
    ) -> list[Result] | None:
        a = self.assembly

        def around(microbatch: int) -> contextlib.AbstractContextManager[Any]:
            return entered(Scope(self.step, microbatch, parts[microbatch].rows))

        def on_op(event: Event) -> None:
            if event.op.kind in BACKWARD and event.op.stage in a.sliced:
                a.sliced[event.op.stage].before_backward(event.last)

        dropout = ambient(a.dropout) if train and a.dropout is not None else contextlib.nullcontext()
        with dropout:
            results = a.pipeline.run(
                [part.inputs for part in parts], scale, train=train, around=around, on_op=on_op,
                keep_outputs=not train,
            )  # fmt: skip
        crossing.forget()
        return results

    def _finish(
        self, results: list[Result] | None, weights: Sequence[float], total: float
    ) -> Tensor:
        """Clip by the global norm; the loss and the norm cross the world in one reduction."""
        a = self.assembly
        mesh, rank = a.ranks.mesh, a.ranks.rank
        speaks = {name for name, holding in a.holdings.items() if holding.primary(mesh, rank)}
        squares = square_sum(a.parameters, lambda name: name in speaks)
        value = torch.zeros((), dtype=torch.float64)
        if results is not None:
            losses = [result.loss for result in results]
            assert all(loss is not None for loss in losses), "the model gives no loss: pass `loss=`"
            if self._speaks_for_loss():
                value = sum(  # type: ignore[assignment]
                    loss.double().cpu() * (w / total) for loss, w in zip(losses, weights) if loss is not None
                )  # fmt: skip
        both = torch.stack([squares.cpu(), value])
        if mesh.world > 1:
            dist.all_reduce(both)
        self.grad_norm = float(both[0].sqrt())
        if self.clip is not None and self.grad_norm > self.clip:
            # as torch.nn.utils.clip_grad_norm_
            scale_gradients(a.parameters, self.clip / (self.grad_norm + 1e-6))
        return both[1].to(a.loss_dtype)

    def _speaks_for_loss(self) -> bool:
        a = self.assembly
        here = a.ranks.at
        free = {axis for name in (*a.replicas, *_named(a.stage_axis)) for axis in a.ranks.mesh.fold(name)}
        return all(place == 0 for axis, place in here.items() if axis not in free)

    # -- outputs of all ranks --------------------------------------------------------------------

    def _across_replicas(self, output: Any, rows: int, weight: float) -> Any:
        group = self.assembly.ranks.group(self.assembly.replicas)
        if group.pg is None:
            return output
        found: list[Any] = [None] * group.size
        dist.all_gather_object(found, (output, rows, weight), group=group.pg)
        return stack([o for o, _, _ in found], [r for _, r, _ in found], [w for _, _, w in found])

    def _from_last(self, output: Any) -> Any:
        a = self.assembly
        if a.stage_axis is None:
            return output
        sent = [output]
        dist.broadcast_object_list(sent, src=a.last_rank)
        return sent[0]

    # -- state -----------------------------------------------------------------------------------

    def _whole(self, local: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
        a = self.assembly
        return assemble(a.holdings, local, a.ranks.mesh, a.ranks.rank)

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the last step, clipped if it clipped, by original name."""
        found = self.assembly.parameters
        return self._whole(lambda n: local_gradient(found[n]) if n in found else None)

    def input_gradients(self) -> dict[str, Tensor | None]:
        """Gradients of the float tensors of the last batch, whole; needs `follow_inputs`."""
        a = self.assembly
        mine = [
            {k: v.grad for k, v in part.inputs.items() if isinstance(v, Tensor) and v.requires_grad}
            for part in self._inputs
        ]
        everyone: list[Any] = [mine]
        if a.ranks.mesh.world > 1:
            everyone = [None] * a.ranks.mesh.world
            dist.all_gather_object(everyone, mine)
        out: dict[str, Tensor | None] = {}
        for name in mine[0] if mine else ():
            rows = [self._summed(everyone, place, name) for place in range(a.ranks.mesh.size(a.replicas))]
            out[name] = None if any(r is None for r in rows) else torch.cat([r for r in rows if r is not None])
        return out

    def _summed(self, everyone: Sequence[Any], place: int, name: str) -> Tensor | None:
        """One replica's rows: each stage's part of the gradient, added up."""
        a = self.assembly
        mesh = a.ranks.mesh
        spoken = {*a.replicas, *_named(a.stage_axis)}
        found = []
        for rank, parts in enumerate(everyone):
            here = mesh.coordinates(rank)
            first = all(at == 0 for axis, at in here.items() if axis not in spoken)
            if first and mesh.index(rank, a.replicas) == place:
                found.append([part[name] for part in parts])
        rows = [_added(values) for values in zip(*found)]
        return None if any(r is None for r in rows) else torch.cat([r for r in rows if r is not None])

    def trained(self) -> list[str]:
        """Names of all parameters that an optimizer of some rank updates."""
        mine = [name for name, p in self.assembly.parameters.items() if p.requires_grad]
        everyone: list[Any] = [mine]
        if self.assembly.ranks.mesh.world > 1:
            everyone = [None] * self.assembly.ranks.mesh.world
            dist.all_gather_object(everyone, mine)
        union = {name for names in everyone for name in names}
        return [name for name in self.assembly.holdings if name in union]

    def replica_errors(self) -> dict[str, float]:
        """For each parameter the greatest relative difference between copies of one part."""
        a = self.assembly
        whole = self._whole(lambda n: _local(a.parameters[n]) if n in a.parameters else None)
        mine = {}
        for name, parameter in a.parameters.items():
            part = take(whole[name], a.holdings[name], a.ranks.mesh, a.ranks.rank).double()
            scale = float(part.abs().max()) if part.numel() else 0.0
            error = float((_local(parameter).cpu().double() - part).abs().max()) if part.numel() else 0.0
            mine[name] = error / scale if scale else error
        everyone: list[Any] = [mine]
        if a.ranks.mesh.world > 1:
            everyone = [None] * a.ranks.mesh.world
            dist.all_gather_object(everyone, mine)
        return {n: max(found.get(n, 0.0) for found in everyone) for n in a.holdings}

    def state_dict(self) -> dict[str, Tensor]:
        """The original's state dict: its keys in its order, whole values on the CPU of every rank."""
        a = self.assembly
        whole = self._whole(lambda n: _local(a.parameters[n]) if n in a.parameters else None)
        whole.update(self._whole_buffers())
        for names in a.ties:
            whole.update({name: whole[names[0]] for name in names if names[0] in whole})
        return {key: whole[key] for key in a.keys}

    def _whole_buffers(self) -> dict[str, Tensor]:
        a = self.assembly
        own = {name: value.detach().cpu().clone() for name, value in a.buffers.items()}
        if a.stage_axis is None:
            return own
        found: list[Any] = [None] * a.ranks.mesh.world
        mine = {
            name: value
            for name, value in own.items()
            if (stages := a.buffer_stages.get(name)) is None
            or a.ranks.mesh.index(a.ranks.rank, a.stage_axis) in stages
        }
        dist.all_gather_object(found, mine)
        merged: dict[str, Tensor] = {}
        for values in reversed(found):
            merged.update(values)
        return merged

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over whole values, as `state_dict` gives them; every rank passes the same.

        Raises KeyError naming what is missing or unknown, before anything is changed.
        """
        a = self.assembly
        missing, unknown = set(a.keys) - state.keys(), state.keys() - set(a.keys)
        if missing or unknown:
            raise KeyError(f"missing {sorted(missing)}, unknown {sorted(unknown)}")
        with torch.no_grad():
            for name, parameter in a.parameters.items():
                part = take(state[name], a.holdings[name], a.ranks.mesh, a.ranks.rank)
                _local(parameter).copy_(part)
            for name, buffer in a.buffers.items():
                if name in state:
                    buffer.copy_(state[name])
        reshard(a.sliced)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the state in a folder, whole or not at all; see `archive.save`."""
        archive.save(self, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what a program of any layout saved; see `archive.load`."""
        archive.load(self, path)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by original parameter name: whole tensors, and plain numbers."""
        a = self.assembly
        own = {}
        if self.optimizer is not None:
            own = {n: self.optimizer.state.get(p, {}) for n, p in a.parameters.items()}
        keys = sorted({key for state in own.values() for key in state})
        everyone = gathered(keys, a.ranks.mesh.world)
        out: dict[str, dict[str, Any]] = {}
        for key in sorted({key for keys in everyone for key in keys}):
            for name, value in self._state_entry(own, key).items():
                out.setdefault(name, {})[key] = value
        return out

    def _state_entry(self, own: Mapping[str, Any], key: str) -> dict[str, Any]:
        shapes = {name: tuple(_local(p).shape) for name, p in self.assembly.parameters.items()}

        def local(name: str) -> Tensor | None:
            value = own.get(name, {}).get(key)
            value = _local(value) if isinstance(value, Tensor) else None
            return value if value is not None and tuple(value.shape) == shapes[name] else None

        whole: dict[str, Any] = dict(self._whole(local))
        plain = {
            name: state[key].cpu().clone() if isinstance(state[key], Tensor) else state[key]
            for name, state in own.items()
            if key in state and local(name) is None
        }
        for found in reversed(gathered(plain, self.assembly.ranks.mesh.world)):
            whole.update(found)
        return whole


def _followed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with float tensors as leaves of their own."""
    follow = lambda v: v.detach().clone().requires_grad_()  # noqa: E731
    floats = {k for k, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {k: follow(v) if k in floats else v for k, v in inputs.items()}


def _added(values: Sequence[Tensor | None]) -> Tensor | None:
    there = [value for value in values if value is not None]
    return torch.stack(there).sum(0) if there else None


def _positive(total: float) -> float:
    return total if total > 0 else 1.0


def _named(axis: str | None) -> Iterator[str]:
    if axis is not None:
        yield axis


def _gathered(output: Any) -> Any:
    """The output with split logits made whole; all ranks of their group do this together."""
    from torch.utils import _pytree as pytree

    whole = lambda value: value.gathered() if isinstance(value, ShardedLogits) else value  # noqa: E731
    is_split = lambda value: isinstance(value, ShardedLogits)  # noqa: E731
    return pytree.tree_map(whole, output, is_leaf=is_split)
