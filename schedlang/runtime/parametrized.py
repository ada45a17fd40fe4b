"""Parametrized modules (weight norm and its kin) travel to other processes like any other."""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def let_travel(model: nn.Module) -> None:
    """Torch forbids to pickle them, as their class is made at run time: it is made again.

    The ban is for files that would outlive the class; ranks read at once what they are sent.
    """
    for module in model.modules():
        if parametrize.is_parametrized(module):
            copyreg.pickle(type(module), _taken_apart)


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
