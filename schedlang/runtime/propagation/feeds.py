"""Labels through a forward: what each projection reads, and which numbers of a batch name rows.

* What every projection reads: the residual stream, or outputs of other projections.
* Whole numbers in a batch that stand for its rows: edges of a graph, pairs of samples. Such a
  batch cannot be cut by rows: a part would name rows that lie in others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.runtime.batch import forward
from schedlang.runtime.kept_outside import kept_outside
from schedlang.runtime.propagation.trace import Lattice, Running, Stack, Trace
from schedlang.runtime.tracing.meta import meta_model, model_line, tensors_in, without_values

STREAM = ""  # what flows from block to block, embeddings and the batch among it
MIXED = "@"  # tokens were mixed on the way, as in attention
PARTS = {"split", "chunk", "tensor_split", "split_with_sizes", "__getitem__", "narrow"}
VIEWS = {"view", "reshape", "unflatten"}
MATRIX = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__", "addbmm"}
WHOLE = "_schedlang_output"


@dataclass
class Use:
    """One projection as it was called: what made its inputs, and when it was called first."""

    order: int
    reads: frozenset[str]
    calls: int = 1


@dataclass
class Fed:
    """Every projection that was called, by name.

    `parts` are the sizes of what was taken out of the last dim of a projection's output, `heads`
    the size of the last dim where a view adds one to it; `packed` the first of the sizes where a
    view adds two: how many lie side by side (q, k and v), or how many heads.  `read` is the line of
    the model that first uses a projection's output.
    """

    uses: dict[str, Use] = field(default_factory=dict)
    parts: dict[str, list[int]] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)

    def used(self, tensors: Iterable[Tensor]) -> None:
        """Note where the outputs among some tensors are used, that were not before."""
        for tensor in tensors:
            fqn = tensor.__dict__.get(WHOLE)
            if fqn is not None and fqn not in self.read:
                self.read[fqn] = model_line()


class _Feeding(Lattice):
    """The sources of each tensor: outputs of projections, the stream, tokens that were mixed."""

    mark: str = "_schedlang_feeds"
    nothing: frozenset[str] = frozenset()

    def __init__(self, fed: Fed) -> None:
        self.fed, self.muted = fed, 0

    def after(self, call: Running) -> None:
        """Hand on what the inputs carry."""
        if self.muted:
            return
        self.fed.used(call.inputs)
        given = [self.of(tensor) for tensor in call.inputs]
        made = self.nothing.union(*given)
        if not made:
            return
        if call.name in PARTS:
            self._parted(call.args[0], call.outputs)
        elif call.name in VIEWS:
            self._viewed(call.args[0], call.out)
        both = call.name in MATRIX and sum(bool(one) for one in given) > 1
        if both or call.func is F.scaled_dot_product_attention:
            made |= {MIXED}
        written = tensors_in(call.args[:1]) if call.name == "__setitem__" else []
        for tensor in (*call.outputs, *written):
            self.put(tensor, made)

    def _parted(self, source: Any, made: list[Tensor]) -> None:
        """Note the sizes of parts of a projection's output, in the order of their making."""
        fqn = source.__dict__.get(WHOLE) if isinstance(source, Tensor) else None
        if fqn is None or self.fed.uses[fqn].calls > 1:
            return
        sizes = [part.shape[-1] for part in made if part.ndim == source.ndim]
        if all(size < source.shape[-1] for size in sizes):
            self.fed.parts.setdefault(fqn, []).extend(sizes)

    def _viewed(self, source: Any, made: Tensor) -> None:
        """Note the size of heads where a view takes the last dim of an output apart."""
        fqn = source.__dict__.get(WHOLE) if isinstance(source, Tensor) else None
        if fqn is None:
            return
        if made.shape[:-2] == source.shape[:-1]:
            self.fed.heads[fqn] = made.shape[-1]
        elif made.shape[:-3] == source.shape[:-1]:
            self.fed.packed[fqn] = made.shape[-3]

    def leaf(self, fqn: str, inner: Callable[..., Any], own: frozenset[str]) -> Callable[..., Any]:
        """The forward of a projection, whose output is made of `own` alone."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = tensors_in((args, kwargs))
            given = self.nothing.union(*(self.of(t) for t in inputs))
            self.fed.used(inputs)
            known = self.fed.uses.get(fqn)
            if known is None:
                self.fed.uses[fqn] = Use(len(self.fed.uses), given)
            else:
                known.reads, known.calls = known.reads | given, known.calls + 1
            self.muted += 1
            try:
                out = inner(*args, **kwargs)
            finally:
                self.muted -= 1
            for tensor in tensors_in(out):
                self.put(tensor, own)
                tensor.__dict__[WHOLE] = fqn
            return out

        return forward

    def block(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a block: what it is given is the stream."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            floats = (t for t in tensors_in((args, kwargs)) if t.is_floating_point())
            main = next(floats, None)
            if main is not None:
                self.put(main, frozenset([STREAM]))
            return inner(*args, **kwargs)

        return forward


def feeds(
    model: nn.Module,
    batch: Mapping[str, Any],
    leaves: Callable[[str], bool],
    blocks: Callable[[str], bool],
    outside: Callable[[str], bool],
) -> Fed:
    """Follow one forward of a throwaway model on the meta device.

    `leaves` are the projections and tables to be told apart; what enters one of `blocks` is the
    stream, and so is what the leaves `outside` make (embeddings of tokens).
    """
    fed = Fed()
    feeding = _Feeding(fed)
    for fqn, module in model.named_modules():
        if leaves(fqn):
            own = frozenset([STREAM]) if outside(fqn) else frozenset([fqn])
            module.forward = feeding.leaf(fqn, module.forward, own)
        elif blocks(fqn):
            module.forward = feeding.block(module.forward)
    model.train()
    with kept_outside(model), torch.no_grad(), without_values(batch) as (inputs, _):
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point():
                feeding.put(tensor, frozenset([STREAM]))
        with Trace(Stack(), feeding, asked=True):
            forward(model, inputs, None)
    return fed


INDEXED = {
    *("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add"),
    *("index_add_", "scatter_reduce", "scatter_reduce_", "take_along_dim", "__getitem__"),
}


@dataclass(frozen=True)
class Named:
    """A tensor of the batch that names rows, and where that shows.

    call, line  what of torch finds none of them, and the model's line that calls it
    size        how many rows it finds
    """

    key: str
    call: str
    line: str
    largest: int
    size: int


class _Naming(Lattice):
    """The suspect that each tensor is made of, and its largest number; `found`: a dim is too
    short."""

    mark = "_schedlang_names"

    def __init__(self) -> None:
        self.found: Named | None = None

    def before(self, call: Running) -> None:
        """Look at what a suspect indexes."""
        known = next(filter(None, map(self.of, call.inputs)), None)
        source = call.inputs[0] if call.inputs else None
        if self.found or known is None or source is None or call.name not in INDEXED:
            return
        if self.of(source):  # it is looked up itself
            return
        key, largest = known
        dim = call.argument(1, "dim", 0)
        if call.name == "__getitem__":
            index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
            dim = next((k for k, i in enumerate(index) if isinstance(i, Tensor)), 0)
            if any(not isinstance(i, (Tensor, slice)) for i in index):
                return
        dim = dim if isinstance(dim, int) else 0
        if source.ndim and largest >= source.shape[dim]:
            self.found = Named(key, call.name, model_line(), largest, source.shape[dim])

    def after(self, call: Running) -> None:
        """Mark integers made of a suspect as one."""
        known = next(filter(None, map(self.of, call.inputs)), None)
        for tensor in call.outputs if known is not None else ():
            if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                self.put(tensor, known)


def names_rows(
    model: nn.Module, part: Mapping[str, Any], suspects: Mapping[str, Tensor]
) -> Named | None:
    """Find what of a part of a batch names rows that the part does not have.

    `suspects` are its tensors of whole numbers that were not cut, by name.
    """
    bare, naming = meta_model(model, {}).train(), _Naming()
    by_value = {id(value): key for key, value in suspects.items()}
    try:
        with kept_outside(model), torch.no_grad(), without_values(part) as (inputs, _):
            for whole, meta in zip(tensors_in(dict(part)), tensors_in(inputs)):
                if id(whole) in by_value:
                    naming.put(meta, (by_value[id(whole)], int(whole.max())))
            with Trace(Stack(), naming, asked=True):
                forward(bare, inputs, None)
    except Exception:  # what else is wrong is told where the model is followed in earnest
        pass
    return naming.found
