"""All functions of torch between a column and a row split: refused, or equal on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.propagate.propagate import propagate
from schedlang.runtime.propagation import shard_trials
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

ROWS = "a  shard(col, over=tp)\nb  shard(row, over=tp)"
BATCH = {"x": torch.randn(4, 3, 8, dtype=torch.float64)}
Call = Callable[[Tensor], Tensor]

# which dim is sharded while a function runs: how to get there, and back
DIM_ORDERS: dict[str, tuple[Call, Call]] = {
    "last": (lambda h: h, lambda y: y),
    "middle": (lambda h: h.transpose(1, 2), lambda y: y.transpose(1, 2)),
    "first": (lambda h: h.transpose(0, 2), lambda y: y.transpose(0, 2)),
    "heads": (
        lambda h: h.unflatten(-1, (-1, 4)).transpose(1, 2),
        lambda y: y.transpose(1, 2).flatten(2),
    ),
}
# values to try for arguments without default; functions with other types are left out
VALUES: dict[str, tuple[Any, ...]] = {
    "int": (1, 2, -1),
    "SymInt": (1, 2, -1),
    "float": (0.5,),
    "number": (0.5, 2),
    "Scalar": (0.5, 2),
    "bool": (True, False),
    "List[int]": ([1], [2, 2], [-1], [0, 1]),
    "Optional[int]": (None, 1),
}
# their results are random, or uninitialized
DRAWN = ("rand", "empty", "bernoulli", "multinomial", "dropout", "rrelu", "poisson", "normal_")
DRAWN = (*DRAWN, "exponential", "cauchy", "geometric", "log_normal", "uniform", "random", "new_")
# internal functions that do not check their arguments, and others that do not return
LEFT_OUT = ("native_", "mkldnn", "cudnn", "miopen", "to_", "_", "data", "set", "resize", "sparse")
LEFT_OUT = (*LEFT_OUT, "share_memory", "pin_memory", "is_", "q_", "int_repr", "record_stream")
NO_NUMBERS = (
    "dtype",
    "layout",
    "memory_format",
)  # integers, but other values crash torch


class Between(nn.Module):
    """Two projections, and a function of torch between them."""

    def __init__(self, call: Call, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call, self.a, self.b = call, nn.Linear(8, 16), nn.Linear(width, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the output."""
        output: Tensor = self.b(self.call(self.a(x))).square().mean()
        return output


def _calls(packet: Any) -> Iterator[tuple[str, Call]]:
    """Yield calls of a function with one float tensor and plain values, each with its text."""
    for name in packet.overloads():
        needed = [a for a in getattr(packet, name)._schema.arguments if not a.has_default_value()]
        kinds = [str(a.type) for a in needed]
        choices = [VALUES.get(kind, ()) for kind in kinds[1:]]
        unusable = any(a.kwarg_only or a.name in NO_NUMBERS for a in needed)
        if kinds[:1] == ["Tensor"] and not unusable and all(choices):
            for values in product(*choices):
                yield f"{name}{values}", lambda h, values=values: _first_tensor(packet(h, *values))


def _first_tensor(results: Any) -> Tensor:
    """The first float tensor among results."""
    candidates = results if isinstance(results, (tuple, list)) else [results]
    return next(
        result for result in candidates if isinstance(result, Tensor) and result.is_floating_point()
    )


def _reordered(call: Call, dim_order: str) -> Call:
    reorder, restore = DIM_ORDERS[dim_order]
    return lambda h: restore(call(reorder(h)))


def _parts_agree(call: Call) -> bool | None:
    """Whether shards of a tensor give shards of the result; None if the function fails on it."""
    h = torch.rand(4, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    try:
        full = call(h.clone())
        usable = full.dim() == 3 and full.layout == torch.strided and full.is_floating_point()
    except Exception:  # whatever torch raises
        return None
    if not usable or full.dtype != h.dtype or not full.numel():
        return None
    try:
        parts = torch.cat([call(part.clone()) for part in h.chunk(2, -1)], -1)
    except Exception:
        return False
    return parts.shape == full.shape and torch.allclose(parts, full, equal_nan=True)


def _accepted(call: Call) -> bool:
    h = call(torch.rand(4, 3, 16, dtype=torch.float64))
    try:
        propagate(make_plan(Between(call, h.shape[-1]), ROWS, "tp=2"), BATCH)
    except Refusal:
        return False
    return True


def _functions() -> list[str]:
    names = [name for name in dir(torch.ops.aten) if not name.startswith(LEFT_OUT)]
    return [name for name in names if not any(fragment in name for fragment in DRAWN)]


def _wrongly_accepted(name: str, dim_orders: tuple[str, ...], limit: int) -> list[str]:
    """Calls of a function that are accepted although they differ on shards."""
    packet = getattr(torch.ops.aten, name)
    if not hasattr(packet, "overloads"):
        return []
    wrong_calls: list[str] = []
    for (call_text, call), dim_order in product(list(_calls(packet))[:limit], dim_orders):
        placed = _reordered(call, dim_order)
        if _parts_agree(placed) is False and _accepted(placed):
            wrong_calls.append(f"{name}.{call_text} {dim_order}")
    return wrong_calls


PORTIONS = 12


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_no_function_mixes_parts_unseen(portion: int) -> None:
    """All functions of one float tensor and plain values that differ on shards of the last dim
    are refused."""
    wrong_calls = [
        call
        for name in _functions()[portion::PORTIONS]
        for call in _wrongly_accepted(name, ("last",), 4)
    ]
    assert not wrong_calls


@pytest.mark.deep
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_no_function_mixes_parts_in_any_dim(portion: int) -> None:
    """The same for shards of other dims and of heads, with more values."""
    names = _functions()[portion::PORTIONS]
    assert not [call for name in names for call in _wrongly_accepted(name, tuple(DIM_ORDERS), 27)]


def _zeroed_column(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., 0] = 0.0
    return h


def _masked_rows(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = 0.0
    return h


def _image(h: Tensor) -> Tensor:
    """Windows over dims 1 and 2 of channels, heights and widths, without a dim of rows."""
    return torch.nn.functional.avg_pool2d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2)


def _interleaved(h: Tensor) -> Tensor:
    return h.flatten().repeat_interleave(2).view(4, 3, 32)


@pytest.mark.parametrize(
    "call, legal",
    [
        (_zeroed_column, False),
        (_masked_rows, True),
        (_image, False),
        (lambda h: h.narrow(-1, 0, 8).contiguous(), False),
        (lambda h: h.repeat_interleave(2).view(4, 3, 32), False),
        (lambda h: h.repeat_interleave(2, -1), True),
        (lambda h: torch.renorm(h, 2, 2, 1.0), True),
        (lambda h: torch.renorm(h, 2, 0, 1.0), False),
        (lambda h: h.view(4, 3, 8, 2).diagonal(0, -2, -1).contiguous(), False),
        (lambda h: torch.cdist(h.mT, h.mT)[..., :3].mT, False),
        (lambda h: h.index_fill(-1, torch.tensor([0], device=h.device), 0.0), False),
        (lambda h: h.index_fill(1, torch.tensor([0], device=h.device), 0.0), True),
        (lambda h: torch.special.entr(h.sigmoid()), True),
        (lambda h: torch.hstack([h.mT, h.mT]).mT, False),
    ],
)
def test_calls_without_a_rule(threads: Threads, call: Call, legal: bool) -> None:
    """Calls that depend on positions in the split dim are refused; the others are proven."""
    with torch.device("cpu"):
        width = call(torch.rand(4, 3, 16, dtype=torch.float64)).shape[-1]
    model = Between(call, width)
    plan = make_plan(model, ROWS, "tp=2")
    if legal:
        assert_proven(threads, plan, [BATCH])
        return
    with pytest.raises(Refusal) as refusal:
        propagate(plan, BATCH)
    assert refusal.value.diagnostic.code == "S405"


def test_large_tensors_are_tried_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials with large tensors shorten dims that the call does not name; results do not change."""
    tried_shapes: list[tuple[int, ...]] = []
    original = shard_trials._Trial._numbers

    def noted(self: Any, shapes: Any, number: int) -> list[Tensor]:
        tried_shapes.extend(shapes)
        return original(self, shapes, number)

    monkeypatch.setattr(shard_trials._Trial, "_numbers", noted)
    batch = {"x": torch.zeros(1000, 100, 8, dtype=torch.float64)}
    for call in (torch.special.i0, torch.fliplr):
        propagate(make_plan(Between(call, 16), ROWS, "tp=2"), batch)
    with pytest.raises(Refusal, match="computes along"):
        propagate(make_plan(Between(lambda h: h.cummax(-1)[0], 16), ROWS, "tp=2"), batch)
    assert tried_shapes and all(
        torch.Size(shape).numel() < shard_trials.MANY_ELEMENTS for shape in tried_shapes
    )
