"""Compute a module in another dtype than its parameters have; torch.autocast for any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.ir import pytree
from schedlang.runtime.adapters.torch_autocast import imitate_on_meta
from schedlang.runtime.adapters.torch_tensor import run_first_in_backward
from schedlang.runtime.forward import wrap
from schedlang.runtime.modes import AmbientMode, ModeOrFactory, enter_modes

# ---- torch.autocast for any device, the meta device included; also to disable it.
# torch has no autocast for tensors without values, but the bytes of memory and of messages are
# counted with such tensors. A function mode applies the rules of torch's lists for the CPU there:
# matrix products, convolutions, recurrences and attention in the low dtype; losses, decompositions
# and a few more in float32; all else in the dtype of its inputs.


_LOW_NAMES = {
    torch: "matmul mm bmm addmm baddbmm addbmm conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d conv_transpose3d prelu lstm gru rnn_tanh rnn_relu",
    Tensor: "matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addbmm",
    F: "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention",
    torch.linalg: "vecdot",
}
_WIDE_NAMES = {
    F: "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div ctc_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss "
    "hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "poisson_nll_loss soft_margin_loss triplet_margin_loss grid_sample avg_pool3d "
    "adaptive_avg_pool3d",
    torch: "cdist prod cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve nanquantile "
    "orgqr ormqr pinverse polar qr quantile stft svd trace triangular_solve view_as_complex",
    Tensor: "prod cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve nanquantile "
    "orgqr ormqr pinverse qr quantile stft svd trace triangular_solve",
    torch.fft: "fft fft2 fftn hfft ifft ifft2 ifftn ihfft irfft irfft2 irfftn rfft rfft2 rfftn",
    torch.linalg: "cholesky cholesky_ex cond eig eigh eigvals eigvalsh householder_product inv "
    "inv_ex lstsq matrix_rank qr solve svd svdvals tensorinv tensorsolve",
}
_CELL_NAMES = {torch: "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"}
_WIDEST_NAMES = {torch: "index_copy", Tensor: "index_copy"}  # cat and stack do so for all tensors


def _functions_named(names: dict[Any, str]) -> frozenset[Any]:
    return frozenset(getattr(space, n) for space, listed in names.items() for n in listed.split())


_LOW, _WIDE, _WIDEST = map(_functions_named, (_LOW_NAMES, _WIDE_NAMES, _WIDEST_NAMES))
_SUMS = _functions_named({torch._C._VariableFunctions: "einsum"})
# only their products are in the low dtype; these are added to the rest
_CELLS = _functions_named(_CELL_NAMES)


def _autocast_dtype(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], low_dtype: torch.dtype
) -> Any:
    """Return the dtype in which autocast to `low_dtype` calls a function; None: that of its
    arguments."""
    if func in _LOW or (func in _SUMS and _is_product(args[0])):
        return low_dtype
    if func in _WIDE:
        return torch.float32
    if func in _CELLS:
        return low_dtype if args[0].dtype == low_dtype else None
    if func == F.pad:  # padding that repeats or mirrors is in float32, padding with zeros is not
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        return torch.float32 if mode in ("reflect", "replicate") else None
    if func in _WIDEST:
        floats = [t.dtype for t in float_tensors_in((args, kwargs))]
        return torch.float32 if torch.float32 in floats else None
    return None


def _is_product(equation: str) -> bool:
    """Return whether an einsum sums over an index of two operands: then it is a matrix product."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    operands = [set(operand) - set(".") for operand in inputs.split(",")]
    shared = {
        name for operand in operands for name in operand if sum(name in o for o in operands) > 1
    }
    return bool(shared - set(output))


def autocast(
    device: str, dtype: torch.dtype | None, caches: bool = False
) -> AbstractContextManager[Any]:
    """Return torch.autocast to `dtype` for a kind of device; `dtype` None: autocast disabled.

    keeps  a cast of a weight serves all its uses, by torch's own rule: until autocast ends
    """
    if device == "meta":
        return ImitatedAutocast(dtype)
    if dtype is None:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=dtype, cache_enabled=caches)


def imitate_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context that gives tensors without values the dtypes of the current autocast of a
    device."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return ImitatedAutocast(torch.get_autocast_dtype(device))


class _Autocasts(threading.local):
    def __init__(self) -> None:
        self.modes: list[ImitatedAutocast] = []  # the last one is active


_autocasts = _Autocasts()


class ImitatedAutocast(AmbientMode):
    """A mode with autocast's dtypes for tensors without values; `dtype` None: no casts."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def __enter__(self) -> ImitatedAutocast:
        _autocasts.modes.append(self)
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)  # type: ignore[no-untyped-call]
        _autocasts.modes.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.dtype is None or not _autocasts.modes or _autocasts.modes[-1] is not self:
            return self.run(func, types, args, kwargs)
        dtype = _autocast_dtype(func, args, kwargs, self.dtype)
        if dtype is not None:
            args, kwargs = pytree.tree_map(partial(_cast_float, dtype=dtype), (args, kwargs))
            return func(*args, **kwargs)
        return self.run(func, types, args, kwargs)


def allow_autocast_on_meta() -> None:
    """Let models run `torch.autocast(x.device.type)` on the meta device: see `ImitatedAutocast`."""
    imitate_on_meta(ImitatedAutocast)


def _cast_float(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value


# ---- A module that computes in another dtype than its parameters are stored in.
# There are two options. Autocast is torch's own, entered around the module's forward. The other
# casts the whole module: its input tensors, and every parameter where code reads it, so that a
# gradient flows back through the cast into the stored parameter. A parameter is cast to the dtype
# of the region that uses it, not of the region that holds it: a tied weight may be used in two.
# Neither changes a float64 tensor.


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NONE: Mapping[str, Any] = MappingProxyType({})


class CastRegion:
    """The part of a model that runs now, with the dtype that its parameters are cast to.

    keeps  cache casts. For `CastLayer`, one cast serves all uses of a parameter by one module, in
           all microbatches of a step; for torch.autocast, all uses in one call, as is its default
    """

    def __init__(self, keeps: bool = False) -> None:
        # None: as stored; an attribute, because a graph of torch.compile guards on its value
        self.dtype: torch.dtype | None = None
        self.keeps = keeps
        # casts of the running step, by module, name and whether gradients are enabled
        self.casts: dict[tuple[int, str, bool], Tensor] | None = None

    def begin_step(self) -> None:
        """Begin a step: cache casts from now on."""
        self.casts = {} if self.keeps else None

    def end_step(self) -> None:
        """Drop the cached casts: the last forward has ended, and graphs hold the casts that they
        need."""
        self.casts = None

    def autocast(self, dtype: torch.dtype, device: str) -> AbstractContextManager[Any]:
        """Return a context with autocast, and parameters as they are stored."""
        if device == "meta" or self.dtype is not None:
            return self.enter(None, device, dtype)
        return autocast(device, dtype, self.keeps)

    @contextmanager
    def cast_parameters(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Cast parameters to `dtype` within the block; None: no casts."""
        before, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = before

    @contextmanager
    def enter(
        self, dtype: torch.dtype | None, device: str, auto: torch.dtype | None
    ) -> Iterator[None]:
        """Enter the casts of a part of the model; a recomputation enters the same casts again."""
        with _autocast_with(device, auto, self.keeps, partial(self.cast_parameters, dtype)):
            yield


@contextmanager
def _autocast_with(
    device: str, dtype: torch.dtype | None, caches: bool, *inner_modes: ModeOrFactory
) -> Iterator[None]:
    """Enter autocast for a kind of device, together with other modes."""
    casts = autocast(device, dtype, caches)  # torch 2.11 cannot compile a test for its class
    modes = (casts,) if device == "meta" else ()
    # code that reads whether autocast is on (recurrences do) reads it on the meta device too
    real = autocast("cpu", dtype) if device == "meta" else casts
    with enter_modes(*inner_modes, *modes), real:
        yield


def cast_model(
    model: nn.Module, casts: Iterable[tuple[str, str, bool]], keeps: bool = False
) -> CastRegion:
    """Let modules of a model compute in other dtypes, in place; return the region that tracks the
    dtype.

    casts  for each module: its name, a name in DTYPES, whether its parameters are cast too
    keeps  casts of parameters are cached for a step, in which parameters do not change
    """
    region = CastRegion(keeps)
    for fqn, dtype, params in casts:
        if params:
            for module in model.modules():  # it may use parameters of other modules
                if not isinstance(module._parameters, CastParameters):
                    module._parameters = CastParameters(module._parameters)
                    module._parameters.region = region
        low, casts_all = DTYPES[dtype], params or dtype == "fp32"
        layer: Any = (
            CastLayer(low, region) if casts_all else AutocastLayer(low, region, inner=bool(fqn))
        )
        wrap(model.get_submodule(fqn), "cast", layer)
    return region


def cast_like(module: nn.Module, copied: nn.Module) -> AbstractContextManager[None]:
    """Return a context that casts the parameters of a copy of a module as those of the module."""
    own_parameters, copied_parameters = (
        next(
            (m._parameters for m in root.modules() if isinstance(m._parameters, CastParameters)),
            None,
        )
        for root in (module, copied)
    )
    return (
        nullcontext()
        if own_parameters is None or copied_parameters is None
        else copied_parameters.region.cast_parameters(own_parameters.region.dtype)
    )


class AutocastLayer:
    """A layer around a module's forward: torch.autocast.

    The output of an inner module is cast back to the dtype of its input, as for `CastLayer`: the
    modules after it compute in that dtype.
    """

    def __init__(self, dtype: torch.dtype, region: CastRegion, inner: bool) -> None:
        self.dtype, self.region, self.inner = dtype, region, inner

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` under autocast, for the device of its arguments."""
        with self.region.autocast(self.dtype, device_kind_of(args, kwargs)):
            out = inner(*args, **kwargs)
        return cast_floats(out, _input_dtype(args, kwargs)) if self.inner else out


class CastLayer:
    """A layer around a module's forward: all in one dtype; float32 for islands of full precision.

    The output is in the dtype of the first float argument, else in that of stored parameters.
    """

    def __init__(self, dtype: torch.dtype, region: CastRegion) -> None:
        self.dtype, self.region = dtype, region

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with cast arguments and parameters."""
        input_dtype = _input_dtype(args, kwargs)
        low_dtype = self.dtype if self.dtype != torch.float32 else None
        with self.region.enter(low_dtype, device_kind_of(args, kwargs), None):
            args, kwargs = cast_floats((args, kwargs), self.dtype)
            return cast_floats(inner(*args, **kwargs), input_dtype)


def _input_dtype(args: Any, kwargs: Any) -> torch.dtype:
    """Return the dtype of the first float argument, else the dtype of stored parameters."""
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            if value.is_floating_point():
                return value.dtype
        elif value is not None and not isinstance(value, (bool, int, str)):
            return next((t.dtype for t in float_tensors_in((args, kwargs))), torch.float32)
    return torch.float32


def product_dtype(module: nn.Module, parameter: Tensor, device: str) -> torch.dtype:
    """Return the dtype in which a matrix product in this module would use a parameter now."""
    parameters = module._parameters
    if parameter.dtype not in CAST_DTYPES:
        return parameter.dtype
    if isinstance(parameters, CastParameters) and parameters.region.dtype is not None:
        return parameters.region.dtype
    if device == "meta":
        autocast_dtype = _autocasts.modes[-1].dtype if _autocasts.modes else None
    else:
        autocast_dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        )
    return autocast_dtype or parameter.dtype


class CastParameters(dict[str, Any]):
    """Parameters of a module by name, cast to the dtype of the region that reads them.

    Iteration over the values (an optimizer, a state dict) gives the parameters as they are stored.
    """

    region: CastRegion

    def __getitem__(self, name: str) -> Any:
        parameter, region = super().__getitem__(name), self.region
        dtype = region.dtype
        if dtype is None or parameter is None or parameter.dtype not in CAST_DTYPES:
            return parameter
        casts = region.casts
        if casts is None or torch.compiler.is_compiling():  # a graph has its own cast
            return parameter.to(dtype)
        key = id(self), name, torch.is_grad_enabled()
        if key not in casts or casts[key].dtype != dtype:
            casts[key] = run_first_in_backward(parameter.to(dtype))
        return casts[key]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the parameter, cast like `__getitem__`."""
        return self[name] if name in self else default  # noqa: SIM401  (it would call itself)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floats in a nest to a dtype, except float64.

    In a tensor without gradient finite numbers stay finite: a mask contains float32's lowest
    number.
    """
    return pytree.tree_map(lambda leaf: _cast_tensor(leaf, dtype), value)


def _cast_tensor(value: Any, dtype: torch.dtype) -> Any:
    if type(value) not in (Tensor, nn.Parameter) or value.dtype not in CAST_DTYPES:
        return value
    if value.dtype == dtype:
        return value
    cast = value.to(dtype)
    if dtype == torch.float32 or value.requires_grad:
        return cast
    limits = torch.finfo(dtype)
    return torch.where(value.isinf(), cast, cast.clamp(limits.min, limits.max))


def float_tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a nest."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def device_kind_of(args: Sequence[Any], kwargs: Mapping[str, Any] = _NONE) -> str:
    """Return the kind of device on which a call computes: that of its first tensor argument."""
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            return value.device.type
    tensors: Sequence[Any] = [
        t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
    ]
    return tensors[0].device.type if tensors else torch.get_default_device().type


@dataclass(frozen=True)
class AutocastLoss:
    """A loss outside the model, computed under autocast."""

    loss: Callable[..., Any]
    dtype: torch.dtype

    def __call__(self, output: Any, batch: Any) -> Any:
        """Return the loss of an output."""
        device = device_kind_of((output, batch))
        auto = _autocast_with if device == "meta" else autocast
        with auto(device, self.dtype, False):
            return self.loss(output, batch)
