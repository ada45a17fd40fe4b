"""Every figure of memory in one run: python -m tests.benchmarks.memory [--quick]

What each row keeps of a GPT-2 with 24 layers, counted on the meta device, beside the formula of
Korthikanti et al. (2022); the plans of `rotor` beside every tree of regions there is; what a head
and its loss hold at most.  With `--quick` the head is left out, which alone takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from schedlang.remat.rotor import peak_saved, rotor, smallest_tree
from tests.benchmarks import head_memory, kept
from tests.memory.test_rotor import again, chain, trees


def chains(most: int = 6) -> Iterator[tuple[int, int, int, int]]:
    """For chains of 1 to `most` modules: trees, limits tried, plans as quick as the best."""
    for count in range(1, most + 1):
        tried = equal = 0
        every = trees(count)
        for seed in range({5: 4, 6: 1}.get(count, 12)):
            costs = chain(count, seed)
            known = [(peak_saved(tree, costs), again(tree, costs)) for tree in every]
            for memory in range(
                smallest_tree(costs)[0], peak_saved(tuple(range(count)), costs) + 1
            ):
                found = rotor(costs, memory)
                best = min(work for size, work in known if size <= memory)
                tried += 1
                equal += found is not None and again(found, costs) == best
        yield count, len(every), tried, equal


def main(words: list[str]) -> None:
    """The three tables, one after the other."""
    kept.table()
    print(f"\n{'rotor: modules':20}{'trees':>12}{'limits':>12}{'best':>8}", flush=True)
    for count, every, tried, equal in chains():
        print(f"{count:<20}{every:12d}{tried:12d}{equal:8d}", flush=True)
    if "--quick" not in words:
        print("\nlinear and cross-entropy, forward and backward", flush=True)
        sys.argv = sys.argv[:1]
        head_memory.main()


if __name__ == "__main__":
    main(sys.argv[1:])
