"""Proof that messages do not block each other where those of two ranks run one after the other.

So it is with NCCL and its kin: sends and receives of two ranks in one communicator stand in one
queue at each end, in the order in which they are posted, and each runs until both ends have come
to it.  A receive that is posted early then holds up all that its rank posts after it.
"""

from __future__ import annotations

from collections import defaultdict, deque

from schedlang.timeline.messages import messages
from schedlang.timeline.needs import dependencies, describe
from schedlang.timeline.table import Kind, Timeline, TimelineError

Lane = tuple[int, int, int]  # which way (between stages, out or home), and two ranks


def check_queues(timeline: Timeline, *, one_way: bool = True) -> None:
    """Raise TimelineError unless a timeline with transfers ends under that rule.

    one_way: each direction between two ranks has a queue of its own; else both share one.
    """
    t = timeline
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    mail = messages(t, made[apart], used[apart])
    if mail is None:
        return
    posts: dict[int, list[tuple[int, Lane]]] = defaultdict(list)
    needs: dict[int, list[int]] = defaultdict(list)
    for k, (send, receive, use) in enumerate(
        zip(mail.send.tolist(), mail.receive.tolist(), mail.used.tolist())
    ):
        lane = _lane(t, send, receive, one_way)
        posts[send].append((k, lane))
        posts[receive].append((k, lane))
        needs[use].append(k)
    _Run(t, posts, needs).end()


def _lane(t: Timeline, send: int, receive: int, one_way: bool) -> Lane:
    kind, ends = int(t.kind[send]), (int(t.rank[send]), int(t.rank[receive]))
    way = {int(Kind.EVICT): 1, int(Kind.GIVE): 2}.get(kind, 0)
    return (way, *(ends if one_way else (min(ends), max(ends))))


class _Run:
    """All ranks run their rows as far as they come."""

    def __init__(
        self, t: Timeline, posts: dict[int, list[tuple[int, Lane]]], needs: dict[int, list[int]]
    ) -> None:
        self.t, self.posts, self.needs = t, posts, needs
        self.queues: dict[tuple[Lane, int], deque[int]] = defaultdict(deque)
        self.done: set[int] = set()
        self.at = t.starts[:-1].tolist()
        self.posted = [False] * len(self.at)  # whether what the present row posts is posted

    def end(self) -> None:
        """Come to the end of all rows, or say who waits for whom."""
        moved = True
        while moved:
            moved = False
            for rank, last in enumerate(self.t.starts[1:].tolist()):
                while self.at[rank] < last and self._row(rank, self.at[rank]):
                    self.at[rank] += 1
                    self.posted[rank], moved = False, True
        for rank, last in enumerate(self.t.starts[1:].tolist()):
            if self.at[rank] < last:
                raise TimelineError(self._stuck(rank))

    def _row(self, rank: int, row: int) -> bool:
        """Do one row; False if it waits for a message."""
        if not self.posted[rank]:
            self.posted[rank] = True
            for message, lane in self.posts.get(row, ()):
                self.queues[lane, rank].append(message)
                self._settle(lane)
        return all(message in self.done for message in self.needs.get(row, ()))

    def _settle(self, lane: Lane) -> None:
        """Messages that both ends have come to run, and let those behind them."""
        here, there = (self.queues[lane, rank] for rank in lane[1:])
        while here and there and here[0] == there[0]:
            self.done.add(here.popleft())
            there.popleft()

    def _stuck(self, rank: int) -> str:
        row = self.at[rank]
        message = next(k for k in self.needs[row] if k not in self.done)
        ends = {r: lane for r, some in self.posts.items() for k, lane in some if k == message}
        text = f"messages block each other: {describe(self.t, row)} waits"
        lane = next(iter(ends.values()))
        for end in lane[1:]:
            queue = self.queues[lane, end]
            if queue and queue[0] != message:
                first = next(
                    r for r, some in self.posts.items()
                    if (queue[0], lane) in some and self.t.rank[r] == end
                )  # fmt: skip
                text += f", and on rank {end} {describe(self.t, first)} stands before its message"
        return text
