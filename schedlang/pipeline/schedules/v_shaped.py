"""Orders with two stages on each rank in a V, so that the last rank turns around at once.

ZB-V and DualPipeV by their phases; V-Half, V-Min and 1F1B-V by a building block that is repeated
and squeezed.  Rank r runs stage r (chunk 0) and stage 2p - 1 - r (chunk 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from schedlang.pipeline.schedules.registry import Ints, Order, Size, exact_times, timeline_of_units
from schedlang.pipeline.timeline.table import Column, Kind, Timeline

F0, F1, I0, I1, W0, W1, B0, B1 = range(8)  # steps of a rank: kind, and which of its two chunks
KINDS = np.repeat(np.array([Kind.F, Kind.I, Kind.W, Kind.B], dtype=np.int32), 2)


def _zb_v(size: Size) -> Timeline:
    """No rank idles if F, I and W take equally long (Zero Bubble, §6).

    Fewer than 2p - 1 microbatches run as the first ones of 2p - 1.
    """
    p, n = size.ranks, max(size.micro, 2 * size.ranks - 1)

    def row(r: int) -> list[int]:
        steps = [F0] * (2 * (p - r) - 1) + [F1, F0] * r + [F1, I1, W1] * (p - r)
        steps += [F0, I0, W0, F1, I1, W1] * (n - 2 * p + 1 + r)
        steps += [I0, W0, F1, I1, W1] * (p - 1 - r) + [I0, I1] * r
        return steps + [I0, W0] * (p - r) + [W1] * r + [W0] * r

    return timeline_of_units((v_row(size, r, row(r)) for r in range(p)), size.micro)


def _dualpipe_v(size: Size) -> Timeline:
    """One direction of DualPipe, cut in half and folded; F and B that it overlaps are adjacent.

    Fewer than 2p microbatches run as the first ones of 2p.
    """
    p, n = size.ranks, max(size.micro, 2 * size.ranks)
    return timeline_of_units(
        (v_row(size, r, dualpipe_steps(p, r, n)) for r in range(p)), size.micro
    )


def dualpipe_steps(ranks: int, rank: int, micro: int) -> list[int]:
    """Return the eight phases of DualPipe on a rank of half the pipeline, counted from its closer
    end.

    F of the near direction (0), F of both, IWF, the steady state, and the drain: full backwards
    first, then split ones, their weight gradients between and after the last.
    """
    after = ranks - rank - 1
    steps = [F0] * (2 * after) + [F0, F1] * (rank + 1) + [I1, W1, F1] * after
    steps += [F0, B1, F1, B0] * (micro - 2 * ranks + rank + 1) + [B1, F1, B0] * after
    drain = [B1, B0] * (rank + 1)
    late = [I1 if step == B1 else I0 for step in drain[rank + 1 :]]
    weights = [W1 if step == I1 else W0 for step in late] + [W0] * after
    steps += drain[: rank + 1] + late
    steps += [step for pair in zip(weights, [I0] * after) for step in pair]
    return steps + weights[after:]


def v_row(size: Size, rank: int, steps: Sequence[int] | Ints) -> tuple[Column, Ints]:
    """Return a rank's kinds and units, of the existing microbatches."""
    kind, chunk, microbatch = number_steps(steps)
    real = microbatch < size.micro
    stage = np.where(chunk == 0, rank, 2 * size.ranks - 1 - rank)
    return kind[real], (stage * size.micro + microbatch)[real]


def number_steps(steps: Sequence[int] | Ints) -> tuple[Column, Ints, Ints]:
    """Number the microbatches of steps: the n-th F and the n-th backward of a chunk are microbatch
    n's.

    Returns kinds, chunks and microbatches. Weight gradients come in the order of their input
    gradients.
    """
    step = np.asarray(steps, dtype=np.int64)
    microbatch = np.empty_like(step)
    for c in (0, 1):
        for mask in (step == F0 + c, (step == I0 + c) | (step == B0 + c)):
            microbatch[mask] = np.arange(np.count_nonzero(mask))
        microbatch[step == W0 + c] = microbatch[step == I0 + c]
    return KINDS[step], step % 2, microbatch


def _zb_v_idle(size: Size) -> Fraction | None:
    """(p-1) (I - W), so 0 for equal times; for W <= F <= I and 2p - 1 microbatches or more."""
    f, i, w = exact_times(size)
    is_filled = size.micro >= 2 * size.ranks - 1
    return (size.ranks - 1) * (i - w) if w <= f <= i and is_filled else None


def _dualpipe_v_idle(size: Size) -> Fraction | None:
    """(p-1) (F + I - min(I, W)) / 2 for I <= F <= I + W and 2p microbatches or more.

    The paper's own form counts F and B that overlap as one: (p-1) (F&B + B - 3W) / 2.
    """
    f, i, w = exact_times(size)
    if not i <= f <= i + w or size.micro < 2 * size.ranks:
        return None
    return (size.ranks - 1) * (f + i - min(i, w)) / 2


PHASE_ORDERS = (
    Order(
        "ZB-V",
        "Qi et al., Zero Bubble, 2023 (2401.10241), §6",
        _zb_v,
        aliases=("ZBV", "ZBVZeroBubble", "ScheduleZBVZeroBubble"),
        chunks=(2,),
        bubble=_zb_v_idle,
        peak=lambda size: Fraction(min(size.ranks, size.micro)),
    ),
    Order(
        "DualPipeV",
        "DualPipe of DeepSeek-V3, 2024 (2412.19437), cut in half as in PyTorch's ScheduleDualPipeV",
        _dualpipe_v,
        aliases=("ScheduleDualPipeV",),
        chunks=(2,),
        bubble=_dualpipe_v_idle,
        peak=lambda size: Fraction(min(2 * size.ranks + 1, 2 * size.micro), 2),
    ),
)


INTERVAL = 6  # slots from one block to the next: F, I and W of two chunks
PATH_STEPS = np.array([F0, F1, I1, I0])  # the path of a microbatch through a rank


@dataclass(frozen=True)
class Block:
    """A building block: when each rank runs F and I of a microbatch, in slots of one chunk.

    offsets  [F0, F1, I1, I0] by [rank]: the slots of microbatch 0
    limit    the most stage activations on a rank
    reserve  per rank, how many of these are reserved for chunk 1
    window   per rank, how many microbatches may be past F of chunk 0 and not past F of chunk 1
    """

    offsets: Ints
    limit: int
    reserve: Ints
    window: Ints


class _Squeeze:
    """Runs all ranks in lockstep, one slot at a time, each operation as early as possible.

    A rank runs the operation that comes first in the repeated block among those whose inputs have
    arrived; a forward only where the limits allow; a weight gradient where nothing else can run.
    """

    def __init__(self, block: Block, micro: int) -> None:
        ranks = block.offsets.shape[1]
        self.block, self.micro, self.lanes = block, micro, np.arange(ranks)
        self.done = np.zeros((4, ranks), dtype=np.int64)
        self.freed = np.zeros((2, ranks), dtype=np.int64)  # weight gradients of each chunk
        self.inputs = np.empty_like(self.done)
        self.queue = np.zeros((2 * micro, ranks), dtype=np.int64)  # the chunks of I, in order

    def rows(self) -> list[Ints]:
        """Return the steps of each rank, as numbers F0 to B1."""
        slots: list[Ints] = []
        seen: dict[bytes, tuple[int, int]] = {}
        skipped = False
        while self.freed.min() < self.micro:
            if len(slots) % INTERVAL == 0 and not skipped:
                started, state = int(self.done[0, 0]), self._state()
                if state in seen:  # the slots since then would repeat
                    slot, before = seen[state]
                    repeats = max(0, (self.micro - started - 1) // (started - before))
                    slots += slots[slot:] * repeats
                    self.micro -= repeats * (started - before)
                    skipped = True
                seen[state] = len(slots), started
            slots.append(self._slot())
        return [column[column >= 0] for column in np.array(slots).T]

    def _state(self) -> bytes:
        """Return the state that the next slots depend on, relative to the last started
        microbatch."""
        started = int(self.done[0, 0])
        freed = self.freed.sum(0)
        waiting = freed + np.arange(self.block.limit)[:, None]
        valid = waiting < self.done[2] + self.done[3]
        queue = self.queue[np.minimum(waiting, len(self.queue) - 1), self.lanes]
        parts = (self.done - started, self.freed - started, np.where(valid, queue, -1))
        return b"".join(part.tobytes() for part in parts)

    def _slot(self) -> Ints:
        done, block = self.done, self.block
        ready = self._received() > done
        alive = done[:2] - self.freed
        ready[:2] &= alive[0] + alive[1] < block.limit
        ready[0] &= alive[0] < block.limit - block.reserve
        ready[0] &= done[0] - done[1] < block.window
        slot = np.where(ready, block.offsets + INTERVAL * done, np.iinfo(np.int64).max)
        part, count, freed = slot.argmin(0), done[2] + done[3], self.freed[0] + self.freed[1]
        runs = ready.any(0)
        weigh = ~runs & (freed < count)
        assert runs.any() or weigh.any(), "no rank can go on"
        chunk = self.queue[np.minimum(freed, len(self.queue) - 1), self.lanes]
        backward = runs & (part >= 2)
        self.queue[count[backward], self.lanes[backward]] = 3 - part[backward]
        self.freed[chunk[weigh], self.lanes[weigh]] += 1
        self.done[part[runs], self.lanes[runs]] += 1
        return np.where(runs, PATH_STEPS[part], np.where(weigh, W0 + chunk, -1))

    def _received(self) -> Ints:
        """Count the inputs of every kind that each rank has."""
        done, inputs = self.done, self.inputs
        inputs[0, 0] = self.micro
        inputs[0, 1:], inputs[1, :-1], inputs[1, -1] = done[0, :-1], done[1, 1:], done[0, -1]
        inputs[2, 1:], inputs[2, 0] = done[2, :-1], done[1, 0]
        inputs[3, :-1], inputs[3, -1] = done[3, 1:], done[2, -1]
        return inputs


def _squeezed(block: Block, size: Size) -> Timeline:
    rows = _Squeeze(block, size.micro).rows()
    return timeline_of_units((v_row(size, rank, row) for rank, row in enumerate(rows)), size.micro)


def _v_half(size: Size) -> Timeline:
    """Half of 1F1B's activations, by Table 9's offsets; chunk 1 keeps its own for r/2 intervals.

    If p is odd, a rank has no more microbatches between its two forwards than in the block.
    """
    p, r = size.ranks, np.arange(size.ranks)
    turn = 3 * p - 1 if p % 2 else 3 * p + 2
    offsets = np.array([2 * r, 3 * p - 2 - r, turn + 2 * r, turn + 3 * p - 1 - r])
    window = (p - r + 1) // 2 if p % 2 else np.full(p, size.micro)
    return _squeezed(Block(offsets, _v_half_limit(size), r // 2 + 1, window), size)


def _v_half_limit(size: Size) -> int:
    """Stage activations of V-Half: (p+2)//2 microbatches."""
    return 2 * ((size.ranks + 2) // 2)


def _v_min(size: Size) -> Timeline:
    """A third of 1F1B's activations, by Table 8's offsets; chunk 1 keeps its own for r/3 intervals.

    If 3 divides p, Table 8 waits two slots before I1; here every p has this wait. Only the order of
    operations comes from the block, so the idle time is the least possible.
    """
    p, r = size.ranks, np.arange(size.ranks)
    offsets = np.array([r, 2 * p - 1 - r, 2 * p + 2 + r, 4 * p + 1 - r])
    return _squeezed(Block(offsets, _v_min_limit(size), r // 3 + 1, (p + 4 - r) // 3), size)


def _v_min_limit(size: Size) -> int:
    """Stage activations of V-Min: (p+4)//3 microbatches."""
    return 2 * ((size.ranks + 4) // 3)


def _one_f_one_b_v(size: Size) -> Timeline:
    """Full backwards of two slots: the block is repeated as it is, without its idle slots."""
    offsets, parts = _unsplit(size.ranks), np.array([F0, F1, B1, B0])
    micro = np.arange(size.micro) * INTERVAL
    rows = []
    for rank in range(size.ranks):
        slots = (offsets[:, rank, None] + micro).ravel()
        steps = np.repeat(parts, size.micro)[np.argsort(slots, kind="stable")]
        rows.append(v_row(size, rank, steps))
    return timeline_of_units(rows, size.micro)


def _unsplit(ranks: int) -> Ints:
    """Offsets of 1F1B-V: each backward at the first slots that repeat without a clash.

    F of the two chunks leave two pairs of slots of the interval free on every rank.
    """
    forward = np.arange(ranks)
    offsets = np.array([forward, 2 * ranks - 1 - forward, forward, forward])
    slot, rest = 2 * ranks, []
    for rank in range(ranks):
        used = {int(offsets[0, rank]) % INTERVAL, int(offsets[1, rank]) % INTERVAL}
        pairs = [s for s in range(INTERVAL) if not used & {s, (s + 1) % INTERVAL}]
        pairs = [s for s in pairs if any((s - t) % INTERVAL in (2, 3, 4) for t in pairs)]
        while slot % INTERVAL not in pairs:
            slot += 1
        offsets[2, rank] = slot
        rest.append(next(s for s in pairs if (s - slot) % INTERVAL in (2, 3, 4)))
        slot += 2
    for rank in reversed(range(ranks)):
        slot += (rest[rank] - slot) % INTERVAL
        offsets[3, rank] = slot
        slot += 2
    return offsets


def _least_idle(limit: Callable[[Size], int]) -> Callable[[Size], Fraction | None]:
    """6p - 3q - 1 slots for q stage activations, which no order in a V can do without.

    For equal times, of which F / 2 is a slot, and 2p microbatches; two ranks take one slot.
    """

    def idle(size: Size) -> Fraction | None:
        f, i, w = exact_times(size)
        if not f == i == w or size.micro < 2 * size.ranks:
            return None
        slots = 6 * size.ranks - 3 * limit(size) - 1 if size.ranks > 2 else size.ranks - 1
        return slots * f / 2

    return idle


def _one_f_one_b_v_limit(size: Size) -> int:
    """Stage activations of 1F1B-V: (2p+3)//3 microbatches."""
    return 2 * ((2 * size.ranks + 3) // 3)


def _one_f_one_b_v_idle(size: Size) -> Fraction | None:
    """(6 (p-1) + (p-1) mod 3) F / 2, if I + W = 2F, for p microbatches or more."""
    f, i, w = exact_times(size)
    if i + w != 2 * f or size.micro < size.ranks:
        return None
    return (6 * (size.ranks - 1) + (size.ranks - 1) % 3) * f / 2


def _peak(limit: Callable[[Size], int]) -> Callable[[Size], Fraction]:
    return lambda size: Fraction(min(limit(size), 2 * size.micro), 2)


PAPER = "Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (2405.15362)"
BLOCK_ORDERS = (
    Order(
        "V-Half",
        PAPER + ", Table 9",
        _v_half,
        chunks=(2,),
        bubble=_least_idle(_v_half_limit),
        peak=_peak(_v_half_limit),
    ),
    Order(
        "V-Min",
        PAPER + ", Table 8",
        _v_min,
        chunks=(2,),
        bubble=_least_idle(_v_min_limit),
        peak=_peak(_v_min_limit),
    ),
    Order(
        "1F1B-V",
        PAPER + ", §3.3",
        _one_f_one_b_v,
        chunks=(2,),
        bubble=_one_f_one_b_v_idle,
        peak=_peak(_one_f_one_b_v_limit),
    ),
)
