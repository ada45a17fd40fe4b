"""Compute a module in another dtype than its parameters have; torch.autocast on any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.ir import nests as pytree
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


def autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to `dtype` for tensors of a kind of device; None: no autocast.

    Casts of weights are not kept for a second use: what is gathered for one is gone by the other.
    """
    if device == "meta":
        return Imitated(dtype)
    if dtype is None:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=dtype, cache_enabled=False)


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


class Region:
    """The region of the model that computes now: the dtype that parameters are cast to when
    used."""

    def __init__(self) -> None:
        # None: as they are stored; set here, for a graph of torch.compile holds for what is set
        self.dtype: torch.dtype | None = None

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
        self, dtype: torch.dtype | None, casts: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """A part of the model with its casts; a recomputation stands where its forward stood."""
        with _casting(casts, partial(self.using, dtype)):
            yield


@contextmanager
def _casting(casts: AbstractContextManager[Any], *more: ModeOrFactory) -> Iterator[None]:
    modes = (casts,) if isinstance(casts, Imitated) else ()
    # code that asks whether autocast is on (recurrences do) is told so on the meta device too
    real = autocast("cpu", casts.dtype) if isinstance(casts, Imitated) else casts
    with ambient(*more, *modes), real:
        yield


def cast(model: nn.Module, casts: Iterable[tuple[str, str, bool]]) -> None:
    """Let modules of a model compute in other dtypes, in place.

    Each is the name of a module, one of DTYPES, and whether its parameters are cast, too.
    """
    region = Region()
    for fqn, dtype, params in casts:
        if params:
            for module in model.modules():  # it may use parameters that others hold
                if not isinstance(module._parameters, Used):
                    module._parameters = Used(module._parameters)
                    module._parameters.region = region
        low, whole = DTYPES[dtype], params or dtype == "fp32"
        layer: Any = Whole(low, region) if whole else Auto(low, region, inner=bool(fqn))
        wrap(model.get_submodule(fqn), "cast", layer)


class Auto:
    """The layer around a module's forward: torch.autocast.

    What an inner module gives goes on in the dtype that came in, as that of `Whole` does: what
    follows computes in it.
    """

    def __init__(self, dtype: torch.dtype, region: Region, inner: bool) -> None:
        self.dtype, self.region, self.inner = dtype, region, inner

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` under it, on the device of what comes in."""
        with self.region.entered(None, autocast(device_of((args, kwargs)), self.dtype)):
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
        with self.region.entered(own, autocast(device_of((args, kwargs)), None)):
            args, kwargs = casted((args, kwargs), self.dtype)
            return casted(inner(*args, **kwargs), came)


def _came(args: Any, kwargs: Any) -> torch.dtype:
    """The dtype of the first float that came in, else the one that parameters are stored in."""
    return next((t.dtype for t in tensors_in((args, kwargs))), torch.float32)


class Used(dict[str, Any]):
    """Parameters of a module by name, cast where the region that asks computes in another dtype.

    What goes through all of them (an optimizer, a state dict) sees them as they are stored.
    """

    region: Region

    def __getitem__(self, name: str) -> Any:
        return self._used(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The same."""
        return self._used(super().get(name, default))

    def _used(self, parameter: Any) -> Any:
        dtype = self.region.dtype
        if dtype is None or parameter is None or parameter.dtype not in FLOATS:
            return parameter
        return parameter.to(dtype)


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


def device_of(given: Any) -> str:
    """The kind of device on which a call computes."""
    found: Sequence[Any] = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
    return found[0].device.type if found else torch.get_default_device().type


@dataclass(frozen=True)
class AutoLoss:
    """A loss beside the model, under autocast."""

    loss: Callable[..., Any]
    dtype: torch.dtype

    def __call__(self, output: Any, batch: Any) -> Any:
        """The loss of an output."""
        with _casting(autocast(device_of((output, batch)), self.dtype)):
            return self.loss(output, batch)
