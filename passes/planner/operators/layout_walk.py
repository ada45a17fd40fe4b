"""Random walk over layouts of operators, with incremental costs.

FlexFlow (Jia, Zaharia & Aiken, MLSys 2019) moves from strategy to strategy by the layout of one
operator at a time, and simulates again only what the change affects.  The result comes close to
the solver's proven optimum.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from schedlang.passes.planner.operators.solver import Costs, Problem, Solution, solve_smallest
from schedlang.passes.planner.random_walk import walk

STEPS_PER_OPERATOR = 100  # steps for each operator that has a choice
HEAT = 0.3  # temperature, as a share of the mean cost of an operator


class IncrementalCost:
    """A choice and its incremental cost; values between operators follow, each by its best
    option."""

    def __init__(self, problem: Problem, choice: Sequence[int]) -> None:
        self.problem, self.choice = problem, [*choice]
        self.pairs_of: list[list[tuple[int, int]]] = [[] for _ in choice]
        for pair in problem.pairs:
            for one in pair:
                self.pairs_of[one].append(pair)
        self.terms: dict[tuple[int, ...], float] = {}
        self.lookups = 0  # number of costs that were looked up
        self._price(range(problem.operators), range(problem.operators, len(choice)))

    @property
    def seconds(self) -> float:
        """The sum of all costs: exactly the problem's own, independent of earlier changes."""
        return math.fsum(self.terms.values())

    def change(self, choice: Sequence[int]) -> None:
        """Move to another choice of operators; operators that differ, and their edges, are priced
        again."""
        own = self.problem.operators
        moved = [at for at in range(own) if choice[at] != self.choice[at]]
        for at in moved:
            self.choice[at] = choice[at]
        ends = {one for at in moved for pair in self.pairs_of[at] for one in pair}
        self._price(moved, [one for one in ends if one >= own])

    def _price(self, moved: Iterable[int], follow: Iterable[int]) -> None:
        """Update values between operators, then the costs of both and of their pairs."""
        seconds, pairs, choice = self.problem.seconds, self.problem.pairs, self.choice
        for one in follow:
            lines = (line for _, line in self._lines(one, choice))
            choice[one] = int(sum(lines, start=seconds[one]).argmin())
        for at in (*moved, *follow):
            self.terms[at,] = float(seconds[at][choice[at]])
            for i, j in self.pairs_of[at]:
                self.terms[i, j] = float(pairs[i, j][choice[i], choice[j]])
            self.lookups += 1 + len(self.pairs_of[at])

    def _lines(self, at: int, choice: Sequence[int]) -> Iterator[tuple[int, Costs]]:
        """Yield the neighbours of a variable, with the cost of each of its options given their
        choice."""
        for i, j in self.pairs_of[at]:
            costs = self.problem.pairs[i, j]
            yield (j, costs[:, choice[j]]) if i == at else (i, costs[choice[i]])

    def propose_move(self, at: int, option: int) -> tuple[int, ...]:
        """Give one operator another layout; neighbours follow that the language cannot combine with
        it.

        Returns the unchanged choice where they cannot follow.
        """
        choice, done, waiting = [*self.choice], {at}, [at]
        choice[at] = option
        for one in waiting:  # grows during the loop
            for i, j in self.pairs_of[one]:
                if math.isfinite(self.problem.pairs[i, j][choice[i], choice[j]]):
                    continue
                other = i + j - one
                if other in done or not self._follows(other, choice, done):
                    return tuple(self.choice)
                done.add(other)
                waiting.append(other)
        return tuple(choice)

    def _follows(self, at: int, choice: list[int], done: set[int]) -> bool:
        """Choose an option that decided neighbours allow, and that the fewest other neighbours
        forbid."""
        hard, wrong = self.problem.seconds[at], np.zeros(len(self.problem.seconds[at]))
        for other, line in self._lines(at, choice):
            if other in done:
                hard = hard + line
            else:
                wrong += np.isinf(line)
                hard = hard + np.where(np.isinf(line), 0.0, line)
        choice[at] = min(range(len(hard)), key=lambda k: (math.isinf(hard[k]), wrong[k], hard[k]))
        return math.isfinite(hard[choice[at]])


def solve_by_walk(problem: Problem, limit: float = math.inf, seed: int = 0) -> Solution | None:
    """Find the quickest choice of at most `limit` bytes on a random walk; None where there is none.

    Starts from the first option of each operator, which splits no tensors; where that is forbidden,
    or too large, from the choice with the fewest bytes.
    """
    free = [k for k, one in enumerate(problem.seconds[: problem.operators]) if len(one) > 1]
    priced = IncrementalCost(problem, [0] * len(problem.seconds))

    def cost(choice: Sequence[int]) -> float:
        priced.change(choice)
        fits = math.isinf(limit) or problem.cost(priced.choice)[1] <= limit
        return priced.seconds if fits else math.inf

    if math.isinf(cost(priced.choice)):
        fewest = solve_smallest(problem)
        if fewest is None or math.isinf(cost(fewest.choice)):
            return None

    def propose(choice: tuple[int, ...], chance: random.Random) -> tuple[int, ...]:
        priced.change(choice)
        at = chance.choice(free)
        return priced.propose_move(at, chance.randrange(len(problem.seconds[at])))

    steps, heat = STEPS_PER_OPERATOR * len(free), HEAT / max(1, len(free))
    found = walk(tuple(priced.choice), propose, cost, steps, heat, seed)
    priced.change(found.plan)
    return Solution(tuple(priced.choice), *problem.cost(priced.choice), bound=-math.inf)
