"""The best tree for a chain against every tree there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from schedlang.remat import RematTree, group_places, places_of, region_paths
from schedlang.remat.rotor import ModuleCost, peak_saved, rotor, smallest_tree


def shifted(tree: RematTree, by: int) -> RematTree:
    """The same tree over places further back in a longer chain."""
    return tuple(item + by if isinstance(item, int) else shifted(item, by) for item in tree)


@cache
def parts(count: int) -> tuple[RematTree, ...]:
    """Every tree over so many places, but for those of one region."""
    if count == 0:
        return ((),)
    found = [(0, *shifted(rest, 1)) for rest in trees(count - 1)]
    for end in range(1, count):
        found += [
            (inner, *shifted(rest, end)) for inner in parts(end) for rest in trees(count - end)
        ]
    return tuple(found)


def trees(count: int) -> tuple[RematTree, ...]:
    """Every tree over so many places; no region is all that another holds."""
    return parts(count) + (tuple((inner,) for inner in parts(count)) if count else ())


def chain(n: int, seed: int) -> list[ModuleCost]:
    """Unequal modules, in small whole numbers."""
    draw = random.Random(seed)
    made = []
    for _ in range(n):
        entered = draw.randint(0, 4)
        made.append(ModuleCost(draw.randint(1, 9), entered + draw.randint(0, 9), entered))
    return made


def again(tree: RematTree, chain: Sequence[ModuleCost]) -> float:
    """The work of all second runs: a module runs once more for each region around it."""
    total = 0.0
    for item in tree:
        if isinstance(item, tuple):
            total += sum(chain[place].work for place in places_of(item)) + again(item, chain)
    return total


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_no_tree_is_better(n: int) -> None:
    """For every limit the tree fits and computes least again, among all trees of the chain; below
    the least peak there is none."""
    for seed in range({5: 4, 6: 1}.get(n, 12)):
        costs = chain(n, seed)
        known = [(peak_saved(tree, costs), again(tree, costs)) for tree in trees(n)]
        smallest = min(size for size, _ in known)
        assert smallest_tree(costs)[0] == smallest == peak_saved(smallest_tree(costs)[1], costs)
        assert rotor(costs, smallest - 1) is None
        for memory in range(smallest, peak_saved(tuple(range(n)), costs) + 2):
            tree = rotor(costs, memory)
            assert tree is not None and len(region_paths(tree)) == n
            best = min(work for size, work in known if size <= memory)
            assert peak_saved(tree, costs) <= memory and again(tree, costs) == best, (costs, memory)


def test_more_memory_is_never_slower() -> None:
    """Work falls as the limit rises, to nothing where all is kept; each tree fits, also where
    memory is counted in coarse steps."""
    costs = [ModuleCost(3.0 + k % 3, 700 + 13 * k, 90 + k) for k in range(24)]
    found = []
    for memory in range(smallest_tree(costs)[0], 24 * 900, 1500):
        tree = rotor(costs, memory, slots=300)
        assert tree is not None and peak_saved(tree, costs) <= memory
        found.append(again(tree, costs))
    assert found == sorted(found, reverse=True) and found[-1] == 0


def test_square_root_of_equal_modules() -> None:
    """With the memory of groups of root size the tree computes no more again than they do."""
    costs = [ModuleCost(1.0, 34, 2) for _ in range(16)]
    plain = group_places(16, 4)
    tree = rotor(costs, peak_saved(plain, costs))
    assert tree is not None and again(tree, costs) <= again(plain, costs) == 16
