"""Questions that a trace cannot answer: whether what a child gives, or an argument holds, is None.

While a forward is followed every value is a stand-in, which is never None; a forward that asks
would be followed along the branch of a value, whatever the child gives in truth.  Python does not
tell anyone of `is`, so the instructions of the forward are watched as they run.  Of an argument it
is known what it holds: only what is None there is answered wrongly.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, cast

from torch import fx, nn

_Trace = Callable[[FrameType, str, Any], Any]


@contextmanager
def asked(module: nn.Module, given: Mapping[str, Any]) -> Iterator[list[str]]:
    """Notes, in words, what is asked of values from children, and of the Nones that the arguments
    `given` hold, while `module` is traced."""
    found: list[str] = []

    def enter(frame: FrameType, event: str, arg: Any) -> _Trace | None:
        if _is_foreign(frame.f_code) or not _tests(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: FrameType, event: str, arg: Any) -> _Trace:
        names = _tests(frame.f_code).get(frame.f_lasti, ()) if event == "opcode" else ()
        for name, itself in names:
            value = frame.f_locals.get(name)
            if not isinstance(value, fx.Proxy):
                continue
            child = _child(value.node, module)
            if child is not None:
                found.append(f"it asks whether `{name}`, returned by `{child}`, is None")
            elif _is_none(_within(value.node, given), itself):
                found.append(f"it asks whether `{name}`, or what it holds, is None, as it is here")
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield found
    finally:
        sys.settrace(before)


def _is_foreign(code: CodeType) -> bool:
    return "/torch/" in code.co_filename or "/schedlang/" in code.co_filename


@cache
def _tests(code: CodeType) -> dict[int, tuple[tuple[str, bool], ...]]:
    """By the place of each comparison with None the names that it may be about, and whether it is
    about what the name stands for, or about what is made of that."""
    found: dict[int, tuple[tuple[str, bool], ...]] = {}
    line: list[dis.Instruction] = []
    for one in dis.get_instructions(code):
        if one.starts_line:
            line = []
        of_none = "IF_NONE" in one.opname or "IF_NOT_NONE" in one.opname
        is_op = one.opname == "IS_OP" and bool(line) and line[-1].opname == "LOAD_CONST"
        is_op = is_op and line[-1].argval is None
        if of_none or is_op:
            before = line[:-1] if is_op else line
            loads = [i for i in before if i.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))]
            near = [i for i in loads if i is before[-1]] or loads  # else what it is made of
            found[one.offset] = tuple((str(i.argval), i is before[-1]) for i in near)
        line.append(one)
    return found


def _within(node: fx.Node, given: Mapping[str, Any]) -> Any:
    """What an argument, or a part of one, is in this call; None where that is not known."""
    if node.op == "placeholder":
        return given.get(str(node.target), 0)
    if node.op != "call_function" or node.target is not operator.getitem:
        return 0  # computed: a tensor, or what a child gives
    first, place = node.args[0], cast(Any, node.args[1])
    whole = _within(first, given) if isinstance(first, fx.Node) else 0
    try:
        return whole[place] if isinstance(whole, Mapping | Sequence) else whole
    except (LookupError, TypeError):
        return None


def _is_none(value: Any, itself: bool) -> bool:
    """Is it None, or does it, where something that it holds may be meant, hold one?"""
    if itself or value is None or not isinstance(value, Mapping | tuple | list):
        return value is None
    inside = value.values() if isinstance(value, Mapping) else value
    return any(_is_none(one, itself) for one in inside)


def _child(node: fx.Node, module: nn.Module) -> str | None:
    """The child whose output, or a part of it, a value is, unless that is always a tensor."""
    while node.op == "call_function" and node.target in (operator.getitem, getattr):
        first = node.args[0]
        if not isinstance(first, fx.Node):
            return None
        node = first
    if node.op != "call_module":
        return None
    child = module.get_submodule(str(node.target))
    tensor = type(child).__module__.startswith("torch.nn.")
    return None if tensor and not isinstance(child, nn.MultiheadAttention) else str(node.target)
