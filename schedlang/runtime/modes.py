"""Function modes that stay active wherever the model computes, also in backward and recomputation.

torch disables a function mode inside the functions that it handles, so also inside
`loss.backward()`: recomputations of checkpoints and backwards written in Python would silently
leave float64 and draw new dropout masks. `AmbientMode` modes stay active;
`restore_forward_context` enters them again for a recomputation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from schedlang.runtime import scope
from schedlang.runtime.adapters.torch_checkpoint import recompute_within
from schedlang.runtime.adapters.torch_tensor import unchecked
from schedlang.runtime.device import HOST

ModeOrFactory = AbstractContextManager[Any] | Callable[[], AbstractContextManager[Any]]

# type of getters and setters of tensor attributes: they draw nothing and make no new float
ATTRIBUTE_ACCESS = type(torch.Tensor.shape.__get__)  # type: ignore[attr-defined]
# losses over labels: modes see each as one call of the model, not as the operators inside
LOSSES = (F.cross_entropy, F.nll_loss)
_PORTALS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_COMPOSED = ("torch.nn.functional", "torch.functional", "torch.autograd")


class _Active(threading.local):
    restored: Any = None  # the modes of the forward whose context is restored now

    def __init__(self) -> None:
        self.modes: tuple[ModeOrFactory, ...] = ()


_active = _Active()


class AmbientMode(TorchFunctionMode):
    """A function mode that is also active inside composed functions and inside backward.

    compiles  compiled regions may run without it: it changes nothing in them
    eager     if not, and the mode is active in training: the reason why regions run eagerly
    carried   a `CarryingMode` mode that is entered right above may call it directly
    """

    compiles = False
    eager = ""
    carried = False

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call `func`; if it is composed in Python, its calls go through this mode too."""
        body = _without_dispatch(func)
        if body is None or not all(map(_has_plain_dispatch, types)):
            return func(*args, **kwargs)
        with self:
            return body(*args, **kwargs)


class CarryingMode(AmbientMode):
    """A mode that removes the mode right beneath it from torch's stack and calls that mode
    directly.

    A call then passes torch's dispatch once, not twice: in proofs, dispatch is the larger part of a
    mode's cost. Each function runs under the same modes as if both were on the stack.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under: list[AmbientMode | None] = []  # one for each time that this mode is entered

    def __enter__(self) -> Self:
        depth = _len_torch_function_stack()
        beneath = _get_function_stack_at(depth - 1) if depth else None
        # entered again, as by a recomputation: it carries the same mode as before, or none
        same_kind = beneath is self._under[-1] if self._under else beneath is not self
        carried = beneath if same_kind and getattr(beneath, "carried", False) else None
        if carried is not None:
            _pop_mode()  # type: ignore[no-untyped-call]
        self._under.append(carried)
        _push_mode(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _pop_mode()  # type: ignore[no-untyped-call]
        under = self._under.pop()
        if under is not None:
            _push_mode(under)  # type: ignore[no-untyped-call]

    @property
    def carried_mode(self) -> AmbientMode | None:
        """The mode that is carried now."""
        return self._under[-1] if self._under else None

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call `func`, see `Ambient.run`."""
        body = _without_dispatch(func)
        if body is None or not all(map(_has_plain_dispatch, types)):
            return self.call_beneath(func, types, args, kwargs)
        _push_mode(self)  # type: ignore[no-untyped-call]
        try:
            return body(*args, **kwargs)
        finally:
            _pop_mode()  # type: ignore[no-untyped-call]

    def call_beneath(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` under the modes beneath."""
        under = self._under[-1] if self._under else None
        if under is None:
            return func(*args, **kwargs)
        return under.__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def beneath(self) -> Iterator[None]:
        """Run the block, while this mode handles a call, under the modes beneath."""
        under = self.carried_mode
        if under is None:
            yield
            return
        _push_mode(under)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            _pop_mode()  # type: ignore[no-untyped-call]


def _has_plain_dispatch(kind: Any) -> bool:
    """Return whether tensors of this class have no torch function of their own.

    A class with one must see the composed function itself.
    """
    rules: Any = kind.__torch_function__
    inherited: Any = torch.Tensor.__torch_function__
    is_disabled = rules is torch._C._disabled_torch_function_impl
    return is_disabled or getattr(rules, "__func__", None) is inherited.__func__


@cache
def _without_dispatch(func: Any) -> Callable[..., Any] | None:
    """Return a composed function without its dispatch to modes, which would recurse; None: not
    composed."""
    func = unchecked(func)
    if not isinstance(func, FunctionType) or func in map(unchecked, LOSSES):
        return None
    composed = func.__module__.startswith(_COMPOSED) or func is torch.Tensor.backward
    if not composed or not set(func.__code__.co_names) & set(_PORTALS):
        return None
    names = {**func.__globals__, **{portal: _false for portal in _PORTALS}}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _false(*_: Any) -> bool:
    return False


@contextmanager
def enter_modes(*modes: ModeOrFactory) -> Iterator[None]:
    """Enter modes (or what factories make), the last one innermost, so that
    `restore_forward_context` enters them too."""
    with _with_active((*_active.modes, *modes)), _enter_all(modes):
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Leave all function modes and use torch's own default dtype, within the block."""
    stack: list[Any] = []
    default = torch.get_default_dtype()
    try:
        while _len_torch_function_stack():
            stack.append(_pop_mode())  # type: ignore[no-untyped-call]
        torch.set_default_dtype(torch.float32)
        with _with_active(()):
            yield
    finally:
        torch.set_default_dtype(default)
        for mode in reversed(stack):
            _push_mode(mode)  # type: ignore[no-untyped-call]


def reenter_modes() -> AbstractContextManager[None]:
    """Return a context that enters the ambient modes again, inside a function that torch disabled
    them for; not those that have seen the call of that function."""
    return _enter_all(tuple(m for m in _active.modes if not sees_model_calls(m)))


def sees_model_calls(mode: object) -> bool:
    """Return whether a mode sees only the model's own calls, each once (`model_calls`).

    It sees neither the calls of a compiled region nor those of a function that replaces a call.
    """
    return bool(getattr(mode, "model_calls", False))


def modes_on_stack() -> list[AmbientMode]:
    """Return the ambient modes on torch's stack, the outermost first, including carried ones."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [m for mode in stack if isinstance(mode, AmbientMode) for m in _with_carried(mode)]


def _with_carried(mode: AmbientMode) -> list[AmbientMode]:
    under = mode.carried_mode if isinstance(mode, CarryingMode) else None
    return [mode] if under is None else [*_with_carried(under), mode]


def is_active(kind: type[AmbientMode]) -> bool:
    """Return whether an ambient mode of a class is active."""
    return any(isinstance(mode, kind) for mode in _active.modes)


@contextmanager
def _with_active(modes: tuple[ModeOrFactory, ...]) -> Iterator[None]:
    before = _active.modes
    _active.modes = modes
    try:
        yield
    finally:
        _active.modes = before


@contextmanager
def _enter_all(modes: tuple[ModeOrFactory, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode if isinstance(mode, AbstractContextManager) else mode())
        yield


def _default_device() -> torch.device:
    """Return the device of new tensors; without modes (as in backward) the host."""
    return torch.get_default_device() if _len_torch_function_stack() else HOST


class restore_forward_context:  # noqa: N801  (reads as a function: `context_fn=lambda: (nullcontext(), reentry())`)
    """Context for a recomputation: modes, scope, site and call counts, and default device of its
    forward.

    Make it in forward. It may be entered several times, in any thread.
    """

    def __init__(self) -> None:
        self._modes = _active.modes
        self._device = _default_device()
        self._place = scope.capture_scope()
        self._entered: list[tuple[AbstractContextManager[None], tuple[Any, Any]]] = []

    @property
    def is_restored(self) -> bool:
        """Whether this thread is inside the same context already."""
        return _active.restored is self._modes

    def __enter__(self) -> None:
        context, before = self._place(), (_active.modes, _active.restored)
        modes: tuple[ModeOrFactory, ...] = self._modes
        if self._device != _default_device():
            modes = (*modes, self._device)
        if modes:  # most recomputations enter nothing
            context = _entered_with(modes, context)
        _active.modes = self._modes
        try:
            context.__enter__()
        except BaseException:
            _active.modes = before[0]
            raise
        _active.restored = self._modes
        self._entered.append((context, before))

    def __exit__(self, *error: Any) -> None:
        context, before = self._entered.pop()
        try:
            context.__exit__(*error)
        finally:
            _active.modes, _active.restored = before


@contextmanager
def _entered_with(
    modes: tuple[ModeOrFactory, ...], context: AbstractContextManager[None]
) -> Iterator[None]:
    with context, _enter_all(modes):
        yield


def _context_of_forward() -> Callable[[], AbstractContextManager[None]] | None:
    """Return what makes the context of a checkpoint of the model's own; None outside of programs.

    Its `context_fn` may restore the context, too.
    """
    if not _active.modes and not scope.is_entered():
        return None
    context = restore_forward_context()
    return lambda: nullcontext() if context.is_restored else context


recompute_within(_context_of_forward)
