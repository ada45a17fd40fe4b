"""Every function of torch between a column and a row split: refused, or equal on parts."""

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
from tests.proofs import planned, proven

ROWS = "a  shard(col, over=tp)\nb  shard(row, over=tp)"
BATCH = {"x": torch.randn(4, 3, 8, dtype=torch.float64)}
Call = Callable[[Tensor], Tensor]

# how the sharded width lies while a function runs, and back
LAID: dict[str, tuple[Call, Call]] = {
    "last": (lambda h: h, lambda y: y),
    "middle": (lambda h: h.transpose(1, 2), lambda y: y.transpose(1, 2)),
    "first": (lambda h: h.transpose(0, 2), lambda y: y.transpose(0, 2)),
    "heads": (
        lambda h: h.unflatten(-1, (-1, 4)).transpose(1, 2),
        lambda y: y.transpose(1, 2).flatten(2),
    ),
}
# what is tried of an argument that has no default; a function with another one is left out
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
# their results are drawn, or have no values
DRAWN = ("rand", "empty", "bernoulli", "multinomial", "dropout", "rrelu", "poisson", "normal_")
DRAWN = (*DRAWN, "exponential", "cauchy", "geometric", "log_normal", "uniform", "random", "new_")
# torch's own parts do not look at what they are given, and others do not return
LEFT_OUT = ("native_", "mkldnn", "cudnn", "miopen", "to_", "_", "data", "set", "resize", "sparse")
LEFT_OUT = (*LEFT_OUT, "share_memory", "pin_memory", "is_", "q_", "int_repr", "record_stream")
NO_NUMBERS = (
    "dtype",
    "layout",
    "memory_format",
)  # whole numbers all the same; of others torch dies


class Between(nn.Module):
    """Two projections, and a function of torch between them."""

    def __init__(self, call: Call, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call, self.a, self.b = call, nn.Linear(8, 16), nn.Linear(width, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what they give."""
        out: Tensor = self.b(self.call(self.a(x))).square().mean()
        return out


def _calls(packet: Any) -> Iterator[tuple[str, Call]]:
    """What a function of torch may be called with beside one tensor of floats, in words, and so."""
    for name in packet.overloads():
        needed = [a for a in getattr(packet, name)._schema.arguments if not a.has_default_value()]
        kinds = [str(a.type) for a in needed]
        rest = [VALUES.get(kind, ()) for kind in kinds[1:]]
        odd = any(a.kwarg_only or a.name in NO_NUMBERS for a in needed)
        if kinds[:1] == ["Tensor"] and not odd and all(rest):
            for given in product(*rest):
                yield f"{name}{given}", lambda h, given=given: _first(packet(h, *given))


def _first(out: Any) -> Tensor:
    """The first tensor of floats among results."""
    some = out if isinstance(out, (tuple, list)) else [out]
    return next(one for one in some if isinstance(one, Tensor) and one.is_floating_point())


def _laid(call: Call, lies: str) -> Call:
    before, after = LAID[lies]
    return lambda h: after(call(before(h)))


def _parts_agree(call: Call) -> bool | None:
    """Do parts of a tensor give the parts of the result?  None: the function does not take it."""
    h = torch.rand(4, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    try:
        whole = call(h.clone())
        usable = whole.dim() == 3 and whole.layout == torch.strided and whole.is_floating_point()
    except Exception:  # whatever torch raises
        return None
    if not usable or whole.dtype != h.dtype or not whole.numel():
        return None
    try:
        parts = torch.cat([call(part.clone()) for part in h.chunk(2, -1)], -1)
    except Exception:
        return False
    return parts.shape == whole.shape and torch.allclose(parts, whole, equal_nan=True)


def _accepted(call: Call) -> bool:
    h = call(torch.rand(4, 3, 16, dtype=torch.float64))
    try:
        propagate(planned(Between(call, h.shape[-1]), ROWS, "tp=2"), BATCH)
    except Refusal:
        return False
    return True


def _functions() -> list[str]:
    names = [name for name in dir(torch.ops.aten) if not name.startswith(LEFT_OUT)]
    return [name for name in names if not any(word in name for word in DRAWN)]


def _wrong(name: str, lies: tuple[str, ...], most: int) -> list[str]:
    """The calls of a function that are taken though parts give no parts."""
    packet = getattr(torch.ops.aten, name)
    if not hasattr(packet, "overloads"):
        return []
    found: list[str] = []
    for (said, call), how in product(list(_calls(packet))[:most], lies):
        placed = _laid(call, how)
        if _parts_agree(placed) is False and _accepted(placed):
            found.append(f"{name}.{said} {how}")
    return found


PORTIONS = 12


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_no_function_mixes_parts_unseen(portion: int) -> None:
    """Of all functions of torch that take one tensor of floats and plain values, those that would
    compute otherwise with parts of the last dim are refused."""
    wrong = [one for name in _functions()[portion::PORTIONS] for one in _wrong(name, ("last",), 4)]
    assert not wrong


@pytest.mark.deep
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_no_function_mixes_parts_in_any_dim(portion: int) -> None:
    """The same where parts are of rows, of channels, or of heads, with more values."""
    names = _functions()[portion::PORTIONS]
    assert not [one for name in names for one in _wrong(name, tuple(LAID), 27)]


def _written(h: Tensor) -> Tensor:
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


def _spread(h: Tensor) -> Tensor:
    return h.flatten().repeat_interleave(2).view(4, 3, 32)


@pytest.mark.parametrize(
    "call, legal",
    [
        (_written, False),
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
    """What reads or writes at a place of the split dim is refused; what does not is proven."""
    with torch.device("cpu"):
        width = call(torch.rand(4, 3, 16, dtype=torch.float64)).shape[-1]
    model = Between(call, width)
    plan = planned(model, ROWS, "tp=2")
    if legal:
        proven(threads, plan, [BATCH])
        return
    with pytest.raises(Refusal) as refusal:
        propagate(plan, BATCH)
    assert refusal.value.diagnostic.code == "S405"


def test_large_tensors_are_tried_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call on many rows the dims that it does not name are made short; the answer stays."""
    seen: list[tuple[int, ...]] = []
    plain = shard_trials._Trial._numbers

    def noted(self: Any, shapes: Any, turn: int) -> list[Tensor]:
        seen.extend(shapes)
        return plain(self, shapes, turn)

    monkeypatch.setattr(shard_trials._Trial, "_numbers", noted)
    batch = {"x": torch.zeros(1000, 100, 8, dtype=torch.float64)}
    for call in (torch.special.i0, torch.fliplr):
        propagate(planned(Between(call, 16), ROWS, "tp=2"), batch)
    with pytest.raises(Refusal, match="computes along"):
        propagate(planned(Between(lambda h: h.cummax(-1)[0], 16), ROWS, "tp=2"), batch)
    assert seen and all(torch.Size(shape).numel() < shard_trials.MANY_ELEMENTS for shape in seen)
