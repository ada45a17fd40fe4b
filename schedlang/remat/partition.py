"""What runs of modules repeat on each stage of a pipeline, within the memory that it has for each.

Sun et al., AdaPipe: optimizing pipeline parallelism with adaptive recomputation and partitioning
(2024): a stage that keeps more microbatches at a time has less memory for each, so it repeats more,
and gets fewer modules. The cut that balances the stages asks here for every run of modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedlang.remat.operators import START, Fitted, extended
from schedlang.remat.rotor import Cost


class Repeated:
    """The least work again of runs of modules; runs of alike modules are looked at once."""

    def __init__(self, chain: Sequence[Cost], memory: Sequence[int]) -> None:
        numbers: dict[Cost, int] = {}
        self._kinds = [numbers.setdefault(cost, len(numbers)) for cost in chain]
        self._costs = list(numbers)
        self.memory = tuple(memory)  # by stage, for one microbatch
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Fitted, ...]] = {}

    def of(self, stage: int, low: int, high: int) -> float:
        """Of the modules low to high - 1 on a stage; infinite where its memory holds no choice."""
        found = self._fitted(self.memory[stage], tuple(self._kinds[low:high]))
        return found[-1].again if found else math.inf

    def _fitted(self, memory: int, kinds: tuple[int, ...]) -> tuple[Fitted, ...]:
        if not kinds:
            return START
        known = next(
            k for k in range(len(kinds), -1, -1) if k == 0 or (memory, kinds[:k]) in self._known
        )
        found = self._known[memory, kinds[:known]] if known else START
        for end in range(known, len(kinds)):
            found = extended(found, self._costs[kinds[end]], memory)
            self._known[memory, kinds[: end + 1]] = found
        return found
