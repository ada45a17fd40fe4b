"""Dropout as torch draws it, from this rank's generators: alike where ranks hold the same tensor.

Each step seeds the generators from (seed, step, the rank's places along the axes over which every
activation differs: rows, tokens, stages), so ranks that compute the same draw the same, and a run
that goes on draws on, without saved states.  What is split over more axes (heads, hidden, tokens of
a sequence-parallel region) or over fewer draws under a fork: for the time of a call the generators
stand where (seed, step, microbatch, slice, module, call, places along its own axes) puts them.
Megatron-LM (Shoeybi et al., 2019) keeps a second generator state for this; a fork keeps none, so
whatever replays torch's generators replays it, and a recomputed module forks to the same numbers.

No call of a step is watched, but those of modules that draw some masks apart and some not.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime import scope
from schedlang.runtime.device import States, on_host
from schedlang.runtime.forward import wrap
from schedlang.runtime.modes import Ambient
from schedlang.runtime.rng.draws import masks, shapes_of
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.storage.saved import policies

_CALLS = "\0fork"  # behind a module's name: the count of its forks
Places = tuple[tuple[str, int], ...]  # by axis


@dataclass(frozen=True)
class Fork:
    """The places of a draw that is not the step's own.

    every   it is one for all rows of a batch, in all microbatches
    """

    places: Places
    every: bool = False


@dataclass(frozen=True)
class Forked:
    """A module that draws under forks: those of each of its draws in one call, in order.

    None in place of one: that draw is no fork, it goes on with the step's own numbers.  `whole`:
    all draws of the module and of those inside of it are alike; then one fork is around the call.
    """

    site: str
    draws: tuple[Fork | None, ...]
    whole: bool


def _standing(one: States) -> States | Tensor:
    """Return where a generator stands: its state, and of the host's a copy of the generator.

    As a tensor that state has 5 kB, which would live as long as a step.
    """
    return one.clone_state() if one is torch.default_generator else one.get_state()


class NativeDropout:
    """Torch's own dropout on one of several ranks.

    places      of this rank along the axes over which all activations differ
    generators  those that operators draw from where none is given: the CPU's, and the device's
    on          whether forks are made; off while a proof draws logically
    """

    def __init__(self, seed: int, places: Places, generators: Sequence[States]) -> None:
        self.seed, self.places, self.generators, self.on = seed, places, tuple(generators), True
        self.noting: Noting | None = None
        self._here = _Here()
        self._mode = _Own(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeDropout:
        """Copies of a module draw from the same generators."""
        return self

    @contextmanager
    def drawn_in(self, step: scope.Moment) -> Iterator[None]:
        """Enter a step that draws; generators then stand where they stood before."""
        before, on = [*map(_standing, self.generators)], self.on
        self._seed(begun(self.seed, step, self.places))
        self.on = True
        try:
            yield
        finally:
            self.on = on
            self._back(before)

    @contextmanager
    def forked(self, site: str, fork: Fork, index: int = 0) -> Iterator[None]:
        """Enter a module's next call, for which draws of their own begin at some places."""
        call = scope.next_call(f"{site}{_CALLS}")
        where, part = scope.current(), scope.visit()
        if where is None:  # a loop of the user's own: one of its numbers, which all ranks have
            at: Any = int(torch.randint(2**62, ()))
        elif fork.every:
            at = where.moment
        else:
            # tokens of ranks differ by places; slices of one rank by their number
            piece = getattr(part, "span", None)
            at = (where.moment, where.microbatch, where.samples[:1], piece and piece.index)
        before = [*map(_standing, self.generators)]
        self._seed(forks_at(self.seed, at, site, call, index, fork.places))
        try:
            yield
        finally:
            self._back(before)

    def attended(self, made: Any, shape: tuple[int, ...]) -> Any:
        """Call `made`, which draws for the weights of an attention whose ranks share them."""
        frame = self.frame
        fork = frame.next() if frame is not None else None
        if frame is None or fork is None:
            return self._noted(made, shape)
        with self.forked(frame.site, fork, frame.index):
            return self._noted(made, shape)

    def _noted(self, made: Any, shape: tuple[int, ...]) -> Any:
        if self.noting is not None:
            self.noting.note(shape)
        return made()

    def _seed(self, number: int) -> None:
        for one in self.generators:
            one.manual_seed(number)

    def _back(self, before: Sequence[States | Tensor]) -> None:
        for one, state in zip(self.generators, before):
            one.set_state(state if isinstance(state, Tensor) else state.get_state())

    # -- modules of which some draws are forks and some are not -----------------------------------

    @property
    def frame(self) -> Frame | None:
        """The innermost call whose draws are told apart one by one."""
        return self._here.frames[-1] if self._here.frames else None

    @contextmanager
    def framed(self, frame: Frame | None) -> Iterator[None]:
        """Enter a call of a module; None: all that it draws is one stream already."""
        self._here.frames.append(frame)
        try:
            if frame is None:
                yield
            else:
                with self._mode:
                    yield
        finally:
            self._here.frames.pop()


def begun(seed: int, step: scope.Moment, places: Places) -> int:
    """Return the number from which a step draws at some places."""
    return _number(seed, step, places)


def forks_at(seed: int, at: object, site: str, call: int, index: int, places: Places) -> int:
    """Return the number from which a module's call draws at some places; `at`: a step's
    microbatch."""
    return _number(seed, at, site, call, index, places)


def _number(*what: object) -> int:
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class Frame:
    """A call of a module, and how many of its draws were made."""

    site: str
    draws: tuple[Fork | None, ...]
    index: int = -1

    def next(self) -> Fork | None:
        """Return the places of the next draw; None: they are the step's."""
        self.index += 1
        return self.draws[self.index % len(self.draws)]


class _Here(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame | None] = []


class _Own(Ambient):
    """Forks the draws of the innermost framed call, one by one."""

    compiles = True

    def __init__(self, native: NativeDropout) -> None:
        super().__init__()
        self.native = native

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = self.native.frame
        if frame is None or not masks(func, args, kwargs):
            return self.run(func, types, args, kwargs)
        fork = frame.next()
        with self.native.framed(None):  # this mode may be on twice, for a module in another
            if fork is None:
                return func(*args, **kwargs)
            with self.native.forked(frame.site, fork, frame.index):
                return func(*args, **kwargs)


# -- around modules ------------------------------------------------------------------------------


def install(
    module: nn.Module, native: NativeDropout, forks: Mapping[str, Forked], plain: Sequence[str]
) -> None:
    """Let modules of a built model draw under forks; `plain` draw none themselves, inside others
    that do."""
    for name, forked in forks.items():
        wrap(module.get_submodule(name), "draws", ForkedDropout(native, forked))
    for name in plain:
        wrap(module.get_submodule(name), "draws", ForkedDropout(native, Forked(name, (), False)))


class ForkedDropout:
    """The layer around the forward of a module that draws under forks."""

    def __init__(self, native: NativeDropout, forked: Forked) -> None:
        self.native, self.forked = native, forked
        self.fork = forked.draws[0] if forked.whole else None  # of all its draws
        assert not forked.whole or self.fork is not None, forked

    def __call__(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `inner`, whose draws are those of its places."""
        native, forked, fork = self.native, self.forked, self.fork
        if not native.on:
            return inner(*args, **kwargs)
        if fork is None:
            frame = Frame(forked.site, forked.draws) if forked.draws else None
            with native.framed(frame):
                return inner(*args, **kwargs)
        noted = native.noting is not None  # a proof asks for every draw
        if policies.replayed and not noted and _changes_nothing(inner, args, kwargs):
            scope.next_call(f"{forked.site}{_CALLS}")
            return args[0].detach()
        with native.framed(None), native.forked(forked.site, fork):
            return inner(*args, **kwargs)


def _changes_nothing(inner: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a plain dropout is given what stands for a tensor of an earlier stage: one NaN
    everywhere, which is no other under any mask.  A device would have to be waited for."""
    if kwargs or len(args) != 1 or getattr(inner, "func", None) is not nn.Dropout.forward:
        return False
    (x,) = args
    alike = type(x) is Tensor and on_host(x) and x.numel() > 1 and not any(x.stride())
    return alike and x.is_floating_point() and math.isnan(x.as_strided((), ()).item())


# -- what a proof notes --------------------------------------------------------------------------

Content = tuple[int, tuple[int, ...], str, int, object]  # step, samples, site, call, window


@dataclass
class Noted:
    """The draws of a rank: what each is of, by places in the whole model, and how it began."""

    begun: dict[Content, set[float]] = field(default_factory=dict)
    shapes: dict[tuple[int, str, int], set[int]] = field(default_factory=dict)


class Noting(Ambient):
    """Runs beside a step that draws natively, and notes each draw as logical masks count them.

    `logical`, whose masks they stand for, says which part of a mask is drawn, and for which
    samples: what two ranks draw of one part has to be one, and all else has to be apart.
    """

    def __init__(self, native: NativeDropout, logical: LogicalDropout) -> None:
        super().__init__()
        self.native, self.logical, self.noted = native, logical, Noted()
        self._inside = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note draws for the time of a block; those of shared attentions tell themselves."""
        from schedlang.runtime.modes import ambient

        self.native.noting = self
        try:
            with ambient(self):
                yield
        finally:
            self.native.noting = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if scope.current() is None or self._inside or not masks(func, args, kwargs):
            return self.run(func, types, args, kwargs)
        for place, shape in enumerate(shapes_of(func, args, kwargs)):
            self.note(shape, place)
        self._inside = True  # in a recomputation this mode is on twice
        try:
            return func(*args, **kwargs)
        finally:
            self._inside = False

    def note(self, shape: Sequence[int], place: int = 0) -> None:
        """A draw of this shape, the how manyth of a call; it begins where the generators stand."""
        where, site = scope.current(), scope.site()
        assert where is not None
        call = scope.next_call(site)
        samples, each = self.logical.samples(site, call), tuple(shape)
        if samples == where.samples:
            count = len(samples)
            each = each[1:] if each[0] == count else (each[0] // count, *each[1:])
        slices = self.logical.slices
        window = slices(site, call, each) if slices is not None else None
        held = None if window is None else (window.shape, tuple(map(_listed, window.index)))
        content = (where.step, samples, site, call, held)
        self.noted.begun.setdefault(content, set()).add(place + self._number())
        seen = self.noted.shapes.setdefault((where.step, site, call), set())
        seen.update(samples)

    def _number(self) -> float:
        """The number that would be drawn next; nothing is drawn."""
        source: Any = self.native.generators[-1]
        with torch._C.DisableTorchFunction():
            twin = torch.Generator(source.device)
            twin.set_state(source.get_state())
            return float(torch.rand((), generator=twin, dtype=torch.float64, device=source.device))


def _listed(index: Any) -> Any:
    if isinstance(index, Tensor):
        return tuple(index.tolist())
    return None if index is None else tuple(index)
