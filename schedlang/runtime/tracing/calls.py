"""Calls of modules in one forward: their order, and from where in the model's own code."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.batch import called
from schedlang.runtime.kept_outside import kept_outside
from schedlang.runtime.tracing.graph import refusal
from schedlang.runtime.tracing.meta import KNOWN, meta_model, without_values

TORCH = os.path.join("torch", "nn", "modules", "")


@dataclass(frozen=True)
class Calls:
    """The modules called, one entry for each call; where a module's second call was made."""

    order: tuple[str, ...]
    again: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of calls of each module."""
        return Counter(self.order)

    def place(self, name: str) -> str:
        """Describe where a module is called again: file, line, and the loop around it; "" if it is
        not."""
        if name not in self.again:
            return ""
        file, line = self.again[name]
        at, said = _loop(file, line) or (line, linecache.getline(file, line).strip())
        way = "in a loop at" if at != line else "again at"
        return f"called {way} {Path(file).name}:{at}, `{said}`"


def once(model: nn.Module, entries: Mapping[str, int]) -> Calls | None:
    """The calls of a forward that was seen to call modules so often; None where it must be asked.

    `entries` stand in the order of first calls, which is that of all calls where each is one.
    """
    for name, times in entries.items():
        bare = next(model.get_submodule(name).parameters(), None) is None
        if times > 1 and not (bare and not name.rpartition(".")[2].isdigit()):
            return None
    return Calls(tuple(entries)) if entries else None


def calls_of(model: nn.Module, kwargs: Mapping[str, Any], meta: bool) -> Calls:
    """Run one forward and write down every call; with `meta` on a copy on the meta device."""
    model = meta_model(model, {}) if meta else model
    where = without_values(kwargs) if meta else nullcontext((dict(kwargs), None))
    order: list[str] = []
    first: dict[str, list[FrameType]] = {}
    again: dict[str, tuple[str, int]] = {}
    handles = []
    for name, module in model.named_modules():

        def before(module: nn.Module, args: Any, name: str = name) -> None:
            order.append(name)
            if name not in first:
                first[name] = list(_frames(sys._getframe(1)))
            elif name not in again:
                again[name] = _common(first[name], _frames(sys._getframe(1)))

        handles.append(module.register_forward_pre_hook(before))
    kept = kept_outside(model) if meta else nullcontext()
    try:
        with kept, torch.random.fork_rng(devices=[]), torch.no_grad(), where as (given, _):
            called(model, given)
    except NotImplementedError as error:
        raise asks_for_values(error) from error
    finally:
        for handle in handles:
            handle.remove()
    return Calls(tuple(order), again)


def asks_for_values(error: Exception) -> Refusal:
    """The refusal of a model that reads values of tensors which, without data, have none."""
    said = str(error).split("\n")[0]
    lost = re.match(r"(\w+::\w+)[\w.]*: attempted to run this operator with Meta tensors", said)
    if lost:
        reason = f"calls `{lost[1]}`, whose shape torch does not know without data"
        help_ = "register its shape in the model file: a kernel for the key `Meta`, by"
        return refusal("S612", line_of(error), reason, f"{help_} `torch.library.impl`")
    helps: tuple[str, ...] = ()
    if "lengths" in said:  # of `pack_padded_sequence`
        helps = ("pad instead of packing, and take the last state of each row by its length",)
    reason = "reads the value of a tensor while it is recorded without data"
    return refusal("S612", line_of(error), reason, *helps, note=said)


def line_of(error: BaseException) -> str:
    """File and line of the model's own code that an error came out of; "" if it has none."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [f for f in frames if not os.path.realpath(f[0]).startswith(KNOWN)]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames on the stack outside of torch, innermost first; none of this file."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if TORCH not in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def _common(first: Sequence[FrameType], now: Iterable[FrameType]) -> tuple[str, int]:
    """File and line, now, of the innermost frame from which both calls were made."""
    before = set(first)
    for frame in now:
        if frame in before:
            return frame.f_code.co_filename, frame.f_lineno
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
