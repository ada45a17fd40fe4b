"""Fuse what a pattern matches in one module: the layer that runs its rewritten forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.patterns import Pattern
from schedlang.runtime.device import device_of, not_there
from schedlang.runtime.forward import layers_of, wrap
from schedlang.runtime.regions.flow import Given, Looked, flow, given_of, owned
from schedlang.runtime.regions.fuse import unavailable
from schedlang.runtime.regions.match import Match, Miss, matches
from schedlang.runtime.regions.rewrite import How, Region, Rewritten, rewritten
from schedlang.runtime.regions.whole import whole


@dataclass(frozen=True)
class Told:
    """A pattern (or None: all of the module) and how it is to be matched and compiled."""

    pattern: Pattern | None
    looked: Looked
    how: How = How()
    name: str = ""  # of the module, for messages


def found_in(module: nn.Module, told: Told, given: Given) -> tuple[Any, list[Match]]:
    """The flow of a call and where the pattern stands in it; S882 if nowhere."""
    graph = flow(module, given, told.looked)
    if told.pattern is None:
        return graph, [whole(graph, module)]
    found, miss = matches(told.pattern, graph, module)
    if not found:
        raise nowhere(told, told.pattern, miss)
    return graph, found


def nowhere(told: Told, pattern: Pattern, miss: Miss) -> Refusal:
    """S882, with the attempt that came furthest."""
    fitted = max(miss.fitted, 0)
    of = f"{fitted} of its {pattern.body.size} calls fit"
    helps = ("`schedlang explain fuse` lists what a pattern may contain",)
    if miss.bias:
        row = f"{told.name}.{miss.bias}".lstrip(".")
        helps = (f"if you mean its bias, separate it in a row above: `{row}  decompose(bias)`",)
    return Refusal(
        Diagnostic("S882",
                   f"`{told.name or 'the model'}` has no match for the pattern `{pattern.name}`",
                   notes=(f"{of}: {miss.reason}", pattern.text), helps=helps)
    )  # fmt: skip


def fuse_pattern(module: nn.Module, told: Told) -> None:
    """Let a built module compute each match as one region, in place."""
    device = device_of(module.parameters())
    inductor = told.how.backend == "inductor" and not not_there(device)
    missing = unavailable(device.type) if inductor else None
    if missing:
        raise Refusal(Diagnostic("S831", "inductor cannot compile here", notes=(missing,)))
    wrap(module, "fuse", Regions(module, told))
    if owned(module):
        name = type(module).__name__
        raise Refusal(Diagnostic("S832", f"`{name}` already has a kernel",
                                 helps=("leave this module unfused",)))  # fmt: skip


class Regions:
    """The layer that runs the rewritten forward; one for each set of constants."""

    def __init__(self, module: nn.Module, told: Told) -> None:
        self.module, self.told = module, told
        self.made: dict[Any, Rewritten] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies look anew: what is done to their children may differ."""
        return self.__dict__ | {"made": {}}

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The rewritten forward; `inner` is not called."""
        given = given_of(self.module, args, kwargs)
        key = given.key, tuple(m.training for m in self.module.modules())
        if key not in self.made:
            graph, found = found_in(self.module, self.told, given)
            self.made[key] = rewritten(graph, found, self.module, self.told.how)
        made = self.made[key]
        return made.run(self.module, *(given.tensors[name] for name in made.names))


def regions_of(module: nn.Module) -> list[Region]:
    """The regions that a module has run."""
    layers = layers_of(module)
    layer = layers.kinds.get("fuse") if layers is not None else None
    if not isinstance(layer, Regions):
        return []
    return [region for made in layer.made.values() for region in made.regions]
