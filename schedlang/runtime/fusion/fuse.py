"""Compile a module's forward and backward with inductor (`fuse`), or regions matched by a
pattern."""

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
from schedlang.runtime.adapters.torch_compile import (
    compile_keeping_buffers,
    compile_one_graph,
    keeps_buffers,
)
from schedlang.runtime.declined_calls import note_declined
from schedlang.runtime.device import device_of, is_meta
from schedlang.runtime.forward import layer_of, wrap
from schedlang.runtime.fusion.dataflow import (
    FlowArguments,
    TraceDepth,
    flow_arguments_of,
    has_replaced_forward,
    is_ignored_mode_active,
    trace_flow,
    without_function_modes,
)
from schedlang.runtime.fusion.rewrite import (
    Match,
    NearestMiss,
    RegionOptions,
    RewrittenFlow,
    find_matches,
    match_all,
    rewrite_flow,
)
from schedlang.runtime.modes import modes_on_stack
from schedlang.runtime.sharding.sharded_layer import build_forwards, graph_obstacle
from schedlang.runtime.tracing.meta_runs import tensors_in

# -- whole modules ---------------------------------------------------------------------------------
# The compiled function replaces the forward of one instance; equal modules share graphs. A graph
# break or too many recompilations, which torch would answer by running parts eagerly with a log
# line, is a refusal here. Random numbers are drawn as eager torch draws them, so that dropout with
# the same seed stays the same. Under ambient modes (float64, logical dropout) the module runs
# eagerly: a graph would hold the mode's effect for ever (measured: logical dropout cannot be
# traced, float64 can but proves nothing about the graph that trains). So a schedule is verified
# around the region, and `check_fused` checks the compiled region in the dtype that it trains in.


MAX_GRAPHS = 16  # graphs of one forward; with more, compiling costs more than it gains


def why_unavailable(device: str = "cpu") -> str | None:
    """Return why inductor cannot compile for a device here; None if it can."""
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
    """Compile the forward of `module`, in place; it is compiled at its first call.

    The backward can run in two parts (gradients of inputs, then of weights) if `keep_buffers` was
    called before.
    rounding  "eager": intermediate results are rounded as the operators round them; "fp32": only
              the outputs are rounded
    Raises Refusal S831 without a compiler, S832 for a module with a kernel, and, at the call, S833
    if the forward is not one graph.
    """
    device = device_of(module.parameters())
    missing = why_unavailable(device.type) if not is_meta(device) else None
    if missing:
        raise _refusal("S831", "inductor cannot compile here", missing)
    if layer_of(module, "kernel") or layer_of(module, "attend"):
        name = type(module).__name__
        raise _refusal("S832", f"`{name}` already has a kernel", "fuse a module around it")
    wrap(module, "fuse", FusedForward(type(module).__name__, rounding, module))


def count_graphs(module: nn.Module) -> int:
    """Return the number of graphs compiled for a module's own forward; equal modules share them."""
    layer = layer_of(module, "fuse")
    return layer.graphs if isinstance(layer, FusedForward) else 0


class FusedForward:
    """The layer that calls the compiled form of a forward."""

    def __init__(self, name: str, rounding: str = "fp32", module: nn.Module | None = None) -> None:
        self.name = name
        self.module = module  # where calls that ran eagerly are recorded
        self.rounding = rounding
        self.graphs = 0
        self.eager = ""  # why it runs eagerly
        self.looked = False  # whether the module was checked for what no graph can hold
        self.compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the compiled function: it is bound to the original module."""
        return self.__dict__ | {"compiled": None, "graphs": 0}

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward; run eagerly, and record this, if a mode or the module requires
        it."""
        if not self.looked and self.module is not None:
            self.looked, self.eager = True, self.eager or graph_obstacle(self.module)
        modes = modes_on_stack()
        reasons = [reason for mode in modes if (reason := mode.eager)]
        reasons += [self.eager] if self.eager and torch.is_grad_enabled() else []
        if reasons and self.module is not None:
            note_declined(self.module, "fuse", reasons[0])
        if self.eager or any(not mode.compiles for mode in modes):
            return inner(*args, **kwargs)
        versions: list[tuple[Tensor, int]] = []
        if self.compiled is None:
            if self.module is not None:
                build_forwards(self.module)
            self.compiled = _compile(inner, self.rounding)
            tracked = (tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_inference())
            versions = [(tensor, tensor._version) for tensor in tracked]
        without_modes = (
            without_function_modes() if modes or is_ignored_mode_active() else nullcontext()
        )
        with without_modes, _count_graphs(self), _refuse_breaks(self.name):
            output = self.compiled(*args, **kwargs)
        if any(tensor._version != version for tensor, version in versions):
            raise _refusal(
                "S833",
                f"`{self.name}` changes its inputs in place",
                "a compiled graph would compute gradients with the changed values",
            )
        return output


def _compile(inner: Callable[..., Any], rounding: str) -> Callable[..., Any]:
    return compile_one_graph(
        _with_own_code(inner), MAX_GRAPHS, _BACKENDS[rounding, keeps_buffers()]
    )


_codes: dict[tuple[type, FunctionType], FunctionType] = {}


def _with_own_code(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return the class's own forward with a code object that belongs to this class alone.

    torch caches and limits graphs by code object, and a decorator around the forwards of many
    classes (as in transformers) gives all of them the same code.
    """
    if not isinstance(inner, partial) or not isinstance(inner.func, FunctionType):
        return inner  # a forward that was set on the instance
    module, function = inner.args[0], inner.func
    key = (type(module), function)
    if key not in _codes:
        code = function.__code__.replace()
        function_copy = FunctionType(
            code,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        function_copy.__kwdefaults__ = function.__kwdefaults__
        _codes[key] = function_copy
    return MethodType(_codes[key], module)


_counting_layers: list[FusedForward] = []


@contextmanager
def _count_graphs(layer: FusedForward) -> Iterator[None]:
    _counting_layers.append(layer)
    try:
        yield
    finally:
        _counting_layers.pop()


def _backend(graph: torch.fx.GraphModule, inputs: Any, rounding: str) -> Any:
    """Compile a graph; `rounding` "eager": intermediate results are rounded to the working
    dtype."""
    import torch._inductor.config as inductor
    from torch._inductor.compile_fx import compile_fx

    if _counting_layers:
        _counting_layers[-1].graphs += 1
    casts = rounding == "eager"
    with (
        inductor.patch(fallback_random=True, emulate_precision_casts=casts),
        compile_keeping_buffers(),
    ):
        return compile_fx(graph, inputs)


# One object for equal options: graphs are shared between equal backends only.
_BACKENDS: Mapping[tuple[str, bool], Callable[..., Any]] = {
    (rounding, kept): partial(_backend, rounding=rounding)
    for rounding in ("fp32", "eager")
    for kept in (False, True)
}


def _refusal(code: str, message: str, *notes: str) -> Refusal:
    return Refusal.of(code, message, notes=notes, helps=("leave this module unfused",))


@contextmanager
def _refuse_breaks(name: str) -> Iterator[None]:
    """Turn torch's errors for a forward that is not one graph into a refusal."""
    from torch._dynamo import exc

    limit = getattr(exc, "FailOnRecompileLimitHit", exc.Unsupported)
    try:
        yield
    except limit as error:
        raise _refusal(
            "S834",
            f"`{name}` is compiled again too often",
            f"more than {MAX_GRAPHS} graphs were made for one forward, because something that it"
            " reads "
            "differs from call to call or from layer to layer (with transformers often its cache: "
            "give the batch `use_cache=False`)",
        ) from error
    except exc.Unsupported as error:
        message_lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        location = [line for line in message_lines if line.startswith("File ")][-1:]
        raise _refusal(
            "S833", f"`{name}` cannot be compiled as one graph", *message_lines[:2], *location
        ) from error


# -- regions that a pattern matches ----------------------------------------------------------------


@dataclass(frozen=True)
class FuseRequest:
    """A pattern (None: all of the module), and how to match and compile it."""

    pattern: Pattern | None
    depth: TraceDepth
    options: RegionOptions = RegionOptions()
    name: str = ""  # of the module, for messages


def matches_in_module(
    module: nn.Module, request: FuseRequest, arguments: FlowArguments
) -> tuple[Any, list[Match]]:
    """Return the data flow of a call and the matches of the pattern; refuse (S882) without a
    match."""
    graph = trace_flow(module, arguments, request.depth)
    if request.pattern is None:
        return graph, [match_all(graph, module)]
    matches, miss = find_matches(request.pattern, graph, module)
    if not matches:
        raise no_match_refusal(request, request.pattern, miss)
    return graph, matches


def no_match_refusal(request: FuseRequest, pattern: Pattern, miss: NearestMiss) -> Refusal:
    """Return the refusal S882, with the reason of the nearest attempt."""
    fitted = max(miss.fitted, 0)
    fit_text = f"{fitted} of its {pattern.body.size} calls fit"
    helps = ("`schedlang explain fuse` lists what a pattern may contain",)
    if miss.bias:
        row = f"{request.name}.{miss.bias}".lstrip(".")
        helps = (f"if you mean its bias, separate it in a row above: `{row}  decompose(bias)`",)
    return Refusal.of(
        "S882",
        f"`{request.name or 'the model'}` has no match for the pattern `{pattern.name}`",
        notes=(f"{fit_text}: {miss.reason}", pattern.text),
        helps=helps,
    )


def fuse_pattern(module: nn.Module, request: FuseRequest) -> None:
    """Let a built module compute each match as one region, in place."""
    device = device_of(module.parameters())
    inductor = request.options.backend == "inductor" and not is_meta(device)
    missing = why_unavailable(device.type) if inductor else None
    if missing:
        raise Refusal.of("S831", "inductor cannot compile here", notes=(missing,))
    wrap(module, "fuse", FusedRegions(module, request))
    if has_replaced_forward(module):
        name = type(module).__name__
        raise Refusal.of(
            "S832", f"`{name}` already has a kernel", helps=("leave this module unfused",)
        )


class FusedRegions:
    """The layer that runs the rewritten forward; one for each set of constants."""

    def __init__(self, module: nn.Module, request: FuseRequest) -> None:
        self.module, self.told = module, request
        self.eager = ""  # the reason to run the module's own forward, if any
        self.made: dict[Any, RewrittenFlow] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Drop the rewritten forwards: in a copy, children may have other hooks or rows."""
        return self.__dict__ | {"made": {}}

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten forward; call `inner` only if there is a reason to run it eagerly."""
        if self.eager:
            note_declined(self.module, "fuse", self.eager)
            return inner(*args, **kwargs)
        arguments = flow_arguments_of(self.module, args, kwargs)
        training = tuple(m.training for m in self.module.modules())
        key = arguments.key, training, torch.is_grad_enabled()
        if key not in self.made:
            graph, matches = matches_in_module(self.module, self.told, arguments)
            self.made[key] = rewrite_flow(graph, matches, self.module, self.told.options)
        flow = self.made[key]
        return flow.run(self.module, *(arguments.tensors[name] for name in flow.names))
