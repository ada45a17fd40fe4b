"""Which modules one forward calls, in which order, and from where in the model's own code."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from schedlang.runtime.constants import OnMeta
from schedlang.runtime.meta import hollow_batch, hollow_model

TORCH = os.path.join("torch", "nn", "modules", "")


@dataclass(frozen=True)
class Calls:
    """The modules called, one entry for each call; where a module's second call was made."""

    order: tuple[str, ...]
    again: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How often each module is called."""
        return Counter(self.order)

    def place(self, name: str) -> str:
        """Where a module is called again, in words: file, line, and the loop around it."""
        if name not in self.again:
            return ""
        file, line = self.again[name]
        at, said = _loop(file, line) or (line, linecache.getline(file, line).strip())
        way = "in a loop at" if at != line else "again at"
        return f"called {way} {Path(file).name}:{at}, `{said}`"


def calls_of(model: nn.Module, kwargs: Mapping[str, Any], meta: bool) -> Calls:
    """Run one forward and write down every call; with `meta` on a copy on the meta device."""
    given = dict(hollow_batch(dict(kwargs)) if meta else kwargs)
    model = hollow_model(model, {}) if meta else model
    order: list[str] = []
    seen: set[str] = set()
    again: dict[str, tuple[str, int]] = {}
    handles = []
    for name, module in model.named_modules():

        def before(module: nn.Module, args: Any, name: str = name) -> None:
            if name in seen and name not in again:
                again[name] = _caller(sys._getframe(1), module)
            seen.add(name)
            order.append(name)

        handles.append(module.register_forward_pre_hook(before))
    try:
        mode: Any = OnMeta(kwargs, given) if meta else nullcontext()
        at_home = torch.device("meta") if meta else nullcontext()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), at_home, mode:
            model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return Calls(tuple(order), again)


def _caller(frame: FrameType | None, module: nn.Module) -> tuple[str, int]:
    """File and line of the call: not in torch, not in a method of the module itself."""
    while frame is not None:
        file = frame.f_code.co_filename
        if TORCH not in file and frame.f_locals.get("self") is not module:
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _loop(file: str, line: int) -> tuple[int, str] | None:
    """Line and head of the innermost loop around a line."""
    inside = [
        node for node in _loops(file) if node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not inside:
        return None
    at = max(node.lineno for node in inside)
    return at, linecache.getline(file, at).strip()


@cache
def _loops(file: str) -> tuple[Any, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    kinds = (ast.For, ast.While, ast.AsyncFor, ast.comprehension)
    return tuple(n for n in ast.walk(tree) if isinstance(n, kinds) and hasattr(n, "lineno"))
