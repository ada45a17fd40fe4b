"""The data flow of one module's forward: torch.fx's trace of it, small children looked into.

Values that are no tensors (None, flags, numbers) are constants of one flow; a module has a flow for
each set of them, and for training and evaluation.  What a flow cannot hold, such as a choice that
depends on a tensor, is refused with the line.  This is the one file that knows how fx traces.
"""

from __future__ import annotations

import inspect
import operator
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.forward import layers_of
from schedlang.runtime.regions.arguments import arguments_of
from schedlang.runtime.regions.ops import is_dropout
from schedlang.runtime.regions.questions import asked

WHOLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # large kernels of their own
_lock = threading.Lock()  # a trace changes torch's module class while it lasts


@dataclass(frozen=True)
class Looked:
    """How far a flow looks: what stays a call though it need not, and whose bias stands apart."""

    whole: frozenset[str] = frozenset()
    decomposed: frozenset[str] = frozenset()
    products: bool = False  # look into linear layers, too
    bare: bool = False  # follow the forward inside of its decorators, which someone else keeps


@dataclass(frozen=True)
class Given:
    """The arguments of a call by name: those that are parts of the flow, and constants."""

    tensors: Mapping[str, Any]
    constants: Mapping[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that have one flow."""
        inside = tuple((n, inside_of(v)) for n, v in self.tensors.items())
        return inside, tuple((n, repr(v)) for n, v in self.constants.items())


def inside_of(value: Any) -> Any:
    """What a trace may ask of an argument that holds tensors: a dict's keys, a list's length, and
    what in it is None."""
    if isinstance(value, dict):
        return "dict", *((key, inside_of(one)) for key, one in value.items())
    if isinstance(value, tuple | list):
        return "list", *(inside_of(one) for one in value)
    return "none" if value is None else "value"


def like(inside: Any) -> Any:
    """A value of which `inside_of` says the same."""
    if isinstance(inside, str):
        return None if inside == "none" else inside
    kind, *parts = inside
    made = [like(part[1] if kind == "dict" else part) for part in parts]
    return dict(zip((part[0] for part in parts), made)) if kind == "dict" else made


def given_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """What a call gives to a module's own forward."""
    named = arguments_of(type(module).forward)(module, *args, **kwargs)
    parts = {n: v for n, v in named.items() if _holds(v)}
    return Given(parts, {n: v for n, v in named.items() if n not in parts})


def imagined(module: nn.Module) -> Given:
    """Of a call that gives tensors wherever it must, and nothing else."""
    found = list(inspect.signature(type(module).forward).parameters.values())[1:]
    free: dict[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}
    needed = {p.name: torch.empty(0) for p in found if p.default is p.empty and p.kind not in free}
    rest = {p.name: free.get(p.kind, p.default) for p in found if p.name not in needed}
    return Given(needed, rest)


def _holds(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def flow(module: nn.Module, given: Given, looked: Looked) -> fx.Graph:
    """The flow of one call; S883 where there is none."""
    tracer = Tracer(module, given, looked)
    with _lock, plain_torch():
        try:
            while True:
                try:
                    with asked(module, given.tensors) as questions:
                        graph = tracer.trace(module)
                except _Draws as inside:
                    tracer = Tracer(module, given, looked, tracer.whole | {inside.path})
                    continue
                if questions:
                    raise _refused(module, questions[:1])
                return _plain(graph)
        except Refusal:
            raise
        except Exception as error:  # whatever a forward does with what are no tensors
            raise _refusal(module, error) from error


def _plain(graph: fx.Graph) -> fx.Graph:
    """The graph as a function of its parts, where fx made one of flat lists: of a constant too."""
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
    own = [f for f in frames if "/torch/" not in f.filename and "/schedlang/" not in f.filename]
    where = [f"{f.filename.rpartition('/')[2]}:{f.lineno}: {f.line}" for f in own[-1:]]
    said = f"{type(error).__name__}: {error}".split("\n")[0]
    return _refused(module, [said, *where])


def _refused(module: nn.Module, notes: Iterable[str]) -> Refusal:
    title = f"the data flow of `{type(module).__name__}` cannot be followed"
    helps = ("name a smaller module, one that computes what the pattern says",)
    return Refusal(Diagnostic("S883", title, notes=tuple(notes), helps=helps))


class _Draws(Exception):
    """A child draws random numbers in a function of its own: they belong to its place."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Tracer(fx.Tracer):
    """Traces one module's forward in place."""

    proxy_buffer_attributes = True  # or what it does to a buffer would be done while it is traced

    def __init__(
        self, module: nn.Module, given: Given, looked: Looked, whole: Set[str] = frozenset()
    ) -> None:
        super().__init__()
        self.module, self.given, self.looked = module, given, looked
        self.whole = looked.whole | whole
        self.inside: list[str] = []

    def create_args_for_root(self, root_fn: Any, *given: Any) -> Any:
        """The function that is followed, and its arguments."""
        followed = inspect.unwrap(root_fn) if self.looked.bare else root_fn
        return super().create_args_for_root(followed, *given)

    def create_arg(self, a: Any) -> Any:
        """A value as the flow holds it; fx makes plain dicts of outputs that are dicts with names.

        Raises TypeError for a kind of dict that cannot be made again from its items.
        """
        if not isinstance(a, dict) or type(a) is dict:
            return super().create_arg(a)
        if not is_dataclass(a):
            raise TypeError(f"it gives a `{type(a).__name__}`")
        made = self.create_proxy("call_function", type(a), (), dict(a))
        return made.node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Large kernels, and whatever something was done to."""
        products = () if self.looked.products else WHOLE
        kept = isinstance(m, products) or is_dropout(m) or module_qualified_name in self.whole
        return kept or touched(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A child's call; of a projection whose bias stands apart the product, and the sum."""
        path = self.path_of_module(m)
        if path in self.looked.decomposed:
            at = self.create_proxy("get_attr", path, (), {})
            product = self.create_proxy("call_function", without_bias, (at, *args), kwargs)
            bias = self.create_proxy("get_attr", f"{path}.bias", (), {})
            return self.create_proxy("call_function", operator.add, (product, bias), {})
        self.inside.append(path)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.inside.pop()

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node; one that draws numbers belongs to the module that was traced."""
        draws = "dropout" in getattr(target, "__name__", str(target))
        if kind == "call_function" and draws and self.inside:
            raise _Draws(self.inside[-1])
        return super().create_node(kind, target, *args, **kwargs)

    def _proxy_placeholder(self, name: str, *more: Any) -> Any:
        """An argument of the flow, or the constant that it always is."""
        bare = name.lstrip("*")
        if bare in self.given.constants:
            return self.given.constants[bare]
        return self.create_proxy("placeholder", bare, (), {})

    def keys(self, obj: fx.Proxy) -> Any:
        """Of an argument that is a dict those of this call."""
        value = self.given.tensors.get(str(obj.node.target))
        return iter(value) if isinstance(value, Mapping) else super().keys(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Of an argument that is a list as many as in this call."""
        value = self.given.tensors.get(str(obj.node.target))
        if obj.node.op == "placeholder" and isinstance(value, tuple | list):
            several: Any = obj
            return iter([several[place] for place in range(len(value))])
        return super().iter(obj)


def touched(module: nn.Module) -> bool:
    """Is there more to a call of this module than its class's forward?"""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
             module._backward_pre_hooks)  # fmt: skip
    foreign = [h for kind in hooks for h in kind.values() if not _ours(h)]
    return bool(foreign) or "forward" in vars(module) or hasattr(module, "_get_fsdp_state")


def _ours(hook: Any) -> bool:
    """Does a hook only say which module runs?"""
    return getattr(hook, "__module__", "") == "schedlang.runtime.scope"


def without_bias(module: nn.Module, x: Tensor) -> Tensor:
    """The product of a projection, by its parts where it is sharded; its bias is added outside."""
    from schedlang.runtime.regions.decomposed import product

    return product(module, x)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Without the function modes that hold here."""
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        yield


def owned(module: nn.Module) -> bool:
    """Has the module's own forward something else in its place?"""
    layers = layers_of(module)
    return layers is not None and (
        layers.original is not None or bool({"kernel", "attend", "context"} & set(layers.kinds))
    )
