"""Parameters that come to the device for a module's forward and backward, and lie elsewhere else.

A module is given its parameters for the time of its forward.  What autograd would keep of them it
keeps as a note of which parameter and which view; whoever asks in backward gets them again.  So
nothing depends on knowing when a backward ends: what was given back too early is fetched once more,
and never wrong.  As many modules as the window holds have their parameters on the device, however
deep the model is (Pudipeddi et al., L2L, 2020; Rajbhandari et al., ZeRO-Infinity, 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir import pytree
from schedlang.runtime.forward import wrap
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.saved import Pack, View, Viewed, outside, slot


class StreamedParameter:
    """One parameter: `home` off the device, and its copy there while a module has it."""

    def __init__(self, parameter: nn.Parameter, home: Tensor) -> None:
        self.parameter = parameter
        self.device = parameter.device
        self.shown = 0  # modules in forward that have it
        self.users = 0  # modules that are on the device with it
        self.copy: Tensor | None = None
        self._event: Any = None
        self._version = 0
        self.settle(home)

    @property
    def home(self) -> Tensor:
        """The tensor off the device, as it lies between steps."""
        return self._home

    def laid(self, value: Tensor) -> Tensor:
        """New values as they would lie there."""
        return value

    def settle(self, home: Tensor) -> None:
        """Let the parameter lie there from now on."""
        self._home = home
        if not self.shown:
            self.parameter.data = home

    def bring(self, device: torch.device) -> None:
        """Begin to copy it to the device, unless it is there."""
        if self.copy is None or self.copy.device != device:
            self.copy, self._event = copies.to_device(self._home, device)

    def there(self) -> Tensor:
        """The copy on the device, ready for the current stream."""
        assert self.copy is not None
        return copies.ready(self.copy, self._event)

    def show(self) -> None:
        """Let the parameter be the copy, for a forward."""
        if not self.shown:
            self.parameter.data = self.there()
            self._version = self.parameter._version
        self.shown += 1

    def hide(self) -> None:
        """The forward is over; what it wrote into the parameter is not lost."""
        self.shown -= 1
        if not self.shown:
            if self.parameter._version != self._version:
                self._home.copy_(self.parameter.data)
            self.parameter.data = self._home

    def leave(self) -> None:
        """Let go of the copy; whoever still computes with it holds it."""
        self.copy = self._event = None


class Window:
    """The modules whose parameters are on the device: the one at work, and those that come next.

    The order of calls is learnt from the forward of a step; the backward goes the other way.
    """

    def __init__(self) -> None:
        self.there: dict[int, Streamed] = {}  # in the order in which they came
        self.order: list[Streamed] = []
        self.loads = 0  # of modules, so far

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        """Copies of a module go on using the same window."""
        return self

    def turn(self, unit: Streamed, back: bool) -> None:
        """A module is at work: it is there, those that come next are on their way, others go."""
        self._bring(unit, unit.device)
        keep = {id(unit)}
        for one in self._next(unit, back):
            self._bring(one, unit.device)
            keep.add(id(one))
        for key, one in list(self.there.items()):
            if key not in keep and not one.working:
                self.drop(one)

    def called(self, unit: Streamed) -> None:
        """A forward of a module begins, outside of any backward."""
        if unit not in self.order:
            self.order.append(unit)
        self.turn(unit, back=False)

    def drop(self, unit: Streamed) -> None:
        """A module's parameters leave the device, but for those that another one there has."""
        if self.there.pop(id(unit), None) is not None:
            for held in unit.held:
                held.users -= 1
                if not held.users:
                    held.leave()

    def clear(self) -> None:
        """Nothing of a step is left on the device."""
        for unit in list(self.there.values()):
            self.drop(unit)

    def _bring(self, unit: Streamed, device: torch.device) -> None:
        if id(unit) not in self.there:
            self.loads += 1
            self.there[id(unit)] = unit
            for held in unit.held:
                held.users += 1
        for held in unit.held:
            held.bring(device)

    def _next(self, unit: Streamed, back: bool) -> Sequence[Streamed]:
        if unit not in self.order:
            return ()
        at = self.order.index(unit)
        ahead = self.order[max(at - unit.ahead, 0) : at] if back else self.order[at + 1 :]
        return ahead if back else ahead[: unit.ahead]


class Streamed:
    """The layer around the forward of a module whose parameters are streamed."""

    def __init__(self, held: Sequence[StreamedParameter], window: Window, ahead: int) -> None:
        self.held, self.window, self.ahead = tuple(held), window, ahead
        self.device = self.held[0].device
        self.working = 0  # forwards that run now

    def __deepcopy__(self, memo: dict[int, Any]) -> Streamed:
        """A copy of the module would have parameters of its own, which lie nowhere."""
        raise TypeError("a module with streamed parameters cannot be copied; its state can")

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with the parameters on the device where its arguments are."""
        self.device = _device((args, kwargs), self.device)
        if _in_backward():  # a recomputation
            self.window.turn(self, back=True)
        else:
            self.window.called(self)
        self._show()
        try:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with slot(self._pack()):
                return inner(*args, **kwargs)
        finally:
            self._hide()

    def _show(self) -> None:
        self.working += 1
        for held in self.held:
            held.show()

    def _hide(self) -> None:
        for held in self.held:
            held.hide()
        self.working -= 1
        if not self.working and not _in_backward():
            self.window.drop(self)

    def _pack(self) -> Pack:
        """Keep a note of a parameter; anything else as the hooks around keep it."""
        places = {h.there().untyped_storage().data_ptr(): h for h in self.held if h.home.numel()}
        outer = outside()

        def pack(tensor: Tensor) -> Any:
            held = None if tensor.is_meta else places.get(_place(tensor))
            if held is None:
                return outer(tensor)
            return Viewed(partial(self._again, held), View.of(tensor))

        return pack

    def _again(self, held: StreamedParameter) -> Tensor:
        """A parameter on the device, for backward."""
        self.window.turn(self, back=True)
        return held.there()


def stream(
    module: nn.Module, held: Sequence[StreamedParameter], window: Window, ahead: int
) -> None:
    """Give `module` these parameters for its forwards and backwards only, in place."""
    wrap(module, "stream", Streamed(held, window, ahead))


def _place(tensor: Tensor) -> int:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _device(given: Any, usual: torch.device) -> torch.device:
    """The device of the first tensor of the arguments."""
    return next((v.device for v in pytree.tree_leaves(given) if isinstance(v, Tensor)), usual)


def _in_backward() -> bool:
    """Return whether autograd is at work: this is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
