"""Calls of modules in one forward: their order, and the lines of the model that make them."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
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
from schedlang.runtime.batch import run_model
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.tracing.meta_runs import meta_model, without_values
from schedlang.runtime.tracing.model_lines import line_of
from schedlang.runtime.tracing.stage_graph import refusal

TORCH = os.path.join("torch", "nn", "modules", "")


@dataclass(frozen=True)
class ModuleCalls:
    """The modules in the order of their calls, and (file, line) of each module's second call."""

    order: tuple[str, ...]
    second_calls: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of calls of each module."""
        return Counter(self.order)

    def describe_repeat(self, name: str) -> str:
        """Describe where a module is called again (file, line, loop); "" if it is called once."""
        if name not in self.second_calls:
            return ""
        file, line = self.second_calls[name]
        loop_line, code = _loop(file, line) or (line, linecache.getline(file, line).strip())
        kind = "in a loop at" if loop_line != line else "again at"
        return f"called {kind} {Path(file).name}:{loop_line}, `{code}`"


def calls_from_counts(model: nn.Module, entries: Mapping[str, int]) -> ModuleCalls | None:
    """Return the calls of a forward from the number of calls of each module; None if not known.

    `entries` are in the order of first calls.  This is the order of all calls if no module with
    parameters, and no element of a list, is called twice; else the model must run.
    """
    for name, times in entries.items():
        bare = next(model.get_submodule(name).parameters(), None) is None
        if times > 1 and not (bare and not name.rpartition(".")[2].isdigit()):
            return None
    return ModuleCalls(tuple(entries)) if entries else None


def record_calls(model: nn.Module, kwargs: Mapping[str, Any], meta: bool) -> ModuleCalls:
    """Run one forward and record every call; with `meta` on a copy on the meta device.

    Raises Refusal S612 if the model reads values on the meta device.
    """
    model = meta_model(model, {}) if meta else model
    context = without_values(kwargs) if meta else nullcontext((dict(kwargs), None))
    order: list[str] = []
    first_frames: dict[str, list[FrameType]] = {}
    second_calls: dict[str, tuple[str, int]] = {}
    handles = []
    for name, module in model.named_modules():

        def before(module: nn.Module, args: Any, name: str = name) -> None:
            order.append(name)
            if name not in first_frames:
                first_frames[name] = list(_frames(sys._getframe(1)))
            elif name not in second_calls:
                second_calls[name] = _common(first_frames[name], _frames(sys._getframe(1)))

        handles.append(module.register_forward_pre_hook(before))
    state = restore_global_state(model) if meta else nullcontext()
    try:
        with state, torch.random.fork_rng(devices=[]), torch.no_grad(), context as (inputs, _):
            run_model(model, inputs)
    except NotImplementedError as error:
        raise value_refusal(error) from error
    finally:
        for handle in handles:
            handle.remove()
    return ModuleCalls(tuple(order), second_calls)


def value_refusal(error: Exception, line: str = "") -> Refusal:
    """Return the refusal (S612) of a model that reads values of tensors on the meta device.

    `line`: the line that reads them, where it is not the one that fails.
    """
    message = str(error).split("\n")[0]
    lacks = re.match(r"(\w+::\w+)[\w.]*: attempted to run this operator with Meta tensors", message)
    if lacks:
        reason = f"calls `{lacks[1]}`, whose shape torch does not know without data"
        help_ = "register its shape in the model file: a kernel for the key `Meta`, by"
        return refusal("S612", line_of(error), reason, f"{help_} `torch.library.impl`")
    helps: tuple[str, ...] = ()
    if "lengths" in message:  # of `pack_padded_sequence`
        helps = ("pad instead of packing, and take the last state of each row by its length",)
    if line:
        helps = (
            "cut rows by the list itself: `rows.split(counts)`",
            "or use masks, or `torch.where(chosen == expert)`, in place of numbers of rows",
        )
    reason = "reads the value of a tensor while it is recorded without data"
    return refusal("S612", line or line_of(error), reason, *helps, note=message)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames on the stack up to this file, without torch's, innermost first."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if TORCH not in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def _common(first: Sequence[FrameType], later: Iterable[FrameType]) -> tuple[str, int]:
    """Return file and line of the innermost frame that both calls share, at the second call."""
    earlier = set(first)
    for frame in later:
        if frame in earlier:
            return frame.f_code.co_filename, frame.f_lineno
    return "", 0


def _loop(file: str, line: int) -> tuple[int, str] | None:
    """Return the line and the header of the innermost loop around a line, if there is one."""
    inside = [
        node for node in _loops(file) if node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not inside:
        return None
    loop_line = max(node.lineno for node in inside)
    return loop_line, linecache.getline(file, loop_line).strip()


@cache
def _loops(file: str) -> tuple[Any, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    kinds = (ast.For, ast.While, ast.AsyncFor, ast.comprehension)
    return tuple(n for n in ast.walk(tree) if isinstance(n, kinds) and hasattr(n, "lineno"))
