"""checkpoint(plan=rotor): the tree of regions is optimal, compared with all trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from schedlang.remat import RematTree, group_places, places_of, region_paths
from schedlang.remat.rotor import ModuleCost, peak_saved, rotor, smallest_tree


def shift_tree(tree: RematTree, offset: int) -> RematTree:
    """Return the tree moved to later modules of a longer chain."""
    return tuple(
        item + offset if isinstance(item, int) else shift_tree(item, offset) for item in tree
    )


@cache
def proper_trees(count: int) -> tuple[RematTree, ...]:
    """Return every tree over `count` modules that is not a single region."""
    if count == 0:
        return ((),)
    result = [(0, *shift_tree(rest, 1)) for rest in all_trees(count - 1)]
    for end in range(1, count):
        result += [
            (inner, *shift_tree(rest, end))
            for inner in proper_trees(end)
            for rest in all_trees(count - end)
        ]
    return tuple(result)


def all_trees(count: int) -> tuple[RematTree, ...]:
    """Return every tree over `count` modules; no region contains just one region."""
    return proper_trees(count) + (tuple((inner,) for inner in proper_trees(count)) if count else ())


def random_chain(n: int, seed: int) -> list[ModuleCost]:
    """Return different modules, in small integers."""
    rng = random.Random(seed)
    costs = []
    for _ in range(n):
        input_bytes = rng.randint(0, 4)
        costs.append(ModuleCost(rng.randint(1, 9), input_bytes + rng.randint(0, 9), input_bytes))
    return costs


def repeated_work(tree: RematTree, costs: Sequence[ModuleCost]) -> float:
    """Return the repeated work: a module runs once more for each region around it."""
    total = 0.0
    for item in tree:
        if isinstance(item, tuple):
            total += sum(costs[index].work for index in places_of(item)) + repeated_work(
                item, costs
            )
    return total


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_no_tree_is_better(n: int) -> None:
    """For every limit the tree fits and repeats the least work of all trees; below the least peak
    there is none."""
    for seed in range({5: 4, 6: 1}.get(n, 12)):
        costs = random_chain(n, seed)
        possible = [(peak_saved(tree, costs), repeated_work(tree, costs)) for tree in all_trees(n)]
        smallest = min(size for size, _ in possible)
        assert smallest_tree(costs)[0] == smallest == peak_saved(smallest_tree(costs)[1], costs)
        assert rotor(costs, smallest - 1) is None
        for memory in range(smallest, peak_saved(tuple(range(n)), costs) + 2):
            tree = rotor(costs, memory)
            assert tree is not None and len(region_paths(tree)) == n
            best = min(work for size, work in possible if size <= memory)
            assert peak_saved(tree, costs) <= memory and repeated_work(tree, costs) == best, (
                costs,
                memory,
            )


def test_more_memory_is_never_slower() -> None:
    """Work falls as the limit rises, to zero where all is kept; trees fit in coarse memory steps
    too."""
    costs = [ModuleCost(3.0 + k % 3, 700 + 13 * k, 90 + k) for k in range(24)]
    works = []
    for memory in range(smallest_tree(costs)[0], 24 * 900, 1500):
        tree = rotor(costs, memory, slots=300)
        assert tree is not None and peak_saved(tree, costs) <= memory
        works.append(repeated_work(tree, costs))
    assert works == sorted(works, reverse=True) and works[-1] == 0


def test_square_root_of_equal_modules() -> None:
    """In the memory of groups of root size the tree repeats no more work."""
    costs = [ModuleCost(1.0, 34, 2) for _ in range(16)]
    plain = group_places(16, 4)
    tree = rotor(costs, peak_saved(plain, costs))
    assert tree is not None and repeated_work(tree, costs) <= repeated_work(plain, costs) == 16
