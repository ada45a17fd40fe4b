"""Put layers around the forward of one module instance; copy a forward with other names in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal

# ---- Put layers around the forward of one module instance; the module itself stays what it is.
# The layers become the instance's `forward`, inside `__call__`: the module's own hooks see each
# call once, and its class, parameters, children, names and state_dict do not change.  Layers keep
# a fixed order, whichever was put on first: from the inside out as in `ORDER`.
#
# The new forward is a bound method of a function that all instances of a class share, and
# everything else lies in the instance.  A deep copy then has layers bound to the copy, where
# closures would go on calling the original with its parameters; and torch.compile takes equal
# modules for equal.


ORDER = (
    *("kernel", "attend", "context", "fuse", "draws", "cast", "stream"),
    *("checkpoint", "code", "offload"),
)

Layer = Callable[..., Any]  # layer(inner, *args, **kwargs) calls inner, or computes in its place
_SLOT = "_schedlang_forward"


class Layers:
    """What lies around a module's forward: `original`, and at most one layer of each kind."""

    def __init__(self, original: Callable[..., Any] | None) -> None:
        self.original = original  # of the instance; None: its class's own
        self.kinds: dict[str, Layer] = {}
        self.order: tuple[Layer, ...] = ()  # from the inside out

    def put(self, kind: str, layer: Layer) -> None:
        """Add or replace the layer of a kind."""
        self.kinds[kind] = layer
        self.order = tuple(self.kinds[name] for name in ORDER if name in self.kinds)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layers:
        """The layers of a copy of the module, bound to the copy."""
        twin = Layers(copy.deepcopy(self.original, memo))
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
    layers = layers_of(module)
    if layers is None:
        layers = Layers(vars(module).get("forward"))
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
    raise Refusal(
        Diagnostic(
            "S821",
            f"`{type(module).__name__}` was called with {len(given)} arguments, but its kernel"
            " takes one",
            helps=("leave this module as it is",),
        )
    )


def layers_of(module: nn.Module) -> Layers | None:
    """The layers around the forward of a module; None if it has its own."""
    return vars(module).get(_SLOT)


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward below all layers."""
    layers = layers_of(module)
    if layers is None:
        found: Callable[..., Any] = module.forward
    elif layers.original is not None:
        found = layers.original
    else:
        found = partial(type(module).forward, module)  # torch.compile cannot trace MethodType
    return found


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
        call = plain_forward(self)
        layers = layers_of(self)
        assert layers is not None
        for layer in layers.order:
            call = partial(layer, call)
        return call(*args, **kwargs)

    # of its own, for torch keeps graphs and the sizes that it saw by code object
    forward.__code__ = forward.__code__.replace()
    forward.__wrapped__ = owner.forward  # type: ignore[attr-defined]  # for inspect.signature
    return forward


# ---- Copies of a forward in which something else is found: other names, or another innermost
# function.
# A class's own function is never changed: what is copied belongs to the modules that run it.


def decorated(function: Any, change: Callable[[Any], Any]) -> Any:
    """What `change` makes of the innermost function, in copies of the decorators around it."""
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
