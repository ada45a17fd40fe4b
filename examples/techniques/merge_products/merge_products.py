"""merge_products: one product of matrices in place of several that read the same input."""

from __future__ import annotations

from functools import partial
from typing import Any

from schedlang.ir.features import Rewrite
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse
from schedlang.language.kinds import Many


class merge_products(Rewrite):  # noqa: N801
    """Compute linear layers that read one input by one product; parameters and names stay.

    before   q = x Wq', k = x Wk', v = x Wv'          three products, x is read three times
    after    q, k, v = split(x [Wq; Wk; Wv]')         one product

    The layers are children of the selected module. Calls with other inputs than those of the call
    before are computed, too, and merge nothing.

    An algebraic substitution of Unity (Unger et al. 2022), after TASO (Jia et al. 2019).
    """

    names: Many[str]

    example = "layers.*.attn  merge_products(q, k, v)"
    gives_up = frozenset({"rounding"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what is no linear layer, one layer alone, and layers that cannot be stacked."""
        path = {name: f"{site.fqn}.{name}".lstrip(".") for name in (*site.children, *self.names)}
        linear = {name for name in site.children if plan.model.computes_as(path[name], "Linear")}
        if len(set(self.names)) < 2 or not linear.issuperset(self.names):
            names = ", ".join(f"`{name}`" for name in site.children if name in linear) or "none"
            title = "one product takes the place of two or more linear layers"
            refuse("S401", title, helps=(f"name two or more of {names}",))
        layers = [plan.model.sites[path[name]].parameters for name in self.names]
        if len({(layer["weight"].shape[1], "bias" in layer) for layer in layers}) > 1:
            title = f"the layers of `{site}` differ in the size of their input, or in having a bias"
            refuse("S401", title, helps=("name layers that read the same input",))

    def rewrite(self, module: Any) -> None:
        """Let each of the layers take its part of what the first one that is called computes."""
        layers = [module.get_submodule(name) for name in self.names]
        merged = Merged(layers)
        for index, layer in enumerate(layers):
            layer.forward = partial(merged, index)


class Merged:
    """The results of one product, until each layer has taken its part."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.x, self.when, self.parts = layers, None, None, {}

    def __call__(self, index: int, x: Any) -> Any:
        """The part of a layer: of the product for this very input, computed if it was not."""
        import torch

        when = torch.is_grad_enabled(), None if x.is_inference() else x._version
        if x is not self.x or when != self.when or index not in self.parts:
            self.x, self.when, self.parts = x, when, dict(enumerate(self.product(x)))
        part = self.parts.pop(index)
        self.x = x if self.parts else None
        return part

    def product(self, x: Any) -> Any:
        """What each layer gives."""
        import torch

        weights, biases = ([getattr(layer, n) for layer in self.layers] for n in ("weight", "bias"))
        bias = None if biases[0] is None else torch.cat(biases)
        stacked = torch.nn.functional.linear(x, torch.cat(weights), bias)
        return stacked.split([len(weight) for weight in weights], -1)
