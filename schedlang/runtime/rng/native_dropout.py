"""Native dropout: masks from torch's generators, equal on ranks that have the same tensor.

Each step seeds the generators from (seed, step, the rank's coordinates along the axes over which
every activation differs: rows, tokens, stages). So ranks with the same computation draw the same
numbers, and a resumed run continues without saved states. A tensor that is split over more axes
(heads, hidden, tokens of a sequence-parallel region) or over fewer is drawn under a fork: for the
time of a call the generators are seeded from (seed, step, microbatch, slice, module, call,
coordinates along the tensor's own axes). Megatron-LM (Shoeybi et al., 2019) keeps a second
generator state for this; a fork keeps none, so code that replays torch's generators replays it, and
a recomputed module forks to the same numbers.

No call of a step is intercepted, except in modules where some draws are forks and some are not.
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
from schedlang.runtime.device import RandomGenerator, on_host
from schedlang.runtime.forward import wrap
from schedlang.runtime.modes import AmbientMode, enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.rng.logical_functions import draws_logically, mask_shapes
from schedlang.runtime.storage.saved_tensors_slot import policies

_CALLS = "\0fork"  # appended to a module's name: the counter of its forks
AxisPlaces = tuple[tuple[str, int], ...]  # axis and coordinate


@dataclass(frozen=True)
class DrawFork:
    """The coordinates for a draw that differ from the step's own.

    whole_batch  one draw for all rows of a batch, in all microbatches
    """

    places: AxisPlaces
    whole_batch: bool = False


@dataclass(frozen=True)
class ForkedModule:
    """A module that draws under forks: the fork of each draw of one call, in order.

    A draw with None is no fork: it continues the step's own numbers. `around_call`: all draws of
    the module and of its submodules have one fork, which is entered around the call.
    """

    site: str
    draws: tuple[DrawFork | None, ...]
    around_call: bool


def _state_of(source: RandomGenerator) -> RandomGenerator | Tensor:
    """Return the state of a generator; for the host's default generator a clone of the generator.

    As a tensor that state has 5 kB, which would live as long as a step.
    """
    return source.clone_state() if source is torch.default_generator else source.get_state()


class NativeDropout:
    """Torch's own dropout on one of several ranks.

    places      this rank's coordinates along the axes over which all activations differ
    generators  the default generators: the CPU's, and the device's
    on          whether forks are made; off while a proof draws logically
    """

    def __init__(
        self, seed: int, places: AxisPlaces, generators: Sequence[RandomGenerator]
    ) -> None:
        self.seed, self.places, self.generators, self.on = seed, places, tuple(generators), True
        self.noting: DrawRecorder | None = None
        self._here = _Here()
        self._mode = _ForkDraws(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeDropout:
        """Return the same object: copies of a module draw from the same generators."""
        return self

    @contextmanager
    def enter_step(self, step: scope.Moment) -> Iterator[None]:
        """Seed the generators for a step within the block; restore their states afterwards."""
        states, on = [*map(_state_of, self.generators)], self.on
        self._seed(step_seed(self.seed, step, self.places))
        self.on = True
        try:
            yield
        finally:
            self.on = on
            self._restore(states)

    @contextmanager
    def enter_fork(self, site: str, fork: DrawFork, index: int = 0) -> Iterator[None]:
        """Seed the generators for a draw of a module's next call within the block."""
        call = scope.count_call(f"{site}{_CALLS}")
        current, part = scope.current(), scope.current_visit()
        # a user's loop: draw a number from the default generator, equal on all ranks
        if current is None:
            origin: Any = int(torch.randint(2**62, ()))
        elif fork.whole_batch:
            origin = current.moment
        else:
            # ranks differ in tokens by coordinates; slices of one rank by their number
            span = getattr(part, "span", None)
            origin = (current.moment, current.microbatch, current.samples[:1], span and span.index)
        states = [*map(_state_of, self.generators)]
        self._seed(fork_seed(self.seed, origin, site, call, index, fork.places))
        try:
            yield
        finally:
            self._restore(states)

    def draw_attention(self, draw: Any, shape: tuple[int, ...]) -> Any:
        """Call `draw`, which draws for attention weights that several ranks share."""
        frame = self.frame
        fork = frame.next() if frame is not None else None
        if frame is None or fork is None:
            return self._record(draw, shape)
        with self.enter_fork(frame.site, fork, frame.index):
            return self._record(draw, shape)

    def _record(self, draw: Any, shape: tuple[int, ...]) -> Any:
        if self.noting is not None:
            self.noting.record_draw(shape)
        return draw()

    def _seed(self, number: int) -> None:
        for generator in self.generators:
            generator.manual_seed(number)

    def _restore(self, states: Sequence[RandomGenerator | Tensor]) -> None:
        for generator, state in zip(self.generators, states):
            generator.set_state(state if isinstance(state, Tensor) else state.get_state())

    # -- modules in which some draws are forks and some are not
    # --------------------------------------

    @property
    def frame(self) -> DrawFrame | None:
        """The innermost call whose draws are forked one by one; None: there is none."""
        return self._here.frames[-1] if self._here.frames else None

    @contextmanager
    def enter_frame(self, frame: DrawFrame | None) -> Iterator[None]:
        """Enter a call of a module; `frame` None: all its draws are one stream already."""
        self._here.frames.append(frame)
        try:
            if frame is None:
                yield
            else:
                with self._mode:
                    yield
        finally:
            self._here.frames.pop()


def step_seed(seed: int, step: scope.Moment, places: AxisPlaces) -> int:
    """Return the seed of a step at some coordinates."""
    return _hash(seed, step, places)


def fork_seed(
    seed: int, origin: object, site: str, call: int, index: int, places: AxisPlaces
) -> int:
    """Return the seed of a module's call at some coordinates; `origin`: a step's microbatch."""
    return _hash(seed, origin, site, call, index, places)


def _hash(*coordinates: object) -> int:
    digest = hashlib.blake2b(repr(coordinates).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class DrawFrame:
    """A call of a module, and the number of its draws so far."""

    site: str
    draws: tuple[DrawFork | None, ...]
    index: int = -1

    def next(self) -> DrawFork | None:
        """Return the fork of the next draw; None: it is the step's own."""
        self.index += 1
        return self.draws[self.index % len(self.draws)]


class _Here(threading.local):
    def __init__(self) -> None:
        self.frames: list[DrawFrame | None] = []


class _ForkDraws(AmbientMode):
    """A mode that forks the draws of the innermost framed call, one by one."""

    compiles = True

    def __init__(self, native: NativeDropout) -> None:
        super().__init__()
        self.native = native

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = self.native.frame
        if frame is None or not draws_logically(func, args, kwargs):
            return self.run(func, types, args, kwargs)
        fork = frame.next()
        # this mode may be active twice, for a module inside another
        with self.native.enter_frame(None):
            if fork is None:
                return func(*args, **kwargs)
            with self.native.enter_fork(frame.site, fork, frame.index):
                return func(*args, **kwargs)


# -- around modules ------------------------------------------------------------------------------


def install_forks(
    module: nn.Module,
    native: NativeDropout,
    forks: Mapping[str, ForkedModule],
    unforked: Sequence[str],
) -> None:
    """Let modules of a built model draw under forks.

    `unforked` modules draw without forks, inside others that have forks.
    """
    for name, forked in forks.items():
        wrap(module.get_submodule(name), "draws", ForkedDropout(native, forked))
    for name in unforked:
        wrap(
            module.get_submodule(name),
            "draws",
            ForkedDropout(native, ForkedModule(name, (), False)),
        )


class ForkedDropout:
    """A layer around the forward of a module that draws under forks."""

    def __init__(self, native: NativeDropout, forked: ForkedModule) -> None:
        self.native, self.forked = native, forked
        self.fork = forked.draws[0] if forked.around_call else None  # of all its draws
        assert not forked.around_call or self.fork is not None, forked

    def __call__(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `inner` with forked draws."""
        native, forked, fork = self.native, self.forked, self.fork
        if not native.on:
            return inner(*args, **kwargs)
        if fork is None:
            frame = DrawFrame(forked.site, forked.draws) if forked.draws else None
            with native.enter_frame(frame):
                return inner(*args, **kwargs)
        noted = native.noting is not None  # a proof records every draw
        if policies.replayed and not noted and _is_nan_placeholder(inner, args, kwargs):
            scope.count_call(f"{forked.site}{_CALLS}")
            return args[0].detach()
        with native.enter_frame(None), native.enter_fork(forked.site, fork):
            return inner(*args, **kwargs)


def _is_nan_placeholder(inner: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a plain dropout gets the placeholder for a tensor of an earlier stage.

    The placeholder is NaN everywhere, which no mask changes. On a device this would need a host
    wait.
    """
    if kwargs or len(args) != 1 or getattr(inner, "func", None) is not nn.Dropout.forward:
        return False
    (x,) = args
    is_expanded = type(x) is Tensor and on_host(x) and x.numel() > 1 and not any(x.stride())
    return is_expanded and x.is_floating_point() and math.isnan(x.as_strided((), ()).item())


# -- draws that a proof records
# ---------------------------------------------------------------------

Content = tuple[int, tuple[int, ...], str, int, object]  # step, samples, site, call, window


@dataclass
class RecordedDraws:
    """The draws of a rank: the content of each, by positions in the full model, and its first
    number."""

    begun: dict[Content, set[float]] = field(default_factory=dict)
    shapes: dict[tuple[int, str, int], set[int]] = field(default_factory=dict)


class DrawRecorder(AmbientMode):
    """A mode that records each draw of a native step, counted as logical masks are.

    `logical` gives the part of a mask that is drawn, and its samples: two ranks that draw the same
    part must draw the same numbers, and all other draws must differ.
    """

    def __init__(self, native: NativeDropout, logical: LogicalDropout) -> None:
        super().__init__()
        self.native, self.logical, self.noted = native, logical, RecordedDraws()
        self._inside = False

    @contextmanager
    def record_draws(self) -> Iterator[None]:
        """Record draws within the block; shared attentions report theirs."""
        self.native.noting = self
        try:
            with enter_modes(self):
                yield
        finally:
            self.native.noting = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if scope.current() is None or self._inside or not draws_logically(func, args, kwargs):
            return self.run(func, types, args, kwargs)
        for index, shape in enumerate(mask_shapes(func, args, kwargs)):
            self.record_draw(shape, index)
        self._inside = True  # in a recomputation this mode is active twice
        try:
            return func(*args, **kwargs)
        finally:
            self._inside = False

    def record_draw(self, shape: Sequence[int], index: int = 0) -> None:
        """Record a draw of this shape, number `index` of a call, before it is made."""
        current, site = scope.current(), scope.current_site()
        assert current is not None
        call = scope.count_call(site)
        samples, dims = self.logical.samples(site, call), tuple(shape)
        if samples == current.samples:
            count = len(samples)
            dims = dims[1:] if dims[0] == count else (dims[0] // count, *dims[1:])
        slices = self.logical.slices
        window = slices(site, call, dims) if slices is not None else None
        window_key = None if window is None else (window.shape, tuple(map(_as_tuple, window.index)))
        content = (current.step, samples, site, call, window_key)
        self.noted.begun.setdefault(content, set()).add(index + self._next_number())
        seen_samples = self.noted.shapes.setdefault((current.step, site, call), set())
        seen_samples.update(samples)

    def _next_number(self) -> float:
        """Return the next random number, without drawing it."""
        source: Any = self.native.generators[-1]
        with torch._C.DisableTorchFunction():
            twin = torch.Generator(source.device)
            twin.set_state(source.get_state())
            return float(torch.rand((), generator=twin, dtype=torch.float64, device=source.device))


def _as_tuple(index: Any) -> Any:
    if isinstance(index, Tensor):
        return tuple(index.tolist())
    return None if index is None else tuple(index)
