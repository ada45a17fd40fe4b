"""The modules inside of a module, without a call of Python for each: for what runs in a step."""

from __future__ import annotations

from torch import nn


def modules_in(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module and all inside of it by path, each once, outermost first."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        path, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append((path, one))
        front = path + "." if path else ""
        for name, child in reversed(one._modules.items()):
            if child is not None:
                waiting.append((front + name, child))
    return found
