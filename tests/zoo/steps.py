"""Bugs of the step itself: the norm, clipping, the optimizer and what it is given."""

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
from tests.zoo.place import running_program


def _before_update(patch: Patch, change: Any) -> None:
    """`change(program)` after clipping, before the optimizer's step."""
    plain = Program._clip_and_reduce

    def finish(self: Any, *args: Any) -> Tensor:
        loss = plain(self, *args)
        if self.optimizer is not None:
            change(self)
        return loss

    patch.setattr(Program, "_clip_and_reduce", finish)


def _after_build(patch: Patch, change: Any) -> None:
    """`change(program)` for every program that is made."""
    plain = Program.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.optimizer is not None:
            change(self)

    patch.setattr(Program, "__init__", init)


@bug("D11", "zero", SKIP, "sliced", credit="pytorch#101343; verl#5070; open_clip#358")
def decay_for_all(patch: Patch, site: Site) -> None:
    """Groups of parameters are lost: all decay alike."""

    def same(made: Any) -> None:
        groups = made.optimizer.param_groups if made.assembly.sliced else ()
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

    def decayed(made: Any) -> None:
        with torch.no_grad():
            for p in made.assembly.parameters.values():
                if made.assembly.sliced and not p.requires_grad:
                    p.mul_(1 - 0.01)

    _before_update(patch, decayed)


@bug("D14", "shard", REDUCTION, "tp", row="shard", credit="NeMo-RL#3788; ROCm TE#715")
def clip_by_local_norm(patch: Patch, site: Site) -> None:
    """Each rank speaks for all it has: parts that several hold count several times."""
    patch.setattr(holdings.Holding, "is_primary", lambda self, mesh, rank: self.is_held(mesh, rank))


def _norm_without(patch: Patch, left_out: Any) -> None:
    """The norm leaves out parameters: `left_out(program, name, parameter)`."""
    at_work, plain = running_program(patch), gradient.square_sum

    def squares(held: Any, speaks: Any, *where: Any) -> Tensor:
        now = at_work()
        counts = {n for n, p in held.items() if n in speaks and not left_out(now, n, p)}
        return plain(held, counts, *where)

    patch.setattr(program, "square_sum", squares)


@bug("D15", "shard", SKIP, "tp", row="shard", credit="Megatron-LM#7530, #5916")
def split_parameters_of_the_first_rank(patch: Patch, site: Site) -> None:
    """Of a split parameter only the first rank's part counts in the norm."""

    def left_out(now: Any, name: str, parameter: Any) -> bool:
        split = now.assembly.holdings[name].layout.splits
        mesh, rank = now.assembly.ranks.mesh, now.assembly.ranks.rank
        return any(mesh.index(rank, one.axis) for one in split)

    _norm_without(patch, left_out)


@bug("D16", "zero", REDUCTION, "dp")
def clipped_before_the_sum(patch: Patch, site: Site) -> None:
    """Each replica clips its own gradients, and then they are summed."""
    at_work, plain = running_program(patch), gradient.sum_gradients

    def summed(held: Any, sums: Any) -> None:
        now = at_work()
        norm = float(gradient.square_sum(held, held).sqrt())
        apart = now is not None and bool(now.assembly.replicas)
        if apart and now.clip is not None and norm > now.clip:
            gradient.scale_gradients(held, now.clip / norm)
        plain(held, sums)

    patch.setattr(program, "sum_gradients", summed)


@bug("D16b", "zero", SKIP, "dp", row="zero(stage=0", credit="as D16: not at all")
def clip_ignored(patch: Patch, site: Site) -> None:
    """The norm is right, and nobody is bounded by it."""
    patch.setattr(program, "scale_gradients", lambda parameters, factor: None)


@bug("D17", "zero", SKIP, "experts", credit="Megatron-LM#6470")
def experts_not_in_the_norm(patch: Patch, site: Site) -> None:
    """The parameters of experts count nothing in the norm."""
    _norm_without(patch, lambda now, name, parameter: "experts" in name)


@bug("D18", "zero", SKIP, "dp")
def vectors_not_in_the_norm(patch: Patch, site: Site) -> None:
    """Parameters of one dim count nothing in the norm."""
    _norm_without(patch, lambda now, name, parameter: parameter.ndim == 1)


@bug("D20", "", SLICE, "dp", planning=True, credit="FSDP optim_state_dict class")
def states_by_order(patch: Patch, site: Site) -> None:
    """A saved state of the optimizer is given to another parameter of the same shape."""
    from schedlang.runtime.checkpointing import archive

    plain = archive.load_optimizer

    def load_moments(made: Any, told: Any, parts: Any) -> None:
        shapes: dict[Any, Any] = {}
        for key, part in parts.items():
            shapes.setdefault((key[1], part.shape), []).append(key)
        turned = {}
        for keys in shapes.values():
            turned.update(zip(keys, (parts[key] for key in [*keys[1:], keys[0]])))
        plain(made, told, turned)

    patch.setattr(archive, "load_optimizer", load_moments)


@bug("D21", "pipeline", CONSTANT, "accumulated", credit="Adam's bias correction")
def steps_counted_by_microbatch(patch: Patch, site: Site) -> None:
    """Adam's count of steps grows with each microbatch."""

    def counted(made: Any) -> None:
        for state in made.optimizer.state.values():
            if "step" in state:
                state["step"] += made.assembly.microbatches - 1

    _before_update(patch, counted)


@bug("D23", "", SKIP, "dp", credit="TrainCheck, so-60335387")
def gradients_of_one_group_kept(patch: Patch, site: Site) -> None:
    """Gradients of some parameters are not set back before the next step."""

    def zero(self: Any) -> None:
        for name, parameter in self.items():
            if "ln_1" not in name:
                parameter.grad = None

    patch.setattr(gradient.LocalParameters, "zero", zero)


@bug("D24", "", ALIAS, "dp", credit="TrainCheck, PT-84911", site="transformer.h.0.mlp.c_fc")
def optimizer_of_old_parameters(patch: Patch, site: Site) -> None:
    """A module is given new parameters after the optimizer has taken the old."""

    def replaced(made: Any) -> None:
        for name, parameter in list(made.assembly.parameters.items()):
            if site.covers(name):
                owner, _, last = name.rpartition(".")
                new = nn.Parameter(parameter.detach().clone())
                setattr(made.assembly.module.get_submodule(owner), last, new)
                made.assembly.parameters[name] = new

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
    patch.setattr(build, "find_gathered_step", lambda a, staged, optimizer: None)
