"""All memory benchmarks in one run: python -m tests.benchmarks.memory [--quick]

Saved bytes of a GPT-2 with 24 layers under each row, counted on the meta device, beside the
formula of Korthikanti et al. (2022); plans of `rotor` against all trees of regions; the peak
memory of a head and its loss.  `--quick` leaves out the head, which takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from schedlang.remat.rotor import peak_saved, rotor, smallest_tree
from tests.benchmarks import head_memory, kept
from tests.memory.test_rotor import all_trees, random_chain, repeated_work


def rotor_optima(max_modules: int = 6) -> Iterator[tuple[int, int, int, int]]:
    """Yield for chains of 1 to `max_modules`: trees, limits tried, and how often rotor is best."""
    for count in range(1, max_modules + 1):
        tried = equal = 0
        every = all_trees(count)
        for seed in range({5: 4, 6: 1}.get(count, 12)):
            costs = random_chain(count, seed)
            costs_of_trees = [
                (peak_saved(tree, costs), repeated_work(tree, costs)) for tree in every
            ]
            for memory in range(
                smallest_tree(costs)[0], peak_saved(tuple(range(count)), costs) + 1
            ):
                chosen_tree = rotor(costs, memory)
                best = min(recomputed for size, recomputed in costs_of_trees if size <= memory)
                tried += 1
                equal += chosen_tree is not None and repeated_work(chosen_tree, costs) == best
        yield count, len(every), tried, equal


def main(arguments: list[str]) -> None:
    """Print the three tables."""
    kept.table()
    print(f"\n{'rotor: modules':20}{'trees':>12}{'limits':>12}{'best':>8}", flush=True)
    for count, tree_count, tried, equal in rotor_optima():
        print(f"{count:<20}{tree_count:12d}{tried:12d}{equal:8d}", flush=True)
    if "--quick" not in arguments:
        print("\nlinear and cross-entropy, forward and backward", flush=True)
        sys.argv = sys.argv[:1]
        head_memory.main()


if __name__ == "__main__":
    main(sys.argv[1:])
