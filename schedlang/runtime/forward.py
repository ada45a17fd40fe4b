"""Put layers around the forward of one module instance; copy a forward with other names in it.

* `wrap` puts layers around the forward of one instance; the module stays what it is. The layers
  become the instance's `forward`, inside `__call__`: the module's own hooks see each call once, and
  its class, parameters, children, names and state_dict do not change. A module has one wrapper for
  all layers, and calls them in a fixed order, in whichever order they were put: from the inside out
  as in `ORDER`.

The new forward is a bound method of a function that all instances of a class share, and all else is
stored in the instance. So a deep copy has layers bound to the copy, while closures would go on
calling the original with its parameters; and torch.compile takes equal modules for equal.
* `change_innermost` and `with_globals` copy a forward with another innermost function, or with
  other values for global names. The function of a class is never changed: the copy belongs to the
  modules that run it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal

ORDER = (
    *("kernel", "attend", "context", "fuse"),  # what the module computes
    *("sizes", "parts", "sharded", "arrivals"),  # on which shards of its tensors
    *("draws", "decode", "cast", "stream", "checkpoint", "code", "offload", "gathered"),
)

Layer = Callable[..., Any]  # layer(inner, *args, **kwargs) calls inner, or computes its result
_SLOT = "_schedlang_forward"


@dataclass(eq=False)
class ForwardLayers:
    """The layers around a module's forward: at most one of each kind.

    original  the forward of the instance; None: the one of its class
    plain     the forward below the layers
    call      runs the layers, nested in the order of `ORDER`
    """

    module: nn.Module
    original: Callable[..., Any] | None
    kinds: dict[str, Layer] = field(default_factory=dict)
    plain: Callable[..., Any] = field(init=False)
    call: Callable[..., Any] = field(init=False)

    def put(self, kind: str, layer: Layer) -> None:
        """Add or replace the layer of a kind."""
        self.kinds[kind] = layer
        # dynamo cannot trace the bound method
        original = partial(type(self.module).forward, self.module)
        self.call = self.plain = original if self.original is None else self.original
        for name in ORDER:
            if name in self.kinds:
                self.call = partial(self.kinds[name], self.call)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardLayers:
        """Return the layers of a copy of the module, bound to the copy."""
        twin = ForwardLayers(*copy.deepcopy((self.module, self.original), memo))
        for kind, layer in self.kinds.items():
            twin.put(kind, copy.deepcopy(layer, memo))
        return twin

    def __reduce__(self) -> Any:
        """Refuse to be pickled: the instance's method would be unpickled as the method of its
        class."""
        raise TypeError("a module with layers around its forward cannot be pickled; its state can")


def wrap(module: nn.Module, kind: str, layer: Layer) -> None:
    """Put `layer` around the forward of this instance; `kind` is one of `ORDER`.

    The forward that the instance has at the first call of `wrap` is the innermost. Raises Refusal
    S401 for the result of `torch.compile(module)`.
    """
    assert kind in ORDER, kind
    layers: ForwardLayers | None = vars(module).get(_SLOT)
    if hasattr(module, "_orig_mod"):  # attributes set on it are set on the module that it wraps
        raise Refusal.of(
            "S401",
            f"a `{type(module._orig_mod).__name__}` from `torch.compile` takes no such row",
            helps=("let `module.compile()` compile it where it is",),
        )
    if layers is None:
        layers = ForwardLayers(module, vars(module).get("forward"))
        setattr(module, _SLOT, layers)
        owner: Any = type(module)
        module.forward = MethodType(_layered(owner), module)
    layers.put(kind, layer)


def the_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the only argument of a call; raise Refusal S821 if there are more."""
    values = [*args, *(value for value in kwargs.values() if value is not None)]
    if len(values) == 1:
        tensor: Tensor = values[0]
        return tensor
    raise Refusal.of(
        "S821",
        f"`{type(module).__name__}` was called with {len(values)} arguments, but its kernel"
        " takes one",
        helps=("leave this module as it is",),
    )


def layers_of(module: nn.Module) -> ForwardLayers | None:
    """Return the layers around the forward of a module; None if it has none."""
    return vars(module).get(_SLOT)


def layer_of(module: nn.Module, kind: str) -> Any:
    """Return the layer of a kind around the forward of a module, or None."""
    layers: ForwardLayers | None = vars(module).get(_SLOT)
    return layers.kinds.get(kind) if layers is not None else None


def forward_below(module: nn.Module, kind: str) -> Callable[..., Any]:
    """Return the callable that the layer of a kind is put around; the module must have that
    layer."""
    layers: ForwardLayers = vars(module)[_SLOT]
    call: Any = layers.call
    while call.func is not layers.kinds[kind]:
        (call,) = call.args
    inner: Callable[..., Any] = call.args[0]
    return inner


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward below all layers."""
    layers = layers_of(module)
    return module.forward if layers is None else layers.plain


@functools.cache
def _layered(owner: Any) -> Callable[..., Any]:
    """Return the forward that all wrapped modules of one class share."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_SLOT].call(*args, **kwargs)

    # a code object of its own: torch keeps graphs and observed sizes by code object
    forward.__code__ = forward.__code__.replace()
    forward.__wrapped__ = owner.forward  # type: ignore[attr-defined]  # for inspect.signature
    return forward


def change_innermost(function: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the innermost function, in copies of the decorators around it."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return change(function)
    new = change_innermost(inner, change)
    cells = tuple(CellType(new) if _holds(cell, inner) else cell for cell in function.__closure__)
    copied = _copied(function, function.__globals__, cells)
    copied.__wrapped__ = new
    return copied


def with_globals(function: Any, named: Mapping[str, Any]) -> Any:
    """Copy a function with other values for some of its global names."""
    # torch.compile would look the names up in the module's file if it knew the file
    names = {n: v for n, v in function.__globals__.items() if n != "__name__"} | dict(named)
    return _copied(function, names, function.__closure__)


def _copied(function: FunctionType, namespace: dict[str, Any], cells: Any) -> Any:
    function_copy: Any = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, cells
    )
    function_copy.__kwdefaults__ = function.__kwdefaults__
    function_copy.__dict__.update(function.__dict__)
    return function_copy


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False
