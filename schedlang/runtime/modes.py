"""Function modes that hold wherever the model computes: in backward and recomputation too.

A function mode of torch is off inside whatever it handles. So `loss.backward()` would run without
it, and with it every recomputation of a checkpoint and every backward written in Python: float64
would be left and dropout masks drawn anew, without a word. `Ambient` modes stay on; `reentry` puts
them back for a recomputation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import Any, Self

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from schedlang.runtime import scope
from schedlang.runtime.device import HOST

ModeOrFactory = AbstractContextManager[Any] | Callable[[], AbstractContextManager[Any]]

# reading or setting an attribute of a tensor: it draws nothing and makes no new float
ATTRIBUTE = type(torch.Tensor.shape.__get__)  # type: ignore[attr-defined]
_PORTALS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_COMPOSED = ("torch.nn.functional", "torch.functional", "torch.autograd")


class _Active(threading.local):
    def __init__(self) -> None:
        self.modes: tuple[ModeOrFactory, ...] = ()


_active = _Active()


class Ambient(TorchFunctionMode):
    """A function mode that is also on inside composed functions and inside backward.

    compiles  compiled regions may run without it: it changes nothing in them
    eager     else, where it is on in training, why they run eagerly
    carried   a `Carrying` mode that is entered right above it may ask it itself
    """

    compiles = False
    eager = ""
    carried = False

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call `func`; if it is written in Python, what it calls comes to this mode too."""
        body = _open(func)
        if body is None or not all(map(_plain, types)):
            return func(*args, **kwargs)
        with self:
            return body(*args, **kwargs)


class Carrying(Ambient):
    """A mode that takes the one right beneath it off torch's stack and asks that itself.

    A call then comes through torch once and not twice: of what a proof runs the larger part of the
    price of a mode is the way to it.  What runs under which modes is as if both were there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under: list[Ambient | None] = []  # one for each time that this mode is entered

    def __enter__(self) -> Self:
        depth = _len_torch_function_stack()
        under = _get_function_stack_at(depth - 1) if depth else None
        # entered again, as a recomputation does: it carries what it carried, or nothing
        alike = under is self._under[-1] if self._under else under is not self
        taken = under if alike and getattr(under, "carried", False) else None
        if taken is not None:
            _pop_mode()  # type: ignore[no-untyped-call]
        self._under.append(taken)
        _push_mode(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _pop_mode()  # type: ignore[no-untyped-call]
        under = self._under.pop()
        if under is not None:
            _push_mode(under)  # type: ignore[no-untyped-call]

    @property
    def under(self) -> Ambient | None:
        """The mode that is carried now."""
        return self._under[-1] if self._under else None

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """See Ambient."""
        body = _open(func)
        if body is None or not all(map(_plain, types)):
            return self.ask(func, types, args, kwargs)
        _push_mode(self)  # type: ignore[no-untyped-call]
        try:
            return body(*args, **kwargs)
        finally:
            _pop_mode()  # type: ignore[no-untyped-call]

    def ask(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` under the modes beneath."""
        under = self._under[-1] if self._under else None
        if under is None:
            return func(*args, **kwargs)
        return under.__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def beneath(self) -> Iterator[None]:
        """Compute, while this mode handles a call, under those beneath."""
        under = self.under
        if under is None:
            yield
            return
        _push_mode(under)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            _pop_mode()  # type: ignore[no-untyped-call]


def _plain(kind: Any) -> bool:
    """Return whether tensors of this class have no rules of their own, which must see the
    function."""
    rules: Any = kind.__torch_function__
    inherited: Any = torch.Tensor.__torch_function__
    plain = rules is torch._C._disabled_torch_function_impl
    return plain or getattr(rules, "__func__", None) is inherited.__func__


@cache
def _open(func: Any) -> Callable[..., Any] | None:
    """A composed function without its detour to the modes, which would never end."""
    if not isinstance(func, FunctionType):
        return None
    composed = func.__module__.startswith(_COMPOSED) or func is torch.Tensor.backward
    if not composed or not set(func.__code__.co_names) & set(_PORTALS):
        return None
    names = {**func.__globals__, **{portal: _no for portal in _PORTALS}}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*_: Any) -> bool:
    return False


@contextmanager
def ambient(*modes: ModeOrFactory) -> Iterator[None]:
    """Enter modes (or what factories make), the last one innermost, known to `reentry`."""
    with _holding((*_active.modes, *modes)), _on(modes):
        yield


@contextmanager
def outside() -> Iterator[None]:
    """No function mode at all, and torch's own default dtype: as in a process of its own."""
    stack: list[Any] = []
    default = torch.get_default_dtype()
    try:
        while _len_torch_function_stack():
            stack.append(_pop_mode())  # type: ignore[no-untyped-call]
        torch.set_default_dtype(torch.float32)
        with _holding(()):
            yield
    finally:
        torch.set_default_dtype(default)
        for mode in reversed(stack):
            _push_mode(mode)  # type: ignore[no-untyped-call]


def again() -> AbstractContextManager[None]:
    """The ambient modes once more, inside of a function that they were switched off for."""
    return _on(_active.modes)


def on_stack() -> list[Ambient]:
    """The ambient modes on torch's stack, the outermost first, with those that others carry."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [one for mode in stack if isinstance(mode, Ambient) for one in _with_carried(mode)]


def _with_carried(mode: Ambient) -> list[Ambient]:
    under = mode.under if isinstance(mode, Carrying) else None
    return [mode] if under is None else [*_with_carried(under), mode]


def on(kind: type[Ambient]) -> bool:
    """Return whether an ambient mode of a class is on."""
    return any(isinstance(mode, kind) for mode in _active.modes)


@contextmanager
def _holding(modes: tuple[ModeOrFactory, ...]) -> Iterator[None]:
    before = _active.modes
    _active.modes = modes
    try:
        yield
    finally:
        _active.modes = before


@contextmanager
def _on(modes: tuple[ModeOrFactory, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode if isinstance(mode, AbstractContextManager) else mode())
        yield


def _default_device() -> torch.device:
    """The device of new tensors; a mode tells it, which is off in backward as others are."""
    return torch.get_default_device() if _len_torch_function_stack() else HOST


class reentry:  # noqa: N801  (reads as a function: `context_fn=lambda: (nullcontext(), reentry())`)
    """The context of a recomputation: the modes, scope, site and call counts of when it was made,
    and the device of new tensors.

    Make it in forward. It may be entered again and again, in any thread.
    """

    def __init__(self) -> None:
        self._modes = _active.modes
        self._device = _default_device()
        self._place = scope.capture()
        self._entered: list[tuple[AbstractContextManager[None], tuple[ModeOrFactory, ...]]] = []

    def __enter__(self) -> None:
        place, before = self._place(), _active.modes
        modes: tuple[ModeOrFactory, ...] = self._modes
        if self._device != _default_device():
            modes = (*modes, self._device)
        if modes:  # most recomputations enter nothing
            place = _within(modes, place)
        _active.modes = self._modes
        try:
            place.__enter__()
        except BaseException:
            _active.modes = before
            raise
        self._entered.append((place, before))

    def __exit__(self, *error: Any) -> None:
        place, before = self._entered.pop()
        try:
            place.__exit__(*error)
        finally:
            _active.modes = before


@contextmanager
def _within(
    modes: tuple[ModeOrFactory, ...], place: AbstractContextManager[None]
) -> Iterator[None]:
    with place, _on(modes):
        yield
