"""Loops of a user's own around a program's module: what one would train wrongly is refused.

* A backward outside of a step, of what a step sums after its last backward: parameters whose
  gradients are parts of a sum over ranks.
* A norm of gradients, or an optimizer that looks at whole tensors, where a rank holds parts.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime.adapters.torch_clip import hear_of_clipping
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.grad_reduction.gradient import LocalParameters, Sum
from schedlang.runtime.grad_reduction.zero import backward_of_ones_own
from schedlang.runtime.optim.whole_step import is_elementwise

_STEP = "use `train_step` and `eval_step`"
_PART = "_schedlang_part"  # of the parameters that hold a part of a tensor: its name
_known: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers that have been looked at


def module_of(a: Assembly, leaving: bool) -> nn.Module:
    """The module of a program, for loops of one's own; `leaving`: gradients leave the device.

    Raises Refusal S617 where there is none.
    """
    if a.tokens is not None:
        title = f"`{a.context[0]}` splits sequences: a program has no module to call"
        raise Refusal.of("S617", title, helps=(f"{_STEP}: they split the sequences",))
    if a.stage_axis is not None:
        title = f"the pipeline over `{a.stage_axis}` has no single module"
        helps = (f"{_STEP}: each rank runs a stage of the model",)
        raise Refusal.of("S617", title, helps=helps)
    if leaving:
        title = "offloaded gradients leave the device at once: your own loop would find none"
        raise Refusal.of("S617", title, helps=(_STEP,))
    if not a.held.guarded:
        a.held.guarded = True
        _guard_sums(a.held, a.sums)
        _guard_parts(a)
    return a.module


def _guard_sums(held: LocalParameters, sums: Iterable[Sum]) -> None:
    """Refuse a backward outside of a step where it reaches what is summed over ranks."""
    for one in sums:
        for name in one.names if one.group.size > 1 else ():
            parameter = held[name]
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # else it takes no hook; it may be trained later
            parameter.register_hook(_only_within(held, name))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)


def _only_within(held: LocalParameters, name: str) -> Callable[[Tensor], None]:
    def check(unused: Tensor) -> None:
        if not held.stepping:
            raise backward_of_ones_own(name).at(python_span())

    return check


def _guard_parts(a: Assembly) -> None:
    """Note which parameters are parts of tensors, and hear of what looks at whole ones."""
    everything = all(name in a.parameters for name in a.holdings)
    for name, parameter in a.parameters.items():
        whole = math.prod(a.holdings[name].layout.shape)
        if not everything or parameter.numel() < whole:  # of a DTensor it counts all slices
            setattr(parameter, _PART, name)
            _hear()


@functools.cache
def _hear() -> None:
    """Look from now on at what `clip_grad_norm_` is given, and at optimizers that step."""
    hear_of_clipping(_check_norm)
    register_optimizer_step_pre_hook(_check_optimizer)


def _part(parameters: Iterable[Any]) -> str | None:
    """The name of the first of some parameters that is a part."""
    return next((vars(p)[_PART] for p in parameters if _PART in vars(p)), None)


def _check_norm(parameters: Iterable[Any]) -> None:
    """Raise Refusal S622 where the norm of gradients would be that of this rank's parts."""
    name = _part(parameters)
    if name is not None:
        raise Refusal.of(
            "S622",
            "`clip_grad_norm_` would clip by the norm of this rank's gradients only",
            notes=(f"this rank has a shard of `{name}`; other ranks have other shards and norms",),
            helps=("`build(clip=1.0)`: a step clips by the norm of all gradients",),
        ).at(python_span())


def _check_optimizer(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Raise Refusal S622, at its first step, for one that looks at whole tensors, given parts."""
    if optimizer in _known:
        return
    _known.add(optimizer)
    for group in optimizer.param_groups:
        name = _part(group["params"])
        if name is not None and not _by_elements(optimizer, group):
            raise Refusal.of(
                "S622",
                f"`{type(optimizer).__name__}` needs full tensors, but would step on shards",
                notes=(f"this rank holds a shard of `{name}`",),
                helps=("`build(optimizer=lambda named: ...)`: a step gathers the shards",),
            ).at(python_span())


def _by_elements(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Try a twin of the optimizer, without its state, on small tensors."""

    def twin(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made = copy.copy(optimizer)
        made.state = defaultdict(dict)
        made.param_groups = [{**group, "params": [p for _, p in named]}]
        _known.add(made)
        return made

    try:
        return is_elementwise(twin)
    except Refusal:
        raise
    except Exception:  # one that steps on a device alone, say: nothing is known of it
        return True
