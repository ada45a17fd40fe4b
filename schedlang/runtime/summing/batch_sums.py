"""Finds the sums over all rows of a batch that a loss is made of, but for that of its labels.

One forward on the meta device with a number of rows that divides no other size: a dim that holds
rows is a multiple of it.  A call that is given such a dim and gives none has summed over the batch.
Which of these sums reach the loss, and whether by linear calls alone, is followed call by call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.runtime import nests as pytree
from schedlang.runtime.following.pending import ADDS, LINEAR, PRODUCTS, TIMES
from schedlang.runtime.following.trace import Stack
from schedlang.runtime.given import called
from schedlang.runtime.parts import rows_of
from schedlang.runtime.recording.constants import on_meta
from schedlang.runtime.recording.meta import hollow_batch, hollow_model
from schedlang.runtime.recording.record import loss_of
from schedlang.runtime.recording.torch_calls import name_of, tensors_in

SUMS = {"sum", "nansum", "histc", "bincount", "scatter_add", "scatter_add_", "index_add",
        "index_add_", *(PRODUCTS - {"linear", "conv1d", "conv2d", "conv3d"})}  # fmt: skip
MEANS = {"mean"}
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167)


@dataclass(frozen=True)
class BatchSum:
    """A sum, or a mean, over all rows: in the forward of which module, and which of its calls.

    turn   how manyth call of that name by the module
    given  which of the tensors that it is given has the rows
    shape  of its result, whatever the rows are
    line   file and line of the model's own code that makes it
    """

    fqn: str
    name: str
    turn: int
    given: int
    shape: tuple[int, ...]
    line: str = field(default="", compare=False)

    @property
    def mean(self) -> bool:
        """Is it divided by the rows?"""
        return self.name in MEANS


@dataclass(frozen=True)
class Reaching:
    """What a loss is made of: sums over rows, each with whether only linear calls follow it.

    `labels` tells that it has a mean over labels as well.
    """

    sums: Mapping[BatchSum, bool]
    labels: bool


def batch_sums(
    model: nn.Module, batch: Mapping[str, Any], loss: Callable[..., Any] | None
) -> Reaching | None:
    """The sums over rows that the loss is made of; None if the model cannot be followed so."""
    sizes = {n for p in model.parameters() for n in p.shape}
    sizes |= {n for t in tensors_in(dict(batch)) for n in t.shape[1:]}
    rows = next((p for p in PRIMES if all(n % p for n in sizes)), None)
    if rows is None:
        return None
    many = _repeated(batch, rows)
    bare, stack = hollow_model(model, {}), Stack()
    bare.train()
    stack.watch(bare, lambda fqn: False)
    inputs = hollow_batch(many)
    try:
        with on_meta(many, inputs), _Following(stack, rows) as following, torch.device("meta"):
            output = called(bare, inputs)
            following.inside = False
            value = loss_of(output, inputs, loss)
    except Exception:  # the model's own code, with another number of rows: then nothing is known
        return None
    if value is None:
        return None
    found = following.of(value)
    sums = {at: linear for at, linear in found.items() if isinstance(at, BatchSum)}
    return Reaching(sums, LABELS in found)


def _repeated(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The batch with its rows again and again, until there are so many."""
    count = rows_of(batch)
    index = torch.arange(rows) % count

    def repeat(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
        return value[index.to(value.device)] if whole else value

    found: dict[str, Any] = pytree.tree_map(repeat, dict(batch))
    return found


def own_line() -> str:
    """File and line of the model's code that runs: the innermost outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


LABELS = "labels"  # stands for the mean over labels, which parts are weighed by
Mix = Mapping[Any, bool]  # sums that a tensor is made of -> whether by linear calls alone


class _Following(TorchFunctionMode):
    """Runs beside the forward; what a tensor is made of stands on the tensor itself."""

    def __init__(self, stack: Stack, rows: int) -> None:
        super().__init__()
        self.stack, self.rows = stack, rows
        self.turns: dict[tuple[str, str], int] = {}
        self.inside = True  # the model, not a loss that is given beside it

    @staticmethod
    def of(tensor: Tensor) -> Mix:
        """The sums that a tensor is made of."""
        found: Mix = tensor.__dict__.get("_schedlang_sums", {})
        return found

    def _rowed(self, tensor: Tensor) -> bool:
        return any(size and size % self.rows == 0 for size in tensor.shape)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__:
            return False  # as in every run without values
        given = tensors_in((args, kwargs))
        rowed = [place for place, tensor in enumerate(given) if self._rowed(tensor)]
        mixes = [self.of(tensor) for tensor in given]  # before it may be written into
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        if not outputs:
            return out
        name = name_of(func)
        mix = _mixed(name, given, mixes)
        if rowed and not any(map(self._rowed, outputs)):
            mix = {**mix, **self._summed(func, name, rowed[0], outputs[0])}
        else:
            self._turn(name)
        for tensor in outputs:
            gone = tensor.dtype == torch.bool or _counted(tensor, given)
            tensor.__dict__["_schedlang_sums"] = {} if gone else mix
        return out

    def _turn(self, name: str) -> int:
        at = self.stack.frames[-1][0], name
        self.turns[at] = self.turns.get(at, -1) + 1
        return self.turns[at]

    def _summed(self, func: Any, name: str, given: int, out: Tensor) -> Mix:
        turn = self._turn(name)
        if func in (F.cross_entropy, F.nll_loss):
            return {LABELS: True}
        if name not in SUMS | MEANS or not self.inside:
            return {}
        at = self.stack.frames[-1][0], name, turn, given, tuple(out.shape)
        return {BatchSum(*at, line=own_line()): True}


def _mixed(name: str, given: list[Tensor], mixes: list[Mix]) -> Mix:
    """What the result of a call is made of.

    Whole numbers count only where they are calculated with: elsewhere they choose.
    """
    plain = name in LINEAR or name in ADDS or name in TIMES
    known = [
        (place, mix) for place, (tensor, mix) in enumerate(zip(given, mixes))
        if mix and (plain or tensor.is_floating_point())
    ]  # fmt: skip
    linear = plain
    if name in TIMES or name in ("div", "__truediv__", "div_", "true_divide"):
        linear = len(known) == 1 and (name in TIMES or known[0][0] == 0)
    found: dict[Any, bool] = {}
    for _, mix in known:
        for at, so_far in mix.items():
            found[at] = found.get(at, True) and so_far and linear
    return found


def _counted(out: Tensor, given: list[Tensor]) -> bool:
    """Is it a whole number made of others: bounds of groups, an index?"""
    whole = not out.is_floating_point()
    return whole and any(tensor.is_floating_point() for tensor in given)
