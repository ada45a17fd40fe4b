"""Projections with a low-rank adapter beside their weight, and a copy of a model that has them.

An adapted projection stays a module of its class, under its name, with its parameters; those of the
adapter are its own as well, and lie as PEFT lays them: `lora_A` [rank, in], `lora_B` [out, rank].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.runtime.tracing.meta import copy_with

A, B = "lora_A", "lora_B"


class Adapted(nn.Module):
    """y = x W + b + scaling dropout(x) A B, first among the bases of a class (`adapted_class`)."""

    # own parameters that are used before results are summed over ranks, where inputs are split
    inner = (A, B)
    lora_scaling: float
    lora_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return self.with_adapter(x, super().forward(x))

    @property
    def drops_input(self) -> bool:
        """Whether a mask as large as its input is drawn at each call."""
        return self.training and self.lora_dropout > 0

    def with_adapter(self, x: Tensor, y: Tensor) -> Tensor:
        """Add what the adapter makes of `x` to what the weight made of it, of whatever parts.

        Where ranks split the inputs both are terms of one sum over them, and cross together: the
        adapter adds nothing to what is sent of activations.
        """
        a, b = self._parameters[A], self._parameters[B]
        assert a is not None and b is not None
        given = F.dropout(x, self.lora_dropout) if self.drops_input else x
        return y + F.linear(F.linear(given, a), b) * self.lora_scaling

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class that it is made of: its own is made at run time."""
        return _empty, (type(self).__mro__[2],), self.__getstate__()

    def extra_repr(self) -> str:
        """The projection's, with the rank."""
        a = self._parameters[A]
        return f"{super().extra_repr()}, rank={len(a) if a is not None else 0}".lstrip(", ")


@cache
def adapted_class(of: type[nn.Module]) -> type[nn.Module]:
    """The class of projections of class `of` with an adapter."""
    return type(f"Adapted{of.__name__}", (Adapted, of), {"__module__": __name__})


def _empty(of: type[nn.Module]) -> nn.Module:
    made = adapted_class(of)
    found: nn.Module = made.__new__(made)
    return found


@dataclass(frozen=True)
class Adapt:
    """These projections (by name) get adapters; of all else what `trained` names is trained.

    transposed  those whose weight is [in, out]
    trained     first names of parameters of the model before
    seed        of the first values of A (B is zero), drawn as PEFT does (He et al. 2015, a =
                sqrt(5)), for each parameter by its name alone
    """

    sites: tuple[str, ...]
    transposed: frozenset[str]
    rank: int
    alpha: float
    dropout: float
    trained: frozenset[str]
    seed: int = 0

    def __call__(self, module: nn.Module) -> nn.Module:
        """The copy, on the same storage."""
        return self._made(module, 0.0)

    def varied(self, module: nn.Module) -> nn.Module:
        """The copy with B other than zero, so that a proof sees what it is multiplied with."""
        return self._made(module, 1.0)

    def drawn(self, name: str, like: Tensor) -> Tensor | None:
        """The first values of a parameter that lies on the meta device; None: of none of these."""
        fqn, _, local = name.rpartition(".")
        return self._drawn(fqn, local, like, 0.0) if fqn in self.sites and local in (A, B) else None

    def merged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each weight with its adapter in it, W + scaling B A, and without those of the adapters.

        Of projections whose adapter is not among the values nothing changes.
        """
        found = dict(values)
        for fqn in self.sites:
            name = f"{fqn}.weight"
            a, b = found.pop(f"{fqn}.{A}", None), found.pop(f"{fqn}.{B}", None)
            if a is not None and b is not None:
                more = b @ a * (self.alpha / self.rank)
                found[name] = found[name] + (more.t() if fqn in self.transposed else more)
        return found

    def undrawn(self, module: nn.Module) -> None:
        """Let adapters of a copy drop nothing."""
        for fqn in self.sites:
            found: Any = module.get_submodule(fqn)
            found.lora_dropout = 0.0

    def _made(self, module: nn.Module, scale_b: float) -> nn.Module:
        def made(name: str, old: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(old.detach(), name in self.trained)

        twin = copy_with(module, made, lambda tensor: tensor)
        for fqn in self.sites:
            found: Any = twin.get_submodule(fqn)
            found.__class__ = adapted_class(type(found))
            found.lora_scaling, found.lora_dropout = self.alpha / self.rank, self.dropout
            weight = found.weight
            wide, narrow = weight.shape if fqn in self.transposed else weight.shape[::-1]
            for name, shape in ((A, (self.rank, wide)), (B, (narrow, self.rank))):
                value = weight.new_empty(shape)
                if not weight.is_meta:
                    value = self._drawn(fqn, name, value, scale_b)
                found.register_parameter(name, nn.Parameter(value))
        return twin

    def _drawn(self, fqn: str, name: str, like: Tensor, scale_b: float) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed} {fqn}.{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        bound = (1.0 if name == A else scale_b) / math.sqrt(like.shape[1])
        value = torch.empty(like.shape, dtype=torch.float64).uniform_(
            -bound, bound, generator=generator
        )
        return value.to(like.dtype).to(like.device if not like.is_meta else "cpu")
