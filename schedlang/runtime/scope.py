"""The place in the run: step, microbatch, samples, slice, and the module being executed.

Whatever must not depend on the layout (a dropout mask above all) asks here. The state is kept per
thread, and `capture` takes all of it along, so that a recomputation can stand where its forward
stood.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Moment = int | tuple[int, int]  # a step, or (step, evaluation)


@dataclass(frozen=True)
class Scope:
    """One microbatch of one step; `samples` are the global ids of its rows, in row order.

    evaluation  the how manyth evaluation since the last step this is; 0: it trains
    even        tells whether all ranks have parts of the same shapes, where that is known
    """

    step: int
    microbatch: int
    samples: tuple[int, ...]
    evaluation: int = 0
    even: Callable[[], bool] | None = field(default=None, compare=False)

    @property
    def moment(self) -> Moment:
        """The step, or the evaluation between two: each draws numbers of its own."""
        return (self.step, self.evaluation) if self.evaluation else self.step


@dataclass
class Frame:
    """The place within one pass over a model: modules entered, and calls per site.

    turn   counts the passes over an outermost module; None where one is run again
    memo   what a pass has noted for the case that it is run again; see `memo`
    """

    modules: list[tuple[int, str]] = field(
        default_factory=list
    )  # (identity, path), outermost first
    calls: dict[str, int] = field(default_factory=dict)
    turn: int | None = 0
    memo: dict[Any, Any] = field(default_factory=dict)
    given: bool = False  # the memo, to the next pass

    def copy(self) -> Frame:
        """A frame that does not follow this one, but for what is noted."""
        return Frame(list(self.modules), dict(self.calls), None, self.memo)


class _Here(threading.local):
    scope: Scope | None = None
    slice: Any = None  # of the sequence: a Visit

    def __init__(self) -> None:
        self.frame = Frame()


_here = _Here()


def current() -> Scope | None:
    """The scope of the microbatch that runs in this thread; None outside any."""
    return _here.scope


def site() -> str:
    """The path of the innermost module that is being executed; "" for the root or outside any."""
    return _here.frame.modules[-1][1] if _here.frame.modules else ""


def innermost() -> int:
    """The identity of the innermost module that is being executed; 0 outside any."""
    return _here.frame.modules[-1][0] if _here.frame.modules else 0


def next_call(where: str) -> int:
    """Count one more call at a site: 0, 1, ... within one pass over the outermost module."""
    calls = _here.frame.calls
    number = calls.get(where, 0)
    calls[where] = number + 1
    return number


def turn() -> int | None:
    """The how manyth pass over an outermost module this is; None: it runs what ran before."""
    return _here.frame.turn


def memo() -> dict[Any, Any] | None:
    """Return the notes of this pass: one that repeats an earlier pass finds that one's notes.

    So nothing is asked of a device twice.  None outside of any pass: nothing would forget them.
    """
    return _here.frame.memo if _here.scope is not None or _here.frame.modules else None


def noted() -> dict[Any, Any]:
    """Return the notes of the last pass, for `remember`."""
    return _here.frame.memo


def remember(noted: dict[Any, Any]) -> None:
    """Let the next pass over an outermost module find what an earlier one has noted."""
    _here.frame.memo, _here.frame.given = noted, True


def skip_calls(where: str, count: int) -> None:
    """Count calls at a site that are made elsewhere in this pass."""
    calls = _here.frame.calls
    calls[where] = calls.get(where, 0) + count


def visit() -> Any:
    """Return the visit of a slice in this thread; None where sequences are whole."""
    return _here.slice


class Placed:
    """A context that stands somewhere in the run; entered once, in every operation of a step.

    stays  the scope is the one that holds where it is entered
    """

    __slots__ = ("before", "frame", "part", "scope", "stays")

    def __init__(self, scope: Scope | None, frame: Frame, part: Any, stays: bool = False) -> None:
        self.scope, self.frame, self.part, self.stays = scope, frame, part, stays

    def __enter__(self) -> None:
        self.before = _here.scope, _here.frame, _here.slice
        if not self.stays:
            _here.scope = self.scope
        _here.frame, _here.slice = self.frame, self.part

    def __exit__(self, *error: object) -> None:
        _here.scope, _here.frame, _here.slice = self.before


def entered(scope: Scope) -> Placed:
    """Run one operation of a microbatch, forward or backward; what it leaves is forgotten."""
    return Placed(scope, Frame(), None)


def visiting(part: Any) -> Placed:
    """Run the operation of one slice of the sequence, in the scope that holds."""
    return Placed(None, Frame(), part, stays=True)


def capture() -> Callable[[], Any]:
    """Remember scope, slice, site and call counts; each call of the result is a context of them."""
    scope, frame, part = _here.scope, _here.frame.copy(), _here.slice
    return lambda: Placed(scope, frame.copy(), part)


def named_sites(module: nn.Module, prefix: str = "") -> list[RemovableHandle]:
    """Let every module below `module` say its path while it runs; returns the handles that undo it.

    The counts of calls start anew whenever an outermost module is entered. A forward may end by any
    exception: a module left so is dropped when the module around it, or the scope, is left.
    """
    handles = []
    for name, child in module.named_modules(prefix=prefix):
        handles += [
            child.register_forward_pre_hook(_enter(name), prepend=True),
            child.register_forward_hook(_leave, always_call=True),
        ]
    return handles


def _enter(name: str) -> Callable[[nn.Module, Any], None]:
    def enter(module: nn.Module, _args: Any) -> None:
        frame = _here.frame
        if not frame.modules:
            frame.calls.clear()
            if frame.turn is not None:
                frame.turn += 1
                frame.memo = frame.memo if frame.given else {}
                frame.given = False
        frame.modules.append((id(module), name))

    return enter


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    modules = _here.frame.modules
    # the entry may be missing: an exception before our own pre-hook still calls this hook
    for depth in range(len(modules) - 1, -1, -1):
        if modules[depth][0] == id(module):
            del modules[depth:]
            return
