"""Matching of collectives and messages between ranks, in the order in which they are posted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.engine.arithmetic import COMPUTE, Post, Results
from tests.engine.baton import Baton
from tests.engine.faults import Faults, poison

Wait = Callable[[], None]


class Mismatch(RuntimeError):
    """Ranks posted different operations: the error names the ranks and what each posted."""


@dataclass
class _Collective:
    """One collective of a group: the ranks' posts, by group rank."""

    posts: dict[int, Post] = field(default_factory=dict)
    results: Results | None = None

    def let_go(self) -> None:
        """Drop all tensors once complete, even if some rank still waits for its turn."""
        self.results = None
        for post in self.posts.values():
            post.inputs, post.outputs = [], []


@dataclass
class _Message:
    """One send and its matching receive; tensors are dropped as soon as they are not needed."""

    sends: bool = False
    receives: bool = False
    sent: Tensor | None = None
    buffer: Tensor | None = None
    data: Tensor | None = None  # a copy of the sent tensor between read and write
    arrived: bool = False


class Exchange:
    """All communication in flight in one run; a group is identified by name and ranks."""

    def __init__(self, baton: Baton, faults: Faults) -> None:
        self.baton, self.faults = baton, faults
        self._meetings: dict[tuple[object, int], _Collective] = {}
        self._counts: dict[tuple[object, int], int] = {}
        self._messages: dict[tuple[object, ...], _Message] = {}

    # -- collectives -------------------------------------------------------------------------------

    def post(self, group: str, ranks: Sequence[int], group_rank: int, post: Post) -> Wait:
        """Post this rank's part of the group's next collective; returns its wait function."""
        self.baton.check()
        number = self._count((group, tuple(ranks)), group_rank)
        key = ((group, tuple(ranks)), number)
        collective = self._meetings.setdefault(key, _Collective())
        if collective.posts:
            other = next(iter(collective.posts))
            _check_match(
                collective.posts[other], post, ranks[other], ranks[group_rank], number, ranks
            )
        if self.faults.delay or self.faults.poison:
            post.inputs = _unaliased(post.inputs, post.outputs)
        if self.faults.poison:
            poison(post.outputs)
        collective.posts[group_rank] = post
        complete = len(collective.posts) == len(ranks)
        if complete and not self.faults.delay:
            with _disable_current_modes():
                collective.results = _run_collective(collective)
                for index, (rank_post, results) in enumerate(
                    zip(_ordered(collective), collective.results)
                ):
                    _write(rank_post.outputs, results, rank_post.kind, ranks[index])
            collective.let_go()
        if complete:
            del self._meetings[key]

        def wait() -> None:
            label = f"{post.kind} number {number} of ranks {_listed(ranks)}"
            all_posted = lambda: len(collective.posts) == len(ranks)  # noqa: E731
            missing = [ranks[k] for k in range(len(ranks)) if k not in collective.posts]
            self.baton.wait(
                ranks[group_rank], all_posted, f"{label}, where {_listed(missing)} did not come"
            )
            if self.faults.delay:
                with _disable_current_modes():
                    collective.results = collective.results or _run_collective(collective)
                    _write(
                        post.outputs, collective.results[group_rank], post.kind, ranks[group_rank]
                    )

        return wait

    # -- point to point ----------------------------------------------------------------------------

    def send(self, lane: tuple[object, ...], ranks: tuple[int, int], tensor: Tensor) -> Wait:
        """Send the next message of a lane from ranks[0] to ranks[1]; returns a wait function."""
        self.baton.check()
        message, number = self._message(lane, "send")
        message.sent, message.sends = tensor, True
        self._met(message, ranks)

        def wait() -> None:
            reason = f"its message {number} to rank {ranks[1]} to be received"
            self.baton.wait(ranks[0], lambda: message.receives, reason)
            if not message.arrived:
                _read(message, ranks)  # from now on the sender may write into it

        return wait

    def receive(self, lane: tuple[object, ...], ranks: tuple[int, int], buffer: Tensor) -> Wait:
        """Post a receive buffer at ranks[1] for the lane's next message from ranks[0]."""
        self.baton.check()
        message, number = self._message(lane, "receive")
        message.buffer, message.receives = buffer, True
        if self.faults.poison:
            poison([buffer])
        self._met(message, ranks)

        def wait() -> None:
            reason = f"message {number} of rank {ranks[0]}"
            self.baton.wait(ranks[1], lambda: message.sends, reason)
            if not message.arrived:
                _read(message, ranks)
                _deliver(message)

        return wait

    def _message(self, lane: tuple[object, ...], end: str) -> tuple[_Message, int]:
        number = self._count((lane, end), 0)
        return self._messages.setdefault((*lane, number), _Message()), number

    def _met(self, message: _Message, ranks: tuple[int, int]) -> None:
        sent, buffer = message.sent, message.buffer
        if sent is None or buffer is None:
            return
        if sent.dtype != buffer.dtype or sent.numel() != buffer.numel():
            sent_text, buffer_text = (f"{t.dtype} {list(t.shape)}" for t in (sent, buffer))
            text = f"rank {ranks[0]} sends {sent_text}, rank {ranks[1]} receives {buffer_text}"
            raise Mismatch(f"a message differs in size: {text}")
        if not self.faults.delay:
            _read(message, ranks)
            _deliver(message)

    # -- the end -----------------------------------------------------------------------------------

    def unfinished(self) -> list[str]:
        """List collectives and messages that some ranks started and others never joined."""
        problems = []
        for (group, number), collective in self._meetings.items():
            _, ranks = group  # type: ignore[misc]
            present = [ranks[k] for k in sorted(collective.posts)]
            kind = next(iter(collective.posts.values())).kind
            problems.append(
                f"{kind} number {number} of ranks {_listed(ranks)}: only {_listed(present)} came"
            )
        for key, message in self._messages.items():
            if not message.sends or not message.receives:
                end = "was never sent" if message.receives else "was never received"
                problems.append(f"message {key[-1]} from {key[-4]} to {key[-3]} {end}")
        return problems

    def _count(self, key: tuple[object, object], group_rank: int) -> int:
        number = self._counts.get((key, group_rank), 0)
        self._counts[(key, group_rank)] = number + 1
        return number


def _ordered(collective: _Collective) -> list[Post]:
    return [collective.posts[group_rank] for group_rank in sorted(collective.posts)]


def _run_collective(collective: _Collective) -> Results:
    posts = _ordered(collective)
    for post in posts:
        _check_allocated(post.inputs, f"what {post.kind} reads")
    return COMPUTE[posts[0].kind](posts)


def _read(message: _Message, ranks: tuple[int, int]) -> None:
    """Copy the sent tensor, once and not before this call."""
    if message.data is None:
        assert message.sent is not None and message.buffer is not None
        _check_allocated([message.sent], f"what rank {ranks[0]} sends to {ranks[1]}")
        with _disable_current_modes():  # memory counters of a rank ignore this copy
            message.data = message.sent.reshape(message.buffer.shape).clone()
        message.sent = None


def _deliver(message: _Message) -> None:
    """Write the copied data into the receiver's buffer."""
    assert message.buffer is not None and message.data is not None
    with _disable_current_modes():
        message.buffer.copy_(message.data)
    message.buffer, message.data, message.arrived = None, None, True


def _check_allocated(tensors: Sequence[Tensor], label: str) -> None:
    for tensor in tensors:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
            raise Mismatch(f"the memory of {label} was freed before anybody waited")


def _write(outputs: Sequence[Tensor], results: Sequence[Tensor], kind: str, rank: int) -> None:
    if not results:
        return  # only the root of a reduce or a gather gets something
    for output, result in zip(outputs, results, strict=True):
        _check_allocated([output], f"what {kind} writes on rank {rank}")
        if output.numel() != result.numel() or output.dtype != result.dtype:
            raise Mismatch(
                f"{kind} on rank {rank} writes {result.dtype} {list(result.shape)} into "
                f"{output.dtype} {list(output.shape)}"
            )
        output.copy_(result.reshape(output.shape))


def _unaliased(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs, cloned where they share memory with an output."""
    written = {t.untyped_storage().data_ptr() for t in outputs}
    return [t.clone() if t.untyped_storage().data_ptr() in written else t for t in inputs]


def _check_match(
    first: Post, second: Post, rank: int, other_rank: int, number: int, ranks: Sequence[int]
) -> None:
    if (first.kind, first.alike) == (second.kind, second.alike):
        return
    sides = ", ".join(
        f"rank {r} does {p.kind}{p.alike}" for r, p in ((rank, first), (other_rank, second))
    )
    raise Mismatch(f"collective number {number} of ranks {_listed(ranks)} differs: {sides}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "nobody"
