"""Logical dropout: masks that depend on what is computed, not on the layout.

* `LogicalDropout`. A mask is a function of (seed, step, site, call, sample, position in the
  sample's logical tensor). It is computed at the positions that a rank has, by a counter-based
  hash, so every layout, microbatching and recomputation draws the same mask: a program with dropout
  can be compared with its original to the last digits.

The hash is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA
2014), with one stream per (seed, step, site, call, sample), and one number of the stream per
position.
* Draws of a model that runs outside of programs: by row, or constant.
* Draws of a model in evaluation: their layout is that of training, or they are refused.
* Observation of draws in a forward on the meta device, at torch's operators. Names of functions are
  not enough: attention, recurrent layers and samplers draw inside other functions. Every random
  operator counts, unless it runs inside a function that has a logical form.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunction

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime import scope
from schedlang.runtime.modes import (
    ATTRIBUTE_ACCESS,
    AmbientMode,
    CarryingMode,
    enter_modes,
    is_active,
)
from schedlang.runtime.rng.logical_functions import (
    LOGICAL,
    DrawSource,
    draws_illogically,
    is_drawing,
    may_draw,
)
from schedlang.runtime.tracing.model_lines import model_line

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BITS = 53  # bits of a float64's fraction


@dataclass(frozen=True)
class LogicalWindow:
    """The part of one sample's logical tensor that is on this rank.

    `shape` is the logical shape without the dim of samples; `index[d]` are the logical positions
    along dim d, None for all of them.
    """

    shape: tuple[int, ...]
    index: tuple[Sequence[int] | Tensor | None, ...]


def narrow_window(
    window: LogicalWindow | None,
    shape: Sequence[int],
    total: int,
    along: Sequence[Sequence[int] | Tensor | None],
) -> LogicalWindow:
    """Narrow a window: `along` has, for each dim, the selected positions of `total`, or None.

    `window` is the window of the shards in a sample's logical tensor; None: all of `shape`. The
    shards of a dim that is narrowed hold some of the selected positions.
    """
    full_shape = list(window.shape if window else shape)
    index = list(window.index if window else [None] * len(shape))
    for dim, positions in enumerate(along):
        if positions is not None:
            own_positions, full_shape[dim] = index[dim], total
            if own_positions is None:
                index[dim] = positions
            elif isinstance(positions, Tensor):
                index[dim] = positions[torch.as_tensor(own_positions)]
            else:
                index[dim] = [positions[int(k)] for k in own_positions]
    return LogicalWindow(tuple(full_shape), tuple(index))


_FEW, _SHAPES = 1 << 18, 16  # positions are cached for this number of elements and of shapes
RECORDED_NUMBERS = 8  # first numbers of a stream, enough to tell streams apart
StreamKey = tuple[scope.Moment, str, int, int]  # step, site, call, sample


class StreamStart(NamedTuple):
    """The start of a stream, the pass over the model that drew it, and whether one pass drew it
    twice."""

    numbers: tuple[int, ...]
    pass_of_rows: tuple[tuple[int, ...], int] | None  # samples, and number of the pass
    twice: bool


WindowOfDraw = Callable[[str, int, tuple[int, ...]], LogicalWindow | None]
# (site, call) of every draw of training -> whether it has no rows
UnbatchedDraws = Mapping[tuple[str, int], bool]

ALL_SAMPLES = -1  # stands for all samples of a batch if they share one mask


def is_unbatched(known: UnbatchedDraws, site: str, call: int) -> bool:
    """Return whether a draw has no dim of samples: all rows of a batch, on any rank, share its
    mask.

    Evaluation makes only some of the draws, so call numbers differ: there all draws of the site
    must be unbatched.
    """
    current = scope.current()
    if known and current is not None and current.evaluation:
        return all(known.get((site, call), False) for other, call in known if other == site)
    return known.get((site, call), False)


class LogicalDropout(CarryingMode):
    """Draw dropout logically; refuse other randomness, which other ranks cannot reproduce.

    slices     slices(site, call, shape) returns the window of a local tensor with this per-sample
               shape; None: all of it
    unbatched  which draws have no rows: their masks are one for all samples of a step
    drawn      the number of masks so far
    noted      a dict or None: (step, site, call) -> samples of every draw
    begun      a dict or None: stream -> its start
    Rows (dim 0) are the samples of the current scope; a tensor with a multiple of as many rows
    holds them sample by sample. Outside of any scope nothing is changed.
    """

    carried = True

    def __init__(
        self, seed: int, slices: WindowOfDraw | None = None, unbatched: UnbatchedDraws | None = None
    ) -> None:
        super().__init__()
        self.seed, self.slices, self.drawn = seed, slices, 0
        self.unbatched = unbatched or {}
        self.noted: dict[tuple[scope.Moment, str, int], set[int]] | None = None
        self.begun: dict[StreamKey, StreamStart] | None = None
        self._scaled: dict[Any, Tensor] = {}  # positions, cached for later steps

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is ATTRIBUTE_ACCESS:  # a third of all calls
            if func.__name__ == "__get__":  # no mode changes the value
                return func(*args)
            return self.call_beneath(func, types, args, kwargs)
        if may_draw(func, kwargs) and scope.current() is not None:
            if draws_illogically(func, args, kwargs):
                raise not_reproducible_refusal(function_text(func), scope.current_site())
            if func in LOGICAL:
                kwargs = dict(kwargs)
                if any(hasattr(x, "placements") for x in args):
                    raise _refusal(
                        f"`{function_text(func)}` in {site_text(scope.current_site())} is given a"
                        " DTensor"
                    )
                kwargs.pop("generator", None)
                with self.beneath():
                    return LOGICAL[func](self, func, *args, **kwargs)
        return self.run(func, types, args, kwargs)

    def enter_step(self, step: scope.Moment) -> AbstractContextManager[None]:
        """Return a context for a step that draws."""
        return enter_modes(self)

    def bits(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return integers of this shape, uniform in [0, 2**53), as the next call at the current
        site."""
        keys, per_sample, window, call = self._next_draw(shape)
        with DisableTorchFunction():  # integers: no mode changes them
            streams = torch.tensor(keys, device=device).reshape(-1, *[1] * len(per_sample))
            numbers = _mix(self._places(per_sample, window, device) + streams)
        if self.begun is not None:
            self._record_start(call, numbers.reshape(len(keys), -1)[:, :RECORDED_NUMBERS])
        return numbers.reshape(tuple(shape))

    def _places(
        self, local: tuple[int, ...], window: LogicalWindow | None, device: torch.device
    ) -> Tensor:
        """Return positions times the increment of a stream; cached if small, since they depend on
        shapes only."""
        index = () if window is None else window.index
        key: Any = None
        if math.prod(local) <= _FEW and not any(
            isinstance(positions, Tensor) for positions in index
        ):
            listed = (None if positions is None else tuple(positions) for positions in index)
            key = local, window and window.shape, *listed, device
        if key is None or (places := self._scaled.get(key)) is None:
            places = _positions(local, window, device, scope.current_site()).mul_(_signed(_GAMMA))
            if key is not None:
                if len(self._scaled) == _SHAPES:
                    self._scaled.clear()
                self._scaled[key] = places
        return places

    def streams(self, shape: Sequence[int]) -> tuple[Tensor, Sequence[int] | Tensor | None]:
        """Return the streams for a tensor of `shape` that is drawn in chunks: int64 [rows].

        This counts as the next call at the current site. The second result is the logical positions
        along dim 1, None: all; along later dims all positions are needed.
        """
        keys, per_sample, window, _ = self._next_draw(shape)
        if len(keys) != shape[0]:
            raise _refusal(
                f"dropout in `{scope.current_site()}` on {shape[0]} rows of {len(keys)} samples"
            )
        assert window is None or window.shape[1:] == per_sample[1:], (window, per_sample)
        return torch.tensor(keys), None if window is None else window.index[0]

    def _next_draw(
        self, shape: Sequence[int]
    ) -> tuple[list[int], tuple[int, ...], LogicalWindow | None, int]:
        """Count the next call at the current site; return a stream for each sample, and the
        window."""
        current = scope.current()
        assert current is not None, "logical numbers are drawn inside a scope"
        site = scope.current_site()
        call = scope.count_call(site)
        samples, per_sample = self.samples(site, call), tuple(shape)
        if samples != (ALL_SAMPLES,):
            per_sample = _per_sample(per_sample, len(samples), site)
        window = self.slices(site, call, per_sample) if self.slices else None
        self.drawn += 1
        if self.noted is not None:
            self.noted.setdefault((current.moment, site, call), set()).update(samples)
        keys = [stream_of(self.seed, current.moment, site, call, sample) for sample in samples]
        return keys, per_sample, window, call

    def samples(self, site: str, call: int) -> tuple[int, ...]:
        """Return the samples whose masks a call at a site draws: the scope's rows, or one for all
        rows."""
        current = scope.current()
        assert current is not None
        return (ALL_SAMPLES,) if is_unbatched(self.unbatched, site, call) else current.samples

    def _record_start(self, call: int, first: Tensor) -> None:
        """Record the first numbers of each sample in this call."""
        current, site, pass_index = scope.current(), scope.current_site(), scope.pass_number()
        assert current is not None and self.begun is not None
        # parts of a batch may share a mask
        origin = None if pass_index is None else (current.samples, pass_index)
        for sample, numbers in zip(self.samples(site, call), first.tolist(), strict=True):
            stream = current.moment, site, call, sample
            earlier = self.begun.get(stream)
            twice = earlier is not None and origin is not None and earlier.pass_of_rows == origin
            self.begun[stream] = StreamStart(
                tuple(numbers), origin, twice or bool(earlier and earlier.twice)
            )

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """Return a boolean mask of `shape`, true with probability 1 - p."""
        return torch.ge(self.bits(shape, device), round(p * 2**_BITS))

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return numbers of `shape` in [0, 1), with as many binary digits as `dtype` has."""
        digits = 1 - round(math.log2(torch.finfo(dtype).eps))
        bits: Tensor = self.bits(shape, device) >> (_BITS - digits)
        return torch.div(bits.to(dtype), 2**digits)


def _per_sample(shape: tuple[int, ...], samples: int, site: str) -> tuple[int, ...]:
    """Return the shape of one sample in a tensor that holds samples one after the other."""
    if not shape or shape[0] % samples:
        raise _refusal(
            f"{site_text(site)} draws {shape} at {_drawing_line()}: not rows of {samples} samples"
        )
    return shape[1:] if shape[0] == samples else (shape[0] // samples, *shape[1:])


def stream_of(*parts: object) -> int:
    """Return a stream as a signed 64-bit number, by a hash of words.

    For a mask the words are (seed, step, site, call, sample); saved tensors have their own.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _positions(
    local: tuple[int, ...], window: LogicalWindow | None, device: torch.device, site: str
) -> Tensor:
    """Return 1 + the index in the logical tensor of one sample, for each local element."""
    window = window or LogicalWindow(local, (None,) * len(local))
    sizes = tuple(
        size if index is None else len(index)
        for size, index in zip(window.shape, window.index, strict=True)
    )
    assert sizes == local, f"{site}: the window holds {sizes}, the tensor is {local}"
    total = torch.ones([1] * len(local), dtype=torch.int64, device=device)
    for dim, (size, index) in enumerate(zip(window.shape, window.index, strict=True)):
        places = (
            torch.arange(size, device=device)
            if index is None
            else torch.as_tensor(index, device=device)
        )
        stride = math.prod(window.shape[dim + 1 :])
        total = total + (places * stride).reshape(
            [-1 if d == dim else 1 for d in range(len(local))]
        )
    return total.unsqueeze(0)


def stream_numbers(positions: Tensor, streams: Tensor) -> Tensor:
    """Return the numbers of streams at positions from 1 on, uniform in [0, 2**53).

    `positions` are overwritten.
    """
    return _mix(positions.mul_(_signed(_GAMMA)) + streams)


def _mix(state: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64, which wraps like uint64; its highest 53
    bits."""
    for shift, factor in _MIX:  # in place: masks are large
        state.bitwise_xor_(_shift_unsigned(state, shift)).mul_(_signed(factor))
    return _shift_unsigned(state.bitwise_xor_(_shift_unsigned(state, 31)), 64 - _BITS)


def _shift_unsigned(state: Tensor, count: int) -> Tensor:
    shifted: Tensor = state >> count
    return shifted.bitwise_and_((1 << (64 - count)) - 1)  # without the sign


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def draws_weights() -> bool:
    """Return whether attention with dropped weights is computed by plain operators, with all
    weights."""
    return scope.current() is not None and is_active(LogicalDropout)


def not_reproducible_refusal(name: str, site: str, line: str = "") -> Refusal:
    """Return the refusal (S812) of a draw that cannot be reproduced under every layout."""
    line_text = f", at {line}," if line else ""
    return _refusal(f"`{name}` in {site_text(site)}{line_text} cannot be reproduced on other ranks")


def _refusal(message: str) -> Refusal:
    return Refusal.of(
        "S812",
        message,
        notes=("programs are compared with dropout masks that do not depend on the layout",),
        helps=("switch this randomness off in the model's configuration, and verify",),
    )


def function_text(func: Any) -> str:
    """Return the name of a torch function as a user writes it."""
    qualified = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))
    return qualified.replace("_VariableFunctionsClass.", "torch.")


def site_text(site: str) -> str:
    """Return the running module as text."""
    return f"`{site}`" if site else "the model's forward"


class SourceMode(AmbientMode):
    """A mode under which a model draws from a given source.

    It shares with the logical draws of programs only the form of each random function, so that
    errors there are not blamed on the model.
    """

    def __init__(self, draw: DrawSource) -> None:
        super().__init__()
        self.draw = draw

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in LOGICAL:
            kwargs.pop("generator", None)
            return LOGICAL[func](self.draw, func, *args, **kwargs)
        return self.run(func, types, args, kwargs)


class RowDraws:
    """A source with a torch generator for every call and row: a row draws the same in every
    part."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows, self.calls = tuple(rows), 0

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `DrawSource`; a tensor with more rows holds those of each sample side by side."""
        row_count, *other_dims = shape
        assert row_count % len(self.rows) == 0, f"{row_count} rows of {len(self.rows)} samples"
        sample_shape, self.calls = (row_count // len(self.rows), *other_dims), self.calls + 1
        samples = [
            torch.rand(
                sample_shape,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(self.calls * 2**32 + row),
            )
            for row in self.rows
        ]
        return torch.cat(samples).to(device, dtype)

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """See `DrawSource`."""
        return torch.ge(self.uniform(shape, torch.float64, device), p)


class ConstantDraws:
    """A source that drops nothing, and whose numbers are all 0.5."""

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `DrawSource`."""
        return torch.full(tuple(shape), 0.5, dtype=dtype, device=device)

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """See `DrawSource`."""
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)


class NoDropout(SourceMode):
    """A mode without dropout, also for DTensors, whose masks would be plain tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
            return func(*args, **kwargs)
        if func in LOGICAL and "dropout" in function_text(func):
            value = args[0] if args else kwargs["input"]
            result = value.clone(), torch.ones_like(value, dtype=torch.bool)
            return result if func is torch.native_dropout else value
        return super().__torch_function__(func, types, args, kwargs)


AxisTags = Mapping[str, Any]  # axis -> layout of a dim on it
MaskLayouts = Mapping[tuple[str, int], tuple[tuple[int, ...], AxisTags]]


def evaluation_layout(
    masks: MaskLayouts, site: str, dims: int, split: bool
) -> tuple[tuple[int, ...], AxisTags]:
    """Return shape and layout of a draw with `dims` dims per sample at a site in evaluation.

    `masks` are the draws of training. Evaluation makes only some of them, so call numbers differ:
    all draws of its site must have the same layout. `split`: the plan shards modules at all.
    """
    layouts = [
        (full_shape, tags)
        for (draw_site, _), (full_shape, tags) in masks.items()
        if draw_site == site and len(full_shape) in (dims, dims + 1)
    ]
    if layouts and all(tags == layouts[0][1] for _, tags in layouts):
        return layouts[0]
    if split:
        raise _evaluation_refusal(site, "draws there" if layouts else "does not draw so")
    return (), {}


class NoTrainingDraws(LogicalDropout):
    """Refuse every draw in evaluation, for a program that draws nothing in training."""

    def _next_draw(self, shape: Sequence[int]) -> Any:
        raise _evaluation_refusal(scope.current_site(), "does not draw")

    def bits(self, shape: Sequence[int], device: torch.device) -> Any:
        """Refuse the draw."""
        return self._next_draw(shape)


def _evaluation_refusal(site: str, trains: str) -> Refusal:
    """Return the refusal (S812) of a draw that only evaluation makes, with the model's line."""
    message = f"{site_text(site)} draws random numbers in evaluation ({_drawing_line()})"
    return Refusal.of(
        "S812",
        message,
        notes=(
            f"in training it {trains}: the layout of its random numbers is known from"
            f" training only",
        ),
        helps=(
            "draw there in training, too, or switch this randomness off in the model's"
            " configuration",
        ),
    )


def _drawing_line() -> str:
    """Return the line that draws: the innermost outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_SKIPPED):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_SKIPPED = ("schedlang", "torch.")


class DrawObserver(AmbientMode):
    """A mode that observes the draws of a forward; it enters the functions that LogicalDropout
    enters.

    random  some operator draws
    apart   draws without a logical form: function -> (running module, line of the model)
    """

    def __init__(self, site: Callable[[], str]) -> None:
        super().__init__()
        self.site, self.random = site, False
        self.apart: dict[str, tuple[str, str]] = {}
        self._inside = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        refused = draws_illogically(func, args, kwargs)
        if refused:
            self._note(function_text(func))
        if not refused and func not in LOGICAL:
            return self.run(func, types, args, kwargs)
        self._inside += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._inside -= 1

    def observe_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Observe a random operator that runs."""
        if not is_drawing(func, args, kwargs):
            return
        self.random = True
        if not self._inside:
            self._note(func._schema.name.replace("aten::", "torch."))

    def _note(self, drawing: str) -> None:
        self.random = True
        self.apart.setdefault(drawing, (self.site(), model_line()))
