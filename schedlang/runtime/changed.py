"""The model with other rules of training: parameters frozen, tied or untied, values shared.

Each change is a function from a module to a copy of it that lies on the same storage: it costs no
memory but for what is untied, and the module given stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from schedlang.runtime.tracing.meta import copy_with


@dataclass(frozen=True)
class Freeze:
    """These parameters (any of their names) take no gradient and are never updated."""

    names: frozenset[str]

    def __call__(self, module: nn.Module) -> nn.Module:
        """The copy."""
        still = {id(module.get_parameter(name)) for name in self.names}

        def made(name: str, old: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(old.detach(), old.requires_grad and id(old) not in still)

        return copy_with(module, made, _same)


@dataclass(frozen=True)
class Tie:
    """Each group of parameters becomes one: the first name's, under all their names."""

    groups: tuple[tuple[str, ...], ...]

    def __call__(self, module: nn.Module) -> nn.Module:
        """The copy."""
        firsts: dict[int, nn.Parameter] = {}
        for group in self.groups:
            first = module.get_parameter(group[0])
            for name in group:
                firsts[id(module.get_parameter(name))] = first
        shared: dict[int, nn.Parameter] = {}

        def made(name: str, old: nn.Parameter) -> nn.Parameter:
            source = firsts.get(id(old), old)
            return shared.setdefault(id(source), on_same_storage(source))

        return copy_with(module, made, _same)


@dataclass(frozen=True)
class Untie:
    """Each of these names gets a parameter of its own, of the same values."""

    names: tuple[str, ...]

    def __call__(self, module: nn.Module) -> nn.Module:
        """The copy."""
        twin = copy_with(module, lambda name, old: on_same_storage(old), _same)
        for name in self.names:
            owner, _, local = name.rpartition(".")
            old = twin.get_parameter(name)
            own = nn.Parameter(old.detach().clone(), old.requires_grad)
            twin.get_submodule(owner)._parameters[local] = own
        return twin


def on_same_storage(old: nn.Parameter) -> nn.Parameter:
    """A parameter of its own on the storage of another."""
    return nn.Parameter(old.detach(), old.requires_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor
