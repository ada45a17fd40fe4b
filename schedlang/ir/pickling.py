"""Make models fit for pickle: what it turns away, and what libraries note when a model is made."""

from __future__ import annotations

import copyreg
import importlib
import sys
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

# ---- What libraries note when a model is made, made up for in a process that only received it.
# transformers notes which hidden states and attentions a class can return when the first model of
# the class is made; a model that was unpickled in another process would return none, without a
# word.


def register(model: nn.Module) -> None:
    """Note for the classes of a model what making it would have noted."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    known = getattr(capturing, "_CAN_RECORD_REGISTRY", None)  # private; no other way since 5.0
    if known is None:
        return
    for module in model.modules():
        if hasattr(module, "_can_record_outputs") and str(type(module)) not in known:
            known[module] = module._can_record_outputs


# ---- Parts of a model that pickle turns away, made fit to be sent to the ranks of one machine.


def let_travel(model: nn.Module) -> None:
    """Say how such parts are taken apart; where there are none this does nothing.

    Parametrized modules (weight norm): torch forbids to pickle them, as their class is made at run
    time, and files would outlive it; ranks read at once what they are sent.  Context variables:
    hooks that a library installed in a first forward refer to those of its modules.
    """
    copyreg.pickle(ContextVar, _named)
    for module in model.modules():
        if parametrize.is_parametrized(module):
            copyreg.pickle(type(module), _taken_apart)


def _named(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """By the module that holds it, itself or in an object."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items() if module is not None else ()):
            if value is variable:
                return _found, (name, (attribute,))
            held = getattr(value, "__dict__", None)
            inside = held.items() if isinstance(held, dict) else ()
            if within := next((k for k, v in list(inside) if v is variable), None):
                return _found, (name, (attribute, within))
    raise TypeError(f"no module holds the context variable {variable.name}")


def _found(module: str, path: tuple[str, ...]) -> Any:
    found: Any = importlib.import_module(module)
    for name in path:
        found = getattr(found, name)
    return found


def _taken_apart(module: nn.Module) -> tuple[Any, ...]:
    held: Any = module.parametrizations
    return _bare, (type(module).__bases__[0], tuple(held)), dict(vars(module))


def _bare(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty module of a parametrized class; what it holds comes behind."""
    made: nn.Module = kind.__new__(kind)
    nn.Module.__init__(made)
    parametrize._inject_new_class(made)  # private: what `register_parametrization` does
    for name in names:
        parametrize._inject_property(made, name)
    copyreg.pickle(type(made), _taken_apart)
    return made
