"""Projections with a low-rank adapter beside their weight, and a copy of a model that has them.

An adapted projection stays a module of its class, under its name, with its parameters; those of the
adapter are its own as well, and lie as PEFT lays them: `lora_A` [rank, in], `lora_B` [out, rank],
of DoRA also `lora_magnitude` [out].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.device import seeded
from schedlang.runtime.storage.codebook import Codebook, Coding
from schedlang.runtime.tracing.meta import copy_with

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
Sum = Callable[[Tensor], Tensor]  # over the ranks that hold parts of one sum


class Adapted(nn.Module):
    """A projection with an adapter; it is the first among the bases of a class (`adapted_class`).

    LoRA  y = b + x W + scaling dropout(x) A B
    DoRA  y = b + m / |W + scaling A B| (x W + scaling dropout(x) A B), one m and norm an output;
          the norm takes no gradient
    """

    # own parameters that are used before results are summed over ranks, where inputs are split
    inner = (A, B, MAGNITUDE)
    lora_scaling: float
    lora_dropout: float
    lora_transposed: bool  # whether the weight is [in, out]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return self.with_adapter(x, super().forward(x), True)

    @property
    def drops_input(self) -> bool:
        """Whether a mask as large as its input is drawn at each call."""
        return self.training and self.lora_dropout > 0

    def with_adapter(self, x: Tensor, y: Tensor, biased: bool, whole: Sum | None = None) -> Tensor:
        """Add what the adapter makes of `x` to what the weight made of it, of whatever parts.

        biased  whether y has the bias in it
        whole   where ranks split the inputs: a sum over them
        Both terms are parts of one sum over ranks then, and cross together: the adapter adds
        nothing to what is sent of activations; DoRA sends its norms.
        """
        p = self._parameters
        a, b, magnitude, bias = p[A], p[B], p.get(MAGNITUDE), p.get("bias") if biased else None
        assert a is not None and b is not None
        given = F.dropout(x, self.lora_dropout) if self.drops_input else x
        more = F.linear(F.linear(given, a), b) * self.lora_scaling
        if magnitude is None:
            return y + more
        ratio = magnitude / self._norms(a, b, whole)
        y = y if bias is None else y - bias
        y = (y + more) * ratio
        return y if bias is None else y + bias

    @torch.no_grad()
    def _norms(self, a: Tensor, b: Tensor, whole: Sum | None) -> Tensor:
        """The norm of the weights of each output, with the adapter in them."""
        weight = self._parameters["weight"]
        assert weight is not None
        merged = (weight.t() if self.lora_transposed else weight) + b @ a * self.lora_scaling
        if whole is None:
            norms: Tensor = torch.linalg.vector_norm(merged, dim=1)
        else:
            norms = whole(merged.square().sum(1)).sqrt()
        return norms.clamp_min(torch.finfo(norms.dtype).tiny)  # rows of padding have none

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class that it is made of: its own is made at run time."""
        return _empty, (type(self).__mro__[2],), dict(vars(self))

    def extra_repr(self) -> str:
        """The projection's, with the rank."""
        a, kind = self._parameters[A], "dora" if MAGNITUDE in self._parameters else "lora"
        said = f"{kind}={len(a) if a is not None else 0}"
        return ", ".join(filter(None, (super().extra_repr(), said)))


@cache
def adapted_class(of: Any) -> Any:
    """The class of projections of class `of` with an adapter."""
    return type(f"Adapted{of.__name__}", (Adapted, of), {"__module__": __name__})


def _empty(of: Any) -> Any:
    made = adapted_class(of)
    return made.__new__(made)


def _around(module: nn.Module, fqn: str) -> Iterator[nn.Module]:
    names = fqn.split(".")
    return (module.get_submodule(".".join(names[:depth])) for depth in range(len(names)))


def _as_it_is(module: nn.Module, args: Any, output: Tensor) -> None:
    """Leave what a call returns; that there is a hook is all that it is for."""


@dataclass(frozen=True)
class Adapt:
    """These projections (by name) get adapters; of all else what `trained` names is trained.

    kind        "lora" (Hu et al. 2021) or "dora" (Liu et al. 2024)
    transposed  projections whose weight is [in, out]
    trained     first names of parameters of the model before
    seed        of the first values of A, drawn as PEFT draws (He et al. 2015, a = sqrt(5)), for
                each parameter by its name alone; B is zero, a magnitude the norm that there is
    base        the codes in which the weights beside adapters lie; they get the values of these
    """

    kind: str
    sites: tuple[str, ...]
    transposed: frozenset[str]
    rank: int
    alpha: float
    dropout: float
    trained: frozenset[str]
    seed: int = 0
    base: Codebook | None = None

    @property
    def scaling(self) -> float:
        """The factor of what an adapter gives."""
        return self.alpha / self.rank

    def __call__(self, module: nn.Module) -> nn.Module:
        """The copy, on the same storage."""
        return self._made(module, varied=False)

    def varied(self, module: nn.Module) -> nn.Module:
        """The copy with other values, so that a proof sees what they are multiplied with."""
        return self._made(module, varied=True)

    def drawn(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function that makes the first values of a parameter, of a tensor like it.

        None: it is none of these adapters'.  Raises Refusal S623 for a magnitude: it is that of
        values that are not there yet.
        """
        fqn, _, local = name.rpartition(".")
        if fqn not in self.sites or local not in Adapted.inner:
            return None
        if local == MAGNITUDE:
            raise Refusal.of(
                "S623",
                f"`{name}` has no values: it is the norm of weights that are read later",
                helps=(
                    "make the model with its values on every rank",
                    "or use `adapt(lora)`, whose initial values do not depend on weights",
                ),
            )
        return lambda like: self._drawn(fqn, local, like, varied=False)

    def coded(self, name: str) -> Coding | None:
        """Return how a parameter lies in codes, by any of its names; None: it does not."""
        fqn, _, local = name.rpartition(".")
        if self.base is None or local != "weight" or fqn not in self.sites:
            return None
        return Coding(self.base, fqn in self.transposed)

    def merged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each weight with its adapter in it, and without the parameters of adapters.

        Of projections whose adapter is not among the values nothing changes.
        """
        found = dict(values)
        for fqn in self.sites:
            a, b, magnitude = (found.pop(f"{fqn}.{name}", None) for name in Adapted.inner)
            if a is None or b is None:
                continue
            weight = found[f"{fqn}.weight"]
            wide = torch.promote_types(weight.dtype, torch.float32)
            rows = (weight.t() if fqn in self.transposed else weight).to(wide)
            rows = rows + b.to(wide) @ a.to(wide) * self.scaling
            if magnitude is not None:
                norms = torch.linalg.vector_norm(rows.detach(), dim=1)
                rows = rows * (magnitude.to(wide) / norms)[:, None]
            found[f"{fqn}.weight"] = (rows.t() if fqn in self.transposed else rows).to(weight.dtype)
        return found

    def undrawn(self, module: nn.Module) -> None:
        """Let adapters of a copy drop nothing."""
        for fqn in self.sites:
            found: Any = module.get_submodule(fqn)
            found.lora_dropout = 0.0

    def _made(self, module: nn.Module, varied: bool) -> nn.Module:
        def made(name: str, old: nn.Parameter) -> nn.Parameter:
            coding = self.coded(name)
            value = old.detach() if coding is None else coding.rounded(old)
            return nn.Parameter(value, name in self.trained)

        twin = copy_with(module, made, lambda tensor: tensor)
        for fqn in self.sites:
            found: Any = twin.get_submodule(fqn)
            kind: Any = type(found)
            found.__class__ = adapted_class(kind)
            found.lora_scaling, found.lora_dropout = self.scaling, self.dropout
            found.lora_transposed = fqn in self.transposed
            rows = found.weight.detach().t() if found.lora_transposed else found.weight.detach()
            out, width = rows.shape
            for name, shape in ((A, (self.rank, width)), (B, (out, self.rank))):
                value = rows.new_empty(shape)
                if not rows.is_meta:
                    value = self._drawn(fqn, name, value, varied)
                found.register_parameter(name, nn.Parameter(value))
            if any(isinstance(one, nn.TransformerEncoderLayer) for one in _around(twin, fqn)):
                # in evaluation it reads the weights, and calls nothing, unless something is hooked
                found.register_forward_hook(_as_it_is)
            if self.kind == "dora":
                norms = torch.linalg.vector_norm(rows, dim=1) * (1.5 if varied else 1.0)
                found.register_parameter(MAGNITUDE, nn.Parameter(norms))
        return twin

    def _drawn(self, fqn: str, name: str, like: Tensor, varied: bool) -> Tensor:
        """Values of the shape and kind of a tensor, on the host if it is without values."""
        value = torch.zeros(like.shape, dtype=torch.float64)
        if name == A or varied:
            bound = 1 / math.sqrt(like.shape[1])
            value.uniform_(-bound, bound, generator=seeded(self.seed, f"{fqn}.{name}"))
        return value.to(like.dtype).to("cpu" if like.is_meta else like.device)
