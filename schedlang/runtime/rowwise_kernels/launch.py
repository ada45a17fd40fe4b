"""A chain made runnable: its Triton text compiled, launched, or computed by torch in its place.

Run as a module this file reads launches from standard input and writes back the tensors that they
wrote: whether triton interprets is settled when it is imported, for the whole process.
"""

from __future__ import annotations

import io
import linecache
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import IO, Any

import torch
from torch import Tensor, fx

from schedlang.kernels.device import (
    INTERPRETED,
    KIND,
    count,
    environment,
    matrix,
    programs,
    runs_kernel,
    tile,
    triton,
)
from schedlang.runtime.rowwise_kernels.chain import Chain, From, Stored, Value, source
from schedlang.runtime.rowwise_kernels.lower import lowered

# -- a chain computed by torch ---------------------------------------------------------------------
# It stands in for a kernel where none can run, and in float64 it is what a proof compares: then
# the roles of rows and columns, the order of reductions and the sums are proven, and what is left
# to the kernel's own check is its text.


NARROW = (torch.bfloat16, torch.float16)
# what an expression may call
_NAMES = (
    *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "floor", "ceil"),
    "where",
)


def evaluated(
    chain: Chain, given: Sequence[Tensor], rounding: str
) -> tuple[list[Tensor], list[Tensor]]:
    """(what the kernel stores, the sums over rows); `given` is what the chain loads."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32
    run = _Run(chain, dict(zip(chain.given, given, strict=True)), rounding, wide)
    return [run.whole(one) for one in chain.stored], [run.summed(one) for one in chain.sums]


class _Torch:
    """Triton's functions, by torch."""

    def __init__(self, wide: torch.dtype) -> None:
        self.float32 = wide
        for name in _NAMES:
            setattr(self, name, getattr(torch, name))


@dataclass
class _Run:
    chain: Chain
    given: dict[Value, Tensor]
    rounding: str
    wide: torch.dtype
    known: dict[Value, Tensor] = field(default_factory=dict)

    def whole(self, one: Stored) -> Tensor:
        """A result as it is stored."""
        grid, value = self.chain.grid, one.value
        shape = (grid.rows if value.rows else 1, grid.size if value.cols else 1)
        made = self.of(value).broadcast_to(shape).to(one.dtype).reshape(one.shape)
        return made.clone(memory_format=torch.contiguous_format)

    def summed(self, one: Stored) -> Tensor:
        """A sum over all rows, in the type that the model has it in."""
        (value,) = one.value.operands
        grid = self.chain.grid
        each = self.of(value).broadcast_to(grid.rows, grid.size if one.value.cols else 1)
        return each.sum(0).to(one.dtype).reshape(one.shape)

    def of(self, value: Value) -> Tensor:
        """A value, as rows of columns; each is computed once."""
        if value not in self.known:
            made = self._made(value)
            if value.dtype in NARROW and self.rounding == "eager" and value.how != "given":
                made = made.to(value.dtype).to(self.wide)
            self.known[value] = made
        return self.known[value]

    def _made(self, value: Value) -> Tensor:
        if value.how == "given":
            found = self.given[value].reshape(-1 if value.rows else 1, self._size(value))
            return found if found.dtype is torch.bool else found.to(self.wide)
        operands = [self.of(one) for one in value.operands]
        if value.how == "row":
            (each,) = operands
            each = each.broadcast_to(each.shape[0], self.chain.grid.size)
            reduce: Any = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[value.text]
            made: Tensor = reduce(each, 1, keepdim=True)
            return made
        return self._expression(value, operands)

    def _size(self, value: Value) -> int:
        return self.chain.grid.size if value.cols else 1

    def _expression(self, value: Value, operands: Sequence[Tensor]) -> Tensor:
        names = [one.name for one in value.operands]
        space = {
            "tl": _Torch(self.wide),
            "tanh": torch.tanh,
            "log1p": torch.log1p,
            "expm1": torch.expm1,
            **dict(zip(names, operands)),
        }
        made = eval(value.text.format(*names), space)
        if not isinstance(made, Tensor):
            like = self.given[self.chain.given[0]]
            made = torch.full((1, 1), float(made), dtype=self.wide, device=like.device)
        return made if made.dtype is torch.bool else made.to(self.wide)


# -- kernels ---------------------------------------------------------------------------------------


LONGEST = 8192  # elements of a row that one program holds at a time
_BLOCK = 2048  # of a longer row

Launch = Callable[["Kernel", list[Any], "Shape"], None]


@dataclass(frozen=True)
class Shape:
    """The grid and the constants of a launch."""

    programs: int
    tiles: int
    rows: int
    block: int
    warps: int


@dataclass(frozen=True, eq=False)
class Kernel:
    """A graph, its chain and its text.

    It gives its outputs in the order in which the graph names them first.
    """

    graph: fx.Graph = field(repr=False)
    chain: Chain = field(repr=False)
    rounding: str
    text: str
    tail: fx.GraphModule | None = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the text."""
        return f"rowwise_{sha256(self.text.encode()).hexdigest()[:12]}"

    @cached_property
    def order(self) -> tuple[From, ...]:
        """The sources of its outputs, each once."""
        made = (o for o in self.chain.outputs if o.where in ("stored", "tail"))
        return tuple(dict.fromkeys(made))

    @cached_property
    def shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and type of what it gives."""
        (nodes,) = next(iter(reversed(self.graph.nodes))).args
        known = dict(zip(reversed(self.chain.outputs), reversed(nodes), strict=True))
        tensors = [known[output].meta["val"] for output in self.order]
        return tuple((tuple(int(n) for n in t.shape), t.dtype) for t in tensors)

    @property
    def looped(self) -> bool:
        """True where a row is read block by block."""
        return self.chain.grid.size > LONGEST


def kernel(graph: fx.Graph, rounding: str, results: int = 0) -> Kernel:
    """The kernel of an ATen graph; raises NotRowwise.

    The first `results` outputs are tensors of their own, whatever else they are.
    """
    chain = lowered(graph, results)
    text = source(chain, rounding, looped=chain.grid.size > LONGEST)
    tail = fx.GraphModule({}, chain.tail) if chain.tail is not None else None
    return Kernel(graph, chain, rounding, text, tail)


def number(made: Kernel, output: From) -> int:
    """The place of an output among all that `run` gives."""
    return made.order.index(output)


def run(made: Kernel, given: Sequence[Tensor]) -> list[Tensor]:
    """All outputs of a kernel for what its graph takes."""
    used = [given[v.place] for v in made.chain.given]
    wide = any(t.dtype == torch.float64 for t in given)
    grid = torch.empty(made.chain.grid.shape, device="meta")
    fits = runs_kernel(next((t for t in used if t.numel()), grid), longest=None)
    launches = not wide and (bool(_launchers) or fits)
    count(launches)
    if launches:
        stored, sums = _launched(made, used)
    else:
        stored, sums = evaluated(made.chain, used, made.rounding)
    late: Sequence[Tensor] = ()
    if made.tail is not None:
        late = made.tail(*sums, *(given[place] for place in made.chain.wanted))
    return [stored[o.place] if o.where == "stored" else late[o.place].clone() for o in made.order]


def shape_of(made: Kernel, like: Tensor) -> Shape:
    """Return the grid of a kernel: programs, and tiles of rows for each."""
    grid = made.chain.grid
    if made.looped:
        rows, block, warps = 1, _BLOCK, 8
    else:
        rows, block, warps = tile(grid.size)
    tiles = -(-grid.rows // rows)
    parts = min(tiles, programs(like)) if made.chain.sums else tiles
    return Shape(parts, -(-tiles // parts), rows, block, warps)


def _launched(made: Kernel, used: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Launch a kernel; return what it stores, and its sums over rows added over programs."""
    chain, like = made.chain, used[0]
    shape = shape_of(made, like)
    loaded = [
        matrix(t) if v.rows and v.cols else t.reshape(-1).contiguous()
        for v, t in zip(chain.given, used, strict=True)
    ]
    stored = [torch.empty(s.shape, dtype=s.dtype, device=like.device) for s in chain.stored]
    begin = torch.zeros if made.looped else torch.empty
    sums = [
        begin(
            (shape.programs, chain.grid.size if s.value.cols else 1),
            dtype=torch.float32,
            device=like.device,
        )
        for s in chain.sums
    ]
    strides = [t.stride(0) for v, t in zip(chain.given, loaded, strict=True) if v.rows and v.cols]
    numbers = [chain.grid.rows, chain.grid.size, *strides, shape.tiles]
    launch = _launchers[-1] if _launchers else launched_here
    launch(made, [*loaded, *stored, *sums, *numbers], shape)
    totals = [t.sum(0).to(s.dtype).reshape(s.shape) for s, t in zip(chain.sums, sums, strict=True)]
    return stored, totals


def launched_here(made: Kernel, arguments: list[Any], shape: Shape) -> None:
    """Launch a kernel in this process."""
    jitted(made.text)[(shape.programs,)](
        *arguments,
        ROWS=shape.rows,
        BLOCK=shape.block,
        num_warps=shape.warps,
        enable_fp_fusion=made.rounding != "eager",
    )


_jitted: dict[str, Any] = {}
_launchers: list[Launch] = []


@contextmanager
def launching(launch: Launch) -> Iterator[None]:
    """Launch kernels by another function for a while: in a process that has the interpreter."""
    _launchers.append(launch)
    try:
        yield
    finally:
        _launchers.pop()


def jitted(text: str) -> Any:
    """The kernel of a text, which triton reads again: it is kept where tracebacks find it."""
    assert triton is not None
    if text not in _jitted:
        name = f"<rowwise {sha256(text.encode()).hexdigest()[:12]}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": __name__}
        exec(compile(text, name, "exec"), space)
        _jitted[text] = space["kernel"]
    return _jitted[text]


# -- a process that has Triton's interpreter, and launches in it the kernels of one that has not ---


@contextmanager
def interpreted(device: str) -> Iterator[str]:
    """Run kernels for tensors of a device; yield "triton", "interpreter" or "reference"."""
    with ExitStack() as stack:
        if device == KIND:
            yield "triton"
        elif triton is None:
            yield "reference"
        else:
            if not INTERPRETED:
                child = stack.enter_context(_process())
                stack.enter_context(launching(_Far(child).launch))
            yield "interpreter"


@contextmanager
def _process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "schedlang.runtime.rowwise_kernels.launch"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(True)
    )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()  # it ends where its input does
        child.wait()


@dataclass(frozen=True)
class _Far:
    """Launches in another process."""

    child: subprocess.Popen[bytes]

    def launch(self, made: Kernel, arguments: list[Any], shape: Shape) -> None:
        """Send the arguments; what comes back is put into them."""
        assert self.child.stdin is not None and self.child.stdout is not None
        fusion = made.rounding != "eager"
        task = {
            "text": made.text,
            "arguments": arguments,
            "programs": shape.programs,
            "rows": shape.rows,
            "block": shape.block,
            "fusion": fusion,
        }
        _send(self.child.stdin, task)
        back = _received(self.child.stdout)
        if back is None:
            raise RuntimeError(
                "the process with triton's interpreter has ended; its words are above"
            )
        for mine, theirs in zip(arguments, back, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(theirs)


def _send(pipe: IO[bytes], value: Any) -> None:
    packed = io.BytesIO()
    torch.save(value, packed)
    pipe.write(struct.pack("<q", packed.tell()) + packed.getvalue())
    pipe.flush()


def _received(pipe: IO[bytes]) -> Any:
    """The next value; None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    return torch.load(io.BytesIO(pipe.read(struct.unpack("<q", head)[0])))


def main() -> None:
    """Launch until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not meet the answers
    while (task := _received(sys.stdin.buffer)) is not None:
        jitted(task["text"])[(task["programs"],)](
            *task["arguments"],
            ROWS=task["rows"],
            BLOCK=task["block"],
            num_warps=4,
            enable_fp_fusion=task["fusion"],
        )
        _send(out, task["arguments"])


if __name__ == "__main__":
    main()
