"""The position in the run: step, microbatch, samples, slice, and the module that is executed.

Code whose result must not depend on the layout (dropout masks above all) reads it here. The state
is per thread; `capture_scope` stores all of it, so that a recomputation has the scope of its
forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Moment = int | tuple[int, int]  # a step, or (step, evaluation)


@dataclass(frozen=True)
class Scope:
    """One microbatch of one step; `samples` are the global ids of its rows, in row order.

    evaluation   the number of this evaluation since the last step, from 1; 0: training
    same_shapes  returns whether the parts of all ranks have the same shapes, where known
    seeding      returns a context of an operation, in which Python and numpy draw what all ranks
                 with these samples draw; None: they draw what they draw
    """

    step: int
    microbatch: int
    samples: tuple[int, ...]
    evaluation: int = 0
    same_shapes: Callable[[], bool] | None = field(default=None, compare=False)
    seeding: Callable[[Scope], AbstractContextManager[None]] | None = field(
        default=None, compare=False
    )

    @property
    def moment(self) -> Moment:
        """The step, or (step, evaluation): each has its own random numbers."""
        return (self.step, self.evaluation) if self.evaluation else self.step


@dataclass
class PassFrame:
    """The position within one pass over a model: modules entered, and calls per site.

    pass_number  number of the pass over an outermost module; None in a pass that is repeated
    memo         notes of the pass for its repetition; see `pass_memo`
    """

    # (identity, path), outermost first
    modules: list[tuple[int, str]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    pass_number: int | None = 0
    memo: dict[Any, Any] = field(default_factory=dict)
    keep_memo: bool = False  # whether the next pass gets this memo

    def copy(self) -> PassFrame:
        """Copy the frame; the copy shares only the memo."""
        return PassFrame(list(self.modules), dict(self.calls), None, self.memo)


class _Here(threading.local):
    scope: Scope | None = None
    slice: Any = None  # of the sequence: a Visit

    def __init__(self) -> None:
        self.frame = PassFrame()


_here = _Here()


def current() -> Scope | None:
    """Return the scope of the microbatch that runs in this thread; None outside any."""
    return _here.scope


def is_entered() -> bool:
    """Return whether this thread runs anything in a scope or a slice, or a module with a path."""
    return bool(_here.scope is not None or _here.slice is not None or _here.frame.modules)


def current_site() -> str:
    """Return the path of the innermost module that is running; "" for the root or outside any."""
    return _here.frame.modules[-1][1] if _here.frame.modules else ""


def innermost_module() -> int:
    """Return the id of the innermost module that is running; 0 outside any."""
    return _here.frame.modules[-1][0] if _here.frame.modules else 0


def count_call(site: str) -> int:
    """Count one more call at a site; return its number 0, 1, ... within one pass over the outermost
    module."""
    calls = _here.frame.calls
    number = calls.get(site, 0)
    calls[site] = number + 1
    return number


def pass_number() -> int | None:
    """Return the number of this pass over an outermost module; None: it repeats an earlier pass."""
    return _here.frame.pass_number


def pass_memo() -> dict[Any, Any] | None:
    """Return the notes of this pass; a pass that repeats an earlier one gets the earlier one's
    notes.

    So nothing is read from a device twice. None outside of any pass: the notes would never be
    dropped.
    """
    return _here.frame.memo if _here.scope is not None or _here.frame.modules else None


def last_memo() -> dict[Any, Any]:
    """Return the notes of the last pass, for `reuse_memo`."""
    return _here.frame.memo


def reuse_memo(memo: dict[Any, Any]) -> None:
    """Let the next pass over an outermost module use the notes of an earlier pass."""
    _here.frame.memo, _here.frame.keep_memo = memo, True


def skip_calls(site: str, count: int) -> None:
    """Count calls at a site that are made elsewhere in this pass."""
    calls = _here.frame.calls
    calls[site] = calls.get(site, 0) + count


def current_visit() -> Any:
    """Return the visit of a slice in this thread; None where sequences are unsliced."""
    return _here.slice


class ScopeContext:
    """A context that sets the position in the run; one is entered in every operation of a step.

    stays   the current scope stays
    seeded  the context of the generators of Python and numpy; None: they are unchanged
    """

    __slots__ = ("before", "frame", "part", "scope", "seeded", "stays")

    def __init__(
        self, scope: Scope | None, frame: PassFrame, part: Any, stays: bool = False
    ) -> None:
        self.scope, self.frame, self.part, self.stays = scope, frame, part, stays
        self.seeded: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if self.seeded is not None:
            self.seeded.__enter__()
        self.before = _here.scope, _here.frame, _here.slice
        if not self.stays:
            _here.scope = self.scope
        _here.frame, _here.slice = self.frame, self.part

    def __exit__(self, *error: Any) -> None:
        _here.scope, _here.frame, _here.slice = self.before
        if self.seeded is not None:
            self.seeded.__exit__(*error)


def enter_scope(scope: Scope) -> ScopeContext:
    """Return a context for one operation of a microbatch, forward or backward, with a new frame."""
    context = ScopeContext(scope, PassFrame(), None)
    if scope.seeding is not None:
        context.seeded = scope.seeding(scope)
    return context


def enter_slice(part: Any) -> ScopeContext:
    """Return a context for the operation of one slice of the sequence, in the current scope."""
    return ScopeContext(None, PassFrame(), part, stays=True)


def capture_scope() -> Callable[[], Any]:
    """Store scope, slice, site and call counts; each call of the result returns a context with
    them."""
    scope, frame, part = _here.scope, _here.frame.copy(), _here.slice
    return lambda: ScopeContext(scope, frame.copy(), part)


def named_sites(module: nn.Module, prefix: str = "") -> list[RemovableHandle]:
    """Let every module below `module` set its path while it runs; return the handles of the hooks.

    The counts of calls start anew whenever an outermost module is entered. A forward may end by any
    exception: its entry is dropped when the module around it, or the scope, is left.
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
            if frame.pass_number is not None:
                frame.pass_number += 1
                frame.memo = frame.memo if frame.keep_memo else {}
                frame.keep_memo = False
        frame.modules.append((id(module), name))

    return enter


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    modules = _here.frame.modules
    # the entry may be missing: after an exception before our pre-hook, this hook is called still
    for depth in range(len(modules) - 1, -1, -1):
        if modules[depth][0] == id(module):
            del modules[depth:]
            return
