"""Monitor collectives that a program never waits for, and low dtypes that it uses.

The result of an asynchronous collective is valid only after its work was waited for. On a CPU a
step may read a valid result without waiting, so values do not show the mistake, and the works of
ranks are monitored. Functions of torch.distributed reach function modes like all others.

Some of gloo's collectives read tensors in the order of memory, whatever their strides are, which is
right only if all ranks have the same strides. Such calls are reported if something differs.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from schedlang.diagnostics.user_errors import OURS
from schedlang.ir.pytree import tree_map_only
from schedlang.report import Gap, Row

COLLECTIVES, WORK = "collectives", Work
_UNWAITED_NOTE = "nobody waits for it: what it gives may be read before it is there"
_TORCH_FOLDER = os.path.dirname(os.path.realpath(torch.__file__))
_DEPRECATED = "typing_extensions.py"  # wraps torch's deprecated functions
_DDP_FILES = {
    os.path.join(_TORCH_FOLDER, *path)
    for path in (("nn", "parallel", "distributed.py"), ("distributed", "algorithms", "join.py"))
}
_LOW_DTYPES = {torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
_CAST_METHODS = {Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
CASTS = {Tensor.to, Tensor.type, *_CAST_METHODS}
_STRIDE_BLIND = {dist.scatter, dist.broadcast, dist.reduce}  # under gloo: pytorch#192920
_REDUCERS = "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"  # of some versions
_REDUCTIONS = {getattr(dist, f) for f in (*_REDUCERS, "reduce_scatter_tensor") if hasattr(dist, f)}
_SENDERS = {  # gloo sends no floats of eight bits, but their bytes
    getattr(dist, name)
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "broadcast"),
        *("all_to_all_single", "gather", "scatter", "send", "recv", "isend", "irecv"),
    )
    if hasattr(dist, name)
}
_EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}
MONITORED = CASTS | _STRIDE_BLIND | _REDUCTIONS
STRIDES_HELP = (
    "gloo takes a tensor that is not contiguous in the order of memory (pytorch#192920): make it "
    "`.contiguous()`. The backward of `torch.distributed.nn.functional.all_gather` gives it such "
    "ones under gloo, and goes another way under NCCL: a gather of one's own does not"
)


class MonitoredWork:
    """A wrapped work; using any attribute counts as waiting."""

    def __init__(self, work: Any, waited: Callable[[], object]) -> None:
        self._work, self._waited = work, waited

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of a torch work."""
        return WORK

    def __getattr__(self, name: str) -> Any:
        self._waited()
        return getattr(self._work, name)


class CallMonitor:
    """Record of a rank's unwaited works, low dtypes, and calls with strided tensors.

    unwaited    function and line of each work that was not waited for
    keeps       whether results of reductions are kept now
    reductions  function, line and result of reductions in a low dtype
    """

    def __init__(self) -> None:
        self.unwaited: dict[int, tuple[str, str]] = {}  # work number -> function, line
        self._numbers = itertools.count()
        self.low_dtypes: set[str] = set()
        self.strided: set[tuple[str, str]] = set()  # function, calling line
        self.keeps = False
        self.reductions: list[tuple[str, str, Tensor]] = []

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a call."""
        dtype = kwargs.get("dtype") or _CAST_METHODS.get(func)
        if dtype is None and func in CASTS:
            dtype = next((arg for arg in args[1:] if isinstance(arg, torch.dtype)), None)
        if dtype in _LOW_DTYPES:
            self.low_dtypes.add(str(dtype).removeprefix("torch."))
        if func in _STRIDE_BLIND:
            values = [*args, *kwargs.values()]
            parts = [t for arg in values for t in (arg if isinstance(arg, list) else [arg])]
            if not all(t.is_contiguous() for t in parts if isinstance(t, Tensor)):
                self.strided.add((func.__name__, _user_line()))

    def keep(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Keep the result of a reduction in a low dtype: a copy, unless it is still to come."""
        if not self.keeps or func not in _REDUCTIONS:
            return
        result = kwargs.get("output", kwargs.get("tensor", args[0] if args else None))
        if isinstance(result, Tensor) and result.dtype in _LOW_DTYPES:
            result = result.detach() if type(out) is WORK else result.detach().clone()
            self.reductions.append((func.__name__, _user_line(), result))

    def monitor(self, func: Any, work: Any) -> Any:
        """Wrap a function's work; some need no wait.

        The tensor of a send is complete before. DDP's `join` sends notices, and gives some of them
        to the reducer, which accepts no wrapped work.
        """
        if func.__name__ == "isend" or any(file in _DDP_FILES for file, _ in _calls()):
            return work
        number = next(self._numbers)
        self.unwaited[number] = func.__name__, _user_line()
        return MonitoredWork(work, lambda: self.unwaited.pop(number, None))


def as_bytes(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replace floats of eight bits in the arguments of a call that sends them by their bytes."""
    if func not in _SENDERS:
        return args, kwargs

    def view(t: Tensor) -> Tensor:
        return t.view(torch.uint8) if t.dtype in _EIGHT_BITS else t

    mapped: tuple[Any, Any] = tree_map_only(Tensor, view, (args, kwargs))
    return mapped


def _calls() -> Iterator[tuple[str, int]]:
    """Yield the file and line of the current call's frames, the user's last."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        yield file, frame.f_lineno
        if not file.startswith((*OURS, _TORCH_FOLDER)) and not file.endswith(_DEPRECATED):
            return
        frame = frame.f_back


def _user_line() -> str:
    """Return the user's line of the current call."""
    *_, (file, line) = _calls()
    return f"{os.path.basename(file)}:{line}"


def unwaited_rows(unwaited: Mapping[tuple[str, str], list[int]]) -> Iterator[Row]:
    """Yield a failing row for each line whose works are not waited for."""
    for (name, line), ranks in unwaited.items():
        call = f"`{name}` ({line})"
        note = f"on rank {', '.join(map(str, ranks))} {_UNWAITED_NOTE}"
        yield Row("", COLLECTIVES, call, float("inf"), 0.0, False, None, note)


def low_dtype_gaps(low_dtypes: set[str]) -> Iterator[Gap]:
    """Yield a gap for each low dtype that float64 replaces."""
    for dtype in sorted(low_dtypes):
        text = f"{dtype} (float64 stands in for it: `--dtype {dtype}` judges it)"
        yield Gap(text, "roundings that add up, as of gradients that are added in few bits")
