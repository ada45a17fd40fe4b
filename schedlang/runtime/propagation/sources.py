"""Sources of tensors in a forward: what each projection reads, which integers are row indices.

* `trace_sources` finds what every projection reads: the residual stream, or outputs of other
  projections.
* `find_row_indices` finds integers in a batch that are indices of its rows: edges of a graph,
  pairs of
  samples.  Such a batch cannot be split by rows: a chunk would refer to rows of other chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.runtime.batch import run_forward
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.propagation.trace import Lattice, ModuleStack, RunningCall, Trace
from schedlang.runtime.tracing.meta_runs import meta_model, tensors_in, without_values
from schedlang.runtime.tracing.model_lines import model_line

STREAM = ""  # source: the residual stream between blocks, embeddings and the batch included
MIXED = "@"  # source: tokens were mixed on the way, as in attention
PARTS = {"split", "chunk", "tensor_split", "split_with_sizes", "__getitem__", "narrow"}
VIEWS = {"view", "reshape", "unflatten"}
MATRIX = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__", "addbmm"}
OUTPUT_MARK = "_schedlang_output"


@dataclass
class ProjectionUse:
    """The calls of one projection: the sources of its inputs, and its place among projections."""

    order: int
    reads: frozenset[str]
    calls: int = 1


@dataclass
class ProjectionCalls:
    """The projections that were called, by name.

    piece_sizes    sizes of the pieces that are split off the last dim of the projection's output
    head_sizes     size of the last dim after a view that splits the output's last dim into two
    packed         first of the sizes after a view into three: concatenated outputs (q, k and v), or
                   heads
    reading_lines  line of the model that first uses the projection's output
    """

    uses: dict[str, ProjectionUse] = field(default_factory=dict)
    piece_sizes: dict[str, list[int]] = field(default_factory=dict)
    head_sizes: dict[str, int] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)
    reading_lines: dict[str, str] = field(default_factory=dict)

    def note_uses(self, tensors: Iterable[Tensor]) -> None:
        """Note the running line for each tensor that is a projection's output and is used first."""
        for tensor in tensors:
            fqn = tensor.__dict__.get(OUTPUT_MARK)
            if fqn is not None and fqn not in self.reading_lines:
                self.reading_lines[fqn] = model_line()


class _Feeding(Lattice):
    """Lattice of the sources of tensors: projections' outputs, the stream, mixed tokens."""

    mark: str = "_schedlang_feeds"
    nothing: frozenset[str] = frozenset()

    def __init__(self, fed: ProjectionCalls) -> None:
        self.fed, self.muted = fed, 0

    def after_call(self, call: RunningCall) -> None:
        """Join the sources of the inputs, and note views and splits of projections' outputs."""
        if self.muted:
            return
        self.fed.note_uses(call.inputs)
        input_sources = [self.of(tensor) for tensor in call.inputs]
        sources = self.nothing.union(*input_sources)
        if not sources:
            return
        if call.name in PARTS:
            self._note_pieces(call.args[0], call.outputs)
        elif call.name in VIEWS:
            self._note_heads(call.args[0], call.out)
        mixes = call.name in MATRIX and sum(bool(sources_set) for sources_set in input_sources) > 1
        if mixes or call.func is F.scaled_dot_product_attention:
            sources |= {MIXED}
        written = tensors_in(call.args[:1]) if call.name == "__setitem__" else []
        for tensor in (*call.outputs, *written):
            self.put(tensor, sources)

    def _note_pieces(self, source: Any, pieces: list[Tensor]) -> None:
        """Note the sizes of pieces of a projection's output, in the order of the calls."""
        fqn = source.__dict__.get(OUTPUT_MARK) if isinstance(source, Tensor) else None
        if fqn is None or self.fed.uses[fqn].calls > 1:
            return
        sizes = [part.shape[-1] for part in pieces if part.ndim == source.ndim]
        if all(size < source.shape[-1] for size in sizes):
            self.fed.piece_sizes.setdefault(fqn, []).extend(sizes)

    def _note_heads(self, source: Any, view: Tensor) -> None:
        """Note the size of heads where a view splits the last dim of a projection's output."""
        fqn = source.__dict__.get(OUTPUT_MARK) if isinstance(source, Tensor) else None
        if fqn is None:
            return
        if view.shape[:-2] == source.shape[:-1]:
            self.fed.head_sizes[fqn] = view.shape[-1]
        elif view.shape[:-3] == source.shape[:-1]:
            self.fed.packed[fqn] = view.shape[-3]

    def leaf(
        self, fqn: str, inner: Callable[..., Any], gives: frozenset[str]
    ) -> Callable[..., Any]:
        """Wrap the forward of a projection; `gives` are the sources of its output."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = tensors_in((args, kwargs))
            input_sources = self.nothing.union(*(self.of(t) for t in inputs))
            self.fed.note_uses(inputs)
            use = self.fed.uses.get(fqn)
            if use is None:
                self.fed.uses[fqn] = ProjectionUse(len(self.fed.uses), input_sources)
            else:
                use.reads, use.calls = use.reads | input_sources, use.calls + 1
            self.muted += 1
            try:
                output = inner(*args, **kwargs)
            finally:
                self.muted -= 1
            for tensor in tensors_in(output):
                self.put(tensor, gives)
                tensor.__dict__[OUTPUT_MARK] = fqn
            return output

        return forward

    def block(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a block: its first float argument is the stream."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            floats = (t for t in tensors_in((args, kwargs)) if t.is_floating_point())
            main = next(floats, None)
            if main is not None:
                self.put(main, frozenset([STREAM]))
            return inner(*args, **kwargs)

        return forward


def trace_sources(
    model: nn.Module,
    batch: Mapping[str, Any],
    leaves: Callable[[str], bool],
    blocks: Callable[[str], bool],
    outside: Callable[[str], bool],
) -> ProjectionCalls:
    """Follow one forward of a throwaway model on the meta device, and return its projections.

    The predicates take a module's name.  `leaves`: projections and tables, each a source of its
    own.  `blocks`: modules whose inputs are the stream.  `outside`: leaves whose outputs are the
    stream (embeddings of tokens).
    """
    fed = ProjectionCalls()
    feeding = _Feeding(fed)
    for fqn, module in model.named_modules():
        if leaves(fqn):
            output_sources = frozenset([STREAM]) if outside(fqn) else frozenset([fqn])
            module.forward = feeding.leaf(fqn, module.forward, output_sources)
        elif blocks(fqn):
            module.forward = feeding.block(module.forward)
    model.train()
    # with gradients: a forward may take one itself, as forces are
    with restore_global_state(model), torch.enable_grad(), without_values(batch) as (inputs, _):
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point():
                feeding.put(tensor, frozenset([STREAM]))
        with Trace(ModuleStack(), feeding, asked=True):
            run_forward(model, inputs, None)
    return fed


INDEXING = {
    *("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add"),
    *("index_add_", "scatter_reduce", "scatter_reduce_", "take_along_dim", "__getitem__"),
}


@dataclass(frozen=True)
class RowIndexInput:
    """A tensor of the batch with indices of rows, and the call that shows this.

    call, line  the function of torch whose index is out of range, and the model's line
    largest     the tensor's largest number
    size        the number of rows that the call can index
    """

    key: str
    call: str
    line: str
    largest: int
    size: int


class _Naming(Lattice):
    """Lattice of integer inputs: the input that a tensor is computed from, and its largest number.

    `found`: the first input that indexes a dim that is too short.
    """

    mark = "_schedlang_names"

    def __init__(self) -> None:
        self.found: RowIndexInput | None = None

    def before_call(self, call: RunningCall) -> None:
        """Compare the largest number of an index with the dim that is indexed."""
        named_input = next(filter(None, map(self.of, call.inputs)), None)
        source = call.inputs[0] if call.inputs else None
        if self.found or named_input is None or source is None or call.name not in INDEXING:
            return
        if self.of(source):  # the integer input is indexed, and no index
            return
        key, largest = named_input
        dim = call.argument(1, "dim", 0)
        if call.name == "__getitem__":
            index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
            dim = next((k for k, i in enumerate(index) if isinstance(i, Tensor)), 0)
            if any(not isinstance(i, (Tensor, slice)) for i in index):
                return
        dim = dim if isinstance(dim, int) else 0
        if source.ndim and largest >= source.shape[dim]:
            self.found = RowIndexInput(key, call.name, model_line(), largest, source.shape[dim])

    def after_call(self, call: RunningCall) -> None:
        """Hand the input on to integers that are computed from it."""
        named_input = next(filter(None, map(self.of, call.inputs)), None)
        for tensor in call.outputs if named_input is not None else ():
            if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                self.put(tensor, named_input)


def find_row_indices(
    model: nn.Module, part: Mapping[str, Any], suspects: Mapping[str, Tensor]
) -> RowIndexInput | None:
    """Find a tensor of a chunk of a batch that indexes rows which the chunk does not have.

    `suspects` are the chunk's integer tensors that were not split, by name.
    """
    bare, naming = meta_model(model, {}).train(), _Naming()
    by_value = {id(value): key for key, value in suspects.items()}
    try:
        with restore_global_state(model), torch.no_grad(), without_values(part) as (inputs, _):
            for tensor, meta in zip(tensors_in(dict(part)), tensors_in(inputs)):
                if id(tensor) in by_value:
                    naming.put(meta, (by_value[id(tensor)], int(tensor.max())))
            with Trace(ModuleStack(), naming, asked=True):
                run_forward(bare, inputs, None)
    except Exception:  # other errors are reported by the later run of the model
        pass
    return naming.found
