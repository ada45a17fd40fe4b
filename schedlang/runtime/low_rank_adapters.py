"""Low-rank adapters (LoRA, DoRA): projections with an adapter, and copies of a model that have
them.

`build` uses this for rows of `adapt`. An adapted projection stays a module of its class, under its
name, with its parameters. The parameters of the adapter are its own too, in PEFT's layout: `lora_A`
[rank, in], `lora_B` [out, rank], with DoRA also `lora_magnitude` [out].
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
from schedlang.runtime.device import seeded_generator
from schedlang.runtime.storage.codebook import Codebook, WeightQuantization
from schedlang.runtime.tracing.meta_runs import copy_with

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
AllReduce = Callable[[Tensor], Tensor]  # all-reduce over the ranks that hold partial sums


class AdaptedProjection(nn.Module):
    """A projection with an adapter; the first base of the classes that `adapted_class` makes.

    LoRA  y = b + x W + scaling dropout(x) A B
    DoRA  y = b + m / |W + scaling A B| (x W + scaling dropout(x) A B), one m and norm an output;
      the norm takes no gradient
    """

    # parameters that are used before the all-reduce of results, where ranks split the inputs
    inner = (A, B, MAGNITUDE)
    lora_scaling: float
    lora_dropout: float
    lora_transposed: bool  # whether the weight is [in, out]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        return self.add_adapter(x, super().forward(x), True)

    @property
    def drops_input(self) -> bool:
        """Whether each call draws a mask as large as its input."""
        return self.training and self.lora_dropout > 0

    def add_adapter(
        self, x: Tensor, y: Tensor, biased: bool, all_reduce: AllReduce | None = None
    ) -> Tensor:
        """Add the output of the adapter for `x` to `y`, the output of the weight; both may be
        shards.

        biased  whether y has the bias in it
        whole   where ranks split the inputs: an all-reduce over them
        Both terms are then partial sums over ranks, and one all-reduce serves both: the adapter
        adds no bytes to the communication of activations; DoRA communicates its norms.
        """
        p = self._parameters
        a, b, magnitude, bias = p[A], p[B], p.get(MAGNITUDE), p.get("bias") if biased else None
        assert a is not None and b is not None
        dropped = F.dropout(x, self.lora_dropout) if self.drops_input else x
        delta = F.linear(F.linear(dropped, a), b) * self.lora_scaling
        if magnitude is None:
            return y + delta
        ratio = magnitude / self._norms(a, b, all_reduce)
        y = y if bias is None else y - bias
        y = (y + delta) * ratio
        return y if bias is None else y + bias

    @torch.no_grad()
    def _norms(self, a: Tensor, b: Tensor, all_reduce: AllReduce | None) -> Tensor:
        """Return the norm of the weights of each output, with the adapter added to them."""
        weight = self._parameters["weight"]
        assert weight is not None
        merged = (weight.t() if self.lora_transposed else weight) + b @ a * self.lora_scaling
        if all_reduce is None:
            norms: Tensor = torch.linalg.vector_norm(merged, dim=1)
        else:
            norms = all_reduce(merged.square().sum(1)).sqrt()
        return norms.clamp_min(torch.finfo(norms.dtype).tiny)  # rows of padding have none

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the class by its base: the adapted class is made at run time."""
        return _empty, (type(self).__mro__[2],), dict(vars(self))

    def extra_repr(self) -> str:
        """Return the text of the projection, with the kind and rank of the adapter."""
        a, kind = self._parameters[A], "dora" if MAGNITUDE in self._parameters else "lora"
        adapter = f"{kind}={len(a) if a is not None else 0}"
        return ", ".join(filter(None, (super().extra_repr(), adapter)))


@cache
def adapted_class(base: Any) -> Any:
    """Return the class of projections of class `base` with an adapter."""
    return type(f"Adapted{base.__name__}", (AdaptedProjection, base), {"__module__": __name__})


def _empty(base: Any) -> Any:
    adapted = adapted_class(base)
    return adapted.__new__(adapted)


def _ancestors(module: nn.Module, fqn: str) -> Iterator[nn.Module]:
    names = fqn.split(".")
    return (module.get_submodule(".".join(names[:depth])) for depth in range(len(names)))


def _keep_output(module: nn.Module, args: Any, output: Tensor) -> None:
    """Return None: the output stays as it is; the hook matters only by being there."""


@dataclass(frozen=True)
class Adapt:
    """A change of a model: give the projections `sites` adapters, and train only parameters in
    `trained`.

    kind        "lora" (Hu et al. 2021) or "dora" (Liu et al. 2024)
    sites       names of the projections
    transposed  projections whose weight is [in, out]
    trained     first names of parameters of the unchanged model that are trained too
    seed        seed of the first values of A. These are drawn as PEFT draws them (He et al. 2015,
                a = sqrt(5)), for each parameter by its name alone; B is zero, a magnitude is the
                norm of the weights
    base        the codebook in which the weights of adapted projections are stored; the weights
                get the values of its codes
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
        """The factor of the adapter's output."""
        return self.alpha / self.rank

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a changed copy of the module, on the same storage."""
        return self._made(module, varied=False)

    def with_varied_values(self, module: nn.Module) -> nn.Module:
        """Return the changed copy with other first values, so that a proof sees their products."""
        return self._made(module, varied=True)

    def initializer_of(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function that makes the first values of a parameter, given a tensor of its
        shape.

        None: the parameter belongs to none of these adapters. Raises Refusal S623 for a magnitude:
        it is the norm of values that do not exist yet.
        """
        fqn, _, local = name.rpartition(".")
        if fqn not in self.sites or local not in AdaptedProjection.inner:
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
        return lambda template: self._drawn(fqn, local, template, varied=False)

    def coding_of(self, name: str) -> WeightQuantization | None:
        """Return the coding in which a parameter is stored, by any of its names; None: it has
        none."""
        fqn, _, local = name.rpartition(".")
        if self.base is None or local != "weight" or fqn not in self.sites:
            return None
        return WeightQuantization(self.base, fqn in self.transposed)

    def merge_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge each adapter into its weight; return the values without the parameters of adapters.

        A projection whose adapter is not among the values is not changed.
        """
        result = dict(values)
        for fqn in self.sites:
            a, b, magnitude = (
                result.pop(f"{fqn}.{name}", None) for name in AdaptedProjection.inner
            )
            if a is None or b is None:
                continue
            weight = result[f"{fqn}.weight"]
            wide_dtype = torch.promote_types(weight.dtype, torch.float32)
            rows = (weight.t() if fqn in self.transposed else weight).to(wide_dtype)
            rows = rows + b.to(wide_dtype) @ a.to(wide_dtype) * self.scaling
            if magnitude is not None:
                norms = torch.linalg.vector_norm(rows.detach(), dim=1)
                rows = rows * (magnitude.to(wide_dtype) / norms)[:, None]
            result[f"{fqn}.weight"] = (rows.t() if fqn in self.transposed else rows).to(
                weight.dtype
            )
        return result

    def stop_random_draws(self, module: nn.Module) -> None:
        """Disable the dropout of the adapters of a copy."""
        for fqn in self.sites:
            projection: Any = module.get_submodule(fqn)
            projection.lora_dropout = 0.0

    def _made(self, module: nn.Module, varied: bool) -> nn.Module:
        def made(name: str, parameter: nn.Parameter) -> nn.Parameter:
            coding = self.coding_of(name)
            value = parameter.detach() if coding is None else coding.round_weight(parameter)
            return nn.Parameter(value, name in self.trained)

        twin = copy_with(module, made, lambda tensor: tensor)
        for fqn in self.sites:
            target: Any = twin.get_submodule(fqn)
            kind: Any = type(target)
            target.__class__ = adapted_class(kind)
            target.lora_scaling, target.lora_dropout = self.scaling, self.dropout
            target.lora_transposed = fqn in self.transposed
            rows = target.weight.detach().t() if target.lora_transposed else target.weight.detach()
            height, width = rows.shape
            for name, shape in ((A, (self.rank, width)), (B, (height, self.rank))):
                value = rows.new_empty(shape)
                if not rows.is_meta:
                    value = self._drawn(fqn, name, value, varied)
                target.register_parameter(name, nn.Parameter(value))
            if any(
                isinstance(ancestor, nn.TransformerEncoderLayer)
                for ancestor in _ancestors(twin, fqn)
            ):
                # a hook makes its evaluation call the projections; without hooks it reads the
                # weights and calls nothing
                target.register_forward_hook(_keep_output)
            if self.kind == "dora":
                norms = torch.linalg.vector_norm(rows, dim=1) * (1.5 if varied else 1.0)
                target.register_parameter(MAGNITUDE, nn.Parameter(norms))
        return twin

    def _drawn(self, fqn: str, name: str, template: Tensor, varied: bool) -> Tensor:
        """Return values of the shape and dtype of `template`, on the host if `template` is on the
        meta device."""
        value = torch.zeros(template.shape, dtype=torch.float64)
        if name == A or varied:
            bound = 1 / math.sqrt(template.shape[1])
            value.uniform_(-bound, bound, generator=seeded_generator(self.seed, f"{fqn}.{name}"))
        return value.to(template.dtype).to("cpu" if template.is_meta else template.device)
