"""Questions that a trace cannot answer: whether what a child gives is None.

While a forward is followed every value is a stand-in, which is never None; a forward that asks
would be followed along the branch of a value, whatever the child gives in truth.  Python does not
tell anyone of `is`, so the instructions of the forward are watched as they run.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

from torch import fx, nn

_Trace = Callable[[FrameType, str, Any], Any]


@contextmanager
def asked(module: nn.Module) -> Iterator[list[str]]:
    """Notes, in words, what is asked of values from children while `module` is traced."""
    found: list[str] = []

    def enter(frame: FrameType, event: str, arg: Any) -> _Trace | None:
        if _is_foreign(frame.f_code) or not _tests(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: FrameType, event: str, arg: Any) -> _Trace:
        names = _tests(frame.f_code).get(frame.f_lasti, ()) if event == "opcode" else ()
        for name in names:
            value = frame.f_locals.get(name)
            child = _child(value.node, module) if isinstance(value, fx.Proxy) else None
            if child is not None:
                found.append(f"it asks whether `{name}`, which `{child}` gives, is None")
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
def _tests(code: CodeType) -> dict[int, tuple[str, ...]]:
    """By the place of each comparison with None the names that it may be about."""
    found: dict[int, tuple[str, ...]] = {}
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
            found[one.offset] = tuple(str(i.argval) for i in near)
        line.append(one)
    return found


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
