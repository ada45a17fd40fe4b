"""The repeated blocks of a model, names that are equal in all of them, and fewer that show all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from schedlang.passes.shrinking.depth import LISTS, neighbours

if TYPE_CHECKING:
    from torch import nn

    from schedlang.model import ModelFacts, Site

PROJECTIONS = ("Linear", "Conv1D")
TABLES = ("Embedding", "EmbeddingBag")
LEAVES = (*PROJECTIONS, *TABLES)
LEAST = 2  # projections in a block


def leaf_kind(site: Site) -> str:
    """One of LEAVES, whose weights have dims with names; else nothing."""
    weight = site.parameters.get("weight")
    if weight is None or len(weight.shape) != 2 or "weight" not in site.dims:
        return ""  # another class of that name may lay its weight otherwise
    return next((kind for kind in LEAVES if site.is_a(kind)), "")


CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")


def splits(facts: ModelFacts, fqn: str) -> bool:
    """May a module be one of a pair that is split: one of LEAVES, or a convolution of one group?"""
    site = facts.sites[fqn]
    convolves = any(site.is_a(kind) for kind in CONVOLUTIONS)
    return bool(leaf_kind(site)) or convolves and _groups(facts, fqn) == 1


def _groups(facts: ModelFacts, fqn: str) -> int:
    return int(facts.model.get_submodule(fqn).groups)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Blocks:
    """The lists of blocks of a model, by their names with numbers of outer blocks as `*`."""

    facts: ModelFacts
    lists: frozenset[str]

    def common(self, fqn: str) -> str:
        """The name that a module has in every block: `model.layers.*.mlp.up`."""
        out: list[str] = []
        for part in fqn.split("."):
            out.append("*" if ".".join(out) in self.lists and out else part)
        return ".".join(out)

    def inside(self, fqn: str) -> bool:
        """Does the module stand in a block?"""
        return "*" in self.common(fqn).split(".")  # also for names that are common already

    def is_block(self, fqn: str) -> bool:
        """Is the module a block itself?"""
        return bool(fqn) and self.common(fqn).endswith(".*")

    @cached_property
    def named(self) -> Mapping[str, tuple[str, ...]]:
        """The modules of each common name, in model order."""
        found: dict[str, list[str]] = {}
        for fqn in self.facts.sites:
            found.setdefault(self.common(fqn), []).append(fqn)
        return {name: tuple(group) for name, group in found.items()}

    def of(self, facts: ModelFacts) -> Blocks:
        """The same lists in a model that has fewer blocks."""
        return Blocks(facts, self.lists)


def blocks_of(facts: ModelFacts) -> Blocks:
    """Lists of two or more blocks of one class, or of a single one that is called again and again.

    A block has at least two projections.
    """
    below: Counter[str] = Counter()
    for fqn, site in facts.sites.items():
        weights = (fact for fact in site.parameters.values() if len(fact.shape) > 1)
        if any(True for _ in weights) and leaf_kind(site) not in TABLES:
            parts = fqn.split(".")
            below.update(".".join(parts[:k]) for k in range(1, len(parts)))
    made = Blocks(facts, frozenset())
    for fqn, site in facts.sites.items():
        if fqn and any(site.is_a(kind) for kind in LISTS) and _repeats(facts, site, below):
            made = Blocks(facts, made.lists | {made.common(fqn)})
    return made


def _repeats(facts: ModelFacts, site: Site, below: Counter[str]) -> bool:
    blocks = [f"{site.fqn}.{child}" for child in site.children]
    enough = [fqn for fqn in blocks if below[fqn] >= LEAST]
    classes = Counter(facts.sites[fqn].class_name for fqn in enough)
    return len(blocks) == len(enough) and (len(blocks) == 1 or max(classes.values(), default=0) > 1)


def shorter(model: nn.Module, blocks: Blocks, stages: int = 1) -> nn.Module:
    """The model on the meta device with the fewest blocks that show all kinds and neighbours."""
    from schedlang.runtime.recording.meta import hollow_model

    kept = {}
    for common in blocks.lists:
        for fqn in blocks.named.get(common, ()):
            children = blocks.facts.children(fqn)
            kinds = [_kind(blocks.facts, f"{fqn}.{child}") for child in children]
            places = fewest(kinds, stages)
            if len(places) < len(children):
                kept[fqn] = [children[place] for place in places]
    return hollow_model(model, {}, kept)


def _kind(facts: ModelFacts, root: str) -> object:
    inside = (f for f in facts.sites if f == root or f.startswith(f"{root}."))
    return frozenset((f[len(root) :], facts.sites[f].kind) for f in inside)


def fewest(kinds: Sequence[object], stages: int = 1) -> list[int]:
    """Places from both ends of a list that have all of its kinds, next to all their neighbours.

    For several stages they divide as the whole list does, with two a stage where it has two.
    """
    whole, count = neighbours(kinds), len(kinds)
    least = min(count, min(2, max(1, count // stages)) * stages)
    for size in range(max(1, least), count):
        if (size % stages == 0) != (count % stages == 0):
            continue
        for front in range(size, -1, -1):
            places = [*range(front), *range(count - size + front, count)]
            if neighbours([kinds[place] for place in places]) == whole:
                return places
    return list(range(count))
