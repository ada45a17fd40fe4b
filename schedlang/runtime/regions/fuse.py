"""Compile one module's forward and backward with inductor, as one graph or not at all.

The compiled function takes the place of the forward of one instance; equal modules share graphs.
A graph break or too many recompilations, which torch would answer by running parts eagerly with a
line in a log, is a refusal here.  Random numbers are drawn as eager torch draws them, so that
dropout under the same seed stays the same.

Under ambient modes (float64, logical dropout) the module runs eagerly: what a mode does would be
traced into the graph once and for all (measured: logical dropout cannot be traced, float64 can but
proves nothing about the graph that trains).  So a schedule is verified around the region, and
`check_fused` judges the compiled region itself in the type that it trains in.

This is the one file that touches dynamo, inductor and functorch configuration.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.kernels.check import Comparison, compare
from schedlang.runtime.forward import layers_of, plain_forward, wrap
from schedlang.runtime.modes import Ambient

LIMIT = 16  # graphs of one forward; beyond, compiling costs more than it can give


def unavailable(device: str = "cpu") -> str | None:
    """Why inductor cannot compile for a device here; None if it can."""
    if device != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else "triton finds no GPU to compile for"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found (set CXX, or install g++)"
    return None


def fuse(module: nn.Module, *, split_backward: bool = False, rounding: str = "fp32") -> None:
    """Compile the forward of `module`, in place; it compiles when it is first called.

    split_backward: the backward will be run in two parts (gradients of inputs, then of weights)
    over one graph.  Donated buffers are then off, in the whole process, and inductor's caches for
    this module: their keys ignore that setting, and they would hand back a graph that overwrites
    what the second part needs.
    rounding: "eager" rounds intermediate results as the operators do, "fp32" only what leaves.

    Raises Refusal without a compiler, for a module whose computation was replaced already, and at
    the call where the forward is not one graph.
    """
    device = next((p.device.type for p in module.parameters()), "cpu")
    missing = unavailable(device) if device != "meta" else None
    if missing:
        raise _refusal("S831", "inductor cannot compile here", missing)
    layers = layers_of(module)
    if layers is not None and {"kernel", "attend"} & set(layers.kinds):
        name = type(module).__name__
        raise _refusal(
            "S832", f"`{name}` has a kernel of its own already", "fuse what is around it"
        )
    wrap(module, "fuse", Fuse(type(module).__name__, split_backward, rounding))


def graphs(module: nn.Module) -> int:
    """How many graphs were compiled for this module's own forward; equal modules share theirs."""
    layers = layers_of(module)
    layer = layers.kinds.get("fuse") if layers is not None else None
    return layer.graphs if isinstance(layer, Fuse) else 0


class Fuse:
    """The layer that calls the compiled form of a forward."""

    def __init__(self, name: str, split_backward: bool, rounding: str = "fp32") -> None:
        self.name = name
        self.split_backward = split_backward
        self.rounding = rounding
        self.graphs = 0
        self.compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies compile anew: the compiled function is bound to the original module."""
        return self.__dict__ | {"compiled": None, "graphs": 0}

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run compiled; eagerly under an ambient mode."""
        if _under_ambient_mode():
            return inner(*args, **kwargs)
        if self.compiled is None:
            self.compiled = _compile(inner, self.split_backward, self.rounding)
        with _counting(self), _refusing(self.name):
            return self.compiled(*args, **kwargs)


def _under_ambient_mode() -> bool:
    from torch.overrides import _get_current_function_mode_stack

    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, Ambient) for mode in stack)


def _compile(inner: Callable[..., Any], split_backward: bool, rounding: str) -> Callable[..., Any]:
    # one backend object for all regions: graphs are shared only between equal backends
    backend = _split_backend if split_backward else _rounding if rounding == "eager" else _backend
    if split_backward:
        import torch._functorch.config as functorch

        functorch.donated_buffer = False  # read when backward runs, too: it must stay
    options: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = LIMIT
    own = _with_own_code(inner)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, backend=backend, **options)
    return compiled


_codes: dict[tuple[type, FunctionType], FunctionType] = {}


def _with_own_code(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The class's own forward over a code object that belongs to this class alone.

    torch keeps graphs, and counts them against the limit, by code object, and one decorator around
    the forwards of many classes (as transformers has) gives all of them the same.
    """
    if not isinstance(inner, partial) or not isinstance(inner.func, FunctionType):
        return inner  # a forward that the instance was given
    module, function = inner.args[0], inner.func
    key = (type(module), function)
    if key not in _codes:
        code = function.__code__.replace()
        made = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__,
            function.__closure__,
        )  # fmt: skip
        made.__kwdefaults__ = function.__kwdefaults__
        _codes[key] = made
    return MethodType(_codes[key], module)


_counted: list[Fuse] = []


@contextmanager
def _counting(layer: Fuse) -> Iterator[None]:
    _counted.append(layer)
    try:
        yield
    finally:
        _counted.pop()


def _backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    import torch._inductor.config as inductor
    from torch._inductor.compile_fx import compile_fx

    if _counted:
        _counted[-1].graphs += 1
    with inductor.patch(fallback_random=True):
        return compile_fx(graph, inputs)


def _rounding(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Intermediate results are rounded to the working type as they are eagerly."""
    import torch._inductor.config as inductor

    with inductor.patch(emulate_precision_casts=True):
        return _backend(graph, inputs)


def _split_backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    import torch._inductor.config as inductor

    with inductor.patch(force_disable_caches=True):
        return _backend(graph, inputs)


def _refusal(code: str, title: str, *notes: str) -> Refusal:
    return Refusal(Diagnostic(code, title, notes=notes, helps=("leave this module unfused",)))


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn what torch says about a forward that is not one graph into a refusal."""
    from torch._dynamo import exc

    limit = getattr(exc, "FailOnRecompileLimitHit", exc.Unsupported)
    try:
        yield
    except limit as error:
        raise _refusal(
            "S834",
            f"`{name}` is compiled anew too often",
            f"more than {LIMIT} graphs were made for one forward, because something that it reads "
            "differs from call to call or from layer to layer (with transformers often its cache: "
            "give the batch `use_cache=False`)",
        ) from error
    except exc.Unsupported as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = [line for line in said if line.startswith("File ")][-1:]
        raise _refusal("S833", f"`{name}` is not one graph", *said[:2], *where) from error


def check_fused(
    module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Comparison]:
    """Judge a fused module in its working dtype against float64, as kernels/check.py does.

    One call with these arguments in evaluation mode, and one in training mode where that draws
    random numbers: a program that is proven draws them logically, with the module run as it stands.
    Outputs and all gradients.  The module is not changed: copies run.
    """
    found = _checked(module, args, kwargs or {}, training=False)
    if draws(module, args, kwargs or {}):
        drawn = _checked(module, args, kwargs or {}, training=True)
        found += [replace(one, name=f"{one.name} with dropout") for one in drawn]
    return found


def draws(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the module draws random numbers in training, as it stands."""
    twin = copy.deepcopy(module).train()
    with torch.random.fork_rng(), torch.no_grad():
        before = torch.get_rng_state()
        plain_forward(twin)(*args, **kwargs)
        return not torch.equal(before, torch.get_rng_state())


def _checked(
    module: nn.Module, args: Sequence[Any], named: Mapping[str, Any], *, training: bool
) -> list[Comparison]:
    twins = [copy.deepcopy(module).train(training) for _ in range(3)]
    twins[2].double()
    layers = layers_of(twins[0])
    assert layers is not None and "fuse" in layers.kinds, "not a fused module"
    whole = partial(layers.kinds["fuse"], plain_forward(twins[0]))
    fused = _values(twins[0], whole, args, named, torch.Tensor.clone)
    eager = _values(twins[1], plain_forward(twins[1]), args, named, torch.Tensor.clone)
    exact = _values(twins[2], plain_forward(twins[2]), args, named, _widened)
    return [
        # two orders of the same sums: k = 8 for gradients, 4 for outputs, as in proving/rounding.py
        compare(
            name, fused[name], eager[name], value.double(), times=8.0 if "gradient" in name else 4.0
        )
        for name, value in exact.items()
    ]


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _values(
    module: nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Outputs and gradients of one call, by name."""
    leaves: dict[str, Tensor] = dict(module.named_parameters())

    def prepared(value: Any, name: str) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(prepared(v, f"{name}.{i}") for i, v in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        new = change(value.detach())
        if new.is_floating_point():
            leaves[f"input {name}"] = new.requires_grad_()
        return new

    given = [prepared(value, str(place)) for place, value in enumerate(args)]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same masks, whatever the type: they are drawn in float64
        out = forward(*given, **{name: prepared(value, name) for name, value in kwargs.items()})
    found = {f"output {n}": t for n, t in _tensors(out, "") if t.is_floating_point()}
    total = torch.stack([_weighed(t) for t in found.values() if t.requires_grad]).sum()
    used = [name for name, leaf in leaves.items() if leaf.requires_grad]
    grads = torch.autograd.grad(total, [leaves[name] for name in used], allow_unused=True)
    found = {name: t.detach() for name, t in found.items()}
    pairs = zip(used, grads, strict=True)
    return found | {f"gradient of {name}": g for name, g in pairs if g is not None}


def _weighed(tensor: Tensor) -> Tensor:
    """A sum in which every element counts otherwise, in float64."""
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
