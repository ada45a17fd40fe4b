"""Parameters that are copied to the device for forward and backward of a module, else off it.

A module has its parameters for the time of its forward. Autograd saves a reference (parameter and
view) instead of the copy, and a backward fetches the copy again. So nothing depends on the end of a
backward being known: a copy that was dropped too early is fetched once more, and never wrong. As
many modules as the window holds have their parameters on the device, however deep the model is
(Pudipeddi et al., L2L, 2020; Rajbhandari et al., ZeRO-Infinity, 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir import pytree
from schedlang.runtime.adapters.torch_tensor import in_backward_pass
from schedlang.runtime.forward import wrap
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.saved_tensors_slot import (
    LazyView,
    Pack,
    View,
    outer_pack,
    pack_hooks,
)


class StreamedParameter:
    """One parameter: `home` off the device, and its copy while a module needs it."""

    def __init__(self, parameter: nn.Parameter, home: Tensor) -> None:
        self.parameter = parameter
        self.device = parameter.device
        self.shown = 0  # modules in forward that use it
        self.users = 0  # modules in the window that use it
        self.copy: Tensor | None = None
        self._event: Any = None
        self._version = 0
        self.set_home(home)

    @property
    def home(self) -> Tensor:
        """The tensor off the device, between steps."""
        return self._home

    def as_stored(self, value: Tensor) -> Tensor:
        """Return new values as they are stored."""
        return value

    def set_home(self, home: Tensor) -> None:
        """Store the parameter in this tensor from now on."""
        self._home = home
        if not self.shown:
            self.parameter.data = home

    def start_copy(self, device: torch.device) -> None:
        """Start the copy to the device, unless it is there."""
        if self.copy is None or self.copy.device != device:
            self.copy, self._event = copies.to_device(self._home, device)

    def on_device(self) -> Tensor:
        """Return the copy on the device, ready for the current stream."""
        assert self.copy is not None
        return copies.wait_copy(self.copy, self._event)

    def install(self) -> None:
        """Point the parameter to the copy, for a forward."""
        if not self.shown:
            self.parameter.data = self.on_device()
            self._version = self.parameter._version
        self.shown += 1

    def uninstall(self) -> None:
        """Point the parameter to its home after a forward; writes of the forward are kept."""
        self.shown -= 1
        if not self.shown:
            if self.parameter._version != self._version:
                self._home.copy_(self.parameter.data)
            self.parameter.data = self._home

    def drop_copy(self) -> None:
        """Drop the copy; computations that use it hold it."""
        self.copy = self._event = None


class Window:
    """The modules whose parameters are on the device: the running one, and the next ones.

    The order of calls is learned from the forward of a step; the backward goes in reverse.
    """

    def __init__(self) -> None:
        self.on_device: dict[int, StreamedModule] = {}  # in the order of loading
        self.order: list[StreamedModule] = []
        self.loads = 0  # of modules, so far

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        """Return self: copies of a module share the window."""
        return self

    def advance(self, unit: StreamedModule, back: bool) -> None:
        """Load the running module, start to load the next ones, and drop all others."""
        self._bring(unit, unit.device)
        keep = {id(unit)}
        for module in self._neighbours(unit, back):
            self._bring(module, unit.device)
            keep.add(id(module))
        for key, module in list(self.on_device.items()):
            if key not in keep and not module.working:
                self.drop(module)

    def begin_forward(self, unit: StreamedModule) -> None:
        """Begin a forward of a module, outside of any backward."""
        if unit not in self.order:
            self.order.append(unit)
        self.advance(unit, back=False)

    def drop(self, unit: StreamedModule) -> None:
        """Drop the parameters of a module, except those that another loaded module uses."""
        if self.on_device.pop(id(unit), None) is not None:
            for streamed in unit.held:
                streamed.users -= 1
                if not streamed.users:
                    streamed.drop_copy()

    def clear(self) -> None:
        """Drop the parameters of all modules."""
        for unit in list(self.on_device.values()):
            self.drop(unit)

    def _bring(self, unit: StreamedModule, device: torch.device) -> None:
        if id(unit) not in self.on_device:
            self.loads += 1
            self.on_device[id(unit)] = unit
            for streamed in unit.held:
                streamed.users += 1
        for streamed in unit.held:
            streamed.start_copy(device)

    def _neighbours(self, unit: StreamedModule, back: bool) -> Sequence[StreamedModule]:
        if unit not in self.order:
            return ()
        index = self.order.index(unit)
        ahead = self.order[max(index - unit.ahead, 0) : index] if back else self.order[index + 1 :]
        return ahead if back else ahead[: unit.ahead]


class StreamedModule:
    """The layer around the forward of a module whose parameters are streamed."""

    def __init__(self, parameters: Sequence[StreamedParameter], window: Window, ahead: int) -> None:
        self.held, self.window, self.ahead = tuple(parameters), window, ahead
        self.device = self.held[0].device
        self.working = 0  # forwards that run now

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedModule:
        """Raise TypeError: a copy of the module would have parameters without storage."""
        raise TypeError("a module with streamed parameters cannot be copied; its state can")

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with the parameters on the device of its arguments."""
        self.device = _device((args, kwargs), self.device)
        if in_backward_pass():  # a recomputation
            self.window.advance(self, back=True)
        else:
            self.window.begin_forward(self)
        self._show()
        try:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with pack_hooks(self._pack()):
                return inner(*args, **kwargs)
        finally:
            self._hide()

    def _show(self) -> None:
        self.working += 1
        for streamed in self.held:
            streamed.install()

    def _hide(self) -> None:
        for streamed in self.held:
            streamed.uninstall()
        self.working -= 1
        if not self.working and not in_backward_pass():
            self.window.drop(self)

    def _pack(self) -> Pack:
        """Return a pack function: a reference for parameters; other tensors go to the outer
        hooks."""
        by_address = {
            h.on_device().untyped_storage().data_ptr(): h for h in self.held if h.home.numel()
        }
        outer = outer_pack()

        def pack(tensor: Tensor) -> Any:
            streamed = None if tensor.is_meta else by_address.get(_storage_address(tensor))
            if streamed is None:
                return outer(tensor)
            return LazyView(partial(self._fetch_again, streamed), View.of(tensor))

        return pack

    def _fetch_again(self, streamed: StreamedParameter) -> Tensor:
        """Return a parameter on the device, for backward."""
        self.window.advance(self, back=True)
        return streamed.on_device()


def stream_parameters(
    module: nn.Module, parameters: Sequence[StreamedParameter], window: Window, ahead: int
) -> None:
    """Load these parameters of `module` for its forwards and backwards only, in place."""
    wrap(module, "stream", StreamedModule(parameters, window, ahead))


def _storage_address(tensor: Tensor) -> int:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _device(arguments: Any, default: torch.device) -> torch.device:
    """Return the device of the first tensor among the arguments."""
    return next((v.device for v in pytree.tree_leaves(arguments) if isinstance(v, Tensor)), default)
