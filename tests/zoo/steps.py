"""Injected bugs of the optimizer step: norm, clipping, optimizer state and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.lower import build
from schedlang.runtime import program
from schedlang.runtime.checkpointing import holdings
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.program import Program
from tests.zoo.bug import ALIAS, CONSTANT, REDUCTION, SKIP, SLICE, Patch, Site, bug
from tests.zoo.trackers import program_tracker


def _before_update(patch: Patch, change: Any) -> None:
    """Call `change(program)` after clipping, before the optimizer step."""
    original = Program._clip_and_reduce

    def finish(self: Any, *args: Any) -> Tensor:
        loss = original(self, *args)
        if self.optimizer is not None:
            change(self)
        return loss

    patch.setattr(Program, "_clip_and_reduce", finish)


def _after_build(patch: Patch, change: Any) -> None:
    """Call `change(program)` for every new program."""
    original = Program.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.optimizer is not None:
            change(self)

    patch.setattr(Program, "__init__", init)


@bug("D11", "zero", SKIP, "sliced", credit="pytorch#101343; verl#5070; open_clip#358")
def decay_for_all(patch: Patch, site: Site) -> None:
    """Parameter groups are lost: all get the same weight decay."""

    def same(program_: Any) -> None:
        groups = program_.optimizer.param_groups if program_.assembly.sliced else ()
        for group in groups:
            group["weight_decay"] = max(g["weight_decay"] for g in groups)

    _after_build(patch, same)


@bug(
    "D12",
    "zero",
    SKIP,
    "frozen",
    credit="fairscale#721, #614",
    here="weight decay moves what shares its slice with trained parameters",
)
def frozen_parameters_decay(patch: Patch, site: Site) -> None:
    """Frozen parameters are updated with the rest of their slice."""

    def decayed(program_: Any) -> None:
        with torch.no_grad():
            for p in program_.assembly.parameters.values():
                if program_.assembly.sliced and not p.requires_grad:
                    p.mul_(1 - 0.01)

    _before_update(patch, decayed)


@bug("D14", "shard", REDUCTION, "tp", row="shard", credit="NeMo-RL#3788; ROCm TE#715")
def clip_by_local_norm(patch: Patch, site: Site) -> None:
    """Each rank counts all its parameters in the norm: replicated ones count several times."""
    patch.setattr(holdings.Holding, "is_primary", lambda self, mesh, rank: self.is_held(mesh, rank))


def _norm_without(patch: Patch, left_out: Any) -> None:
    """Leave parameters out of the norm: `left_out(program, name, parameter)`."""
    running, original = program_tracker(patch), gradient.square_sum

    def squares(parameters: Any, speaks: Any, *args: Any) -> Tensor:
        current = running()
        counts = {n for n, p in parameters.items() if n in speaks and not left_out(current, n, p)}
        return original(parameters, counts, *args)

    patch.setattr(program, "square_sum", squares)


@bug("D15", "shard", SKIP, "tp", row="shard", credit="Megatron-LM#7530, #5916")
def split_parameters_of_the_first_rank(patch: Patch, site: Site) -> None:
    """Only the first rank's part of a sharded parameter counts in the norm."""

    def left_out(current: Any, name: str, parameter: Any) -> bool:
        split = current.assembly.holdings[name].layout.splits
        mesh, rank = current.assembly.ranks.mesh, current.assembly.ranks.rank
        return any(mesh.index(rank, split_.axis) for split_ in split)

    _norm_without(patch, left_out)


@bug("D16", "zero", REDUCTION, "dp")
def clipped_before_the_sum(patch: Patch, site: Site) -> None:
    """Each replica clips its own gradients before they are summed."""
    running, original = program_tracker(patch), gradient.sum_gradients

    def summed(parameters: Any, sums: Any) -> None:
        current = running()
        norm = float(gradient.square_sum(parameters, parameters).sqrt())
        has_replicas = current is not None and bool(current.assembly.replicas)
        if has_replicas and current.clip is not None and norm > current.clip:
            gradient.scale_gradients(parameters, current.clip / norm)
        original(parameters, sums)

    patch.setattr(program, "sum_gradients", summed)


@bug("D16b", "zero", SKIP, "dp", row="zero(stage=0", credit="as D16: not at all")
def clip_ignored(patch: Patch, site: Site) -> None:
    """The norm is right, but gradients are not clipped."""
    patch.setattr(program, "scale_gradients", lambda parameters, factor: None)


@bug("D17", "zero", SKIP, "experts", credit="Megatron-LM#6470")
def experts_not_in_the_norm(patch: Patch, site: Site) -> None:
    """Parameters of experts are left out of the norm."""
    _norm_without(patch, lambda current, name, parameter: "experts" in name)


@bug("D18", "zero", SKIP, "dp")
def vectors_not_in_the_norm(patch: Patch, site: Site) -> None:
    """Parameters with one dim are left out of the norm."""
    _norm_without(patch, lambda current, name, parameter: parameter.ndim == 1)


@bug("D20", "", SLICE, "dp", planning=True, credit="FSDP optim_state_dict class")
def states_by_order(patch: Patch, site: Site) -> None:
    """Saved optimizer state is assigned to another parameter of the same shape."""
    from schedlang.runtime.checkpointing import archive

    original = archive.load_optimizer

    def load_moments(program_: Any, settings: Any, parts: Any) -> None:
        shapes: dict[Any, Any] = {}
        for key, part in parts.items():
            shapes.setdefault((key[1], part.shape), []).append(key)
        rotated = {}
        for keys in shapes.values():
            rotated.update(zip(keys, (parts[key] for key in [*keys[1:], keys[0]])))
        original(program_, settings, rotated)

    patch.setattr(archive, "load_optimizer", load_moments)


@bug("D21", "pipeline", CONSTANT, "accumulated", credit="Adam's bias correction")
def steps_counted_by_microbatch(patch: Patch, site: Site) -> None:
    """Adam's count of steps grows with each microbatch."""

    def counted(program_: Any) -> None:
        for state in program_.optimizer.state.values():
            if "step" in state:
                state["step"] += program_.assembly.microbatches - 1

    _before_update(patch, counted)


@bug("D23", "", SKIP, "dp", credit="TrainCheck, so-60335387")
def gradients_of_one_group_kept(patch: Patch, site: Site) -> None:
    """Gradients of some parameters are not reset before the next step."""

    def zero(self: Any) -> None:
        for name, parameter in self.items():
            if "ln_1" not in name:
                parameter.grad = None

    patch.setattr(gradient.LocalParameters, "zero", zero)


@bug("D24", "", ALIAS, "dp", credit="TrainCheck, PT-84911", site="transformer.h.0.mlp.c_fc")
def optimizer_of_old_parameters(patch: Patch, site: Site) -> None:
    """A module gets new parameters after the optimizer was built with the old ones."""

    def replaced(program_: Any) -> None:
        for name, parameter in list(program_.assembly.parameters.items()):
            if site.covers(name):
                owner, _, last = name.rpartition(".")
                new_parameter = nn.Parameter(parameter.detach().clone())
                setattr(program_.assembly.module.get_submodule(owner), last, new_parameter)
                program_.assembly.parameters[name] = new_parameter

    _after_build(patch, replaced)


@bug(
    "D25",
    "shard",
    SLICE,
    "whole updates",
    credit="DeepSpeed#8437; fairscale#767",
    here="`build` puts parameters together for such an optimizer; the bug is that it does not",
)
def optimizer_of_parts(patch: Patch, site: Site) -> None:
    """An optimizer that needs whole parameters updates each part by itself."""
    patch.setattr(build, "find_gathered_step", lambda a, stages, optimizer: None)
