"""Compute a module in another dtype than its parameters have; torch.autocast on any device."""

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
from schedlang.runtime.adapters.torch_tensor import at_once_in_backward
from schedlang.runtime.forward import wrap
from schedlang.runtime.modes import Ambient, ModeOrFactory, ambient

# ---- torch.autocast on any device, the meta device included; and off.
# torch has no autocast for tensors without values, and counts of memory and of messages are made
# with them.  There a function mode does what torch's lists for the CPU say: matrix products,
# convolutions, recurrences and attention in the low dtype, losses, decompositions and a few more in
# float32, everything else as it comes.


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
_WIDEST_NAMES = {torch: "index_copy", Tensor: "index_copy"}  # of cat and stack all do so


def _named(names: dict[Any, str]) -> frozenset[Any]:
    return frozenset(getattr(where, n) for where, some in names.items() for n in some.split())


_LOW, _WIDE, _WIDEST = map(_named, (_LOW_NAMES, _WIDE_NAMES, _WIDEST_NAMES))
_SUMS = _named({torch._C._VariableFunctions: "einsum"})
_CELLS = _named(_CELL_NAMES)  # their products alone are in the low dtype, and are added to the rest


def _ruled(func: Any, args: Sequence[Any], kwargs: dict[str, Any], low: torch.dtype) -> Any:
    """The dtype that autocast to `low` calls a function with; None: with what it is given."""
    if func in _LOW or (func in _SUMS and _contracts(args[0])):
        return low
    if func in _WIDE:
        return torch.float32
    if func in _CELLS:
        return low if args[0].dtype == low else None
    if func == F.pad:  # what repeats or mirrors is wide, zeros are not
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        return torch.float32 if mode in ("reflect", "replicate") else None
    if func in _WIDEST:
        floats = [t.dtype for t in tensors_in((args, kwargs))]
        return torch.float32 if torch.float32 in floats else None
    return None


def _contracts(equation: str) -> bool:
    """Return whether an einsum sums over an index of two operands: then it is a product of
    matrices."""
    given, _, made = equation.replace(" ", "").partition("->")
    operands = [set(one) - set(".") for one in given.split(",")]
    twice = {name for one in operands for name in one if sum(name in o for o in operands) > 1}
    return bool(twice - set(made))


def autocast(
    device: str, dtype: torch.dtype | None, keeps: bool = False
) -> AbstractContextManager[Any]:
    """Autocast to `dtype` for tensors of a kind of device; None: no autocast.

    keeps  casts of weights serve all uses, by torch's own rule: until no autocast is on
    """
    if device == "meta":
        return Imitated(dtype)
    if dtype is None:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=dtype, cache_enabled=keeps)


def imitated(device: str) -> AbstractContextManager[Any]:
    """Imitate, for tensors without values, what autocast does to those on a kind of device."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return Imitated(torch.get_autocast_dtype(device))


class _Autocasts(threading.local):
    def __init__(self) -> None:
        self.modes: list[Imitated] = []  # the last one decides


_autocasts = _Autocasts()


class Imitated(Ambient):
    """The dtypes that autocast would give, for tensors without values; `dtype` None: no casts."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def __enter__(self) -> Imitated:
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
        wanted = _ruled(func, args, kwargs, self.dtype)
        if wanted is not None:
            args, kwargs = pytree.tree_map(partial(_to, dtype=wanted), (args, kwargs))
            return func(*args, **kwargs)
        return self.run(func, types, args, kwargs)


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value


# ---- A module that computes in another dtype than its parameters are stored in.
# Two ways.  Autocast is torch's own, entered around the module's forward.  The other casts the
# whole module: tensors as they come in, and every parameter where code asks for it, so that a
# gradient flows back through the cast and into the parameter as it is stored.  A parameter is cast
# to the dtype of the region in which it is used, not of the one in which it is held: a tied weight
# may be used in two.  Neither touches a float64 tensor.


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NONE: Mapping[str, Any] = MappingProxyType({})


class Region:
    """The part of a model that runs now: the dtype that its parameters are cast to when used.

    keeps  casts serve many uses: what `Whole` casts all uses of a parameter by one module, in all
           microbatches of a step; what torch.autocast does those of one call, as it is by default
    """

    def __init__(self, keeps: bool = False) -> None:
        # None: as they are stored; set here, for a graph of torch.compile holds for what is set
        self.dtype: torch.dtype | None = None
        self.keeps = keeps
        # of the step that runs, by module, name and whether it is differentiated
        self.casts: dict[tuple[int, str, bool], Tensor] | None = None

    def begin(self) -> None:
        """Keep casts from now on: a step begins."""
        self.casts = {} if self.keeps else None

    def end(self) -> None:
        """Let go of them: the last forward has ended, and graphs hold what is left of them."""
        self.casts = None

    def auto(self, dtype: torch.dtype, device: str) -> AbstractContextManager[Any]:
        """A part of the model under autocast, its parameters as they are stored."""
        if device == "meta" or self.dtype is not None:
            return self.entered(None, device, dtype)
        return autocast(device, dtype, self.keeps)

    @contextmanager
    def using(self, dtype: torch.dtype | None) -> Iterator[None]:
        """A part of the model in which parameters are cast so."""
        before, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = before

    @contextmanager
    def entered(
        self, dtype: torch.dtype | None, device: str, auto: torch.dtype | None
    ) -> Iterator[None]:
        """A part of the model with its casts; a recomputation stands where its forward stood."""
        with _casting(device, auto, self.keeps, partial(self.using, dtype)):
            yield


@contextmanager
def _casting(
    device: str, dtype: torch.dtype | None, keeps: bool, *more: ModeOrFactory
) -> Iterator[None]:
    """Autocast on a kind of device, beside other modes."""
    casts = autocast(device, dtype, keeps)  # torch 2.11 cannot compile a question for its class
    modes = (casts,) if device == "meta" else ()
    # code that asks whether autocast is on (recurrences do) is told so on the meta device too
    real = autocast("cpu", dtype) if device == "meta" else casts
    with ambient(*more, *modes), real:
        yield


def cast(model: nn.Module, casts: Iterable[tuple[str, str, bool]], keeps: bool = False) -> Region:
    """Let modules of a model compute in other dtypes, in place; what knows where it computes.

    Each is the name of a module, one of DTYPES, and whether its parameters are cast, too.
    keeps: casts of parameters serve a whole step, in which these are as they are.
    """
    region = Region(keeps)
    for fqn, dtype, params in casts:
        if params:
            for module in model.modules():  # it may use parameters that others hold
                if not isinstance(module._parameters, Used):
                    module._parameters = Used(module._parameters)
                    module._parameters.region = region
        low, whole = DTYPES[dtype], params or dtype == "fp32"
        layer: Any = Whole(low, region) if whole else Auto(low, region, inner=bool(fqn))
        wrap(model.get_submodule(fqn), "cast", layer)
    return region


def as_in(module: nn.Module, copied: nn.Module) -> AbstractContextManager[None]:
    """Cast parameters of a copy of a module as those of the module itself would be now."""
    own, other = (
        next((m._parameters for m in one.modules() if isinstance(m._parameters, Used)), None)
        for one in (module, copied)
    )
    return nullcontext() if own is None or other is None else other.region.using(own.region.dtype)


class Auto:
    """The layer around a module's forward: torch.autocast.

    What an inner module gives goes on in the dtype that came in, as that of `Whole` does: what
    follows computes in it.
    """

    def __init__(self, dtype: torch.dtype, region: Region, inner: bool) -> None:
        self.dtype, self.region, self.inner = dtype, region, inner

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` under it, on the device of what comes in."""
        with self.region.auto(self.dtype, device_of(args, kwargs)):
            out = inner(*args, **kwargs)
        return casted(out, _came(args, kwargs)) if self.inner else out


class Whole:
    """The layer around a module's forward: everything in one dtype, float32 where it is an island.

    What goes out is in the dtype of the first float that came in, else of what is stored.
    """

    def __init__(self, dtype: torch.dtype, region: Region) -> None:
        self.dtype, self.region = dtype, region

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with cast arguments and parameters."""
        came = _came(args, kwargs)
        own = self.dtype if self.dtype != torch.float32 else None
        with self.region.entered(own, device_of(args, kwargs), None):
            args, kwargs = casted((args, kwargs), self.dtype)
            return casted(inner(*args, **kwargs), came)


def _came(args: Any, kwargs: Any) -> torch.dtype:
    """The dtype of the first float that came in, else the one that parameters are stored in."""
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            if value.is_floating_point():
                return value.dtype
        elif value is not None and not isinstance(value, (bool, int, str)):
            return next((t.dtype for t in tensors_in((args, kwargs))), torch.float32)
    return torch.float32


def used_as(module: nn.Module, parameter: Tensor, device: str) -> torch.dtype:
    """The dtype in which a matrix product in this module would take a parameter, at this moment."""
    own = module._parameters
    if parameter.dtype not in FLOATS:
        return parameter.dtype
    if isinstance(own, Used) and own.region.dtype is not None:
        return own.region.dtype
    if device == "meta":
        said = _autocasts.modes[-1].dtype if _autocasts.modes else None
    else:
        said = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return said or parameter.dtype


class Used(dict[str, Any]):
    """Parameters of a module by name, cast where the region that asks computes in another dtype.

    What goes through all of them (an optimizer, a state dict) sees them as they are stored.
    """

    region: Region

    def __getitem__(self, name: str) -> Any:
        parameter, region = super().__getitem__(name), self.region
        dtype = region.dtype
        if dtype is None or parameter is None or parameter.dtype not in FLOATS:
            return parameter
        kept = region.casts
        if kept is None or torch.compiler.is_compiling():  # a graph casts by itself
            return parameter.to(dtype)
        key = id(self), name, torch.is_grad_enabled()
        if key not in kept or kept[key].dtype != dtype:
            kept[key] = at_once_in_backward(parameter.to(dtype))
        return kept[key]

    def get(self, name: str, default: Any = None) -> Any:
        """The same."""
        return self[name] if name in self else default  # noqa: SIM401  (it would call itself)


def casted(value: Any, dtype: torch.dtype) -> Any:
    """A structure with its floats in a dtype; what is float64 stays so.

    A finite number stays one in a tensor without gradient: a mask has float32's lowest in it.
    """
    return pytree.tree_map(lambda leaf: _one(leaf, dtype), value)


def _one(value: Any, dtype: torch.dtype) -> Any:
    if type(value) not in (Tensor, nn.Parameter) or value.dtype not in FLOATS:
        return value
    if value.dtype == dtype:
        return value
    made = value.to(dtype)
    if dtype == torch.float32 or value.requires_grad:
        return made
    ends = torch.finfo(dtype)
    return torch.where(value.isinf(), made, made.clamp(ends.min, ends.max))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a structure."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def device_of(args: Sequence[Any], kwargs: Mapping[str, Any] = _NONE) -> str:
    """The kind of device on which a call computes: that of the first tensor in its arguments."""
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            return value.device.type
    found: Sequence[Any] = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return found[0].device.type if found else torch.get_default_device().type


@dataclass(frozen=True)
class AutoLoss:
    """A loss beside the model, under autocast."""

    loss: Callable[..., Any]
    dtype: torch.dtype

    def __call__(self, output: Any, batch: Any) -> Any:
        """The loss of an output."""
        device = device_of((output, batch))
        auto = _casting if device == "meta" else autocast
        with auto(device, self.dtype, False):
            return self.loss(output, batch)
