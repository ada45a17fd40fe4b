"""Whether modules compute the same when they run again: which call of torch differs, and where.

Recomputation replays the generators of torch. What a module draws from Python or numpy, or keeps
from call to call, it cannot replay. Such a module calls torch with other numbers in its next run,
which shows on the meta device: the calls of two runs are compared, with all that is no tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from schedlang.runtime.device import Replayed, on_host, own_generators
from schedlang.runtime.recording.torch_calls import name_of
from schedlang.runtime.recording.units import Switch
from schedlang.runtime.staging.arguments import put, take

SHOWN = 40  # characters of a value in a message
_OURS = ("torch", "schedlang")
_NAMES = {"lift_fresh": "from_numpy"}  # what makes a tensor of data calls nothing else


@dataclass(frozen=True)
class Difference:
    """The first call of torch that two runs of a module make in two ways.

    `first` and `second` are what it was given, or "" where a run does not make the call.
    """

    module: str
    function: str
    place: str
    first: str
    second: str


class Repeats:
    """Runs modules once more than they are called, twice, and compares; one of each kind."""

    def __init__(self, model: nn.Module, kinds: Mapping[str, object]) -> None:
        self.model, self.names, self.kinds = model, tuple(kinds), kinds
        self.seen: set[object] = set()
        self.found: list[Difference] = []
        self.quiet = False

    def run(self, forward: Any) -> list[Difference]:
        """What differs during `forward()`, which calls the model."""
        switch = Switch(self.model, self.names)
        try:
            with switch.using(self._call):
                forward()
        finally:
            switch.remove()
        return self.found

    def _call(self, unit: int, original: Any, args: Any, kwargs: Any) -> Any:
        name = self.names[unit]
        kind = self.kinds[name]
        if kind in self.seen:
            return original(*args, **kwargs)
        self.seen.add(kind)
        tensors: list[Tensor] = []
        template = take((args, kwargs), tensors)
        module = self.model.get_submodule(name)
        draws = Replayed([torch.default_generator, *own_generators(module)])
        output = original(*args, **kwargs)  # what a module makes at its first call is there now
        with draws:
            first = _calls(original, put(template, tensors))
        with draws:
            second = _calls(original, put(template, tensors))
        self.found += list(_differ(name, first, second))[:1]
        return output


@dataclass(frozen=True)
class _Made:
    """A call of torch: its function, the line it stands in, and what it was given but tensors."""

    function: str
    place: str
    given: str


def _differ(module: str, first: Sequence[_Made], second: Sequence[_Made]) -> Iterator[Difference]:
    for one, other in zip_longest(first, second):
        if one is None or other is None or (one.function, one.given) != (
            other.function, other.given
        ):  # fmt: skip
            known = one or other
            alike = one is not None and other is not None and one.function == other.function
            yield Difference(
                module, known.function, known.place,
                one.given if one is not None else "",
                other.given if other is not None and alike else "",
            )  # fmt: skip


def _calls(original: Any, given: Any) -> list[_Made]:
    args, kwargs = given
    heard = _Listening()
    with heard:
        original(*args, **kwargs)
    return heard.made


class _Listening(TorchFunctionMode):
    """Takes note of every call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Made] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        said = ", ".join(filter(None, map(_said, tree_leaves((args, kwargs)))))
        name = name_of(func).removesuffix(".default")
        self.made.append(_Made(_NAMES.get(name, name), _line(), said))
        return func(*args, **kwargs)


def _said(value: Any) -> str:
    """What a value is, of tensors what is known without data."""
    if isinstance(value, Tensor):
        known = f"{list(value.shape)}"
        if type(value) is Tensor and on_host(value) and not value.requires_grad:
            return known + "".join(map(repr, value.flatten()[:SHOWN].tolist()))
        return known
    if isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if hasattr(value, "tobytes"):  # of numpy
        return str(value.tolist())
    return ""


def _line() -> str:
    """The line of the model from which torch was called."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
