"""Branch and bound over all orders of a small pipeline: is there one that is faster?

Independent of the searches that it judges: microbatches are alike, so each rank takes them in order
and an order is a sequence of F, I and W per rank. Prefixes are grown one operation at a time; of
two with the same operations done the one that is nowhere later is kept.
"""

from __future__ import annotations

from typing import NamedTuple

F, I, W = range(3)  # noqa: E741


class Problem(NamedTuple):
    """One stage on each rank; whole costs; activations are held from F to the end of W (or I)."""

    ranks: int
    micro: int
    costs: tuple[int, int, int]
    memory: int | None = None
    split: bool = True


class State(NamedTuple):
    """Operations done [kind][rank], when ranks are free, and results that wait to be used."""

    done: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]
    forward: tuple[tuple[int, ...], ...]  # ends of F on rank r that rank r + 1 has not used
    back: tuple[tuple[int, ...], ...]  # ends of I on rank r that rank r - 1 has not used


def faster(problem: Problem, than: int) -> bool:
    """Whether any order ends before `than`."""
    p = problem.ranks
    nothing = ((),) * p
    states = [State(((0,) * p,) * 3, (0,) * p, nothing, nothing)]
    for _ in range(p * problem.micro * (3 if problem.split else 2)):
        fronts: dict[tuple[tuple[int, ...], ...], list[State]] = {}
        for state in states:
            for new in _grown(problem, state):
                if _bound(problem, new) < than:
                    _keep(fronts.setdefault(new.done, []), new)
        states = [state for front in fronts.values() for state in front]
    return bool(states)


def _grown(problem: Problem, state: State) -> list[State]:
    return [
        new
        for rank in range(problem.ranks)
        for kind in ((F, I, W) if problem.split else (F, I))
        if (new := _after(problem, state, rank, kind)) is not None
    ]


def _after(problem: Problem, state: State, rank: int, kind: int) -> State | None:
    p, done = problem.ranks, state.done
    count = done[kind][rank]
    last = W if problem.split else I
    if count == problem.micro or (kind != F and count == done[kind - 1][rank]):
        return None
    forward, back, ready = list(state.forward), list(state.back), 0
    if kind == F:
        if problem.memory is not None and count - done[last][rank] >= problem.memory:
            return None
        if rank:
            if not forward[rank - 1]:
                return None
            ready, *left = forward[rank - 1]
            forward[rank - 1] = tuple(left)
    elif kind == I and rank < p - 1:
        if not back[rank + 1]:
            return None
        ready, *left = back[rank + 1]
        back[rank + 1] = tuple(left)
    took = problem.costs[kind] + (problem.costs[W] if kind == I and not problem.split else 0)
    end = max(state.free[rank], ready) + took
    free = (*state.free[:rank], end, *state.free[rank + 1 :])
    if kind == F and rank < p - 1:
        forward[rank] = (*forward[rank], end)
    if kind == I and rank:
        back[rank] = (*back[rank], end)
    # an end before its user is free is as good as any other
    if rank:
        forward[rank - 1] = tuple(max(x, end) for x in forward[rank - 1])
    if rank < p - 1:
        back[rank + 1] = tuple(max(x, end) for x in back[rank + 1])
    row = (*done[kind][:rank], count + 1, *done[kind][rank + 1 :])
    return State((*done[:kind], row, *done[kind + 1 :]), free, tuple(forward), tuple(back))


def _bound(problem: Problem, state: State) -> int:
    """No order that begins so ends earlier."""
    f, i, w = problem.costs
    i, w = (i, w) if problem.split else (i + w, 0)
    worst = 0
    for rank, free in enumerate(state.free):
        a, b, c = (problem.micro - kind[rank] for kind in state.done)
        worst = max(worst, free + a * f + b * i + c * w)
        if b:
            worst = max(worst, free + a * f + b * i + rank * i + w)
    return worst


def _keep(front: list[State], new: State) -> None:
    flat = _times(new)
    if any(all(x <= y for x, y in zip(_times(old), flat)) for old in front):
        return
    front[:] = [o for o in front if not all(x <= y for x, y in zip(flat, _times(o)))]
    front.append(new)


def _times(state: State) -> list[int]:
    return [*state.free, *(x for row in (*state.forward, *state.back) for x in row)]
