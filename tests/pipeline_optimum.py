"""Branch and bound over all orders of a small pipeline: does a faster one exist?

Independent of the searches that it judges. Microbatches are interchangeable, so each rank takes
them in order, and an order is a sequence of F, I and W for each rank. Prefixes grow by one
operation at a time; of two with the same operations, one that is nowhere later is kept.
"""

from __future__ import annotations

from typing import NamedTuple

F, I, W = range(3)  # noqa: E741


class Problem(NamedTuple):
    """One stage on each rank; integer costs; activations live from F to the end of W (or I)."""

    ranks: int
    micro: int
    costs: tuple[int, int, int]
    memory: int | None = None
    split: bool = True


class State(NamedTuple):
    """Counts of operations [kind][rank], when ranks are free, and results not used yet."""

    done: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]
    forward: tuple[tuple[int, ...], ...]  # ends of F on rank r that rank r + 1 has not used
    back: tuple[tuple[int, ...], ...]  # ends of I on rank r that rank r - 1 has not used


def has_faster(problem: Problem, than: int) -> bool:
    """Whether any order ends before `than`."""
    p = problem.ranks
    nothing = ((),) * p
    states = [State(((0,) * p,) * 3, (0,) * p, nothing, nothing)]
    for _ in range(p * problem.micro * (3 if problem.split else 2)):
        fronts: dict[tuple[tuple[int, ...], ...], list[State]] = {}
        for state in states:
            for extended in _extensions(problem, state):
                if _bound(problem, extended) < than:
                    _insert(fronts.setdefault(extended.done, []), extended)
        states = [state for front in fronts.values() for state in front]
    return bool(states)


def _extensions(problem: Problem, state: State) -> list[State]:
    return [
        extended
        for rank in range(problem.ranks)
        for kind in ((F, I, W) if problem.split else (F, I))
        if (extended := _append(problem, state, rank, kind)) is not None
    ]


def _append(problem: Problem, state: State, rank: int, kind: int) -> State | None:
    p, counts = problem.ranks, state.done
    count = counts[kind][rank]
    last = W if problem.split else I
    if count == problem.micro or (kind != F and count == counts[kind - 1][rank]):
        return None
    forward, ready_backward, ready = list(state.forward), list(state.back), 0
    if kind == F:
        if problem.memory is not None and count - counts[last][rank] >= problem.memory:
            return None
        if rank:
            if not forward[rank - 1]:
                return None
            ready, *waiting = forward[rank - 1]
            forward[rank - 1] = tuple(waiting)
    elif kind == I and rank < p - 1:
        if not ready_backward[rank + 1]:
            return None
        ready, *waiting = ready_backward[rank + 1]
        ready_backward[rank + 1] = tuple(waiting)
    duration = problem.costs[kind] + (problem.costs[W] if kind == I and not problem.split else 0)
    end = max(state.free[rank], ready) + duration
    free = (*state.free[:rank], end, *state.free[rank + 1 :])
    if kind == F and rank < p - 1:
        forward[rank] = (*forward[rank], end)
    if kind == I and rank:
        ready_backward[rank] = (*ready_backward[rank], end)
    # a result that is ready before its user is free may count as ready then
    if rank:
        forward[rank - 1] = tuple(max(x, end) for x in forward[rank - 1])
    if rank < p - 1:
        ready_backward[rank + 1] = tuple(max(x, end) for x in ready_backward[rank + 1])
    row = (*counts[kind][:rank], count + 1, *counts[kind][rank + 1 :])
    return State(
        (*counts[:kind], row, *counts[kind + 1 :]), free, tuple(forward), tuple(ready_backward)
    )


def _bound(problem: Problem, state: State) -> int:
    """A lower bound of the makespan of all orders with this prefix."""
    f, i, w = problem.costs
    i, w = (i, w) if problem.split else (i + w, 0)
    worst = 0
    for rank, free in enumerate(state.free):
        a, b, c = (problem.micro - kind[rank] for kind in state.done)
        worst = max(worst, free + a * f + b * i + c * w)
        if b:
            worst = max(worst, free + a * f + b * i + rank * i + w)
    return worst


def _insert(front: list[State], added: State) -> None:
    flat = _times(added)
    if any(all(x <= y for x, y in zip(_times(state), flat)) for state in front):
        return
    front[:] = [o for o in front if not all(x <= y for x, y in zip(flat, _times(o)))]
    front.append(added)


def _times(state: State) -> list[int]:
    return [*state.free, *(x for row in (*state.forward, *state.back) for x in row)]
