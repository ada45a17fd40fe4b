"""Put layers around the forward of one module instance; copy a forward with other names in it.

* Put layers around the forward of one module instance; the module itself stays what it is. The
  layers become the instance's `forward`, inside `__call__`: the module's own hooks see each call
  once, and its class, parameters, children, names and state_dict do not change.  A module has one
  such wrapper, whatever is done to it, and calls its layers in a fixed order, whichever was put
  on first: from the inside out as in `ORDER`.

  The new forward is a bound method of a function that all instances of a class share, and
  everything else lies in the instance.  A deep copy then has layers bound to the copy, where
  closures would go on calling the original with its parameters; and torch.compile takes equal
  modules for equal.
* Copies of a forward in which something else is found: other names, or another innermost
  function. A class's own function is never changed: what is copied belongs to the modules that
  run it.
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
    *("kernel", "attend", "context", "fuse"),  # what it computes
    *("sizes", "parts", "sharded", "arrivals"),  # on which part of its tensors
    *("draws", "decode", "cast", "stream", "checkpoint", "code", "offload"),
)

Layer = Callable[..., Any]  # layer(inner, *args, **kwargs) calls inner, or computes in its place
_SLOT = "_schedlang_forward"


@dataclass(eq=False)
class Layers:
    """The layers around a module's forward: at most one of each kind.

    original  the forward of the instance; None: its class's own
    plain     the forward below the layers
    call      what a call of the module runs: the layers around each other, as they were put
    """

    module: nn.Module
    original: Callable[..., Any] | None
    kinds: dict[str, Layer] = field(default_factory=dict)
    plain: Callable[..., Any] = field(init=False)
    call: Callable[..., Any] = field(init=False)

    def put(self, kind: str, layer: Layer) -> None:
        """Add or replace the layer of a kind."""
        self.kinds[kind] = layer
        own = partial(type(self.module).forward, self.module)  # a method dynamo cannot trace
        self.call = self.plain = own if self.original is None else self.original
        for name in ORDER:
            if name in self.kinds:
                self.call = partial(self.kinds[name], self.call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layers:
        """The layers of a copy of the module, bound to the copy."""
        twin = Layers(*copy.deepcopy((self.module, self.original), memo))
        for kind, layer in self.kinds.items():
            twin.put(kind, copy.deepcopy(layer, memo))
        return twin

    def __reduce__(self) -> Any:
        """Refuse to be pickled: a method of an instance would come back as that of its class."""
        raise TypeError("a module with layers around its forward cannot be pickled; its state can")


def wrap(module: nn.Module, kind: str, layer: Layer) -> None:
    """Put `layer` around the forward of this instance; `kind` is one of ORDER.

    Whatever forward the instance has at the first call is the innermost.
    """
    assert kind in ORDER, kind
    layers: Layers | None = vars(module).get(_SLOT)
    if hasattr(module, "_orig_mod"):  # what is set on it is set on the module that it wraps
        raise Refusal.of(
            "S401",
            f"a `{type(module._orig_mod).__name__}` from `torch.compile` takes no such row",
            helps=("let `module.compile()` compile it where it is",),
        )
    if layers is None:
        layers = Layers(module, vars(module).get("forward"))
        setattr(module, _SLOT, layers)
        owner: Any = type(module)
        module.forward = MethodType(_layered(owner), module)
    layers.put(kind, layer)


def the_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The one argument of a call; raises Refusal S821 where there are more."""
    given = [*args, *(value for value in kwargs.values() if value is not None)]
    if len(given) == 1:
        found: Tensor = given[0]
        return found
    raise Refusal.of(
        "S821",
        f"`{type(module).__name__}` was called with {len(given)} arguments, but its kernel"
        " takes one",
        helps=("leave this module as it is",),
    )


def layers_of(module: nn.Module) -> Layers | None:
    """The layers around the forward of a module; None if it has its own."""
    return vars(module).get(_SLOT)


def layer_of(module: nn.Module, kind: str) -> Any:
    """The layer of a kind around the forward of a module, or None."""
    layers: Layers | None = vars(module).get(_SLOT)
    return layers.kinds.get(kind) if layers is not None else None


def below(module: nn.Module, kind: str) -> Callable[..., Any]:
    """Return what the layer of a kind, which the module has, is put around."""
    layers: Layers = vars(module)[_SLOT]
    call: Any = layers.call
    while call.func is not layers.kinds[kind]:
        (call,) = call.args
    found: Callable[..., Any] = call.args[0]
    return found


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward below all layers."""
    layers = layers_of(module)
    return module.forward if layers is None else layers.plain


def unwrap(module: nn.Module) -> None:
    """Take all layers off again."""
    layers = layers_of(module)
    if layers is None:
        return
    del module.forward
    if layers.original is not None:
        module.forward = layers.original
    delattr(module, _SLOT)


@functools.cache
def _layered(owner: Any) -> Callable[..., Any]:
    """The forward of all wrapped modules of one class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_SLOT].call(*args, **kwargs)

    # of its own, for torch keeps graphs and the sizes that it saw by code object
    forward.__code__ = forward.__code__.replace()
    forward.__wrapped__ = owner.forward  # type: ignore[attr-defined]  # for inspect.signature
    return forward


def decorated(function: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the innermost function, in copies of the decorators around it."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return change(function)
    made = decorated(inner, change)
    cells = tuple(CellType(made) if _holds(cell, inner) else cell for cell in function.__closure__)
    copied = _copied(function, function.__globals__, cells)
    copied.__wrapped__ = made
    return copied


def other_names(function: Any, named: Mapping[str, Any]) -> Any:
    """A copy that finds other values under some of its file's names."""
    # torch.compile would look the names up in the file, if it knew which file that is
    space = {n: v for n, v in function.__globals__.items() if n != "__name__"} | dict(named)
    return _copied(function, space, function.__closure__)


def _copied(function: FunctionType, space: dict[str, Any], cells: Any) -> Any:
    made: Any = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False
