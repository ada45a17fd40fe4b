"""Compile one module's forward and backward with inductor, or what a pattern matches in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.patterns import Pattern
from schedlang.runtime.adapters.torch_compile import compiled, keeping, keeps_buffers
from schedlang.runtime.device import device_of, not_there
from schedlang.runtime.forward import layer_of, wrap
from schedlang.runtime.fusion.dataflow import Given, Looked, flow, given_of, owned, plain_torch
from schedlang.runtime.fusion.rewrite import (
    How,
    Match,
    Miss,
    Rewritten,
    matches,
    rewritten,
    whole,
)
from schedlang.runtime.left import leave
from schedlang.runtime.modes import on_stack
from schedlang.runtime.sharding.leaf import make_ready, without_graph
from schedlang.runtime.tracing.meta import tensors_in

# -- whole modules ---------------------------------------------------------------------------------
# The compiled function takes the place of the forward of one instance; equal modules share graphs.
# A graph break or too many recompilations, which torch would answer by running parts eagerly with
# a line in a log, is a refusal here.  Random numbers are drawn as eager torch draws them, so that
# dropout under the same seed stays the same.
#
# Under ambient modes (float64, logical dropout) the module runs eagerly: what a mode does would be
# traced into the graph once and for all (measured: logical dropout cannot be traced, float64 can
# but proves nothing about the graph that trains).  So a schedule is verified around the region,
# and `check_fused` judges the compiled region itself in the type that it trains in.


LIMIT = 16  # graphs of one forward; beyond, compiling costs more than it can give


def unavailable(device: str = "cpu") -> str | None:
    """Say why inductor cannot compile for a device here; None if it can."""
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


def fuse(module: nn.Module, *, rounding: str = "fp32") -> None:
    """Compile the forward of `module`, in place; it compiles when it is first called.

    Its backward can be run in two parts (gradients of inputs, then of weights) if `keep_buffers`
    was called before.
    rounding: "eager" rounds intermediate results as the operators do, "fp32" only what leaves.

    Raises Refusal without a compiler, for a module whose computation was replaced already, and at
    the call where the forward is not one graph.
    """
    device = device_of(module.parameters())
    missing = unavailable(device.type) if not not_there(device) else None
    if missing:
        raise _refusal("S831", "inductor cannot compile here", missing)
    if layer_of(module, "kernel") or layer_of(module, "attend"):
        name = type(module).__name__
        raise _refusal("S832", f"`{name}` already has a kernel", "fuse a module around it")
    wrap(module, "fuse", Fuse(type(module).__name__, rounding, module))


def graphs(module: nn.Module) -> int:
    """Count the graphs that were compiled for a module's own forward; equal modules share them."""
    layer = layer_of(module, "fuse")
    return layer.graphs if isinstance(layer, Fuse) else 0


class Fuse:
    """The layer that calls the compiled form of a forward."""

    def __init__(
        self,
        name: str,
        rounding: str = "fp32",
        module: nn.Module | None = None,
    ) -> None:
        self.name = name
        self.module = module  # where it is noted that a call ran eagerly
        self.rounding = rounding
        self.graphs = 0
        self.eager = ""  # why it runs eagerly
        self.looked = False  # for what no graph can hold
        self.compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies compile anew: the compiled function is bound to the original module."""
        return self.__dict__ | {"compiled": None, "graphs": 0}

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run compiled; eagerly, and it is noted, where a mode or its draws do not let it."""
        if not self.looked and self.module is not None:
            self.looked, self.eager = True, self.eager or without_graph(self.module)
        under = on_stack()
        whys = [why for mode in under if (why := mode.eager)]
        whys += [self.eager] if self.eager and torch.is_grad_enabled() else []
        if whys and self.module is not None:
            leave(self.module, "fuse", whys[0])
        if self.eager or any(not mode.compiles for mode in under):
            return inner(*args, **kwargs)
        given: list[tuple[Tensor, int]] = []
        if self.compiled is None:
            if self.module is not None:
                make_ready(self.module)
            self.compiled = _compile(inner, self.rounding)
            taken = (one for one in tensors_in((args, kwargs)) if not one.is_inference())
            given = [(one, one._version) for one in taken]
        alone = plain_torch() if under else nullcontext()
        with alone, _counting(self), _refusing(self.name):
            out = self.compiled(*args, **kwargs)
        if any(one._version != version for one, version in given):
            raise _refusal(
                "S833",
                f"`{self.name}` changes its inputs in place",
                "a compiled graph would compute gradients with the changed values",
            )
        return out


def _compile(inner: Callable[..., Any], rounding: str) -> Callable[..., Any]:
    return compiled(_with_own_code(inner), LIMIT, _BACKENDS[rounding, keeps_buffers()])


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
            code,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
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


def _backend(graph: torch.fx.GraphModule, inputs: Any, rounding: str) -> Any:
    """Compile a graph; "eager": intermediate results are rounded to the working type."""
    import torch._inductor.config as inductor
    from torch._inductor.compile_fx import compile_fx

    if _counted:
        _counted[-1].graphs += 1
    casts = rounding == "eager"
    with inductor.patch(fallback_random=True, emulate_precision_casts=casts), keeping():
        return compile_fx(graph, inputs)


# One object for all regions that are compiled alike: graphs are shared between equal backends only.
_BACKENDS: Mapping[tuple[str, bool], Callable[..., Any]] = {
    (rounding, kept): partial(_backend, rounding=rounding)
    for rounding in ("fp32", "eager")
    for kept in (False, True)
}


def _refusal(code: str, title: str, *notes: str) -> Refusal:
    return Refusal.of(code, title, notes=notes, helps=("leave this module unfused",))


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
            f"`{name}` is compiled again too often",
            f"more than {LIMIT} graphs were made for one forward, because something that it reads "
            "differs from call to call or from layer to layer (with transformers often its cache: "
            "give the batch `use_cache=False`)",
        ) from error
    except exc.Unsupported as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = [line for line in said if line.startswith("File ")][-1:]
        raise _refusal(
            "S833", f"`{name}` cannot be compiled as one graph", *said[:2], *where
        ) from error


# -- regions that a pattern matches ----------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A pattern (or None: all of the module) and how it is to be matched and compiled."""

    pattern: Pattern | None
    looked: Looked
    how: How = How()
    name: str = ""  # of the module, for messages


def found_in(module: nn.Module, told: Told, given: Given) -> tuple[Any, list[Match]]:
    """The flow of a call and where the pattern stands in it; S882 if nowhere."""
    graph = flow(module, given, told.looked)
    if told.pattern is None:
        return graph, [whole(graph, module)]
    found, miss = matches(told.pattern, graph, module)
    if not found:
        raise nowhere(told, told.pattern, miss)
    return graph, found


def nowhere(told: Told, pattern: Pattern, miss: Miss) -> Refusal:
    """S882, with the attempt that came furthest."""
    fitted = max(miss.fitted, 0)
    of = f"{fitted} of its {pattern.body.size} calls fit"
    helps = ("`schedlang explain fuse` lists what a pattern may contain",)
    if miss.bias:
        row = f"{told.name}.{miss.bias}".lstrip(".")
        helps = (f"if you mean its bias, separate it in a row above: `{row}  decompose(bias)`",)
    return Refusal.of(
        "S882",
        f"`{told.name or 'the model'}` has no match for the pattern `{pattern.name}`",
        notes=(f"{of}: {miss.reason}", pattern.text),
        helps=helps,
    )


def fuse_pattern(module: nn.Module, told: Told) -> None:
    """Let a built module compute each match as one region, in place."""
    device = device_of(module.parameters())
    inductor = told.how.backend == "inductor" and not not_there(device)
    missing = unavailable(device.type) if inductor else None
    if missing:
        raise Refusal.of("S831", "inductor cannot compile here", notes=(missing,))
    wrap(module, "fuse", Regions(module, told))
    if owned(module):
        name = type(module).__name__
        raise Refusal.of(
            "S832", f"`{name}` already has a kernel", helps=("leave this module unfused",)
        )


class Regions:
    """The layer that runs the rewritten forward; one for each set of constants."""

    def __init__(self, module: nn.Module, told: Told) -> None:
        self.module, self.told = module, told
        self.made: dict[Any, Rewritten] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies look anew: what is done to their children may differ."""
        return self.__dict__ | {"made": {}}

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The rewritten forward; `inner` is not called."""
        given = given_of(self.module, args, kwargs)
        key = given.key, tuple(m.training for m in self.module.modules())
        if key not in self.made:
            graph, found = found_in(self.module, self.told, given)
            self.made[key] = rewritten(graph, found, self.module, self.told.how)
        made = self.made[key]
        return made.run(self.module, *(given.tensors[name] for name in made.names))
