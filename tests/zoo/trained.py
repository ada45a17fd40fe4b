"""Bugs of what is trained, and of compressed sums: lost uses, lost errors, unlike draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from schedlang.passes.lower import build
from schedlang.passes.propagate import sharded_run
from schedlang.runtime.grad_reduction import compressed
from schedlang.runtime.grad_reduction.compressed import Compressor
from schedlang.runtime.low_rank_adapters import AdaptedProjection
from tests.zoo.bug import CONSTANT, DETACH, FREEZE, REDUCTION, SKIP, SLICE, Patch, Site, bug
from tests.zoo.place import rank


def _after_copy(patch: Patch, change: Callable[[nn.Module], Any]) -> None:
    """Something is done to a rank's copy of the model before anything else is."""
    plain = build._local_copy

    def copied(*args: Any, **options: Any) -> nn.Module:
        module: nn.Module = plain(*args, **options)
        change(module)
        return module

    patch.setattr(build, "_local_copy", copied)


def _cut_off(module: nn.Module, where: Callable[[nn.Parameter], bool]) -> None:
    """No gradient passes through the second block's MLP, if all of its parameters are such."""
    block = module.get_submodule("transformer.h.1.mlp")
    if all(map(where, block.parameters())):
        block.register_forward_hook(lambda module, args, out: out.detach())


@bug("D40", "freeze", DETACH, "frozen front")
def frozen_without_passing_on(patch: Patch, site: Site) -> None:
    """A frozen module holds back the gradients of what stands before it."""
    _after_copy(patch, lambda module: _cut_off(module, lambda p: not p.requires_grad))


@bug("D40b", "freeze", SKIP, "frozen front")
def frozen_and_updated(patch: Patch, site: Site) -> None:
    """What is frozen takes a gradient, and is updated."""
    _after_copy(patch, lambda module: module.requires_grad_(True))


@bug("D70", "adapt", REDUCTION, "low rank", planning=True)
def gradient_of_the_whole_matrix(patch: Patch, site: Site) -> None:
    """What of an adapter is whole beside a split weight keeps each rank's part of its gradient."""
    patch.setattr(sharded_run, "_full_adapter_parameters", lambda *_: ())


@bug("D71", "adapt", CONSTANT, "low rank")
def rank_left_out_of_the_factor(patch: Patch, site: Site) -> None:
    """An adapter's result is multiplied by alpha, and not divided by its rank."""

    def scaled(module: nn.Module) -> None:
        for one in module.modules():
            if isinstance(one, AdaptedProjection):
                one.lora_scaling *= 4

    _after_copy(patch, scaled)


@bug("D41", "tie", DETACH, "tied blocks")
def second_use_without_gradient(patch: Patch, site: Site) -> None:
    """Of a parameter that two blocks share only one use gives a gradient."""

    def once(module: nn.Module) -> None:
        first = {id(p) for p in module.get_submodule("transformer.h.0").parameters()}
        _cut_off(module, lambda p: id(p) in first)

    _after_copy(patch, once)


@bug("D42", "untie", CONSTANT, "untied head")
def untied_from_other_values(patch: Patch, site: Site) -> None:
    """What is untied starts from other values than it had."""

    def other(module: nn.Module) -> None:
        weight = module.get_parameter("lm_head.weight")
        if weight is not module.get_parameter("transformer.wte.weight"):
            weight.data.mul_(1.01)

    _after_copy(patch, other)


@bug("D43", "compress", FREEZE, "compressed", credit="Seide et al. 2014")
def error_forgotten(patch: Patch, site: Site) -> None:
    """What a step leaves out is not added to the next one's gradient."""
    patch.setattr(Compressor, "_store_error", lambda self, name, error: None)


@bug("D44", "compress", SLICE, "compressed")
def each_rank_draws_its_own(patch: Patch, site: Site) -> None:
    """Ranks start the power iteration from matrices of their own."""
    plain = compressed.fill_zero_columns

    def started(q: Tensor, *words: object) -> Tensor:
        return plain(q, rank(), *words)

    patch.setattr(compressed, "fill_zero_columns", started)
