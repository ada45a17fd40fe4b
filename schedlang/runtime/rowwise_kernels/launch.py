"""Run a chain: compile its Triton source and launch it, or evaluate the chain by torch.

Run as a module, this file reads launches from standard input and writes back the tensors that they
wrote: whether triton interprets is fixed at its import, for the whole process.
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

from schedlang.kernels.kernel_device import (
    DEVICE_TYPE,
    INTERPRETED,
    as_rows,
    can_run_kernel,
    count_kernel_run,
    environment,
    program_count,
    tile,
    triton,
)
from schedlang.runtime.rowwise_kernels.chain import (
    ChainValue,
    OutputSource,
    RowwiseChain,
    StoredResult,
    triton_source,
)
from schedlang.runtime.rowwise_kernels.lowering import lower_graph

# -- a chain computed by torch ---------------------------------------------------------------------
# This replaces a kernel where none can run, and proofs compare it in float64: then the roles of
# rows and columns, the order of reductions and the sums are proven; the kernel's own check covers
# its source.


NARROW = (torch.bfloat16, torch.float16)
# functions that an expression may call
_NAMES = (
    *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "floor", "ceil"),
    "where",
)


def evaluate_chain(
    chain: RowwiseChain, inputs: Sequence[Tensor], rounding: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the kernel would store, and the sums over rows; `inputs` are the chain's
    inputs."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in inputs) else torch.float32
    run = _Run(chain, dict(zip(chain.inputs, inputs, strict=True)), rounding, dtype)
    return [run.whole(item) for item in chain.stored], [run.summed(item) for item in chain.sums]


class _Torch:
    """Triton's functions, computed by torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.float32 = dtype
        for name in _NAMES:
            setattr(self, name, getattr(torch, name))


@dataclass
class _Run:
    chain: RowwiseChain
    given: dict[ChainValue, Tensor]
    rounding: str
    wide: torch.dtype
    known: dict[ChainValue, Tensor] = field(default_factory=dict)

    def whole(self, result: StoredResult) -> Tensor:
        """Return a result as it is stored."""
        grid, value = self.chain.grid, result.value
        shape = (grid.rows if value.rows else 1, grid.size if value.cols else 1)
        values = self.of(value).broadcast_to(shape).to(result.dtype).reshape(result.shape)
        return values.clone(memory_format=torch.contiguous_format)

    def summed(self, result: StoredResult) -> Tensor:
        """Return a sum over all rows, in its dtype in the model."""
        (value,) = result.value.operands
        grid = self.chain.grid
        values = self.of(value).broadcast_to(grid.rows, grid.size if result.value.cols else 1)
        return values.sum(0).to(result.dtype).reshape(result.shape)

    def of(self, value: ChainValue) -> Tensor:
        """Return a value as [rows, columns]; each is computed once."""
        if value not in self.known:
            computed = self._made(value)
            if value.dtype in NARROW and self.rounding == "eager" and value.kind != "given":
                computed = computed.to(value.dtype).to(self.wide)
            self.known[value] = computed
        return self.known[value]

    def _made(self, value: ChainValue) -> Tensor:
        if value.kind == "given":
            tensor = self.given[value].reshape(-1 if value.rows else 1, self._size(value))
            return tensor if tensor.dtype is torch.bool else tensor.to(self.wide)
        operands = [self.of(operand) for operand in value.operands]
        if value.kind == "row":
            (rows,) = operands
            rows = rows.broadcast_to(rows.shape[0], self.chain.grid.size)
            reduce: Any = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[value.text]
            reduced: Tensor = reduce(rows, 1, keepdim=True)
            return reduced
        return self._expression(value, operands)

    def _size(self, value: ChainValue) -> int:
        return self.chain.grid.size if value.cols else 1

    def _expression(self, value: ChainValue, operands: Sequence[Tensor]) -> Tensor:
        names = [operand.name for operand in value.operands]
        space = {
            "tl": _Torch(self.wide),
            "tanh": torch.tanh,
            "log1p": torch.log1p,
            "expm1": torch.expm1,
            **dict(zip(names, operands)),
        }
        result = eval(value.text.format(*names), space)
        if not isinstance(result, Tensor):
            reference = self.given[self.chain.inputs[0]]
            result = torch.full((1, 1), float(result), dtype=self.wide, device=reference.device)
        return result if result.dtype is torch.bool else result.to(self.wide)


# -- kernels ---------------------------------------------------------------------------------------


MAX_ROW = 8192  # elements of a row that one program can hold
_BLOCK = 2048  # elements of a block of a longer row

LaunchFunction = Callable[["RowwiseKernel", list[Any], "LaunchShape"], None]


@dataclass(frozen=True)
class LaunchShape:
    """The grid and the constants of a launch."""

    programs: int
    tiles: int
    rows: int
    block: int
    warps: int


@dataclass(frozen=True, eq=False)
class RowwiseKernel:
    """A graph, its chain and its source.

    Its outputs are in the order in which the graph first names them.
    """

    graph: fx.Graph = field(repr=False)
    chain: RowwiseChain = field(repr=False)
    rounding: str
    text: str
    tail: fx.GraphModule | None = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the source, by its hash."""
        return f"rowwise_{sha256(self.text.encode()).hexdigest()[:12]}"

    @cached_property
    def output_order(self) -> tuple[OutputSource, ...]:
        """The sources of its outputs, each once."""
        computed = (o for o in self.chain.outputs if o.where in ("stored", "tail"))
        return tuple(dict.fromkeys(computed))

    @cached_property
    def shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of its outputs."""
        (nodes,) = next(iter(reversed(self.graph.nodes))).args
        by_source = dict(zip(reversed(self.chain.outputs), reversed(nodes), strict=True))
        tensors = [by_source[output].meta["val"] for output in self.output_order]
        return tuple((tuple(int(n) for n in t.shape), t.dtype) for t in tensors)

    @property
    def looped(self) -> bool:
        """Whether a row is read block by block."""
        return self.chain.grid.size > MAX_ROW


def make_kernel(graph: fx.Graph, rounding: str, results: int = 0) -> RowwiseKernel:
    """Return the kernel of an ATen graph; raises NotRowwise.

    The first `results` outputs are separate tensors, even if they are equal to others.
    """
    chain = lower_graph(graph, results)
    text = triton_source(chain, rounding, looped=chain.grid.size > MAX_ROW)
    tail = fx.GraphModule({}, chain.tail) if chain.tail is not None else None
    return RowwiseKernel(graph, chain, rounding, text, tail)


def output_index(kernel: RowwiseKernel, output: OutputSource) -> int:
    """Return the index of an output among the tensors that `run` returns."""
    return kernel.output_order.index(output)


def run_kernel(kernel: RowwiseKernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a kernel on the inputs of its graph; return all outputs."""
    used = [inputs[v.place] for v in kernel.chain.inputs]
    is_float64 = any(t.dtype == torch.float64 for t in inputs)
    grid = torch.empty(kernel.chain.grid.shape, device="meta")
    fits = can_run_kernel(next((t for t in used if t.numel()), grid), longest=None)
    launches = not is_float64 and (bool(_launchers) or fits)
    count_kernel_run(launches)
    if launches:
        stored, sums = _launch(kernel, used)
    else:
        stored, sums = evaluate_chain(kernel.chain, used, kernel.rounding)
    late: Sequence[Tensor] = ()
    if kernel.tail is not None:
        late = kernel.tail(*sums, *(inputs[index] for index in kernel.chain.tail_inputs))
    return [
        stored[o.place] if o.where == "stored" else late[o.place].clone()
        for o in kernel.output_order
    ]


def launch_shape(kernel: RowwiseKernel, reference: Tensor) -> LaunchShape:
    """Return the launch shape of a kernel: programs, tiles of rows per program, and block."""
    grid = kernel.chain.grid
    if kernel.looped:
        rows, block, warps = 1, _BLOCK, 8
    else:
        rows, block, warps = tile(grid.size)
    tiles = -(-grid.rows // rows)
    parts = min(tiles, program_count(reference)) if kernel.chain.sums else tiles
    return LaunchShape(parts, -(-tiles // parts), rows, block, warps)


def _launch(kernel: RowwiseKernel, used: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Launch a kernel; return what it stores, and its sums over rows, added over programs."""
    chain, reference = kernel.chain, used[0]
    shape = launch_shape(kernel, reference)
    loaded = [
        as_rows(t) if v.rows and v.cols else t.reshape(-1).contiguous()
        for v, t in zip(chain.inputs, used, strict=True)
    ]
    stored = [torch.empty(s.shape, dtype=s.dtype, device=reference.device) for s in chain.stored]
    begin = torch.zeros if kernel.looped else torch.empty
    sums = [
        begin(
            (shape.programs, chain.grid.size if s.value.cols else 1),
            dtype=torch.float32,
            device=reference.device,
        )
        for s in chain.sums
    ]
    strides = [t.stride(0) for v, t in zip(chain.inputs, loaded, strict=True) if v.rows and v.cols]
    numbers = [chain.grid.rows, chain.grid.size, *strides, shape.tiles]
    launch = _launchers[-1] if _launchers else launch_here
    launch(kernel, [*loaded, *stored, *sums, *numbers], shape)
    totals = [t.sum(0).to(s.dtype).reshape(s.shape) for s, t in zip(chain.sums, sums, strict=True)]
    return stored, totals


def launch_here(kernel: RowwiseKernel, arguments: list[Any], shape: LaunchShape) -> None:
    """Launch a kernel in this process."""
    compile_source(kernel.text)[(shape.programs,)](
        *arguments,
        ROWS=shape.rows,
        BLOCK=shape.block,
        num_warps=shape.warps,
        enable_fp_fusion=kernel.rounding != "eager",
    )


_jitted: dict[str, Any] = {}
_launchers: list[LaunchFunction] = []


@contextmanager
def launch_by(launch: LaunchFunction) -> Iterator[None]:
    """Launch kernels by another function within the block: in a process with the interpreter."""
    _launchers.append(launch)
    try:
        yield
    finally:
        _launchers.pop()


def compile_source(text: str) -> Any:
    """Compile a kernel's source, cached; linecache gets the source, for triton and tracebacks."""
    assert triton is not None
    if text not in _jitted:
        name = f"<rowwise {sha256(text.encode()).hexdigest()[:12]}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": __name__}
        exec(compile(text, name, "exec"), space)
        _jitted[text] = space["kernel"]
    return _jitted[text]


# -- a process with Triton's interpreter, which launches the kernels of this process
# ----------------


@contextmanager
def run_for_device(device: str) -> Iterator[str]:
    """Run kernels, within the block, for tensors of a device; yield how they run.

    Yields "triton", "interpreter" or "reference".
    """
    with ExitStack() as stack:
        if device == DEVICE_TYPE:
            yield "triton"
        elif triton is None:
            yield "reference"
        else:
            if not INTERPRETED:
                child = stack.enter_context(_interpreter_process())
                stack.enter_context(launch_by(_RemoteLauncher(child).launch))
            yield "interpreter"


@contextmanager
def _interpreter_process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "schedlang.runtime.rowwise_kernels.launch"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(True)
    )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()  # the child ends when its input ends
        child.wait()


@dataclass(frozen=True)
class _RemoteLauncher:
    """Launches kernels in another process."""

    child: subprocess.Popen[bytes]

    def launch(self, kernel: RowwiseKernel, arguments: list[Any], shape: LaunchShape) -> None:
        """Send the arguments; copy the returned tensors into them."""
        assert self.child.stdin is not None and self.child.stdout is not None
        fusion = kernel.rounding != "eager"
        task = {
            "text": kernel.text,
            "arguments": arguments,
            "programs": shape.programs,
            "rows": shape.rows,
            "block": shape.block,
            "fusion": fusion,
        }
        _send(self.child.stdin, task)
        returned = _receive(self.child.stdout)
        if returned is None:
            raise RuntimeError(
                "the process with triton's interpreter has ended; its words are above"
            )
        for own_value, new_value in zip(arguments, returned, strict=True):
            if isinstance(own_value, Tensor):
                own_value.copy_(new_value)


def _send(pipe: IO[bytes], value: Any) -> None:
    packed = io.BytesIO()
    torch.save(value, packed)
    pipe.write(struct.pack("<q", packed.tell()) + packed.getvalue())
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """Return the next value; None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    return torch.load(io.BytesIO(pipe.read(struct.unpack("<q", head)[0])))


def main() -> None:
    """Launch kernels until the input ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with the answers
    while (task := _receive(sys.stdin.buffer)) is not None:
        compile_source(task["text"])[(task["programs"],)](
            *task["arguments"],
            ROWS=task["rows"],
            BLOCK=task["block"],
            num_warps=4,
            enable_fp_fusion=task["fusion"],
        )
        _send(output, task["arguments"])


if __name__ == "__main__":
    main()
