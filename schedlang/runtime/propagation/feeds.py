"""What every projection of a model reads: the residual stream, or outputs of other projections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.runtime.batch import called
from schedlang.runtime.tracing.constants import on_meta
from schedlang.runtime.tracing.meta import hollow_batch
from schedlang.runtime.tracing.torch_calls import model_line, name_of, tensors_in

STREAM = ""  # what flows from block to block, embeddings and the batch among it
MIXED = "@"  # tokens were mixed on the way, as in attention
PARTS = {"split", "chunk", "tensor_split", "split_with_sizes", "__getitem__", "narrow"}
VIEWS = {"view", "reshape", "unflatten"}
MATRIX = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__", "addbmm"}
MARK, WHOLE = "_schedlang_feeds", "_schedlang_output"


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
    inputs = hollow_batch(dict(batch))
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point():
            _put(tensor, frozenset([STREAM]))
    mode = _Following(fed)
    for fqn, module in model.named_modules():
        if leaves(fqn):
            own = frozenset([STREAM]) if outside(fqn) else frozenset([fqn])
            module.forward = _leaf(fqn, module.forward, own, fed, mode)
        elif blocks(fqn):
            module.forward = _block(module.forward)
    model.train()
    with torch.device("meta"), torch.no_grad(), on_meta(dict(batch), inputs), mode:
        called(model, inputs)
    return fed


def _leaf(
    fqn: str, inner: Callable[..., Any], own: frozenset[str], fed: Fed, mode: _Following
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = frozenset().union(*(_of(t) for t in tensors_in((args, kwargs))))
        fed.used(tensors_in((args, kwargs)))
        known = fed.uses.get(fqn)
        if known is None:
            fed.uses[fqn] = Use(len(fed.uses), given)
        else:
            known.reads, known.calls = known.reads | given, known.calls + 1
        mode.muted += 1
        try:
            out = inner(*args, **kwargs)
        finally:
            mode.muted -= 1
        for tensor in tensors_in(out):
            _put(tensor, own)
            tensor.__dict__[WHOLE] = fqn
        return out

    return forward


def _block(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        floats = (t for t in tensors_in((args, kwargs)) if t.is_floating_point())
        main = next(floats, None)
        if main is not None:
            _put(main, frozenset([STREAM]))
        return inner(*args, **kwargs)

    return forward


class _Following(TorchFunctionMode):
    """Notes on every result what its inputs were made of."""

    muted = 0

    def __init__(self, fed: Fed) -> None:
        super().__init__()
        self.fed = fed

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call and hand on what its inputs carry."""
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        if self.muted:
            return out
        self.fed.used(tensors_in((args, kwargs)))
        given = [_of(tensor) for tensor in tensors_in((args, kwargs))]
        made = frozenset().union(*given)
        if not made:
            return out
        name = name_of(func)
        if name in PARTS:
            self._parted(args[0], tensors_in(out))
        elif name in VIEWS:
            self._viewed(args[0], out)
        both = name in MATRIX and sum(bool(one) for one in given) > 1
        if both or func is F.scaled_dot_product_attention:
            made |= {MIXED}
        written = args[:1] if name == "__setitem__" else ()
        for tensor in (*tensors_in(out), *tensors_in(written)):
            _put(tensor, made)
        return out

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


def _of(tensor: Tensor) -> frozenset[str]:
    found: frozenset[str] = tensor.__dict__.get(MARK, frozenset())
    return found


def _put(tensor: Tensor, made: frozenset[str]) -> None:
    tensor.__dict__[MARK] = made
