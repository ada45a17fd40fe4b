"""Row-wise chains as torch operators: trace a function's graphs, and run it as generated
kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.float64 import Float64
from schedlang.runtime.rowwise_kernels.chain import NotRowwise, OutputSource
from schedlang.runtime.rowwise_kernels.launch import (
    RowwiseKernel,
    make_kernel,
    output_index,
    run_kernel,
)

# -- graphs ----------------------------------------------------------------------------------------
# torch's own tracing gives one joint graph, and its min-cut partition decides which values forward
# saves and which backward recomputes. Only this file uses them.


_lock = RLock()  # tracing changes state of the whole process while it runs


@dataclass(frozen=True)
class TensorSignature:
    """Shape and dtype of a tensor that a kernel is made for, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    needs_gradient: bool = False


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward graph of one function of tensors for one set of shapes.

    forward   from the inputs to (results ..., other saved values ...)
    backward  from (saved values ..., gradients of the results ...) to gradients of the inputs, None
              for inputs without gradient; None if no input needs one
    results   the number of results
    """

    forward: fx.Graph
    backward: fx.Graph | None
    results: int


def signatures_of(tensors: Sequence[Tensor], graded: Sequence[bool]) -> tuple[TensorSignature, ...]:
    """Return shapes and dtypes of tensors, as a key."""
    return tuple(
        TensorSignature(tuple(int(n) for n in t.shape), t.dtype, t.device.type, needs)
        for t, needs in zip(tensors, graded, strict=True)
    )


def trace_graphs(
    function: Callable[..., Any], signatures: Sequence[TensorSignature]
) -> ForwardBackward:
    """Trace both graphs of a function; torch's exceptions are not changed.

    A thread of its own traces, without the modes that may be active here: those of a proof, or of a
    compiler that traces the operator.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_trace, function, signatures).result()


def _trace(function: Callable[..., Any], signatures: Sequence[TensorSignature]) -> ForwardBackward:
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode

    count = [0]

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        result = function(*values)
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        count[0] = len(results)
        return results

    with _lock, FakeTensorMode(), _SiluRoundedOnce():
        inputs = tuple(
            torch.empty(s.shape, dtype=s.dtype, device=s.device).requires_grad_(s.needs_gradient)
            for s in signatures
        )
        has_backward = any(s.needs_gradient for s in signatures)
        joint: Any = aot_export_joint_simple(
            flat, inputs, trace_joint=has_backward, decompositions=select_decomp_table()
        )
        if not has_backward:
            return ForwardBackward(joint.graph, None, count[0])
        forward, backward = min_cut_rematerialization_partition(
            joint, list(inputs), num_fwd_outputs=count[0]
        )
    return ForwardBackward(forward.graph, backward.graph, count[0])


class _Silu(torch.autograd.Function):
    """SiLU in float32, rounded once, as torch's own kernels compute it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x / (1 + exp(-x))."""
        ctx.save_for_backward(x)
        value = x.to(torch.promote_types(x.dtype, torch.float32))
        return (value / (1 + torch.exp(-value))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient, in torch's order of products."""
        (x,) = ctx.saved_tensors
        value = x.to(torch.promote_types(x.dtype, torch.float32))
        slope = 1 / (1 + torch.exp(-value))
        gradient: Tensor = (grad.to(value.dtype) * slope * (1 + value * (1 - slope))).to(x.dtype)
        return gradient


class _SiluRoundedOnce(TorchFunctionMode):
    """Replaces SiLU by `_Silu`: torch's derivative would be traced as steps that are rounded one by
    one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the call."""
        options = dict(kwargs or {})
        if func in (F.silu, torch._C._nn.silu) and not options.get("inplace") and len(args) == 1:
            return _Silu.apply(args[0])  # type: ignore[no-untyped-call]
        return func(*args, **options)


# -- operators -------------------------------------------------------------------------------------
# Operators are opaque to code that inspects a model: recomputation, FSDP2, torch.compile. The name
# of a chain is a hash of its source, so that names are equal on every rank.


@dataclass(frozen=True, eq=False)
class KernelPair:
    """Both kernels of a chain for one set of shapes.

    results    the number of results: the first outputs of the forward kernel
    saved      sources of the saved values: inputs, or outputs of the forward kernel
    gradients  sources of the inputs' gradients in the backward kernel
    """

    signatures: tuple[TensorSignature, ...]
    forward: RowwiseKernel
    backward: RowwiseKernel | None
    results: int
    saved: tuple[OutputSource, ...] = ()
    gradients: tuple[OutputSource, ...] = ()

    @property
    def kernels(self) -> tuple[RowwiseKernel, ...]:
        """The generated kernels."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)


@dataclass(eq=False)
class RowwiseFunction:
    """A function of tensors that is registered under a name."""

    function: Callable[..., Any]
    rounding: str
    pairs: dict[tuple[TensorSignature, ...], KernelPair]

    def pair(self, tensors: Sequence[Tensor], graded: Sequence[bool]) -> KernelPair:
        """Return the kernels for these tensors, made at the first call."""
        signatures = signatures_of(tensors, graded)
        if signatures not in self.pairs:
            self.pairs[signatures] = make_pair(self.function, signatures, self.rounding)
        return self.pairs[signatures]


_regions: dict[str, RowwiseFunction] = {}


def declare_function(name: str, function: Callable[..., Any], rounding: str) -> RowwiseFunction:
    """Register a function under a name; return it."""
    return _regions.setdefault(name, RowwiseFunction(function, rounding, {}))


def make_pair(
    function: Callable[..., Any], signatures: tuple[TensorSignature, ...], rounding: str
) -> KernelPair:
    """Make both kernels of a function; raises NotRowwise."""
    graphs = trace_graphs(function, signatures)
    forward = make_kernel(graphs.forward, rounding, graphs.results)
    if graphs.backward is None:
        return KernelPair(signatures, forward, None, graphs.results)
    backward = make_kernel(graphs.backward, rounding)
    saved = forward.chain.outputs[graphs.results :]
    return KernelPair(signatures, forward, backward, graphs.results, saved, backward.chain.outputs)


def apply_function(name: str, tensors: Sequence[Tensor], results: int) -> list[Tensor]:
    """Return the first `results` results of a chain."""
    graded = torch.is_grad_enabled()
    needs = [graded and t.requires_grad for t in tensors]
    stored: list[Tensor] = rowwise_forward(list(tensors), needs, name)
    return stored[:results]


@torch.library.custom_op("schedlang::rowwise_forward", mutates_args=())
def rowwise_forward(tensors: list[Tensor], graded: list[bool], name: str) -> list[Tensor]:
    """Return all outputs of the forward kernel: the results, then the values that backward
    needs."""
    return run_kernel(_regions[name].pair(tensors, graded).forward, tensors)


@torch.library.custom_op("schedlang::rowwise_backward", mutates_args=())
def rowwise_backward(saved: list[Tensor], grads: list[Tensor], key: str) -> list[Tensor]:
    """Return all gradients that the backward kernel computes."""
    return run_kernel(_backward_kernel(key), [*saved, *grads])


_keys: dict[str, KernelPair] = {}


def _backward_kernel(key: str) -> RowwiseKernel:
    kernel = _keys[key].backward
    assert kernel is not None
    return kernel


def _empty(kernel: RowwiseKernel, reference: Tensor) -> list[Tensor]:
    """Return empty tensors like a kernel's outputs."""
    return [reference.new_empty(shape, dtype=dtype) for shape, dtype in kernel.shapes]


@rowwise_forward.register_fake
def _(tensors: list[Tensor], graded: list[bool], name: str) -> list[Tensor]:
    return _empty(_regions[name].pair(tensors, graded).forward, tensors[0])


@rowwise_backward.register_fake
def _(saved: list[Tensor], grads: list[Tensor], key: str) -> list[Tensor]:
    return _empty(_backward_kernel(key), grads[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, graded, name = inputs
    pair = _regions[name].pair(tensors, graded)
    ctx.key = f"{name} {pair.signatures}"
    _keys[ctx.key] = pair
    saved = (
        tensors[k.place] if k.where == "given" else output[output_index(pair.forward, k)]
        for k in pair.saved
    )
    ctx.save_for_backward(*saved)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    pair, saved = _keys[ctx.key], list(ctx.saved_tensors)
    backward = _backward_kernel(ctx.key)
    reference = next(t for t in (*saved, *grads) if t is not None)
    tangents = [
        reference.new_zeros(shape, dtype=dtype) if grad is None else grad
        for grad, (shape, dtype) in zip(grads[: pair.results], pair.forward.shapes)
    ]
    outputs = rowwise_backward(saved, tangents, ctx.key)
    by_source = dict(zip(backward.output_order, outputs, strict=True))
    by_source |= {OutputSource("given", index): t for index, t in enumerate([*saved, *tangents])}
    return [by_source.get(source) for source in pair.gradients], None, None


rowwise_forward.register_autograd(_differentiate, setup_context=_save)


# -- regions ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class RowwiseRegion:
    """A function of tensors that runs as one kernel forward and one backward.

    Numbers among the arguments are constants, with one function for each set. A value without rows
    (a scalar, an empty tensor) is refused with the operator's name.
    """

    plain: Callable[..., Any]
    source: str
    rounding: str
    float64: bool = False  # casts to a lower float become casts to float64: for a proof
    names: dict[tuple[Any, ...], tuple[str, int]] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        """Return the results: one tensor, or a tuple of them, as the function does."""
        tensors = [t for t in args if isinstance(t, Tensor)]
        numbers = tuple((n, t) for n, t in enumerate(args) if not isinstance(t, Tensor))
        name, results = self._declared(numbers, args)
        try:
            outputs = apply_function(name, tensors, max(results, 1))
        except NotRowwise as error:
            raise not_rowwise_refusal(str(error)) from error
        return tuple(outputs) if results else outputs[0]

    def _declared(self, numbers: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[str, int]:
        """Return the name of the function with these constants, and its number of results; 0: no
        tuple."""
        key = (numbers, len(args))
        if key not in self.names:
            fixed, count = dict(numbers), len(args)

            def function(*tensors: Tensor) -> Any:
                remaining = iter(tensors)
                all_ = (fixed[n] if n in fixed else next(remaining) for n in range(count))
                with Float64() if self.float64 else nullcontext():
                    return self.plain(*all_)

            key_text = f"{self.source}\n{self.rounding}\n{self.float64}\n{key!r}"
            name = f"region_{sha256(key_text.encode()).hexdigest()[:12]}"
            declare_function(name, function, self.rounding)
            with torch.no_grad():
                on_meta = [t.detach().to("meta") if isinstance(t, Tensor) else t for t in args]
                result = self.plain(*on_meta)
            self.names[key] = name, len(result) if isinstance(result, tuple) else 0
        return self.names[key]


def not_rowwise_refusal(reason: str) -> Refusal:
    """Return the refusal S887: this is not a row-wise chain."""
    return Refusal.of(
        "S887",
        "this is not a chain of pointwise operators and row reductions",
        notes=(reason,),
        helps=("leave it to inductor: drop `backend=rowwise`",),
    )


def function_of_tensors(
    original: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[TensorSignature, ...]]:
    """Return a function of the tensors among `args`, and their signatures; others are constants.

    Tensors on the meta device are treated as CPU tensors.
    """
    tensors = [t for t in args if isinstance(t, Tensor)]

    def function(*values: Tensor) -> Any:
        remaining = iter(values)
        return original(*(next(remaining) if isinstance(t, Tensor) else t for t in args))

    signatures = signatures_of(tensors, [t.requires_grad for t in tensors])
    return function, tuple(
        replace(s, device="cpu") if s.device == "meta" else s for s in signatures
    )


def kernels_for(original: Callable[..., Any], args: Sequence[Any], rounding: str) -> KernelPair:
    """Make the kernels of a function for these tensors and constants; raises Refusal S887."""
    function, signatures = function_of_tensors(original, args)
    try:
        return make_pair(function, signatures, rounding)
    except NotRowwise as error:
        raise not_rowwise_refusal(str(error)) from error
