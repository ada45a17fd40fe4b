"""Tensors between the ranks of a pipeline: point to point, posted in one order, sized once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._C import DisableTorchFunction

from schedlang.runtime.comm import world
from schedlang.runtime.device import not_there, sent
from schedlang.runtime.storage.tiers import DEVICE, made_on

Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
DIMS = 8
HEADER = DIMS + 2  # per tensor: dtype, number of dims, sizes

# a header names a dtype by its place in this list, which is the same on every rank
CARRIED = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)
DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    """Dtype and shape of each tensor."""
    return tuple([(t.dtype, tuple(t.shape)) for t in tensors])


Arriving = tuple[list[torch.Tensor], list[Any]]  # a message, and what to wait for


@dataclass(eq=False)
class _Expected:
    """A message whose layout is not known yet, or that stands behind such a one."""

    source: int
    count: int
    layout: Callable[[], Layout | None]
    learn: Callable[[Layout], None]
    arriving: Arriving | None = None


class Mail:
    """Sends and receives of one rank with the other ranks of its pipeline.

    gloo and NCCL match messages between two ranks in the order in which they were posted, so a
    message is posted only after all earlier ones from the same rank. `down` carries what goes from
    a higher rank to a lower: NCCL runs the messages of a group and a pair of ranks one after the
    other, and one group for both directions could stop them for each other. What arrives is marked
    as lying on `tier`.  Function modes see none of it: it is no part of the model's arithmetic.
    """

    def __init__(
        self,
        group: world.ProcessGroup | None,
        down: world.ProcessGroup | None,
        device: torch.device,
        pairs: Iterable[tuple[int, int]] = (),
        tier: str = DEVICE,
    ) -> None:
        self.tier = tier
        self.group, self.down, self.device = group, down or group, device
        self.rank = world.here().rank
        # whether the backend runs the messages of two ranks one after the other, and then also says
        # what has arrived: NCCL does, gloo does not
        self.queues = group is not None and world.here().queues(device)
        self._queues: dict[int, deque[_Expected]] = {}
        self._expected: dict[Hashable, _Expected | Arriving] = {}
        self._sent: dict[Hashable, list[tuple[Any, torch.Tensor]]] = {}
        if self.queues:
            self._connect(pairs)

    @cached_property
    def _sweeps(self) -> bool:
        return self.queues or not_there(self.device)  # a step without values is an accelerator's

    @property
    def tells(self) -> bool:
        """Whether the backend says what has arrived."""
        return self.queues

    def _connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Meet every partner once, in one order for all ranks.

        NCCL connects two ranks when they first talk, and both wait for it: two ranks that begin
        with sends to each other would wait for ever.
        """
        ends = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
        word = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for low, high in sorted(ends):
            for source, target in ((low, high), (high, low)):
                world.send_recv(word, source, target, self._lane(source, target))

    def send(
        self, to: int, key: Hashable, tensors: Sequence[torch.Tensor], *, header: bool
    ) -> None:
        """Start sending; the tensors are kept until `free(key)` or `finish()`."""
        if self._sweeps:
            self.sweep()
        kept = self._sent.setdefault(key, [])
        lane = self._lane(self.rank, to)
        with DisableTorchFunction():
            first = [_header(layout_of(tensors), self.device)] if header else []
            for part in map(_bytes, [*first, *tensors]):
                if part.numel():
                    kept.append((world.isend(part, to, lane), part))

    def post(
        self,
        source: int,
        key: Hashable,
        count: int,
        layout: Callable[[], Layout | None],
        learn: Callable[[Layout], None] = lambda layout: None,
    ) -> None:
        """Expect a message of `count` tensors; it is posted as soon as its layout is known.

        Where `layout()` gives None when the message is taken, a header comes before the tensors.
        """
        queue = self._queues.get(source)
        if not queue and (known := layout()) is not None:  # as almost always
            self._expected[key] = self._start(source, known)
            return
        self._expected[key] = expected = _Expected(source, count, layout, learn)
        self._queues.setdefault(source, deque()).append(expected)
        self._drain(source, None)

    def take(self, key: Hashable) -> list[torch.Tensor]:
        """The tensors of a message; waits for them. Each is fresh memory of its own."""
        arriving = self._expected.pop(key)
        if isinstance(arriving, _Expected):
            expected = arriving
            if expected.arriving is None:
                self._drain(expected.source, expected)
            assert expected.arriving is not None
            arriving = expected.arriving
        tensors, works = arriving
        with DisableTorchFunction():  # what gloo brought for a device is copied there
            for work in works:
                work.wait()
        return tensors

    def free(self, key: Hashable) -> None:
        """The receiver has used this message: let its memory go."""
        for work, _ in self._sent.pop(key, []):
            work.wait()

    def sweep(self) -> None:
        """Let go of what has arrived, where the backend tells."""
        for key, works in list(self._sent.items()):
            if all(work.is_completed() for work, _ in works):
                del self._sent[key]

    def finish(self) -> None:
        """Wait for everything that was sent."""
        for key in list(self._sent):
            self.free(key)
        assert not self._expected, "messages were expected and not taken"

    def _start(self, source: int, layout: Layout) -> Arriving:
        """Begin to receive a message whose layout is known."""
        lane = self._lane(source, self.rank)
        tensors, works = [], []
        with DisableTorchFunction():
            for dtype, shape in layout:
                tensor = made_on(self.device, shape, dtype, self.tier)
                tensors.append(tensor)
                if tensor.numel():
                    works.append(world.irecv(_bytes(tensor), source, lane))
        return tensors, works

    def _drain(self, source: int, until: _Expected | None) -> None:
        queue = self._queues[source]
        while queue:
            expected = queue[0]
            layout = expected.layout()
            if layout is None and until is None:
                return  # its header would have to be waited for
            if layout is None:
                with DisableTorchFunction():
                    layout = self._receive_header(source, expected.count)
                expected.learn(layout)
            expected.arriving = self._start(source, layout)
            queue.popleft()
            if expected is until:
                until = None

    def _receive_header(self, source: int, count: int) -> Layout:
        header = torch.empty((count, HEADER), dtype=torch.int64, device=self.device)
        world.irecv(_bytes(header), source, self._lane(source, self.rank)).wait()
        return tuple((DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for row in header.tolist())

    def _lane(self, source: int, target: int) -> world.ProcessGroup | None:
        return self.group if source < target else self.down


def _header(layout: Layout, device: torch.device) -> torch.Tensor:
    rows = []
    for dtype, shape in layout:
        assert len(shape) <= DIMS, f"a tensor of {len(shape)} dims between stages"
        rows.append([DTYPES.index(dtype), len(shape), *shape, *[0] * (DIMS - len(shape))])
    return sent(torch.tensor(rows, dtype=torch.int64), device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor to send: itself, or its bytes where a backend may not know its dtype."""
    if tensor.dtype in CARRIED:  # the receiver expects it as itself, however it lies here
        return tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    flat = tensor.detach().contiguous().reshape(-1)
    # a float64 mode refuses to look at bits; here nothing is computed from them
    with DisableTorchFunction():
        return flat.view(torch.uint8)
