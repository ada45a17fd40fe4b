"""Point-to-point messages between the ranks of a pipeline, posted in one order.

The executor sends and receives through `PeerChannel`; a header tells the layout of a message once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._C import DisableTorchFunction

from schedlang.runtime.comm import world
from schedlang.runtime.device import is_meta, send_to_device
from schedlang.runtime.storage.tiers import DEVICE, empty_on

MessageLayout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
DIMS = 8
HEADER_SIZE = DIMS + 2  # per tensor: dtype, number of dims, sizes

# a header names a dtype by its index in DTYPES, which is the same on every rank
NATIVE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)
DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)


def layout_of(tensors: Sequence[torch.Tensor]) -> MessageLayout:
    """Return dtype and shape of each tensor."""
    return tuple([(t.dtype, tuple(t.shape)) for t in tensors])


PostedReceive = tuple[list[torch.Tensor], list[Any]]  # tensors of a message, handles to wait for


@dataclass(eq=False)
class _PendingReceive:
    """A message that is not posted yet: its layout, or that of an earlier one, is unknown."""

    source: int
    count: int
    layout: Callable[[], MessageLayout | None]
    learn: Callable[[MessageLayout], None]
    arriving: PostedReceive | None = None


class PeerChannel:
    """Sends and receives of one rank with the other ranks of its pipeline.

    gloo and NCCL match messages between two ranks in the order of posting, so a message is posted
    only after all earlier ones from the same rank. `down` is the group for messages from a higher
    rank to a lower: NCCL runs the messages of a group and a pair of ranks one after the other, so
    that one group for both directions could deadlock. Received tensors are marked as stored on
    `tier`. Function modes see no message, because messages are no part of the model's arithmetic.
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
        self.rank = world.current_world().rank
        # whether the backend runs the messages of two ranks one after the other, and reports which
        # have arrived: NCCL does, gloo does not
        self.queues = group is not None and world.current_world().orders_messages(device)
        self._queues: dict[int, deque[_PendingReceive]] = {}
        self._expected: dict[Hashable, _PendingReceive | PostedReceive] = {}
        self._sent: dict[Hashable, list[tuple[Any, torch.Tensor]]] = {}
        if self.queues:
            self._connect_pairs(pairs)

    @cached_property
    def _frees_early(self) -> bool:
        return self.queues or is_meta(self.device)  # a dry run plays an accelerator

    @property
    def reports_arrival(self) -> bool:
        """Whether the backend reports which messages have arrived."""
        return self.queues

    def _connect_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Exchange a byte with every partner once, in one order for all ranks.

        NCCL connects two ranks at their first message, and both wait for that: two ranks that begin
        with sends to each other would deadlock.
        """
        ends = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for low, high in sorted(ends):
            for source, target in ((low, high), (high, low)):
                world.send_recv(byte, source, target, self._group_for(source, target))

    def send(
        self, target: int, key: Hashable, tensors: Sequence[torch.Tensor], *, header: bool
    ) -> None:
        """Start sending; the tensors are held until `free(key)` or `finish()`."""
        if self._frees_early:
            self.sweep()
        sends = self._sent.setdefault(key, [])
        lane = self._group_for(self.rank, target)
        with DisableTorchFunction():
            headers = [_header(layout_of(tensors), self.device)] if header else []
            for part in map(_wire_tensor, [*headers, *tensors]):
                if part.numel():
                    sends.append((world.isend(part, target, lane), part))

    def post(
        self,
        source: int,
        key: Hashable,
        count: int,
        layout: Callable[[], MessageLayout | None],
        learn: Callable[[MessageLayout], None] = lambda layout: None,
    ) -> None:
        """Expect a message of `count` tensors; its receive is posted as soon as its layout is
        known.

        If `layout()` still returns None when `take` is called, a header comes before the tensors,
        and `learn` gets the layout.
        """
        queue = self._queues.get(source)
        if not queue and (known_layout := layout()) is not None:  # as almost always
            self._expected[key] = self._start(source, known_layout)
            return
        self._expected[key] = expected = _PendingReceive(source, count, layout, learn)
        self._queues.setdefault(source, deque()).append(expected)
        self._drain(source, None)

    def take(self, key: Hashable) -> list[torch.Tensor]:
        """Wait for a message, and return its tensors, each in fresh memory."""
        arriving = self._expected.pop(key)
        if isinstance(arriving, _PendingReceive):
            expected = arriving
            if expected.arriving is None:
                self._drain(expected.source, expected)
            assert expected.arriving is not None
            arriving = expected.arriving
        tensors, works = arriving
        with DisableTorchFunction():  # `wait` copies what gloo received to the device
            for work in works:
                work.wait()
        return tensors

    def free(self, key: Hashable) -> None:
        """Wait for the sends of a message, and drop its tensors: the receiver has used them."""
        for work, _ in self._sent.pop(key, []):
            work.wait()

    def sweep(self) -> None:
        """Drop the tensors of messages that have arrived, if the backend reports it."""
        for key, works in list(self._sent.items()):
            if all(work.is_completed() for work, _ in works):
                del self._sent[key]

    def finish(self) -> None:
        """Wait for all sends."""
        for key in list(self._sent):
            self.free(key)
        assert not self._expected, "messages were expected and not taken"

    def _start(self, source: int, layout: MessageLayout) -> PostedReceive:
        """Post the receives of a message whose layout is known."""
        lane = self._group_for(source, self.rank)
        tensors, works = [], []
        with DisableTorchFunction():
            for dtype, shape in layout:
                tensor = empty_on(self.device, shape, dtype, self.tier)
                tensors.append(tensor)
                if tensor.numel():
                    works.append(world.irecv(_wire_tensor(tensor), source, lane))
        return tensors, works

    def _drain(self, source: int, until: _PendingReceive | None) -> None:
        queue = self._queues[source]
        while queue:
            expected = queue[0]
            layout = expected.layout()
            if layout is None and until is None:
                return  # only a wait for its header could give the layout
            if layout is None:
                with DisableTorchFunction():
                    layout = self._receive_header(source, expected.count)
                expected.learn(layout)
            expected.arriving = self._start(source, layout)
            queue.popleft()
            if expected is until:
                until = None

    def _receive_header(self, source: int, count: int) -> MessageLayout:
        header = torch.empty((count, HEADER_SIZE), dtype=torch.int64, device=self.device)
        world.irecv(_wire_tensor(header), source, self._group_for(source, self.rank)).wait()
        return tuple((DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for row in header.tolist())

    def _group_for(self, source: int, target: int) -> world.ProcessGroup | None:
        return self.group if source < target else self.down


def _header(layout: MessageLayout, device: torch.device) -> torch.Tensor:
    rows = []
    for dtype, shape in layout:
        assert len(shape) <= DIMS, f"a tensor of {len(shape)} dims between stages"
        rows.append([DTYPES.index(dtype), len(shape), *shape, *[0] * (DIMS - len(shape))])
    return send_to_device(torch.tensor(rows, dtype=torch.int64), device)


def _wire_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor to send: itself, or its bytes where a backend may not know its dtype."""
    if tensor.dtype in NATIVE_DTYPES:  # contiguous, as the receiver expects it
        return tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    flat = tensor.detach().contiguous().reshape(-1)
    # a float64 mode refuses views of bits; nothing is computed from these
    with DisableTorchFunction():
        return flat.view(torch.uint8)
