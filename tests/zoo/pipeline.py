"""Bugs of the pipeline: what crosses between stages, and what each stage is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from schedlang.passes.lower import build
from schedlang.runtime import batch as parts
from schedlang.runtime import program
from schedlang.runtime.checkpointing import holdings
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.pipeline import p2p, stage, step
from schedlang.runtime.program import Program
from schedlang.runtime.propagation.trace import LabelRule
from schedlang.runtime.training_mode import TrainingMode
from tests.zoo.bug import (
    ALIAS,
    ARGUMENT,
    CONSTANT,
    DETACH,
    FREEZE,
    GROUP,
    REDUCTION,
    SKIP,
    SLICE,
    Patch,
    Site,
    bug,
)
from tests.zoo.heads import without
from tests.zoo.place import running_program, stage_of


@bug("P01", "pipeline_split", REDUCTION, "pp", credit="Megatron-LM#656; piper#13")
def ties_not_summed(patch: Patch, site: Site) -> None:
    """The two stages of a tied weight drift apart."""
    without(patch, "tied", site.covers)


@bug(
    "P02",
    "zero",
    REDUCTION,
    "pp, dp",
    credit="Megatron-LM#844",
    here="ties stay whole on all replicas here; their sum over replicas reaches one slice only",
)
def ties_summed_slice_by_slice(patch: Patch, site: Site) -> None:
    """Each replica reduces its own slice of a tied gradient, and then slices are mixed."""
    plain = gradient.sum_gradients

    def mixed(held: Any, sums: Any) -> None:
        tied = {n for one in sums if one.kind == "tied" for n in one.names}
        for one in sums:
            before = {n: gradient.local_gradient(held[n]).clone() for n in tied & set(one.names)}
            plain(held, [one])
            for name, own in before.items() if one.kind == "replicas" else ():
                whole = gradient.local_gradient(held[name])
                mine = whole.chunk(one.group.size)[one.group.rank].clone()
                whole.copy_(own)
                whole.chunk(one.group.size)[one.group.rank].copy_(mine)

    patch.setattr(program, "sum_gradients", mixed)


@bug("P03", "pipeline_split", REDUCTION, "pp")
def ties_summed_twice(patch: Patch, site: Site) -> None:
    """The reduction over a tie runs once too often."""
    plain = gradient.sum_gradients

    def more(held: Any, sums: Any) -> None:
        plain(held, [*sums, *(one for one in sums if one.kind == "tied")])

    patch.setattr(program, "sum_gradients", more)


@bug("P04", "pipeline_split", REDUCTION, "pp", credit="Megatron-LM#7227")
def norm_counts_ties_twice(patch: Patch, site: Site) -> None:
    """Every stage that holds a tied weight adds it to the norm."""
    plain = holdings.Holding.is_primary

    def primary(self: Any, mesh: Any, rank: int) -> bool:
        if self.stages is None or len(self.stages) < 2 or not self.is_held(mesh, rank):
            return plain(self, mesh, rank)
        alone = replace(self, stages=frozenset([mesh.index(rank, self.axis)]))
        return plain(alone, mesh, rank)

    patch.setattr(holdings.Holding, "is_primary", primary)


@bug("P05", "pipeline", GROUP, "pp", "micro", credit="transformers#34191, #35203")
def mean_of_microbatch_means(patch: Patch, site: Site) -> None:
    """Each microbatch weighs the same, however many of its labels count."""
    patch.setattr(LabelRule, "count_on_device", lambda self, batch: 1.0)


@bug("P09", "pipeline", SKIP, "pp, ragged", credit="pytorch#126600")
def rows_beyond_equal_parts_dropped(patch: Patch, site: Site) -> None:
    """A batch that microbatches do not divide loses its last rows."""

    def shares(count: int, parts_: int) -> list[range]:
        each = count // parts_
        return [range(k * each, (k + 1) * each) for k in range(parts_)]

    patch.setattr(parts, "split_rows", shares)


@bug("P09b", "pipeline", SKIP, "pp", credit="as P09, in backward")
def last_microbatch_dropped(patch: Patch, site: Site) -> None:
    """The gradient of the last microbatch never arrives."""
    plain = Program._run

    def run(self: Any, given: Any, scale: Any, *, train: bool) -> Any:
        if scale is not None and len(scale) > 1:
            scale = [*scale[:-1], 0.0]
        return plain(self, given, scale, train=train)

    patch.setattr(Program, "_run", run)


@bug(
    "P10", "pipeline_split", ARGUMENT, "pp", credit="NeMo-Automodel#3759; PyTorch kwargs_chunk_spec"
)
def mask_only_for_the_first_stage(patch: Patch, site: Site) -> None:
    """Later stages run without the padding mask: their default is used."""
    plain = stage.Stage.forward

    def forward(self: Any, batch: Any, received: Any, train: bool = True) -> Any:
        if self.index:
            mask = torch.ones_like(batch["attention_mask"])
            batch = {**batch, "attention_mask": mask}
        return plain(self, batch, received, train)

    patch.setattr(stage.Stage, "forward", forward)


@bug("P12", "pipeline_split", SLICE, "pp, by layer", credit="transformers#24381; Megatron-LM#1583")
def layers_counted_from_the_stage(patch: Patch, site: Site) -> None:
    """A layer's number starts again at each stage: what depends on it is that of another layer."""
    plain = build._local_copy

    def copied(plan: Any, holdings: Any, ranks: Any, *more: Any) -> Any:
        module = plain(plan, holdings, ranks, *more)
        if "pp" in plan.mesh.sizes and plan.mesh.index(ranks.rank, "pp") > 0:
            layers = module.transformer.h
            for k in range(len(layers) // 2, len(layers)):
                layers[k].attn.scaling *= (k + 1) / (k + 1 - len(layers) // 2)
        return module

    patch.setattr(build, "_local_copy", copied)


def _sent_back(patch: Patch, change: Any) -> None:
    """Gradients between stages as `change(step, source, target, values)` has them."""
    plain = step.PipelineStep.receive

    def collect(self: Any, name: Any) -> Any:
        values = plain(self, name)
        return change(self, name.source, name.target, values) if name.back else values

    patch.setattr(step.PipelineStep, "receive", collect)


@bug("P13", "pipeline_split", DETACH, "pp")
def boundary_detached(patch: Patch, site: Site) -> None:
    """No gradient goes back to the stage before."""
    _sent_back(patch, lambda step, source, target, values: list(map(_zeros, values)))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@bug("P14", "pipeline_split", SLICE, "pp", row="pipeline", credit="pytorch PR#140981")
def gradient_of_another_microbatch(patch: Patch, site: Site) -> None:
    """A gradient that is cached on its way back is taken for that of the next microbatch."""
    seen: dict[Any, Any] = {}

    def cached(at: Any, source: int, target: int, values: Any) -> Any:
        key = (id(at), source, target)
        before = seen.get(key, values)
        seen[key] = [value.clone() for value in values]
        same = all(a.shape == b.shape for a, b in zip(before, values))
        return before if same else values

    _sent_back(patch, cached)


@bug("P15", "pipeline_split", ALIAS, "pp, all forward", row="pipeline", credit="DeepSpeed#4708")
def received_into_one_buffer(patch: Patch, site: Site) -> None:
    """What is received overwrites what an earlier microbatch still needs for its backward."""
    plain, buffers = p2p.PeerChannel.take, dict[Any, Tensor]()

    def take(self: Any, key: Any) -> Any:
        if key.back:
            return plain(self, key)
        out = []
        for place, got in enumerate(plain(self, key)):
            slot = (key.source, key.target, place, got.shape, got.dtype)
            buffer = buffers.setdefault(slot, got.clone())
            buffer.copy_(got)
            out.append(buffer.data)
        return out

    patch.setattr(p2p.PeerChannel, "take", take)


@bug("P17", "pipeline_split", CONSTANT, "pp")
def boundary_in_bfloat16(patch: Patch, site: Site) -> None:
    """What goes between stages is rounded on its way."""
    plain = step.PipelineStep.receive

    def collect(self: Any, name: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return [
                v.to(torch.bfloat16).to(v.dtype) if v.is_floating_point() else v
                for v in plain(self, name)
            ]

    patch.setattr(step.PipelineStep, "receive", collect)


@bug("P18", "pipeline_split", SKIP, "pp", credit="NeMo#14152, #6449")
def later_stages_stay_in_eval(patch: Patch, site: Site) -> None:
    """After an evaluation only the first stage is put back into training mode."""
    plain, at_work = TrainingMode.train, running_program(patch)

    def on(self: Any) -> None:
        now = at_work()
        if now is None or not stage_of(now.assembly):
            plain(self)

    patch.setattr(TrainingMode, "train", on)


@bug(
    "P19",
    "pipeline",
    FREEZE,
    "pp",
    row="none",
    credit="PipeDream, weight versions",
    here="this order updates at its end; the weights are those of the step before",
)
def stale_weights(patch: Patch, site: Site) -> None:
    """Forward and backward run on the weights of the step before."""
    plain_run, plain_sum = Program._run, gradient.sum_gradients
    kept: dict[int, list[Tensor]] = {}
    swapped: list[tuple[Tensor, Tensor]] = []

    def run(self: Any, given: Any, scale: Any, *, train: bool) -> Any:
        if train:
            held = [p for p in self.assembly.parameters.values() if site.covers("")]
            now = [p.detach().clone() for p in held]
            for p, old in zip(held, kept.get(id(self), now)):
                p.data.copy_(old)
            swapped[:] = list(zip(held, now))
            kept[id(self)] = now
        return plain_run(self, given, scale, train=train)

    def back(held: Any, sums: Any) -> None:
        for p, now in swapped:
            p.data.copy_(now)
        swapped.clear()
        plain_sum(held, sums)

    patch.setattr(Program, "_run", run)
    patch.setattr(program, "sum_gradients", back)


@bug("P21", "pipeline_split", ALIAS, "skipping")
def sent_tensor_written_into(patch: Patch, site: Site) -> None:
    """A stage writes into a tensor that is being sent to another."""

    def capture(self: Any, unit: int, output: Any, made: Any, edges: Any) -> None:
        for k, leaf in enumerate(stage.pytree.tree_leaves(output)):
            if (unit, k) in self.sent_tokens:
                if leaf.requires_grad:
                    edges[(unit, k)] = stage.get_gradient_edge(leaf)
                made[(unit, k)] = leaf.detach()

    patch.setattr(stage.Stage, "_capture", capture)


@bug("P22", "pipeline_split", SKIP, "skipping", credit="pytorch#184361")
def skip_not_routed(patch: Patch, site: Site) -> None:
    """A value that skips over a stage is made up where it is needed."""
    plain = stage.Stage.forward

    def forward(self: Any, batch: Any, received: Any, train: bool = True) -> Any:
        far = {t for s, tokens in self.incoming.items() if s < self.index - 1 for t in tokens}
        received = {t: _zeros(v) if t in far else v for t, v in received.items()}
        return plain(self, batch, received, train)

    patch.setattr(stage.Stage, "forward", forward)


@bug("P23", "pipeline", SKIP, "pp")
def loss_of_the_last_microbatch(patch: Patch, site: Site) -> None:
    """The loss that is reported is that of the last microbatch."""
    plain = Program._clip_and_reduce

    def finish(self: Any, results: Any, weights: Any, total: float) -> Tensor:
        if len(results) < 2:
            return plain(self, results, weights, total)
        return plain(self, {0: results[max(results)]}, [sum(weights)], total)

    patch.setattr(Program, "_clip_and_reduce", finish)


@bug(
    "P24",
    "pipeline",
    SLICE,
    "chunks",
    row="pipeline",
    here="a stage runs the other chunk's modules, and keeps its own messages",
)
def chunks_in_the_order_of_ranks(patch: Patch, site: Site) -> None:
    """The two chunks of a rank run in each other's place."""
    plain = build.build_pipeline

    def swapped(plan: Any, module: Any, ranks: Any, prepared: Any, *more: Any) -> Any:
        made = plain(plan, module, ranks, prepared, *more)
        staged = prepared.staged
        trunk = [k for k, name in enumerate(staged.cut.graph.units) if name in staged.trunk]
        mine = [k for k in trunk if staged.cut.stage_of[k] in made.stages]
        switch = next(iter(made.stages.values()), None)
        if switch is None or switch.whole or len(made.stages) < 2:
            return made
        others = dict(zip(mine, [*mine[len(mine) // 2 :], *mine[: len(mine) // 2]]))
        modules = switch.switch.modules
        for one in made.stages.values():
            _rerouted(one, others, modules)
        return made

    patch.setattr(build, "build_pipeline", swapped)


def _rerouted(one: Any, others: dict[int, int], modules: Any) -> None:
    """Let a stage call other modules in the place of its units."""
    plain = one.switch.using

    def using(handler: Any) -> Any:
        def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
            real = modules[others[unit]]._call_impl if unit in others else original
            return handler(unit, real, args, kwargs)

        return plain(handle)

    one.switch = _Switch(one.switch, using)


class _Switch:
    """A switch with another `using`."""

    def __init__(self, plain: Any, using: Any) -> None:
        self.plain, self.using, self.modules = plain, using, plain.modules


@bug(
    "P25", "pipeline_split", SKIP, "pp, rotary", credit="pytorch#184361; torchtitan set_determinism"
)
def tables_of_later_stages_empty(patch: Patch, site: Site) -> None:
    """Buffers that no state dict holds are empty on all stages but the first."""
    plain = build._local_copy

    def copied(plan: Any, holdings: Any, ranks: Any, *more: Any) -> Any:
        module = plain(plan, holdings, ranks, *more)
        if "pp" in plan.mesh.sizes and plan.mesh.index(ranks.rank, "pp") > 0:
            for name, buffer in module.named_buffers():
                if name not in plan.model.model.state_dict():
                    buffer.zero_()
        return module

    patch.setattr(build, "_local_copy", copied)


@bug("P34", "pipeline_split", SKIP, "dropping again")
def draws_of_other_stages_not_counted(patch: Patch, site: Site) -> None:
    """What a stubbed unit would have drawn is not counted: its modules draw their first again."""
    patch.setattr(stage, "skip_calls", lambda where, times: None)


@bug("P35", "pipeline_split", DETACH, "heard")
def hooks_told_without_gradient(patch: Patch, site: Site) -> None:
    """What hooks inside of a unit are told goes to its reader, and no gradient comes back."""
    plain = stage.Stage._send

    def send(self: Any, token: Any, leaf: Any, made: Any, edges: Any) -> None:
        plain(self, token, leaf.detach() if token[1] < 0 else leaf, made, edges)

    patch.setattr(stage.Stage, "_send", send)
