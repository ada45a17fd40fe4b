"""Where ranks meet: collectives and messages are matched in the order in which they are posted."""

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
    """Ranks that meet do not mean the same: the error names them and what each does."""


@dataclass
class _Meeting:
    """One collective of a group: what its ranks posted, by their place in it."""

    posts: dict[int, Post] = field(default_factory=dict)
    results: Results | None = None

    def let_go(self) -> None:
        """All is done: keep no tensor, whoever still waits for its turn."""
        self.results = None
        for post in self.posts.values():
            post.inputs, post.outputs = [], []


@dataclass
class _Message:
    """One send and the receive that it meets; no tensor is kept for longer than it is needed."""

    sends: bool = False
    receives: bool = False
    sent: Tensor | None = None
    buffer: Tensor | None = None
    data: Tensor | None = None  # what was sent, once it is read and until it is written
    arrived: bool = False


class Exchange:
    """All that is on its way between the ranks of one run; groups are known by name and ranks."""

    def __init__(self, baton: Baton, faults: Faults) -> None:
        self.baton, self.faults = baton, faults
        self._meetings: dict[tuple[object, int], _Meeting] = {}
        self._counts: dict[tuple[object, int], int] = {}
        self._messages: dict[tuple[object, ...], _Message] = {}

    # -- collectives -------------------------------------------------------------------------------

    def post(self, group: str, ranks: Sequence[int], place: int, post: Post) -> Wait:
        """Take part in the group's next collective; the result waits for it."""
        self.baton.check()
        number = self._count((group, tuple(ranks)), place)
        key = ((group, tuple(ranks)), number)
        meeting = self._meetings.setdefault(key, _Meeting())
        if meeting.posts:
            other = next(iter(meeting.posts))
            _check_alike(meeting.posts[other], post, ranks[other], ranks[place], number, ranks)
        if self.faults.delay or self.faults.poison:
            post.inputs = _apart(post.inputs, post.outputs)
        if self.faults.poison:
            poison(post.outputs)
        meeting.posts[place] = post
        here = len(meeting.posts) == len(ranks)
        if here and not self.faults.delay:
            with _disable_current_modes():
                meeting.results = _compute(meeting)
                for each, (one, results) in enumerate(zip(_ordered(meeting), meeting.results)):
                    _write(one.outputs, results, one.kind, ranks[each])
            meeting.let_go()
        if here:
            del self._meetings[key]

        def wait() -> None:
            what = f"{post.kind} number {number} of ranks {_told(ranks)}"
            there = lambda: len(meeting.posts) == len(ranks)  # noqa: E731
            missing = [ranks[k] for k in range(len(ranks)) if k not in meeting.posts]
            self.baton.wait(ranks[place], there, f"{what}, where {_told(missing)} did not come")
            if self.faults.delay:
                with _disable_current_modes():
                    meeting.results = meeting.results or _compute(meeting)
                    _write(post.outputs, meeting.results[place], post.kind, ranks[place])

        return wait

    # -- point to point ----------------------------------------------------------------------------

    def send(self, lane: tuple[object, ...], ranks: tuple[int, int], tensor: Tensor) -> Wait:
        """Post the next message of a lane from ranks[0] to ranks[1]."""
        self.baton.check()
        message, number = self._message(lane, "send")
        message.sent, message.sends = tensor, True
        self._met(message, ranks)

        def wait() -> None:
            what = f"its message {number} to rank {ranks[1]} to be received"
            self.baton.wait(ranks[0], lambda: message.receives, what)
            if not message.arrived:
                _read(message, ranks)  # from now on the sender may write into it

        return wait

    def receive(self, lane: tuple[object, ...], ranks: tuple[int, int], buffer: Tensor) -> Wait:
        """Post a buffer at ranks[1] for the next message of a lane from ranks[0]."""
        self.baton.check()
        message, number = self._message(lane, "receive")
        message.buffer, message.receives = buffer, True
        if self.faults.poison:
            poison([buffer])
        self._met(message, ranks)

        def wait() -> None:
            what = f"message {number} of rank {ranks[0]}"
            self.baton.wait(ranks[1], lambda: message.sends, what)
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
            one, other = (f"{t.dtype} {list(t.shape)}" for t in (sent, buffer))
            told = f"rank {ranks[0]} sends {one}, rank {ranks[1]} receives {other}"
            raise Mismatch(f"a message differs in size: {told}")
        if not self.faults.delay:
            _read(message, ranks)
            _deliver(message)

    # -- the end -----------------------------------------------------------------------------------

    def unfinished(self) -> list[str]:
        """What was begun by some ranks and never joined by others."""
        found = []
        for (group, number), meeting in self._meetings.items():
            _, ranks = group  # type: ignore[misc]
            here = [ranks[k] for k in sorted(meeting.posts)]
            kind = next(iter(meeting.posts.values())).kind
            found.append(f"{kind} number {number} of ranks {_told(ranks)}: only {_told(here)} came")
        for key, message in self._messages.items():
            if not message.sends or not message.receives:
                end = "was never sent" if message.receives else "was never received"
                found.append(f"message {key[-1]} from {key[-4]} to {key[-3]} {end}")
        return found

    def _count(self, key: tuple[object, object], place: int) -> int:
        number = self._counts.get((key, place), 0)
        self._counts[(key, place)] = number + 1
        return number


def _ordered(meeting: _Meeting) -> list[Post]:
    return [meeting.posts[place] for place in sorted(meeting.posts)]


def _compute(meeting: _Meeting) -> Results:
    posts = _ordered(meeting)
    for post in posts:
        _check_there(post.inputs, f"what {post.kind} reads")
    return COMPUTE[posts[0].kind](posts)


def _read(message: _Message, ranks: tuple[int, int]) -> None:
    """Take what was sent, once and no earlier than this."""
    if message.data is None:
        assert message.sent is not None and message.buffer is not None
        _check_there([message.sent], f"what rank {ranks[0]} sends to {ranks[1]}")
        with _disable_current_modes():  # whoever counts a rank's memory does not count this
            message.data = message.sent.reshape(message.buffer.shape).clone()
        message.sent = None


def _deliver(message: _Message) -> None:
    """Write what was read into the receiver's buffer."""
    assert message.buffer is not None and message.data is not None
    with _disable_current_modes():
        message.buffer.copy_(message.data)
    message.buffer, message.data, message.arrived = None, None, True


def _check_there(tensors: Sequence[Tensor], what: str) -> None:
    for tensor in tensors:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
            raise Mismatch(f"the memory of {what} was freed before anybody waited")


def _write(outputs: Sequence[Tensor], results: Sequence[Tensor], kind: str, rank: int) -> None:
    if not results:
        return  # only the root of a reduce or a gather gets something
    for output, result in zip(outputs, results, strict=True):
        _check_there([output], f"what {kind} writes on rank {rank}")
        if output.numel() != result.numel() or output.dtype != result.dtype:
            raise Mismatch(
                f"{kind} on rank {rank} writes {result.dtype} {list(result.shape)} into "
                f"{output.dtype} {list(output.shape)}"
            )
        output.copy_(result.reshape(output.shape))


def _apart(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs; those that share memory with an output as they are now."""
    written = {t.untyped_storage().data_ptr() for t in outputs}
    return [t.clone() if t.untyped_storage().data_ptr() in written else t for t in inputs]


def _check_alike(
    one: Post, other: Post, rank: int, mine: int, number: int, ranks: Sequence[int]
) -> None:
    if (one.kind, one.alike) == (other.kind, other.alike):
        return
    sides = ", ".join(f"rank {r} does {p.kind}{p.alike}" for r, p in ((rank, one), (mine, other)))
    raise Mismatch(f"collective number {number} of ranks {_told(ranks)} differs: {sides}")


def _told(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "nobody"
