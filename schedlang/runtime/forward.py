"""Put layers around the forward of one module instance; the module itself stays what it is.

The layers become the instance's `forward`, inside `__call__`: the module's own hooks see each call
once, and its class, parameters, children, names and state_dict do not change.  Layers keep a fixed
order, whichever was put on first: from the inside out as in `ORDER`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

ORDER = ("kernel", "fuse", "checkpoint", "offload")

Layer = Callable[..., Any]  # layer(inner, *args, **kwargs) calls inner, or computes in its place


class Forward:
    """The forward of a module with layers around it.

    An object, not a closure: a deep copy of the module then has layers bound to the copy, as it has
    methods; closures would go on calling the original with the original's parameters.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.__wrapped__ = original  # inspect.signature follows it
        self.layers: dict[str, Layer] = {}
        self.chain = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the outermost layer."""
        return self.chain(*args, **kwargs)

    def put(self, kind: str, layer: Layer) -> None:
        """Add or replace the layer of a kind."""
        self.layers[kind] = layer
        self.chain = self.__wrapped__
        for name in ORDER:
            if name in self.layers:
                self.chain = partial(self.layers[name], self.chain)


def wrap(module: nn.Module, kind: str, layer: Layer) -> None:
    """Put `layer` around the forward of this instance; `kind` is one of ORDER.

    Whatever forward the instance has at the first call is the innermost.
    """
    assert kind in ORDER, kind
    forward = layers_of(module)
    if forward is None:
        forward = Forward(module.forward)
        module.forward = forward
    forward.put(kind, layer)


def layers_of(module: nn.Module) -> Forward | None:
    """The layers around the forward of a module; None if it has its own."""
    found = vars(module).get("forward")
    return found if isinstance(found, Forward) else None


def unwrap(module: nn.Module) -> None:
    """Take all layers off again."""
    forward = layers_of(module)
    if forward is None:
        return
    inner = forward.__wrapped__
    if getattr(inner, "__self__", None) is module:
        del module.forward
    else:
        module.forward = inner
