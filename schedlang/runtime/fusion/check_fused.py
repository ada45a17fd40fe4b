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
    comparisons = _compare_calls(module, calls, training=False)
    if not draws_random(module, call):
        return comparisons
    if given_masks is None:
        given_masks = not on_host(_device(module, call))
    dropped = _compare_calls(module, calls, training=True, given_masks=given_masks)
    comparisons += [replace(c, name=f"{c.name} with dropout") for c in dropped]
    return comparisons + (list(_compare_draws(module, call)) if given_masks else [])


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
    return [generator.get_state() for generator in default_generators([device])]


class PositionMasks(TorchFunctionMode):
    """Dropout with masks computed from positions: equal on any device and in any dtype.

    Attention in one operator drops nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call; replace dropout."""
        named_args = dict(kwargs or {})
        if func is F.dropout:
            return _dropout_by_position(*args, **named_args)
        if func is F.scaled_dot_product_attention:
            named_args["dropout_p"] = 0.0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) > 4:
                del named_args["dropout_p"]
        return func(*args, **named_args)


def _dropout_by_position(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    positions = torch.arange(input.numel(), device=input.device).view(input.shape)
    kept = (positions * 2654435761 % 4294967296).double() / 4294967296 >= p
    factor = kept.to(input.dtype) / (1.0 - p)
    return input.mul_(factor) if inplace else input * factor


def _compare_draws(module: nn.Module, call: ModuleCall) -> Iterator[Comparison]:
    """Compare draws: the fused module draws the same after the same seed, with eager's
    statistics."""
    twin = copy.deepcopy(module).train()
    fused, eager = _fused(twin), plain_forward(twin)
    seeds = range(DRAWS)
    fused_sums, repeated, eager_sums = (
        torch.tensor([_digest(function, call, seed) for seed in seeds], dtype=torch.float64)
        for function in (fused, fused, eager)
    )
    yield _bounded("draws after one seed", float((fused_sums - repeated).abs().max()), 0.0)
    spread = max(float(eager_sums.std()), 1e-30)
    bound = MAX_DEVIATIONS * math.sqrt(2 / DRAWS)
    yield _bounded(
        "mean of draws", float((fused_sums.mean() - eager_sums.mean()).abs()) / spread, bound
    )
    ratio = max(float(fused_sums.std()), 1e-30) / spread
    yield _bounded("spread of draws", abs(math.log(ratio)), MAX_DEVIATIONS * math.sqrt(1 / DRAWS))


def _bounded(name: str, error: float, allowed: float) -> Comparison:
    return Comparison(name, error, allowed, error, allowed, error <= allowed)


def _digest(function: Callable[..., Any], call: ModuleCall, seed: int) -> float:
    """Return one number that depends on all outputs of a call."""
    with generators_restored(), torch.no_grad():
        torch.manual_seed(seed)
        tensors = _tensors(function(*call[0], **call[1]), "")
    return float(torch.stack([_weighted_sum(t) for _, t in tensors if t.is_floating_point()]).sum())


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
    comparisons: list[Comparison] = []
    for label, call in calls.items():
        with mode:
            try:
                fused = _values(twins[0], _fused(twins[0]), call, torch.Tensor.clone)
            except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError) as error:
                if not label:
                    raise
                message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                comparisons.append(_failed_comparison(f"the call {label} fails ({message})"))
                continue
            eager = _values(twins[1], plain_forward(twins[1]), call, torch.Tensor.clone)
            exact = _values(twins[2], plain_forward(twins[2]), call, _to_double)
        names = {name: f"{name} {label}".strip() for name in (*exact, *fused)}
        comparisons += [
            _compare_tensor(names[k], fused.get(k), eager.get(k), exact.get(k)) for k in names
        ]
    return comparisons


def _compare_tensor(
    name: str, fused: Tensor | None, eager: Tensor | None, exact: Tensor | None
) -> Comparison:
    """Compare one tensor; a missing tensor or another shape gives an infinite error."""
    if fused is None or eager is None or exact is None or fused.shape != exact.shape:
        not_computed, missing = "is not there", "the module has none"
        fused_only = exact is None or eager is None
        reason = (
            not_computed
            if fused is None
            else missing
            if fused_only
            else f"has shape {list(fused.shape)}"
        )
        return _failed_comparison(f"{name} ({reason})")
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
        changed = change(value.detach())
        if not changed.is_floating_point():
            return changed
        leaves[f"input {name}"] = changed.requires_grad_()
        return changed.clone()  # not a leaf: a module may modify an activation in place

    inputs = [prepared(value, str(index)) for index, value in enumerate(args)]
    with generators_restored():
        torch.manual_seed(0)  # the same masks for every dtype: they are drawn in float64
        output = forward(*inputs, **{name: prepared(value, name) for name, value in kwargs.items()})
    values = {f"output {n}": t for n, t in _tensors(output, "") if t.is_floating_point()}
    total = [_weighted_sum(t) for t in values.values() if t.requires_grad]
    used = [name for name, leaf in leaves.items() if leaf.requires_grad and total]
    ends = [leaves[name] for name in used]
    grads = torch.autograd.grad(torch.stack(total).sum(), ends, allow_unused=True) if used else ()
    values = {name: t.detach() for name, t in values.items()}
    pairs = zip(used, grads, strict=True)
    return values | {f"gradient of {name}": g for name, g in pairs if g is not None}


def _weighted_sum(tensor: Tensor) -> Tensor:
    """Return a sum in float64 in which every element has another weight."""
    weights = torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64, device=tensor.device)
    return (tensor.double().flatten() * weights).sum()


def _tensors(value: Any, name: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _tensors(item, f"{name}.{key}")]
    if isinstance(value, (tuple, list)):
        return [pair for i, item in enumerate(value) for pair in _tensors(item, f"{name}.{i}")]
    return []
