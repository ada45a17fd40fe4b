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
            for variable in pair:
                self.pairs_of[variable].append(pair)
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
        operators = self.problem.operators
        changed = [index for index in range(operators) if choice[index] != self.choice[index]]
        for index in changed:
            self.choice[index] = choice[index]
        ends = {variable for index in changed for pair in self.pairs_of[index] for variable in pair}
        self._price(changed, [variable for variable in ends if variable >= operators])

    def _price(self, changed: Iterable[int], follow: Iterable[int]) -> None:
        """Update values between operators, then the costs of both and of their pairs."""
        seconds, pairs, choice = self.problem.seconds, self.problem.pairs, self.choice
        for follower in follow:
            lines = (line for _, line in self._lines(follower, choice))
            choice[follower] = int(sum(lines, start=seconds[follower]).argmin())
        for variable in (*changed, *follow):
            self.terms[variable,] = float(seconds[variable][choice[variable]])
            for i, j in self.pairs_of[variable]:
                self.terms[i, j] = float(pairs[i, j][choice[i], choice[j]])
            self.lookups += 1 + len(self.pairs_of[variable])

    def _lines(self, variable: int, choice: Sequence[int]) -> Iterator[tuple[int, Costs]]:
        """Yield the neighbours of a variable, with the cost of each of its options given their
        choice."""
        for i, j in self.pairs_of[variable]:
            costs = self.problem.pairs[i, j]
            yield (j, costs[:, choice[j]]) if i == variable else (i, costs[choice[i]])

    def propose_move(self, operator: int, option: int) -> tuple[int, ...]:
        """Give one operator another layout; neighbours follow that the language cannot combine with
        it.

        Returns the unchanged choice where they cannot follow.
        """
        choice, decided, waiting = [*self.choice], {operator}, [operator]
        choice[operator] = option
        for current in waiting:  # grows during the loop
            for i, j in self.pairs_of[current]:
                if math.isfinite(self.problem.pairs[i, j][choice[i], choice[j]]):
                    continue
                neighbour = i + j - current
                if neighbour in decided or not self._follows(neighbour, choice, decided):
                    return tuple(self.choice)
                decided.add(neighbour)
                waiting.append(neighbour)
        return tuple(choice)

    def _follows(self, node: int, choice: list[int], decided: set[int]) -> bool:
        """Choose an option that decided neighbours allow, and that the fewest other neighbours
        forbid."""
        hard, conflicts = self.problem.seconds[node], np.zeros(len(self.problem.seconds[node]))
        for neighbour, line in self._lines(node, choice):
            if neighbour in decided:
                hard = hard + line
            else:
                conflicts += np.isinf(line)
                hard = hard + np.where(np.isinf(line), 0.0, line)
        choice[node] = min(
            range(len(hard)), key=lambda k: (math.isinf(hard[k]), conflicts[k], hard[k])
        )
        return math.isfinite(hard[choice[node]])


def solve_by_walk(problem: Problem, limit: float = math.inf, seed: int = 0) -> Solution | None:
    """Find the quickest choice of at most `limit` bytes on a random walk; None where there is none.

    Starts from the first option of each operator, which splits no tensors; where that is forbidden,
    or too large, from the choice with the fewest bytes.
    """
    free = [k for k, costs in enumerate(problem.seconds[: problem.operators]) if len(costs) > 1]
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
        operator = chance.choice(free)
        return priced.propose_move(operator, chance.randrange(len(problem.seconds[operator])))

    steps, heat = STEPS_PER_OPERATOR * len(free), HEAT / max(1, len(free))
    result = walk(tuple(priced.choice), propose, cost, steps, heat, seed)
    priced.change(result.plan)
    return Solution(tuple(priced.choice), *problem.cost(priced.choice), bound=-math.inf)
