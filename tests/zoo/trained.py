"""Injected bugs of freezing, adapters, tying and compressed gradients."""

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
from tests.zoo.trackers import rank


def _after_copy(patch: Patch, change: Callable[[nn.Module], Any]) -> None:
    """Call `change(module)` on each rank's copy of the model as soon as it exists."""
    original = build._local_copy

    def copied(*args: Any, **options: Any) -> nn.Module:
        module: nn.Module = original(*args, **options)
        change(module)
        return module

    patch.setattr(build, "_local_copy", copied)


def _detach_block(module: nn.Module, condition: Callable[[nn.Parameter], bool]) -> None:
    """Detach the output of the second block's MLP if the condition holds for all its parameters."""
    block = module.get_submodule("transformer.h.1.mlp")
    if all(map(condition, block.parameters())):
        block.register_forward_hook(lambda module, args, output: output.detach())


@bug("D40", "freeze", DETACH, "frozen front")
def frozen_blocks_gradient(patch: Patch, site: Site) -> None:
    """A frozen module stops the gradients of earlier modules."""
    _after_copy(patch, lambda module: _detach_block(module, lambda p: not p.requires_grad))


@bug("D40b", "freeze", SKIP, "frozen front")
def frozen_and_updated(patch: Patch, site: Site) -> None:
    """Frozen parameters get gradients and are updated."""
    _after_copy(patch, lambda module: module.requires_grad_(True))


@bug("D70", "adapt", REDUCTION, "low rank", planning=True)
def full_adapter_not_summed(patch: Patch, site: Site) -> None:
    """Replicated adapter parameters beside a split weight keep each rank's partial gradient."""
    patch.setattr(sharded_run, "_full_adapter_parameters", lambda *_: ())


@bug("D71", "adapt", CONSTANT, "low rank")
def factor_without_rank(patch: Patch, site: Site) -> None:
    """An adapter's result is multiplied by alpha, and not divided by its rank."""

    def scaled(module: nn.Module) -> None:
        for submodule in module.modules():
            if isinstance(submodule, AdaptedProjection):
                submodule.lora_scaling *= 4

    _after_copy(patch, scaled)


@bug("D41", "tie", DETACH, "tied blocks")
def second_use_without_gradient(patch: Patch, site: Site) -> None:
    """Only one use of a shared parameter contributes a gradient."""

    def once(module: nn.Module) -> None:
        first_ids = {id(p) for p in module.get_submodule("transformer.h.0").parameters()}
        _detach_block(module, lambda p: id(p) in first_ids)

    _after_copy(patch, once)


@bug("D42", "untie", CONSTANT, "untied head")
def untied_from_other_values(patch: Patch, site: Site) -> None:
    """An untied parameter starts from other values."""

    def other(module: nn.Module) -> None:
        weight = module.get_parameter("lm_head.weight")
        if weight is not module.get_parameter("transformer.wte.weight"):
            weight.data.mul_(1.01)

    _after_copy(patch, other)


@bug("D43", "compress", FREEZE, "compressed", credit="Seide et al. 2014")
def error_forgotten(patch: Patch, site: Site) -> None:
    """The compression error of a step is not added to the next gradient."""
    patch.setattr(Compressor, "_store_error", lambda self, name, error: None)


@bug("D44", "compress", SLICE, "compressed")
def local_random_start(patch: Patch, site: Site) -> None:
    """Ranks start the power iteration from different matrices."""
    original = compressed.fill_zero_columns

    def started(q: Tensor, *args: object) -> Tensor:
        return original(q, rank(), *args)

    patch.setattr(compressed, "fill_zero_columns", started)
