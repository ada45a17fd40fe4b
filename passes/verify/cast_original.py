"""The original under the casts of a plan: what `relax(dtype)` allows, in one process.

torch's own parts in a plain loop: torch.autocast around forward and loss, parameters swapped for
cast ones while a module runs, torch.amp.GradScaler.  Nothing of it is shared with the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.ir.facets import Cast
from schedlang.ir.plan import Plan
from schedlang.passes.propagate.casts import root_cast
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.original import Sequential, rows
from schedlang.passes.verify.parted import Parted

if TYPE_CHECKING:
    from torch import Tensor, nn


def cast_twin(plan: Plan, module: nn.Module, options: dict[str, Any]) -> None:
    """Let a copy of the original, and the loss in the options of its loop, compute as rows say."""
    from schedlang.passes.verify.original import loss_of

    for one in plan.casts:
        _put(module, one, _islands(plan, one))
    root = root_cast(plan)
    if root is not None and not root.params:
        options["loss"] = _autocast(options.get("loss") or loss_of, root.dtype)


class ScaledSteps(Sequential):
    """The plain loop with torch's own scaler of the loss."""

    def __init__(self, *args: Any, row: Cast, **options: Any) -> None:
        from torch.amp import GradScaler

        super().__init__(*args, **options)
        self._scaler = GradScaler("cpu", init_scale=row.scale, growth_interval=row.growth)
        self._base = self.scale

    def train_step(self, batch: Batch) -> Tensor:
        """Forward, loss, backward, unscale, clip and step, or none; the loss."""
        import math

        import torch
        from torch.nn.utils import clip_grad_norm_

        scaler = self._scaler
        assert self._optimizer is not None, "this subject was made without an optimizer"
        scaler.scale(torch.zeros(()))  # it is there only from its first use on
        times = scaler.get_scale()
        self.scale = self._base * times
        loss = self.derive(batch, range(rows(batch))) / times
        scaler.unscale_(self._optimizer)
        for value in self._inputs.values():
            if value.grad is not None:
                value.grad /= times
        self.grad_norm = clip_grad_norm_(
            [p for _, p in self._named], math.inf if self.clip is None else self.clip
        )
        scaler.step(self._optimizer)
        scaler.update()
        self._steps += 1
        return loss


class ScaledParted(ScaledSteps, Parted):
    """The same around the loop over the parts of a batch."""


def _islands(plan: Plan, one: Cast) -> Sequence[str]:
    """What is computed in float32 inside of a module."""
    return [o.fqn for o in plan.casts if o.dtype == "fp32" and _inside(o.fqn, one.fqn)]


def _inside(name: str, fqn: str) -> bool:
    return name != fqn and (not fqn or name.startswith(f"{fqn}."))


def _put(module: nn.Module, one: Cast, islands: Sequence[str]) -> None:
    """Let a module of the twin compute as a row says."""
    found = module.get_submodule(one.fqn)
    dtype = _dtype(one.dtype)
    if one.dtype != "fp32" and not one.params:
        found.forward = _autocast(found.forward, one.dtype, back=bool(one.fqn))
        return
    inner = [i[len(one.fqn) + 1 :] if one.fqn else i for i in islands]
    found.forward = _whole(found, found.forward, dtype, inner)


def _dtype(word: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[word]


def _autocast(call: Callable[..., Any], word: str, back: bool = False) -> Callable[..., Any]:
    import torch

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=_dtype(word)):
            out = call(*args, **kwargs)
        return _to(out, _first(args, kwargs)) if back else out

    return run


def _whole(
    module: nn.Module, call: Callable[..., Any], dtype: Any, islands: Sequence[str]
) -> Callable[..., Any]:
    """A forward with arguments and parameters cast, but for the parameters of islands."""
    import torch
    from torch.nn.utils.stateless import _reparametrize_module

    def run(*args: Any, **kwargs: Any) -> Any:
        named = module.named_parameters(remove_duplicate=False)
        cast = (
            {
                n: p.to(dtype)
                for n, p in named
                if p.dtype == torch.float32 and not any(n.startswith(f"{i}.") for i in islands)
            }
            if dtype != torch.float32
            else {}
        )
        came = _first(args, kwargs)
        with torch.autocast("cpu", enabled=False), _reparametrize_module(module, cast):
            out = call(*_to(args, dtype), **_to(kwargs, dtype))
        return _to(out, came)

    return run


def _first(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The dtype of the first float among the arguments, else float32."""
    import torch

    from schedlang.ir.nests import tree_leaves

    found = [t.dtype for t in tree_leaves((args, kwargs)) if _is_float(t)]
    return found[0] if found else torch.float32


def _is_float(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _to(value: Any, dtype: Any) -> Any:
    """A structure with its floats in a dtype, finite where they were and no gradient tells."""
    import torch

    from schedlang.ir.nests import tree_map

    def one(leaf: Any) -> Any:
        if not _is_float(leaf) or leaf.dtype in (torch.float64, dtype):
            return leaf
        made = leaf.to(dtype)
        if leaf.requires_grad:
            return made
        top = torch.finfo(dtype).max
        return torch.where(leaf.isfinite() & made.isinf(), made.sign() * top, made)

    return tree_map(one, value)
