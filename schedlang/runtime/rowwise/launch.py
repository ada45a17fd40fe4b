"""A chain made runnable: its Triton text compiled, launched, or computed by torch in its place."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx

from schedlang.kernels.device import count, matrix, programs, runs_kernel, tile, triton
from schedlang.runtime.rowwise.chain import Chain, From
from schedlang.runtime.rowwise.lower import lowered
from schedlang.runtime.rowwise.source import source

LONGEST = 8192  # elements of a row that one program holds at a time
_BLOCK = 2048  # of a longer row

Launch = Callable[["Kernel", list[Any], "Shape"], None]


@dataclass(frozen=True)
class Shape:
    """How a kernel is started: its grid and its constants."""

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
    reference: fx.GraphModule = field(repr=False)
    tail: fx.GraphModule | None = field(repr=False)

    @property
    def name(self) -> str:
        """What the text is known by."""
        return f"rowwise_{sha256(self.text.encode()).hexdigest()[:12]}"

    @cached_property
    def order(self) -> tuple[From, ...]:
        """Where what it gives comes from; each once."""
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
        """Whether a row is read block by block."""
        return self.chain.grid.size > LONGEST


def kernel(graph: fx.Graph, rounding: str, results: int = 0) -> Kernel:
    """The kernel of an ATen graph; raises NotRowwise.

    The first `results` outputs are tensors of their own, whatever else they are.
    """
    chain = lowered(graph, results)
    text = source(chain, rounding, looped=chain.grid.size > LONGEST)
    tail = fx.GraphModule({}, chain.tail) if chain.tail is not None else None
    return Kernel(graph, chain, rounding, text, fx.GraphModule({}, graph), tail)


def number(made: Kernel, output: From) -> int:
    """The place of an output among all that `run` gives."""
    return made.order.index(output)


def run(made: Kernel, given: Sequence[Tensor]) -> list[Tensor]:
    """All outputs of a kernel for what its graph takes."""
    used = [given[v.place] for v in made.chain.given]
    wide = any(t.dtype == torch.float64 for t in given)
    grid = torch.empty(made.chain.grid.shape, device="meta")
    fits = runs_kernel(next((t for t in used if t.numel()), grid), longest=None)
    if _launchers or (fits and not wide):
        count(True)
        return _launched(made, given, used)
    count(False)
    return _referred(made, given)


def _referred(made: Kernel, given: Sequence[Tensor]) -> list[Tensor]:
    """By torch, operator by operator; each output a tensor of its own, as the operator promises."""
    known = dict(zip(made.chain.outputs, made.reference(*given), strict=True))
    taken = {t.untyped_storage().data_ptr() for t in given}
    found = []
    for output in made.order:
        tensor = known[output].contiguous()
        if tensor.untyped_storage().data_ptr() in taken:
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        found.append(tensor)
    return found


def shape_of(made: Kernel, like: Tensor) -> Shape:
    """How many programs take how many tiles of rows."""
    grid = made.chain.grid
    if made.looped:
        rows, block, warps = 1, _BLOCK, 8
    else:
        rows, block, warps = tile(grid.size)
    tiles = -(-grid.rows // rows)
    parts = min(tiles, programs(like)) if made.chain.sums else tiles
    return Shape(parts, -(-tiles // parts), rows, block, warps)


def _launched(made: Kernel, given: Sequence[Tensor], used: Sequence[Tensor]) -> list[Tensor]:
    """Launch the kernel; the sums of its programs are added, and the tail follows."""
    chain, like = made.chain, used[0]
    shape = shape_of(made, like)
    loaded = [
        matrix(t) if v.rows and v.cols else t.reshape(-1).contiguous()
        for v, t in zip(chain.given, used, strict=True)
    ]
    stored = [torch.empty(s.shape, dtype=s.dtype, device=like.device) for s in chain.stored]
    begin = torch.zeros if made.looped else torch.empty
    sums = [
        begin((shape.programs, chain.grid.size if s.value.cols else 1), dtype=torch.float32,
              device=like.device)
        for s in chain.sums
    ]  # fmt: skip
    strides = [t.stride(0) for v, t in zip(chain.given, loaded, strict=True) if v.rows and v.cols]
    numbers = [chain.grid.rows, chain.grid.size, *strides, shape.tiles]
    launch = _launchers[-1] if _launchers else launched_here
    launch(made, [*loaded, *stored, *sums, *numbers], shape)
    late: Sequence[Tensor] = ()
    if made.tail is not None:
        totals = [
            t.sum(0).to(s.dtype).reshape(s.shape) for s, t in zip(chain.sums, sums, strict=True)
        ]
        late = made.tail(*totals, *(given[place] for place in chain.wanted))
    return [
        stored[o.place] if o.where == "stored" else late[o.place].contiguous() for o in made.order
    ]


def launched_here(made: Kernel, arguments: list[Any], shape: Shape) -> None:
    """Launch a kernel in this process."""
    jitted(made.text)[(shape.programs,)](
        *arguments, ROWS=shape.rows, BLOCK=shape.block, num_warps=shape.warps,
        enable_fp_fusion=made.rounding != "eager",
    )  # fmt: skip


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
