"""Changes of a model before it is scheduled: freeze, tie and untie parameters.

Each change is a function from a module to a copy on the same storage: it takes no memory except for
untied parameters, and the given module does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from schedlang.runtime.tracing.meta_runs import copy_with


@dataclass(frozen=True)
class Freeze:
    """A change: these parameters (by any of their names) take no gradient and are never updated."""

    names: frozenset[str]

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return the changed copy."""
        frozen = {id(module.get_parameter(name)) for name in self.names}

        def made(name: str, p: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(p.detach(), p.requires_grad and id(p) not in frozen)

        return copy_with(module, made, _same)


@dataclass(frozen=True)
class Tie:
    """A change: each group of parameters becomes one, the parameter of the group's first name."""

    groups: tuple[tuple[str, ...], ...]

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return the changed copy."""
        first_of: dict[int, nn.Parameter] = {}
        for group in self.groups:
            first = module.get_parameter(group[0])
            for name in group:
                first_of[id(module.get_parameter(name))] = first
        shared: dict[int, nn.Parameter] = {}

        def made(name: str, parameter: nn.Parameter) -> nn.Parameter:
            source = first_of.get(id(parameter), parameter)
            return shared.setdefault(id(source), on_same_storage(source))

        return copy_with(module, made, _same)


@dataclass(frozen=True)
class Untie:
    """A change: each of these names gets a parameter of its own, with the same values."""

    names: tuple[str, ...]

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return the changed copy."""
        twin = copy_with(module, lambda name, parameter: on_same_storage(parameter), _same)
        for name in self.names:
            owner, _, local = name.rpartition(".")
            parameter = twin.get_parameter(name)
            separate = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            twin.get_submodule(owner)._parameters[local] = separate
        return twin


def on_same_storage(parameter: nn.Parameter) -> nn.Parameter:
    """Return a new parameter on the storage of another."""
    return nn.Parameter(parameter.detach(), parameter.requires_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor
