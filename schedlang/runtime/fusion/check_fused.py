"""Compare a fused module with the unfused module, in the dtype that it trains in.

On a CPU, where a compiled graph draws as eager torch does, dropout is compared with the drawn
masks. On a GPU it draws differently (torch's fused operator and inductor's code number their draws
differently, and so does another dtype). There dropout gets masks computed from positions, which
checks all uses of the masks, and the draws are checked separately: equal for one seed, and with
eager's mean and spread over many seeds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.kernels.check import Comparison, compare_tensor
from schedlang.runtime.device import default_generators, generators_restored, on_host
from schedlang.runtime.forward import layer_of, plain_forward

ModuleCall = tuple[Sequence[Any], Mapping[str, Any]]
DRAWS, MAX_DEVIATIONS = (
    64,
    5.0,
)  # draws of each side; allowed standard deviations between their means


def check_fused(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    given_masks: bool | None = None,
    later: Mapping[str, ModuleCall] | None = None,
) -> list[Comparison]:
    """Compare a fused module in its working dtype with float64, as kernels/check.py does.

    Compares outputs and all gradients of a call in evaluation mode, and in training mode if that
    draws random numbers (a proof of the program runs modules eagerly, with logical draws). Copies
    run, the module does not change.
    given_masks  whether dropout has masks computed from positions; default: not on a CPU
    later        more calls of the same copy after the first, by how they differ from it: they run
                 what the first call has compiled with other values, masks and shapes
    """
    call = args, kwargs or {}
    calls = {"": call} | dict(later or {})
    found = _compare_calls(module, calls, training=False)
    if not draws_random(module, call):
        return found
    if given_masks is None:
        given_masks = not on_host(_device(module, call))
    drawn = _compare_calls(module, calls, training=True, given_masks=given_masks)
    found += [replace(one, name=f"{one.name} with dropout") for one in drawn]
    return found + (list(_compare_draws(module, call)) if given_masks else [])


def draws_random(module: nn.Module, call: ModuleCall) -> bool:
    """Return whether the module draws random numbers in training, from any generator."""
    twin = copy.deepcopy(module).train()
    with generators_restored(), torch.no_grad():
        before = _states(_device(module, call))
        plain_forward(twin)(*call[0], **call[1])
        after = _states(_device(module, call))
        return not all(map(torch.equal, before, after))


def _device(module: nn.Module, call: ModuleCall) -> torch.device:
    leaves = [*module.parameters(), *(t for _, t in _tensors((*call[0], dict(call[1])), ""))]
    return leaves[0].device if leaves else torch.device("cpu")


def _states(device: torch.device) -> list[Tensor]:
    return [one.get_state() for one in default_generators([device])]


class PositionMasks(TorchFunctionMode):
    """Dropout with masks computed from positions: equal on any device and in any dtype.

    Attention in one operator drops nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call; replace dropout."""
        named = dict(kwargs or {})
        if func is F.dropout:
            return _dropout_by_position(*args, **named)
        if func is F.scaled_dot_product_attention:
            named["dropout_p"], args = 0.0, (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) > 4:
                del named["dropout_p"]
        return func(*args, **named)


def _dropout_by_position(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    place = torch.arange(input.numel(), device=input.device).view(input.shape)
    kept = (place * 2654435761 % 4294967296).double() / 4294967296 >= p
    factor = kept.to(input.dtype) / (1.0 - p)
    return input.mul_(factor) if inplace else input * factor


def _compare_draws(module: nn.Module, call: ModuleCall) -> Iterator[Comparison]:
    """Compare draws: the fused module draws the same after the same seed, with eager's
    statistics."""
    twin = copy.deepcopy(module).train()
    fused, eager = _fused(twin), plain_forward(twin)
    seeds = range(DRAWS)
    ours, again, theirs = (
        torch.tensor([_digest(function, call, seed) for seed in seeds], dtype=torch.float64)
        for function in (fused, fused, eager)
    )
    yield _bounded("draws after one seed", float((ours - again).abs().max()), 0.0)
    spread = max(float(theirs.std()), 1e-30)
    sure = MAX_DEVIATIONS * math.sqrt(2 / DRAWS)
    yield _bounded("mean of draws", float((ours.mean() - theirs.mean()).abs()) / spread, sure)
    ratio = max(float(ours.std()), 1e-30) / spread
    yield _bounded("spread of draws", abs(math.log(ratio)), MAX_DEVIATIONS * math.sqrt(1 / DRAWS))


def _bounded(name: str, error: float, allowed: float) -> Comparison:
    return Comparison(name, error, allowed, error, allowed, error <= allowed)


def _digest(function: Callable[..., Any], call: ModuleCall, seed: int) -> float:
    """Return one number that depends on all outputs of a call."""
    with generators_restored(), torch.no_grad():
        torch.manual_seed(seed)
        out = _tensors(function(*call[0], **call[1]), "")
    return float(torch.stack([_weighted_sum(t) for _, t in out if t.is_floating_point()]).sum())


def _fused(module: nn.Module) -> Callable[..., Any]:
    """Return the fused forward of a module: its layer around its own forward."""
    layer = layer_of(module, "fuse")
    assert layer is not None, "not a fused module"
    return partial(layer, plain_forward(module))


def _compare_calls(
    module: nn.Module, calls: Mapping[str, ModuleCall], *, training: bool, given_masks: bool = False
) -> list[Comparison]:
    twins = [copy.deepcopy(module).train(training) for _ in range(3)]
    twins[2].double()
    mode: AbstractContextManager[Any] = PositionMasks() if given_masks else nullcontext()
    found: list[Comparison] = []
    for words, call in calls.items():
        with mode:
            try:
                fused = _values(twins[0], _fused(twins[0]), call, torch.Tensor.clone)
            except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError) as error:
                if not words:
                    raise
                said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                found.append(_failed_comparison(f"the call {words} fails ({said})"))
                continue
            eager = _values(twins[1], plain_forward(twins[1]), call, torch.Tensor.clone)
            exact = _values(twins[2], plain_forward(twins[2]), call, _to_double)
        names = {name: f"{name} {words}".strip() for name in (*exact, *fused)}
        found += [
            _compare_tensor(names[k], fused.get(k), eager.get(k), exact.get(k)) for k in names
        ]
    return found


def _compare_tensor(
    name: str, fused: Tensor | None, eager: Tensor | None, exact: Tensor | None
) -> Comparison:
    """Compare one tensor; a missing tensor or another shape gives an infinite error."""
    if fused is None or eager is None or exact is None or fused.shape != exact.shape:
        lost, more = "is not there", "the module has none"
        only = exact is None or eager is None
        why = lost if fused is None else more if only else f"has shape {list(fused.shape)}"
        return _failed_comparison(f"{name} ({why})")
    # two orders of summation: k = 8 for gradients, 4 for outputs, as in `passes.verify`
    times = 8.0 if "gradient" in name else 4.0
    return compare_tensor(name, fused, eager, exact.double(), times=times)


def _failed_comparison(name: str) -> Comparison:
    return Comparison(name, math.inf, 0.0, math.inf, 0.0, False)


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _values(
    module: nn.Module,
    forward: Callable[..., Any],
    call: ModuleCall,
    change: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return outputs and gradients of one call, by name."""
    args, kwargs = call
    leaves: dict[str, Tensor] = dict(module.named_parameters())

    def prepared(value: Any, name: str) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(prepared(v, f"{name}.{i}") for i, v in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        new = change(value.detach())
        if not new.is_floating_point():
            return new
        leaves[f"input {name}"] = new.requires_grad_()
        return new.clone()  # not a leaf: a module may modify an activation in place

    given = [prepared(value, str(place)) for place, value in enumerate(args)]
    with generators_restored():
        torch.manual_seed(0)  # the same masks for every dtype: they are drawn in float64
        out = forward(*given, **{name: prepared(value, name) for name, value in kwargs.items()})
    found = {f"output {n}": t for n, t in _tensors(out, "") if t.is_floating_point()}
    total = [_weighted_sum(t) for t in found.values() if t.requires_grad]
    used = [name for name, leaf in leaves.items() if leaf.requires_grad and total]
    ends = [leaves[name] for name in used]
    grads = torch.autograd.grad(torch.stack(total).sum(), ends, allow_unused=True) if used else ()
    found = {name: t.detach() for name, t in found.items()}
    pairs = zip(used, grads, strict=True)
    return found | {f"gradient of {name}": g for name, g in pairs if g is not None}


def _weighted_sum(tensor: Tensor) -> Tensor:
    """Return a sum in float64 in which every element has another weight."""
    weights = torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64, device=tensor.device)
    return (tensor.double().flatten() * weights).sum()


def _tensors(value: Any, name: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        return [pair for key, each in value.items() for pair in _tensors(each, f"{name}.{key}")]
    if isinstance(value, (tuple, list)):
        return [pair for i, each in enumerate(value) for pair in _tensors(each, f"{name}.{i}")]
    return []
