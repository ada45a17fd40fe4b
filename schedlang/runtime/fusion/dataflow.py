"""The data flow of one module's forward: a torch.fx trace, and the function of each node.

`fuse` with patterns and `replace_kernel(add_norm)` find calls that one kernel can run by it.
"""

from __future__ import annotations

import dis
import inspect
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.patterns import FUNCTIONS
from schedlang.runtime.device import operator_context
from schedlang.runtime.forward import layers_of
from schedlang.runtime.forward_attributes import AttributeSnapshot
from schedlang.runtime.fusion.call_arguments import arguments_of
from schedlang.runtime.modes import sees_model_calls

# -- the function of a node ------------------------------------------------------------------------


# torch's order of arguments, where it differs from that of a pattern
ARGUMENT_ORDER: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "dropout": ("input", "p", "training", "inplace"),
    "mean": ("input", "dim", "keepdim"),
    "sum": ("input", "dim", "keepdim"),
    "to": ("input", "dtype"),
    "elu": ("input", "alpha", "inplace"),
    "leaky_relu": ("input", "negative_slope", "inplace"),
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"approximate": "none"},
    "layer_norm": {"eps": 1e-5},
    "dropout": {"p": 0.5},
    "elu": {"alpha": 1.0},
    "leaky_relu": {"negative_slope": 0.01},
    "mean": {"keepdim": False},
    "sum": {"keepdim": False},
}
METHOD_NAMES: Mapping[str, str] = {
    **{name: name for name in FUNCTIONS if hasattr(torch.Tensor, name)},
    "float": "to",
    "type_as": "to",
    "half": "to",
    "bfloat16": "to",
    "double": "to",
    "__add__": "add",
    "__mul__": "mul",
    "__matmul__": "matmul",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "true_divide": "div",
    "mm": "matmul",
    "bmm": "matmul",
}
VIEWS = frozenset(
    (
        *("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten"),
        *("t", "unflatten", "chunk", "split", "unbind", "narrow", "select", "size", "dim"),
        *("getitem", "getattr", "view_as", "expand_as", "detach", "movedim", "swapaxes"),
        *("contiguous", "dropout"),
    )
)


def _functions() -> dict[Any, str]:
    names: dict[Any, str] = {}
    for name in FUNCTIONS:
        for namespace in (torch, F, torch.special, torch._C._nn):
            function = getattr(namespace, name, None)
            if callable(function):
                names[function] = name
    for name in ("add", "sub", "mul", "matmul", "neg", "abs", "pow"):
        names[getattr(operator, name)] = name
    names[operator.truediv] = "div"
    names[torch.bmm] = names[torch.mm] = "matmul"
    return names


FUNCTION_NAMES = _functions()


def operation_of(node: fx.Node, root: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a node's function and its arguments by name; None if it has no name."""
    name = function_name(node, root)
    if name is None or node.kwargs.get("inplace"):
        return None
    order = ARGUMENT_ORDER.get(name, FUNCTIONS[name])
    if len(node.args) > len(order):
        order = (*order, *(f"more {index}" for index in range(len(node.args))))
    arguments = {**dict(zip(order, node.args)), **node.kwargs}
    if arguments.get("inplace") or "input" not in arguments:
        return None
    if node.op == "call_module":
        arguments["p"] = _module(node, root).p
    return name, {**DEFAULTS.get(name, {}), **arguments}


def function_name(node: fx.Node, root: nn.Module) -> str | None:
    """Return the name of a node's function, if patterns can contain it."""
    if node.op == "call_function":
        return FUNCTION_NAMES.get(node.target)
    if node.op == "call_method":
        return METHOD_NAMES.get(str(node.target))
    if node.op == "call_module" and is_dropout(_module(node, root)):
        return "dropout"
    return None


def is_dropout(module: nn.Module) -> bool:
    """Return whether a module drops single elements, and does nothing else."""
    return type(module) is nn.Dropout


def _module(node: fx.Node, root: nn.Module) -> Any:
    return root.get_submodule(str(node.target))


def describe_node(node: fx.Node, root: nn.Module) -> str:
    """Describe a node for a message."""
    if node.op == "call_module":
        return f"{type(_module(node, root)).__name__} (`{node.target}`)"
    if node.op == "get_attr":
        return f"the parameter `{node.target}`"
    if node.op == "placeholder":
        return f"the argument `{node.target}`"
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return f"`{name}`"


def writes_in_place(node: fx.Node) -> bool:
    """Return whether a node changes a tensor in place."""
    target: Callable[..., Any] | str = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if node.op not in ("call_function", "call_method"):
        return False
    changed = name in ("setitem", "__setitem__") or name in _IN_PLACE
    changed = changed or (name.endswith("_") and not name.endswith("__"))
    return changed or bool(node.kwargs.get("inplace"))


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ipow", "__iadd__", "__imul__", "__isub__")


def count_kernels(graph: fx.Graph, root: nn.Module) -> int:
    """Return the least number of kernels that a data flow runs; a called module counts as 2."""
    count = 0
    for node in graph.nodes:
        if node.op == "call_module":
            count += 0 if is_dropout(_module(node, root)) else 2
        elif node.op in ("call_function", "call_method"):
            target: Any = node.target
            name = target if isinstance(target, str) else getattr(target, "__name__", "")
            count += name not in VIEWS
    return count


# -- tests that a trace cannot answer -------------------------------------------------------------
# During a trace every value is a proxy, which is never None; a forward that tests for None would be
# traced along the branch of a value, whatever the child really returns. Python has no hook for
# `is`, so the instructions of the forward are watched as they run. The contents of arguments are
# known: for them only a test that should have been true is wrong.


_Trace = Callable[[FrameType, str, Any], Any]


@contextmanager
def record_none_tests(module: nn.Module, tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """Record, as text, tests for None while `module` is traced that the trace answers wrongly.

    These are tests of values returned by children, and of Nones in the arguments `tensors`.
    """
    findings: list[str] = []

    def enter(frame: FrameType, event: str, arg: Any) -> _Trace | None:
        if _is_foreign(frame.f_code) or not _none_tests(frame.f_code):
            return None
        # from Python 3.13 on, opcode events need this to be set before the frame is traced
        frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = step, True, False
        return step

    def step(frame: FrameType, event: str, arg: Any) -> _Trace:
        names = _none_tests(frame.f_code).get(frame.f_lasti, ()) if event == "opcode" else ()
        for name, itself in names:
            value = frame.f_locals.get(name)
            if not isinstance(value, fx.Proxy):
                continue
            child = _child_returning(value.node, module)
            if child is not None:
                findings.append(f"it asks whether `{name}`, returned by `{child}`, is None")
            elif _is_none(_argument_value(value.node, tensors), itself):
                findings.append(
                    f"it asks whether `{name}`, or what it holds, is None, as it is here"
                )
        return step

    old_trace = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reads this once, when tracing begins
    sys.settrace(enter)
    try:
        yield findings
    finally:
        sys.settrace(old_trace)


def _is_foreign(code: CodeType) -> bool:
    return "/torch/" in code.co_filename or "/schedlang/" in code.co_filename


@cache
def _none_tests(code: CodeType) -> dict[int, tuple[tuple[str, bool], ...]]:
    """Return, for each comparison with None by offset, the names that it may be about.

    With each name: whether the comparison is about the variable itself, or about a value made from
    it.
    """
    tests: dict[int, tuple[tuple[str, bool], ...]] = {}
    line: list[dis.Instruction] = []
    for step in dis.get_instructions(code):
        if step.starts_line:
            line = []
        of_none = "IF_NONE" in step.opname or "IF_NOT_NONE" in step.opname
        is_op = step.opname == "IS_OP" and bool(line) and line[-1].opname == "LOAD_CONST"
        is_op = is_op and line[-1].argval is None
        if of_none or is_op:
            operands = line[:-1] if is_op else line
            loaded = [_loaded_names(i) for i in operands]
            itself = loaded[-1][-1:] if loaded else ()  # else about a value made from the names
            names = itself or tuple(name for names in loaded for name in names)
            tests[step.offset] = tuple((name, bool(itself)) for name in names)
        line.append(step)
    return tests


def _loaded_names(step: dis.Instruction) -> tuple[str, ...]:
    """Return the variables that an instruction loads, in order; up to two from Python 3.13 on."""
    names = step.argval if isinstance(step.argval, tuple) else (str(step.argval),)
    if step.opname == "STORE_FAST_LOAD_FAST":
        return names[1:]
    return names if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else ()


def _argument_value(node: fx.Node, tensors: Mapping[str, Any]) -> Any:
    """Return the value of an argument, or of an item of one, in this call; None where unknown."""
    if node.op == "placeholder":
        return tensors.get(str(node.target), 0)
    if node.op != "call_function" or node.target is not operator.getitem:
        return 0  # computed: a tensor, or the output of a child
    source, key = node.args[0], cast(Any, node.args[1])
    container = _argument_value(source, tensors) if isinstance(source, fx.Node) else 0
    try:
        return container[key] if isinstance(container, Mapping | Sequence) else container
    except (LookupError, TypeError):
        return None


def _is_none(value: Any, itself: bool) -> bool:
    """Return whether a value is None, or, unless `itself`, contains a None."""
    if itself or value is None or not isinstance(value, Mapping | tuple | list):
        return value is None
    inside = value.values() if isinstance(value, Mapping) else value
    return any(_is_none(item, itself) for item in inside)


def _child_returning(node: fx.Node, module: nn.Module) -> str | None:
    """Return the child whose output (or an item of it) a value is; None: always a tensor."""
    while node.op == "call_function" and node.target in (operator.getitem, getattr):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        node = source
    if node.op != "call_module":
        return None
    child = module.get_submodule(str(node.target))
    tensor = type(child).__module__.startswith("torch.nn.")
    return None if tensor and not isinstance(child, nn.MultiheadAttention) else str(node.target)


# -- the trace -------------------------------------------------------------------------------------
# Values that are no tensors (None, flags, numbers) are constants of one flow; a module has one flow
# for each set of constants, and for training and evaluation. A forward that cannot be traced, such
# as a branch that depends on a tensor, is refused with its line. Only this file depends on how fx
# traces.


# large kernels of their own
LARGE_KERNELS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_lock = threading.Lock()  # a trace patches torch's module class while it runs


@dataclass(frozen=True)
class TraceDepth:
    """The depth of a flow: which modules stay calls, and which projections have a separate bias."""

    calls: frozenset[str] = frozenset()
    decomposed: frozenset[str] = frozenset()
    products: bool = False  # trace into linear layers, too
    undecorated: bool = False  # trace the forward inside its decorators, which the caller keeps


@dataclass(frozen=True)
class FlowArguments:
    """The arguments of a call by name: inputs of the flow (`tensors`), and constants."""

    tensors: Mapping[str, Any]
    constants: Mapping[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for calls with the same flow."""
        inside = tuple((n, structure_of(v)) for n, v in self.tensors.items())
        return inside, tuple((n, repr(v)) for n, v in self.constants.items())


def structure_of(value: Any) -> Any:
    """Return the structure of an argument that a trace may ask for.

    This is: keys of a dict, length of a list, and which items are None.
    """
    if isinstance(value, dict):
        return "dict", *((key, structure_of(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return "list", *(structure_of(item) for item in value)
    return "none" if value is None else "value"


def value_with_structure(inside: Any) -> Any:
    """Return a value with this structure, see `structure_of`."""
    if isinstance(inside, str):
        return None if inside == "none" else inside
    kind, *parts = inside
    values = [value_with_structure(part[1] if kind == "dict" else part) for part in parts]
    return dict(zip((part[0] for part in parts), values)) if kind == "dict" else values


def flow_arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> FlowArguments:
    """Split the arguments of a call of a module's own forward into tensors and constants."""
    arguments = arguments_of(type(module).forward)(module, *args, **kwargs)
    parts = {n: v for n, v in arguments.items() if _holds(v)}
    return FlowArguments(parts, {n: v for n, v in arguments.items() if n not in parts})


def invented_arguments(module: nn.Module) -> FlowArguments:
    """Invent a call with a tensor for each required argument, and defaults for the others."""
    params = list(inspect.signature(type(module).forward).parameters.values())[1:]
    free: dict[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}
    needed = {p.name: torch.empty(0) for p in params if p.default is p.empty and p.kind not in free}
    optional = {p.name: free.get(p.kind, p.default) for p in params if p.name not in needed}
    return FlowArguments(needed, optional)


def _holds(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def trace_flow(module: nn.Module, arguments: FlowArguments, depth: TraceDepth) -> fx.Graph:
    """Trace one call; return its data flow, or raise Refusal S883."""
    with _lock, without_function_modes(), _unchanged_attributes(module):
        tracer = Tracer(module, arguments, depth)
        try:
            while True:
                try:
                    with record_none_tests(module, arguments.tensors) as questions:
                        graph = tracer.trace(module)
                except _DrawsRandom as inside:
                    tracer = Tracer(module, arguments, depth, tracer.whole | {inside.path})
                    continue
                if questions:
                    raise _flow_refusal(module, questions[:1])
                return _with_plain_inputs(graph)
        except Refusal:
            raise
        except Exception as error:  # a forward may raise anything for proxies
            raise _refusal(module, error) from error


@contextmanager
def _unchanged_attributes(module: nn.Module) -> Iterator[None]:
    """Restore the plain attributes of modules after a trace; refuse (S883) one that it has set.

    A rewritten forward would not set it again.
    """
    snapshot = AttributeSnapshot(list(module.named_modules()))
    try:
        yield
    finally:
        snapshot.store_changes(type(module).__name__)
        changed = snapshot.undo()
    if changed:
        raise _flow_refusal(module, [f"its forward changes the attribute `{changed}`"])


def _with_plain_inputs(graph: fx.Graph) -> fx.Graph:
    """Return a graph with plain inputs and outputs, where fx made one of flat lists."""
    codegen = graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        output = next(iter(reversed(graph.nodes)))
        spec, flat = codegen.pytree_info.out_spec, output.args[0]
        graph.set_codegen(CodeGen())
        if spec is not None:
            assert isinstance(flat, tuple | list)
            output.args = (pytree.tree_unflatten(list(flat), spec),)
    return graph


def _refusal(module: nn.Module, error: Exception) -> Refusal:
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "/torch/" not in f.filename and "/schedlang/" not in f.filename]
    lines = [f"{f.filename.rpartition('/')[2]}:{f.lineno}: {f.line}" for f in outside[-1:]]
    kind = "" if isinstance(error, _OtherState) else f"{type(error).__name__}: "
    return _flow_refusal(module, [f"{kind}{error}".split("\n")[0], *lines])


def _flow_refusal(module: nn.Module, notes: Iterable[str]) -> Refusal:
    message = f"the data flow of `{type(module).__name__}` cannot be followed"
    helps = ("name a smaller module, one that computes what the pattern says",)
    return Refusal.of("S883", message, notes=tuple(notes), helps=helps)


class _DrawsRandom(Exception):
    """Raised if a child draws random numbers by a function: the child must stay a call."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _OtherState(Exception):
    """Raised if a part of a forward runs without gradients, or under another autocast."""


class Tracer(fx.Tracer):
    """Traces one module's forward in place."""

    proxy_buffer_attributes = True  # else changes of a buffer would be executed while tracing

    def __init__(
        self,
        module: nn.Module,
        arguments: FlowArguments,
        depth: TraceDepth,
        opaque: Set[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.module, self.given, self.looked = module, arguments, depth
        self.whole = depth.calls | opaque
        self.inside: list[str] = []
        self.state = operator_context()

    def create_args_for_root(self, root_fn: Any, *args: Any) -> Any:
        """Return the function to trace, and its arguments."""
        followed = inspect.unwrap(root_fn) if self.looked.undecorated else root_fn
        return super().create_args_for_root(followed, *args)

    def create_arg(self, a: Any) -> Any:
        """Return a value as a node; fx would turn dataclass outputs that are dicts into plain
        dicts.

        Raises TypeError for a dict class that cannot be rebuilt from its items.
        """
        if not isinstance(a, dict) or type(a) is dict:
            return super().create_arg(a)
        if not is_dataclass(a):
            raise TypeError(f"it gives a `{type(a).__name__}`")
        proxy = self.create_proxy("call_function", type(a), (), dict(a))
        return proxy.node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module stays a call: large kernel, dropout, one with hooks or layers."""
        products = () if self.looked.products else LARGE_KERNELS
        is_leaf = isinstance(m, products) or is_dropout(m) or module_qualified_name in self.whole
        return is_leaf or has_changed_call(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a child's call; a projection with a separate bias becomes product and addition."""
        path = self.path_of_module(m)
        if path in self.looked.decomposed:
            owner = self.create_proxy("get_attr", path, (), {})
            product = self.create_proxy("call_function", sharded_product, (owner, *args), kwargs)
            bias = self.create_proxy("get_attr", f"{path}.bias", (), {})
            return self.create_proxy("call_function", operator.add, (product, bias), {})
        self.inside.append(path)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.inside.pop()

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node; raise `_DrawsRandom` if it draws random numbers inside a traced child."""
        if kind != "output" and operator_context() != self.state:
            raise _OtherState("a part of it runs without gradients, or under another autocast")
        draws = "dropout" in getattr(target, "__name__", str(target))
        if kind == "call_function" and draws and self.inside:
            raise _DrawsRandom(self.inside[-1])
        return super().create_node(kind, target, *args, **kwargs)

    def _proxy_placeholder(self, name: str, *args: Any) -> Any:
        """Return a proxy for an argument of the flow, or its constant."""
        plain_name = name.lstrip("*")
        if plain_name in self.given.constants:
            return self.given.constants[plain_name]
        return self.create_proxy("placeholder", plain_name, (), {})

    def keys(self, obj: fx.Proxy) -> Any:
        """Return the keys of an argument that is a dict, as in this call."""
        value = self.given.tensors.get(str(obj.node.target))
        return iter(value) if isinstance(value, Mapping) else super().keys(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Return the items of an argument that is a list, as many as in this call."""
        value = self.given.tensors.get(str(obj.node.target))
        if obj.node.op == "placeholder" and isinstance(value, tuple | list):
            items: Any = obj
            return iter([items[index] for index in range(len(value))])
        return super().iter(obj)


def has_changed_call(module: nn.Module) -> bool:
    """Return whether hooks or a replaced forward change a call of this module."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    foreign = [h for kind in hooks for h in kind.values() if not _is_scope_hook(h)]
    return bool(foreign) or "forward" in vars(module) or hasattr(module, "_get_fsdp_state")


def _is_scope_hook(hook: Any) -> bool:
    """Return whether a hook is that of schedlang's scope, which only tracks the running module."""
    return getattr(hook, "__module__", "") == "schedlang.runtime.scope"


def sharded_product(module: nn.Module, x: Tensor) -> Tensor:
    """Return the product of a projection, also where it is sharded; its bias is added outside."""
    from schedlang.runtime.fusion.decomposed_bias import product_without_bias

    return product_without_bias(module, x)


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Leave all function modes within the block."""
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        yield


def is_ignored_mode_active() -> bool:
    """Return whether a function mode is active that must not be traced into a graph."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(map(sees_model_calls, modes))


def has_replaced_forward(module: nn.Module) -> bool:
    """Return whether the module's own forward was replaced."""
    layers = layers_of(module)
    return layers is not None and (
        layers.original is not None or bool({"kernel", "attend", "context"} & set(layers.kinds))
    )
