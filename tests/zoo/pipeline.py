"""Injected bugs of pipeline parallelism: transfers between stages, and the stages themselves."""

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
from schedlang.runtime.propagation.label_flow import LabelRule
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
from tests.zoo.heads import drop_from_sums
from tests.zoo.trackers import program_tracker, stage_of


@bug("P01", "pipeline_split", REDUCTION, "pp", credit="Megatron-LM#656; piper#13")
def ties_not_summed(patch: Patch, site: Site) -> None:
    """The two stages of a tied weight drift apart."""
    drop_from_sums(patch, "tied", site.covers)


@bug(
    "P02",
    "zero",
    REDUCTION,
    "pp, dp",
    credit="Megatron-LM#844",
    here="ties stay whole on all replicas here; their sum over replicas reaches one slice only",
)
def ties_summed_slice_by_slice(patch: Patch, site: Site) -> None:
    """Each replica reduces its own slice of a tied gradient, so that slices disagree."""
    original = gradient.sum_gradients

    def mixed(parameters: Any, sums: Any) -> None:
        tied = {n for reduction in sums if reduction.kind == "tied" for n in reduction.names}
        for reduction in sums:
            old_grads = {
                n: gradient.local_gradient(parameters[n]).clone()
                for n in tied & set(reduction.names)
            }
            original(parameters, [reduction])
            for name, old_grad in old_grads.items() if reduction.kind == "replicas" else ():
                full_grad = gradient.local_gradient(parameters[name])
                local_slice = full_grad.chunk(reduction.group.size)[reduction.group.rank].clone()
                full_grad.copy_(old_grad)
                full_grad.chunk(reduction.group.size)[reduction.group.rank].copy_(local_slice)

    patch.setattr(program, "sum_gradients", mixed)


@bug("P03", "pipeline_split", REDUCTION, "pp")
def ties_summed_twice(patch: Patch, site: Site) -> None:
    """The reduction over a tie runs once too often."""
    original = gradient.sum_gradients

    def more(parameters: Any, sums: Any) -> None:
        original(
            parameters, [*sums, *(reduction for reduction in sums if reduction.kind == "tied")]
        )

    patch.setattr(program, "sum_gradients", more)


@bug("P04", "pipeline_split", REDUCTION, "pp", credit="Megatron-LM#7227")
def norm_counts_ties_twice(patch: Patch, site: Site) -> None:
    """Every stage that holds a tied weight adds it to the norm."""
    original = holdings.Holding.is_primary

    def primary(self: Any, mesh: Any, rank: int) -> bool:
        if self.stages is None or len(self.stages) < 2 or not self.is_held(mesh, rank):
            return original(self, mesh, rank)
        one_stage = replace(self, stages=frozenset([mesh.index(rank, self.axis)]))
        return original(one_stage, mesh, rank)

    patch.setattr(holdings.Holding, "is_primary", primary)


@bug("P05", "pipeline", GROUP, "pp", "micro", credit="transformers#34191, #35203")
def mean_of_microbatch_means(patch: Patch, site: Site) -> None:
    """Each microbatch weighs the same, however many of its labels count."""
    patch.setattr(LabelRule, "count_on_device", lambda self, batch: 1.0)


@bug("P09", "pipeline", SKIP, "pp, ragged", credit="pytorch#126600")
def remainder_rows_dropped(patch: Patch, site: Site) -> None:
    """If microbatches do not divide the batch, its last rows are dropped."""

    def shares(count: int, parts_count: int) -> list[range]:
        size = count // parts_count
        return [range(k * size, (k + 1) * size) for k in range(parts_count)]

    patch.setattr(parts, "split_rows", shares)


@bug("P09b", "pipeline", SKIP, "pp", credit="as P09, in backward")
def last_microbatch_dropped(patch: Patch, site: Site) -> None:
    """The gradient of the last microbatch never arrives."""
    original = Program._run

    def run(self: Any, inputs: Any, scale: Any, *, train: bool) -> Any:
        if scale is not None and len(scale) > 1:
            scale = [*scale[:-1], 0.0]
        return original(self, inputs, scale, train=train)

    patch.setattr(Program, "_run", run)


@bug(
    "P10", "pipeline_split", ARGUMENT, "pp", credit="NeMo-Automodel#3759; PyTorch kwargs_chunk_spec"
)
def mask_only_for_the_first_stage(patch: Patch, site: Site) -> None:
    """Later stages run without the padding mask: their default is used."""
    original = stage.Stage.forward

    def forward(self: Any, batch: Any, received: Any, train: bool = True) -> Any:
        if self.index:
            mask = torch.ones_like(batch["attention_mask"])
            batch = {**batch, "attention_mask": mask}
        return original(self, batch, received, train)

    patch.setattr(stage.Stage, "forward", forward)


@bug("P12", "pipeline_split", SLICE, "pp, by layer", credit="transformers#24381; Megatron-LM#1583")
def layers_counted_from_the_stage(patch: Patch, site: Site) -> None:
    """Layer indices restart at each stage, so that later stages use those of other layers."""
    original = build._local_copy

    def copied(plan: Any, holdings: Any, ranks: Any, *args: Any) -> Any:
        module = original(plan, holdings, ranks, *args)
        if "pp" in plan.mesh.sizes and plan.mesh.index(ranks.rank, "pp") > 0:
            layers = module.transformer.h
            for k in range(len(layers) // 2, len(layers)):
                layers[k].attn.scaling *= (k + 1) / (k + 1 - len(layers) // 2)
        return module

    patch.setattr(build, "_local_copy", copied)


def _change_received_grads(patch: Patch, change: Any) -> None:
    """Replace gradients between stages by `change(step, source, target, values)`."""
    original = step.PipelineStep.receive

    def collect(self: Any, name: Any) -> Any:
        values = original(self, name)
        return change(self, name.source, name.target, values) if name.back else values

    patch.setattr(step.PipelineStep, "receive", collect)


@bug("P13", "pipeline_split", DETACH, "pp")
def boundary_detached(patch: Patch, site: Site) -> None:
    """No gradient goes back to the stage before."""
    _change_received_grads(
        patch, lambda step, source, target, values: list(map(_zeros_like, values))
    )


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@bug("P14", "pipeline_split", SLICE, "pp", row="pipeline", credit="pytorch PR#140981")
def gradient_of_another_microbatch(patch: Patch, site: Site) -> None:
    """A cached gradient between stages is used for the next microbatch."""
    cache: dict[Any, Any] = {}

    def cached(pipeline_step: Any, source: int, target: int, values: Any) -> Any:
        key = (id(pipeline_step), source, target)
        previous = cache.get(key, values)
        cache[key] = [value.clone() for value in values]
        same_shapes = all(a.shape == b.shape for a, b in zip(previous, values))
        return previous if same_shapes else values

    _change_received_grads(patch, cached)


@bug("P15", "pipeline_split", ALIAS, "pp, all forward", row="pipeline", credit="DeepSpeed#4708")
def received_into_one_buffer(patch: Patch, site: Site) -> None:
    """A received tensor overwrites one that an earlier microbatch needs for its backward."""
    original, buffers = p2p.PeerChannel.take, dict[Any, Tensor]()

    def take(self: Any, key: Any) -> Any:
        if key.back:
            return original(self, key)
        results = []
        for index, tensor in enumerate(original(self, key)):
            slot = (key.source, key.target, index, tensor.shape, tensor.dtype)
            buffer = buffers.setdefault(slot, tensor.clone())
            buffer.copy_(tensor)
            results.append(buffer.data)
        return results

    patch.setattr(p2p.PeerChannel, "take", take)


@bug("P17", "pipeline_split", CONSTANT, "pp")
def boundary_in_bfloat16(patch: Patch, site: Site) -> None:
    """Tensors between stages are rounded to bfloat16."""
    original = step.PipelineStep.receive

    def collect(self: Any, name: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return [
                v.to(torch.bfloat16).to(v.dtype) if v.is_floating_point() else v
                for v in original(self, name)
            ]

    patch.setattr(step.PipelineStep, "receive", collect)


@bug("P18", "pipeline_split", SKIP, "pp", credit="NeMo#14152, #6449")
def later_stages_stay_in_eval(patch: Patch, site: Site) -> None:
    """After an evaluation only the first stage is put back into training mode."""
    original, running = TrainingMode.train, program_tracker(patch)

    def on(self: Any) -> None:
        current = running()
        if current is None or not stage_of(current.assembly):
            original(self)

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
    original_run, original_sum = Program._run, gradient.sum_gradients
    old_weights: dict[int, list[Tensor]] = {}
    swapped: list[tuple[Tensor, Tensor]] = []

    def run(self: Any, inputs: Any, scale: Any, *, train: bool) -> Any:
        if train:
            parameters = [p for p in self.assembly.parameters.values() if site.covers("")]
            current_weights = [p.detach().clone() for p in parameters]
            for p, old_weight in zip(parameters, old_weights.get(id(self), current_weights)):
                p.data.copy_(old_weight)
            swapped[:] = list(zip(parameters, current_weights))
            old_weights[id(self)] = current_weights
        return original_run(self, inputs, scale, train=train)

    def back(parameters: Any, sums: Any) -> None:
        for p, current_weight in swapped:
            p.data.copy_(current_weight)
        swapped.clear()
        original_sum(parameters, sums)

    patch.setattr(Program, "_run", run)
    patch.setattr(program, "sum_gradients", back)


@bug("P21", "pipeline_split", ALIAS, "skipping")
def sent_tensor_overwritten(patch: Patch, site: Site) -> None:
    """A stage writes into a tensor that is being sent to another."""

    def capture(self: Any, unit: int, output: Any, captured: Any, edges: Any) -> None:
        for k, leaf in enumerate(stage.pytree.tree_leaves(output)):
            if (unit, k) in self.sent_tokens:
                if leaf.requires_grad:
                    edges[(unit, k)] = stage.get_gradient_edge(leaf)
                captured[(unit, k)] = leaf.detach()

    patch.setattr(stage.Stage, "_capture", capture)


@bug("P22", "pipeline_split", SKIP, "skipping", credit="pytorch#184361")
def skip_not_routed(patch: Patch, site: Site) -> None:
    """A value that skips a stage is replaced by zeros on the receiving stage."""
    original = stage.Stage.forward

    def forward(self: Any, batch: Any, received: Any, train: bool = True) -> Any:
        skipping = {t for s, tokens in self.incoming.items() if s < self.index - 1 for t in tokens}
        received = {t: _zeros_like(v) if t in skipping else v for t, v in received.items()}
        return original(self, batch, received, train)

    patch.setattr(stage.Stage, "forward", forward)


@bug("P23", "pipeline", SKIP, "pp")
def loss_of_the_last_microbatch(patch: Patch, site: Site) -> None:
    """The reported loss is that of the last microbatch only."""
    original = Program._clip_and_reduce

    def finish(self: Any, results: Any, weights: Any, total: float) -> Tensor:
        if len(results) < 2:
            return original(self, results, weights, total)
        return original(self, {0: results[max(results)]}, [sum(weights)], total)

    patch.setattr(Program, "_clip_and_reduce", finish)


@bug(
    "P24",
    "pipeline",
    SLICE,
    "chunks",
    row="pipeline",
    here="a stage runs the other chunk's modules, and keeps its own messages",
)
def chunks_swapped(patch: Patch, site: Site) -> None:
    """The two chunks of a rank are swapped."""
    original = build.build_pipeline

    def swapped(plan: Any, module: Any, ranks: Any, prepared: Any, *args: Any) -> Any:
        pipeline = original(plan, module, ranks, prepared, *args)
        staged = prepared.staged
        trunk = [k for k, name in enumerate(staged.cut.graph.units) if name in staged.trunk]
        local_units = [k for k in trunk if staged.cut.stage_of[k] in pipeline.stages]
        switch = next(iter(pipeline.stages.values()), None)
        if switch is None or switch.whole or len(pipeline.stages) < 2:
            return pipeline
        swapped_units = dict(
            zip(
                local_units,
                [*local_units[len(local_units) // 2 :], *local_units[: len(local_units) // 2]],
            )
        )
        modules = switch.switch.modules
        for stage_ in pipeline.stages.values():
            _reroute_units(stage_, swapped_units, modules)
        return pipeline

    patch.setattr(build, "build_pipeline", swapped)


def _reroute_units(target_stage: Any, swapped_units: dict[int, int], modules: Any) -> None:
    """Make a stage call other modules in place of its units."""
    old_using = target_stage.switch.using

    def using(handler: Any) -> Any:
        def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
            real = modules[swapped_units[unit]]._call_impl if unit in swapped_units else original
            return handler(unit, real, args, kwargs)

        return old_using(handle)

    target_stage.switch = _SwitchWrapper(target_stage.switch, using)


class _SwitchWrapper:
    """A switch whose `using` is replaced."""

    def __init__(self, switch: Any, using: Any) -> None:
        self.plain, self.using, self.modules = switch, using, switch.modules


@bug(
    "P25", "pipeline_split", SKIP, "pp, rotary", credit="pytorch#184361; torchtitan set_determinism"
)
def tables_of_later_stages_empty(patch: Patch, site: Site) -> None:
    """Buffers that no state dict holds are empty on all stages but the first."""
    original = build._local_copy

    def copied(plan: Any, holdings: Any, ranks: Any, *args: Any) -> Any:
        module = original(plan, holdings, ranks, *args)
        if "pp" in plan.mesh.sizes and plan.mesh.index(ranks.rank, "pp") > 0:
            for name, buffer in module.named_buffers():
                if name not in plan.model.model.state_dict():
                    buffer.zero_()
        return module

    patch.setattr(build, "_local_copy", copied)


@bug("P34", "pipeline_split", SKIP, "dropping again")
def draws_of_other_stages_not_counted(patch: Patch, site: Site) -> None:
    """Random draws of units on other stages are not counted: modules repeat their first draws."""
    patch.setattr(stage, "skip_calls", lambda site_name, times: None)


@bug("P35", "pipeline_split", DETACH, "heard")
def hook_outputs_detached(patch: Patch, site: Site) -> None:
    """Outputs that hooks recorded inside a unit are sent on, but no gradient comes back."""
    original = stage.Stage._send

    def send(self: Any, token: Any, leaf: Any, sent: Any, edges: Any) -> None:
        original(self, token, leaf.detach() if token[1] < 0 else leaf, sent, edges)

    patch.setattr(stage.Stage, "_send", send)
